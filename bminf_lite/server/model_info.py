"""What HTTP code has to know of a loaded model."""

from __future__ import annotations

from ..api import Model
from ..engine.sampling_params import SamplingParams
from .pooling_service import PoolingService
from .protocol import ModelInfo


def model_info(model: Model) -> ModelInfo:
    """The facts of a model, as they travel to HTTP processes.

    Raises ``CheckpointError`` for a ``generation_config.json`` that no request could obey.
    """
    SamplingParams.from_checkpoint(model.generation_config)
    config, service = model.engine_config, pooling_service(model)
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
        pooling=None if service is None else service.info,
    )


def pooling_service(model: Model) -> PoolingService | None:
    """What makes vectors of texts for a server; None for a model that makes none."""
    return None if model.pooler is None else PoolingService(model.pooler)
