"""A device that computes nothing: a sequence's next token is a hash of its tokens, read back through its block tables.

A wrong block, a block that was overwritten, or a token at a wrong place changes the hash. A layer with a state keeps
the tokens up to a chunk's end as its state, and those behind it in a ring, by the contract of ``layers.cache.State``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from bminf_lite.backend.cache_values import StateArray
from bminf_lite.backend.sampling import TokenScores
from bminf_lite.engine.adapters import AdapterRegistry, AdapterSlotTable, LoadedAdapter
from bminf_lite.engine.block_manager import BlockManager
from bminf_lite.engine.config import EngineConfig
from bminf_lite.engine.drafts import Drafter
from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.engine.scheduler import Scheduler
from bminf_lite.engine.speculative import SpeculativeConfig
from bminf_lite.engine.step import ScheduledTokens, Step, StepResult
from bminf_lite.layers.cache import CacheLayout, KeyValues, State

VOCAB = 50
SIZE = 4
UNWRITTEN = -7
CHUNK = 3
STATE = -1
"""Stands for a state where windows are listed."""


def parts_of(step: Step) -> list[ScheduledTokens]:
    """All tokens of a step in order; the first ``num_decodes`` parts have one each."""
    pairs = zip(step.decoding, step.positions, strict=True)
    return [*(ScheduledTokens(request, position, 1, True) for request, position in pairs), *step.others]


def windows_of(blocks: BlockManager) -> list[int | None]:
    """The window of each group."""
    return [getattr(group.retention, "size", None) for group in blocks.groups]


def visible(tokens: np.ndarray, window: int | None) -> np.ndarray:
    """What the last of the tokens sees."""
    return tokens if window is None else tokens[max(len(tokens) - window, 0) :]


@dataclass
class Slot:
    """What a sequence has in a layer with a state: the tokens up to ``end``, and the last ones by position."""

    ring: list[int]
    tokens: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return len(self.tokens)

    def advance(self, start: int, ids: list[int]) -> None:
        """Compute accepted tokens from ``start`` on."""
        if start == 0:
            self.tokens = []
        assert start - len(self.ring) <= self.end <= start and self.end % CHUNK == 0, "a state that does not serve"
        inputs = self.read(start)[self.end :] + ids
        chunk_end = (start + len(ids) - 1) // CHUNK * CHUNK
        self.tokens += inputs[: chunk_end - self.end]
        self.write(start, ids)

    def write(self, start: int, ids: list[int]) -> None:
        for position, token in enumerate(ids, start):
            self.ring[position % len(self.ring)] = token

    def read(self, stop: int) -> list[int]:
        """The first ``stop`` tokens."""
        behind = [self.ring[position % len(self.ring)] for position in range(self.end, stop)]
        return (self.tokens + behind)[:stop]


class SlotPool:
    """The slots of a layer with a state. Nobody ever clears one."""

    def __init__(self, num_slots: int, num_draft_tokens: int):
        self.slots = [Slot([UNWRITTEN] * (CHUNK + num_draft_tokens)) for _ in range(num_slots)]

    def __getitem__(self, slot: int) -> Slot:
        return deepcopy(self.slots[slot])

    def __setitem__(self, target: int, contents: Slot) -> None:
        self.slots[target] = contents

    def write(self, table: list[int], start: int, ids: list[int], is_draft: bool) -> None:
        (slot,) = table
        assert slot != 0
        (self.slots[slot].write if is_draft else self.slots[slot].advance)(start, ids)

    def read(self, table: list[int], stop: int) -> np.ndarray:
        return np.array(self.slots[table[0]].read(stop), np.int32)


def adapter_named(name: str) -> LoadedAdapter:
    """An adapter without matrices."""
    return AdapterRegistry().add(name, f"/{name}", 1, 0, list)


def mark_of(adapter: LoadedAdapter | None) -> int:
    """What an adapter adds to each token that is computed with it: keys and values that are another's show."""
    return 0 if adapter is None else 100 * ord(adapter.name)


def next_token(parts: Sequence[np.ndarray]) -> int:
    return crc32(b"|".join(np.asarray(p, np.int32).tobytes() for p in parts)) % VOCAB


def alone(request: Request, windows: Sequence[int | None], context_length: int) -> tuple[list[int], list[float]]:
    """The tokens of a request that nothing disturbs, and the scores of its prompt."""
    tokens = list(request.prompt_token_ids)
    mark = mark_of(request.adapter)
    source = np.array(request.source_token_ids, np.int32) + mark

    def follows(ids: list[int]) -> int:
        return next_token([source, *(visible(np.array(ids, np.int32) + mark, w) for w in windows)])

    scores = [float(follows(tokens[:n])) for n in range(1, len(tokens))]
    while len(tokens) < min(len(request.prompt_token_ids) + request.params.max_new_tokens, context_length):
        tokens.append(follows(tokens))
        if tokens[-1] in request.eos_ids:
            break
    return tokens[len(request.prompt_token_ids) :], scores


class StubRunner:
    """Launches in order and, like a device, computes at once what is fetched later."""

    def __init__(self, blocks: BlockManager, config: EngineConfig, max_steps_in_flight: int = 0):
        self.blocks = blocks
        self.max_steps_in_flight = max_steps_in_flight
        self.pools = [
            SlotPool(group.pool.num_blocks, config.num_draft_tokens)
            if group.has_snapshots
            else np.full((group.pool.num_blocks, blocks.block_size), UNWRITTEN, np.int32)
            for group in blocks.groups
        ]
        source_blocks = blocks.source_pool.num_blocks if blocks.source_pool else 0
        self.sources = np.full((source_blocks, blocks.block_size), UNWRITTEN, np.int32)
        self.last_token = np.zeros(config.max_num_seqs + 1, np.int32)
        self.max_num_seqs = config.max_num_seqs
        self.adapters = AdapterSlotTable(config.num_adapter_slots)
        self.slots: list[LoadedAdapter | None] = [None] * (config.num_adapter_slots + 1)
        self.clear()
        self.steps: list[Step] = []
        self.encoded = 0
        self.before_launch: Callable[[], None] = lambda: None
        self.closed = False

    def launch(self, step: Step) -> StubHandle:
        self.before_launch()
        self.steps.append(step)
        for slot, adapter in self.adapters.take_writes():
            self.slots[slot] = adapter
        for request in step.sources:
            ids = np.array(request.source_token_ids, np.int32) + self._mark(request)
            self._write(self.sources, request.blocks.source_table, 0, ids)
            self.encoded += 1
        parts = parts_of(step)
        for _, pairs in step.copies:
            for pool, (source, target) in zip(self.pools, pairs, strict=True):
                pool[target] = pool[source]
        drafts = [*step.drafts] if step.drafts else [0] * len(step.decoding)
        offsets = [*step.offsets] if step.offsets else [0] * len(step.decoding)
        for i, part in enumerate(parts):
            request = part.request
            ids = list(request.token_ids(part.start, min(part.stop, request.num_known_tokens)))
            if i < len(offsets) and offsets[i] > 0:
                ids = [drafts[i]]
            if len(ids) < part.num_tokens:
                assert part.num_tokens == 1, "only the newest token may be unknown"
                ids.append(int(self.last_token[request.row]))
            ids = [token + self._mark(request) for token in ids]
            for pool, table in zip(self.pools, request.blocks.tables, strict=True):
                if isinstance(pool, SlotPool):
                    pool.write(table, part.start, ids, i < len(offsets) and offsets[i] > 0)
                else:
                    self._write(pool, table, part.start, np.array(ids, np.int32))
        chosen, scores = [], []
        for part in parts:
            scores += [float(self._follows(part.request, part.start + 1 + i)) for i in range(part.num_scored)]
            if part.samples:
                chosen.append(self._follows(part.request, part.stop))
                i = len(chosen) - 1
                if i >= len(offsets) or offsets[i] == 0:
                    is_accepted = True
                else:
                    is_accepted = is_accepted and chosen[i - 1] == drafts[i]
                if is_accepted:
                    self.last_token[part.request.row] = chosen[-1]
            if part.request.take_logits:
                part.request.take_logits(part.start, np.zeros((part.num_tokens, 1)))
        assert step.num_decodes == sum(p.num_tokens == 1 for p in parts[: step.num_decodes])
        bits = np.zeros(len(chosen), np.float32).view(np.int32)
        logprobs = np.array(scores, np.float32)
        packed = TokenScores(logprobs, np.zeros(len(scores), np.int32), logprobs).packed()
        return StubHandle(StepResult(np.stack([np.array(chosen, np.int32), bits]), packed))

    def has_room(self, request: Request) -> bool:
        return bool(self.free_rows) and self.adapters.has_room(request.adapter)

    def add(self, request: Request) -> None:
        request.row = self.free_rows.pop()
        request.lora_id = self.adapters.acquire(request.adapter)

    def remove(self, request: Request) -> None:
        self.free_rows.append(request.row)
        self.adapters.release(request.adapter)
        request.row = request.lora_id = 0

    def _mark(self, request: Request) -> int:
        """What the adapter in the request's slot adds to its tokens."""
        assert (request.lora_id > 0) == (request.adapter is not None)
        return mark_of(self.slots[request.lora_id])

    def clear(self) -> None:
        self.adapters.clear()
        self.free_rows = list(range(self.max_num_seqs, 0, -1))

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def _follows(self, request: Request, stop: int) -> int:
        """The token behind the first ``stop`` ones."""
        seen = [self._read(self.sources, request.blocks.source_table, 0, len(request.source_token_ids))]
        for pool, table, window in zip(self.pools, request.blocks.tables, windows_of(self.blocks), strict=True):
            if isinstance(pool, SlotPool):
                seen.append(pool.read(table, stop))
            else:
                seen.append(self._read(pool, table, max(stop - window, 0) if window else 0, stop))
        return next_token(seen)

    def _write(self, pool: np.ndarray, table: list[int], first: int, ids: np.ndarray) -> None:
        for position, token in enumerate(ids.tolist(), first):
            block = table[position // self.blocks.block_size]
            assert block != 0
            pool[block, position % self.blocks.block_size] = token

    def _read(self, pool: np.ndarray, table: list[int], first: int, stop: int) -> np.ndarray:
        positions = np.arange(first, stop)
        found = pool[np.array(table, np.int32)[positions // self.blocks.block_size], positions % self.blocks.block_size]
        assert not (found == UNWRITTEN).any()
        return found


class Oracle(Drafter):
    """A drafter that knows what a request gets, and is wrong now and then."""

    def __init__(self, windows: Sequence[int | None], context_length: int):
        self.windows = windows
        self.context_length = context_length
        self.of: dict[Request, list[int]] = {}

    def propose(self, request: Request, count: int) -> Sequence[int]:
        if request not in self.of:
            self.of[request] = alone(request, self.windows, self.context_length)[0]
        known = len(request.output_tokens)
        right = self.of[request][known : known + count]
        return [token + (crc32(bytes([known % 256, i])) % 5 == 0) for i, token in enumerate(right)]

    def forget(self, request: Request) -> None:
        self.of.pop(request, None)


@dataclass
class StubHandle:
    result: StepResult
    waits_for_tokens = False

    def sample(self) -> None:
        pass

    def fetch(self) -> StepResult:
        return self.result


def make_config(
    blocks: int = 12, windows: Sequence[int | None] = (None,), source_blocks: int = 0, slots: int = 0, **limits: object
) -> EngineConfig:
    """A small cache; ``windows`` has an entry for each group: None, a window, or ``STATE`` with ``slots`` slots."""
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_num_mixed_tokens": 6, "max_logit_rows": 5}
    defaults |= {"speculative": SpeculativeConfig("ngram", adaptive=False)}
    state = State((StateArray("tokens", (1,)),))
    layers = tuple(state if window == STATE else KeyValues(1, 1, window=window) for window in windows)
    counts = tuple(slots or blocks if window == STATE else blocks for window in windows)
    return EngineConfig(
        context_length=32,
        vocab_size=VOCAB,
        cache_layout=CacheLayout(layers),
        num_blocks=counts,
        num_source_blocks=source_blocks,
        **(defaults | limits),
    )


def make_blocks(config: EngineConfig) -> BlockManager:
    return BlockManager(
        config.cache_layout.groups,
        config.num_blocks,
        config.num_source_blocks,
        max_piece=config.max_num_batched_tokens,
        prefix_cache=config.prefix_cache,
        block_size=SIZE,
    )


def make_request(prompt: Sequence[int], max_new_tokens: int = 5, **fields: object) -> Request:
    """A request that may end early, but does not, unless ``fields`` say otherwise."""
    fields.setdefault("eos_ids", frozenset([VOCAB]))
    return Request(0, list(prompt), SamplingParams(max_new_tokens=max_new_tokens, seed=1), **fields)


@dataclass
class Driver:
    """A scheduler and a stub, stepped by hand, with every account checked after each action."""

    config: EngineConfig
    max_steps_in_flight: int = 0
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks = make_blocks(self.config)
        self.runner = StubRunner(self.blocks, self.config, self.max_steps_in_flight)
        oracle = Oracle(windows_of(self.blocks), self.config.context_length)
        self.scheduler = Scheduler(
            self.config, self.blocks, self.runner, oracle if self.config.num_draft_tokens else None
        )
        self.in_flight: deque[tuple[Step, StubHandle]] = deque()

    def add(self, request: Request) -> Request:
        limit = request.limit_length(self.config.context_length)
        assert self.blocks.shortage(limit, len(request.source_token_ids)) is None
        self.requests.append(request)
        self.scheduler.add(request)
        self.check()
        return request

    def launch(self) -> bool:
        step = self.scheduler.schedule()
        self.check()
        if step is not None:
            self.in_flight.append((step, self.runner.launch(step)))
        return step is not None

    def fetch(self) -> None:
        step, handle = self.in_flight.popleft()
        self.scheduler.postprocess(step, handle.fetch())
        self.check()

    def step(self) -> None:
        """What the engine's loop does in one turn."""
        while len(self.in_flight) <= self.max_steps_in_flight and self.launch():
            pass
        if self.in_flight:
            self.fetch()

    def run(self) -> None:
        """To the end of every request."""
        for _ in range(5000):
            if not self.scheduler.has_requests and not self.in_flight:
                break
            before = len(self.runner.steps), len(self.in_flight)
            self.step()
            assert before != (len(self.runner.steps), len(self.in_flight)), "a turn without progress"
        assert not self.scheduler.has_requests
        assert all(pool.num_used == 0 for pool in self.blocks.pools)

    def check(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        self.blocks.check([r.blocks for r in running])
        rows = [r.row for r in running]
        assert sorted(rows + self.runner.free_rows) == list(range(1, self.config.max_num_seqs + 1))
        assert running == sorted(running, key=lambda r: r.order) and waiting == sorted(waiting, key=lambda r: r.order)
        assert all(r.row == 0 for r in waiting)
        live = [r for r in self.requests if r.finish_reason is None]
        assert sorted(map(id, live)) == sorted(map(id, running + waiting))
        slots = {r.lora_id: r.adapter for r in running if r.adapter is not None}
        assert len(slots) == len({r.adapter for r in running if r.adapter is not None}), "an adapter in two slots"
        assert all(r.lora_id in range(1, self.config.num_adapter_slots + 1) for r in running if r.adapter is not None)
        assert all(r.lora_id == 0 for r in (*running, *waiting) if r.adapter is None or r.row == 0)

    def check_results(self) -> None:
        """Each result is that of the request alone, or its beginning if the request was cancelled."""
        for request in self.requests:
            tokens, scores = alone(request, windows_of(self.blocks), self.config.context_length)
            if request.finish_reason in ("stop", "length", "context"):
                assert request.output_token_ids == tokens
                if request.prompt_logprobs:
                    assert request.prompt_token_logprobs == [None, *scores]
            else:
                assert request.output_token_ids == tokens[: len(request.output_token_ids)]
