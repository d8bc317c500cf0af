"""``adapter_config.json`` of a LoRA adapter: what it says of ranks, scales and modules.

The file may come from anywhere: sizes, types and the effort of its patterns are bounded, and what
can't be expressed as a change of the base's tensors is refused, never ignored.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from mergegit.checkpoint.json_files import fail, read_object

CONFIG_FILE: Final = "adapter_config.json"
MAX_CONFIG_BYTES: Final = 16 << 20
MAX_RANK: Final = 1 << 20
MAX_PATTERNS: Final = 1 << 16
MAX_PATTERN_LENGTH: Final = 512
MAX_REPEATS: Final = 4
MAX_GROUPS: Final = 4
"""Repeats (``*``, ``+``, ``?``, ``{n,m}``) and groups in one pattern: each multiplies the time that
a name may take."""
MAX_TESTS: Final = 10_000_000
"""The most pairs of a module and a pattern that are tried."""
MAX_SCALE: Final = 1e30

_DEFAULT_RANK: Final = 8
_DEFAULT_ALPHA: Final = 8
AGAIN: Final = "download or save the adapter again"
MERGE_FIRST: Final = "merge it into its base with PEFT's merge_and_unload, and add the result"
_NO_WEIGHTS: Final = "leave it out: no one set of weights stands for it"
_REFUSED: Final = {
    "layer_replication": ("repeats layers of its base", MERGE_FIRST),
    "trainable_token_indices": ("changes single rows of the embeddings", MERGE_FIRST),
    "target_parameters": ("changes parameters that are not modules' weights", MERGE_FIRST),
    "lora_bias": ("adds to biases", MERGE_FIRST),
    "use_qalora": ("pools its inputs", MERGE_FIRST),
    "use_bdlora": ("has block-diagonal factors", MERGE_FIRST),
    "kasa_config": ("has a third factor", MERGE_FIRST),
    "monteclora_config": ("samples its factors", MERGE_FIRST),
    "alora_invocation_tokens": ("acts on some tokens only", _NO_WEIGHTS),
    "arrow_config": ("chooses among adapters for every token", _NO_WEIGHTS),
}
"""Settings that must be empty, with what they mean."""
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin training that take the first factors out of the base: what is trained then is a
change of another base."""
_REPEATED_GROUP: Final = re.compile(r"\)[*+{]")
_REPEAT: Final = re.compile(r"(?<!\()[*+?]|\{")
_ESCAPED: Final = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Settings:
    """What an adapter's config says, checked.

    ``rank`` and ``alpha`` hold for modules that no pattern of ``ranks`` or ``alphas`` matches.
    ``inputs_first`` is its word for Conv1D layers, ``ties_head`` says that a head that shares the
    embedding's weights is saved with it.
    """

    base_name: str | None
    rank: int
    alpha: float
    ranks: Mapping[re.Pattern[str], int]
    alphas: Mapping[re.Pattern[str], float]
    rank_stabilized: bool
    has_magnitudes: bool
    inputs_first: bool
    ties_head: bool
    saved_modules: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        return next((r for p, r in self.ranks.items() if p.match(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """``alpha / r``, or ``alpha / sqrt(r)`` where the rank is stabilized.

        (Kalajdzievski, 2023, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA",
        arXiv 2312.03732.)
        """
        alpha = next((a for p, a in self.alphas.items() if p.match(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


def read_settings(config: bytes, of: str) -> Settings:
    """The settings of adapter ``of``, from the text of its config. Raises ``BadCheckpoint``."""
    if len(config) > MAX_CONFIG_BYTES:
        fail(
            of,
            CONFIG_FILE,
            f"is {len(config):,} bytes long; at most {MAX_CONFIG_BYTES:,} are read",
            "check the file",
        )
    reader = _Reader(of, read_object({CONFIG_FILE: config}, CONFIG_FILE, of))
    reader.check_supported()
    return Settings(
        base_name=reader.text("base_model_name_or_path"),
        rank=reader.rank("r", reader.get("r", _DEFAULT_RANK)),
        alpha=reader.alpha("lora_alpha", reader.get("lora_alpha", _DEFAULT_ALPHA)),
        ranks={p: reader.rank(key, v) for key, p, v in reader.patterns("rank_pattern")},
        alphas={p: reader.alpha(key, v) for key, p, v in reader.patterns("alpha_pattern")},
        rank_stabilized=reader.flag("use_rslora"),
        has_magnitudes=reader.flag("use_dora"),
        inputs_first=reader.flag("fan_in_fan_out"),
        ties_head=reader.flag("ensure_weight_tying"),
        saved_modules=reader.names("modules_to_save"),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """A config's values, each with the type that it must have."""

    of: str
    values: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """What stands there; null counts as absent."""
        value = self.values.get(key)
        return default if value is None else value

    def check_supported(self) -> None:
        kind = self.get("peft_type")
        if kind != "LORA":
            fail(
                self.of,
                CONFIG_FILE,
                f"is of type {kind!r:.80}, where only LORA can be read",
                MERGE_FIRST if isinstance(kind, str) else "check that it is a PEFT adapter",
            )
        for key, (meaning, hint) in _REFUSED.items():
            if self.get(key):
                fail(self.of, CONFIG_FILE, f"sets {key}: the adapter {meaning}", hint)
        start = self.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
            fail(
                self.of,
                CONFIG_FILE,
                f"says init_lora_weights {start!r:.80}: it changes a base that was changed before",
                "save it again with PEFT's path_initial_model_for_weight_conversion, or merge it "
                "with PEFT into the base that it was trained on",
            )

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            self._wrong(key, value, "true or false")
        return bool(value)

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is None or value == "":
            return None
        if not isinstance(value, str) or not _is_text(value):
            self._wrong(key, value, "a text")
        return str(value)

    def names(self, key: str) -> tuple[str, ...]:
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._wrong(key, value, "a list of names")
        return tuple(value)

    def rank(self, key: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_RANK:
            self._wrong(key, value, f"a whole number from 1 to {MAX_RANK:,}")
        return int(value)

    def alpha(self, key: str, value: object) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # False for NaN; whole numbers of any length compare without becoming floats.
        if not is_number or not -MAX_SCALE <= value <= MAX_SCALE:  # type: ignore[operator]
            self._wrong(key, value, "a finite number")
        return float(value)  # type: ignore[arg-type]

    def patterns(self, key: str) -> list[tuple[str, re.Pattern[str], object]]:
        """The entries of a map from patterns of modules' names, in order."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            self._wrong(key, value, "a map from names of modules")
        if len(value) > MAX_PATTERNS:
            self._wrong(key, f"{len(value):,} entries", f"at most {MAX_PATTERNS:,}")
        return [(f"{key} of {name!r:.80}", self._pattern(name), v) for name, v in value.items()]

    def _pattern(self, text: str) -> re.Pattern[str]:
        """A pattern as PEFT understands it: of the whole of a name, or of its last parts."""
        # Brackets and escaped letters stand for one letter each.
        bare = _ESCAPED.sub("x", text)
        if (
            len(text) > MAX_PATTERN_LENGTH
            or _REPEATED_GROUP.search(bare)
            or len(_REPEAT.findall(bare)) > MAX_REPEATS
            or bare.count("(") > MAX_GROUPS
        ):
            fail(
                self.of,
                CONFIG_FILE,
                f"has the pattern {text!r:.80}, which could take for ever to match",
                "name the modules instead",
            )
        try:
            with warnings.catch_warnings(action="ignore", category=FutureWarning):
                return re.compile(rf"(.*\.)?({text})$")
        except (re.error, RecursionError, OverflowError) as error:
            fail(
                self.of,
                CONFIG_FILE,
                f"has the pattern {text!r:.80}, which is none ({str(error)!a})",
                AGAIN,
            )

    def _wrong(self, key: str, value: object, wanted: str) -> NoReturn:
        fail(
            self.of,
            CONFIG_FILE,
            f"gives {key} as {_shown(value)}, where {wanted} is wanted",
            AGAIN,
        )


def _shown(value: object) -> str:
    """A value for a message: neither long nor, as a number of thousands of digits, impossible."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of hundreds of digits"
    return (
        ascii(value)[:80] if isinstance(value, str | int | float | bool) else type(value).__name__
    )


def _is_text(value: str) -> bool:
    """Whether a text can be written: JSON may hold half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
