"""What HTTP code has to know of a loaded model."""

from __future__ import annotations

from ..api import Model
from ..version import __version__
from .protocol import ModelInfo


def model_info(model: Model) -> ModelInfo:
    """The facts of a model, as they travel to HTTP processes."""
    config = model.engine_config
    return ModelInfo(
        version=__version__,
        folder=None if model.folder is None else str(model.folder.absolute()),
        device=model.device,
        device_description=model.describe(),
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        is_encoder_decoder=config.is_encoder_decoder,
        max_source_length=config.max_source_length,
        decoder_start_token_ids=list(config.decoder_start_token_ids),
        eos_ids=sorted(model.eos_ids),
        generation_config=dict(model.generation_config),
        max_num_seqs=config.max_num_seqs,
        max_queue=config.max_queue,
        block_size=model.engine.blocks.block_size,
        prefix_cache=config.prefix_cache,
    )
