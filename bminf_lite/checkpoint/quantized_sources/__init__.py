"""Checkpoints that other projects have quantized, as float checkpoints: tensors are dequantized while they are read.

:func:`find` reads ``quantization_config`` of a ``config.json``, and :meth:`SourceFormat.dequantized` makes the float
tensors. A migration quantizes these anew, and its loss is measured against them.

| module | ``quant_method`` | stored |
|---|---|---|
| ``mxfp4.py`` | ``mxfp4`` | ``X_blocks``, ``X_scales``: gpt-oss |
| ``fp8.py`` | ``fp8``, ``fbgemm_fp8`` | ``X.weight``, ``X.weight_scale_inv``: DeepSeek, Qwen3; ``X.weight_scale`` |
| ``int4.py`` | ``gptq``, ``awq`` | ``X.qweight``, ``X.qzeros``, ``X.scales``, ``X.g_idx`` |
| ``compressed.py`` | ``compressed-tensors`` | what of it is not run as it is: FP8, int4, FP4 |

What a file says of activations, such as ``input_scale`` and ``k_scale``, is left out: it does not change weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import checkpoint_error
from . import compressed, fp8, int4, mxfp4
from .source_tensors import SourceFormat

PARSERS = {"mxfp4": mxfp4.parse, "fp8": fp8.parse, "fbgemm_fp8": fp8.parse, "gptq": int4.parse, "awq": int4.parse}
METHODS = ", ".join((*PARSERS, "compressed-tensors"))
"""The values of ``quant_method`` that can be read."""


def find(config: Mapping[str, Any], source: object) -> SourceFormat | None:
    """The format of a checkpoint that is to be dequantized; None for a float one, or one that is run as it is.

    Raises :class:`CheckpointError`, with ``source`` as its title, for every setting that is not known.
    """
    raw = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(raw, dict):
        return None
    method = raw.get("quant_method", "compressed-tensors")
    if method == "compressed-tensors":
        return compressed.parse(raw, source) if compressed.is_source(raw) else None
    if not isinstance(method, str) or method not in PARSERS:
        problem = f"quantization_config.quant_method is {method!r}, and this version reads {METHODS}"
        raise checkpoint_error(source, [problem], "migrate this model's unquantized checkpoint (fp32, fp16 or bf16)")
    return PARSERS[method](raw, source)
