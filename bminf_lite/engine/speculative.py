"""How a model drafts tokens: the options of ``speculative``, under the names that vLLM gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import UsageError, is_whole, listed

MAX_DRAFT_TOKENS = 16
"""The bound of ``num_speculative_tokens``: a sequence with a grammar has a bit mask for each."""
MAX_LOOKUP = 32
"""The bound of ``prompt_lookup_max``."""
DEFAULT_TOKENS = {"ngram": 8, "draft_model": 4}
"""The methods, with the drafts that each makes for a request at most unless ``num_speculative_tokens`` is given."""
LOOKUP_MAX, LOOKUP_MIN = 4, 2
"""The lengths of n-grams, unless they are given."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Where drafts come from. Every field is optional but for ``method`` or ``model``, one of which is needed.

    - ``method``: ``ngram``: what followed the request's last tokens where they occurred before in its prompt or its
      completion; ``draft_model``: a smaller model, the default if there is a ``model``.
    - ``num_speculative_tokens``: the most drafts of a request that a step checks, 1 to :data:`MAX_DRAFT_TOKENS`. The
      default is that of :data:`DEFAULT_TOKENS`.
    - ``model``: the checkpoint of the draft model. It has the vocabulary of the model.
    - ``prompt_lookup_max``, ``prompt_lookup_min``: ``ngram`` looks for the last ``prompt_lookup_max`` tokens first
      (:data:`LOOKUP_MAX`), then for fewer, down to ``prompt_lookup_min`` (:data:`LOOKUP_MIN`, or ``prompt_lookup_max``
      if that is less).

    Raises ``UsageError`` with every problem.
    """

    method: str | None = None
    num_speculative_tokens: int | None = None
    model: str | Path | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

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
            wanted = f"must be a method ({', '.join(DEFAULT_TOKENS)}), none, or a mapping of options"
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
    def ngram_sizes(self) -> tuple[int, ...]:
        """The lengths of n-grams that are looked for, the longest first."""
        most = LOOKUP_MAX if self.prompt_lookup_max is None else self.prompt_lookup_max
        if self.prompt_lookup_max is None and self.prompt_lookup_min is not None:
            most = max(most, self.prompt_lookup_min)
        least = min(LOOKUP_MIN, most) if self.prompt_lookup_min is None else self.prompt_lookup_min
        return tuple(range(most, least - 1, -1))

    def _problems(self) -> list[str]:
        found = []
        if self.method is None:
            found.append(f"method is missing: give one of {', '.join(DEFAULT_TOKENS)}, or a model that drafts")
        elif self.method not in DEFAULT_TOKENS:
            found.append(f"method is {self.method!r}, but must be one of {', '.join(DEFAULT_TOKENS)}")
        bounds = {
            "num_speculative_tokens": MAX_DRAFT_TOKENS, "prompt_lookup_max": MAX_LOOKUP, "prompt_lookup_min": MAX_LOOKUP
        }  # fmt: skip
        for name, most in bounds.items():
            value = getattr(self, name)
            if value is not None and not (is_whole(value) and 1 <= value <= most):
                found.append(f"{name} is {value!r}, but must be a whole number, 1 to {most}")
        lookups = {name: getattr(self, name) for name in ("prompt_lookup_max", "prompt_lookup_min")}
        given = [name for name, value in lookups.items() if value is not None]
        if given and self.method not in (None, "ngram"):
            found.append(f"{' and '.join(given)} belong to the method ngram, not to {self.method!r}: leave them out")
        most, least = lookups.values()
        if is_whole(most) and is_whole(least) and least > most:
            found.append(f"prompt_lookup_min is {least}, more than the prompt_lookup_max of {most}: swap them")
        if self.method == "draft_model" and self.model is None:
            found.append("the method draft_model needs a model: the folder of a smaller one with the same vocabulary")
        if self.model is not None and not isinstance(self.model, str | Path):
            found.append(f"model is {self.model!r}, but must be the path of a checkpoint")
        if self.model is not None and self.method == "ngram":
            found.append("the method ngram has no model: leave one of them out")
        return found


NGRAM = SpeculativeConfig("ngram")
"""Drafts of n-grams, with the default of every option."""
