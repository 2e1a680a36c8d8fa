"""Reading a ``config.json`` with every nonsensical value reported at once."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from ..errors import CheckpointError, listed

COMMON = {
    "model_type",
    "architectures",
    "quantization_config",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "tokenizer_class",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
}
"""Keys that any ``config.json`` may have."""


class ConfigReader:
    """Typed, bounded look-ups in a configuration. Problems are collected; :meth:`raise_problems` raises them together.

    ``defaults`` are what transformers' class takes where a key is absent. A null is no absent key: it means what the
    look-up's own default says. A look-up with a problem returns a harmless stand-in, so that reading can go on to the
    next problem.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.config = {**defaults, **config}
        self.problems: list[str] = []
        self._bad: set[str] = set()

    def problem(self, key: str, text: str) -> None:
        """Record a problem with the value of ``key``; of one key only the first counts."""
        if key not in self._bad:
            self._bad.add(key)
            self.problems.append(text)

    def require(self, holds: bool, text: str, *keys: str) -> None:
        """Record ``text``, about the values of ``keys`` together, unless it holds or one of them is bad by itself."""
        if not holds and not self._bad & set(keys):
            self.problems.append(text)

    def reject_unknown_keys(self, keys: Collection[str]) -> None:
        """Record every key that is not one of ``keys`` nor of :data:`COMMON`, for formats of our own."""
        for key in self.config.keys() - set(keys) - COMMON:
            close = get_close_matches(key, keys, n=1)
            hint = f"; the nearest is {close[0]}" if close else ""
            self.problem(key, f"{key} is not a key of this model_type{hint}")

    def require_divisible(self, part: str, divisor: int, whole: str, dividend: int) -> None:
        """Record a problem unless the value of ``whole`` is a multiple of that of ``part``."""
        text = f"{whole} ({dividend}) is not a multiple of {part} ({divisor})"
        self.require(dividend % divisor == 0, text, part, whole)

    def relative_buckets(self) -> tuple[int, int]:
        """Buckets of relative distances, and the distance from which on all share the last one."""
        buckets = self.integer("relative_attention_num_buckets", 32, low=4, high=65536)
        max_distance = self.integer("relative_attention_max_distance", 128, high=65536)
        self.require(buckets % 4 == 0, f"relative_attention_num_buckets ({buckets}) is not a multiple of 4",
                     "relative_attention_num_buckets")  # fmt: skip
        self.require(
            max_distance > buckets // 2,
            f"relative_attention_max_distance ({max_distance}) is not larger than half of "
            f"relative_attention_num_buckets ({buckets})",
            "relative_attention_max_distance", "relative_attention_num_buckets",
        )  # fmt: skip
        return buckets, max_distance

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = 2**24) -> int:
        """A whole number in ``low..high``. ``default`` serves where there is no value; None: one is required."""
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            self.problem(key, f"{key} is missing")
        elif not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.problem(key, f"{key} is {value!r}, not a whole number from {low} to {high}")
        else:
            return value
        return max(low, 1)

    def layers(self) -> int:
        """The number of layers."""
        return self.integer("num_hidden_layers", high=4096)

    def number(self, key: str, default: float, low: float = 0.0, high: float = math.inf) -> float:
        """A finite number in ``low..high``."""
        value = self.config.get(key)
        if value is None:
            value = default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or math.isinf(value):
            self.problem(key, f"{key} is {value!r}, not a number from {low} to {high}")
            return default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problem(key, f"{key} is {value!r}, not true or false")
            return default
        return value

    def choice(self, key: str, default: str, choices: dict[str, str]) -> str:
        """What ``choices`` maps the value to."""
        value = self.config.get(key)
        if value is None:
            value = default
        if not isinstance(value, str) or value not in choices:
            self.problem(key, f"{key} is {value!r}, not one of {', '.join(choices)}")
            return next(iter(choices.values()))
        return choices[value]

    def raise_problems(self) -> None:
        """Raise ``CheckpointError`` with all problems, if there are any."""
        if self.problems:
            raise CheckpointError(listed("config.json", self.problems))
