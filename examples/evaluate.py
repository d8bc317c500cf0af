"""Measure checkpoints of the small model family on text that none of them was trained on.

    python examples/evaluate.py OUT/base OUT/python MERGED

prints the loss of each checkpoint on each kind of held-out text, in nats per token: lower is
better, and 0.01 less means that a token has on average become 1% more likely.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from family import checkpoint, training
from family.text import KINDS

MEAN = "mean"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("checkpoints", metavar="CHECKPOINT", type=Path, nargs="+")
    parser.add_argument(
        "--heldout",
        metavar="DIR",
        type=Path,
        help="the held-out text; by default `heldout` beside the first checkpoint",
    )
    parser.add_argument("--json", action="store_true", help="print the losses as JSON")
    arguments = parser.parse_args()
    heldout = arguments.heldout or arguments.checkpoints[0].absolute().parent / "heldout"
    if not heldout.is_dir():
        parser.error(f"there is no held-out text in {heldout}; name its directory with --heldout")
    for folder in arguments.checkpoints:
        if not (folder / "config.json").is_file():
            parser.error(f"{folder} is not a checkpoint: it has no config.json")
    training.make_repeatable()

    texts = {kind: (heldout / f"{kind}.txt").read_text(encoding="utf-8") for kind in KINDS}
    losses = {str(folder): _losses(folder, texts) for folder in arguments.checkpoints}
    if arguments.json:
        print(json.dumps(losses, indent=2))
    else:
        _print_table(losses)


def _losses(folder: Path, texts: Mapping[str, str]) -> dict[str, float]:
    """Loss of one checkpoint on each kind of text, and the mean over the kinds."""
    model, tokenizer = checkpoint.load(folder)
    losses = {
        kind: training.heldout_loss(model, tokenizer.encode(text)) for kind, text in texts.items()
    }
    return losses | {MEAN: sum(losses.values()) / len(losses)}


def _print_table(losses: Mapping[str, Mapping[str, float]]) -> None:
    columns = (*KINDS, MEAN)
    width = max(len("checkpoint"), *map(len, losses))
    print(f"{'checkpoint':{width}}" + "".join(f"{column:>9}" for column in columns))
    for name, row in losses.items():
        print(f"{name:{width}}" + "".join(f"{row[column]:9.3f}" for column in columns))


if __name__ == "__main__":
    main()
