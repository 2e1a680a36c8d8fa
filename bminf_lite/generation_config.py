"""``generation_config.json`` of transformers: what of it the sampler does, and what it cannot do, by name.

:func:`normalized` is applied when a checkpoint is opened. :func:`sampling_defaults` then gives the values of the fields
of :class:`~bminf_lite.engine.sampling_params.SamplingParams`. :func:`unsupported` lists the fields that would change
the tokens, and cannot be obeyed: loading warns of them, and a completion that takes its defaults from the file is
refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import is_whole

SAME_NAME = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields that are called as those of ``SamplingParams``."""
MAX_LISTED_IDS = 1 << 20


@dataclass(frozen=True)
class Unsupported:
    """A field that would change the tokens, in the words of a message. ``draws``: only those that are drawn."""

    text: str
    draws: bool = False


def normalized(
    config: Mapping[str, Any], vocab_size: int, eos_ids: Collection[int], num_start_tokens: int
) -> dict[str, Any]:
    """The configuration for a model: ids without a meaning are dropped, and a length becomes one of new tokens.

    transformers ignores suppressed tokens beyond the vocabulary, and bad words that are an end-of-sequence token. The
    ``min_length`` of a decoder counts the ``num_start_tokens`` behind an encoder; without an encoder these are 0, and
    it counts the prompt, which is known later. ``min_new_tokens`` takes its place.
    """
    found = dict(config)
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        if _are_ids(found.get(name)):
            found[name] = [token for token in found[name] if 0 <= token < vocab_size]
    if isinstance(words := found.get("bad_words_ids"), list):
        found["bad_words_ids"] = [word for word in words if not any(word == [token] for token in eos_ids)]
    length = found.get("min_length")
    if num_start_tokens and isinstance(length, int) and found.get("min_new_tokens") is None:
        found["min_new_tokens"] = max(length - num_start_tokens, 0)
    if found.get("min_new_tokens") is not None:
        found.pop("min_length", None)
    return found


def sampling_defaults(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Values for fields of ``SamplingParams``, which checks them, and what is wrong with other fields."""
    problems: list[str] = []
    found = {name: config[name] for name in SAME_NAME if config.get(name) is not None}
    if (length := config.get("min_new_tokens")) is not None:
        found["min_tokens"] = length
    if (stops := config.get("stop_strings")) is not None:
        found["stop"] = tuple(stops) if isinstance(stops, list) else stops
    first = config.get("begin_suppress_tokens")
    if first:
        found["begin_suppress_tokens"] = tuple(first) if isinstance(first, list) else first
    bias = _biases(config, problems)
    if bias:
        found["logit_bias"] = bias
    return found, problems


def unsupported(config: Mapping[str, Any]) -> list[Unsupported]:
    """The fields that change the tokens of a completion, and that the sampler cannot obey."""
    draws = config.get("do_sample") is True
    rules = [rule for rule in _RULES if rule.name in config and not (rule.is_greedy_only and draws)]
    changing = [rule for rule in rules if config[rule.name] is not None and not rule.is_neutral(config[rule.name])]
    found = [Unsupported(f"{r.name} is {_shown(config[r.name])} ({r.reason})", r.draws) for r in changing]
    several = {
        name: sum(len(tokens) > 1 for tokens in _sequences(config, name)) for name in ("bad_words_ids", "sequence_bias")
    }
    return found + [
        Unsupported(f"{name} has {count} entries of several tokens (only single ones are weighted)")
        for name, count in several.items()
        if count
    ]


def not_obeyed_text(config: Mapping[str, Any]) -> str:
    """What a user should know of a file when its checkpoint is loaded or migrated; empty if all of it is obeyed."""
    draws = config.get("do_sample") is True
    found = [field.text for field in unsupported(config) if draws or not field.draws]
    found += [f"{name} is {_shown(config[name])}" for name in _NAMED if config.get(name) not in (None, 1)]
    return f"generation_config.json: not obeyed here: {'; '.join(found)}" if found else ""


_NAMED = ("max_time", "num_return_sequences", "penalty_last_n")
"""Fields that change what a call returns, but no token, or tokens far behind: of a GGUF file, ``penalty_last_n``."""


@dataclass(frozen=True)
class _Rule:
    name: str
    is_neutral: Callable[[Any], bool]
    reason: str
    draws: bool = False
    is_greedy_only: bool = False


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _at_most(bound: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (int, float)) and value <= bound


def _never(value: Any) -> bool:
    return False


_RULES = (
    _Rule("num_beams", _is(1), "there is no beam search"),
    _Rule("constraints", _never, "there is no beam search"),
    _Rule("force_words_ids", _never, "there is no beam search"),
    _Rule("penalty_alpha", _at_most(0), "there is no contrastive search", is_greedy_only=True),
    _Rule("dola_layers", _never, "layers are not contrasted"),
    _Rule("guidance_scale", _is(1), "there is no guidance"),
    _Rule("no_repeat_ngram_size", _at_most(0), "repeated sequences are not forbidden"),
    _Rule("encoder_no_repeat_ngram_size", _at_most(0), "repeated sequences are not forbidden"),
    _Rule("encoder_repetition_penalty", _is(1), "the source's tokens have no penalty of their own"),
    _Rule("exponential_decay_length_penalty", _never, "no penalty grows with the length"),
    _Rule("forced_bos_token_id", _never, "no token is forced"),
    _Rule("forced_eos_token_id", _never, "no token is forced"),
    _Rule("forced_decoder_ids", _is([]), "no token is forced"),
    _Rule("min_length", _at_most(1), "it counts the prompt; min_new_tokens is obeyed"),
    _Rule("token_healing", _is(False), "prompts are not changed"),
    _Rule("watermarking_config", _never, "there are no watermarks"),
    _Rule("typical_p", _is(1), "top_k, top_p and min_p are the filters", draws=True),
    _Rule("top_h", _never, "top_k, top_p and min_p are the filters", draws=True),
    _Rule("epsilon_cutoff", _is(0), "top_k, top_p and min_p are the filters", draws=True),
    _Rule("xtc_probability", _is(0), "top_k, top_p and min_p are the filters", draws=True),
    _Rule("mirostat", _is(0), "top_k, top_p and min_p are the filters", draws=True),
    _Rule("eta_cutoff", _is(0), "top_k, top_p and min_p are the filters", draws=True),
)


def _biases(config: Mapping[str, Any], problems: list[str]) -> dict[int, float]:
    """What is added to the logits of single tokens: -inf for those that are suppressed, or a bad word alone."""
    found: dict[int, float] = {}
    for entry in _entries(config, "sequence_bias", problems):
        tokens, bias = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if not _are_ids(tokens) or not tokens or not isinstance(bias, (int, float)) or isinstance(bias, bool):
            problems.append(f"sequence_bias has {_shown(entry)}, but must have pairs of token ids and a number")
        elif len(tokens) == 1:
            found[tokens[0]] = found.get(tokens[0], 0.0) + bias
    for word in _entries(config, "bad_words_ids", problems):
        if not _are_ids(word) or not word:
            problems.append(f"bad_words_ids has {_shown(word)}, but must have lists of token ids")
        elif len(word) == 1:
            found[word[0]] = -math.inf
    tokens = config.get("suppress_tokens")
    if tokens is not None and not _are_ids(tokens):
        problems.append(f"suppress_tokens is {_shown(tokens)}, but must be a list of token ids")
    elif tokens:
        found |= dict.fromkeys(tokens, -math.inf)
    return found


def _entries(config: Mapping[str, Any], name: str, problems: list[str]) -> Sequence[Any]:
    value = config.get(name)
    if value is not None and not isinstance(value, list):
        problems.append(f"{name} is {_shown(value)}, but must be a list")
    return value if isinstance(value, list) else ()


def _sequences(config: Mapping[str, Any], name: str) -> list[Sequence[int]]:
    """The sequences of tokens in a field."""
    value = config.get(name)
    entries = value if isinstance(value, list) else []
    if name == "sequence_bias":
        entries = [entry[0] for entry in entries if isinstance(entry, list) and entry]
    return [tokens for tokens in entries if _are_ids(tokens)]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_LISTED_IDS and all(map(is_whole, value))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} ..."
