"""The memory of a model's weights on a GPU, computed without weights and without a GPU.

:class:`MetaBackend` counts bytes instead of making arrays, so the code that loads an architecture also measures it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from ..cuda.kernels.arrays import HEAD_PAD, PAD, round_up
from ..cuda.kernels.experts.adapters import expert_slot_bytes
from ..cuda.kernels.experts.weights import expert_matrix_shape
from ..cuda.kernels.recurrent.chunks import prepared_bytes_per_token
from ..cuda.kernels.recurrent.delta_net import heads_of as heads_of_delta_net
from ..cuda.kernels.recurrent.mamba2 import heads_of as heads_of_mamba2
from ..cuda.kernels.rowwise.adapters import RANKS, slot_bytes
from ..memory.arena import ALIGNMENT
from ..memory.step_time import ExpertBytes
from .adapter_slots import AdapterBank, AdapterSlots, Bank, SavedBank
from .base import Backend
from .expert_values import ExpertActivation, ExpertBiases, RouterSpec
from .quantization import HostWeight, int8_parts, stack_outliers
from .values import Array, DeltaNetSpec, LatentSpec, Mamba2Spec

T = TypeVar("T")


class MetaBackend(Backend):
    """A backend that computes nothing and counts the bytes of the model that is built with it.

    ``layer_bytes`` are the bytes of each layer's matrices, stack by stack. ``non_layer_bytes`` are those of all other
    arrays, of which ``table_bytes`` are embedding tables and ``adapter_bytes`` slots of adapters. ``layer_products``
    and ``layer_vectors`` count the matrices and the vectors of norms, stack by stack. ``expert_bytes`` has the matrices
    of each mixture of experts, which ``layer_bytes`` count too, with their scales.
    """

    name = "meta"

    def __init__(self) -> None:
        super().__init__(np.float16)
        self.layer_bytes: list[list[int]] = []
        self.non_layer_bytes = 0
        self.table_bytes = 0
        self.adapter_bytes = 0
        self.layer_products: list[int] = []
        self.expert_bytes: list[ExpertBytes] = []
        self.layer_vectors: list[int] = []
        self._in_layer = False
        self._widest = 0
        self._mixture_bytes = 0
        self._deepest = 0
        self._stream = 0

    @property
    def token_bytes(self) -> int:
        """An upper bound of a layer's activations, in bytes per token of a prompt's chunk.

        They are the sums of the widest product, the codes of its input and of the next product's input, and three
        arrays as large as the residual stream: itself, the addend, and its norm or a copy.
        """
        return self._widest + self._deepest + 3 * self._stream

    def blocks(self, build: Callable[[int], T], count: int) -> Iterable[T]:
        built = []
        self.layer_bytes.append([])
        self.layer_products.append(0)
        self.layer_vectors.append(0)
        for index in range(count):
            self.layer_bytes[-1].append(0)
            self._in_layer = True
            built.append(build(index))
            self._in_layer = False
        return built

    def weight(self, parts: Sequence[HostWeight], biases: Sequence[np.ndarray | None] = ()) -> Any:
        n, k = sum(p.shape[0] for p in parts), parts[0].shape[1]
        quantized = int8_parts(parts)
        rows, pitch = round_up(n, PAD), round_up(k, PAD)
        matrix = aligned(rows * pitch * (1 if quantized else 2))
        if self._in_layer:
            self.layer_bytes[-1][-1] += matrix
            self.layer_products[-1] += 1
            sums, codes = (4, 1) if quantized and quantized[0].dynamic else (6, 2)
            self._widest = max(self._widest, rows * sums + pitch * codes)
            self._deepest = max(self._deepest, pitch * codes)
        else:
            self.non_layer_bytes += matrix
        if quantized and (outliers := stack_outliers(quantized)) is not None:
            self.non_layer_bytes += aligned(len(outliers.index) * rows * 2) + aligned(len(outliers.index) * 4)
        if quantized:
            if size := quantized[0].group_size:
                width = 2 if all(part.scale.dtype == np.float16 for part in quantized) else 4
                self.non_layer_bytes += aligned(rows * -(-pitch // size) * width)
            else:
                self.non_layer_bytes += aligned(rows * 4)
        self.non_layer_bytes += aligned(rows * 4) * any(bias is not None for bias in biases)
        return None

    def with_adapters(self, base: Any, widths: Sequence[int], features: int) -> tuple[Any, Bank]:
        assert self.adapter_slots is not None
        nbytes = bank_bytes(self.adapter_slots, widths, features)
        self.adapter_bytes += nbytes
        self.non_layer_bytes += nbytes
        if self._in_layer:  # fp32 sums, the results in fp16, the inputs in fp16, and those of the side product
            pitch, ranks = round_up(features, PAD), len(widths) * round_up(self.adapter_slots.max_rank, RANKS)
            self._widest = max(self._widest, 6 * round_up(sum(widths), PAD) + 3 * pitch + 2 * ranks)
        return base, AdapterBank(self.adapter_slots, widths, self._round)

    def with_expert_adapters(self, base: Any, widths: Sequence[int], features: int) -> tuple[Any, Bank]:
        """Of the mixture that was made last. A token has its norm in fp16, and inputs of its pairs' side products."""
        slots, of = self.adapter_slots, self.expert_bytes[-1]
        assert slots is not None
        nbytes = expert_bank_bytes(slots, of.num_experts, widths, features)
        self.adapter_bytes += nbytes
        self.non_layer_bytes += nbytes
        inputs = 2 * round_up(slots.max_rank, RANKS) * len(widths)
        self._widest = max(self._widest, self._mixture_bytes + 2 * round_up(features, PAD) + of.top_k * inputs)
        return base, AdapterBank(slots, widths, self._round)

    def saved_bank(self, rows: int, columns: int) -> Any:
        assert self.adapter_slots is not None
        nbytes = saved_bytes(self.adapter_slots, rows, columns)
        self.adapter_bytes += nbytes
        self.non_layer_bytes += nbytes
        return SavedBank(self.adapter_slots, self._round)

    def mixture(
        self,
        spec: RouterSpec,
        router: np.ndarray,
        hidden: Iterable[Sequence[HostWeight]],
        down: Iterable[Sequence[HostWeight]],
        activation: ExpertActivation,
        correction_bias: np.ndarray | None = None,
        biases: ExpertBiases | None = None,
    ) -> Any:
        """A product before the activation and one behind it; a step reads the matrices of the experts it chooses."""
        experts, features = router.shape
        self.non_layer_bytes += aligned(experts * round_up(features, PAD) * 4)
        if correction_bias is not None:
            self.vector(correction_bias)
        if biases is not None:
            rows = sum(round_up(len(b), PAD) for b in (biases.router, *biases.hidden, *biases.down))
            self.non_layer_bytes += aligned(rows * 4)
        in_layers, beside, products = sum(self.layer_bytes[-1]), self.non_layer_bytes, self.layer_products[-1]
        inner, hidden_bytes = self._weights_of_experts(hidden, 2 if activation.gated else 1)
        out, down_bytes = self._weights_of_experts(down, 1)
        self.layer_products[-1] = products + 3
        hidden_units = inner // 2 if activation.gated else inner
        self._mixture_bytes = _bytes_of_experts(spec, features, hidden_units, out)
        self._widest = max(self._widest, self._mixture_bytes)
        matrices = sum(self.layer_bytes[-1]) - in_layers
        nbytes = matrices + self.non_layer_bytes - beside
        of_expert = hidden_bytes, down_bytes
        self.expert_bytes.append(ExpertBytes(nbytes, spec.num_experts, spec.top_k, matrices, of_expert))

    def _weights_of_experts(self, matrices: Iterable[Sequence[HostWeight]], halves: int) -> tuple[int, int]:
        """Count the stacked matrices of each expert, and return the rows and the bytes of one expert's.

        The same objects as the expert's before take as many bytes, which are not computed again.
        """
        previous: Sequence[HostWeight] = ()
        in_layer, beside = 0, 0
        for parts in matrices:
            if len(parts) == len(previous) and all(map(operator.is_, parts, previous)):
                self.layer_bytes[-1][-1] += in_layer
                self.non_layer_bytes += beside
                continue
            before = self.layer_bytes[-1][-1], self.non_layer_bytes
            self.weight(parts)
            in_layer, beside = self.layer_bytes[-1][-1] - before[0], self.non_layer_bytes - before[1]
            previous = parts
        return sum(part.shape[0] for part in previous), expert_matrix_bytes(previous, halves)

    def latent_weight(self, matrix: HostWeight, spec: LatentSpec) -> Any:
        """Two products, with the keys' matrices and the values', which are one array in 16 bits.

        A token has between them its queries and those that meet latent rows, in fp16, its means in fp16 and, before
        they are complete, in fp32, and its own row in fp32.
        """
        rows, pitch = spec.heads * (spec.nope_dim + spec.value_dim), round_up(spec.rank, PAD)
        self.layer_bytes[-1][-1] += aligned(2 * rows * pitch)
        self.layer_products[-1] += 2
        per_head = 2 * (spec.nope_dim + spec.rope_dim) + 2 * round_up(spec.row_dim, HEAD_PAD) + 6 * spec.rank
        self._widest = max(self._widest, spec.heads * per_head + 4 * round_up(spec.row_dim, PAD))

    def delta_net_spec(self, spec: DeltaNetSpec) -> DeltaNetSpec:
        """The products before it are still there in fp16; inputs and outputs of the recurrence are fp32."""
        inputs, outputs = spec.channels, spec.value_features
        heads = heads_of_delta_net(spec)
        prepared = prepared_bytes_per_token(heads)
        decays = spec.value_heads * (spec.key_dim if spec.per_channel else 1)
        sums = 4 * (heads.sums + decays + spec.value_heads)
        self._widest = max(self._widest, 6 * inputs + 8 * outputs + sums + prepared)
        return super().delta_net_spec(spec)

    def mamba2_spec(self, spec: Mamba2Spec) -> Mamba2Spec:
        """The product before it is still there in fp16; inputs and outputs of the recurrence are fp32."""
        prepared = prepared_bytes_per_token(heads_of_mamba2(spec))
        self._widest = max(self._widest, 6 * spec.channels + 8 * spec.features + 12 * spec.heads + prepared)
        return super().mamba2_spec(spec)

    def table(self, values: np.ndarray) -> Array:
        rows, columns = values.shape
        pitch = round_up(columns, PAD)
        table = aligned(rows * pitch * 2)
        self.table_bytes += table
        self.non_layer_bytes += table
        self._stream = max(self._stream, pitch * 4)

    def vector(self, values: np.ndarray) -> Array:
        self.non_layer_bytes += aligned(round_up(len(values), PAD) * 4)
        if self._in_layer:
            self.layer_vectors[-1] += 1

    def array(self, values: np.ndarray) -> Array:
        self.non_layer_bytes += aligned(values.nbytes)


def _bytes_of_experts(spec: RouterSpec, features: int, hidden: int, out: int) -> int:
    """Bytes per token of many: logits, the norm and its codes; of each pair codes, hidden values and the result."""
    features, hidden, out = (round_up(width, PAD) for width in (features, hidden, out))
    pair = features + 3 * hidden + 2 * out + 16  # four numbers: two of its place, and two scales
    return 4 * spec.num_experts + 5 * features + spec.top_k * (pair + 8)


def expert_matrix_bytes(parts: Sequence[HostWeight], halves: int) -> int:
    """Bytes of a matrix of an expert, of which a gated one has two ``halves``, as a GPU stores it."""
    rows, columns = expert_matrix_shape(sum(part.shape[0] for part in parts), parts[0].shape[1], halves)
    return rows * columns * (1 if int8_parts(parts) else 2)


def bank_bytes(slots: AdapterSlots, widths: Sequence[int], features: int) -> int:
    """The slots of one weight: both factors in fp16, the scales of each rank and section, and a header."""
    return aligned(slots.count * slot_bytes(round_up(slots.max_rank, RANKS), len(widths), features, sum(widths)))


def expert_bank_bytes(slots: AdapterSlots, experts: int, widths: Sequence[int], features: int) -> int:
    """The slots of all experts of a layer, as :func:`bank_bytes`: of their matrices of ``widths`` rows, down's last."""
    rank = round_up(slots.max_rank, RANKS)
    shapes = (widths[:-1], features), (widths[-1:], widths[0])
    return sum(aligned(slots.count * expert_slot_bytes(rank, experts, own, columns)) for own, columns in shapes)


def saved_bytes(slots: AdapterSlots, rows: int, columns: int) -> int:
    """Room for a matrix in each slot, in fp16, and whether it is there."""
    return aligned(2 * slots.count * rows * round_up(columns, PAD)) + aligned(4 * slots.count)


def aligned(nbytes: int) -> int:
    """The size of an arena's block for ``nbytes``."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
