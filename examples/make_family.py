"""Train a small base model and three experts from it, in about two minutes on two cores.

    python examples/make_family.py OUT

makes OUT/base and OUT/python, OUT/prose and OUT/cpp, each a Hugging Face checkpoint of a Llama
with 3.3 million parameters in bfloat16, and OUT/heldout with text that no model has seen. All text
comes from this machine's Python and torch; the same versions on the same machine give the same
bytes.
"""

import argparse
import copy
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from family import checkpoint, text, tokenizer, training
from family.model import Config, Llama, initialise
from family.tokenizer import END_OF_TEXT_ID, Tokenizer, Tokens
from family.training import Schedule

EXPERTS = ("python", "prose", "cpp")
"""The kinds of text that get an expert each, which is named after its kind."""

BASE_SHARES = {"torch": 0.76, "python": 0.08, "prose": 0.08, "cpp": 0.08}
"""Shares of the base's training. The base knows of every expert's kind, but not much, as a general
model does of a special field: only then does an expert have something to learn."""

BASE = Schedule(steps=1000, learning_rate=3e-3)
EXPERT = Schedule(steps=150, learning_rate=3e-4)

TRAIN_CHARACTERS = {"torch": 2_000_000, "python": 1_200_000, "prose": 1_200_000, "cpp": 1_200_000}
HELDOUT_CHARACTERS = 60_000
VOCABULARY = 2048
SEED = 0
REPORT_STEPS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", metavar="OUT", type=Path, help="a new or empty directory")
    out: Path = parser.parse_args().out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        parser.error(f"{out} exists already; name another directory or remove it")
    training.make_repeatable()

    say = _clock()
    splits = {
        kind: text.split(
            kind,
            train_characters=TRAIN_CHARACTERS[kind],
            heldout_characters=HELDOUT_CHARACTERS,
        )
        for kind in text.KINDS
    }
    bpe = tokenizer.train((t for split in splits.values() for t in split.train), VOCABULARY)
    streams = {kind: _stream(bpe, split.train) for kind, split in splits.items()}
    _save_heldout(out / "heldout", splits)
    say(f"text: {sum(len(stream) for stream in streams.values()):,} tokens to train on")

    base = _train_base(streams, say)
    _save(out / "base", base, bpe, "A small base model", BASE, BASE_SHARES)
    for kind in EXPERTS:
        expert = _train_expert(base, kind, streams[kind], say)
        _save(out / kind, expert, bpe, f"An expert on {kind}, from `base`", EXPERT, {kind: 1.0})
    say(f"saved {', '.join(('base', *EXPERTS))} and heldout in {out}")


def _train_base(streams: Mapping[str, Tokens], say: Callable[[str], None]) -> Llama:
    """Train a model from nothing; its weights are then rounded, since experts start from those."""
    model = Llama(Config(vocab_size=VOCABULARY))
    initialise(model, SEED)
    training.train(
        model,
        [streams[kind] for kind in BASE_SHARES],
        list(BASE_SHARES.values()),
        BASE,
        seed=SEED,
        report=_reporter("base", BASE, say),
    )
    return model.to(checkpoint.DTYPE).float()


def _train_expert(base: Llama, kind: str, stream: Tokens, say: Callable[[str], None]) -> Llama:
    expert = copy.deepcopy(base)
    report = _reporter(kind, EXPERT, say)
    training.train(expert, [stream], [1.0], EXPERT, seed=SEED + 1, report=report)
    return expert


def _stream(bpe: Tokenizer, texts: list[str]) -> Tokens:
    """All texts as one run of tokens, each with the token that ends a text."""
    return np.concatenate([np.append(bpe.encode(text), END_OF_TEXT_ID) for text in texts])


def _save_heldout(folder: Path, splits: Mapping[str, text.Split]) -> None:
    folder.mkdir(parents=True)
    for kind, split in splits.items():
        (folder / f"{kind}.txt").write_text("\n".join(split.heldout), encoding="utf-8")


def _save(
    folder: Path,
    model: Llama,
    bpe: Tokenizer,
    title: str,
    schedule: Schedule,
    shares: Mapping[str, float],
) -> None:
    mixture = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
    readme = (
        f"# {title}\n\n"
        f"Trained by mergegit's `examples/make_family.py`: {schedule.steps} steps of AdamW at a "
        f"learning\nrate of {schedule.learning_rate:g}, on text that comes with Python and torch "
        f"({mixture}).\nGood for trying merges on, and for nothing else.\n"
    )
    checkpoint.save(folder, model, bpe, readme)


def _clock() -> Callable[[str], None]:
    """A `print` that puts the seconds since now before each line."""
    start = time.monotonic()
    return lambda line: print(f"{time.monotonic() - start:5.0f} s  {line}", flush=True)


def _reporter(
    name: str, schedule: Schedule, say: Callable[[str], None]
) -> Callable[[int, float], None]:
    """Says the training loss, averaged over the steps since it was last said."""
    losses: list[float] = []

    def report(step: int, loss: float) -> None:
        losses.append(loss)
        if step % REPORT_STEPS == 0 or step == schedule.steps:
            mean = sum(losses) / len(losses)
            say(f"{name}: step {step} of {schedule.steps}, training loss {mean:.2f}")
            losses.clear()

    return report


if __name__ == "__main__":
    main()
