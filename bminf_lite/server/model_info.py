"""What HTTP code has to know of a loaded model."""

from __future__ import annotations

from ..api import Model
from ..engine.sampling_params import SamplingParams
from ..pooling.yes_no import Judge
from .pooling_service import PoolingService
from .protocol import ModelInfo


def model_info(model: Model) -> ModelInfo:
    """The facts of a model, as they travel to HTTP processes.

    Raises ``CheckpointError`` for a ``generation_config.json`` that no request could obey.
    """
    SamplingParams.from_checkpoint(model.generation_config)
    config = model.engine_config
    return ModelInfo(
        folder=None if model.folder is None else str(model.folder.absolute()),
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        is_encoder_decoder=config.is_encoder_decoder,
        max_source_length=config.max_source_length,
        decoder_start_token_ids=list(config.decoder_start_token_ids),
        eos_ids=sorted(model.eos_ids),
        generation_config=dict(model.generation_config),
        takes_adapters=model.adapter_store is not None,
        generates=config.generates,
        pooling=pooling_service(model).info,
    )


def pooling_service(model: Model) -> PoolingService:
    """What makes vectors of texts for a server, or of a model that generates answers questions about them."""
    judge = Judge(model.engine, model.ops) if model.engine_config.generates else None
    return PoolingService(model.pooler, judge)
