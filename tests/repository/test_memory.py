"""Memory stays bounded whatever the size of a checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoint.handmade import entry, file_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc"),
]

MIB = 1 << 20

# Linux counts a process's own peak as VmHWM; what getrusage tells has that of its parent in it.
SCRIPT = """
import sys
from mergegit import Repository
with Repository.init(sys.argv[1]) as repository:
    for verb, *words in (line.split() for line in sys.argv[2:]):
        options = dict(word.split("=") for word in words if "=" in word)
        getattr(repository, verb)(*(word for word in words if "=" not in word), **options)
with open("/proc/self/status") as status:
    print(next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM")))
"""


def peak(repository: Path, *verbs: str) -> int:
    """The peak memory, in MiB, of a process that performs verbs."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, repository, *verbs],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    return int(done.stdout)


def sparse_checkpoint(path: Path, nbytes: int) -> Path:
    """One bf16 tensor of zeros that takes next to nothing on disk."""
    header = {"w": entry("BF16", [nbytes // 2], 0, nbytes)}
    data = file_bytes(header)
    path.write_bytes(data)
    os.truncate(path, len(data) + nbytes)
    return path


def noise_checkpoint(path: Path, nbytes: int, seed: int = 0, step: int = 0) -> Path:
    """One bf16 tensor of small random weights; ``step`` moves some of their bits."""
    with open(path, "wb") as file:
        file.write(file_bytes({"w": entry("BF16", [nbytes // 2], 0, nbytes)}))
        rng = np.random.default_rng(seed)
        for _ in range(nbytes // MIB):
            weights = rng.normal(0, 0.02, MIB // 2).astype(np.float32)
            bits = (weights.view(np.uint32) >> 16).astype(np.uint16)
            file.write((bits + rng.integers(0, step + 1, bits.size, np.uint16)).tobytes())
    return path


def test_a_big_sparse_file_takes_no_more_than_its_blocks(tmp_path: Path) -> None:
    path = sparse_checkpoint(tmp_path / "zeros.safetensors", 1500 * MIB)
    assert peak(tmp_path / "repository", f"add {path}") < 350


def test_four_times_the_bytes_take_no_more_memory(tmp_path: Path) -> None:
    peaks = []
    for size in (80, 320):
        base = noise_checkpoint(tmp_path / f"base{size}.safetensors", size * MIB)
        expert = noise_checkpoint(tmp_path / f"expert{size}.safetensors", size * MIB, step=3)
        out = tmp_path / f"out{size}"
        peaks.append(
            peak(
                tmp_path / f"repository{size}",
                f"add {base}",
                f"add {expert}",
                f"checkout expert{size} {out}",
                "fsck",
            )
        )
        assert (out / expert.name).read_bytes() == expert.read_bytes()
    assert peaks[1] < peaks[0] + 40
    assert peaks[1] < 350


def test_pytorch_files_take_about_one_of_them(tmp_path: Path) -> None:
    """A file is mapped, and what was read of it counts until the next one's turn."""
    peaks = []
    for count in (1, 4):
        path = tmp_path / str(count)
        path.mkdir()
        for number in range(1, count + 1):
            bits = torch.randint(0x3C00, 0x3D00, (40 * MIB // 2,), dtype=torch.int16)
            tensors = {f"{number}.{half}": part for half, part in enumerate(bits.chunk(2))}
            tensors = {name: part.clone().view(torch.bfloat16) for name, part in tensors.items()}
            torch.save(tensors, path / f"pytorch_model-{number:05d}-of-{count:05d}.bin")
        peaks.append(peak(tmp_path / f"repository{count}", f"add {path}"))
    assert peaks[1] < peaks[0] + 40
    assert peaks[1] < 350 + 80


def test_converting_into_one_shard_takes_no_more_than_its_blocks(tmp_path: Path) -> None:
    path = noise_checkpoint(tmp_path / "noise.safetensors", 240 * MIB)
    verbs = (f"add {path}", f"checkout noise {tmp_path}/out dtype=float32 shard_size=5GB")
    assert peak(tmp_path / "repository", *verbs) < 350
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 480 * MIB


def test_merging_again_and_comparing_takes_no_more_for_more(tmp_path: Path) -> None:
    peaks = []
    for size in (80, 320):
        base = noise_checkpoint(tmp_path / f"base{size}.safetensors", size * MIB)
        expert = noise_checkpoint(tmp_path / f"expert{size}.safetensors", size * MIB, step=3)
        peaks.append(
            peak(
                tmp_path / f"repository{size}",
                f"add {base}",
                f"add {expert}",
                f"cherry_pick expert{size} onto=base{size} branch=picked budget=20%",
                "replay picked",
                "distance picked budget=100%",
                "verify picked",
            )
        )
    assert peaks[1] < peaks[0] + 40
    assert peaks[1] < 400
