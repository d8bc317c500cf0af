"""Budgets: the most expert bytes that a plan may read, as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from mergegit.errors import BadBudget

_UNITS: Final = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_FORM: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%|[a-z]*)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Budget:
    """Either a share of the bytes that a full read takes, in millionths, or a number of bytes."""

    millionths: int | None = None
    nbytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """``10%``, ``12.5%``, ``2GiB``, ``500MB`` or ``0``. Raises ``BadBudget``."""
        match = _FORM.fullmatch(text)
        if match is None or (match[2] != "%" and match[2].lower() not in _UNITS):
            raise BadBudget(
                f"{text!r} is not a budget", hint="write it like 10%, 12.5%, 2GiB, 500MB or 0"
            )
        number = Decimal(match[1])
        if match[2] == "%":
            if number > 100:
                raise BadBudget(
                    f"a budget of {text} is more than everything",
                    hint="100% reads every expert whole",
                )
            return cls(millionths=int(number * 10_000))
        return cls(nbytes=int(number * _UNITS[match[2].lower()]))

    def bytes_of(self, raw_bytes: int) -> int:
        """The budget in bytes, where a full read takes ``raw_bytes``."""
        if self.nbytes is not None:
            return self.nbytes
        assert self.millionths is not None
        return raw_bytes * self.millionths // 1_000_000
