"""The parameters of sampling: set by a caller, checked once, and turned into arrays for a backend.

:func:`sampler_state` turns the :class:`SamplingParams` of several sequences into arrays, whose meaning
:mod:`bminf_lite.backend.sampling` defines.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from ..backend.sampling import PROMPT_FLAG, SamplerState
from ..errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

INT32_MAX = 2**31 - 1
FP32_TINY = float(np.finfo(np.float32).tiny)
FP32_MAX = float(np.finfo(np.float32).max)
MAX_PENALTY = 1e24
"""Small enough that penalised logits stay finite in fp32 for any number of occurrences of a token."""

_INTEGERS = {"max_new_tokens": (1, INT32_MAX), "top_k": (0, INT32_MAX), "seed": (0, 2**64 - 1)}
_NUMBERS = {
    "temperature": (0.0, FP32_MAX, "a finite number, 0 or more"),
    "top_p": (FP32_TINY, 1.0, "over 0 and at most 1"),
    "min_p": (0.0, 1.0, "from 0 to 1"),
    "repetition_penalty": (1 / MAX_PENALTY, MAX_PENALTY, f"from {1 / MAX_PENALTY:g} to {MAX_PENALTY:g}"),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY, f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}"),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY, f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}"),
}


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of a completion. Raises ``UsageError`` with every field that is out of range.

    - ``max_new_tokens``: the maximum length of the completion, 1 or more.
    - ``temperature``: 0 takes the most likely token; larger is more random.
    - ``top_k``: draw from this many most likely tokens; 0 is off.
    - ``top_p``: draw from the fewest most likely tokens whose probabilities add up to this; over 0, and 1 is off.
    - ``min_p``: drop tokens less likely than this fraction of the most likely one, from 0 (off) to 1.
    - ``repetition_penalty``: divides positive and multiplies negative logits of tokens in the prompt and the
      completion; 1e-24 to 1e24, 1 is off.
    - ``presence_penalty``, ``frequency_penalty``: subtracted from the logit of a generated token, once, or once per
      occurrence; -1e24 to 1e24, 0 is off.
    - ``seed``: 0 to 2**64 - 1. The same seed gives the same tokens; ``None`` draws a seed at random.
    - ``stop``: strings that end the completion and are not part of it. One string counts as a tuple of one.
    - ``ignore_eos``: continue after an end-of-sequence token.
    - ``logprobs``: report the log-probability of each token.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        elif isinstance(self.stop, Sequence):
            object.__setattr__(self, "stop", tuple(self.stop))
        problems = [p for f in fields(self) if (p := _problem(f.name, getattr(self, f.name)))]
        if problems:
            raise UsageError("; ".join(problems))

    @classmethod
    def from_checkpoint(
        cls, generation_config: Mapping[str, Any], **overrides: Unpack[SamplingOptions]
    ) -> SamplingParams:
        """The defaults of a checkpoint's ``generation_config.json``, replaced by ``overrides`` that are not ``None``.

        As in transformers, the temperature is 0 unless the file says ``"do_sample": true``, and then it is 1 unless the
        file gives another. Raises ``CheckpointError`` for invalid values in the file (values that an override replaces
        are not checked), ``UsageError`` for an override that is unknown or out of range.
        """
        names = [f.name for f in fields(cls)]
        given = {name: value for name, value in overrides.items() if value is not None}
        if unknown := [name for name in overrides if name not in names]:
            raise UsageError("; ".join(_unknown_option(name, names) for name in unknown))
        defaults = {
            name: generation_config[name]
            for name in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
            if generation_config.get(name) is not None and name not in given
        }
        problems = [p for name, value in defaults.items() if (p := _problem(name, value))]
        do_sample = generation_config.get("do_sample")
        if do_sample not in (True, False, None):
            problems.append(f"do_sample is {do_sample!r}, but must be true or false")
        if problems:
            raise CheckpointError(
                f"generation_config.json: {'; '.join(problems)}. Correct the file, or give these options explicitly"
            )
        if "temperature" not in given:
            defaults["temperature"] = defaults.get("temperature", 1.0) if do_sample else 0.0
        return cls(**(defaults | given))

    def merged(self, **overrides: Unpack[SamplingOptions]) -> SamplingParams:
        """These parameters, replaced by ``overrides`` that are not ``None``; ``UsageError`` for values out of range."""
        if not isinstance(self, SamplingParams):
            raise UsageError(
                f"the sampling parameters are {self!r}, but must be SamplingParams; name options by keyword"
            )
        names = [f.name for f in fields(self)]
        if unknown := [name for name in overrides if name not in names]:
            raise UsageError("; ".join(_unknown_option(name, names) for name in unknown))
        given: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
        return replace(self, **given)

    def with_seed(self) -> SamplingParams:
        """These parameters with a random seed if they have none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(64))


class SamplingOptions(TypedDict, total=False):
    """The fields of :class:`SamplingParams` as keyword arguments; ``None`` means the checkpoint's default."""

    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    ignore_eos: bool | None
    logprobs: bool | None


def sampler_state(
    params: Sequence[SamplingParams], prompts: Sequence[Sequence[int]], vocab_size: int, sequences: Sequence[int]
) -> SamplerState:
    """The state of sequences at their start, as NumPy arrays: a row for each of ``params`` and ``prompts`` (token ids).

    Each of ``params`` must have a seed. ``sequences`` makes sequences with equal seeds draw differently.
    """

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(p, name) for p in params], dtype)

    counts = None
    if any((p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1, 0, 0) for p in params):
        counts = np.zeros((len(params), vocab_size), np.int32)
        for row, prompt in zip(counts, prompts, strict=True):
            row[np.asarray(prompt, np.int64)] = PROMPT_FLAG
    return SamplerState(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        repetition_penalty=column("repetition_penalty", np.float32),
        presence_penalty=column("presence_penalty", np.float32),
        frequency_penalty=column("frequency_penalty", np.float32),
        seed=column("seed", np.uint64),
        sequence=np.array(sequences, np.int32),
        step=np.zeros(len(params), np.int32),
        counts=counts,
        greedy=counts is None and all(p.temperature == 0 for p in params),
    )


_ELSEWHERE = {
    "do_sample": "a temperature over 0 draws, and 0 takes the most likely token",
    "max_length": "max_new_tokens counts the new tokens alone",
    "max_tokens": "its name here is max_new_tokens",
    "num_beams": "there is no beam search",
    "eos_token_id": "stop takes texts, and ignore_eos=True continues after an end-of-sequence token",
}
"""What to use instead of options of other libraries."""


def _unknown_option(name: str, names: Sequence[str]) -> str:
    close = get_close_matches(name, names, n=1, cutoff=0.7)
    default = f"the nearest is {close[0]!r}" if close else f"there are {', '.join(names)}"
    return f"there is no sampling option {name!r}; {_ELSEWHERE.get(name, default)}"


def _problem(name: str, value: Any) -> str | None:
    """The error message for the value of a field; None if the value is valid."""
    if name in _INTEGERS:
        low, high = _INTEGERS[name]
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        valid = (whole and low <= value <= high) or (name == "seed" and value is None)
        wanted = f"a whole number from {low} to {high}"
    elif name in _NUMBERS:
        least, most, wanted = _NUMBERS[name]
        number = isinstance(value, Real) and not isinstance(value, bool)
        valid = number and least <= value <= most  # false for NaN
    elif name == "stop":
        valid = isinstance(value, tuple) and all(isinstance(s, str) and s for s in value)
        wanted = "a text or several, none of them empty"
    else:
        valid, wanted = isinstance(value, bool), "True or False"
    return None if valid else f"{name} is {value!r}, but must be {wanted}"
