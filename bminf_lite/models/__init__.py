"""One architecture, one file, found by ``model_type``.

``config.json`` names a ``model_type``, and the module of that name implements it: there is no registry to edit. To add
the architecture ``foo``:

1. ``models/foo.py``. From top to bottom:

   - ``KEYS``, the table of the keys in ``config.json`` with their bounds and defaults (:mod:`._config`), and
     ``parse(config) -> Config``, a frozen dataclass; it raises :class:`~bminf_lite.errors.CheckpointError` with every
     nonsensical value.
   - ``spec(config) -> Spec``: name, shape and role of every tensor of the checkpoint (:mod:`.spec`).
   - ``Block`` and ``ModelBuilder``: the layers of :mod:`..layers` wired together, with the methods of
     ``DecoderBuilder`` in :mod:`._decoder`. They name no device.
   - ``architecture = Architecture(parse, spec, ModelBuilder, Decoder)``.

   An architecture that differs from another one by its configuration states the difference: ``mistral.py`` is LLaMA
   with windows; ``gpt2.py`` is a configuration and tensor names for :mod:`._gpt`, ``t5.py`` for
   :mod:`._encoder_decoder`. A formula that no layer has yet becomes a file in ``layers/``, and an operation that no
   layer needed before a method of :class:`~bminf_lite.backend.base.Backend` and of its subclasses.
2. A golden: cases of tiny random models in ``tools/make_goldens.py``, which writes what transformers computes for them
   to ``tests/goldens/foo.json`` and ``.npz``. Add the name to a tuple of families in
   ``tests/models/tiny_models.py``; ``tests/models/test_goldens.py`` tests what stands there.
3. A parity test in ``tests/parity``: a checkpoint that transformers saves gives equal logits.
4. A row in the table of `docs/models.md`.
5. A shape for ``bench`` in ``configs/``, if it is a published model.

A module whose name begins with an underscore is shared by architectures.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ._architecture import Architecture
from ._config import ModelConfig

__all__ = ["Architecture", "ModelConfig", "find", "names"]


def names() -> list[str]:
    """The architectures that exist, sorted."""
    modules = (m.name for m in pkgutil.iter_modules(__path__))
    return sorted(name for name in modules if name != "spec" and not name.startswith("_"))


def find(config: Mapping[str, Any]) -> Architecture:
    """The architecture that ``config["model_type"]`` names; raises ``CheckpointError`` if there is none."""
    model_type = config.get("model_type")
    if model_type not in names():
        supported = f"this version runs: {', '.join(names())}"
        raise CheckpointError(f"config.json: model_type {model_type!r} is not supported; {supported}")
    architecture: Architecture = importlib.import_module(f"{__name__}.{model_type}").architecture
    return architecture
