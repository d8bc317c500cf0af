"""Every error: one line of what failed, one of what to do, and the exit code."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mergegit.storage.location
from mergegit import Repository
from mergegit.errors import MergegitError
from tests.checkpoint.handmade import entry, write
from tests.cli.conftest import CommandLine, Result, environment, run
from tests.families import Family, save_checkpoint, tiny_checkpoint
from tests.handmade import Raw, write_safetensors
from tests.repository.prefixes import two_commits_that_share_a_prefix
from tests.trees import fingerprint

IN_A_REPOSITORY = (
    ("add", "model"), ("checkout", "base", "out"), ("plan", "math"), ("merge", "math"),
    ("log",), ("show", "base"), ("status",), ("branch",), ("branch", "x", "base"),
    ("branch", "-d", "x"), ("tag",), ("fsck",), ("fsck", "--rebuild-catalog"), ("repack",),
)  # fmt: skip

WITH_A_REF = (
    ("log", "{}"), ("show", "{}"), ("checkout", "{}", "out"), ("branch", "new", "{}"),
    ("tag", "new", "{}"), ("plan", "{}"), ("plan", "math", "--base", "{}"), ("merge", "{}", "math"),
    ("add", "model", "--base", "{}"), ("repack", "{}"),
)  # fmt: skip


def named(arguments: tuple[str, ...]) -> str:
    return " ".join(arguments)


# -- where, and what ------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", IN_A_REPOSITORY, ids=named)
def test_outside_a_repository(arguments: tuple[str, ...], nowhere: CommandLine) -> None:
    message, hint = nowhere(*arguments).failed()
    assert message.startswith(f"{nowhere.directory.resolve()} is not in a mergegit repository")
    assert "`mergegit init`" in hint


def test_in_a_directory_that_is_not_there(nowhere: CommandLine) -> None:
    for arguments in (("-C", "missing", "log"), ("log", "-C", "missing")):
        assert nowhere(*arguments).failed(2)[0] == "there is no directory missing"


@pytest.mark.parametrize("arguments", WITH_A_REF, ids=named)
def test_an_unknown_ref(arguments: tuple[str, ...], mergegit: CommandLine) -> None:
    tiny_checkpoint(mergegit.directory / "model", moved=9)
    before = fingerprint(mergegit.directory)
    message, hint = mergegit(*(word.format("mathh") for word in arguments)).failed()
    assert message == "there is no branch, tag or commit 'mathh'"
    assert hint == "did you mean math?"
    assert fingerprint(mergegit.directory) == before


@pytest.mark.parametrize("arguments", WITH_A_REF, ids=named)
def test_an_ambiguous_prefix(arguments: tuple[str, ...], mergegit: CommandLine) -> None:
    tiny_checkpoint(mergegit.directory / "model", moved=9)
    with Repository.open(mergegit.directory) as repository:
        prefix = two_commits_that_share_a_prefix(repository)[0].hex()[:4]
    message, hint = mergegit(*(word.format(prefix) for word in arguments)).failed()
    assert message.startswith(f"'{prefix}' is the beginning of 2 commits: ")
    assert hint == "give more characters"


def test_a_repository_made_by_a_newer_version(mergegit: CommandLine) -> None:
    (mergegit.directory / ".mergegit" / "format").write_text("mergegit repository 2\n")
    for arguments in (*IN_A_REPOSITORY, ("init",)):
        message, hint = mergegit(*arguments).failed()
        assert "has format 2; this mergegit knows formats up to 1" in message
        assert hint == "upgrade mergegit"


def test_a_repository_that_does_not_say_its_format(mergegit: CommandLine) -> None:
    (mergegit.directory / ".mergegit" / "format").write_text("something\n")
    message, hint = mergegit("log").failed()
    assert "does not say which format" in message
    assert "mergegit repository 1" in hint


def test_a_file_system_that_will_not_do(
    nowhere: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mergegit.storage.location, "file_system_type", lambda _path: "nfs4")
    message, hint = nowhere("init").failed()
    assert "lies on a network file system (nfs4)" in message
    assert hint == "keep the repository on a local disk"
    assert not (nowhere.directory / ".mergegit" / "format").exists()


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        ["sh", "-c", f"rmdir ../gone && '{sys.executable}' -m mergegit log"],
        cwd=tmp_path / "gone",
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    result = Result(done.returncode, done.stdout, done.stderr)
    assert result.failed()[0] == "the working directory is not there any more"


def test_a_file_where_the_repository_should_be(nowhere: CommandLine) -> None:
    (nowhere.directory / ".mergegit").touch()
    message, hint = nowhere("init").failed()
    assert ".mergegit is in the way" in message
    assert hint == "choose another directory"


# -- checkpoints ----------------------------------------------------------------------------------


def truncated(path: Path) -> None:
    tiny_checkpoint(path)
    os.truncate(path / "model.safetensors", 900)


def header_longer_than_the_file(path: Path) -> None:
    path.mkdir()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 5000) + b"{}")


def header_beyond_the_limit(path: Path) -> None:
    path.mkdir()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


def overlapping_offsets(path: Path) -> None:
    header = {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}
    write(path / "model.safetensors", header, bytes(6))


def offsets_out_of_range(path: Path) -> None:
    header = {"a": entry("U8", [4], 0, 4), "b": entry("U8", [400], 4, 404)}
    write(path / "model.safetensors", header, bytes(8))


def header_that_is_not_json(path: Path) -> None:
    write(path / "model.safetensors", b'{"a": ')


def shape_of_another_length(path: Path) -> None:
    write(path / "model.safetensors", {"a": entry("F32", [4], 0, 4)}, bytes(4))


def unknown_dtype(path: Path) -> None:
    write(path / "model.safetensors", {"a": entry("F128", [1], 0, 16)}, bytes(16))


def config_that_is_not_json(path: Path) -> None:
    tiny_checkpoint(path)
    (path / "config.json").write_text('{"num_hidden_layers": ')


def index_that_is_not_json(path: Path) -> None:
    tiny_sharded(path)
    (path / "model.safetensors.index.json").write_text("[]")


def index_of_nothing(path: Path) -> None:
    tiny_sharded(path)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')


def index_that_leads_outside(path: Path) -> None:
    tiny_sharded(path)
    index = {"weight_map": {"a": "../other.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def missing_shard(path: Path) -> None:
    tiny_sharded(path)
    (path / "model-00002-of-00002.safetensors").unlink()


def missing_shard_without_an_index(path: Path) -> None:
    missing_shard(path)
    (path / "model.safetensors.index.json").unlink()


def tensor_that_the_index_places_elsewhere(path: Path) -> None:
    tiny_sharded(path)
    index = {"weight_map": {"a": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def one_name_in_two_shards(path: Path) -> None:
    for number in (1, 2):
        tensors = {"a": Raw.random("F32", 4, seed=number)}
        write_safetensors(path / f"model-0000{number}-of-00002.safetensors", tensors)


def no_weights_at_all(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")


def legacy_weights(path: Path) -> None:
    path.mkdir()
    (path / "pytorch_model.bin").write_bytes(b"PK")


def link_to_nothing(path: Path) -> None:
    tiny_checkpoint(path)
    (path / "vocab.json").symlink_to("nowhere.json")


def link_in_a_circle(path: Path) -> None:
    tiny_checkpoint(path)
    (path / "vocab.json").symlink_to("vocab.json")


def link_to_a_directory_above(path: Path) -> None:
    tiny_checkpoint(path)
    (path / "again").symlink_to(".")


def pipe_among_the_files(path: Path) -> None:
    tiny_checkpoint(path)
    os.mkfifo(path / "pipe")


def not_there(_path: Path) -> None:
    pass


def tiny_sharded(path: Path) -> None:
    for number, name in enumerate("ab", start=1):
        tensors = {name: Raw.random("F32", 4, seed=number)}
        write_safetensors(path / f"model-0000{number}-of-00002.safetensors", tensors)
    weight_map = {name: f"model-0000{n}-of-00002.safetensors" for n, name in enumerate("ab", 1)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


BAD_CHECKPOINTS: dict[Callable[[Path], None], str] = {
    truncated: "is truncated: 900 bytes of",
    header_longer_than_the_file: "claims a header of 5,000 bytes, but is 10 bytes long",
    header_beyond_the_limit: "claims a header of 1,152,921,504,606,846,976 bytes; at most",
    overlapping_offsets: "tensor b overlaps the one before",
    offsets_out_of_range: "is truncated",
    header_that_is_not_json: "has a header that is not valid JSON",
    shape_of_another_length: "gives tensor a 4 bytes, where F32 [4] takes 16",
    unknown_dtype: "gives tensor a the unknown dtype 'F128'",
    config_that_is_not_json: "config.json is not valid JSON",
    index_that_is_not_json: "model.safetensors.index.json is not a JSON object",
    index_of_nothing: "has no weight_map of tensor names to files",
    index_that_leads_outside: "names the file '../other.safetensors', which can't be a shard",
    missing_shard: "shard model-00002-of-00002.safetensors of model is missing",
    missing_shard_without_an_index: "shard model-00002-of-00002.safetensors of model is missing",
    tensor_that_the_index_places_elsewhere: "lacks tensor a",
    one_name_in_two_shards: "tensor a stands in both",
    no_weights_at_all: "model holds no safetensors files",
    legacy_weights: "pytorch_model.bin is not a file of PyTorch 1.6 or newer",
    link_to_nothing: "vocab.json is a link to a file that is not there",
    link_in_a_circle: "vocab.json",
    link_to_a_directory_above: "again is a link to a directory above it",
    pipe_among_the_files: "pipe is neither a file nor a directory",
    not_there: "there is no checkpoint at model",
}


@pytest.mark.parametrize("spoil", BAD_CHECKPOINTS, ids=lambda spoil: spoil.__name__)
def test_a_bad_checkpoint(spoil: Callable[[Path], None], mergegit: CommandLine) -> None:
    spoil(mergegit.directory / "model")
    before = fingerprint(mergegit.directory / ".mergegit")
    message, hint = mergegit("add", "model").failed()
    assert BAD_CHECKPOINTS[spoil] in message
    assert "model" in message
    assert hint
    assert fingerprint(mergegit.directory / ".mergegit") == before


def test_legacy_weights_come_with_a_way_out(mergegit: CommandLine) -> None:
    legacy_weights(mergegit.directory / "model")
    assert "save it again with a newer torch" in mergegit("add", "model").failed()[1]


def test_a_file_that_is_no_checkpoint(mergegit: CommandLine) -> None:
    (mergegit.directory / "notes.txt").touch()
    message, _ = mergegit("add", "notes.txt").failed()
    assert message == "notes.txt is not a .safetensors file"


# -- what can't be merged -------------------------------------------------------------------------


def test_shapes_that_do_not_match(mergegit: CommandLine, family: Family) -> None:
    mergegit.ok("add", family.experts[0], "--name", "other", "--no-base")
    message, hint = mergegit("merge", "math", "other", "--base", "base").failed()
    assert "tensor model.embed_tokens.weight is [24, 8] in base but [700, 96] in other" in message
    assert "--base" in hint


def test_a_vocabulary_of_another_length(mergegit: CommandLine, tmp_path: Path) -> None:
    tensors = {name: Raw.random("BF16", *shape) for name, shape in (
        ("model.embed_tokens.weight", (25, 8)), ("model.layers.0.mlp.up_proj.weight", (40, 8)),
        ("model.norm.weight", (8,)),
    )}  # fmt: skip
    write_safetensors(tmp_path / "longer.safetensors", tensors)
    mergegit.ok("add", tmp_path / "longer.safetensors", "--no-base")
    message, hint = mergegit("merge", "longer", "--base", "base").failed()
    assert "tensor model.embed_tokens.weight is [24, 8] in base but [25, 8] in longer" in message
    assert "vocabular" in hint


def test_a_tensor_that_the_base_lacks(mergegit: CommandLine, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "more", moved=9)
    write_safetensors(path / "model.safetensors", {"extra": Raw.random("BF16", 4)})
    mergegit.ok("add", path, "--no-base")
    message, hint = mergegit("merge", "more", "--base", "base").failed()
    assert "expert more has tensor extra, which base base lacks" in message
    assert "--ignore-extra" in hint


def test_an_expert_without_a_base(mergegit: CommandLine) -> None:
    message, hint = mergegit("merge", "base").failed()
    assert message == "base was added without a base"
    assert "--base REF" in hint


def test_experts_without_a_common_ancestor(mergegit: CommandLine, tmp_path: Path) -> None:
    mergegit.ok("add", tiny_checkpoint(tmp_path / "alone", seed=5), "--no-base")
    message, hint = mergegit("merge", "math", "alone").failed()
    assert message == "math, alone have no common ancestor"
    assert "--base REF" in hint


def test_nan_among_the_weights(mergegit: CommandLine, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    path = tiny_checkpoint(tmp_path / "broken", moved=9)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    shutil.rmtree(path)
    save_checkpoint(path, tensors, shards=1)
    assert mergegit("add", path).code == 0
    message, hint = mergegit("merge", "math", "broken").failed()
    assert "tensor model.norm.weight of expert broken holds 1" in message
    assert "--allow-nonfinite" in hint


# -- what can't be asked --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said", "advice"),
    [
        (["--method", "tise"], "there is no method 'tise'", "ties"),
        (["-p", "densty=0.5"], "method task_arithmetic has no parameter 'densty'", "weight"),
        (["--method=ties", "-p", "density=3"], "density is 3; it must be at least 0", "share"),
        (["-p", "weight=nan"], "weight is nan, not a finite number", "finite"),
        (["-p", "weight=true"], "weight is True, not a number", "weight"),
        (["-p", "normalize=2"], "normalize is 2.0, not true or false", "normalize"),
        (
            ["-p", "prose.weight=2"],
            "'prose.weight' names 'prose', which is no expert",
            "math, code",
        ),
        (["-p", "math.lambda=2"], "an expert can't have a lambda of its own", "lambda"),
        (["--budget", "ten"], "'ten' is not a budget", "10%"),
        (["--budget", "-5"], "'-5' is not a budget", "10%"),
        (["--budget", "10 apples"], "'10 apples' is not a budget", "2GiB"),
        (["--budget", "110%"], "a budget of 110% is more than everything", "100%"),
        (["--budget", ""], "'' is not a budget", "10%"),
    ],
)
def test_a_bad_recipe(options: list[str], said: str, advice: str, mergegit: CommandLine) -> None:
    before = fingerprint(mergegit.directory)
    for command in ("plan", "merge"):
        message, hint = mergegit(command, "math", "code", *options).failed()
        assert said in message
        assert advice in hint
    assert fingerprint(mergegit.directory) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-p", "weight"], "'weight' is not of the form KEY=VALUE"),
        (["-p", "=2"], "'=2' is not of the form KEY=VALUE"),
        (["-p", "weight=1", "-p", "weight=2"], "weight is given more than once"),
        (["-p", "weight=much"], "weight is 'much', not a number, true, false or a gradient"),
        (["--dtype", "int8"], "'int8' is not one of float32"),
        (["--seed", "x"], "'x' is not a valid integer"),
        (["--threads", "0"], "0 is not in the range"),
    ],
)
def test_wrong_usage(options: list[str], said: str, mergegit: CommandLine) -> None:
    for command in ("plan", "merge"):
        message, hint = mergegit(command, "math", "code", *options).failed(2)
        assert said in message
        assert hint == f"`mergegit {command} --help` shows how it is used"


@pytest.mark.parametrize("name", ["a b", "a..b", "deadbeef", "-", "a\x07b", "caf\udce9", ""])
def test_a_bad_branch_name(name: str, mergegit: CommandLine) -> None:
    for arguments in (("branch", "--", name, "math"), ("merge", "math", "-b", name)):
        message, hint = mergegit(*arguments).failed()
        assert "can't be the name of a branch" in message
        assert hint


def test_a_message_that_is_not_utf8(mergegit: CommandLine, tiny_family: Family) -> None:
    message, _ = mergegit("merge", "math", "-m", "caf\udce9").failed(2)
    assert "it is not UTF-8" in message


# -- the machine ----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB, where this user may mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("mounting takes root")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], check=False)
    if done.returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield path
    unmount(path)


def unmount(path: Path) -> None:
    """Unmount a file system, even one that a command still holds open; that is an error, too."""
    if subprocess.run(["umount", path], check=False).returncode != 0:
        subprocess.run(["umount", "--lazy", path], check=True)
        pytest.fail(f"a file below {path} is still open")


def fill(path: Path, leave: int) -> None:
    """Fill a file system but for ``leave`` bytes, in a file called ``filler``."""
    status = os.statvfs(path)
    with open(path / "filler", "wb") as file:
        file.write(bytes(status.f_bavail * status.f_frsize - leave))


@pytest.mark.parametrize("pages", range(0, 28, 3))
def test_a_disk_that_fills_up(pages: int, small_disk: Path, tiny_family: Family) -> None:
    """However many pages are left, add succeeds or leaves the repository as it was."""
    mergegit = CommandLine(small_disk)
    mergegit.ok("init")
    mergegit.ok("add", tiny_family.base)
    fill(small_disk, 4096 * pages)
    result = mergegit("add", tiny_family.experts[0])
    if result.code != 0:
        message, hint = result.failed()
        assert "o space left" in message
        assert "space" in hint
        assert [branch.split()[0] for branch in mergegit.ok("branch").lines] == ["base"]
    (small_disk / "filler").unlink()
    assert mergegit("fsck").out.endswith("clean\n")
    mergegit.ok("add", tiny_family.experts[0])
    assert mergegit.ok("fsck").out.endswith("clean\n")
    assert list((small_disk / ".mergegit" / "tmp").iterdir()) == []


def test_a_full_disk_stops_a_checkout(mergegit: CommandLine, small_disk: Path) -> None:
    fill(small_disk, 4096)
    message, hint = mergegit("checkout", "math", small_disk / "out").failed()
    assert message == f"no space left on the disk of {small_disk}"
    assert "nothing was left behind" in hint
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_limit_on_the_size_of_files(place: Path, family: Family) -> None:
    """What the kernel refuses to write leaves the repository as it was."""
    script = "import sys; from mergegit.cli import main; sys.argv[0] = 'mergegit'; main()"
    before = fingerprint(place)
    done = subprocess.run(
        [sys.executable, "-c", script, "add", family.base, "--no-base", "--name", "big"],
        cwd=place,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)),
    )
    assert done.returncode == 1
    message, hint = done.stderr.splitlines()
    assert "File too large" in message
    assert "ulimit -f" in hint
    assert fingerprint(place) == before


@pytest.fixture
def read_only(place: Path, tmp_path: Path) -> Iterator[Path]:
    """The repository once more, on a file system that can't be written to."""
    path = tmp_path / "read-only"
    path.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting takes root")
    if subprocess.run(["mount", "--bind", place, path], check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    subprocess.run(["mount", "-o", "remount,ro,bind", path], check=True)
    yield path
    unmount(path)


def test_a_read_only_repository_can_be_read(
    read_only: Path, mergegit: CommandLine, tmp_path: Path
) -> None:
    reading = CommandLine(read_only)
    for arguments in (("log",), ("show", "merged"), ("branch",), ("tag",), ("fsck",)):
        assert reading.ok(*arguments).out == mergegit.ok(*arguments).out
    reading.ok("checkout", "merged", tmp_path / "out")
    reading.ok("plan", "math", "code", "--budget", "30%")


@pytest.mark.parametrize(
    "arguments",
    [("add", "{}"), ("merge", "math", "prose"), ("branch", "x", "math"), ("branch", "-d", "math"),
     ("tag", "x", "math"), ("repack", "--encoding", "raw"), ("fsck", "--rebuild-catalog")],
    ids=named,
)  # fmt: skip
def test_a_read_only_repository_can_not_be_written(
    arguments: tuple[str, ...], read_only: Path, tmp_path: Path
) -> None:
    model = tiny_checkpoint(tmp_path / "model", moved=9)
    message, hint = CommandLine(read_only)(*(word.format(model) for word in arguments)).failed()
    assert "Read-only file system" in message
    assert hint == "the file system is read-only; copy the repository elsewhere"


AS_STRANGER = """
import os, sys
from mergegit.cli import main
def run(*arguments):
    sys.argv = ["mergegit", *arguments]
    try:
        main()
    except SystemExit as request:
        return request.code
out, err = os.dup(1), os.dup(2)
null = os.open(os.devnull, os.O_WRONLY)
os.dup2(null, 1), os.dup2(null, 2)
run("log"), run("fsck"), run("checkout", "math", "warm")  # loads what a stranger may not
run("branch", "x", "math"), run("branch", "-d", "x")
os.dup2(out, 1), os.dup2(err, 2)
os.setgroups([]), os.setgid(65534), os.setuid(65534)
sys.exit(run(*sys.argv_of_test))
"""


@pytest.fixture
def stranger(place: Path) -> Callable[..., Result]:
    """Runs a command as a user to whom the repository does not belong."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user takes root")
    for path in (place, *place.parents):
        if path.stat().st_uid == 0 and len(path.parts) > 2:
            path.chmod(0o755)

    def run_as_stranger(*arguments: str) -> Result:
        script = AS_STRANGER.replace("sys.argv_of_test", repr(arguments))
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=place,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        shutil.rmtree(place / "warm")
        return Result(done.returncode, done.stdout, done.stderr)

    return run_as_stranger


@pytest.mark.parametrize("arguments", [("log",), ("branch", "x", "math"), ("fsck",)], ids=named)
def test_a_repository_of_another_user(
    arguments: tuple[str, ...], stranger: Callable[..., Result], place: Path
) -> None:
    message, hint = stranger(*arguments).failed()
    assert "no permission to write" in message
    assert hint == "ask the owner for permission, or work on a copy of the repository"


def test_a_target_that_may_not_be_written(
    stranger: Callable[..., Result], place: Path, tmp_path: Path
) -> None:
    for path in place.rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    (tmp_path / "forbidden").mkdir(mode=0o755)
    message, hint = stranger("checkout", "math", str(tmp_path / "forbidden" / "out")).failed()
    assert "can't write beside" in message
    assert hint == "choose a directory that you may write to"


# -- how it is said -------------------------------------------------------------------------------


def test_a_name_can_not_write_on_the_terminal(mergegit: CommandLine) -> None:
    message, _ = mergegit("show", "a\x1b[2Jb\nc").failed()
    assert "\x1b" not in message


def test_debug_shows_the_traceback(mergegit: CommandLine) -> None:
    for arguments in (("--debug", "show", "nothing"), ("show", "nothing", "--debug")):
        with pytest.raises(MergegitError):
            mergegit(*arguments)


def test_without_a_traceback_in_a_process_of_its_own(place: Path) -> None:
    result = run("show", "nothing", cwd=place)
    assert result.failed()[0] == "there is no branch, tag or commit 'nothing'"


def test_a_bug_keeps_its_traceback(mergegit: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_self: Repository) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Repository, "status", fail)
    with pytest.raises(ZeroDivisionError):
        mergegit("status")
