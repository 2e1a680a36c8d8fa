"""Sequences of random tokens: the forward passes that a benchmark times, and the check of their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from ..backend.sampling import SamplerState
from ..backend.values import BLOCK_SIZE, Array, ForwardBatch, sequential_tables
from ..engine.network import SourceNetwork
from ..engine.sampling_params import SamplingParams, sampler_state
from ..engine.source_encoder import SourceEncoder
from ..engine.step import NO_TOKEN
from ..engine.step_arrays import CapturedStep, StepInputs, StepSize
from ..errors import BminfError
from ..layers.cache import KVCache, blocks_for
from .model import BenchModel

GREEDY = SamplingParams(seed=0, ignore_eos=True)
UNWRITTEN = -2
"""Fills the memory of chosen tokens before the steps; no step chooses it."""


class Session:
    """``batch`` sequences with room for ``capacity`` tokens each, decoded greedily. Close it to free the cache.

    Results are int32 ``[2, batch]`` as ``Backend.sample`` returns them: tokens, and their log-probabilities' bits.
    """

    def __init__(self, bench_model: BenchModel, batch: int, capacity: int):
        self.bench_model = bench_model
        self.ops = bench_model.ops
        self.batch = batch
        self.random = np.random.default_rng(0)
        engine_config = bench_model.engine_config
        self.start = engine_config.decoder_start_token_ids or (0,)
        room = capacity + (len(self.start) if engine_config.is_encoder_decoder else 0)
        shape = engine_config.cache_layout
        self.cache = KVCache.for_sequences(self.ops, shape, batch, room)
        self.tables = self.cache.tables(batch, room)
        self.capacity = blocks_for(max(room, 1)) * BLOCK_SIZE
        self.source_table: np.ndarray | None = None
        self.source_len = 0
        self.encoder: SourceEncoder | None = None
        if engine_config.is_encoder_decoder:
            self.cache.source = source = KVCache.for_sequences(self.ops, shape, batch, capacity)
            self.source_table = sequential_tables(batch, capacity)
            network = cast(SourceNetwork, bench_model.network)
            self.encoder = SourceEncoder(network, source, engine_config.max_num_batched_tokens)
        self._decoding: CapturedStep | None = None
        self._inputs: StepInputs
        self._sampler: SamplerState
        self._prefills: dict[int, CapturedStep] = {}
        self._states: list[tuple[Array, Array]] = []

    def close(self) -> None:
        """Free the memory; nothing can be run afterwards."""
        self._decoding = None
        self._prefills.clear()
        self._states.clear()
        if self.encoder is not None:
            self.encoder.close()
        self.cache.close()

    def tokens(self, shape: tuple[int, ...]) -> np.ndarray:
        """Random token ids int32."""
        return self.random.integers(0, self.bench_model.engine_config.vocab_size, shape, np.int32)

    def fill_context(self, depth: int) -> int:
        """Process ``depth`` random tokens; returns the position of the next.

        For an encoder-decoder ``depth`` is the length of the source, one at least; the decoder runs its start tokens.
        """
        self.poison(0)
        if self.cache.source is not None:
            self.prepare_encode(max(depth, 1))()
            self.start_decoding()
            return len(self.start)
        if depth:
            self.prepare_prefill(depth)()
            self._states = [(array, self.ops.array(self.ops.host(array))) for array in self._state_arrays()]
        return depth

    def _state_arrays(self) -> Iterator[Array]:
        """What layers keep for each sequence, whatever its length."""
        for layer, layout in zip(self.cache.layers, self.cache.layout.layers, strict=True):
            if layout.retention.per_sequence:
                yield from layer.arrays

    def _go_back(self) -> None:
        """Restore the states behind the context, of which steps repeat the next tokens."""
        for array, kept in self._states:
            self.ops.assign(array, kept)

    @property
    def _widths(self) -> list[int]:
        """The widths of the block tables of a step."""
        return [table.shape[1] for table in self.tables]

    def poison(self, first: int, cache: KVCache | None = None) -> None:
        """Fill the cache from position ``first`` on with NaN, so that reading an unwritten place gives a wrong result.

        Of an int8 cache, the scales are filled, and states at position 0 alone: behind it they are those of the tokens.
        The default ``cache`` is that of the decoder.
        """
        full, place = divmod(first, BLOCK_SIZE)
        cache = self.cache if cache is None else cache
        for layer, layout in zip(cache.layers, cache.layout.layers, strict=True):
            if layout.retention.per_sequence:
                for array in layer.arrays if first == 0 else ():
                    if array.dtype.kind == "f":
                        self.ops.assign(array[1:], np.array(np.nan, array.dtype))
                continue
            for pool, axis in layer.floats:
                nan = np.array(np.nan, pool.dtype)
                blocks = pool[1:].reshape(self.batch, -1, *pool.shape[1:])  # each sequence's in order
                if place:
                    self.ops.assign(blocks[:, full].swapaxes(1, axis)[:, place:], nan)
                self.ops.assign(blocks[:, full + bool(place) :], nan)

    # -- prefill ------------------------------------------------------------------------------------------------------

    def captures_prefill(self, count: int) -> bool:
        """Whether the engine captures a step with ``count`` prompt tokens of each sequence."""
        most = self.bench_model.engine_config.max_num_batched_tokens
        return self.batch * count <= min(max((tokens for _, tokens in self.ops.mixed_sizes), default=0), most)

    def prepare_prefill(self, count: int, past: int = 0) -> Callable[[], list[np.ndarray]]:
        """Prepare ``count`` random prompt tokens for each sequence after ``past`` tokens, in the engine's chunks.

        The returned function processes them, and returns the tokens chosen after each chunk. If the engine captures
        steps with ``count`` prompt tokens, the first such functions run theirs without a graph.
        """
        self._go_back()
        tokens = self.tokens((self.batch, count))
        if self.captures_prefill(count):
            return self._captured_prefill(tokens, past)
        steps = []
        for parts in chunks(self.batch, count, self.bench_model.engine_config.max_num_batched_tokens):
            rows, firsts = [tokens[b, i:j] for b, i, j in parts], [past + i for _, i, _ in parts]
            step = self._packed(rows, firsts, [b for b, *_ in parts])
            steps.append((step, self._greedy(len(parts))))
        return lambda: self._run(steps)

    def _captured_prefill(self, tokens: np.ndarray, past: int) -> Callable[[], list[np.ndarray]]:
        """One captured step with ``tokens`` ``[batch, count]`` after ``past`` tokens."""
        count = tokens.shape[1]
        size = StepSize(0, self.batch, tokens.size, self.capacity)
        inputs = StepInputs(size, self._widths, num_logits=self.batch, only_last=True)
        inputs.tokens[:] = tokens.ravel()
        inputs.cu_seqlens[:] = np.arange(0, tokens.size + 1, count)
        inputs.logit_rows[:] = inputs.cu_seqlens[1:] - 1
        inputs.context_lens[:] = past
        inputs.last_positions[:] = past + count - 1
        for table, own in zip(inputs.tables, self.tables, strict=True):
            table[:] = own
        if count not in self._prefills:
            self._prefills[count] = CapturedStep(self.ops, inputs, lambda b: self.bench_model.network(b, self.cache))
        step, sampler = self._prefills[count], self._greedy(self.batch)

        def run() -> list[np.ndarray]:
            step.arrays.write(inputs)
            return [self.ops.fetch(self.ops.sample(step.forward(), sampler))()]

        return run

    def prepare_encode(self, count: int, eagerly: bool = False) -> Callable[[], None]:
        """Prepare a source of ``count`` random tokens for each sequence, with NaN in the cache of its keys and values.

        The returned function runs the encoder and fills that cache. If the engine captures sources of ``count``
        tokens, it pads them likewise, and the first functions run it step by step; ``eagerly`` all do, without padding.
        """
        encoder, table = self.encoder, self.source_table
        assert encoder is not None and table is not None
        self.poison(0, encoder.cache)
        self.source_len = count
        at_once = max(1, self.bench_model.engine_config.max_num_batched_tokens // count)
        encode = encoder.encode_eagerly if eagerly else encoder.encode
        groups = [
            (self.tokens((len(rows), count)), table[rows.start : rows.stop, : blocks_for(count)])
            for rows in (range(i, min(i + at_once, self.batch)) for i in range(0, self.batch, at_once))
        ]

        def run() -> None:
            for tokens, blocks in groups:
                encode(tokens, blocks)

        return run

    def start_decoding(self) -> list[np.ndarray]:
        """Run the decoder's start tokens; returns the tokens chosen."""
        step = self._packed([self.start] * self.batch, [0] * self.batch, list(range(self.batch)))
        return self._run([(step, self._greedy(self.batch))])

    def _run(self, steps: list[tuple[ForwardBatch, SamplerState]]) -> list[np.ndarray]:
        fetched = [
            self.ops.fetch(self.ops.sample(self.bench_model.network(step, self.cache), sampler))
            for step, sampler in steps
        ]
        return [result() for result in fetched]

    def _packed(
        self, tokens: Sequence[Sequence[int] | np.ndarray] | np.ndarray, context_lens: list[int], sequences: list[int]
    ) -> ForwardBatch:
        tables = [table[sequences] for table in self.tables]
        if self.source_table is None:
            return ForwardBatch.packed(self.ops.array, tokens, context_lens, tables)
        lens = [self.source_len] * len(sequences)
        return ForwardBatch.packed(self.ops.array, tokens, context_lens, tables, self.source_table[sequences], lens)

    def _greedy(self, count: int) -> SamplerState:
        vocab_size = self.bench_model.engine_config.vocab_size
        return sampler_state([GREEDY] * count, [()] * count, vocab_size, range(count)).map(self.ops.array)

    # -- decode -------------------------------------------------------------------------------------------------------

    def prepare_decode(self, past: int) -> None:
        """Make random tokens at position ``past`` the next step's input. A captured graph stays valid."""
        self._go_back()
        if self._decoding is None:
            self._inputs = inputs = self._decode_inputs()
            self._decoding = CapturedStep(self.ops, inputs, lambda b: self.bench_model.network(b, self.cache))
            self._sampler = replace(self._greedy(self.batch), rows=self._decoding.arrays.rows)
        self._inputs.tokens[:] = self.tokens((self.batch,))
        self._inputs.context_lens[:] = past
        # The next results take the memory of these: one array for each result that is in use at the same time.
        marks = np.full((2, self.batch), UNWRITTEN, np.int32)
        unwritten = [self.ops.array(marks) for _ in range(self.ops.max_steps_in_flight + 2)]
        del unwritten

    def _decode_inputs(self) -> StepInputs:
        """The integers of a decode step as the engine builds them, but for tokens and lengths."""
        size = StepSize(self.batch, 0, 0, self.capacity)
        inputs = StepInputs(size, self._widths, 0 if self.source_table is None else self.source_table.shape[1])
        inputs.cu_seqlens[:] = np.arange(self.batch + 1)
        inputs.rows[:] = np.arange(1, self.batch + 1)
        for table, own in zip(inputs.tables, self.tables, strict=True):
            table[:] = own
        if self.source_table is not None:
            inputs.source_table[:] = self.source_table
            inputs.source_lens[:] = self.source_len
        return inputs

    def set_max_context_len(self, tokens: int) -> None:
        """Let eager steps from now on assume at most ``tokens`` tokens in the cache, instead of its capacity."""
        assert self._decoding is not None
        self._decoding.arrays.batch.max_context_len = tokens

    def decode_eagerly(self) -> Array:
        """One step without a graph."""
        assert self._decoding is not None
        batch = self._decoding.arrays.batch
        return self._decode_step(lambda: self.bench_model.network(batch, self.cache))

    def decode(self, count: int) -> list[np.ndarray]:
        """``count`` steps as the engine runs them, with the most steps in flight that the backend allows."""
        assert self._decoding is not None
        results: list[np.ndarray] = []
        in_flight: deque[Callable[[], np.ndarray]] = deque()
        for _ in range(count):
            in_flight.append(self.ops.fetch(self._decode_step(self._decoding.forward)))
            if len(in_flight) > self.ops.max_steps_in_flight:
                results.append(in_flight.popleft()())
        return results + [result() for result in in_flight]

    def _decode_step(self, forward: Callable[[], Array]) -> Array:
        """Run the model and choose the next tokens, which the next step finds in the sampler's table."""
        assert self._decoding is not None
        self._decoding.arrays.write_step(self._inputs, self._sampler)
        chosen = self.ops.sample(forward(), self._sampler)
        self._inputs.tokens[:] = NO_TOKEN
        self._inputs.context_lens += 1
        return chosen


def chunks(batch: int, tokens: int, chunk: int) -> Iterator[list[tuple[int, int, int]]]:
    """The parts ``(sequence, first, end)`` of each prefill step of up to ``chunk`` tokens."""
    for start in range(0, batch * tokens, chunk):
        end = min(start + chunk, batch * tokens)
        sequences = range(start // tokens, -(-end // tokens))
        yield [(b, max(start - b * tokens, 0), min(end - b * tokens, tokens)) for b in sequences]


def check_results(results: list[np.ndarray], vocab_size: int, where: str) -> None:
    """Raise ``BminfError`` unless tokens are in the vocabulary, log-probabilities are possible, and results differ.

    ``results`` are those of steps with different inputs. The check finds a device that does nothing or computes NaN.
    """
    tokens = np.concatenate([r[0] for r in results])
    logprobs = np.concatenate([r[1] for r in results]).view(np.float32)
    problem = ""
    if ((tokens < 0) | (tokens >= vocab_size)).any():
        wrong = int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])
        known = {UNWRITTEN: "nothing was written", -1: "the logits hold a NaN or an infinity"}
        problem = f"a step gave the token {wrong} ({known.get(wrong, 'which does not exist')})"
    elif not (np.isfinite(logprobs) & (logprobs < 1e-3)).all():
        problem = f"a log-probability is {logprobs[~np.isfinite(logprobs) | (logprobs >= 1e-3)][0]}"
    elif len(results) > 1 and len({r.tobytes() for r in results}) == 1:
        problem = f"{len(results)} steps with different inputs gave exactly the same"
    if problem:
        raise BminfError(f"{where}: {problem}, so its time means nothing")
