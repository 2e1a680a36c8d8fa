"""Batches of few tokens of whole texts, padded to captured sizes: the host launches them for longer than they run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ..backend.base import Backend
from ..backend.values import Array, ForwardBatch
from .source_encoder import RUNS_TO_CAPTURE
from .step_arrays import TOKENS_PER_PROMPT, StepArrays, StepInputs, StepSize


class TextCaches(Protocol):
    """What the layers of a model keep while a batch of texts is computed."""

    def close(self) -> None:
        """Free the memory."""
        ...


class TextNetwork(Protocol):
    """A model that makes vectors of the tokens of whole texts.

    ``reads_pieces``: :meth:`pieces` may compute a text. ``parts_at_once`` of its parts are about the work of a batch.
    """

    ops: Backend
    reads_pieces: bool

    @property
    def parts_at_once(self) -> int: ...

    def __call__(self, batch: ForwardBatch, caches: Any = None) -> Array:
        """The vectors of all tokens, fp32 ``[T, features]``; ``batch`` has the block tables of :meth:`tables`.

        ``caches`` are those of :meth:`caches`, for as many tokens and texts at least; None for new ones.
        """
        ...

    def caches(self, tokens: int, texts: int) -> TextCaches:
        """What the layers keep of a batch of up to ``tokens`` tokens of up to ``texts`` texts."""
        ...

    def tables(self, lengths: Sequence[int]) -> list[np.ndarray]:
        """The block tables of a step of texts of these lengths."""
        ...

    def pieces(self, tokens: np.ndarray, size: int) -> Generator[None, None, list[Array]]:
        """The vectors of one text's tokens, of pieces of ``size`` tokens. It yields behind each part of the work."""
        ...


class CapturedTexts:
    """Computes the vectors of batches that fit one of the backend's ``text_sizes`` of up to ``max_tokens`` tokens.

    Each size is captured once without token types, and once with them. All sizes share what layers keep.
    """

    def __init__(self, network: TextNetwork, max_tokens: int):
        self.network = network
        self.ops = network.ops
        self.sizes = [
            StepSize(0, max(tokens // TOKENS_PER_PROMPT, 1), tokens, tokens)
            for tokens in network.ops.text_sizes
            if tokens <= max_tokens
        ]
        self._caches: TextCaches | None = None
        self._captured: dict[tuple[StepSize, bool], CapturedBatch] = {}

    def run(self, texts: Sequence[np.ndarray], types: np.ndarray | None = None) -> tuple[ForwardBatch, Array] | None:
        """The padded batch of ``texts``, int32 ``[n]`` each, and its tokens' vectors; None if they fit no size.

        ``types`` int32 ``[T]`` are the tokens' types. The vectors are valid until captured work runs again.
        """
        lengths = [len(text) for text in texts]
        exact = StepSize(0, len(texts), sum(lengths), max(lengths))
        size = next((size for size in self.sizes if exact.fits(size)), None)
        if size is None:
            return None
        inputs = self._inputs(size)
        inputs.tokens[: exact.tokens] = np.concatenate(texts)
        inputs.cu_seqlens[1:] = exact.tokens
        inputs.cu_seqlens[1 : 1 + exact.prompts] = np.cumsum(lengths)
        for padded, table in zip(inputs.tables, self.network.tables(lengths), strict=True):
            padded[: table.shape[0], : table.shape[1]] = table  # padding has null blocks
        return self._run(inputs, types)

    def warm_up(self) -> None:
        """Capture every size, without token types."""
        sizes = self.sizes[::-1]
        for _ in range(RUNS_TO_CAPTURE):  # the last one captures, when it is known what the largest size needs
            for size in sizes:
                self._run(self._inputs(size), None)

    def close(self) -> None:
        """Give the memory back; sizes are captured anew when they are needed."""
        self._captured.clear()
        if self._caches is not None:
            self._caches.close()
            self._caches = None

    def _inputs(self, size: StepSize) -> StepInputs:
        """The integers of a batch without texts."""
        return StepInputs(size, [table.shape[1] for table in self.network.tables([size.tokens])])

    def _run(self, inputs: StepInputs, types: np.ndarray | None) -> tuple[ForwardBatch, Array]:
        key = inputs.size, types is not None
        found = self._captured.get(key)
        if found is None:
            if self._caches is None:
                largest = self.sizes[-1]
                self._caches = self.network.caches(largest.tokens, largest.prompts)
            found = self._captured[key] = CapturedBatch(self.network, inputs, types is not None, self._caches)
        found.write(inputs, types)
        return found.batch, found.forward()


class CapturedBatch:
    """A batch of texts of a fixed size: ``forward`` computes the vectors of its tokens, and is captured."""

    def __init__(self, network: TextNetwork, inputs: StepInputs, has_types: bool, caches: TextCaches):
        self._ops = ops = network.ops
        tokens = inputs.size.prompt_tokens
        self._arrays = StepArrays(ops, ops.array(inputs.packed.copy()), inputs, tokens)
        self._types: Array = ops.array(np.zeros(tokens, np.int32)) if has_types else None
        self.batch = batch = replace(self._arrays.batch, token_types=self._types)

        def work() -> Array:
            with ops.step(batch):
                return ops.computed(network(batch, caches))

        self.forward: Callable[[], Array] = ops.capture(work)

    def write(self, inputs: StepInputs, types: np.ndarray | None) -> None:
        """Set the integers for the work that is started from now on. ``types`` may be fewer than the tokens."""
        self._arrays.write(inputs)
        if types is not None:
            padded = np.zeros(inputs.size.prompt_tokens, np.int32)
            padded[: len(types)] = types
            self._ops.write(self._types, padded)
