"""The parameters of sampling: set by a caller, checked once, and turned into what a backend's sampler takes.

:func:`sequence_sampling` turns the :class:`SamplingParams` of a sequence into its row of the sampler's table, which
:mod:`bminf_lite.backend.sampling` defines; :mod:`.sampler_table` keeps the rows of all running sequences.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from ..backend.sampling import (
    MAX_END_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    ROW,
    SamplerState,
    SequenceSampling,
    neutral_rows,
    state_of,
)
from ..errors import CheckpointError, UsageError
from ..generation_config import sampling_defaults, unsupported

if TYPE_CHECKING:
    from typing_extensions import Unpack

INT32_MAX = 2**31 - 1
FP32_TINY = float(np.finfo(np.float32).tiny)
FP32_MAX = float(np.finfo(np.float32).max)
MAX_PENALTY = 1e24
"""Small enough that penalised logits stay finite in fp32 for any number of occurrences of a token."""

MAX_BIAS = 100
"""OpenAI's bound: a bias of -100 or 100 forbids a token or leaves hardly another."""

_INTEGERS = {
    "max_new_tokens": (1, INT32_MAX),
    "min_tokens": (0, INT32_MAX),
    "top_k": (0, INT32_MAX),
    "seed": (0, 2**64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
}
_MAY_BE_NONE = {
    "seed": "None for a random one",
    "logprobs": "None for none (0 reports those of the chosen tokens, k also the k most likely tokens)",
}
_NUMBERS = {
    "temperature": (0.0, FP32_MAX, f"from 0 to {FP32_MAX:.3g}"),
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
    - ``min_tokens``: up to ``max_new_tokens``. A text of ``stop`` that is complete with one of the first ``min_tokens``
      tokens ends nothing. Unless ``ignore_eos`` is set, end-of-sequence tokens are not chosen before these tokens are
      generated.
    - ``logit_bias``: numbers from -100 to 100 that are added to the logits of some tokens, by token id; up to 300. A
      bias of -inf forbids a token.
    - ``begin_suppress_tokens``: token ids that are not chosen first; up to 15. With ``min_tokens`` over 1 they can only
      be end-of-sequence tokens.
    - ``logprobs``: report the log-probability of each token, and of the ``logprobs`` most likely ones (0 to 20);
      ``None`` reports nothing. They are those of the model, before temperature, penalties and filters.
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
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    begin_suppress_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        elif isinstance(self.stop, Sequence):
            object.__setattr__(self, "stop", tuple(self.stop))
        if isinstance(self.begin_suppress_tokens, Sequence) and not isinstance(self.begin_suppress_tokens, str):
            object.__setattr__(self, "begin_suppress_tokens", tuple(self.begin_suppress_tokens))
        problems = [
            p for name, default in _DEFAULTS.items() if (p := _changed_problem(name, default, getattr(self, name)))
        ]
        if not problems and self.min_tokens > self.max_new_tokens:
            problems.append(
                f"min_tokens is {self.min_tokens}, but must be at most max_new_tokens ({self.max_new_tokens}): lower "
                "it or raise max_new_tokens"
            )
        if problems:
            raise UsageError("; ".join(problems))
        object.__setattr__(self, "logit_bias", {int(token): float(b) for token, b in self.logit_bias.items()})

    @classmethod
    def from_checkpoint(
        cls, generation_config: Mapping[str, Any], **overrides: Unpack[SamplingOptions]
    ) -> SamplingParams:
        """The defaults of a checkpoint's ``generation_config.json``, replaced by ``overrides`` that are not ``None``.

        As in transformers, the temperature is 0 unless the file says ``"do_sample": true``, and then it is 1 unless the
        file gives another. What the file forbids stays forbidden. Raises ``CheckpointError`` for invalid values in the
        file (values that an override replaces are not checked) and for fields of it that would change the tokens and
        cannot be obeyed (:func:`.generation_config.unsupported`), ``UsageError`` for an override that is unknown or out
        of range.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        if unknown := [name for name in overrides if name not in _DEFAULTS]:
            raise UsageError("; ".join(map(_unknown_option, unknown)))
        found, problems = sampling_defaults(generation_config)
        defaults = {name: value for name, value in found.items() if name not in given or name == "logit_bias"}
        for name, value in defaults.items():
            if problem := field_problem(name, value):
                problems.append(problem.replace(name, _IN_FILE.get(name, name), 1))
        do_sample = generation_config.get("do_sample")
        if do_sample not in (True, False, None):
            problems.append(f"do_sample is {do_sample!r}, but must be true or false")
        if problems:
            raise CheckpointError(
                f"generation_config.json: {'; '.join(problems)}. Correct the file, or give these options explicitly"
            )
        if "temperature" not in given:
            defaults["temperature"] = defaults.get("temperature", 1.0) if do_sample else 0.0
        values = defaults | given
        if isinstance(bias := given.get("logit_bias"), Mapping):
            file_bias = defaults.get("logit_bias", {})
            forbidden = {token: value for token, value in file_bias.items() if value == -math.inf}
            values["logit_bias"] = {**file_bias, **bias, **forbidden}
        if _is_whole(length := values.get("max_new_tokens", cls.max_new_tokens)) and "min_tokens" not in given:
            values["min_tokens"] = min(values.get("min_tokens", 0), max(length, 0))
        draws = values["temperature"] != 0
        refused = [field.text for field in unsupported(generation_config) if draws or not field.draws]
        if refused:
            raise CheckpointError(
                f"generation_config.json: {'; '.join(refused)}: this would change the tokens, and cannot be done here. "
                "Remove it from the file, or give SamplingParams, which replace the file"
            )
        return cls(**values)

    def merged(self, **overrides: Unpack[SamplingOptions]) -> SamplingParams:
        """These parameters, replaced by ``overrides`` that are not ``None``; ``UsageError`` for values out of range."""
        if not isinstance(self, SamplingParams):
            raise UsageError(
                f"the sampling parameters are {self!r}, but must be SamplingParams; name options by keyword"
            )
        if unknown := [name for name in overrides if name not in _DEFAULTS]:
            raise UsageError("; ".join(map(_unknown_option, unknown)))
        given: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
        return replace(self, **given)

    def with_seed(self) -> SamplingParams:
        """These parameters with a random seed if they have none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(64))

    @property
    def penalizes(self) -> bool:
        """Whether the tokens of the prompt and the completion have to be counted."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def check_model(self, vocab_size: int, eos_ids: Collection[int]) -> None:
        """Raise ``UsageError`` for parameters that do not fit a model's vocabulary and end-of-sequence tokens."""
        outside = sorted(token for token in self.logit_bias if token >= vocab_size)
        if outside:
            raise UsageError(
                f"logit_bias has the token {outside[0]}, but the model's tokens are 0 to {vocab_size - 1}: use ids of "
                "this model's tokenizer"
            )
        if self.min_tokens and not self.ignore_eos and len(eos_ids) > MAX_END_TOKENS:
            raise UsageError(
                f"min_tokens is {self.min_tokens}, but the model has {len(eos_ids)} end-of-sequence tokens, and "
                f"min_tokens can hold back {MAX_END_TOKENS}: set min_tokens to 0, or use ignore_eos"
            )
        if largest := [token for token in self.begin_suppress_tokens if token >= vocab_size]:
            raise UsageError(
                f"begin_suppress_tokens has the token {largest[0]}, but the model's tokens are 0 to {vocab_size - 1}"
            )
        if self.begin_suppress_tokens and self.held_back(eos_ids) is None:
            raise UsageError(
                f"begin_suppress_tokens has tokens that end no completion, and min_tokens is {self.min_tokens}: give "
                f"min_tokens of at most 1 with them, and at most {MAX_END_TOKENS} of them with end-of-sequence tokens"
            )

    def held_back(self, eos_ids: Collection[int]) -> tuple[int, list[int]] | None:
        """How many of the first tokens must not be some ids, and these ids; None for no token, and for too many ids."""
        count = 0 if self.ignore_eos else self.min_tokens
        ends, first = set(eos_ids) if count else set(), set(self.begin_suppress_tokens)
        held = sorted(ends | first)
        if not (count or first) or len(held) > MAX_END_TOKENS or (count > 1 and not first <= ends):
            return None
        return max(count, 1), held


_IN_FILE = {
    "min_tokens": "min_new_tokens",
    "stop": "stop_strings",
    "logit_bias": "the bias by sequence_bias, bad_words_ids and suppress_tokens",
}
"""Where ``generation_config.json`` has fields under other names."""
_DEFAULTS: dict[str, Any] = {f.name: {} if f.name == "logit_bias" else f.default for f in fields(SamplingParams)}


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
    min_tokens: int | None
    logit_bias: Mapping[int, float] | None
    begin_suppress_tokens: Sequence[int] | None
    logprobs: int | None


_NEUTRAL: dict[str, Any] = dict(zip(ROW.names or (), neutral_rows(1)[0].item(), strict=True))
_COLUMNS = (
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""The parameters that are columns of the sampler's table under their own names."""


def sequence_sampling(
    params: SamplingParams,
    sequence: int,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    eos_ids: Collection[int] = (),
) -> SequenceSampling:
    """What the sampler has to know of a sequence that has a prompt and ``generated`` tokens (ids) so far.

    ``params`` must have a seed and fit the model (:meth:`SamplingParams.check_model`). ``sequence`` makes sequences
    with equal seeds draw differently.
    """
    values: dict[str, Any] = {name: getattr(params, name) for name in _COLUMNS}
    values |= {"sequence": sequence, "step": len(generated), "last_token": generated[-1] if generated else 0}
    values["num_logprobs"] = params.logprobs or 0
    if held_back := params.held_back(eos_ids):
        values["min_tokens"], held = held_back
        values["end_tokens"] = [*held, *[-1] * (MAX_END_TOKENS - len(held))]
    row = np.array(tuple((_NEUTRAL | values).values()), ROW)[()]  # several times as fast as a row's columns one by one
    bias = sorted(params.logit_bias.items())
    return SequenceSampling(row, bias, params.penalizes, prompt, generated)


def sampler_state(
    params: Sequence[SamplingParams], prompts: Sequence[Sequence[int]], vocab_size: int, sequences: Sequence[int]
) -> SamplerState:
    """The state of sequences at their start, as NumPy arrays: a row for each of ``params`` and ``prompts`` (token ids).

    Each of ``params`` must have a seed. ``sequences`` makes sequences with equal seeds draw differently.
    """
    return state_of([sequence_sampling(*of) for of in zip(params, sequences, prompts, strict=True)], vocab_size)


_ELSEWHERE = {
    "do_sample": "a temperature over 0 draws, and 0 takes the most likely token",
    "max_length": "max_new_tokens counts the new tokens alone",
    "max_tokens": "its name here is max_new_tokens",
    "num_beams": "there is no beam search",
    "eos_token_id": "stop takes texts, and ignore_eos=True continues after an end-of-sequence token",
}
"""What to use instead of options of other libraries."""


def _unknown_option(name: str) -> str:
    close = get_close_matches(name, _DEFAULTS, n=1, cutoff=0.7)
    default = f"the nearest is {close[0]!r}" if close else f"there are {', '.join(_DEFAULTS)}"
    return f"there is no sampling option {name!r}; {_ELSEWHERE.get(name, default)}"


def field_problem(name: str, value: Any) -> str | None:
    """The error message for the value of a field; None if the value is valid."""
    if name in _INTEGERS:
        low, high = _INTEGERS[name]
        valid = (_is_whole(value) and low <= value <= high) or (value is None and name in _MAY_BE_NONE)
        wanted = f"a whole number from {low} to {high}"
        if name in _MAY_BE_NONE:
            wanted += f", or {_MAY_BE_NONE[name]}"
    elif name in _NUMBERS:
        least, most, wanted = _NUMBERS[name]
        valid = _is_number(value) and least <= value <= most  # false for NaN
    elif name == "stop":
        valid = isinstance(value, tuple) and all(isinstance(s, str) and s for s in value)
        wanted = "a text or several, none of them empty"
    elif name == "logit_bias":
        return _bias_problem(value)
    elif name == "begin_suppress_tokens":
        valid = isinstance(value, tuple) and len(value) <= MAX_END_TOKENS and all(map(_is_token, value))
        wanted = f"a list of token ids, {MAX_END_TOKENS} at most"
    else:
        valid, wanted = isinstance(value, bool), "True or False"
    return None if valid else f"{name} is {value!r}, but must be {wanted}"


def _changed_problem(name: str, default: Any, value: Any) -> str | None:
    """:func:`field_problem` without the time that it takes for defaults, which most fields have."""
    return None if type(value) is type(default) and value == default else field_problem(name, value)


def _bias_problem(value: Any) -> str | None:
    """The same for ``logit_bias``, which names the first wrong entry."""
    if not isinstance(value, Mapping):
        return f"logit_bias is {value!r}, but must be a mapping of token ids to numbers"
    if len(value) > MAX_LOGIT_BIAS:
        return f"logit_bias has {len(value)} entries, but may have {MAX_LOGIT_BIAS}: leave out those that matter least"
    for token, bias in value.items():
        if not _is_token(token):
            return f"logit_bias has the token {token!r}, but token ids must be whole numbers, 0 or more"
        if not (_is_number(bias) and (-MAX_BIAS <= bias <= MAX_BIAS or bias == -math.inf)):
            wanted = f"a number from {-MAX_BIAS} to {MAX_BIAS}, or -inf"
            return f"logit_bias of token {token} is {bias!r}, but must be {wanted}"
    return None


def _is_token(value: Any) -> bool:
    return _is_whole(value) and 0 <= value <= INT32_MAX


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, Integral)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (float, int, Real)) and not isinstance(value, bool)
