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
    """The reason, and the bound that was reached: ``limit`` new tokens, or the ``context`` of the model."""
    match result.finish_reason:
        case "length":
            return f"length (--max-new-tokens {limit:,})"
        case "context":
            return f"context (the model's {context:,} tokens are full)"
        case reason:
            return reason
