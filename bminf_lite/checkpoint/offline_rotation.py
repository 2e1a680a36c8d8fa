"""Rotations that are folded into a model's weights before it is quantized: R1 and R2 of QuaRot.

An orthogonal matrix spreads a large channel over many, so that one scale per token suits all of them
(https://arxiv.org/abs/2404.00456). Two places need nothing at run time, so every reader opens the result:

- R1, the residual stream. An RMSNorm without its weight commutes with an orthogonal matrix ``Q``. So norms' weights
  move into the matrices that read them, which then multiply their input by ``Q``, and whatever is added to the stream
  is multiplied by ``Q`` too. A LayerNorm, or a norm of what a layer adds to the stream, rules it out.
- R2, the value heads. Attention's mean of values commutes with a matrix, so each value head is transformed, and the
  output projection undoes it.

The architecture says what is possible (``stream`` and ``value_heads`` of :class:`~bminf_lite.models.spec.Spec`). A tied
head reads a norm that the embedding does not, so it becomes a matrix of its own.

Rows are computed while they are read. Matrices that add to the stream, and those of values, are computed whole, so two
of these are in memory in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from ..backend.functions import silently
from ..backend.rotation import rotated
from ..errors import CheckpointError
from ..files import thread_count
from ..models.spec import Fold, Spec
from .derived_tensor import DerivedTensor, Rows, WholeMatrices, info_as
from .opened_model import OpenedModel
from .reader import Checkpoint

ROTATED_STREAM = "residual stream"
"""How the manifest's ``rotated_offline`` begins to name R1."""
STRIP_COLUMNS = 64
"""Columns of a matrix that are transformed at once: their strip fits the cache of a core."""

Transform = Callable[[np.ndarray], np.ndarray]
"""Rows fp32 ``[n, features]``, each multiplied by one orthogonal matrix."""


def stream_rotation(features: int) -> Transform:
    """Multiplication by an orthogonal matrix of ``features`` = ``m * 2**k`` with odd ``m``, always the same.

    Each element gets a random sign, each block of ``2**k`` elements is multiplied by Sylvester's Hadamard matrix over
    the root of its size, and a random orthogonal matrix mixes the ``m`` blocks.
    """
    random = np.random.default_rng(0)
    signs = random.choice(np.array([-1, 1], np.float32), features)
    block = features & -features
    mixing = np.linalg.qr(random.standard_normal((features // block,) * 2))[0].astype(np.float32)
    inner = 1 << (block.bit_length() // 2)
    outer = block // inner
    outer_matrix, inner_matrix = (rotated(np.eye(n, dtype=np.float32), n) for n in (outer, inner))

    @silently  # writing the tensor reports a NaN or an infinity with the tensor's name
    def transform(rows: np.ndarray) -> np.ndarray:
        # Sylvester's matrix is the Kronecker product of two smaller ones, which BLAS multiplies by
        signed = (rows * signs).reshape(-1, inner) @ inner_matrix
        blocks = np.matmul(outer_matrix, signed.reshape(-1, outer, inner))
        if features > block:
            blocks = np.matmul(mixing, blocks.reshape(-1, features // block, block))
        turned: np.ndarray = blocks.reshape(rows.shape)
        return turned

    return transform


def rotates_offline(spec: Spec) -> tuple[str, ...]:
    """What of a model with ``spec`` can be rotated, in words; empty for nothing."""
    stream = [ROTATED_STREAM + (" (its tied head is stored apart)" if spec.tied else "")] if spec.stream else []
    return (*stream, *(["value heads"] if spec.value_heads else []))


def rotated_norms(model: OpenedModel) -> dict[str, np.ndarray]:
    """The weights of the norms that R1 moves into the matrices, fp32, by name; an adapter of these needs them."""
    norms = model.spec.stream.norms if model.spec.stream is not None else ()
    return {norm.weight: model.checkpoint.vector(norm.weight).astype(np.float32) for norm in norms}


def rotate_offline(model: OpenedModel, in_type_of_file: Collection[str] = ()) -> OpenedModel:
    """``model``, an open float checkpoint, with R1 and R2 folded into its tensors as they are read.

    These are fp32, but for those named ``in_type_of_file``, which are rounded. Both models share the files.
    """
    checkpoint, spec = model.checkpoint, model.spec
    changes = changes_of(spec)
    description = model.description
    tied = spec.tied if spec.stream is not None else {}
    config = checkpoint.config
    if tied:
        spec = replace(spec, tied={})
        config_json = {**description.config_json, "tie_word_embeddings": False}
        if description.config_json is checkpoint.config:
            config = config_json
        description = replace(description, spec=spec, config_json=config_json)
    source = checkpoint.with_derived(_derived(checkpoint, spec, changes, tied, in_type_of_file), config)
    return OpenedModel(source, description, model.eos_ids)


@dataclass(frozen=True)
class Change:
    """The change of one tensor ``[out, in]``, as it is stored; a vector is one row.

    Its columns are multiplied by the weight of ``norm``, plus ``offset``; then each row goes through ``rows`` and
    each column through ``columns``. A norm's weight becomes ``constant``.
    """

    norm: str | None = None
    offset: float = 0.0
    rows: tuple[Transform, ...] = ()
    columns: tuple[Transform, ...] = ()
    constant: float | None = None


def changes_of(spec: Spec) -> dict[str, Change]:
    """The changes of R1 and R2 by the names of the tensors."""
    changes: dict[str, Change] = {}

    def add(name: str, **properties: object) -> None:
        changes[name] = replace(changes.get(name, Change()), **properties)  # type: ignore[arg-type]

    stream = spec.stream
    if stream is not None:
        rotate = stream_rotation(spec.parameters[stream.tables[0]].shape[-1])
        for name in stream.tables:
            add(name, rows=(rotate,))
        for norm in stream.norms:
            add(norm.weight, constant=1 - norm.offset)
            for name in norm.readers:
                add(name, norm=norm.weight, offset=norm.offset, rows=(rotate,))
        for name in stream.writers:
            add(name, **({"rows": (rotate,)} if _is_vector(spec, name) else {"columns": (rotate,)}))
    for fold in spec.value_heads:
        rotate = _head_rotation(fold)
        for name in fold.producers:
            before = changes.get(name, Change())
            if _is_vector(spec, name):
                add(name, rows=(*before.rows, rotate))
            else:
                add(name, columns=(*before.columns, rotate))
        for name in fold.consumers:
            add(name, rows=(*changes.get(name, Change()).rows, rotate))
    return changes


def _head_rotation(fold: Fold) -> Transform:
    """The transform of each value head by itself, in the largest block that divides it."""
    return lambda rows: rotated(rows, fold.block & -fold.block)


def _is_vector(spec: Spec, name: str) -> bool:
    return len(spec.parameters[name].shape) == 1


def _derived(
    checkpoint: Checkpoint,
    spec: Spec,
    changes: Mapping[str, Change],
    untied: Mapping[str, str],
    in_type_of_file: Collection[str],
) -> dict[str, DerivedTensor]:
    """The tensors of ``changes``, computed from those of ``checkpoint``; those of ``untied`` from others'."""
    make: dict[str, Callable[[], np.ndarray]] = {}
    whole = WholeMatrices(make)
    derived = {}
    for name, change in changes.items():
        stored = untied.get(name, name)
        info = checkpoint.tensors[stored]
        if name not in in_type_of_file:
            info = info_as(info, "F32")
        read = _rows(checkpoint, stored, change)
        if change.columns:
            make[name] = _whole(read, info.shape[0], change.columns)
            read = _part(whole, name)
        derived[name] = DerivedTensor(info, read)
    return derived


def _rows(checkpoint: Checkpoint, stored: str, change: Change) -> Rows:
    """The rows of a tensor after every change but that of its columns."""
    values = checkpoint.stored(stored)
    is_vector = len(values.shape) == 1
    norm_weight = None
    if change.norm is not None:
        norm_weight = checkpoint.vector(change.norm).astype(np.float32) + np.float32(change.offset)
        if not np.isfinite(norm_weight).all():
            problem = f"tensor {change.norm!r} holds a NaN or an infinity; such a model computes nothing"
            raise CheckpointError(f"{checkpoint.path}: {problem}: export the checkpoint again")

    def rows(first: int, end: int) -> np.ndarray:
        if change.constant is not None:
            return np.full((1, *values.shape), change.constant, np.float32)
        part = np.asarray(values if is_vector else values[first:end]).astype(np.float32)
        part = part[None] if is_vector else part
        if norm_weight is not None:
            part = part * norm_weight
        for transform in change.rows:
            part = transform(part)
        return part

    return rows


def _whole(read: Rows, rows: int, columns: tuple[Transform, ...]) -> Callable[[], np.ndarray]:
    """The whole matrix, its columns transformed too, on all threads."""

    def make() -> np.ndarray:
        values = read(0, rows)

        def transform_strip(first: int) -> None:
            strip = np.ascontiguousarray(values[:, first : first + STRIP_COLUMNS].T)
            for transform in columns:
                strip = transform(strip)
            values[:, first : first + STRIP_COLUMNS] = strip.T

        with ThreadPoolExecutor(thread_count()) as pool:
            list(pool.map(transform_strip, range(0, values.shape[1], STRIP_COLUMNS)))
        return values

    return make


def _part(whole: WholeMatrices, name: str) -> Rows:
    return lambda first, end: whole.rows(name, first, end)
