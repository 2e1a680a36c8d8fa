"""The sampler by kernels; :mod:`bminf_lite.backend.operations.sampling` defines it."""

from __future__ import annotations

import cupy as cp
import numpy as np

from ....cuda.kernels.arrays import address, pitch_of
from ....cuda.kernels.sampling.sampler import Sampler
from ...operations.sampling import SamplingOperations
from ...sampling import MAX_LOGPROBS, SamplerState
from ...values import Array
from ..device import WRITE_KERNEL_MAX_BYTES, CudaDevice


class CudaSamplingOperations(CudaDevice, SamplingOperations):
    """Choosing tokens on the device."""

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
            self.sampled.record(self.stream)
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

    def guess(self, logits: Array, out: Array, sampler: SamplerState, ids: Array = None) -> None:
        logits = self.arrays.padded(logits)
        rows, vocab = logits.shape
        scratch = self._sampler_scratch(rows, vocab, greedy=True)
        state = sampler.rows.data.ptr, sampler.offsets.data.ptr, sampler.table.data.ptr
        addresses = *state, address(ids), out.data.ptr, scratch.data.ptr, self.stream.ptr
        self.kernels.sampler.launch_guess(logits.data.ptr, pitch_of(logits), rows, vocab, *addresses)

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
