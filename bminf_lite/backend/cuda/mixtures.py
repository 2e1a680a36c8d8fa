"""Mixtures of experts on one GPU: their weights as the kernels read them, and the layer from the residual stream on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import cupy as cp
import numpy as np

from ...cuda.kernels.arrays import PAD, round_up
from ...cuda.kernels.constants import MAX_EXPERTS
from ...cuda.kernels.experts.layer import ExpertLayerWeights
from ...cuda.kernels.experts.router import MAX_TOP_K, MAX_WIDTH, RouterKernels
from ...cuda.kernels.experts.weights import GROUP, ExpertMatrices, RouterWeights, alternate_gate_and_up
from ...errors import UsageError
from ..expert_values import ExpertActivation, RouterSpec
from ..quantization import HostWeight, Int8Weight
from ..values import Array
from .arrays import Arrays
from .deferred import DeferredNorm, ResidualStream
from .kernels import Kernels
from .materialize import STALE, Materializer
from .weight_loader import Loader

STAGED_BYTES = 64 << 20
"""Bytes of gates and ups that are on the GPU at a time before their rows are put in order."""
Half = tuple[cp.ndarray, cp.ndarray]
"""Rows of a gate, or of an up, and where they belong, ``[groups, GROUP, pitch]`` both."""


class MixtureLoader:
    """Makes what :class:`.ExpertKernels` take of a router and experts in w8a8."""

    def __init__(self, loader: Loader, arrays: Arrays) -> None:
        self.loader = loader
        self.arrays = arrays

    def load(
        self, spec: RouterSpec, router: np.ndarray, hidden: Iterable[Sequence[HostWeight]],
        down: Iterable[Sequence[HostWeight]], activation: ExpertActivation, correction_bias: np.ndarray | None,
    ) -> ExpertLayerWeights:  # fmt: skip
        """See :meth:`Backend.mixture`. Raises ``UsageError`` for what the kernels do not take."""
        features = router.shape[1]
        matrix = self.arrays.rows(spec.num_experts, features, np.float32)
        with self.arrays.current():
            matrix[...] = cp.asarray(np.ascontiguousarray(router, np.float32))
        bias = None if correction_bias is None else self.arrays.vector(correction_bias)
        weights = RouterWeights(spec, matrix, features, correction_bias=bias)
        if not RouterKernels.supports(weights):
            raise UsageError(
                f"a router of {spec.num_experts} experts, {spec.top_k} a token, for rows of {features} elements; on a "
                f"GPU there are at most {MAX_EXPERTS}, {MAX_TOP_K} and {MAX_WIDTH}: load the model with device='cpu'"
            )
        with self.loader.uploading():
            before = self._matrices(hidden, spec.num_experts, activation.gated)
            behind = self._matrices(down, spec.num_experts, gated=False, columns=_hidden_units(before, activation))
        return ExpertLayerWeights(weights, before, behind, activation)

    def _matrices(
        self, experts: Iterable[Sequence[HostWeight]], count: int, gated: bool, columns: int = 0
    ) -> ExpertMatrices:
        """The matrices of each expert, which are read one after another.

        Rows of the gate and of up are each padded to a multiple of ``GROUP``. ``columns``, if given, count the padding
        of the inputs.
        """
        checked = _checked(experts)
        first = next(checked)
        rows, k = sum(part.shape[0] for part in first), first[0].shape[1]
        halves = 2 if gated else 1
        half = round_up(rows // halves, GROUP)
        if not gated and half != rows:
            raise UsageError(
                f"experts with {rows} outputs; on a GPU their number is a multiple of {GROUP}: load the model with "
                "device='cpu'"
            )
        codes = self.loader.zeros((count, halves * half, round_up(k, PAD)), np.int8)
        scales = np.zeros((count, halves, half), np.float32)
        waiting: list[Half] = []
        for expert, parts in enumerate(chain([first], checked)):
            scale = np.concatenate([part.scale.astype(np.float32) for part in parts])
            scales[expert, :, : rows // halves] = scale.reshape(halves, -1)
            if not gated:
                self._upload(parts, codes[expert], k)
                continue
            places = codes[expert].reshape(half // GROUP, 2, GROUP, -1)
            for side, matrix in enumerate(_gate_and_up(parts)):
                plain = self.loader.matrix_rows(matrix, half)
                waiting.append((plain.reshape(half // GROUP, GROUP, -1), places[:, side]))
            if sum(plain.nbytes for plain, _ in waiting) >= STAGED_BYTES:
                self._put_in_order(waiting)
        self._put_in_order(waiting)
        ordered = scales.reshape(count, -1)
        scale = self.arrays.upload(alternate_gate_and_up(ordered) if gated else ordered)
        return ExpertMatrices(codes, scale, None, columns or k)

    def _upload(self, parts: Sequence[Int8Weight], place: cp.ndarray, k: int) -> None:
        first = 0
        with self.arrays.current():
            for part in parts:
                self.loader.upload(part.codes, place[first : first + part.shape[0]], k)
                first += part.shape[0]

    def _put_in_order(self, waiting: list[Half]) -> None:
        self.loader.finish_uploads()
        with self.arrays.current():
            for plain, place in waiting:
                place[...] = plain
        waiting.clear()


def _hidden_units(before: ExpertMatrices, activation: ExpertActivation) -> int:
    """What the experts' second matrix reads, padding included, whose scales are 0."""
    return before.out_features // (2 if activation.gated else 1)


def _gate_and_up(parts: Sequence[Int8Weight]) -> list[np.ndarray]:
    """The codes of the gate and of up, which are matrices of their own or the halves of one."""
    if len(parts) == 2:
        return [part.codes for part in parts]
    (both,) = parts
    half = both.shape[0] // 2
    return [both.codes[:half], both.codes[half:]]


def _checked(experts: Iterable[Sequence[HostWeight]]) -> Iterator[list[Int8Weight]]:
    """The experts, if all are of the kind that the kernels take."""
    for expert, parts in enumerate(experts):
        found = []
        for part in parts:
            kind = _kind(part)
            if not isinstance(part, Int8Weight) or kind is not None:
                raise UsageError(
                    f"the weights of expert {expert} are {kind}; a GPU computes experts in w8a8, with a scale per row: "
                    "migrate the model with the recipe w8a8, or load it with device='cpu'"
                )
            found.append(part)
        yield found


def _kind(part: HostWeight) -> str | None:
    """What keeps a GPU from computing an expert; None if nothing does."""
    if not isinstance(part, Int8Weight):
        return "float"
    found = {
        "w8a16": not part.dynamic,
        f"rotated in blocks of {part.rotation}": part.rotation > 1,
        "with scales of groups of columns": bool(part.group_size or part.input_group_size),
        "with columns of outliers": part.outliers is not None,
    }
    return ", ".join(name for name, applies in found.items() if applies) or None


class MixtureLayers:
    """Computes mixtures on the residual stream, whose norm the router's kernels compute themselves."""

    def __init__(self, arrays: Arrays, kernels: Kernels, materializer: Materializer) -> None:
        self.arrays = arrays
        self.kernels = kernels
        self.materializer = materializer

    def forward(self, x: Array, mixture: ExpertLayerWeights, residual: Array) -> Array:
        """See :meth:`Backend.experts`. ``x`` is a norm of a residual stream that has not changed since."""
        assert isinstance(x, DeferredNorm), "the kernels of a router compute the norm before it"
        assert not x.stale, STALE
        x.used, source = True, x.residual
        self.kernels.step.reads(None)
        if residual is None:
            out = self.arrays.rows(x.shape[0], mixture.down.out_features, np.float32)
            self._run(self.materializer.materialize(source), x, mixture, out, add=False)
            return out
        target = self.materializer.as_residual(residual)
        if target is not source:
            self.materializer.materialize(source)
        self.materializer.flush_residual(target)
        self._run(source.values, x, mixture, target.values, add=True)
        return ResidualStream(target.values)

    def _run(
        self, values: cp.ndarray, x: DeferredNorm, mixture: ExpertLayerWeights, out: cp.ndarray, add: bool
    ) -> None:
        self.kernels.experts.forward(self.kernels.step, values, x.norm, mixture, out, add, self.arrays.empty)
