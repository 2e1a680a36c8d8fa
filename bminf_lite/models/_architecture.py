"""The contents of an architecture file: reading configurations, the tensors, and building the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..backend.base import Backend
from ..errors import UsageError
from ..layers.loading import Weights
from ._config import ModelConfig
from ._decoder import Decoder, DecoderConfig, ModelBuilder, spec
from ._encoder import Encoder, EncoderBuilder, EncoderConfig, of_decoder
from ._encoder import spec as encoder_spec
from ._encoder_decoder import EncoderDecoder
from .spec import Spec


@dataclass(frozen=True)
class Architecture:
    """An architecture. Its functions take the configuration that its ``parse`` returns.

    ``parse`` reads a ``config.json``, and raises ``CheckpointError`` with every nonsensical value. ``spec`` lists the
    tensors of a checkpoint. ``ModelBuilder`` makes the parts of a model one at a time, for calibration and comparison,
    which keep one layer in memory; ``network`` joins them.
    """

    parse: Callable[[Mapping[str, Any]], ModelConfig]
    spec: Callable[[Any], Spec]
    ModelBuilder: Callable[[Any, Weights, Backend], Any]
    network: Callable[[Any], Decoder | EncoderDecoder | Encoder]

    def Model(self, config: ModelConfig, weights: Weights, ops: Backend) -> Any:
        """The model on the device of ``ops``, or the part of it that the rank of ``ops`` has.

        Raises ``UsageError``, with every reason, if the model cannot be divided among the ranks.
        """
        tp_size = ops.communicator.tp_size
        if problems := config.tp_problems(tp_size):
            raise UsageError(
                f"the model cannot be divided among {tp_size} ranks: {'; '.join(problems)}. Numbers of ranks that "
                f"would do: {', '.join(map(str, config.tp_sizes))}"
            )
        return self.network(self.ModelBuilder(config, weights, ops))


def decoder(parse: Callable[[Mapping[str, Any]], DecoderConfig]) -> Architecture:
    """The architecture of a decoder whose ``config.json`` is read by ``parse``."""
    return Architecture(parse, spec, ModelBuilder, Decoder)


def embedder(architecture: Architecture) -> Architecture:
    """The architecture of a folder that embeds or classifies with a decoder of ``architecture``."""

    def parse(config: Mapping[str, Any]) -> EncoderConfig:
        found = architecture.parse(config)
        assert isinstance(found, DecoderConfig)
        return of_decoder(found, config)

    return encoder_architecture(parse)


def encoder_architecture(parse: Callable[[Mapping[str, Any]], EncoderConfig]) -> Architecture:
    """The architecture of an encoder whose ``config.json`` is read by ``parse``."""
    return Architecture(parse, encoder_spec, EncoderBuilder, Encoder)
