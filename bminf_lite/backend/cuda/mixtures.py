"""Mixtures of experts on one GPU: their weights as the kernels read them, and the layer from the residual stream on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain

import cupy as cp
import numpy as np

from ...cuda.kernels.constants import MAX_EXPERTS
from ...cuda.kernels.experts.adapters import StepAdapters
from ...cuda.kernels.experts.layer import ExpertLayerWeights
from ...cuda.kernels.experts.pairs import Addend
from ...cuda.kernels.experts.router import MAX_TOP_K, MAX_WIDTH, RouterKernels
from ...cuda.kernels.experts.weights import (
    GROUP,
    ExpertMatrices,
    RouterWeights,
    SharedExpertWeights,
    alternate_gate_and_up,
    expert_matrix_shape,
)
from ...errors import UsageError
from ..expert_values import ExpertActivation, ExpertBiases, RouterSpec
from ..meta import expert_matrix_bytes
from ..mixture import SharedExpert
from ..quantization import HostWeight, Int8Weight, int8_parts
from ..values import Array, ExpertSlots, Norm
from .adapter_bank import ExpertBank
from .arrays import Arrays
from .deferred import DeferredNorm, ResidualStream, Weight
from .expert_store import ExpertStore
from .kernels import Kernels
from .materialize import STALE, Materializer
from .weight_loader import Loader

STAGED_BYTES = 64 << 20
"""Bytes of gates and ups that are on the GPU at a time before their rows are put in order."""
Half = tuple[cp.ndarray, cp.ndarray]
"""Rows of a gate, or of an up, and where they belong, ``[groups, GROUP, pitch]`` both."""


class MixtureLoader:
    """Makes what :class:`.ExpertKernels` take of a router and its experts."""

    def __init__(self, loader: Loader, arrays: Arrays) -> None:
        self.loader = loader
        self.arrays = arrays
        self.pools: dict[ExpertSlots, ExpertStore] = {}

    def close(self) -> None:
        """Free the host's memory; no kernel may be reading it."""
        self.pools.clear()

    def load(
        self,
        spec: RouterSpec,
        router: np.ndarray,
        hidden: Iterable[Sequence[HostWeight]],
        down: Iterable[Sequence[HostWeight]],
        activation: ExpertActivation,
        correction_bias: np.ndarray | None,
        biases: ExpertBiases | None,
        slots: Sequence[ExpertSlots] = (),
    ) -> ExpertLayerWeights:
        """See :meth:`Backend.mixture`. With ``slots`` all experts lie on the host, and kernels copy them to these.

        Raises ``UsageError`` for what the kernels do not take, ``OutOfMemory`` if the host has no memory for them.
        """
        features = router.shape[1]
        matrix = self.arrays.rows(spec.num_experts, features, np.float32)
        with self.arrays.current():
            matrix[...] = cp.asarray(np.ascontiguousarray(router, np.float32))
        correction = None if correction_bias is None else self.arrays.vector(correction_bias)
        bias = None if biases is None else self.arrays.vector(biases.router)
        weights = RouterWeights(spec, matrix, features, bias, correction)
        if not RouterKernels.supports(weights):
            raise UsageError(
                f"a router of {spec.num_experts} experts, {spec.top_k} a token, for rows of {features} elements; on a "
                f"GPU there are at most {MAX_EXPERTS}, {MAX_TOP_K} and {MAX_WIDTH}: load the model with device='cpu'"
            )
        of_hidden, of_down = (None, None) if biases is None else (biases.hidden, biases.down)
        (first_hidden, hidden), (first_down, down) = _first_of(hidden), _first_of(down)
        halves = 2 if activation.gated else 1
        store = self._store((expert_matrix_bytes(first_hidden, halves), expert_matrix_bytes(first_down, 1)), slots)
        memories = (None, None) if store is None else (store.cache.hidden, store.cache.down)
        with self.loader.uploading():
            before = self._matrices(hidden, spec.num_experts, activation.gated, of_hidden, 0, memories[0])
            columns = _hidden_units(before, activation)
            behind = self._matrices(down, spec.num_experts, False, of_down, columns, memories[1])
        if spec.scales_input and not before.dynamic:
            raise UsageError(
                "the router's weights multiply the inputs of these experts, which a GPU computes in w8a8 alone: "
                "migrate the model with the recipe w8a8-rotate-all, or load it with device='cpu'"
            )
        if store is None:
            return ExpertLayerWeights(weights, before, behind, activation)
        cached = store.keep(spec.num_experts)
        own = store.cache.slots[cached.first : cached.first + cached.experts]
        before, behind = replace(before, slots=own), replace(behind, slots=own)
        return ExpertLayerWeights(weights, before, behind, activation, cached)

    def _store(self, expert_bytes: tuple[int, int], slots: Sequence[ExpertSlots]) -> ExpertStore | None:
        """The pool for experts of this size; None if all experts are on the device."""
        for planned in slots:
            if planned.expert_bytes == expert_bytes:
                if planned not in self.pools:
                    self.pools[planned] = ExpertStore(self.arrays, planned)
                return self.pools[planned]
        assert not slots, f"no slots are planned for experts of {expert_bytes} bytes"
        return None

    def _matrices(
        self,
        experts: Iterable[Sequence[HostWeight]],
        count: int,
        gated: bool,
        biases: Sequence[np.ndarray] | None,
        columns: int = 0,
        slots: cp.ndarray | None = None,
    ) -> ExpertMatrices:
        """The matrices of each expert, which are read one after another.

        Rows of the gate and of up are each padded to a multiple of ``GROUP``, as are the ``biases`` ``[rows]`` of each.
        ``columns``, if given, count the padding of the inputs. With ``slots``, uint8 ``[n, bytes]``, the matrices are
        made in the first of them.
        """
        checked = _checked(experts)
        kind, first = next(checked)
        rows, k = sum(part.shape[0] for part in first), first[0].shape[1]
        halves = 2 if gated else 1
        shape = expert_matrix_shape(rows, k, halves)
        half = shape[0] // halves
        if not gated and half != rows:
            raise UsageError(
                f"experts with {rows} outputs; on a GPU their number is a multiple of {GROUP}: load the model with "
                "device='cpu'"
            )
        if slots is None:
            values = self.loader.zeros((count, *shape), kind.dtype)
        else:
            values = cp.ndarray((len(slots), *shape), kind.dtype, slots.data)
            assert values.nbytes == slots.nbytes, "slots of another size"
            slots.data.memset_async(0, slots[:count].nbytes, self.arrays.stream)
        scales: list[np.ndarray] | None = [] if kind.is_int8 else None
        waiting: list[Half] = []
        for expert, (_, parts) in enumerate(chain([(kind, first)], checked)):
            if scales is not None:
                scales.append(_scale(parts))
            if not gated:
                self._upload(parts, values[expert], k)
                continue
            places = values[expert].reshape(half // GROUP, 2, GROUP, -1)
            for side, matrix in enumerate(_gate_and_up(parts)):
                plain = self.loader.matrix_rows(matrix, half, kind.dtype)
                waiting.append((plain.reshape(half // GROUP, GROUP, -1), places[:, side]))
            if sum(plain.nbytes for plain, _ in waiting) >= STAGED_BYTES:
                self._put_in_order(waiting)
        self._put_in_order(waiting)
        scale, bias = (self._vectors(rows_of, halves, half) for rows_of in (scales, biases))
        return ExpertMatrices(values, scale, bias, columns or k, kind.rotation, kind.dynamic)

    def _vectors(self, of_experts: Sequence[np.ndarray] | None, halves: int, half: int) -> cp.ndarray | None:
        """A number for each row of each expert, fp32 ``[experts, halves * half]``, zeros for rows that are padding."""
        if of_experts is None:
            return None
        vectors = np.stack(of_experts).astype(np.float32).reshape(len(of_experts), halves, -1)
        padded = np.pad(vectors, ((0, 0), (0, 0), (0, half - vectors.shape[2]))).reshape(len(of_experts), -1)
        return self.arrays.upload(alternate_gate_and_up(padded) if halves == 2 else padded)

    def _upload(self, parts: Sequence[HostWeight], place: cp.ndarray, k: int) -> None:
        first = 0
        with self.arrays.current(), np.errstate(over="ignore"):
            for part in parts:
                self.loader.upload(_numbers(part), place[first : first + part.shape[0]], k)
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


def _numbers(part: HostWeight) -> np.ndarray:
    """The codes of an int8 matrix, or the elements of a float one."""
    return part.codes if isinstance(part, Int8Weight) else part


def _scale(parts: Sequence[HostWeight]) -> np.ndarray:
    return np.concatenate([part.scale.astype(np.float32) for part in parts if isinstance(part, Int8Weight)])


def _gate_and_up(parts: Sequence[HostWeight]) -> list[np.ndarray]:
    """The numbers of the gate and of up, which are matrices of their own or the halves of one."""
    if len(parts) == 2:
        return [_numbers(part) for part in parts]
    both = _numbers(parts[0])
    half = both.shape[0] // 2
    return [both[:half], both[half:]]


@dataclass(frozen=True)
class _Kind:
    """How the matrices of a layer's experts are quantized, and the block in which they rotate their input."""

    is_int8: bool
    dynamic: bool
    rotation: int

    @property
    def dtype(self) -> type:
        return np.int8 if self.is_int8 else np.float16

    def __str__(self) -> str:
        name = "float" if not self.is_int8 else "w8a8" if self.dynamic else "w8a16"
        return name if self.rotation == 1 else f"{name} with its input rotated in blocks of {self.rotation}"


def _checked(experts: Iterable[Sequence[HostWeight]]) -> Iterator[tuple[_Kind, Sequence[HostWeight]]]:
    """The experts with their kind, if the kernels take it and all have the same.

    Raises ``ValueError`` for matrices of one expert that are not quantized alike, and ``UsageError`` for the rest.
    """
    first = None
    for expert, parts in enumerate(experts):
        quantized = int8_parts(parts)
        if quantized and (refused := _refused(quantized[0])):
            raise UsageError(
                f"the weights of expert {expert} are {refused}; a GPU computes experts in w8a8, w8a16 or float, with a "
                "scale per row: migrate the model with the recipe w8a8-rotate-all, or load it with device='cpu'"
            )
        kind = _Kind(
            bool(quantized), bool(quantized) and quantized[0].dynamic, max([1, *(q.rotation for q in quantized)])
        )
        first = kind if first is None else first
        if kind != first:
            raise UsageError(
                f"expert {expert} is {kind}, and expert 0 is {first}; a GPU computes experts that are quantized alike: "
                "migrate the model with the recipe w8a8-rotate-all, or load it with device='cpu'"
            )
        yield kind, parts


def _refused(part: Int8Weight) -> str | None:
    """What keeps a GPU from computing an expert; None if nothing does."""
    found = {
        "with scales of groups of columns": bool(part.group_size or part.input_group_size),
        "with columns of outliers": part.outliers is not None,
    }
    return ", ".join(name for name, applies in found.items() if applies) or None


def _first_of(experts: Iterable[Sequence[HostWeight]]) -> tuple[Sequence[HostWeight], Iterable[Sequence[HostWeight]]]:
    """The first expert, and an iterable of all, the first included."""
    others = iter(experts)
    first = next(others)
    return first, chain([first], others)


@dataclass(frozen=True)
class AdaptedExperts(ExpertLayerWeights):
    """A layer of experts with the adapters in a ``bank`` that the tokens of a step choose among."""

    bank: ExpertBank | None = None

    @classmethod
    def of(cls, layer: ExpertLayerWeights, bank: ExpertBank) -> AdaptedExperts:
        return cls(**{field.name: getattr(layer, field.name) for field in fields(layer)}, bank=bank)


class MixtureLayers:
    """Computes mixtures on the residual stream, whose norm the router's kernels compute themselves if it has one."""

    def __init__(self, arrays: Arrays, kernels: Kernels, materializer: Materializer) -> None:
        self.arrays = arrays
        self.kernels = kernels
        self.materializer = materializer

    def forward(
        self,
        x: Array,
        mixture: ExpertLayerWeights,
        residual: Array,
        addend: Array = None,
        gate: Array = None,
        routed: Array = None,
        shared: SharedExpert | None = None,
    ) -> tuple[Array, cp.ndarray]:
        """See :meth:`Backend.experts`; also the experts of each token, int32 ``[T, top_k]``.

        What the router reads is a norm of a residual stream unchanged since, or such a stream. A ``shared`` expert is
        one that :meth:`takes_shared`.
        """
        added = None if addend is None else Addend(self.arrays.padded(self.materializer.materialize(addend)), gate)
        chooser, hidden = x if routed is None else routed, mixture.hidden
        values, norm = self._read(chooser)
        rows = None if hidden.dynamic else self.materializer.to_half(x, hidden.rotation)
        latent = self.materializer.to_half(x) if hidden.dynamic and routed is not None else None
        adapters = self._step_adapters(mixture, x, latent if hidden.rotation > 1 or hidden.dynamic else rows)
        beside = None if shared is None else SharedExpertWeights(shared.hidden, shared.down, shared.gate)
        self.kernels.step.reads(None)
        if residual is None:
            out = self.arrays.rows(x.shape[0], mixture.down.out_features, np.float32)
            return out, self._run(values, norm, mixture, out, False, rows, added, latent, beside, adapters)
        target = self.materializer.as_residual(residual)
        self.materializer.flush_residual(target)
        chosen = self._run(values, norm, mixture, target.values, True, rows, added, latent, beside, adapters)
        return ResidualStream(target.values), chosen

    def takes_shared(self, x: Array, mixture: ExpertLayerWeights, routed: Array, shared: SharedExpert) -> bool:
        """Whether the kernels of the experts compute the shared one too: in w8a8, its inputs rotated as theirs."""
        experts = self.kernels.experts
        return (
            routed is None
            and _slots_of(mixture) is None
            and shared.activation == mixture.activation
            and _is_plain(shared.hidden, mixture.hidden)
            and _is_plain(shared.down, mixture.down)
            and experts.takes_shared(x.shape[0], mixture, SharedExpertWeights(shared.hidden, shared.down, shared.gate))
        )

    def _step_adapters(self, mixture: ExpertLayerWeights, x: Array, half: cp.ndarray | None) -> StepAdapters | None:
        """The adapters of the step's tokens; ``half`` is ``x`` in fp16 if it is known. None if no token has one."""
        slots = _slots_of(mixture)
        if slots is None:
            return None
        assert isinstance(mixture, AdaptedExperts) and mixture.bank is not None
        assert len(slots) == x.shape[0], "the rows of a product are not those of the step"
        return StepAdapters(mixture.bank.adapters, slots, self.materializer.to_half(x) if half is None else half)

    def scalar_gate(self, x: Array, vector: cp.ndarray) -> cp.ndarray:
        """See :meth:`Backend.scalar_gate`; of the same norm."""
        values, norm = self._read(x)
        self.kernels.step.reads(None)
        out = self.arrays.empty((x.shape[0], 1), np.float32)
        self.kernels.experts.router.scalar_gate(self.kernels.step, values, norm, vector, out)
        return out

    def _read(self, x: Array) -> tuple[cp.ndarray, Norm | None]:
        """The complete residual stream of a norm, which a kernel is about to compute while it reads the stream.

        Of a stream that is read without a norm, the stream and None.
        """
        if not isinstance(x, DeferredNorm):
            values = self.materializer.materialize(self.materializer.as_residual(x))
            assert values.dtype == np.float32, "a router reads a residual stream, or a norm of it"
            return values, None
        assert not x.stale, STALE
        x.used = True
        return self.materializer.materialize(x.residual), x.norm

    def _run(
        self,
        values: cp.ndarray,
        norm: Norm | None,
        mixture: ExpertLayerWeights,
        out: cp.ndarray,
        add: bool,
        rows: cp.ndarray | None,
        addend: Addend | None,
        latent: cp.ndarray | None,
        shared: SharedExpertWeights | None,
        adapters: StepAdapters | None,
    ) -> cp.ndarray:
        routing = self.kernels.experts.forward(
            self.kernels.step,
            values,
            norm,
            mixture,
            out,
            add,
            self.arrays.empty,
            rows,
            addend,
            latent,
            shared,
            adapters,
        )
        return routing.ids


def _slots_of(mixture: ExpertLayerWeights) -> cp.ndarray | None:
    """The slots of the step's tokens; None if no token has an adapter, or the layer has no room for any."""
    if not isinstance(mixture, AdaptedExperts) or mixture.bank is None:
        return None
    slots: cp.ndarray | None = mixture.bank.slots.rows
    return slots


def _is_plain(weight: Weight, other: ExpertMatrices) -> bool:
    """Whether a product is that of a matrix alone in w8a8, whose input is rotated as that of other matrices."""
    has_adapters = weight.adapters is not None and weight.adapters.slots.rows is not None
    return (
        weight.plan is not None
        and weight.is_row_major
        and weight.rotation == other.rotation
        and not (weight.side_products or has_adapters)
    )
