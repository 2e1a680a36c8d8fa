"""Rotary frequencies from a checkpoint's configuration, with the scalings that extend the context.

Configurations name the parameters ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before);
both are read. The formulas are those of the papers, in the fp32 steps of transformers, so that angles are equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

MAX_POSITIONS = 2**24
"""The longest context; more positions would not be exact in fp32."""

RopeParameters = Mapping[str, Any]
RopeFrequencies = tuple[np.ndarray, float]
"""Frequencies fp32 ``[head_dim / 2]``, and the factor on cosine and sine."""


def rope_parameters(config: RopeParameters, default_theta: float = 10000.0, whole_heads: bool = True) -> dict[str, Any]:
    """The rotary parameters of a ``config.json``: ``rope_type``, ``rope_theta`` and what the type needs.

    If both spellings are present, the older one counts, as in transformers. Raises ``ValueError`` for a value that is
    not a mapping, for parameters per layer type, and with ``whole_heads`` for a rotation of a part of each head.
    """
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(found, Mapping) or any(isinstance(value, Mapping) for value in found.values()):
        raise ValueError(f"rope_parameters is {found!r}, not one mapping of names to numbers for all layers")
    theta = config.get("rope_theta")
    found = {"rope_theta": default_theta if theta is None else theta, **found}
    found["rope_type"] = found.get("rope_type", found.pop("type", "default"))
    partial = found.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if whole_heads and partial not in (None, 1) and found["rope_type"] != "proportional":
        raise ValueError(f"partial_rotary_factor is {partial!r}, not 1: only whole heads are rotated")
    if found["rope_type"] == "longrope" and config.get("original_max_position_embeddings") is not None:
        found["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return found


def usable_context(parameters: RopeParameters, max_positions: int) -> int:
    """The positions for which one set of frequencies and one scale of the scores are right.

    LongRoPE has other frequencies beyond the original context, and Ministral 3 scales its queries there. YaRN stretches
    the original context by its factor; files to which it was added later still have the original context.
    """
    changes = parameters["rope_type"] == "longrope" and parameters["short_factor"] != parameters["long_factor"]
    if changes or parameters.get("llama_4_scaling_beta"):
        return min(max_positions, int(_number(parameters, "original_max_position_embeddings", max_positions)))
    if parameters["rope_type"] == "yarn" and parameters.get("original_max_position_embeddings") is not None:
        stretched = _number(parameters, "original_max_position_embeddings") * _number(parameters, "factor", 1.0)
        return max(max_positions, min(int(stretched), MAX_POSITIONS))
    return max_positions


def rope_frequencies(parameters: RopeParameters, head_dim: int, max_positions: int) -> RopeFrequencies:
    """Frequencies fp32 ``[head_dim / 2]`` and the factor on cosine and sine.

    Raises ``ValueError`` for an unknown type, and for a parameter that is missing or out of range.
    """
    kind = parameters["rope_type"]
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ValueError(f"rope_type is {kind!r}, not one of {', '.join(_SCALINGS)}")
    for key in _NUMBERS:  # also those that this type does not use: a file with a wrong one is not what it seems
        value = parameters.get(key)
        if value is not None and not (value == 0 and key in ("mscale", "mscale_all_dim")):  # where 0 is none
            _number(parameters, key)
    if not isinstance(parameters.get("truncate", True), bool):
        raise ValueError(f"rope parameter truncate is {parameters['truncate']!r}, not true or false")
    theta = _number(parameters, "rope_theta")
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1) / np.float32(theta) ** exponents
    return _SCALINGS[kind](frequencies, parameters, head_dim, max_positions)


_NUMBERS = (
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def _number(parameters: RopeParameters, key: str, default: float | None = None) -> float:
    value = parameters.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 1e-9 < value < 1e30:
        raise ValueError(f"rope parameter {key} is {value!r}, not a positive number")
    return value


def _default(frequencies: np.ndarray, parameters: RopeParameters, head_dim: int, max_positions: int) -> RopeFrequencies:
    return frequencies, 1.0


def _linear(frequencies: np.ndarray, parameters: RopeParameters, head_dim: int, max_positions: int) -> RopeFrequencies:
    """Position interpolation (https://arxiv.org/abs/2306.15595)."""
    return frequencies / np.float32(_number(parameters, "factor")), 1.0


def _llama3(frequencies: np.ndarray, parameters: RopeParameters, head_dim: int, max_positions: int) -> RopeFrequencies:
    """LLaMA 3.1: long wavelengths are stretched by ``factor``, short ones kept, and those between interpolated."""
    factor, low, high = (_number(parameters, k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _number(parameters, "original_max_position_embeddings", max_positions)
    if high < low:
        raise ValueError(f"rope parameter high_freq_factor ({high}) is smaller than low_freq_factor ({low})")
    wavelengths = np.float32(2 * math.pi) / frequencies
    if high == low:  # Llama 4: nothing lies between
        return np.where(wavelengths > original / low, frequencies / np.float32(factor), frequencies), 1.0
    smooth = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * frequencies / np.float32(factor) + smooth * frequencies
    stretched = np.where(wavelengths > original / low, frequencies / np.float32(factor), frequencies)
    medium = (wavelengths >= original / high) & (wavelengths <= original / low)
    return np.where(medium, between, stretched).astype(np.float32), 1.0


def _yarn(frequencies: np.ndarray, parameters: RopeParameters, head_dim: int, max_positions: int) -> RopeFrequencies:
    """YaRN (https://arxiv.org/abs/2309.00071): interpolation by wavelength, and softer scores."""
    original = _number(parameters, "original_max_position_embeddings", max_positions)
    factor = _number(parameters, "factor", max_positions / original)
    theta = _number(parameters, "rope_theta")
    if theta <= 1:
        raise ValueError(f"rope parameter rope_theta is {theta!r}, not larger than 1 as yarn needs")

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(_number(parameters, "beta_fast", 32))
    high = dimension(_number(parameters, "beta_slow", 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((steps - low) / ((high - low) or 0.001), 0, 1).astype(np.float32)
    scaled = frequencies / np.float32(factor) * ramp + frequencies * (1 - ramp)
    return scaled.astype(np.float32), _yarn_attention(parameters, factor)


def score_mscale(parameters: RopeParameters) -> float:
    """The factor on queries and keys that DeepSeek's models have beside that on cosine and sine: YaRN's.

    Raises ``ValueError`` for a parameter that is missing or out of range.
    """
    if parameters["rope_type"] == "default" or not parameters.get("mscale_all_dim"):
        return 1.0
    return _mscale(_number(parameters, "factor"), _number(parameters, "mscale_all_dim"))


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_attention(parameters: RopeParameters, factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return float(_number(parameters, "attention_factor"))
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return _mscale(factor, _number(parameters, "mscale")) / _mscale(factor, _number(parameters, "mscale_all_dim"))
    return _mscale(factor, 1.0)


def _longrope(
    frequencies: np.ndarray, parameters: RopeParameters, head_dim: int, max_positions: int
) -> RopeFrequencies:
    """LongRoPE (https://arxiv.org/abs/2402.13753): a factor per wavelength, here those of the original context."""
    for key in ("short_factor", "long_factor"):
        factors = parameters.get(key)
        if not isinstance(factors, list) or not all(isinstance(f, (int, float)) and f > 0 for f in factors):
            raise ValueError(f"rope parameter {key} is {factors!r}, not a list of positive numbers")
        if len(factors) != len(frequencies):
            raise ValueError(f"rope parameter {key} has {len(factors)} numbers, not {len(frequencies)}, one per pair")
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelengths = np.float32(_number(parameters, "rope_theta")) ** exponents
    scaled = np.float32(1) / (np.array(parameters["short_factor"], np.float32) * wavelengths)
    original = _number(parameters, "original_max_position_embeddings", max_positions)
    if original <= 1:
        raise ValueError(f"rope parameter original_max_position_embeddings is {original!r}, not larger than 1")
    factor = _number(parameters, "factor", max_positions / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return scaled, float(_number(parameters, "attention_factor", default))


def _proportional(
    frequencies: np.ndarray, parameters: RopeParameters, head_dim: int, max_positions: int
) -> RopeFrequencies:
    """Gemma 4: the frequencies of whole heads, of which the first ``partial_rotary_factor`` are used, the others 0."""
    fraction = _number(parameters, "partial_rotary_factor", 1.0)
    if fraction > 1:
        raise ValueError(f"rope parameter partial_rotary_factor is {fraction!r}, larger than 1")
    rotated = np.arange(len(frequencies)) < int(fraction * head_dim // 2)
    return np.where(rotated, frequencies / np.float32(_number(parameters, "factor", 1.0)), np.float32(0)), 1.0


_SCALINGS = {
    "default": _default,
    "dynamic": _default,  # changes the frequencies of texts beyond max_positions, and there are none
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "yarn": _yarn,
}
