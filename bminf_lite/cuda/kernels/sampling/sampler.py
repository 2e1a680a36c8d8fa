"""Sampling on the GPU: the same tokens as :mod:`bminf_lite.backend.sampling`, without a round trip to the host.

Greedy sampling takes one launch, drawing takes four. A launch covers all rows, which may mix both. Launches may be
captured into a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from ...runtime.driver import Device
from ...runtime.kernel import Kernel, Module
from ..constants import SAMPLING_BUCKETS as BUCKETS
from ..constants import SAMPLING_CHUNK as CHUNK
from ..constants import SAMPLING_ROW_BYTES as ROW_BYTES
from ..constants import SAMPLING_THREADS as THREADS
from ..instantiations import Capability, KernelFamily
from ..sources import SOURCES

SOURCE = "sampling/sample.cu"
KERNELS = ("best_token", "histogram", "cut_tail", "draw_token")
PART_BYTES = 16
MAX_VOCAB = 2**23 - 1
"""The sum of the integer weights of so many tokens fits 64 bits."""

STATE_ARRAYS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "sequence", "step", "counts",
)  # fmt: skip
"""Fields of ``SamplerState`` that the kernels take, in this order."""


class Sampler:
    """The sampling kernels of one GPU. They are compiled at the first launch, which must not be captured."""

    def __init__(self, device: Device) -> None:
        self._module = Module(device, SOURCES, SOURCE, KERNELS)

    @staticmethod
    def instantiations(capability: Capability) -> Iterator[KernelFamily]:
        yield from (KernelFamily(SOURCE, name) for name in KERNELS)

    @functools.cached_property
    def _kernels(self) -> tuple[Kernel, ...]:
        return tuple(self._module.kernel(name) for name in KERNELS)

    @staticmethod
    def scratch_bytes(rows: int, vocab: int) -> int:
        """Bytes of scratch for :meth:`launch`, at an address that is a multiple of 16.

        They must be zero before the first launch, and each launch leaves them ready for the next one with the same
        ``rows`` and ``vocab``.
        """
        return rows * (ROW_BYTES + _chunks(vocab) * PART_BYTES + BUCKETS * 12 + vocab * 8)

    def launch(
        self, logits: int, pitch: int, rows: int, vocab: int, state: Sequence[int], result: int,
        tokens: int, context_lens: int, scratch: int, stream: int, greedy: bool = False,
    ) -> None:  # fmt: skip
        """Choose the next token of each row and advance the state; every array is given by its address on the GPU.

        ``logits`` is fp32 ``[rows, vocab]`` with rows ``pitch`` elements apart, a multiple of 4, the first at a
        multiple of 16 bytes; ``rows`` up to 65,535, ``vocab`` up to :data:`MAX_VOCAB`. ``state`` holds the
        :data:`STATE_ARRAYS` of a ``SamplerState``, 0 for ``counts`` without penalties. ``result`` int32 ``[2, rows]``
        gets the tokens, -1 where none can be chosen, and the bits of their fp32 log-probabilities. Unless they are 0,
        ``tokens`` int32 ``[rows]`` gets the tokens too, with 0 for -1, and ``context_lens`` int32 ``[rows]`` grows by
        one.

        ``greedy`` promises that every temperature is 0, which saves launches.
        """
        assert len(state) == len(STATE_ARRAYS) and pitch % 4 == 0 and 0 < vocab <= MAX_VOCAB, (len(state), pitch, vocab)
        chunks = _chunks(vocab)
        arguments = (logits, *state, result, tokens, context_lens, scratch, rows, vocab, pitch, chunks)
        for kernel in self._kernels[:1] if greedy else self._kernels:
            kernel((chunks, rows), THREADS, arguments, stream=stream, dependent=True, bytes_moved=4 * rows * vocab)


def _chunks(vocab: int) -> int:
    return -(-vocab // CHUNK)
