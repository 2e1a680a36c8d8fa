"""The scaling of rotary positions in a GGUF file, as llama.cpp reads it, in the terms of Hugging Face.

In llama.cpp the angle of a pair is ``position * base ** (-2 i / dimensions) / frequency_factor / factor``, and cosine
and sine are multiplied by ``attn_factor``. Without a type the scaling is linear. With the type ``yarn`` only the slow
pairs are divided by ``factor``, and cosine and sine are multiplied by YaRN's own factor too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .converted import largest
from .header import REMEDY, GgufHeader

FACTORS = "rope_freqs.weight"
"""The tensor with a divisor for each rotary frequency, in place of LLaMA 3's formula."""
LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
"""The tensors of LongRoPE."""
_ONLY_YARN = tuple(f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow", "log_multiplier"))
_TYPES = ("none", "linear", "yarn", "longrope")


def rope_scaling(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any] | None:
    """``rope_scaling`` of a ``config.json`` whose sizes are in ``config``; None for no scaling.

    Raises ``CheckpointError`` for values that mean nothing, or that no ``rope_scaling`` can state.
    """
    kind = header.of_model("rope.scaling.type", "linear")
    if kind not in _TYPES:
        raise _error(header, f"rope.scaling.type is {kind!r}, not one of {', '.join(_TYPES)}")
    factor = number(header, "rope.scaling.factor", number(header, "rope.scale_linear", 1.0))
    attention = number(header, "rope.scaling.attn_factor", 1.0)
    is_extended = number(header, "rope.scaling.yarn_ext_factor", -1.0, lambda x: x in (-1, 0, 1)) != 0
    if kind == "yarn" and is_extended and factor > 1:
        if FACTORS in header.tensors:
            raise _error(header, f"has YaRN (rope.scaling.type) and the tensor {FACTORS}, which are not combined here")
        return _yarn(header, factor, attention)
    for name in _ONLY_YARN:
        header.of_model(name)  # without an effect
    attention *= number(header, "rope.scaling.yarn_attn_factor", 1.0)
    if kind == "none":
        factor = 1.0
    if FACTORS not in header.tensors and attention == 1:
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    return _by_frequency(header, config, factor, attention)


def _yarn(header: GgufHeader, factor: float, attention: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": _original(header),
    }
    for name in ("beta_fast", "beta_slow"):
        if header.of_model(f"rope.scaling.yarn_{name}") is not None:
            found[name] = number(header, f"rope.scaling.yarn_{name}")
    weight = number(header, "rope.scaling.yarn_log_multiplier", 0.0, lambda x: x >= 0)
    of_yarn = _mscale(factor, 1.0) / (_mscale(factor, weight) if weight else 1.0)
    given = number(header, "rope.scaling.yarn_attn_factor", 1.0)
    if given != 1 and not math.isclose(given, of_yarn, rel_tol=1e-3):
        problem = f"rope.scaling.yarn_attn_factor is {given}, and YaRN's formula gives {of_yarn:.4f}"
        raise _error(header, f"{problem}: programs differ in which of them counts")
    if header.architecture == "olmo2":  # its converter writes the whole factor
        if attention != 1:
            found["attention_factor"] = attention
    elif attention != 1 or weight:
        found["attention_factor"] = of_yarn * attention
    return found


def _by_frequency(header: GgufHeader, config: dict[str, Any], factor: float, attention: float) -> dict[str, Any]:
    """Divisors of the frequencies, and the factor on cosine and sine, in the form of LongRoPE."""
    if FACTORS in header.tensors:
        divisors = small_tensor(header, FACTORS).astype(np.float64) * factor
    else:
        whole = header.of_model("embedding_length") // largest(header.of_model("attention.head_count"))
        head_dim = config.get("head_dim") or whole
        divisors = np.full(header.of_model("rope.dimension_count", head_dim) // 2, factor)
    listed = [shortest(x) for x in divisors]
    return {
        "rope_type": "longrope",
        "short_factor": listed,
        "long_factor": listed,
        "attention_factor": attention,
        "factor": 1.0,
        "original_max_position_embeddings": _original(header),
    }


def _original(header: GgufHeader) -> Any:
    return header.of_model("rope.scaling.original_context_length", header.of_model("context_length"))


def _mscale(factor: float, weight: float) -> float:
    """YaRN's factor on cosine and sine: https://arxiv.org/abs/2309.00071, equation 22."""
    return 0.1 * weight * math.log(factor) + 1.0


def number(
    header: GgufHeader, key: str, default: float = 0.0, is_valid: Callable[[float], bool] = lambda x: x > 0
) -> float:
    """A number of the metadata; llama.cpp takes 0 for a key that is absent."""
    value = header.of_model(key)
    if value is None or (value == 0 and key in _ABSENT_IF_0):
        return default
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not math.isfinite(value)
        or not is_valid(value)
    ):
        raise _error(header, f"{key} is {value!r}, which is no such number")
    return shortest(value)


_ABSENT_IF_0 = ("rope.scaling.factor", "rope.scale_linear")


def _error(header: GgufHeader, problem: str) -> CheckpointError:
    return CheckpointError(f"{header.path}: {header.architecture}.{problem}; {REMEDY}")


def shortest(value: float) -> float:
    """The shortest number that is the same in fp32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def small_tensor(header: GgufHeader, name: str) -> np.ndarray:
    """An fp32 vector of the file."""
    tensor = header.tensors[name]
    if tensor.type != "F32":
        raise CheckpointError(f"{tensor.path}: tensor {name!r} is {tensor.type}, not F32")
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset)
        return np.frombuffer(file.read(tensor.nbytes), "<f4")
