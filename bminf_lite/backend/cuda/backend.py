"""One NVIDIA GPU: the operations of :mod:`bminf_lite.backend.base`, each by kernels whose results must equal it.

Work goes to one stream, and memory comes from one arena. :mod:`.products` chooses the kernel of a product. Some leave
int32 sums, which the kernel before the next product reads while it writes the codes for that. For this an operation may
return a deferred value (see :mod:`.deferred`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import cupy as cp
import numpy as np

from ...cuda.kernels.arrays import HEAD_PAD, PAD, address, pitch_of, round_up
from ...cuda.kernels.attention.heads import head_pitch_of
from ...cuda.kernels.constants import DELTA_NET_MAX_KEY_DIM, MAMBA2_MAX_STATE_DIM, AttentionMask, Epilogue
from ...cuda.kernels.experts.layer import ExpertLayerWeights
from ...cuda.kernels.gemm.cublaslt_matmul import MatmulContext
from ...cuda.kernels.gemm.fgemm import FloatGemm
from ...cuda.kernels.gemm.igemm import Int8Gemm
from ...cuda.kernels.gemm.layouts import Layout
from ...cuda.kernels.gemm.plans import kinds_for, row_major_first
from ...cuda.kernels.recurrent.chunks import Prepared
from ...cuda.kernels.recurrent.delta_net import heads_of as delta_net_heads
from ...cuda.kernels.recurrent.mamba2 import heads_of as mamba2_heads
from ...cuda.kernels.sampling.sampler import Sampler
from ...cuda.runtime.cublaslt import Order
from ...cuda.runtime.driver import Device
from ...errors import UsageError
from ...memory.device import MARGIN, device_arena
from ..adapter_slots import Bank
from ..base import Backend
from ..calibration import CalibrationOps
from ..expert_values import ExpertActivation, ExpertBiases, RouterSpec
from ..mixture import SharedExpert, shared_result
from ..operations.rows import HeadsOfRank
from ..quantization import HostWeight
from ..sampling import MAX_LOGPROBS, SamplerState
from ..side_products import Adapter
from ..values import (
    AnyCache,
    Array,
    AttentionSpec,
    DeltaNetSpec,
    ForwardBatch,
    LatentCache,
    LatentSpec,
    LayerCache,
    Mamba2Spec,
    Norm,
    Pooling,
    ProductEpilogue,
    ShortConvolution,
    StateArray,
    StateCache,
)
from .adapter_bank import AdapterBank, SavedBank
from .arrays import Arrays, ZeroedScratch
from .attention import AttentionLaunches
from .calibration import CudaCalibrationOps
from .deferred import DeferredNorm, NormAddend, QuantizedActivations, ResidualStream, Weight
from .float_products import FloatProducts
from .fused import FusedGemms
from .graph_capture import CapturedGraph, GraphMemory
from .int8_products import AdaptedProducts, FusedProducts, GemvProducts, InputCodes, SumProducts
from .kernels import Kernels
from .latent import LatentLaunches, LatentMatrices, load_latent_matrices
from .layer_caches import LayerCaches, copies_of_blocks
from .materialize import Materializer
from .mixtures import MixtureLayers, MixtureLoader
from .peers import PeerRank
from .products import Product, ProductResults, Products
from .weight_loader import Loader

T = TypeVar("T")
DECODE_SIZES = (
    *(1, 2, 4, 8, 16, 32, 48, 56, 64, 96, 112, 128), *(192, 224, 256), *range(320, 513, 64), *range(640, 1025, 128)
)  # fmt: skip
"""Numbers of sequences of captured decode steps, behind most of which products take another tile of rows."""
MIXED_SIZES = tuple(
    (decodes, tokens)
    for decodes, sizes in {
        0: (16, 64, 128, 256, 384, 512), 8: (16, 64, 128, 256, 512), 32: (64, 128, 256, 512), 64: (64, 256, 512),
        128: (128, 256, 512), 256: (256, 512), 512: (256, 512),
    }.items()
    for tokens in sizes
)  # fmt: skip
"""Decoding sequences and prompt tokens of captured steps. The host launches larger steps faster than they run."""
SOURCE_SIZES = (16, 32, 64, 128, 256, 384, 512)
"""Tokens of captured sources. Products of more than 64 rows have tiles of 128, so sizes between would save little."""
WRITE_KERNEL_MAX_BYTES = 64 << 10
"""A kernel reads transfers of at most ``WRITE_KERNEL_MAX_BYTES`` from host memory, as a copy would wait for the copy
engine."""
KERNEL_EPILOGUES = {
    ProductEpilogue.STORE: Epilogue.TO_HALF,
    ProductEpilogue.STORE_FP32: Epilogue.TO_FLOAT,
    ProductEpilogue.ADD: Epilogue.ADD,
    ProductEpilogue.GATE: Epilogue.GATED,
    ProductEpilogue.ACTIVATE: Epilogue.ACTIVATED,
}
"""The epilogues of kernels that store activations in fp16."""


class CudaBackend(Backend):
    """The operations on GPU number ``device`` within ``memory_limit``: bytes, ``"6GiB"``, or None for what is free."""

    decode_sizes = DECODE_SIZES
    mixed_sizes = MIXED_SIZES
    source_sizes = SOURCE_SIZES
    max_text_tokens = 1 << 16
    max_steps_in_flight = 1
    has_one_order = True
    computes_in_threads = False

    def __init__(self, device: int = 0, memory_limit: int | str | None = None):
        super().__init__(np.float16)
        self.name = f"cuda:{device}"
        self.device = Device(device)
        with cp.cuda.Device(device):
            self.stream = cp.cuda.Stream(non_blocking=True)
        self.arena = device_arena(self.device, memory_limit)
        self.arrays = Arrays(self.arena, self.stream, device)
        self.kernels = Kernels(self.device, self.stream)
        self.materializer = Materializer(self.arrays, self.kernels)
        with self.arrays.current():
            matmul_context = MatmulContext.open(self.device, self.arrays.memory)
            self.int8_gemm = Int8Gemm(
                self.device, matmul_context, row_major_first(kinds_for(self.device.compute_capability))
            )
            self.float_gemm = FloatGemm(matmul_context)
        self.fused = FusedGemms(self.int8_gemm, self.arrays)
        self.products = self._products()
        self.loader = Loader(self.arena, self.arrays, self.kernels, self.int8_gemm)
        self.mixture_loader = MixtureLoader(self.loader, self.arrays)
        self.mixtures = MixtureLayers(self.arrays, self.kernels, self.materializer)
        self.graph_memory = GraphMemory(self.arena)
        self.scratch = ZeroedScratch(self.arrays, self.arena)
        self.caches = LayerCaches(self.device, self.arena, self.arrays)
        self.launches = AttentionLaunches(self.arrays, self.kernels, self.materializer, self.scratch, self.arena.limit)
        self.latents = LatentLaunches(
            self.arrays, self.kernels, self.materializer, self.scratch, self.launches.max_record_bytes
        )
        self.copies = cp.cuda.Stream(non_blocking=True)
        """Copies to the sampler, and to kernels that wait, beside a model that computes."""
        self._sampled = cp.cuda.Event(disable_timing=True)  # behind the last sampler, which may read what is copied

    def _products(self) -> Products:
        """The kernels of products: the first that supports a product computes it."""
        results = ProductResults(self.materializer)
        codes = InputCodes(self.materializer, in_one_block=self.fused.scaled_gemm.supported)
        kernels = (
            GemvProducts(results),
            FusedProducts(results, codes, self.fused),
            SumProducts(results, codes),
            FloatProducts(results),
        )
        return Products(results, kernels, AdaptedProducts(results, codes, self.fused))

    # -- arrays --------------------------------------------------------------------------------------------------------

    def array(self, values: np.ndarray) -> Array:
        return self.arrays.upload(np.asarray(values))

    def upload(self, values: np.ndarray) -> Array:
        target = self.arrays.empty(values.shape, values.dtype)
        self.write(target, values)
        return target

    def adopt(self, values: Any) -> Callable[[], Array]:
        with cp.cuda.Device(self.arrays.device):
            array = cp.from_dlpack(values) if hasattr(values, "__dlpack__") else cp.asarray(values)
            written = cp.cuda.get_current_stream().record()  # the conversion made this stream wait for the library's

        def wait() -> cp.ndarray:
            self.stream.wait_event(written)
            return array

        return wait

    def assign(self, target: Array, values: np.ndarray) -> None:
        with self.arrays.current():
            target[...] = cp.asarray(values, target.dtype)

    def write(self, target: Array, values: np.ndarray) -> None:
        by_kernel = values.itemsize == 4 and values.nbytes <= WRITE_KERNEL_MAX_BYTES
        self.arrays.write(target, values, copy=self._write_words if by_kernel else None)

    def _write_words(self, target: int, source: int, nbytes: int) -> None:
        self.kernels.pointwise.write_words(source, target, nbytes // 4)

    def write_for_sampler(self, target: Array, values: np.ndarray) -> None:
        self.copies.wait_event(self._sampled)
        self.stream.wait_event(self.arrays.write(target, values, self.copies))

    def host(self, x: Array) -> np.ndarray:
        values = self.materializer.materialize(x)
        with self.arrays.current():
            found: np.ndarray = cp.asnumpy(values, stream=self.stream)
        self.communicator.check()
        return found

    def complete(self, x: Array) -> cp.ndarray:
        values = self.materializer.materialize(x)
        self.stream.synchronize()
        self.communicator.check()
        return values

    def fetch(self, x: Array) -> Callable[[], np.ndarray]:
        values, check = self.materializer.materialize(x), self.communicator.check
        if not values.flags.c_contiguous:
            with self.arrays.current():
                values = cp.ascontiguousarray(values)
        download = self.arrays.download(values)

        def wait() -> np.ndarray:
            found = download()
            check()
            return found

        return wait

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        graph, rank = (self.graph_memory, self.arrays, work, lambda: self.loader.streamed_bytes), self.communicator
        if not isinstance(rank, PeerRank):
            return CapturedGraph(*graph)
        captured = CapturedGraph(*graph, rank.agree)

        def run() -> T:
            rank.meet()
            found: T = captured()
            rank.meet()
            return found

        return run

    @contextmanager
    def step(self, batch: ForwardBatch) -> Iterator[None]:
        with self.kernels.in_step(), super().step(batch):
            yield
            if isinstance(self.communicator, PeerRank):
                self.communicator.end_step()

    def make_current(self) -> None:
        self.device.make_current()

    def describe(self) -> str:
        major, minor = self.device.compute_capability
        return f"{self.device.name} (compute capability {major}.{minor})"

    def memory(self) -> dict[str, int]:
        names = ("used", "peak_used", "reserved", "peak_reserved", "limit")
        numbers = {name: getattr(self.arena, name) for name in names}
        numbers["available"] = min(self.arena.limit - self.arena.used, max(0, self.device.memory()[0] - MARGIN))
        return numbers

    def expert_cache(self) -> dict[str, int]:
        pools = self.mixture_loader.pools
        if not pools:
            return {}
        counts = {planned: store.counts() for planned, store in pools.items()}
        return {
            "slots": sum(planned.slots for planned in pools),
            "experts": sum(sum(planned.layers) for planned in pools),
            "hits": sum(hits for hits, _ in counts.values()),
            "misses": sum(misses for _, misses in counts.values()),
            "copied_bytes": sum(misses * sum(planned.expert_bytes) for planned, (_, misses) in counts.items()),
        }

    def close(self) -> None:
        self.communicator.close()
        self.stream.synchronize()
        self.arrays.close()
        self.loader.close()
        self.mixture_loader.close()
        self.scratch.clear()
        self.arena.close()

    # -- loading -------------------------------------------------------------------------------------------------------

    def weight(self, parts: Sequence[HostWeight], biases: Sequence[np.ndarray | None] = ()) -> Weight:  # type: ignore[override]
        return self.loader.weight(parts, biases)

    def adapted(self, base: Weight, adapter: Adapter) -> Weight:  # type: ignore[override]
        return self.loader.adapted(base, adapter)

    def with_adapters(self, base: Weight, widths: Sequence[int], features: int) -> tuple[Weight, Bank]:
        assert self.adapter_slots is not None
        with self.arrays.within(self.arena):
            bank = AdapterBank(self.arrays, self.adapter_slots, widths, features)
        return replace(base, adapters=bank), bank

    def saved_bank(self, rows: int, columns: int) -> SavedBank:
        assert self.adapter_slots is not None
        with self.arrays.within(self.arena):
            return SavedBank(self.arrays, self.adapter_slots, rows, columns)

    def saved_linear(self, x: Array, bank: SavedBank, y: Array) -> Array:
        rows, values = bank.slots.rows, self.materializer.materialize(y)
        if rows is not None:
            assert len(rows) == len(values), "the rows of a product are not those of the step"
            self.kernels.adapters.saved_products(
                self.kernels.step, self.materializer.to_half(x), rows, bank.saved, values
            )
        return values

    def saved_embed(self, tokens: Array, bank: SavedBank, residual: Array, scale: float = 1.0) -> Array:
        rows = bank.slots.rows
        if rows is None:
            return residual
        target = self.materializer.as_residual(residual)
        self.materializer.flush_residual(target)
        self.kernels.adapters.saved_embed(self.kernels.step, tokens, rows, bank.saved, target.values, scale)
        return ResidualStream(target.values)

    def mixture(  # type: ignore[override]
        self, spec: RouterSpec, router: np.ndarray, hidden: Iterable[Sequence[HostWeight]],
        down: Iterable[Sequence[HostWeight]], activation: ExpertActivation, correction_bias: np.ndarray | None = None,
        biases: ExpertBiases | None = None,
    ) -> ExpertLayerWeights:  # fmt: skip
        slots = self.placement.experts
        return self.mixture_loader.load(spec, router, hidden, down, activation, correction_bias, biases, slots)

    def blocks(self, build: Callable[[int], T], count: int) -> Iterable[T]:
        return self.loader.blocks(build, count, self.placement)

    def table(self, values: np.ndarray) -> Array:
        return self.loader.table(values, self.placement.host_tables)

    def vector(self, values: np.ndarray) -> Array:
        return self.arrays.vector(np.asarray(values))

    def layer_cache(
        self, num_blocks: int, kv_heads: int, head_dim: int, *, int8: bool = False, max_blocks: int | None = None
    ) -> LayerCache:
        return self.caches.make(num_blocks, kv_heads, head_dim, int8, max_blocks)

    def state_cache(self, num_slots: int, arrays: Sequence[StateArray], *, max_slots: int | None = None) -> StateCache:
        return self.caches.make_states(num_slots, arrays, max_slots or num_slots)

    def latent_cache(
        self, num_blocks: int, row_dim: int, *, int8: bool = False, max_blocks: int | None = None
    ) -> LatentCache:
        return self.caches.make_latent(num_blocks, row_dim, int8, max_blocks or num_blocks)

    def grow(self, cache: AnyCache, num_blocks: int) -> None:
        self.caches.grow(cache, num_blocks)

    def copy_blocks(self, copies: Sequence[tuple[AnyCache, int, int]]) -> None:
        self.kernels.copy_blocks.launch(self.arrays.upload(copies_of_blocks(copies)))

    def free_layer_cache(self, cache: AnyCache) -> None:
        self.caches.free(cache)
        super().free_layer_cache(cache)

    def calibration_ops(self) -> CalibrationOps:
        return CudaCalibrationOps(self, self.materializer, self.loader, self.int8_gemm, self.float_gemm)

    # -- quantization and products -------------------------------------------------------------------------------------

    def quantize(self, x: Array) -> tuple[Array, Array]:
        rows, k = x.shape
        layout = Layout(Order.ROW, rows, k, round_up(k, PAD))
        codes, scale = self.arrays.rows(rows, k, np.int8), self.arrays.empty((rows,), np.float32)
        self.materializer.transform(x, QuantizedActivations(layout, codes.data, scale.data))
        return codes, scale

    def igemm(self, x: Array, w: Array) -> Array:
        with self.arrays.current():
            return self.int8_gemm.matmul(x, w, transpose_b=True)

    def product(  # type: ignore[override]
        self,
        x: Array,
        weight: Weight,
        epilogue: ProductEpilogue = ProductEpilogue.STORE,
        activation: str | None = None,
        target: Array = None,
    ) -> Array:
        kind = KERNEL_EPILOGUES[epilogue]
        if kind is Epilogue.ADD:
            target = self.materializer.as_residual(target)
            self.kernels.step.reads(None)
        elif target is not None:
            assert target.shape == (x.shape[0], weight.out_features)
            kind = Epilogue.TO_FLOAT if target.dtype == np.float32 else Epilogue.TO_HALF
        return self.products.run(Product(x, weight, kind, activation, target))

    def experts(  # type: ignore[override]
        self,
        x: Array,
        mixture: ExpertLayerWeights,
        residual: Array = None,
        addend: Array = None,
        gate: Array = None,
        routed: Array = None,
        shared: SharedExpert | None = None,
    ) -> Array:
        if shared is not None and not self.mixtures.takes_shared(x, mixture, routed, shared):
            (addend, gate), shared = shared_result(self, x, shared), None
        out, chosen = self.mixtures.forward(x, mixture, residual, addend, gate, routed, shared)
        if self.choices is not None:
            self.choices.append(chosen)
        return out

    def add_experts(self, found: Array, residual: Array, addend: Array, gate: Array) -> Array:
        if addend is not None:
            with self.arrays.current():
                values = self.materializer.materialize(addend)
                found = found + (values if gate is None else gate * values)
        return found if residual is None else self.add(residual, found)

    def scalar_gate(self, x: Array, vector: Array) -> Array:
        return self.mixtures.scalar_gate(x, vector)

    def add(self, residual: Array, addend: Array) -> Array:
        target, values = self.materializer.as_residual(residual), self.materializer.materialize(addend)
        self.materializer.flush_residual(target)
        with self.arrays.current():
            target.values += values
        return ResidualStream(target.values)

    def all_reduce_add(self, partial: Array, bias: Array = None, residual: Array = None) -> Array:
        if not isinstance(self.communicator, PeerRank):
            values = self._rows(partial)
            with self.arrays.current():
                y = self.communicator.all_reduce_add(values)
            return self._add_to_stream(y, bias, residual)
        values = self._rows(partial)
        if residual is None:
            out = self.arrays.rows(values.shape[0], values.shape[1], np.float32)
            self.communicator.add(values, bias, out, add=False)
            return out
        target = self.materializer.as_residual(residual)
        self.materializer.flush_residual(target)
        self.kernels.step.reads(None)
        self.communicator.add(values, bias, target.values, add=True)
        return ResidualStream(target.values)

    def all_gather_columns(self, part: Array, columns: slice, count: int) -> Array:
        values = self.materializer.materialize(part)
        pitch = round_up(count, PAD)
        whole = self.arrays.zeros((len(values), pitch), np.float32)[:, :count]
        with self.arrays.current():
            whole[:, columns] = values
            return self.communicator.all_reduce_add(whole)

    def _rows(self, partial: Array) -> cp.ndarray:
        return self.arrays.padded(self.materializer.materialize(partial))

    def _add_to_stream(self, y: cp.ndarray, bias: Array, residual: Array) -> Array:
        """What ranks that are not GPUs' have added, and the bias, as it is or added to the residual stream."""
        with self.arrays.current():
            y = y if bias is None else y + bias
            if residual is None:
                return y
        target = self.materializer.as_residual(residual)
        self.materializer.flush_residual(target)
        with self.arrays.current():
            target.values += y.astype(np.float16)
        return ResidualStream(target.values)

    # -- around the products -------------------------------------------------------------------------------------------

    def embed(self, tokens: Array, table: Array, scale: float = 1.0) -> Array:
        out = self.arrays.rows(len(tokens), table.shape[1], np.float32)
        self.kernels.rows.embed(self.kernels.step, tokens, table, out, scale)
        return ResidualStream(out)

    def add_positions(self, residual: Array, table: Array, batch: ForwardBatch) -> Array:
        target = self.materializer.as_residual(residual)
        self.materializer.flush_residual(target)
        self.kernels.pointwise.add_positions(self.kernels.step, batch, table, target.values)
        return ResidualStream(target.values)

    def add_token_types(self, residual: Array, table: Array, batch: ForwardBatch) -> Array:
        target = self.materializer.as_residual(residual)
        self.materializer.flush_residual(target)
        self.kernels.pointwise.add_rows(self.kernels.step, batch.token_types, table, target.values)
        return ResidualStream(target.values)

    def norm(self, residual: Array, norm: Norm, out: Array = None) -> Array:
        if out is not None:
            if isinstance(residual, ResidualStream):
                self.materializer.flush_residual(residual)
            self.kernels.rows.norm(self.kernels.step, self.materializer.materialize(residual), norm, out)
            return out
        source = self.materializer.as_residual(residual)
        result = DeferredNorm(source, norm)
        source.norms.append(weakref.ref(result))
        return result

    def norm_add(self, x: Array, norm: Norm, residual: Array, scale: float = 1.0) -> Array:
        target, values = self.materializer.as_residual(residual), self.arrays.padded(self.materializer.materialize(x))
        self.materializer.flush_residual(target)
        return ResidualStream(target.values, NormAddend(values, norm, scale))

    def layer_inputs(
        self, tokens: Array, table: Array, projected: Array, norm: Norm, table_scale: float, scale: float
    ) -> Array:
        values = self.materializer.materialize(projected)
        out = self.arrays.rows(values.shape[0], values.shape[1], np.float16)
        self.kernels.layer_inputs.launch(self.kernels.step, tokens, table, values, norm, table_scale, scale, out)
        return out

    def multiply_columns(self, x: Array, inputs: Array, first: int) -> Array:
        rows = self.materializer.to_half(x)
        columns = self.materializer.materialize(inputs)[:, first : first + rows.shape[1]]
        self.kernels.layer_inputs.multiply_columns(self.kernels.step, rows, columns)
        return rows

    def norm_qk(self, qkv: Array, q_norm: Norm, k_norm: Norm) -> Array:
        values = self.arrays.padded(self.materializer.materialize(qkv))
        rows, width = values.shape
        out = self.arrays.rows(rows, width, np.float16)
        if self.kernels.rows.supports_norm_qk(width, q_norm, k_norm):
            self.kernels.rows.norm_qk(self.kernels.step, values, q_norm, k_norm, out)
            return out
        q, k = len(q_norm.weight), len(k_norm.weight)
        for begin, end, norm in ((0, q, q_norm), (q, q + k, k_norm), (q + k, width, None)):
            part = values[:, begin:end]
            normed = part if norm is None else self.materializer.materialize(self.norm(part, norm))
            with self.arrays.current():
                out[:, begin:end] = normed
        return out

    def norm_qk_of_rank(self, qkv: Array, q_norm: Norm, k_norm: Norm) -> Array:
        own = self.materializer.materialize(qkv)
        rows, width = own.shape
        places = HeadsOfRank.of(self.communicator, width, len(q_norm.weight), len(k_norm.weight))
        before = places.own_q + places.own_k
        part = self.arrays.zeros((rows, round_up(places.total, PAD)), np.float32)[:, : places.total]
        with self.arrays.current():
            part[:, places.q] = own[:, : places.own_q]
            if places.adds_k:
                part[:, places.k] = own[:, places.own_q : before]
        whole = self.communicator.all_reduce_add(part)
        joined = self.arrays.rows(rows, places.total + width - before, np.float32)
        with self.arrays.current():
            joined[:, : places.total] = whole
            joined[:, places.total :] = own[:, before:]
        normed, out = self.norm_qk(joined, q_norm, k_norm), self.arrays.rows(rows, width, np.float16)
        with self.arrays.current():
            out[:, : places.own_q] = normed[:, places.q]
            out[:, places.own_q : before] = normed[:, places.k]
            out[:, before:] = normed[:, places.total :]
        return out

    def soft_cap(self, x: Array, cap: float) -> Array:
        values = self.materializer.materialize(x)
        self.kernels.pointwise.soft_cap(self.kernels.step, values, cap)
        return values

    def softmax(self, x: Array, scale: float = 1.0, bias: Array = None, mask: Array = None, out: Array = None) -> Array:
        values = self.materializer.materialize(x)
        if out is None:
            rows, columns = values.shape
            out = self.arrays.rows(rows, columns, values.dtype)
        self.kernels.softmax.launch(self.kernels.step, values, scale, bias, mask, out)
        return out

    def pool(self, x: Array, batch: ForwardBatch, pooling: Pooling, skipped: Array = None) -> Array:
        rows = self.materializer.materialize(x)
        if rows.dtype != np.float32:
            with self.arrays.current():
                rows = rows.astype(np.float32)
        out = self.arrays.rows(batch.batch_size, rows.shape[1], np.float32)
        self.kernels.pooling.pool(self.kernels.step, rows, batch, pooling, skipped, out)
        return out

    def last_tokens(self, x: Array, batch: ForwardBatch) -> Array:
        self._go_on_with_last_tokens(batch)
        if batch.logit_rows is None and batch.is_decode:
            return x
        source = self.materializer.as_residual(x)
        self.materializer.flush_residual(source)
        return ResidualStream(self._last_rows(source.values, batch))

    def _of_last_tokens(self, batch: ForwardBatch) -> ForwardBatch:
        """The same: no kernel for one token per sequence reads tokens or ``cu_seqlens``."""
        return batch

    def _last_rows(self, x: cp.ndarray, batch: ForwardBatch) -> cp.ndarray:
        """The rows of ``x`` whose logits are wanted."""
        rows, before = (batch.cu_seqlens[1:], 1) if batch.logit_rows is None else (batch.logit_rows, 0)
        out = self.arrays.rows(len(rows), x.shape[1], x.dtype)
        self.kernels.rows.gather_rows(self.kernels.step, rows, x, out, before)
        return out

    # -- attention -----------------------------------------------------------------------------------------------------
    # No reference to an input outlives its last reader here, so that its memory is free for what comes next.

    def attention(self, qkv: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch) -> Array:
        if spec.output_gate:
            gate, heads = self._gate_and_heads(qkv, spec)
            out = self.attention(heads, replace(spec, output_gate=False), cache, batch)
            self.kernels.pointwise.gate_rows(self.kernels.step, out, gate)
            return out
        out = self.arrays.rows(qkv.shape[0], spec.heads * spec.head_dim, np.float16)
        decodes, prompts = batch.parts
        if decodes is not None:
            qkv, count = self.materializer.to_half(qkv), decodes.batch_size
            table = decodes.block_tables[cache.group]
            if batch.has_drafts:  # whose tokens see those of the rows before them
                self.launches.store_heads(qkv, spec, cache, decodes, table)
            self.launches.decode(qkv[:count], spec, cache, decodes, table, out[:count])
        if prompts is not None:
            table = prompts.block_tables[cache.group]
            q = self.launches.prepared_heads(qkv, spec, cache, prompts, table)
            self.launches.prefill(q, spec, cache, prompts, table, prompts.max_context_len, out)
        return out

    def _gate_and_heads(self, qkv: Array, spec: AttentionSpec) -> tuple[cp.ndarray, cp.ndarray]:
        """The gates of the outputs, in rows at any pitch, and the heads."""
        rows, width = self.materializer.to_half(qkv), spec.gate_features
        return rows[:, :width], self.arrays.padded(rows[:, width:])

    def last_token_attention(self, qkv: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch) -> Array:
        """The kernel for one token per sequence computes it, with the bits that several tokens get."""
        if spec.output_gate:
            gate, heads = self._gate_and_heads(qkv, spec)
            out = self.last_token_attention(heads, replace(spec, output_gate=False), cache, batch)
            self.kernels.pointwise.gate_rows(self.kernels.step, out, self._last_rows(gate, batch))
            return out
        table, features = batch.block_tables[cache.group], spec.heads * spec.head_dim
        qkv = self.materializer.to_half(qkv)
        _, prompts = batch.parts
        if prompts is not None:
            self.launches.store_heads(qkv, spec, cache, prompts, prompts.block_tables[cache.group])
        out, decoded = self.arrays.rows(batch.batch_size, features, np.float16), self._last_rows(qkv, batch)
        last = replace(batch, context_lens=batch.last_positions, has_drafts=False)
        self.launches.decode(decoded, spec, cache, last, table, out)
        self._go_on_with_last_tokens(batch)
        return out

    def shared_attention(self, q: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch) -> Array:
        out = self.arrays.rows(q.shape[0], spec.heads * spec.head_dim, np.float16)
        decodes, prompts = batch.parts
        if decodes is not None:
            rows, count = self.materializer.to_half(q), decodes.batch_size
            table = decodes.block_tables[cache.group]
            self.launches.decode(rows[:count], spec, cache, decodes, table, out[:count], is_shared=True)
        if prompts is not None:
            table = prompts.block_tables[cache.group]
            heads = self.launches.prepared_heads(q, replace(spec, kv_heads=0), cache, prompts, table)
            self.launches.prefill(heads, spec, cache, prompts, table, prompts.max_context_len, out)
        return out

    def last_token_shared_attention(
        self, q: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch
    ) -> Array:
        table, rows = batch.block_tables[cache.group], self._last_rows(self.materializer.to_half(q), batch)
        out = self.arrays.rows(batch.batch_size, spec.heads * spec.head_dim, np.float16)
        last = replace(batch, context_lens=batch.last_positions, has_drafts=False)
        self.launches.decode(rows, spec, cache, last, table, out, is_shared=True)
        self._go_on_with_last_tokens(batch)
        return out

    def encoder_attention(self, qkv: Array, spec: AttentionSpec, batch: ForwardBatch) -> Array:
        out = self.arrays.rows(qkv.shape[0], spec.heads * spec.head_dim, np.float16)
        q, packed = self._heads_of_step(qkv, spec, batch)
        self.launches.prefill(q, spec, packed, batch, None, batch.max_query_len, out, AttentionMask.BIDIRECTIONAL)
        return out

    def _heads_of_step(self, qkv: Array, spec: AttentionSpec, batch: ForwardBatch) -> tuple[cp.ndarray, LayerCache]:
        """Queries, keys and values ``[T, heads, head_pitch]``: in ``qkv`` itself, if nothing is to be done to them.

        There the rows of ``qkv`` are padded to whole heads.
        """
        tokens, pitch = qkv.shape[0], round_up(spec.head_dim, HEAD_PAD)
        is_plain = spec.rope is None and spec.q_norm is None and spec.k_norm is None
        is_ready = is_plain and pitch == spec.head_dim and round_up(qkv.shape[1], PAD) % pitch == 0
        if not is_ready:
            keys, values = (self.arrays.empty((tokens, spec.kv_heads, pitch), np.float16) for _ in range(2))
            packed = LayerCache(keys, values)
            return self.launches.prepared_heads(qkv, spec, packed, batch, None), packed
        heads = self.materializer.to_half(qkv).reshape(tokens, -1, pitch)
        first, behind = spec.heads, spec.heads + spec.kv_heads
        return heads[:, :first], LayerCache(heads[:, first:behind], heads[:, behind:])

    def store_source(self, kv: Array, spec: AttentionSpec, source: LayerCache, batch: ForwardBatch) -> None:
        self.launches.store_heads(kv, replace(spec, heads=0), source, batch, batch.source_tables, is_source=True)

    def cross_attention(self, q: Array, spec: AttentionSpec, source: LayerCache, batch: ForwardBatch) -> Array:
        out = self.arrays.rows(q.shape[0], spec.heads * spec.head_dim, np.float16)
        spec, table, lengths = replace(spec, bias=None), batch.source_tables, batch.source_lens
        if batch.is_decode:
            self.launches.decode(self.materializer.to_half(q), spec, source, batch, table, out, lengths)
            return out
        heads = self.materializer.to_half(q).reshape(-1, spec.heads, spec.head_dim)
        if spec.head_dim % HEAD_PAD:
            padded = self.arrays.zeros((*heads.shape[:2], head_pitch_of(source)), np.float16)
            with self.arrays.current():
                padded[..., : spec.head_dim] = heads
            heads = padded
        longest = batch.max_source_len
        self.launches.prefill(heads, spec, source, batch, table, longest, out, AttentionMask.CROSS, lengths)
        return out

    def short_convolution(
        self, bcx: Array, convolution: ShortConvolution, cache: StateCache, batch: ForwardBatch
    ) -> Array:
        rows, table = self.materializer.to_half(bcx), batch.block_tables[cache.group]
        out = self.arrays.rows(len(rows), rows.shape[1] // 3, np.float16)
        self.kernels.short_convolution.launch(self.kernels.step, rows, convolution, cache["inputs"], table, batch, out)
        return out

    def previous_rows(self, x: Array, previous: ShortConvolution, cache: StateCache, batch: ForwardBatch) -> Array:
        rows, width = x.shape
        values = self.materializer.materialize(x)
        gated, out = self.arrays.rows(rows, 3 * width, np.float16), self.arrays.rows(rows, width, np.float32)
        with self.arrays.current():
            gated[:, : 2 * width] = 1
            gated[:, 2 * width :] = values
        before = self.short_convolution(gated, previous, cache, batch)
        with self.arrays.current():
            out[...] = before
        return ResidualStream(out)

    def latent_weight(self, matrix: HostWeight, spec: LatentSpec) -> LatentMatrices:  # type: ignore[override]
        return load_latent_matrices(self.loader, matrix, spec)

    def latent_attention(
        self, q: Array, kv: Array, spec: LatentSpec, expand: LatentMatrices, cache: LatentCache, batch: ForwardBatch
    ) -> Array:
        return self.latents.attention(q, kv, spec, expand, cache, batch)

    def float_linear(self, x: Array, matrix: Any) -> Array:
        """The same: all float products here have one order of sums."""
        return self.linear(x, matrix, fp32=True)

    def gated_delta_net(
        self, qkvz: Array, gates: Array, spec: DeltaNetSpec, cache: StateCache, batch: ForwardBatch
    ) -> Array:
        rows, gates = self.materializer.to_half(qkvz), self.materializer.materialize(gates)
        rates, decays = gates[:, : spec.value_heads], gates[:, spec.value_heads :]
        return self._delta_rule(rows, rates, decays, rows[:, spec.channels :], spec, cache, batch)

    def kimi_delta(
        self, qkv: Array, rates: Array, decays: Array, gate: Array, spec: DeltaNetSpec, cache: StateCache,
        batch: ForwardBatch,
    ) -> Array:  # fmt: skip
        to_half, materialize = self.materializer.to_half, self.materializer.materialize
        return self._delta_rule(
            to_half(qkv), materialize(rates), materialize(decays), to_half(gate), spec, cache, batch
        )

    def _delta_rule(
        self, rows: Array, rates: Array, decays: Array, gate: Array, spec: DeltaNetSpec, cache: StateCache,
        batch: ForwardBatch,
    ) -> Array:  # fmt: skip
        if spec.key_dim > DELTA_NET_MAX_KEY_DIM:
            raise UsageError(
                f"keys of a gated DeltaNet have {spec.key_dim} elements; a GPU computes up to {DELTA_NET_MAX_KEY_DIM}: "
                "load the model with device='cpu'"
            )
        tokens, values, table = len(rows), spec.value_features, batch.block_tables[cache.group]
        mixed, found = (self.arrays.rows(tokens, width, np.float32) for width in (spec.channels, values))
        self.kernels.short_convolution.launch(
            self.kernels.step, rows, spec.convolution, cache["inputs"], table, batch, mixed
        )
        heads, out = delta_net_heads(spec), self.arrays.rows(tokens, values, np.float16)
        sums = self.arrays.empty((tokens, heads.sums), np.float32)
        memory = self._prepared(self.kernels.delta_net.prepared(heads, cache["keys"].shape[1], batch))
        self.kernels.delta_net.launch(
            self.kernels.step, mixed, rates, decays, gate, spec, cache, table, batch, memory, sums, found, out
        )
        return out

    def mamba2(self, inputs: Array, spec: Mamba2Spec, cache: StateCache, batch: ForwardBatch) -> Array:
        if spec.state_dim > MAMBA2_MAX_STATE_DIM:
            raise UsageError(
                f"states of Mamba 2 have {spec.state_dim} rows; a GPU computes up to {MAMBA2_MAX_STATE_DIM}: "
                "load the model with device='cpu'"
            )
        rows, table = self.materializer.to_half(inputs), batch.block_tables[cache.group]
        tokens, features, channels = len(rows), spec.features, spec.channels
        mixed, found = (self.arrays.rows(tokens, width, np.float32) for width in (channels, features))
        self.kernels.short_convolution.launch(
            self.kernels.step, rows[:, features:], spec.convolution, cache["inputs"], table, batch, mixed
        )
        out, sums = self.arrays.rows(tokens, features, np.float16), self.arrays.empty((tokens, spec.heads), np.float32)
        memory = self._prepared(self.kernels.mamba2.prepared(mamba2_heads(spec), cache["keys"].shape[1], batch))
        self.kernels.mamba2.launch(
            self.kernels.step, mixed, rows[:, features + channels :], rows[:, :features], spec, cache, table, batch,
            memory, sums, found, out,
        )  # fmt: skip
        return out

    def _prepared(self, prepared: Prepared) -> Array:
        """Memory for the chunks of a recurrence that are prepared, or None."""
        return self.arrays.empty((prepared.nbytes,), np.int8) if prepared.places else None

    # -- sampling ------------------------------------------------------------------------------------------------------

    def sample(self, logits: Array, sampler: SamplerState) -> Array:
        logits = self.arrays.padded(logits)
        rows, vocab = logits.shape
        variant = sampler.variant
        greedy, adjusted, full = variant == variant.GREEDY, variant >= variant.ADJUST, variant == variant.FULL
        step_arrays = sampler.rows, sampler.offsets, sampler.drafts
        arrays = *step_arrays, sampler.table, sampler.bias, sampler.counts, sampler.masks
        scratch = self._sampler_scratch(rows, vocab, greedy)
        result = self.arrays.empty((2 + 2 * MAX_LOGPROBS * full, rows), np.int32)
        self.kernels.sampler.launch(
            logits.data.ptr, pitch_of(logits), rows, vocab, [address(x) for x in arrays], result.data.ptr,
            scratch.data.ptr, self.stream.ptr, greedy, adjusted, full,
        )  # fmt: skip
        if adjusted:
            self._sampled.record(self.stream)
        return result

    def insert_last_tokens(self, tokens: Array, sampler: SamplerState) -> None:
        count = min(len(tokens), len(sampler.rows))
        if count:
            addresses = tokens.data.ptr, sampler.rows.data.ptr, sampler.table.data.ptr
            self.kernels.sampler.launch_insert_last_tokens(*addresses, count, self.stream.ptr)

    def write_step(self, target: Array, values: np.ndarray, num_tokens: int, sampler: SamplerState) -> None:
        if values.nbytes > WRITE_KERNEL_MAX_BYTES:
            super().write_step(target, values, num_tokens, sampler)
            return
        rows = (sampler.rows.data.ptr - target.data.ptr) // 4
        assert 0 <= rows < target.size, "the sampler's rows are not among the step's integers"

        def copy(to: int, source: int, nbytes: int) -> None:
            self.kernels.sampler.launch_write_step(
                source, to, nbytes // 4, num_tokens, rows, sampler.table.data.ptr, self.stream.ptr
            )

        self.arrays.write(target, values, copy=copy)

    def insert_guesses(self, tokens: Array, drafts: Array, guesses: Array) -> Array:
        copy = self.arrays.empty(drafts.shape, np.int32)
        addresses = tokens.data.ptr, drafts.data.ptr, guesses.data.ptr, copy.data.ptr
        self.kernels.sampler.launch_insert_guesses(*addresses, len(drafts), self.stream.ptr)
        return copy

    def insert_positions(self, positions: Array, sampler: SamplerState) -> None:
        """The next kernel must be one that may follow it: see ``sampling/sample.cu``."""
        addresses = positions.data.ptr, sampler.rows.data.ptr, sampler.table.data.ptr
        self.kernels.sampler.launch_insert_positions(*addresses, positions.shape[-1], positions.size, self.stream.ptr)

    def most_likely(self, logits: Array, out: Array, ids: Array = None) -> None:
        logits = self.arrays.padded(logits)
        rows, vocab = logits.shape
        scratch = self._sampler_scratch(rows, vocab, greedy=True)
        addresses = address(ids), out.data.ptr, scratch.data.ptr, self.stream.ptr
        self.kernels.sampler.launch_most_likely(logits.data.ptr, pitch_of(logits), rows, vocab, *addresses)

    def token_logprobs(self, logits: Array, tokens: Array) -> Array:
        logits = self.arrays.padded(logits)
        rows, vocab = logits.shape
        result = self.arrays.empty((3, rows), np.int32)
        scratch = self._sampler_scratch(rows, vocab, greedy=True)
        addresses = tokens.data.ptr, result.data.ptr, scratch.data.ptr, self.stream.ptr
        self.kernels.sampler.launch_token_logprobs(logits.data.ptr, pitch_of(logits), rows, vocab, *addresses)
        return result

    def _sampler_scratch(self, rows: int, vocab: int, greedy: bool) -> cp.ndarray:
        """Scratch for sampling ``rows`` rows; the last one is reused if it is large enough."""
        return self.scratch.at_least(f"sample {vocab} {greedy}", Sampler.scratch_bytes(rows, vocab, greedy))
