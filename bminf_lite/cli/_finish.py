"""Why a completion ended, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..api import Model
    from ..engine.outputs import Result
    from ..engine.sampling_params import SamplingOptions


def max_new_tokens(model: Model, options: SamplingOptions) -> int:
    """The most tokens of a completion with ``options`` and the checkpoint's defaults."""
    from ..engine.sampling_params import SamplingParams

    return SamplingParams.from_checkpoint(model.generation_config, **options).max_new_tokens


def finish_text(result: Result, limit: int, context: int) -> str:
    """``stop``, or which length ended the completion: ``limit`` new tokens, or the model's ``context``."""
    if result.finish_reason != "length":
        return result.finish_reason
    if len(result.token_ids) >= limit:
        return f"length (--max-new-tokens {limit:,})"
    return f"length (the model's context of {context:,} tokens is full)"
