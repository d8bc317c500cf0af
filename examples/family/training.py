"""Fits a model to tokens, and measures it on tokens that it has not seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from family.model import Llama
from family.tokenizer import Tokens

THREADS = 2
"""Sums are split over threads, so their number is part of what makes a run repeatable."""

BETAS = (0.9, 0.99)
GRADIENT_LIMIT = 1.0
WARMUP_SHARE = 0.05
EVALUATION_BATCH = 16


@dataclass(frozen=True, slots=True)
class Schedule:
    """How one model is trained: AdamW, a linear warm-up, then linearly down to zero."""

    steps: int
    learning_rate: float
    batch: int = 4
    weight_decay: float = 0.01

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        warmup = WARMUP_SHARE * self.steps
        share = min((step + 1) / warmup, (self.steps - step) / (self.steps - warmup))
        return self.learning_rate * share


def make_repeatable() -> None:
    """Make every run on one machine give the same bits."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(THREADS)


def train(
    model: Llama,
    streams: Sequence[Tokens],
    shares: Sequence[float],
    schedule: Schedule,
    *,
    seed: int,
    report: Callable[[int, float], None],
) -> None:
    """Train in place on windows of the model's context, drawn from streams by their shares.

    `report` is called after each step with its number, counted from 1, and its training loss.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=BETAS, weight_decay=schedule.weight_decay, fused=True
    )
    rng = np.random.default_rng(seed)
    length = model.config.max_position_embeddings
    model.train()
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        chosen = rng.choice(len(streams), size=schedule.batch, p=shares)
        loss = _loss(model, _draw([streams[i] for i in chosen], length, rng))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_LIMIT)
        optimizer.step()
        report(step + 1, loss.item())


@torch.inference_mode()
def heldout_loss(model: Llama, tokens: Tokens) -> float:
    """Mean loss in nats per token, over windows of the model's context that do not overlap."""
    model.eval()
    width = model.config.max_position_embeddings + 1
    windows = torch.from_numpy(tokens[: len(tokens) // width * width]).view(-1, width)
    total = 0.0
    for batch in torch.split(windows, EVALUATION_BATCH):
        total += _loss(model, batch).item() * len(batch)
    return total / len(windows)


def _loss(model: Llama, windows: Tensor) -> Tensor:
    """Cross entropy of each window's tokens but the first, given those before them."""
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def _draw(streams: Sequence[Tokens], length: int, rng: np.random.Generator) -> Tensor:
    """One window from each stream, with the token after it: shape (streams, length + 1)."""
    starts = [rng.integers(len(stream) - length) for stream in streams]
    windows = [stream[s : s + length + 1] for stream, s in zip(streams, starts, strict=True)]
    return torch.from_numpy(np.stack(windows))
