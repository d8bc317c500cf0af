"""What one would write in an afternoon: tensor by tensor with safetensors and torch.

Run as a program of its own, so that its time, memory and reads can be measured:
``python naive.py METHOD OUT BASE EXPERT...``, with weights 1/K and density 0.5, in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

Merge = Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]


def linear(_base: torch.Tensor, experts: list[torch.Tensor]) -> torch.Tensor:
    return sum(experts) / len(experts)  # type: ignore[return-value]


def ties(base: torch.Tensor, experts: list[torch.Tensor]) -> torch.Tensor:
    deltas = []
    for expert in experts:
        delta = expert - base
        keep = max(int(0.5 * delta.numel()), 1)
        threshold = delta.abs().flatten().kthvalue(delta.numel() - keep + 1).values
        deltas.append(torch.where(delta.abs() >= threshold, delta, 0.0))
    return _elected(base, deltas)


def dare_ties(base: torch.Tensor, experts: list[torch.Tensor]) -> torch.Tensor:
    kept = [
        (expert - base) * torch.bernoulli(torch.full_like(base, 0.5)) / 0.5 for expert in experts
    ]
    return _elected(base, kept)


def slerp(_base: torch.Tensor, experts: list[torch.Tensor]) -> torch.Tensor:
    first, second = experts[0].flatten(), experts[1].flatten()
    cosine = torch.dot(first, second) / (first.norm() * second.norm())
    if cosine > 0.9995:
        return (experts[0] + experts[1]) / 2
    angle = torch.acos(cosine)
    share = torch.sin(angle / 2) / torch.sin(angle)
    return share * (experts[0] + experts[1])


def _elected(base: torch.Tensor, deltas: list[torch.Tensor]) -> torch.Tensor:
    total = sum(deltas)
    sign = torch.where(total >= 0, 1.0, -1.0)  # type: ignore[operator]
    agreeing = [torch.where(delta * sign > 0, delta, 0.0) for delta in deltas]
    count = sum((delta != 0).float() for delta in agreeing)
    return base + sum(agreeing) / torch.clamp(count, min=1)  # type: ignore[arg-type]


METHODS: dict[str, Merge] = {
    "linear": linear, "ties": ties, "dare_ties": dare_ties, "slerp": slerp,
}  # fmt: skip


def main() -> None:
    method, out, base, *experts = sys.argv[1:]
    files = [_Tensors(Path(path)) for path in (base, *experts)]
    merged = {}
    for name in files[0].names():
        first, *rest = (tensors.get(name) for tensors in files)
        merged[name] = METHODS[method](first.float(), [t.float() for t in rest]).to(first.dtype)
    Path(out).mkdir()
    save_file(merged, Path(out) / "model.safetensors", metadata={"format": "pt"})


class _Tensors:
    def __init__(self, directory: Path) -> None:
        self._files = [safe_open(path, "pt") for path in sorted(directory.glob("*.safetensors"))]
        self._owner = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

    def names(self) -> list[str]:
        return list(self._owner)

    def get(self, name: str) -> torch.Tensor:
        return self._owner[name].get_tensor(name)


if __name__ == "__main__":
    main()
