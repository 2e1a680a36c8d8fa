"""All kernels of one GPU on one stream, a launcher for each family, and the context of the step under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import cupy as cp

from ...cuda.kernels.attention.copy_blocks import CopyBlocks
from ...cuda.kernels.attention.decode import AttentionDecode
from ...cuda.kernels.attention.latent import HeadProducts, LatentAttentionKernels, LatentRows
from ...cuda.kernels.attention.prefill import PrefillAttention
from ...cuda.kernels.attention.prepare_heads import PrepareHeads
from ...cuda.kernels.collective.all_reduce import AllReduce
from ...cuda.kernels.collective.divided_rows import DividedRowKernels
from ...cuda.kernels.experts.layer import ExpertKernels
from ...cuda.kernels.gemm.float_gemm import FloatProductKernels
from ...cuda.kernels.gemv.gemv import Gemv
from ...cuda.kernels.launcher import Launcher, StepContext
from ...cuda.kernels.recurrent.delta_net import DeltaNetKernels
from ...cuda.kernels.recurrent.mamba2 import Mamba2Kernels
from ...cuda.kernels.rowwise.adapters import AdapterKernels
from ...cuda.kernels.rowwise.calibration import CalibrationKernels
from ...cuda.kernels.rowwise.gptq import GPTQKernels
from ...cuda.kernels.rowwise.layer_inputs import LayerInputKernels
from ...cuda.kernels.rowwise.pointwise import PointwiseKernels
from ...cuda.kernels.rowwise.pooling import PoolingKernels
from ...cuda.kernels.rowwise.rows import RowKernels
from ...cuda.kernels.rowwise.short_convolution import ShortConvolutionKernels
from ...cuda.kernels.rowwise.softmax import Softmax
from ...cuda.kernels.sampling.sampler import Sampler
from ...cuda.runtime.driver import Device
from .deferred import Deferred, QuantizedActivations, nbytes_of


class Kernels:
    """The launchers. ``step`` is the context of the present step, or of work outside of steps."""

    def __init__(self, device: Device, stream: cp.cuda.Stream):
        launcher = Launcher(device, stream.ptr)
        self.device = device
        self.num_sms = launcher.num_sms
        self.gemv = Gemv(launcher)
        self.float_products = FloatProductKernels(launcher)
        self.rows = RowKernels(launcher)
        self.experts = ExpertKernels(launcher, self.rows)
        self.pointwise = PointwiseKernels(launcher)
        self.adapters = AdapterKernels(launcher)
        self.pooling = PoolingKernels(launcher)
        self.layer_inputs = LayerInputKernels(launcher)
        self.softmax = Softmax(launcher)
        self.short_convolution = ShortConvolutionKernels(launcher)
        self.delta_net = DeltaNetKernels(launcher)
        self.mamba2 = Mamba2Kernels(launcher)
        self.prepare_heads = PrepareHeads(launcher)
        self.copy_blocks = CopyBlocks(launcher)
        self.attention_decode = AttentionDecode(launcher)
        self.attention_prefill = PrefillAttention(device)
        self.latent_rows = LatentRows(launcher)
        self.head_products = HeadProducts(launcher)
        self.latent_attention = LatentAttentionKernels(launcher)
        self.all_reduce = AllReduce(launcher)
        self.divided_rows = DividedRowKernels(launcher)
        self.sampler = Sampler(device)
        self.calibration = CalibrationKernels(launcher)
        self.gptq = GPTQKernels(launcher)
        self.step = StepContext(in_step=False)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Launch the kernels of a step, of which ``embed`` is the first; then the context is what it was before."""
        outer, self.step = self.step, StepContext()
        try:
            yield
        finally:
            self.step = outer

    def nbytes_moved(self, *values: cp.ndarray | QuantizedActivations | Deferred | None) -> int:
        """Bytes of what a kernel reads and writes, for an observer of the device; 0 without one."""
        return 0 if self.device.observer is None else nbytes_of(*values)
