"""The layer of a checkpoint that guesses the model's next tokens (:mod:`..models._mtp`), as a model of its own."""

from __future__ import annotations

from ..errors import UsageError
from ..models import DecoderConfig
from ..models import _mtp as mtp
from ..models._architecture import Architecture
from .offline_rotation import ROTATED_STREAM
from .opened_model import CheckpointWeights, ModelDescription, OpenedModel


class OpenedLayer(OpenedModel):
    """The layer of an open model, whose files it shares."""

    def __init__(self, model: OpenedModel, description: ModelDescription):
        super().__init__(model.checkpoint, description, model.eos_ids)
        self.model = model

    def weights(self) -> CheckpointWeights:
        return self.model.weights()

    def close(self) -> None:
        """Nothing: the model closes its files."""


def describe_layer(model: ModelDescription, path: object) -> ModelDescription:
    """The layer of a model at ``path``. Raises ``UsageError`` if it has none."""
    config, spec = model.config, model.spec
    if not isinstance(config, DecoderConfig) or config.drafting is None or spec.drafting is None:
        raise UsageError(
            f"the method mtp needs a model with a layer that guesses tokens, and {path} has none. If its source has "
            "one (tensors mtp.*, or a layer with eh_proj), migrate that again; else choose another method"
        )
    architecture = Architecture(lambda _: config, mtp.spec, mtp.MtpHead, lambda built: built)
    return ModelDescription(architecture, config.drafting, spec.drafting, model.config_json)


def open_layer(model: OpenedModel) -> OpenedLayer:
    """The layer of an open model. Raises ``UsageError`` if it has none, or one that reads what migration has changed.

    A rotated residual stream, and factors in the weights of the last norm, are such changes.
    """
    description = describe_layer(model.description, model.path)
    manifest, config = model.checkpoint.manifest, model.config
    assert isinstance(config, DecoderConfig)
    rotated = any(part.startswith(ROTATED_STREAM) for part in manifest.get("rotated_offline") or ())
    norm = config.output.norm
    folded = set(manifest.get("folded") or ()) & set(norm.tensors() if norm else ())
    if rotated or folded:
        reason = "its residual stream is rotated" if rotated else f"{', '.join(sorted(folded))} has other values"
        raise UsageError(
            f"the method mtp reads {model.path} as it was before its migration, but {reason}: migrate it with a recipe "
            "that changes no norm and rotates no weights, such as w8a8-rotate-all, or choose another method"
        )
    return OpenedLayer(model, description)
