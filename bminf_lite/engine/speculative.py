"""How a model drafts tokens: the options of ``speculative``, under the names that vLLM gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, cast

from ..errors import UsageError, is_whole, listed

AUTO = "auto"
"""Stands for n-grams where they cannot change a result, and else for no drafts."""
MAX_DRAFT_TOKENS = 16
"""The bound of ``num_speculative_tokens``: a sequence with a grammar has a bit mask for each."""
MAX_LOOKUP = 32
"""The bound of ``prompt_lookup_max``."""
EAGLE3 = "eagle3"
"""The method of a head on the model itself."""
MTP = "mtp"
"""The method of a layer of the model's own checkpoint."""
DEFAULT_TOKENS = {"ngram": 8, "suffix": 8, "draft_model": 4, EAGLE3: 4, MTP: 2}
"""The methods, with the drafts that each makes for a request at most unless ``num_speculative_tokens`` is given."""
LOOKUP_MAX, LOOKUP_MIN = 4, 2
"""The lengths of n-grams, unless they are given."""
LOOKUP, SUFFIX = "prompt_lookup_", "suffix_decoding_"
"""What the names of the options of ``ngram`` and of ``suffix`` begin with."""
MAX_CACHED_REQUESTS = 1_000_000
"""The bound of ``suffix_decoding_max_cached_requests``."""
_BOUNDS: dict[str, tuple[int, int | float]] = {
    "num_speculative_tokens": (1, MAX_DRAFT_TOKENS),
    "prompt_lookup_max": (1, MAX_LOOKUP),
    "prompt_lookup_min": (1, MAX_LOOKUP),
    "suffix_decoding_max_tree_depth": (2, 256),
    "suffix_decoding_max_cached_requests": (0, MAX_CACHED_REQUESTS),
    "suffix_decoding_max_spec_factor": (0, 100.0),
    "suffix_decoding_min_token_prob": (0, 1.0),
}
"""The least and the most of each number; a number with a fraction is more than the least."""


class SuffixOptions(NamedTuple):
    """The options of the method ``suffix``, see :class:`SpeculativeConfig`, with their defaults, which are vLLM's."""

    max_tree_depth: int = 24
    max_cached_requests: int = 10_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1


@dataclass(frozen=True)
class SpeculativeConfig:
    """Where drafts come from. Every field is optional but for ``method`` or ``model``, one of which is needed.

    - ``method``: ``ngram``: what followed the request's last tokens where they occurred before in its prompt or its
      completion; ``suffix``: what followed the longest end of them most often there and in earlier completions of the
      same ``cache_salt``; ``draft_model``: a smaller model, the default if there is a ``model``; ``eagle3``: a head
      that reads what layers of the model compute; ``mtp``: a layer of the checkpoint that was trained to guess.
    - ``num_speculative_tokens``: the most drafts of a request that a step checks, 1 to :data:`MAX_DRAFT_TOKENS`. The
      default is that of :data:`DEFAULT_TOKENS`.
    - ``model``: the checkpoint of the draft model, which has the vocabulary of the model, or of the EAGLE-3 head.
    - ``prompt_lookup_max``, ``prompt_lookup_min``: ``ngram`` looks for the last ``prompt_lookup_max`` tokens first
      (:data:`LOOKUP_MAX`), then for fewer, down to ``prompt_lookup_min`` (:data:`LOOKUP_MIN`, or ``prompt_lookup_max``
      if that is less).
    - ``suffix_decoding_max_tree_depth``: ``suffix`` looks for at most as many tokens (24).
      ``suffix_decoding_max_cached_requests``: earlier completions of a salt that are kept (10,000; 0 for none).
      ``suffix_decoding_max_spec_factor``: drafts for each token that was found (1.0).
      ``suffix_decoding_min_token_prob``: drafts end where their estimated probability is less (0.1).
    - ``adaptive``: the number of drafts follows how many were accepted and how many sequences share the step, and none
      are made where they cost more than they save (:mod:`.draft_control`). With False, all that are found are checked.

    Raises ``UsageError`` with every problem.
    """

    method: str | None = None
    num_speculative_tokens: int | None = None
    model: str | Path | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.method is None and self.model is not None:
            object.__setattr__(self, "method", "draft_model")
        if problems := self._problems():
            raise UsageError(listed("speculative", problems))

    @classmethod
    def from_value(cls, value: Any) -> SpeculativeConfig | None:
        """The configuration that a caller writes: a method, a mapping, its text in JSON, or an instance.

        None and ``"none"`` stand for no drafts. Raises ``UsageError``.
        """
        if value is None or isinstance(value, SpeculativeConfig):
            return value
        if isinstance(value, str):
            if value == "none":
                return None
            if not value.lstrip().startswith("{"):
                return cls(value)
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"speculative is {value!r}, which is not JSON: {error}") from None
        if not isinstance(value, Mapping):
            wanted = f"must be auto, none, a method ({', '.join(DEFAULT_TOKENS)}), or a mapping of options"
            raise UsageError(f"speculative is {value!r}, but {wanted}")
        known = [field.name for field in fields(cls)]
        if unknown := [repr(name) for name in value if name not in known]:
            raise UsageError(f"speculative has no option {', '.join(unknown)}; its options are {', '.join(known)}")
        return cls(**value)

    @property
    def num_draft_tokens(self) -> int:
        """The most drafts of a request that a step checks."""
        return self.num_speculative_tokens or DEFAULT_TOKENS[str(self.method)]

    @property
    def has_layers(self) -> bool:
        """Whether layers beside the model's guess: those of a draft model, of a head, or of the checkpoint itself."""
        return self.model is not None or self.method == MTP

    @property
    def ngram_sizes(self) -> tuple[int, ...]:
        """The lengths of n-grams that are looked for, the longest first."""
        most = LOOKUP_MAX if self.prompt_lookup_max is None else self.prompt_lookup_max
        if self.prompt_lookup_max is None and self.prompt_lookup_min is not None:
            most = max(most, self.prompt_lookup_min)
        least = min(LOOKUP_MIN, most) if self.prompt_lookup_min is None else self.prompt_lookup_min
        return tuple(range(most, least - 1, -1))

    @property
    def suffixes(self) -> SuffixOptions:
        """The options of ``suffix``."""
        given = {name: getattr(self, f"{SUFFIX}{name}") for name in SuffixOptions._fields}
        return SuffixOptions()._replace(**{name: value for name, value in given.items() if value is not None})

    def _problems(self) -> list[str]:
        found = []
        if self.method is None:
            found.append(f"method is missing: give one of {', '.join(DEFAULT_TOKENS)}, or a model that drafts")
        elif self.method not in DEFAULT_TOKENS:
            found.append(f"method is {self.method!r}, but must be one of {', '.join(DEFAULT_TOKENS)}, auto, none")
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(most, int) and not (is_whole(value) and least <= value <= most):
                found.append(f"{name} is {value!r}, but must be a whole number, {least} to {most:,}")
            if isinstance(most, float) and not (_is_number(value) and least < value <= most):
                found.append(f"{name} is {value!r}, but must be a number more than {least}, up to {most:g}")
        if not isinstance(self.adaptive, bool):
            found.append(f"adaptive is {self.adaptive!r}, but must be True or False")
        for method, prefix in (("ngram", LOOKUP), ("suffix", SUFFIX)):
            given = [n for n in _BOUNDS if n.startswith(prefix) and getattr(self, n) is not None]
            if given and self.method in DEFAULT_TOKENS and self.method != method:
                found.append(
                    f"{' and '.join(given)} belong to the method {method}, not to {self.method}: leave them out"
                )
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        if is_whole(longest) and is_whole(shortest) and cast(int, shortest) > cast(int, longest):
            found.append(f"prompt_lookup_min is {shortest}, more than the prompt_lookup_max of {longest}: swap them")
        if self.method == "draft_model" and self.model is None:
            found.append("the method draft_model needs a model: the folder of a smaller one with the same vocabulary")
        if self.method == EAGLE3 and self.model is None:
            found.append("the method eagle3 needs a model: the folder of an EAGLE-3 head of this model")
        if self.model is not None and not isinstance(self.model, str | Path):
            found.append(f"model is {self.model!r}, but must be the path of a checkpoint")
        if self.model is not None and self.method in ("ngram", "suffix", MTP):
            found.append(f"the method {self.method} has no model: leave one of them out")
        return found


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


NGRAM = SpeculativeConfig("ngram")
"""Drafts of n-grams, with the default of every option."""
