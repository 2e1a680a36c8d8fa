"""One architecture, one file, found by ``model_type``.

``config.json`` names a ``model_type``, and the module of that name implements it: there is no registry to edit. A
module has, from top to bottom:

- ``KEYS``, the table of the keys in ``config.json`` with their bounds and defaults (:mod:`._config`), and
  ``parse(config) -> DecoderConfig`` (:mod:`._decoder`), which lists the parts of each layer (:mod:`.parts`); it raises
  :class:`~bminf_lite.errors.CheckpointError` with every nonsensical value.
- ``architecture = decoder(parse)``. The tensors of a checkpoint (:mod:`.spec`), what the cache keeps, and the layers
  follow from the parts. They name no device.

An architecture states how it differs from others: ``mistral.py`` is LLaMA with windows. Encoder-decoders such as
``t5.py`` are configurations of :mod:`._encoder_decoder`. A module whose name begins with an underscore is shared by
architectures. ``docs/add_a_model.md`` adds one step by step.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError, choices
from . import _multimodal
from ._architecture import Architecture, embedder
from ._config import ModelConfig
from ._decoder import Decoder, DecoderConfig
from ._encoder import TextVectors, head_kind
from ._encoder_decoder import fill_source
from ._multimodal import text_spec

__all__ = [
    "Architecture",
    "Decoder",
    "DecoderConfig",
    "ModelConfig",
    "TextVectors",
    "embedder",
    "fill_source",
    "find",
    "makes_vectors",
    "names",
    "text_config",
    "text_spec",
]

GUIDE = "docs/add_a_model.md"
"""How to add an architecture."""


@functools.cache
def names() -> tuple[str, ...]:
    """The architectures that exist, sorted."""
    modules = (m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg)
    return tuple(sorted(name for name in modules if name != "spec" and not name.startswith("_")))


def makes_vectors(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of a decoder that cannot generate, but embeds texts or classifies them."""
    return head_kind(config) is not None or config.get("use_bidirectional_attention") is True


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``config``, or that of the text model inside a multimodal one if this package runs it."""
    return _multimodal.text_config(config, names())


def find(config: Mapping[str, Any]) -> Architecture:
    """The architecture that ``config["model_type"]`` names; raises ``CheckpointError`` if there is none.

    A module's name has an underscore for the hyphen of ``xlm-roberta``.
    """
    model_type, known = config.get("model_type"), names()
    module = model_type.replace("-", "_") if isinstance(model_type, str) else model_type
    if module not in known:
        supported = f"this version runs: {', '.join(known)}. {GUIDE} in the repository says how to add one"
        found = choices(model_type, known, supported)
        raise CheckpointError(f"config.json: model_type {model_type!r} is not supported; {found}")
    architecture: Architecture = importlib.import_module(f"{__name__}.{module}").architecture
    return architecture
