"""The report that a migration returns, and the manifest that it writes into the folder.

``bminf_lite.json`` holds

- ``format_version``, the tool's version and the recipe;
- ``tied_head``, the scheme for a head without a tensor of its own, or null;
- ``quantized_when_loaded``, by name the schemes of matrices that stay float and ``[in, out]`` in the file, and
  ``rotated_when_loaded``, the blocks in which these, and a head without a tensor of its own, rotate their input;
  ``grouped_when_loaded``, their columns that share a scale;
- ``rotated_offline``, what was rotated in the weights (see :mod:`.offline_rotation`), and ``rotated_norms``, the
  weights of the norms that were moved into the rotated matrices (see :func:`.weight_rewrite.packed_vector`);
- ``folded``, by tensor the powers of two that its ``rows`` and ``columns`` were multiplied by to smooth activations, to
  scale keys or to stay in fp16 (see :func:`.weight_rewrite.folded_factors`): what is made for the float model is
  changed likewise (:mod:`.adapter_coordinates`);
- ``merged``, the folder's name of the adapter that was merged into the source;
- ``left_out``, the parts of a multimodal source that are not its text model;
- ``dequantized``, the quantized types of a source;
- ``only_bminf_lite``: why other readers of the format do not open the checkpoint, or null;
- ``sources`` and ``files``, the files of the source and of the result with sizes and checksums (see :mod:`.checksum`);
- ``checked_when_loaded``, the checksums of scales and small tensors;
- ``tensors``, a :class:`TensorReport` for each;
- after a calibration, ``calibration`` with its decisions, and ``cost``, the distance from the source on held-out text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import CheckpointError, checkpoint_error
from ..files import is_within
from ..version import __version__
from .checksum import FileRecord
from .recipe import Recipe, Scheme

MANIFEST_FILE = "bminf_lite.json"
FORMAT_VERSION, OUTLIER_FORMAT_VERSION, CONV1D_FORMAT_VERSION = 1, 2, 3
"""The second is for checkpoints with outlier columns, and the third for int8 matrices that the source stores
``[in, out]``; earlier versions of this package cannot run these."""
FORMAT_VERSIONS = (FORMAT_VERSION, OUTLIER_FORMAT_VERSION, CONV1D_FORMAT_VERSION)

DAMAGED_MANIFEST = "the file is damaged: copy it again, or migrate again"


def file_records(manifest: Mapping[str, Any], source: object) -> list[FileRecord]:
    """The files of the result with sizes and checksums; none in a manifest of an early version.

    Raises :class:`CheckpointError`, with ``source`` as its title, for another value, and for a name that leads out of
    the folder: nothing but the result's own files is read.
    """
    entries = manifest.get("files") or []
    entries = entries if isinstance(entries, list) else [entries]
    try:
        records = [FileRecord(**entry) for entry in entries]
    except TypeError:
        records = []
    kinds = [(type(record.name), type(record.bytes), type(record.xxh3)) for record in records]
    if len(records) != len(entries) or any(kind != (str, int, str) for kind in kinds):
        raise CheckpointError(f"{source}: files is no list of names, sizes and checksums; {DAMAGED_MANIFEST}")
    names = (record.name for record in records if not is_within(record.name))
    outside = [f"files names {name!r}, outside of the folder" for name in names]
    if outside:
        raise checkpoint_error(source, outside, "no migration writes that; get the folder anew, or migrate again")
    return records


def ratio_text(before: int, after: int) -> str:
    """``2.45 times smaller``, or ``1.20 times larger``: of a source that is smaller than int8, as many GGUF files."""
    smaller = before >= after
    ratio = max(before, after) / max(min(before, after), 1)
    return f"{ratio:.2f} times {'smaller' if smaller else 'larger'}"


@dataclass(frozen=True)
class TensorReport:
    """The migration of one tensor.

    ``snr_db`` is the signal-to-noise ratio of the int8 tensor, ``10 log10(sum w^2 / sum (w - scale * code)^2)``, and
    ``worst_row`` the row where it is smallest. They are None for tensors that stay float, for a dry run, and for an
    infinite ratio. Sizes are in bytes, scales included; ``bytes_before`` is that in the source's file. ``exact_share``
    is the share of the values that int8 holds exactly, of tensors whose scales are chosen for that: MXFP4's.
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
    exact_share: float | None = None


@dataclass(frozen=True)
class MigrationReport:
    """The result of a migration: the tensors and files in the order of the source, and sizes of all tensors in bytes.

    ``tied_head`` is the scheme for a head without a tensor of its own, or None; ``late`` holds the schemes, by name, of
    matrices that are stored ``[in, out]``. Both stay float in the file and are quantized when they are loaded.
    ``late_rotations`` are the blocks in which these rotate their input, and ``late_groups`` the columns that share a
    scale, where that is no whole row. ``folded`` are the factors of rows and columns, as the module says. ``conv1d``
    are matrices that the source stores ``[in, out]`` and the result as int8. ``rotated_offline`` says what is rotated
    in the weights, with ``rotated_norms`` as the module says. ``calibration`` holds a calibration's decisions, and
    ``cost`` the measured distance from the source. ``skipped`` lists the source's files that were not copied, each with
    the reason. ``merged`` names an adapter. ``left_out`` names the parts of a multimodal model, such as
    ``vision_tower``, that are not in the result. ``dequantized`` names the quantized types of the source.
    ``rotates_inputs``: int8 matrices of the file rotate what they read. ``not_obeyed`` says what of
    ``generation_config.json`` generation does not do. ``generates`` is false for a model that makes vectors of texts.
    Prints as a summary of a few lines.
    """

    recipe: Recipe
    tied_head: Scheme | None
    tensors: tuple[TensorReport, ...]
    sources: tuple[FileRecord, ...]
    calibration: Mapping[str, Any] = field(default_factory=dict)
    late: Mapping[str, Scheme] = field(default_factory=dict)
    cost: Mapping[str, Any] = field(default_factory=dict)
    conv1d: tuple[str, ...] = ()
    files: tuple[FileRecord, ...] = ()
    checksums: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    late_rotations: Mapping[str, int] = field(default_factory=dict)
    late_groups: Mapping[str, int] = field(default_factory=dict)
    folded: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    rotated_offline: tuple[str, ...] = ()
    rotated_norms: Mapping[str, str] = field(default_factory=dict)
    merged: str = ""
    dequantized: tuple[str, ...] = ()
    not_obeyed: str = ""
    rotates_inputs: bool = False
    generates: bool = True

    def __str__(self) -> str:
        before, after = self.bytes_before, self.bytes_after
        lines = [
            f"recipe {self.recipe.name}: {len(self.tensors)} tensors, {before / 1e6:,.1f} MB -> {after / 1e6:,.1f} MB "
            f"({ratio_text(before, after)})"
        ]
        measured = [tensor for tensor in self.tensors if tensor.snr_db is not None]
        if measured:
            worst = min(measured, key=lambda tensor: tensor.snr_db or 0.0)
            lines.append(
                f"signal to noise of int8 weights: {worst.snr_db:.1f} dB or better; worst is {worst.name}, "
                f"its row {worst.worst_row} has {worst.worst_row_snr_db:.1f} dB"
            )
        if self.dequantized:
            types = ", ".join(self.dequantized)
            lines.append(f"the source is quantized ({types}): what it lost then is not measured here, and remains")
        if shares := [(tensor.exact_share, tensor) for tensor in self.tensors if tensor.exact_share is not None]:
            least, tensor = min(shares, key=lambda found: found[0])
            values = sum(math.prod(tensor.shape) for _, tensor in shares)
            share = sum(part * math.prod(tensor.shape) for part, tensor in shares) / max(values, 1)
            lines.append(
                f"MXFP4 in int8: {share:.4%} of the values of {len(shares)} matrices are exact; least is {tensor.name} "
                f"with {least:.4%}"
            )
        if self.tied_head is not None:
            lines.append(f"the output head shares the embedding's float tensor and runs as {self.tied_head.value}")
        if self.rotated_offline:
            lines.append(f"rotated in the weights: {', '.join(self.rotated_offline)}")
        if self.merged:
            lines.append(f"the adapter {self.merged} is merged into the weights")
        if self.left_out:
            lines.append(f"only the text model was migrated; left out: {', '.join(self.left_out)}")
        if self.late:
            schemes = ", ".join(sorted({scheme.value for scheme in self.late.values()}))
            lines.append(f"{len(self.late)} matrices are stored [in, out], stay float in the file and run as {schemes}")
        if self.only_bminf_lite:
            lines.append(f"only bminf-lite opens the result: {self.only_bminf_lite}")
        if self.not_obeyed:
            lines.append(self.not_obeyed)
        return "\n".join([*lines, *(f"not copied: {text}" for text in self.skipped)])

    def __repr__(self) -> str:
        return f"MigrationReport({self})"

    @property
    def has_outliers(self) -> bool:
        return any(product["outlier_columns"] for product in self.calibration.get("products", []))

    @property
    def only_bminf_lite(self) -> str | None:
        """Why other readers of the compressed-tensors format do not open the result; None if they do."""
        if self.conv1d:
            return "its int8 matrices are stored [in, out] in the source (--portable keeps them float in the file)"
        if self.has_outliers:
            return "some columns of its int8 matrices stay fp16"
        if self.rotates_inputs:
            return "its products rotate their input (--portable, without --recipe, makes one that others open)"
        return None

    @property
    def bytes_before(self) -> int:
        return sum(tensor.bytes_before for tensor in self.tensors)

    @property
    def bytes_after(self) -> int:
        return sum(tensor.bytes_after for tensor in self.tensors)

    def manifest(self) -> dict[str, Any]:
        """The content of ``bminf_lite.json``."""
        version = OUTLIER_FORMAT_VERSION if self.has_outliers else FORMAT_VERSION
        return {
            "format_version": CONV1D_FORMAT_VERSION if self.conv1d else version,
            "tool": "bminf-lite",
            "tool_version": __version__,
            "recipe": self.recipe.to_dict(),
            "tied_head": self.tied_head.value if self.tied_head else None,
            **({"quantized_when_loaded": {n: scheme.value for n, scheme in self.late.items()}} if self.late else {}),
            "only_bminf_lite": self.only_bminf_lite,
            **({"merged": self.merged} if self.merged else {}),
            **({"left_out": list(self.left_out)} if self.left_out else {}),
            **({"dequantized": list(self.dequantized)} if self.dequantized else {}),
            **({"rotated_offline": list(self.rotated_offline)} if self.rotated_offline else {}),
            **({"rotated_norms": dict(self.rotated_norms)} if self.rotated_norms else {}),
            **({"rotated_when_loaded": dict(self.late_rotations)} if self.late_rotations else {}),
            **({"grouped_when_loaded": dict(self.late_groups)} if self.late_groups else {}),
            **({"folded": {name: dict(factors) for name, factors in self.folded.items()}} if self.folded else {}),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            **({"calibration": dict(self.calibration)} if self.calibration else {}),
            **({"cost": dict(self.cost)} if self.cost else {}),
            "sources": [asdict(source) for source in self.sources],
            "files": [asdict(file) for file in self.files],
            "checked_when_loaded": dict(self.checksums),
            "tensors": [asdict(tensor) for tensor in self.tensors],
        }
