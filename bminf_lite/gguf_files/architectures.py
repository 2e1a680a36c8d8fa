"""How each architecture is converted, by its name in GGUF."""

from __future__ import annotations

from ..errors import CheckpointError, choices
from .converted import Converted
from .dense import DENSE
from .encoders import ENCODERS
from .header import GgufHeader
from .hybrids import HYBRIDS
from .latent import LATENT
from .mixtures import MIXTURES

TABLE: dict[str, Converted] = DENSE | MIXTURES | LATENT | HYBRIDS | ENCODERS


def converted(header: GgufHeader) -> Converted:
    """The entry of the table. Raises :class:`CheckpointError` if there is none."""
    if header.architecture not in TABLE:
        known = choices(header.architecture, sorted(TABLE))
        raise CheckpointError(f"{header.path}: GGUF architecture {header.architecture!r} is not supported; {known}")
    return TABLE[header.architecture]
