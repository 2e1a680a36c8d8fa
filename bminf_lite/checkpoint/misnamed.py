"""Tensors whose names all differ from a model's in the same way: by a prefix that a wrapper put before them, or took.

``torch.compile`` names its module ``_orig_mod``, ``DataParallel`` names it ``module``, and the body of a model without
its head lacks ``model``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..models.spec import Spec
from .compressed_tensors import QUANTIZATION_SUFFIXES

LEAST_SHARE = 0.5
"""The least share of a model's names that a change explains."""
MAX_PARTS = 20
"""The parts that a name may have; names of published models have ten at most."""
MAX_REMOVED = 3
"""Parts of a name that a wrapper adds at most."""


@dataclass(frozen=True)
class Misnamed:
    """The model's ``names`` by those in the file, and the ``problem`` in words."""

    names: Mapping[str, str]
    problem: str


def misnamed(spec: Spec, tensors: Iterable[str]) -> Misnamed | None:
    """The change that makes most of a file's names those of the model; None if there is none, or none is needed."""
    wanted = {module + suffix for name in spec.parameters for module, suffix in _stored_names(name)}
    prefixes = ["", *_common_prefixes(spec)]
    changes: dict[tuple[str, str], dict[str, str]] = {}  # by what is too much and what is missing
    for name in tensors:
        if name in wanted:
            continue
        for mark, rest, is_start in _without_parts(name):
            for prefix in prefixes if is_start else prefixes[:1]:
                if prefix + rest in wanted:
                    changes.setdefault((mark, prefix), {})[name] = prefix + rest
    if not changes:
        return None
    (mark, prefix), names = max(changes.items(), key=lambda item: (len(item[1]), -len(item[0][0])))
    if len(names) < LEAST_SHARE * len(spec.parameters):
        return None
    first, right = next(iter(names.items()))
    example = f"such as {first!r} for {right!r}"
    if not mark:
        what, remedy = (
            f"lack {prefix!r} before their names",
            "save the whole model (AutoModelForCausalLM), not its body",
        )
    elif not prefix:
        what, remedy = f"have {mark!r} in their names", "save the state_dict of the model within its wrapper"
    else:
        what, remedy = f"have the prefix {mark!r}, not {prefix!r}", "take the files from where config.json came from"
    return Misnamed(names, f"{len(names):,} tensors {what}, {example}: {remedy}, or rename them")


def _stored_names(name: str) -> list[tuple[str, str]]:
    module = name.removesuffix(".weight")
    return [(name, ""), *((module, suffix) for suffix in QUANTIZATION_SUFFIXES)]


def _without_parts(name: str) -> Iterator[tuple[str, str, bool]]:
    """Some consecutive parts of a name or none, the name without them, and whether they were at its start."""
    yield "", name, True
    parts = name.split(".")
    if len(parts) > MAX_PARTS:
        return
    for first in range(len(parts) - 1):
        for count in range(1, min(MAX_REMOVED, len(parts) - 1 - first) + 1):
            mark = ".".join(parts[first : first + count]) + "."
            yield mark, ".".join([*parts[:first], *parts[first + count :]]), first == 0


def _common_prefixes(spec: Spec) -> list[str]:
    """The parts with which most names of the model begin."""
    found: Counter[str] = Counter()
    for name in spec.parameters:
        parts = name.split(".")
        found.update(".".join(parts[:count]) + "." for count in range(1, min(MAX_REMOVED, len(parts) - 1) + 1))
    return [prefix for prefix, count in found.items() if count >= LEAST_SHARE * len(spec.parameters)]
