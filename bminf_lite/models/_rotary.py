"""Rotary positions of a part of each head, and of neighbouring elements, as rotations of a head's two halves.

The backend's operation rotates element ``i`` of a head against element ``i + head_dim / 2``. Other forms become
this one when the weights are read: the rows of the query and key matrices are reordered, both alike, so that their
products stay the same. Elements that are not rotated get the frequency 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..backend.values import Rope
from ..layers.loading import RowTransform
from ..layers.position import rope_frequencies, rope_parameters, usable_context
from ._config import ConfigReader

HEAD_KEYS = ("head_dim", "hidden_size", "n_embd", "num_attention_heads", "n_head")
"""Keys on which the size of a head depends."""


@dataclass(frozen=True)
class Rotary:
    """The rotation of the first ``size`` elements of each head.

    ``frequencies`` has an entry for each pair of rotated elements: element ``i`` and ``i + size / 2``, or if
    ``interleaved`` ``2 * i`` and ``2 * i + 1``. ``scale`` is the factor on cosine and sine.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False

    @property
    def size(self) -> int:
        """The number of rotated elements of a head."""
        return 2 * len(self.frequencies)

    def rope(self, ops: Backend, head_dim: int) -> Rope:
        """The rotation of heads whose elements are in the order of :meth:`head_transform`."""
        frequencies = np.zeros(head_dim // 2, np.float32)
        frequencies[: len(self.frequencies)] = self.frequencies
        return Rope(ops.vector(frequencies), self.scale if self.size == head_dim else 1.0)

    def head_transform(self, head_dim: int) -> RowTransform | None:
        """The order of a head's elements, and the factors on the rotated ones; None if nothing changes.

        If only a part is rotated, the factor on cosine and sine is a factor on that part's elements.
        """
        if self.size == head_dim and not self.interleaved:
            return None
        pairs = np.arange(self.size).reshape((-1, 2) if self.interleaved else (2, -1))
        first, second = pairs.T if self.interleaved else pairs
        middle = (self.size + head_dim) // 2
        order = np.concatenate([first, np.arange(self.size, middle), second, np.arange(middle, head_dim)])
        if self.scale == 1 or self.size == head_dim:
            return RowTransform(order)
        return RowTransform(order, np.where(order < self.size, np.float32(self.scale), np.float32(1)))


def rotary_pairs(rotary: Rotary | None, head_dim: int) -> tuple[int, ...]:
    """A number for each element of a head as it is stored; elements that are rotated against each other share one."""
    if rotary is None:
        return tuple(range(head_dim))
    transform = rotary.head_transform(head_dim)
    order = np.arange(head_dim) if transform is None or transform.order is None else transform.order
    pairs = np.empty(head_dim, int)
    pairs[order] = np.arange(head_dim) % (head_dim // 2)
    return tuple(map(int, pairs))


def parse_rotary(
    read: ConfigReader,
    theta: float = 10000.0,
    part: float | None = None,
    interleaved: bool = False,
    parameters: Mapping[str, Any] | None = None,
    head_dim: int | None = None,
) -> Rotary | None:
    """The rotation that a ``config.json`` describes; None after a problem with it.

    ``theta`` and ``part`` are the defaults of ``rope_theta`` and ``partial_rotary_factor``; without ``part`` whole
    heads are rotated. ``parameters`` stand for those of ``rope_parameters`` if the file has them per layer type, and
    ``head_dim`` for the field of that name if it differs by layer. The field ``context_length`` becomes the number of
    positions for which the frequencies are right.
    """
    config = read.config
    head_dim = read.fields["head_dim"] if head_dim is None else head_dim
    try:
        found = rope_parameters(config if parameters is None else {"rope_parameters": parameters}, theta, part is None)
        rotated = head_dim + head_dim % 2
        fraction = None
        if found["rope_type"] != "proportional":  # whose frequencies are those of whole heads
            fraction = found.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
        if part is not None:
            rotated = _rotated_elements(head_dim, part if fraction is None else fraction)
        if rotated == 0:
            text = f"partial_rotary_factor ({fraction!r}) of heads of {head_dim} elements is not a number of pairs"
            read.require(False, text, *HEAD_KEYS)
            return None
        frequencies, scale = rope_frequencies(found, rotated, read.fields["context_length"])
        read.fields["context_length"] = usable_context(found, read.fields["context_length"])
    except ValueError as error:
        read.problem("rope_parameters", str(error))
        return None
    return Rotary(tuple(map(float, frequencies)), scale, interleaved)


def rotary_of_size(size: int, theta: float = 10000.0, interleaved: bool = False) -> Rotary:
    """The plain rotation of the first ``size`` elements of each head."""
    parameters = {"rope_type": "default", "rope_theta": theta}
    return Rotary(tuple(map(float, rope_frequencies(parameters, size, 1)[0])), 1.0, interleaved)


def _rotated_elements(head_dim: int, fraction: Any) -> int:
    """The rotated part of a head; 0 if that is no number of pairs."""
    rotated = int(head_dim * fraction) if isinstance(fraction, (int, float)) and 0 < fraction <= 1 else 0
    return 0 if rotated % 2 or head_dim % 2 else rotated
