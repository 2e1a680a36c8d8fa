"""The report that a migration returns, and the manifest that it writes into the folder.

``bminf_lite.json`` holds ``format_version``, the tool's version, the recipe, ``tied_head`` (the scheme for a head
without a tensor of its own, or null), ``quantized_when_loaded`` (by name, the schemes of matrices that are stored
``[in, out]``), ``rotated_when_loaded`` (the blocks in which these rotate their input), the source files with their
sizes and SHA-256 checksums, and a :class:`TensorReport` for every tensor. After a calibration, ``calibration`` holds
its decisions, and ``cost`` the distance from the source on held-out text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..version import __version__
from .recipe import Recipe, Scheme

MANIFEST_FILE = "bminf_lite.json"
FORMAT_VERSION, OUTLIER_FORMAT_VERSION = 1, 2
"""The second is for checkpoints with outlier columns, which the first versions of this package cannot run."""


@dataclass(frozen=True)
class TensorReport:
    """The migration of one tensor.

    ``snr_db`` is the signal-to-noise ratio of the int8 tensor, ``10 log10(sum w^2 / sum (w - scale * code)^2)``, and
    ``worst_row`` the row where it is smallest. They are None for tensors that stay float, for a dry run, and for an
    infinite ratio. Sizes are in bytes, scales included.
    """

    name: str
    shape: tuple[int, ...]
    source_dtype: str
    scheme: Scheme
    bytes_before: int
    bytes_after: int
    snr_db: float | None = None
    worst_row: int | None = None
    worst_row_snr_db: float | None = None
    scale_min: float | None = None
    scale_max: float | None = None


@dataclass(frozen=True)
class SourceFile:
    """A file that the migration read; ``sha256`` in hexadecimal, empty for a dry run."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class MigrationReport:
    """The result of a migration: the tensors and files in the order of the source, and sizes of all tensors in bytes.

    ``tied_head`` is the scheme for a head without a tensor of its own, or None; ``late`` holds the schemes, by name, of
    matrices that are stored ``[in, out]``. Both stay float in the file and are quantized when they are loaded.
    ``late_rotations`` are the blocks in which those rotate their input. ``calibration`` holds a calibration's
    decisions, and ``cost`` the measured distance from the source.
    """

    recipe: Recipe
    tied_head: Scheme | None
    tensors: tuple[TensorReport, ...]
    sources: tuple[SourceFile, ...]
    calibration: Mapping[str, Any] = field(default_factory=dict)
    late: Mapping[str, Scheme] = field(default_factory=dict)
    cost: Mapping[str, Any] = field(default_factory=dict)
    late_rotations: Mapping[str, int] = field(default_factory=dict)

    @property
    def bytes_before(self) -> int:
        return sum(tensor.bytes_before for tensor in self.tensors)

    @property
    def bytes_after(self) -> int:
        return sum(tensor.bytes_after for tensor in self.tensors)

    def manifest(self) -> dict[str, Any]:
        """The content of ``bminf_lite.json``."""
        has_outliers = any(product["outlier_columns"] for product in self.calibration.get("products", []))
        return {
            "format_version": OUTLIER_FORMAT_VERSION if has_outliers else FORMAT_VERSION,
            "tool": "bminf-lite",
            "tool_version": __version__,
            "recipe": self.recipe.to_dict(),
            "tied_head": self.tied_head.value if self.tied_head else None,
            **({"quantized_when_loaded": {n: scheme.value for n, scheme in self.late.items()}} if self.late else {}),
            **({"rotated_when_loaded": dict(self.late_rotations)} if self.late_rotations else {}),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            **({"calibration": dict(self.calibration)} if self.calibration else {}),
            **({"cost": dict(self.cost)} if self.cost else {}),
            "sources": [asdict(source) for source in self.sources],
            "tensors": [asdict(tensor) for tensor in self.tensors],
        }
