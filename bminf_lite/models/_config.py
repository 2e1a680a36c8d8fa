"""Reading a ``config.json`` by a table, with every nonsensical value reported at once.

An architecture's table maps each field of its ``Config`` to a key: its name in ``config.json``, the type and bounds of
its value, and the default. The architecture's ``parse`` checks what a table cannot express.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, ClassVar

from ..errors import CheckpointError, listed
from ..layers.cache import CacheLayout, Layout

MAX_LAYERS = 4096
MAX_HEAD_DIM = 1024

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

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
}
"""Names in configurations -> names in ``backend.functions.ACTIVATIONS``."""


@dataclass(frozen=True)
class ModelConfig(ABC):
    """What a model is besides its layers; ``context_length`` in tokens, sizes in elements.

    A model that ``generates`` has logits of a next token; others make vectors of texts.
    """

    is_encoder_decoder: ClassVar[bool] = False
    generates: ClassVar[bool] = True

    vocab_size: int
    hidden_size: int
    context_length: int

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """The layers that decode."""

    @property
    @abstractmethod
    def cache_layout(self) -> CacheLayout:
        """The keys and values of a token, and in an encoder-decoder of a token of its source."""

    @property
    def layer_layouts(self) -> tuple[tuple[Layout, ...], ...]:
        """Those of :attr:`cache_layout` that each layer has, which may be none or several."""
        return tuple((layout,) for layout in self.cache_layout.layers)

    @property
    def reads_pieces(self) -> bool:
        """Whether a text that becomes a vector may be computed in pieces, because no token sees one behind it."""
        return not self.is_encoder_decoder

    @property
    def source_layers(self) -> dict[int, int]:
        """For each layer that reads the cache of another, the number of that."""
        return {}

    @property
    def layer_input_features(self) -> int:
        """What layers read of a token beside the residual stream, in values of the activation type."""
        return 0

    @property
    def shared_norm_vectors(self) -> int:
        """Vectors of those norms, of all layers that decode, which two products apply: each normalises for itself."""
        return 0

    @property
    @abstractmethod
    def divided(self) -> dict[str, int]:
        """What the ranks of a model divide, by name."""

    @property
    def undivided(self) -> str | None:
        """Why the model cannot be divided among ranks; None if it can."""
        return None

    @property
    def shared_heads(self) -> frozenset[int]:
        """Numbers of heads of keys and values; each divides the number of ranks, or is divided by it."""
        return frozenset()

    @property
    def tp_sizes(self) -> list[int]:
        """Among how many ranks the model can be divided."""
        most = math.gcd(*self.divided.values()) if self.undivided is None else 1
        return [size for size in range(1, most + 1) if not self.tp_problems(size)]

    def tp_problems(self, tp_size: int) -> list[str]:
        """Why the model cannot be divided among ``tp_size`` ranks; empty if it can."""
        found = [f"{count:,} {name} are not divisible by it" for name, count in self.divided.items() if count % tp_size]
        found += [
            f"{count:,} key-value heads are neither divisible by it, nor is it by them"
            for count in sorted(self.shared_heads)
            if count % tp_size and tp_size % count
        ]
        return [*found, self.undivided] if tp_size > 1 and self.undivided is not None else found

    @property
    def max_source_length(self) -> int:
        """The longest source; 0 without an encoder."""
        return self.context_length if self.is_encoder_decoder else 0

    @property
    def decoder_start_token_ids(self) -> tuple[int, ...]:
        """The tokens from which a decoder starts; none without an encoder."""
        return ()


def common_divisors(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The greatest common divisor of the counts of each name."""
    found: dict[str, int] = {}
    for own in counts:
        for name, count in own.items():
            found[name] = math.gcd(found.get(name, 0), count)
    return found


Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Key:
    """The key ``name`` of ``config.json``; see :func:`integer`, :func:`number`, :func:`flag` and :func:`choice`.

    ``convert`` returns the field's value, or None if the value in the file is not as ``expected``. An absent key means
    ``default``. If the value is null, or absent without a default, ``derive`` computes it from the fields before it in
    the table; without ``derive`` it is ``default``, or a problem if the key is ``required``. ``stand_in`` is the
    field's value after a problem, so that reading can go on to the next key.
    """

    name: str
    default: Any
    expected: str
    convert: Callable[[Any], Any]
    stand_in: Any
    derive: Callable[[Fields], Any] | None = None
    required: bool = False


Keys = Mapping[str, Key]
"""Field of a ``Config`` -> key of ``config.json``. Defaults are those of transformers' class, as are the keys."""


def integer(
    name: str,
    default: int | None = None,
    derive: Callable[[Fields], int] | None = None,
    low: int = 1,
    high: int = 2**24,
    required: bool = True,
) -> Key:
    """A whole number in ``low..high``."""

    def convert(value: Any) -> int | None:
        return value if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high else None

    return Key(name, default, f"a whole number from {low} to {high}", convert, max(low, 1), derive, required)


def number(name: str, default: float, low: float = 0.0, high: float = 1e30) -> Key:
    """A number in ``low..high``."""

    def convert(value: Any) -> float | None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if is_number and low <= value <= high else None

    return Key(name, default, f"a number from {low} to {high}", convert, default)


def flag(name: str, default: bool) -> Key:
    """True or false; null is false, as it is to transformers, whatever the default."""

    def convert(value: Any) -> bool | None:
        return value if isinstance(value, bool) else None

    return Key(name, default, "true or false", convert, default, lambda fields: False)


def choice(name: str, default: str, choices: Mapping[str, Any]) -> Key:
    """One of the names in ``choices``, which maps it to the field's value."""

    def convert(value: Any) -> Any:
        return choices.get(value) if isinstance(value, str) else None

    return Key(name, default, f"one of {', '.join(choices)}", convert, choices[default])


def with_defaults(keys: Keys, **defaults: Any) -> dict[str, Key]:
    """``keys`` with other defaults, by the names in ``config.json``."""
    return {field: replace(key, default=defaults.get(key.name, key.default)) for field, key in keys.items()}


class ConfigReader:
    """Reads ``config`` by the table ``keys`` into :attr:`fields`, and further keys by :meth:`value`.

    Problems are collected, and :meth:`checked_fields` raises them together. A key has one problem at most, its first.
    """

    def __init__(self, config: Mapping[str, Any], keys: Keys):
        self.config = config
        self.keys = keys
        self._problems: list[str] = []
        self._bad: set[str] = set()
        self.fields: dict[str, Any] = {}
        for field, key in keys.items():
            self.fields[field] = self.value(key)

    def is_null(self, key: Key) -> bool:
        """Whether there is no value of ``key``, not even by default."""
        return self.config.get(key.name, key.default) is None

    def value(self, key: Key) -> Any:
        """The value of ``key`` for its field; a stand-in if there is a problem with it."""
        value = self.config.get(key.name, key.default)
        if value is None:
            value = key.derive(self.fields) if key.derive else None if key.required else key.default
        converted = None if value is None else key.convert(value)
        if value is None:
            self.problem(key.name, f"{key.name} is missing")
        elif converted is None:
            self.problem(key.name, f"{key.name} is {value!r}, not {key.expected}")
        return key.stand_in if converted is None else converted

    def value_or_none(self, key: Key) -> Any:
        """The value of ``key``, or None if it is null."""
        return None if self.is_null(key) else self.value(key)

    def problem(self, name: str, text: str) -> None:
        """Record a problem with the value of the key ``name``."""
        if name not in self._bad:
            self._bad.add(name)
            self._problems.append(text)

    def require(self, holds: bool, text: str, *names: str) -> None:
        """Record ``text``, about the keys ``names`` together, unless it holds or one of them is bad by itself."""
        if not holds and not self._bad & set(names):
            self._problems.append(text)

    def require_divisible(self, whole: str, part: str) -> None:
        """Record a problem unless the field ``whole`` is a multiple of the field ``part``."""
        names, values = [self.keys[f].name for f in (whole, part)], [self.fields[f] for f in (whole, part)]
        text = f"{names[0]} ({values[0]}) is not a multiple of {names[1]} ({values[1]})"
        self.require(values[0] % values[1] == 0, text, *names)

    def reject_unknown_keys(self) -> None:
        """Record every key that is neither in the table nor in :data:`COMMON`: for this project's own formats."""
        known = {key.name for key in self.keys.values()}
        for name in self.config.keys() - known - COMMON:
            close = get_close_matches(name, known, n=1)
            hint = f"; the nearest is {close[0]}" if close else ""
            self.problem(name, f"{name} is not a key of this model_type{hint}")

    def checked_fields(self) -> dict[str, Any]:
        """The fields of the table; raises ``CheckpointError`` with all problems if there are any."""
        if self._problems:
            raise CheckpointError(listed("config.json", self._problems))
        return self.fields


FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types(read: ConfigReader, default: list[str]) -> list[str]:
    """``layer_types``: for each layer :data:`FULL`, or :data:`SLIDING` for a layer with a window."""
    types, layers = read.config.get("layer_types"), read.fields["layers"]
    if types is None:
        return default
    if not isinstance(types, list) or len(types) != layers or not all(t in (FULL, SLIDING) for t in types):
        read.problem("layer_types", f"layer_types is {types!r}, not {layers} times one of {FULL}, {SLIDING}")
        return default
    return types
