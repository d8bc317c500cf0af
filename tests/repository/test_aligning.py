"""Merges of models whose vocabularies differ: aligned tensors, and what becomes of them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mergegit import Repository
from mergegit.encoding import canonical_json, encode
from mergegit.errors import BadCheckpoint, BadRecipe, Mismatch, UnknownRef, UnusableRepository
from mergegit.merge.mergekit_yaml import read_documents, write_documents
from mergegit.merge.recipe import Recipe
from mergegit.objects import Manifest, Tensor
from mergegit.repository import aligning
from mergegit.repository.aligning import _StoredRows
from mergegit.repository.planning import gather
from mergegit.repository.recipes import document_of
from mergegit.repository.reports import MergeReport, PlanReport
from mergegit.storage.pack import Encoding, Header, Kind
from mergegit.storage.store import Store
from tests.adapters import save_adapter
from tests.checkpoint.tokenizers import bpe, word_level
from tests.families import Family, generator
from tests.merge.reference import ulps
from tests.repository.conftest import AUTHOR
from tests.vocabularies import (
    CHAT,
    CODE,
    EMBED,
    HEAD,
    PROJ,
    ROWS,
    WIDTH,
    WORDS,
    Tensors,
    base_tensors,
    expert_tensors,
    make_chat_family,
    save,
    tokenizer_files,
)

EXPERTS = ("math", "chat", "code")
THREE = ("chat", "code", "math")
TOKENS = {"base": WORDS, "math": WORDS, "chat": (*WORDS, *CHAT), "code": (*WORDS, *CODE)}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_chat_family(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="session")
def chat_template(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    path = tmp_path_factory.mktemp("template") / "repository"
    with Repository.init(path, author=AUTHOR) as repository:
        add(repository, models)
    return path


@pytest.fixture
def chatty(chat_template: Path, tmp_path: Path) -> Iterator[Repository]:
    """A repository with base, math, chat and code."""
    shutil.copytree(chat_template, tmp_path / "chatty")
    with Repository.open(tmp_path / "chatty", author=AUTHOR) as repository:
        yield repository


def add(repository: Repository, models: Mapping[str, Path]) -> None:
    for name, path in models.items():
        repository.add(path, base=None if name == "base" else "base", no_base=name == "base")


def plan(
    repository: Repository, experts: Sequence[str] = EXPERTS, source: str | None = "union",
    *, budget: str | None = None, **recipe: Any,
) -> PlanReport:  # fmt: skip
    return repository.plan(
        repository.recipe(experts, tokenizer_source=source, **recipe), budget=budget
    )


def merge(
    repository: Repository, experts: Sequence[str] = EXPERTS, source: str | None = "union",
    **recipe: Any,
) -> MergeReport:  # fmt: skip
    return repository.merge(plan(repository, experts, source, **recipe))


def of_document(repository: Repository, **document: Any) -> Recipe:
    """The recipe of a YAML document; JSON is YAML."""
    (read,) = read_documents(json.dumps(document))
    return repository.recipe_of(read)


def weights(models: Mapping[str, Path], name: str) -> Tensors:
    return {key: t.float() for key, t in load_file(models[name] / "model.safetensors").items()}


def merged_config(repository: Repository, report: MergeReport) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(file(repository, report, "config.json"))
    return value


def file(repository: Repository, report: MergeReport, path: str) -> bytes:
    tensor = repository.tensor(repository.manifest(report.branch).files[path])
    return b"".join(repository.store.read_block(block) for block in tensor.blocks())


def vocabulary(repository: Repository, report: MergeReport) -> dict[str, int]:
    """The merged tokenizer's tokens."""
    found = json.loads(file(repository, report, "tokenizer.json"))
    added = {entry["content"]: entry["id"] for entry in found["added_tokens"]}
    return {**found["model"]["vocab"], **added}


def tensor_of(repository: Repository, manifest: Manifest, name: str) -> Tensor:
    return repository.tensor(manifest.tensors[name])


def row(models: Mapping[str, Path], name: str, token: str, key: str = EMBED) -> torch.Tensor:
    return weights(models, name)[key][TOKENS[name].index(token)]


# -- what comes out -------------------------------------------------------------------------------


def test_a_union_merges_each_token_with_its_own(
    chatty: Repository, models: dict[str, Path]
) -> None:
    report = merge(chatty, parameters={"weight": 0.5})
    assert vocabulary(chatty, report) == {
        token: place for place, token in enumerate((*WORDS, *CHAT, "<fim>"))
    }
    merged = chatty.load(report.branch)
    for key in (EMBED, HEAD):
        rows = {name: dict(zip(TOKENS[name], weights(models, name)[key], strict=True))
                for name in TOKENS}  # fmt: skip
        assert merged[key].shape == (ROWS + 3, WIDTH)
        user = ((rows["chat"]["<|user|>"] + rows["code"]["<|user|>"]) / 2).bfloat16().float()
        lacking = {"<|user|>": user, "<|bot|>": rows["chat"]["<|bot|>"]}
        lacking["<fim>"] = rows["code"]["<fim>"]
        for token, place in vocabulary(chatty, report).items():
            seen = {name: own.get(token, lacking.get(token)) for name, own in rows.items()}
            base = seen["base"]
            assert base is not None
            wanted = base + 0.5 * sum(seen[name] - base for name in EXPERTS)  # type: ignore[operator]
            assert int(ulps(merged[key][place], wanted.bfloat16()).max()) <= 1


def test_the_bases_vocabulary_leaves_out_what_only_experts_have(
    chatty: Repository, models: dict[str, Path]
) -> None:
    report = merge(chatty, source="base")
    manifest, base = chatty.manifest(report.branch), chatty.manifest("base")
    assert tensor_of(chatty, manifest, EMBED).shape == (ROWS, WIDTH)
    for path in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        assert manifest.files[path] == base.files[path]
    assert [shard.header for shard in manifest.shards] == [s.header for s in base.shards]
    own = {name: weights(models, name)[EMBED][:ROWS] for name in TOKENS}
    wanted = own["base"] + sum(own[name] - own["base"] for name in EXPERTS)
    assert int(ulps(chatty.load(report.branch)[EMBED], wanted.bfloat16()).max()) <= 1


def test_an_experts_vocabulary_is_taken_as_it_is(chatty: Repository) -> None:
    report = merge(chatty, source="code")
    manifest, code = chatty.manifest(report.branch), chatty.manifest("code")
    assert manifest.files["tokenizer.json"] == code.files["tokenizer.json"]
    assert merged_config(chatty, report)["vocab_size"] == ROWS + 2
    assert tensor_of(chatty, manifest, HEAD).shape == (ROWS + 2, WIDTH)


def test_the_checkout_is_a_model_of_the_new_size(chatty: Repository, tmp_path: Path) -> None:
    report = merge(chatty)
    chatty.checkout(report.branch, tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    kept = chatty.load(report.branch)
    assert loaded.keys() == kept.keys()
    assert all(torch.equal(loaded[name], kept[name]) for name in kept)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == len(loaded[EMBED]) == ROWS + 3
    assert chatty.fsck().is_clean


def test_shards_and_index_follow_the_new_size(
    repository: Repository, models: dict[str, Path], tmp_path: Path
) -> None:
    base = {name: t.float() for name, t in weights(models, "base").items()}
    path = save(tmp_path / "sharded", base, tokenizer_files(WORDS), shards=2)
    repository.add(path, name="base")
    repository.add(models["chat"], base="base")
    report = merge(repository, ["chat"])
    repository.checkout(report.branch, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 2
    total = 0
    for shard in files:
        with safe_open(shard, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                assert index["weight_map"][name] == shard.name
                total += opened.get_tensor(name).nbytes
    assert index["metadata"]["total_size"] == total


def test_a_base_that_is_named_stands_in_and_an_unnamed_one_does_not(
    chatty: Repository, models: dict[str, Path]
) -> None:
    """As in mergekit: what a model lacks is the base's, and without one the mean of the others."""
    asked = {
        "merge_method": "linear",
        "models": [{"model": name, "parameters": {"weight": 1}} for name in THREE],
        "tokenizer_source": "union",
    }
    named = of_document(chatty, **asked, base_model="chat")
    unnamed = of_document(chatty, **asked)
    chat, code = (row(models, name, "<|user|>") for name in ("chat", "code"))
    for recipe, third in ((named, chat), (unnamed, ((chat + code) / 2).bfloat16().float())):
        merged = chatty.load(chatty.merge(chatty.plan(recipe)).branch)
        wanted = ((chat + code + third) / 3).bfloat16()
        assert int(ulps(merged[EMBED][ROWS], wanted).max()) <= 1


def test_whole_models_have_the_tokens_that_they_have_and_not_their_references(
    repository: Repository, tmp_path: Path
) -> None:
    """What deltas are read against gives no tokens to a merge that it is no part of."""
    base = base_tensors(8, width=16)
    old = tokenizer_files(("a", "b", "c", "d", "e", "f", "g", "<old>"))
    new = tokenizer_files(("a", "b", "c", "d", "e", "f", "g", "<new>"))
    repository.add(save(tmp_path / "base", base, old))
    for name in ("one", "two"):
        tuned = save(tmp_path / name, expert_tensors(base, name), new)
        repository.add(tuned, base="base")
    report = merge(repository, ["one", "two"], "union", method="linear")
    assert "<old>" not in vocabulary(repository, report)
    one, two = (
        load_file(tmp_path / n / "model.safetensors")[EMBED].float() for n in ("one", "two")
    )
    merged = repository.load(report.branch)[EMBED]
    assert int(ulps(merged, ((one + two) / 2).bfloat16()).max()) <= 1


def test_a_recipe_says_where_the_rows_of_tokens_come_from(
    chatty: Repository, models: dict[str, Path]
) -> None:
    recipe = of_document(
        chatty,
        merge_method="task_arithmetic",
        base_model="base",
        models=[{"model": name, "parameters": {"weight": 1}} for name in ("chat", "code")],
        tokenizer={
            "source": "base",
            "tokens": {
                "<|user|>": {"source": "chat", "force": True},
                "<new>": {"source": {"kind": "zero"}},
                "<copy>": {"source": {"kind": "model_token", "model": "code", "token": "<fim>"}},
                "<first>": {"source": {"kind": "model_token", "model": "base", "token_id": 0}},
            },
            "pad_to_multiple_of": 64,
        },
    )
    report = chatty.merge(chatty.plan(recipe))
    merged, at = chatty.load(report.branch), vocabulary(chatty, report)
    assert [token for token in at if at[token] >= ROWS] == [
        "<|user|>", "<new>", "<copy>", "<first>",
    ]  # fmt: skip
    assert merged[EMBED].shape[0] == 1536 == merged_config(chatty, report)["vocab_size"]
    # Every model has the same row: it is that row.
    assert torch.equal(merged[EMBED][at["<|user|>"]].float(), row(models, "chat", "<|user|>"))
    assert not merged[HEAD][at["<new>"]].any()
    assert torch.equal(merged[HEAD][at["<copy>"]].float(), row(models, "code", "<fim>", HEAD))
    assert torch.equal(merged[EMBED][at["<first>"]].float(), row(models, "base", WORDS[0]))
    padding = weights(models, "base")[EMBED].mean(dim=0).bfloat16()
    assert int(ulps(merged[EMBED][1535], padding).max()) <= 1


def test_padded_embeddings_are_cut_or_kept_as_the_base_has_them(
    repository: Repository, tmp_path: Path
) -> None:
    base = base_tensors(10, width=16)
    words = tokenizer_files([f"w{number}" for number in range(8)])
    repository.add(save(tmp_path / "base", base, words))
    longer = expert_tensors(base, "longer", 6)
    repository.add(save(tmp_path / "longer", longer, words), base="base")
    merged = repository.load(merge(repository, ["longer"], "base").branch)
    # Rows of no token are the model's own as far as both have them.
    assert torch.equal(merged[EMBED], longer[EMBED][:10].bfloat16())


# -- how it is stored and read --------------------------------------------------------------------


def inputs_of(repository: Repository, experts: Sequence[str] = EXPERTS, **recipe: Any) -> Any:
    return gather(repository.store, repository.recipe(experts, **recipe))


def test_appended_tokens_cost_the_last_block_alone(chatty: Repository) -> None:
    base = tensor_of(chatty, chatty.manifest("base"), EMBED)
    chat = tensor_of(chatty, chatty.manifest("chat"), EMBED)
    assert len(base) == 2
    inputs = inputs_of(chatty, tokenizer_source="union")
    math, aligned_chat, _ = (expert.tensors[EMBED] for expert in inputs.experts)
    assert inputs.base.tensors[EMBED].block(0) == base.block(0)
    assert inputs.base.tensors[EMBED].block(1) != base.block(1)
    assert math.block(0) == tensor_of(chatty, chatty.manifest("math"), EMBED).block(0)
    assert aligned_chat.block(0) == chat.block(0)


def test_models_that_have_the_vocabulary_already_are_untouched(chatty: Repository) -> None:
    inputs = inputs_of(chatty, tokenizer_source="base")
    assert inputs.base.ids == chatty.manifest("base").tensors
    assert inputs.experts[0].ids == chatty.manifest("math").tensors
    assert inputs.experts[1].ids[EMBED] != chatty.manifest("chat").tensors[EMBED]
    assert inputs.experts[1].ids[PROJ] == chatty.manifest("chat").tensors[PROJ]


def test_experts_of_one_vocabulary_are_not_read(
    chatty: Repository, models: dict[str, Path]
) -> None:
    chatty.add(models["math"], name="twin", base="base")
    report = plan(chatty, ["math", "twin"], "union")
    assert report.aligned_bytes == 0
    assert report.plan.recipe["vocabulary"] == {"source": "union"}


@pytest.mark.parametrize("source", ["union", "base", "code"])
def test_aligned_experts_are_read_by_layers(chatty: Repository, source: str) -> None:
    """Though chat and code were added with other shapes than the base's, and so plainly."""
    inputs = inputs_of(chatty, tokenizer_source=source)
    for name in (EMBED, HEAD):
        base = inputs.base.tensors[name]
        for expert in inputs.experts:
            forms = chatty.store.forms(expert.tensors[name].blocks())
            for index, block in enumerate(expert.tensors[name].blocks()):
                below = base.block(index)
                assert block == below or any(
                    form.encoding is Encoding.DELTA and form.base == below for form in forms[block]
                )
    report = plan(chatty, source=source, budget="12%")
    assert report.plan.raw_bytes == sum(
        chatty.tensor(tensor_id).nbytes
        for name in EXPERTS
        for tensor_id in chatty.manifest(name).tensors.values()
    )
    assert 0 < report.plan.planned_bytes <= report.plan.raw_bytes * 12 // 100
    assert 0 < report.plan.predicted_error < 0.6
    merged = chatty.merge(report)
    assert merged.read_bytes == report.plan.planned_bytes


def test_a_budget_comes_as_near_as_its_plan_says(chatty: Repository) -> None:
    whole = chatty.load(merge(chatty).branch)
    report = plan(chatty, budget="15%")
    part = chatty.load(chatty.merge(report).branch)
    inputs = inputs_of(chatty, tokenizer_source="union")
    norm = sum(float((whole[n].double() - part[n].double()).square().sum()) for n in whole) ** 0.5
    assert norm / report.plan.merged_norm == pytest.approx(report.plan.predicted_error, rel=0.05)
    assert report.plan.error_bound is not None
    assert norm / report.plan.merged_norm < report.plan.error_bound
    assert inputs.aligned.read_bytes == 0


def test_aligning_reads_once_and_beside_the_budget(chatty: Repository) -> None:
    told: list[tuple[int, int]] = []
    recipe = chatty.recipe(EXPERTS, tokenizer_source="union")

    def progress(what: str, done: int, total: int) -> None:
        if what == "aligning vocabularies":
            told.append((done, total))

    first = chatty.plan(recipe, budget="5%", progress=progress)
    # The embeddings and heads of chat and code, which are stored plainly, and math's deltas.
    plainly = 2 * 2 * (ROWS + 2) * WIDTH * 2
    assert plainly < first.aligned_bytes < 1.5 * plainly
    assert first.plan.planned_bytes <= first.plan.raw_bytes // 20
    assert told[-1][0] == told[-1][1] == 4 * 2 * (ROWS + 3) * WIDTH * 2
    told.clear()
    again = chatty.plan(recipe, budget="5%", progress=progress)
    assert (again.aligned_bytes, again.id, told) == (0, first.id, [])
    weighted = chatty.recipe(EXPERTS, tokenizer_source="union", parameters={"weight": 0.1})
    assert chatty.plan(weighted).aligned_bytes == 0


def test_what_a_collection_took_is_made_again(chatty: Repository) -> None:
    report = plan(chatty, budget="20%")
    aligned = inputs_of(chatty, tokenizer_source="union").experts[1].ids[EMBED]
    before = chatty.load(chatty.merge(report, branch="before").branch)
    assert chatty.store.has_object(aligned)
    chatty.delete_branch("before")
    chatty.gc(expire=0, grace=0)
    assert not chatty.store.has_object(aligned)
    merged = chatty.merge(report, branch="after")
    assert merged.plan.aligned_bytes > 0
    assert merged.read_bytes == report.plan.planned_bytes
    after = chatty.load("after")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert chatty.fsck().is_clean


def test_what_lost_its_blocks_is_made_again(chatty: Repository) -> None:
    """Objects and blocks lie in packs of their own, and may go one without the other."""
    before = inputs_of(chatty, tokenizer_source="union")
    catalog = chatty.store.catalog
    (block, *_) = before.aligned.passing
    (form,) = catalog.forms_of([block])[block]
    pack = form.places[0].pack
    lost = [
        Header(Kind.SEGMENT, known, 0, 0)
        for known, forms in catalog.blocks()
        if any(place.pack == pack for stored in forms for place in stored.places)
    ]
    catalog.enter({}, {pack: lost})
    assert chatty.store.has_object(before.base.ids[EMBED])
    again = inputs_of(chatty, tokenizer_source="union")
    assert again.aligned.read_bytes > 0
    assert again.base.ids == before.base.ids
    assert merge(chatty).is_new


def test_a_kept_plan_is_good_after_a_collection(chatty: Repository, tmp_path: Path) -> None:
    report = chatty.plan(chatty.recipe(EXPERTS, tokenizer_source="union"), budget="20%", keep=True)
    (tmp_path / "plan").write_bytes(encode(report.plan))
    chatty.gc(expire=0, grace=0)
    for again in (chatty.saved_plan(report.id.hex()), chatty.read_plan(tmp_path / "plan")):
        assert again.id == report.id
        chatty.gc(expire=0, grace=0)
    assert chatty.merge(again).is_new


def test_a_merged_vocabulary_outlives_a_collection(chatty: Repository) -> None:
    report = merge(chatty)
    before = chatty.load(report.branch)
    inputs = inputs_of(chatty, tokenizer_source="union")
    chatty.gc(expire=0, grace=0)
    # Nothing that was made in passing is kept for it.
    assert len(inputs.aligned.passing) == 2
    assert not chatty.store.catalog.forms_of(inputs.aligned.passing)
    after = chatty.load(report.branch)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert chatty.fsck().is_clean


def shuffled(repository: Repository, tmp_path: Path) -> tuple[list[int], Tensors]:
    """Add a base, and an expert that has its tokens in another order; returns the order, and the
    expert's weights in the base's."""
    base = base_tensors(3 * ROWS)
    order = torch.randperm(3 * ROWS, generator=generator("order")).tolist()
    words = [f"w{number}" for number in range(3 * ROWS)]
    repository.add(save(tmp_path / "base", base, tokenizer_files(words)))
    expert = expert_tensors(base, "other")
    theirs = {n: t[order] if n in (EMBED, HEAD) else t for n, t in expert.items()}
    files = tokenizer_files([words[number] for number in order])
    repository.add(save(tmp_path / "other", theirs, files), base="base")
    return order, expert


def test_rows_in_another_order_are_put_into_the_bases(
    repository: Repository, tmp_path: Path
) -> None:
    order, expert = shuffled(repository, tmp_path)
    report = merge(repository, ["other"], "base")
    assert torch.equal(repository.load(report.branch)[EMBED], expert[EMBED].bfloat16())
    report = merge(repository, ["other"], "other", method="linear", base="base")
    assert torch.equal(repository.load(report.branch)[EMBED], expert[EMBED][order].bfloat16())


def test_rows_in_another_order_are_read_once_in_little_memory(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shuffled(repository, tmp_path)
    monkeypatch.setattr(aligning, "HELD_BYTES", 0)
    reads: Counter[int] = Counter()
    held = 0
    piece, block = _StoredRows._piece, Store.read_form

    def watched_piece(rows: _StoredRows, *arguments: int) -> Any:
        nonlocal held
        data = piece(rows, *arguments)
        held = max(held, len(rows._held))
        return data

    def watched_read(store: Store, block_id: Any, *rest: Any, **options: Any) -> Any:
        reads[block_id] += 1
        return block(store, block_id, *rest, **options)

    monkeypatch.setattr(_StoredRows, "_piece", watched_piece)
    monkeypatch.setattr(Store, "read_form", watched_read)
    inputs = inputs_of(repository, ["other"], tokenizer_source="base")
    monkeypatch.undo()
    embedding = tensor_of(repository, repository.manifest("other"), EMBED)
    assert len(embedding) == 4
    assert held == 4
    assert [reads[block_id] for block_id in embedding.blocks()] == [1] * 4
    base = inputs.base.tensors[EMBED]
    assert all(reads[block_id] <= 2 for block_id in base.blocks())
    with Repository.init(tmp_path / "again") as other:
        for name in ("base", "other"):
            other.add(tmp_path / name, base=None if name == "base" else "base")
        roomy = inputs_of(other, ["other"], tokenizer_source="base")
    assert roomy.experts[0].ids == inputs.experts[0].ids
    assert not list((tmp_path / "repository" / ".mergegit" / "tmp").iterdir())


def test_rows_in_order_wait_nowhere(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_tensors(8000, head=False)
    words = [f"w{number}" for number in range(8000)]
    repository.add(save(tmp_path / "base", base, tokenizer_files(words)))
    longer = save(tmp_path / "longer", expert_tensors(base, "l", 2), tokenizer_files(words, CHAT))
    repository.add(longer, base="base")
    assert len(tensor_of(repository, repository.manifest("base"), EMBED)) > 5
    monkeypatch.setattr(aligning, "HELD_BYTES", 0)
    monkeypatch.setattr(_StoredRows, "_spill", lambda *_: pytest.fail("a block is still held"))
    assert inputs_of(repository, ["longer"], tokenizer_source="union").aligned.read_bytes > 0


def test_experts_in_another_dtype_are_aligned_in_their_own(
    repository: Repository, models: dict[str, Path], tmp_path: Path
) -> None:
    repository.add(models["base"])
    wide = expert_tensors(weights(models, "base"), "wide", 2)
    files = tokenizer_files(WORDS, CHAT)
    repository.add(save(tmp_path / "wide", wide, files, dtype=torch.float32), base="base")
    repository.add(models["code"], base="base")
    inputs = inputs_of(repository, ["wide", "code"], tokenizer_source="union")
    assert [e.tensors[EMBED].dtype for e in inputs.experts] == ["F32", "BF16"]
    merged = repository.load(merge(repository, ["wide", "code"]).branch)[EMBED]
    base, code = weights(models, "base")[EMBED], weights(models, "code")[EMBED]
    wanted = wide[EMBED][:ROWS] + code[:ROWS] - base
    assert int(ulps(merged[:ROWS], wanted.bfloat16()).max()) <= 1


def test_a_repository_that_cannot_be_written_to_says_what_is_missing(
    chatty: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = chatty.recipe(EXPERTS, tokenizer_source="union")
    monkeypatch.setattr(chatty.store, "is_writable", False)
    with pytest.raises(UnusableRepository, match="vocabularies must be aligned"):
        gather(chatty.store, recipe)
    monkeypatch.undo()
    gather(chatty.store, recipe)
    monkeypatch.setattr(chatty.store, "is_writable", False)
    gather(chatty.store, recipe)


# -- adapters -------------------------------------------------------------------------------------


@pytest.fixture
def adapted(chatty: Repository, models: dict[str, Path], tmp_path: Path) -> Tensors:
    """Adds an adapter that changes the embeddings, and no head; returns it merged into the base."""
    base = load_file(models["base"] / "model.safetensors")
    path = save_adapter(tmp_path / "adapter", base, modules=("up_proj", "embed_tokens"))
    chatty.add(path, base="base")
    chatty.checkout("adapter", tmp_path / "whole", merged=True)
    return {n: t.float() for n, t in load_file(tmp_path / "whole" / "model.safetensors").items()}


def test_an_adapter_has_its_bases_tokens(
    chatty: Repository, models: dict[str, Path], adapted: Tensors
) -> None:
    merged = chatty.load(
        merge(chatty, ["adapter", "chat"], "union", parameters={"weight": 1}).branch
    )
    base, chat = weights(models, "base"), weights(models, "chat")
    for key in (EMBED, HEAD):
        wanted = adapted[key] + chat[key][:ROWS] - base[key]
        assert int(ulps(merged[key][:ROWS], wanted.bfloat16()).max()) <= 1
        # The base and its adapter have chat's rows, where they have none.
        assert torch.equal(merged[key][ROWS:].float(), chat[key][ROWS:])


def test_an_adapter_that_has_the_vocabulary_is_computed_as_ever(
    chatty: Repository, adapted: Tensors, models: dict[str, Path]
) -> None:
    recipe = chatty.recipe(["adapter", "chat"], tokenizer_source="base")
    inputs = gather(chatty.store, recipe)
    assert inputs.experts[0].tensors[EMBED].block(0) in inputs.computed
    merged = chatty.load(chatty.merge(chatty.plan(recipe)).branch)
    chatty.gc(expire=0, grace=0)
    # What the merge did not need is gone, and made again.
    again = gather(chatty.store, recipe)
    assert again.aligned.read_bytes > 0
    assert again.experts[0].ids == inputs.experts[0].ids
    assert gather(chatty.store, recipe).aligned.read_bytes == 0
    base, chat = weights(models, "base"), weights(models, "chat")
    wanted = adapted[EMBED] + chat[EMBED][:ROWS] - base[EMBED]
    # The adapter's own rows were rounded when it was checked out, and here they are not.
    torch.testing.assert_close(merged[EMBED].float(), wanted, rtol=2**-8, atol=2.5e-4)


# -- heads ----------------------------------------------------------------------------------------


def small(
    repository: Repository, tmp_path: Path, name: str, tensors: Tensors, *added: str, **config: Any
) -> None:
    """Add a model of eight words and some tokens more."""
    files = tokenizer_files("abcdefgh", added)
    path = save(tmp_path / name, tensors, files, **config)
    repository.add(path, **({} if name == "base" else {"base": "base"}))


def test_a_tied_head_is_merged_as_the_embedding_that_it_is(
    repository: Repository, tmp_path: Path
) -> None:
    base = base_tensors(8, width=16)
    tied = expert_tensors({n: t for n, t in base.items() if n != HEAD}, "tied", 1)
    small(repository, tmp_path, "base", base)
    small(repository, tmp_path, "tied", tied, "<x>", tie_word_embeddings=True)
    report = merge(repository, ["tied"])
    merged = repository.load(report.branch)
    assert torch.equal(merged[HEAD], merged[EMBED])
    assert torch.equal(merged[HEAD][8], tied[EMBED][8].bfloat16())
    assert merged_config(repository, report)["tie_word_embeddings"] is False


def test_a_head_beside_a_base_that_ties_it_must_be_its_embedding(
    repository: Repository, tmp_path: Path
) -> None:
    base = base_tensors(8, head=False, width=16)
    small(repository, tmp_path, "base", base)
    doubled = expert_tensors(base, "doubled", 1)
    doubled[HEAD] = doubled[EMBED]
    small(repository, tmp_path, "doubled", doubled, "<x>", tie_word_embeddings=True)
    untied = expert_tensors(base_tensors(8, width=16), "untied", 1)
    small(repository, tmp_path, "untied", untied, "<x>")
    report = merge(repository, ["doubled"])
    assert repository.manifest(report.branch).tensors.keys() == base.keys()
    assert merged_config(repository, report)["tie_word_embeddings"] is True
    with pytest.raises(Mismatch, match=r"untied has tensor lm_head\.weight"):
        plan(repository, ["untied"])
    assert plan(repository, ["untied"], ignore_extra=True).plan.kept.keys() == {HEAD}


def test_a_config_that_ties_a_head_of_its_own_is_put_right(
    repository: Repository, tmp_path: Path
) -> None:
    """The first model's config goes with tensors that the reference has."""
    base = base_tensors(8, width=16)
    tied = expert_tensors({n: t for n, t in base.items() if n != HEAD}, "tied", 1)
    small(repository, tmp_path, "base", base)
    small(repository, tmp_path, "tied", tied, "<x>", tie_word_embeddings=True)
    small(repository, tmp_path, "other", expert_tensors(base, "other"))
    report = merge(repository, ["tied", "other"], "union", method="linear")
    assert merged_config(repository, report)["tie_word_embeddings"] is False
    assert HEAD in repository.manifest(report.branch).tensors


# -- what is refused ------------------------------------------------------------------------------


def test_without_a_vocabulary_rows_that_differ_are_refused(chatty: Repository) -> None:
    with pytest.raises(Mismatch) as caught:
        plan(chatty, ["chat"], None)
    assert "lm_head.weight is [1500, 384] in base but [1502, 384] in chat" in caught.value.message
    assert "--tokenizer-source union" in caught.value.hint


def test_a_model_without_a_tokenizer_is_named(
    chatty: Repository, models: dict[str, Path], tmp_path: Path
) -> None:
    bare = shutil.copytree(models["chat"], tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    chatty.add(bare, base="base")
    with pytest.raises(BadCheckpoint, match="bare has no vocabulary"):
        plan(chatty, ["math", "bare"])


def test_a_model_with_the_bases_own_embeddings_has_its_tokens(
    chatty: Repository, models: dict[str, Path], tmp_path: Path
) -> None:
    frozen = weights(models, "base")
    frozen[PROJ] = frozen[PROJ] + 0.01
    chatty.add(save(tmp_path / "frozen", frozen, {}), base="base")
    inputs = inputs_of(chatty, ["frozen", "chat"], tokenizer_source="union")
    assert inputs.experts[0].ids[EMBED] == inputs.base.ids[EMBED]


@pytest.mark.parametrize("source", ["prose", "unknown"])
def test_a_vocabulary_comes_from_a_model_of_the_merge(
    chatty: Repository, models: dict[str, Path], source: str
) -> None:
    chatty.add(models["math"], name="prose", base="base", message="twice")
    with pytest.raises((BadRecipe, UnknownRef), match=source):
        chatty.recipe(["chat", "code"], tokenizer_source=source)


def test_tokens_that_no_model_has_are_named(chatty: Repository) -> None:
    asked = {"source": {"kind": "model_token", "model": "chat", "token": "<nowhere>"}}
    recipe = of_document(
        chatty,
        merge_method="task_arithmetic",
        base_model="base",
        models=[{"model": "chat", "parameters": {"weight": 1}}],
        tokenizer={"source": "base", "tokens": {"<x>": asked}},
    )
    with pytest.raises(BadRecipe, match="'<nowhere>'"):
        chatty.plan(recipe)


def test_tokenizers_that_cannot_be_one_are_refused_before_anything_is_read(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_tensors(8, width=16)
    repository.add(save(tmp_path / "base", base, word_level("abcdefgh")))
    files = bpe([*"abcdefgh", "ab"], merges=["a b"])
    repository.add(save(tmp_path / "other", expert_tensors(base, "o", 1), files), base="base")
    monkeypatch.setattr(aligning, "_read_block", lambda *_: pytest.fail("a weight was read"))
    recipe = repository.recipe(["other"], tokenizer_source="union")
    with pytest.raises(Mismatch, match="WordLevel"):
        gather(repository.store, recipe)


def test_a_model_without_embeddings_that_are_known_is_refused(
    repository: Repository, tmp_path: Path
) -> None:
    for name, shift in (("base", 0.0), ("other", 0.1)):
        tensors = {"conv.weight": torch.full((4, 4), 1.0 + shift)}
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        repository.add(tmp_path / name, base=None if name == "base" else "base")
    with pytest.raises(Mismatch, match="no tensor of base is known to have a row for each token"):
        plan(repository, ["other"])


def test_models_of_another_width_are_refused(repository: Repository, tmp_path: Path) -> None:
    small(repository, tmp_path, "base", base_tensors(8, width=16))
    small(repository, tmp_path, "wide", base_tensors(8, width=32))
    with pytest.raises(Mismatch, match=r"is \[8, 16\] in base but \[8, 32\] in wide"):
        plan(repository, ["wide"])


# -- recipes --------------------------------------------------------------------------------------

ASKED: dict[str, Callable[[Repository], Recipe]] = {
    "flags": lambda r: r.recipe(EXPERTS, tokenizer_source="union", chat_template="chatml"),
    "flags, an expert": lambda r: r.recipe(["chat", "math"], tokenizer_source="chat"),
    "flags, linear": lambda r: r.recipe(EXPERTS, method="linear", tokenizer_source="base"),
    "flags, linear on a base": lambda r: r.recipe(
        ["chat", "code"], method="linear", base="base", tokenizer_source="union"
    ),
    "flags, slerp": lambda r: r.recipe(
        ["chat", "code"], method="slerp", parameters={"t": 0.5}, tokenizer_source="union"
    ),
    "flags, nuslerp": lambda r: r.recipe(
        ["chat", "code"], method="nuslerp", tokenizer_source="union"
    ),
    "document": lambda r: of_document(
        r,
        merge_method="ties",
        base_model="base",
        models=[{"model": name, "parameters": {"weight": 1, "density": 0.5}} for name in EXPERTS],
        tokenizer={
            "source": "code",
            "tokens": {
                "<z>": {"source": {"kind": "zero"}},
                "<a>": {"source": {"kind": "model_token", "model": "chat", "token": "<|bot|>"}},
                "<|user|>": {"source": "chat", "force": True},
                "<b>": {"source": {"kind": "model_token", "model": "base", "token_id": 5}},
            },
            "pad_to_multiple_of": 8,
        },
    ),
    "document, linear": lambda r: of_document(
        r,
        merge_method="linear",
        models=[{"model": name, "parameters": {"weight": 1}} for name in ("code", "chat", "math")],
        tokenizer_source="union",
        chat_template="auto",
    ),
    "document, linear on one of them": lambda r: of_document(
        r,
        merge_method="linear",
        base_model="chat",
        models=[{"model": name, "parameters": {"weight": 1}} for name in ("code", "chat", "math")],
        tokenizer_source="union",
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_recipe_that_is_shown_and_read_again_makes_the_same(
    chatty: Repository, name: str
) -> None:
    recipe = ASKED[name](chatty)
    first = chatty.merge(chatty.plan(recipe), branch="first")
    commit = chatty.commit("first")
    assert Recipe.from_json(json.loads(canonical_json(commit.recipe))) == recipe
    (document,) = read_documents(write_documents([document_of(recipe)]))
    again = chatty.recipe_of(document)
    assert again.vocabulary == recipe.vocabulary
    second = chatty.merge(chatty.plan(again), branch="second")
    theirs, ours = chatty.manifest("first"), chatty.manifest("second")
    assert ours.tensors == theirs.tensors
    assert {p: i for p, i in ours.files.items() if p != "README.md"} == {
        p: i for p, i in theirs.files.items() if p != "README.md"
    }
    assert first.commit != second.commit or again == recipe


# -- the files around -----------------------------------------------------------------------------


def test_ids_of_special_tokens_follow_the_vocabulary(
    repository: Repository, tmp_path: Path
) -> None:
    base = base_tensors(8, width=16)
    small(repository, tmp_path, "base", base, eos_token_id=3)
    path = save(tmp_path / "other", expert_tensors(base, "other"), tokenizer_files("hgfedcba"))
    (path / "generation_config.json").write_text('{"eos_token_id": 4}')
    (path / "special_tokens_map.json").write_text("{}")
    repository.add(path, base="base")
    report = merge(repository, ["other"], "other")
    assert merged_config(repository, report)["eos_token_id"] == 4
    assert "special_tokens_map.json" in repository.manifest(report.branch).files
    report = merge(repository, ["other", "base"], "base", method="linear", base="other")
    generation = json.loads(file(repository, report, "generation_config.json"))
    assert generation == {"eos_token_id": 4}
    # Of the first model are all files but its tokenizer's.
    small(repository, tmp_path, "plain", expert_tensors(base, "plain"))
    report = merge(repository, ["other", "plain"], "plain", method="linear")
    assert "special_tokens_map.json" not in repository.manifest(report.branch).files
    assert "generation_config.json" in repository.manifest(report.branch).files


def test_a_chat_template_needs_no_vocabulary(chatty: Repository) -> None:
    report = merge(chatty, ["math"], None, chat_template="chatml")
    settings = json.loads(file(chatty, report, "tokenizer_config.json"))
    assert "<|im_start|>" in settings["chat_template"]
    assert settings["eos_token"] == "w2"
    files, base = chatty.manifest(report.branch).files, chatty.manifest("base").files
    assert files["tokenizer.json"] == base["tokenizer.json"]


def test_the_template_of_most_models_goes_with_the_merged_tokenizer(
    chatty: Repository, models: dict[str, Path], tmp_path: Path
) -> None:
    for name, template in (("one", "{{ 1 }}"), ("two", "{{ 2 }}"), ("three", "{{ 2 }}")):
        path = shutil.copytree(models["chat"], tmp_path / name)
        settings = {"chat_template": template, "name": name}
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        chatty.add(path, base="base")
    report = merge(chatty, ["one", "two", "three"], "one", chat_template="auto")
    settings = json.loads(file(chatty, report, "tokenizer_config.json"))
    assert settings["chat_template"] == "{{ 2 }}"


def test_an_unknown_chat_template_is_refused_at_once(chatty: Repository) -> None:
    with pytest.raises(BadRecipe, match="'chatlm'"):
        chatty.recipe(["math"], chat_template="chatlm")


def test_a_chat_template_needs_a_tokenizer(repository: Repository, tiny_family: Family) -> None:
    repository.add(tiny_family.base)
    bare = shutil.copytree(tiny_family.experts[0], repository.store.location.root.parent / "bare")
    (bare / "tokenizer.json").unlink()
    repository.add(bare, base="base")
    recipe = repository.recipe(["bare", "bare"], method="linear", chat_template="chatml")
    with pytest.raises(BadCheckpoint, match="bare has no tokenizer"):
        repository.merge(repository.plan(recipe))


# -- slices ---------------------------------------------------------------------------------------


def test_slices_of_models_with_other_tokens_are_stacked(
    chatty: Repository, models: dict[str, Path]
) -> None:
    recipe = of_document(
        chatty,
        merge_method="passthrough",
        slices=[
            {"sources": [{"model": "chat", "layer_range": [0, 1]}]},
            {"sources": [{"model": "code", "layer_range": [0, 1]}]},
        ],
        tokenizer_source="union",
    )
    report = chatty.merge(chatty.plan(recipe))
    merged, at = chatty.load(report.branch), vocabulary(chatty, report)
    assert merged_config(chatty, report)["num_hidden_layers"] == 2
    assert merged[EMBED].shape == merged[HEAD].shape == (len(at), WIDTH)
    # Embeddings are chat's and the head is code's, and each has the other's rows where it has none.
    assert torch.equal(merged[EMBED][at["<|user|>"]].float(), row(models, "chat", "<|user|>"))
    assert torch.equal(merged[EMBED][at["<fim>"]].float(), row(models, "code", "<fim>"))
    assert torch.equal(merged[HEAD][at["<|user|>"]].float(), row(models, "code", "<|user|>", HEAD))
    assert torch.equal(merged[HEAD][at["<|bot|>"]].float(), row(models, "chat", "<|bot|>", HEAD))
