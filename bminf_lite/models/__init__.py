"""One architecture, one file, found by ``model_type``.

``config.json`` names a ``model_type``; the module of that name in this package implements it. There is no registry to
edit: adding ``models/foo.py`` adds the architecture ``foo``. Such a module defines

- ``parse(config: dict) -> Config``: a frozen dataclass from the checkpoint's ``config.json``; raises
  :class:`~bminf_lite.errors.CheckpointError` with every nonsensical value;
- ``spec(config) -> Spec``: the checkpoint's tensors;
- ``Model(config, weights, ops)``: the layers, built on a backend;
- ``ModelBuilder(config, weights, ops)``: builds the same layers one at a time, for calibration and
  comparison, which run one layer after another:
  ``embed()`` maps a step to the residual stream, ``block(layer)`` maps residual stream, cache and step
  to the residual stream, ``output()`` maps the residual stream to logits. An encoder-decoder's have an encoder too
  (see :mod:`._encoder_decoder`).

An encoder-decoder's configuration has ``max_source_length`` and ``decoder_start_token_ids`` too, and its model
``encode(batch)`` and ``read(batch, source)`` (see :mod:`._encoder_decoder`). A module whose name begins with an
underscore is no architecture.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from ..errors import CheckpointError

_SHARED = {"spec"}


def names() -> list[str]:
    """The architectures that exist, sorted."""
    modules = (m.name for m in pkgutil.iter_modules(__path__))
    return sorted(name for name in modules if name not in _SHARED and not name.startswith("_"))


def find(config: dict) -> ModuleType:
    """The module that implements ``config["model_type"]``; raises ``CheckpointError`` if there is none."""
    model_type = config.get("model_type")
    if model_type not in names():
        raise CheckpointError(
            f"config.json: model_type {model_type!r} is not supported; this version runs: {', '.join(names())}"
        )
    return importlib.import_module(f"{__name__}.{model_type}")
