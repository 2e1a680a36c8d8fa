"""Checkpoints of EAGLE-3 heads (:mod:`..models._eagle3`), which are quantized when they are loaded.

``fc`` reads the model's residual stream, whose large channels one scale per token suits badly: it gets int8 weights and
float activations. All other matrices read norms, or what follows them, and are w8a8.

The residual stream of a migrated model may be rotated by an orthogonal matrix (:mod:`.offline_rotation`). Then ``fc``,
which was trained on the stream as it was, is multiplied by that matrix too. So is what reads the model's embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..backend.quantization import HostWeight, Int8Weight, quantize_weight
from ..errors import UsageError
from ..models import _eagle3 as eagle3
from ..models._eagle3 import Eagle3Config
from .offline_rotation import ROTATED_STREAM, stream_rotation
from .opened_model import CheckpointWeights, ModelDescription, OpenedModel, checked
from .reader import open_checkpoint
from .recipe import Scheme

"""How the entry of a manifest that names a rotated residual stream begins."""


def describe_head(config: Mapping[str, Any]) -> ModelDescription:
    """The head of a ``config.json``, with an embedding of its own. Raises ``CheckpointError``."""
    return _described(eagle3.parse(config), config)


def _described(parsed: Eagle3Config, config: Mapping[str, Any]) -> ModelDescription:
    return ModelDescription(eagle3.architecture, parsed, eagle3.spec(parsed), config)


def open_head(path: str | Path) -> OpenedModel:
    """Open the checkpoint of a head and validate it, as :func:`.opened_model.open_model` does."""
    checkpoint = open_checkpoint(path)
    try:
        parsed = eagle3.parse(checkpoint.config)
        checkpoint.rename(eagle3.ALIASES)
        has_embedding = f"{eagle3.EMBEDDING}.weight" in checkpoint.tensors
        has_token_map = eagle3.TOKEN_MAP in checkpoint.tensors
        parsed = replace(parsed, has_embedding=has_embedding, has_token_map=has_token_map)
        return checked(checkpoint, _described(parsed, checkpoint.config))
    except BaseException:
        checkpoint.close()
        raise


def head_scheme(name: str) -> Scheme:
    """How a matrix of a head is quantized when it is loaded."""
    return Scheme.W8A16 if name == f"{eagle3.FC}.weight" else Scheme.W8A8


def require_fit(model: ModelDescription, head: ModelDescription, path: str | Path) -> None:
    """Raise ``UsageError`` with every reason why a head at ``path`` does not fit the model, and ``CheckpointError``."""
    config, own = model.config, head.config
    assert isinstance(own, Eagle3Config)
    problems = []
    if config.is_encoder_decoder:
        problems.append("a model with an encoder has no head")
    else:
        own.layers_of(config.num_layers)
    if own.vocab_size != config.vocab_size:
        problems.append(f"it has {own.vocab_size:,} tokens in its vocabulary, but the model has {config.vocab_size:,}")
    if own.target_hidden_size != config.hidden_size:
        problems.append(f"it reads {own.target_hidden_size:,} features, but the model has {config.hidden_size:,}")
    if not own.has_embedding and own.hidden_size != config.hidden_size:
        problems.append(f"it has no embedding, and {own.hidden_size:,} features, so the model's does not fit it")
    if not own.has_token_map and own.draft_vocab_size != own.vocab_size:
        problems.append(f"it has {own.draft_vocab_size:,} draft tokens, and no tensor {eagle3.TOKEN_MAP!r}")
    if problems:
        raise UsageError(f"the EAGLE-3 head {path} is not of this model: {'; '.join(problems)}")


@dataclass(frozen=True)
class HeadWeights:
    """The tensors of a head for a model: turned if the model's residual stream ``is_rotated``, and quantized."""

    weights: CheckpointWeights
    config: Eagle3Config
    is_rotated: bool

    @classmethod
    def of(cls, head: OpenedModel, model: OpenedModel) -> HeadWeights:
        """The tensors of an open head for an open model."""
        assert isinstance(head.config, Eagle3Config)
        parts = model.checkpoint.manifest.get("rotated_offline") or ()
        rotated = any(part.startswith(ROTATED_STREAM) for part in parts)
        return cls(head.weights(), head.config, rotated)

    def weight(self, name: str) -> HostWeight:
        weight = self.weights.weight(name)
        if isinstance(weight, Int8Weight):
            return weight
        values = np.asarray(weight).astype(np.float32)
        if self.is_rotated:
            values = self._turned(name, values)
        return quantize_weight(values, dynamic=head_scheme(name) is Scheme.W8A8)

    def vector(self, name: str) -> np.ndarray:
        if self._shares_embedding and name == f"{eagle3.INPUT_NORM}.weight":
            return np.ones(self.config.hidden_size, np.float32)  # it lies in the matrices behind it
        return self.weights.vector(name)

    @property
    def _shares_embedding(self) -> bool:
        """Whether the head reads the rotated embedding of the model."""
        return self.is_rotated and not self.config.has_embedding

    def _turned(self, name: str, values: np.ndarray) -> np.ndarray:
        turn = stream_rotation(self.config.target_hidden_size)
        width = self.config.hidden_size
        if name == f"{eagle3.FC}.weight":
            parts = np.split(values, self.config.num_features, axis=1)
            return np.concatenate([turn(np.ascontiguousarray(part)) for part in parts], axis=1)
        if self._shares_embedding and name.removesuffix(".weight") in eagle3.QKV:
            norm = np.asarray(self.weights.vector(f"{eagle3.INPUT_NORM}.weight")).astype(np.float32)
            return np.concatenate([turn(values[:, :width] * norm), values[:, width:]], axis=1)
        return values


def head_token_ids(head: OpenedModel) -> np.ndarray | None:
    """The model's tokens of a head's, int32 ``[draft_vocab_size]``; None if they are the same."""
    assert isinstance(head.config, Eagle3Config)
    if not head.config.has_token_map:
        return None
    return eagle3.token_ids(np.asarray(head.checkpoint.stored(eagle3.TOKEN_MAP)), head.config)
