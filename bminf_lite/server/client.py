"""The asyncio client of the engine: the one seam between HTTP code and the engine.

An HTTP process has one :class:`EngineClient`, whose socket leads to the engine's process or to a thread of this one.
Tokens that arrive while their reader is busy are joined into one :class:`Output`, so a reader that is slow gets fewer
and longer outputs, and what waits for it is bounded by the tokens that it asked for.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from ..engine.pooling import PoolingText
from ..errors import BminfError, QueueFull, UsageError
from ..request_builder import GenerationRequest
from ..text.text_stream import TokenScores
from .protocol import (
    AdapterChanged,
    Adapters,
    Admitted,
    Ask,
    Cancel,
    CancelPool,
    ChangeAdapter,
    CompletionOutput,
    Failed,
    FrameReader,
    FromEngine,
    ModelInfo,
    Observed,
    Pool,
    Pooled,
    Ready,
    Refused,
    ShutDown,
    Stats,
    StatsWanted,
    StepOutputs,
    Submit,
    ToEngine,
    frame,
)
from .request_record import RequestRecord

__all__ = [
    "CompletionFailed",
    "EngineClient",
    "EngineFailure",
    "Generation",
    "ModelInfo",
    "Output",
    "QueueFull",
    "RequestRefused",
]


class RequestRefused(UsageError):
    """The engine does not take a request, which is wrong for this model or can never fit: HTTP's 400."""


class EngineFailure(BminfError):
    """The engine has failed or its process has ended: HTTP's 503."""


class CompletionFailed(BminfError):
    """The engine ended a completion with an error."""


class Output(msgspec.Struct, frozen=True):
    """What arrived for one completion since the last look at it; several steps may be joined.

    - ``index``: which of the ``n`` completions. ``token_ids`` may be empty in the last output.
    - ``logprobs``, ``top_logprobs``: as long as ``token_ids`` if the parameters ask for them, else None.
    - ``finish_reason``: None while it runs; ``stop`` (the last token is an end-of-sequence token), ``length``,
      ``deadline``, ``cancelled``, or ``error`` with the message in ``error``; the tokens before an error are an
      output of their own.
    - ``prompt_logprobs``: with the first output, if asked for; None for the first token.
    - ``cached_tokens``: tokens of the prompt that came from the cache; in every output.
    """

    index: int
    token_ids: list[int]
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[TokenScores | None] | None = None
    cached_tokens: int = 0
    error: str | None = None


class _Completion:
    """What has arrived for one completion and was not read yet."""

    __slots__ = (
        "cached_tokens",
        "error",
        "finish_reason",
        "generation",
        "id",
        "index",
        "is_listed",
        "logprobs",
        "prompt_logprobs",
        "queue_seconds",
        "token_ids",
        "top_logprobs",
    )

    def __init__(self, generation: Generation, id: int, index: int):
        self.generation = generation
        self.id = id
        self.index = index
        self.is_listed = False  # in the generation's list of what can be read
        self.token_ids: list[int] = []
        self.logprobs: list[float] | None = None
        self.top_logprobs: list[list[tuple[int, float]]] | None = None
        self.finish_reason: str | None = None
        self.prompt_logprobs: list[TokenScores | None] | None = None
        self.cached_tokens = 0
        self.queue_seconds = 0.0
        self.error: str | None = None

    def add(self, output: CompletionOutput) -> None:
        """Join what is new to what was not read yet."""
        self.token_ids += output.token_ids
        if output.logprobs is not None:
            self.logprobs = output.logprobs if self.logprobs is None else self.logprobs + output.logprobs
        if output.top_logprobs is not None:
            new = output.top_logprobs
            self.top_logprobs = new if self.top_logprobs is None else self.top_logprobs + new
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        self.queue_seconds = output.queue_seconds or self.queue_seconds
        self.finish_reason, self.error = output.finish_reason, output.error

    def take(self) -> Output:
        """All of it; afterwards nothing waits. An error waits for the next call if tokens came before it."""
        error_is_next = self.finish_reason == "error" and bool(self.token_ids)
        reason, error = (None, None) if error_is_next else (self.finish_reason, self.error)
        output = Output(
            self.index,
            self.token_ids,
            self.logprobs,
            self.top_logprobs,
            reason,
            self.prompt_logprobs,
            self.cached_tokens,
            error,
        )
        self.token_ids, self.logprobs, self.top_logprobs, self.prompt_logprobs = [], None, None, None
        self.is_listed = error_is_next
        return output


class Generation:
    """The outputs of some completions, in the order in which they arrive: ``async for output in generation``.

    Each completion ends with an output that has a ``finish_reason``; after the last of them the iteration ends. Use it
    as an asynchronous context manager, which cancels at its end what still runs. For one reader at a time.
    ``record`` counts the outputs that are read.
    """

    def __init__(self, client: EngineClient, first_id: int, n: int, record: RequestRecord | None = None):
        self._client = client
        self._record = record
        self.completions = [_Completion(self, first_id + index, index) for index in range(n)]
        self._num_running = n
        self._readable: list[_Completion] = []
        self._position = 0
        self._reader: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        while True:
            output = self.take()
            if output is not None:
                return output
            if self._num_running == 0:
                raise StopAsyncIteration
            self._reader = self._client.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def take(self) -> Output | None:
        """The next output that has arrived, without waiting; None if there is none now.

        Raises ``EngineFailure`` where the engine, not the completion, ended with an error.
        """
        while self._position < len(self._readable):
            completion = self._readable[self._position]
            if completion.is_listed:  # otherwise it was cancelled
                output = completion.take()
                self._position += not completion.is_listed
                if self._record is not None:
                    self._tell(self._record, output, completion.queue_seconds)
                if output.finish_reason is not None:
                    self._num_running -= 1
                    if output.finish_reason == "error" and self._client.failure is not None:
                        raise EngineFailure(self._client.failure)
                return output
            self._position += 1
        self._readable.clear()
        self._position = 0
        return None

    @property
    def has_ended(self) -> bool:
        """Whether every completion has ended and was read, or was cancelled."""
        return self._num_running == 0

    def stop(self, index: int) -> None:
        """A completion's text is complete: end it as :meth:`cancel` does, unless the engine has ended it meanwhile."""
        if self._record is not None:
            self._record.finished(index, "stop")
        self.cancel(index)

    def cancel(self, index: int | None = None) -> None:
        """End one completion, or all. Nothing more is read of them, and their blocks are free at the next step."""
        ids = []
        for completion in self.completions if index is None else self.completions[index : index + 1]:
            if self._client.forget(completion.id):
                ids.append(completion.id)
            elif not completion.is_listed:
                continue  # it has ended and was read
            completion.is_listed = False
            self._num_running -= 1
        if ids:
            self._client.send(Cancel(ids))
        self._wake()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    @staticmethod
    def _tell(record: RequestRecord, output: Output, queue_seconds: float) -> None:
        record.tokens(output.index, len(output.token_ids), output.cached_tokens, queue_seconds)
        if output.finish_reason is not None:
            record.finished(output.index, output.finish_reason)

    def _list(self, completion: _Completion) -> None:
        """Something arrived for a completion."""
        if not completion.is_listed:
            completion.is_listed = True
            self._readable.append(completion)
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class EngineClient:
    """One HTTP process's way to the engine. Made by :meth:`connect`, and used in one event loop.

    - ``info``: facts of the model. ``is_ready``: the engine is warm. ``failure``: why it failed, else None.
    - ``adapters``: the folders of the model's adapters, by name.
    - ``num_running``: completions that have not ended. ``has_ended`` is done when the engine has failed or ends.
    """

    info: ModelInfo

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.is_ready = False
        self.failure: str | None = None
        self._shut_down: Callable[[float], None] | None = None
        self._seconds_left: float | None = None
        self.on_close: Callable[[], None] = lambda: None
        self._running: dict[int, _Completion] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._stats: dict[int, asyncio.Future[Stats]] = {}
        self._pooled: dict[int, asyncio.Future[Pooled]] = {}
        self._changes: dict[int, asyncio.Future[str | None]] = {}
        self.adapters: dict[str, str] = {}
        self._next_id = 0
        self._has_info: asyncio.Future[None] = loop.create_future()
        self.has_ended: asyncio.Future[None] = loop.create_future()
        self._transport: asyncio.WriteTransport | None = None
        self._unsent = b""

    @classmethod
    async def connect(cls, sock: socket.socket) -> EngineClient:
        """The client on a connected stream socket. Raises ``EngineFailure`` if it closes before the first message."""
        client = cls(asyncio.get_running_loop())
        sock.setblocking(False)
        try:
            await client.loop.create_connection(lambda: _Reader(client), sock=sock)
            await client._has_info
        except BaseException:
            client.close()
            sock.close()
            raise
        return client

    def close(self) -> None:
        """Leave the engine, which cancels what still runs. Calls ``on_close`` before."""
        self.on_close()
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def on_shutdown(self, shut_down: Callable[[float], None]) -> None:
        """Call ``shut_down`` when this process is to end, with the seconds that are left for running requests.

        The engine's process asks for it, or its socket closes; if that was before this call, at once.
        """
        self._shut_down = shut_down
        if self._seconds_left is not None:
            shut_down(self._seconds_left)

    def shut_down(self, seconds: float) -> None:
        """Tell the process that it is to end."""
        self._seconds_left = seconds
        if self._shut_down is not None:
            self._shut_down(seconds)

    @property
    def num_running(self) -> int:
        """Completions that have not ended."""
        return len(self._running)

    async def generate(self, *requests: GenerationRequest, record: RequestRecord | None = None) -> Generation:
        """Submit requests, and return when the engine has taken all of them.

        The indices of the outputs count the completions of the first request, then those of the second, and so on. All
        of them draw differently with the same seed. Raises ``QueueFull``, ``RequestRefused`` for a request that does
        not fit the model, and ``EngineFailure``; then none of them runs. ``record`` counts the requests.
        """
        self.require_engine()
        first_id, count = self._next_id, sum(request.n for request in requests)
        self._next_id += count
        generation = Generation(self, first_id, count, record)
        self._running |= {completion.id: completion for completion in generation.completions}
        admissions: list[asyncio.Future[None]] = []
        next_id = first_id
        for request in requests:
            admission = self._waiting[next_id] = self.loop.create_future()
            admissions.append(admission)
            self.send(Submit(next_id, next_id - first_id, request, "" if record is None else record.client))
            next_id += request.n
        try:
            await asyncio.gather(*admissions)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                self._record(requests, record)
            generation.cancel()
            raise
        finally:
            for id in range(first_id, next_id):
                self._waiting.pop(id, None)
        self._record(requests, record)
        return generation

    @staticmethod
    def _record(requests: Sequence[GenerationRequest], record: RequestRecord | None) -> None:
        """Count requests that the engine has got."""
        if record is not None:
            for request in requests:
                record.add_prompt(len(request.prompt.token_ids), request.n, request.params.max_new_tokens)

    async def pool(
        self,
        texts: Sequence[PoolingText],
        wait: Callable[[asyncio.Future[Pooled]], Awaitable[Pooled]],
        dimensions: int | None = None,
        normalize: bool | None = None,
    ) -> np.ndarray:
        """What the engine makes of texts, fp32 ``[n, width]``: their vectors, or a classifier's numbers.

        ``wait`` waits for the answer, or cancels it; then the engine is told. Raises what ``wait`` does, and
        ``QueueFull``, ``RequestRefused`` and ``EngineFailure``.
        """
        tokens = [np.asarray(text.token_ids).tolist() for text in texts]
        types = [None if text.token_types is None else list(text.token_types) for text in texts]
        skipped = [text.num_skipped for text in texts]
        types = types if any(own is not None for own in types) else []
        skipped = skipped if any(skipped) else []
        return await self._rows(lambda id: Pool(id, tokens, types, skipped, dimensions, normalize), wait)

    async def ask(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[int],
        wait: Callable[[asyncio.Future[Pooled]], Awaitable[Pooled]],
    ) -> np.ndarray:
        """The logits of the tokens ``answers`` behind each of some prompts, fp32 ``[n, answers]``; see :meth:`pool`."""
        wanted = [list(map(int, prompt)) for prompt in prompts]
        return await self._rows(lambda id: Ask(id, wanted, list(answers)), wait)

    async def _rows(
        self,
        message: Callable[[int], Pool | Ask],
        wait: Callable[[asyncio.Future[Pooled]], Awaitable[Pooled]],
    ) -> np.ndarray:
        self.require_engine()
        number = self._next_id
        self._next_id += 1
        answer: asyncio.Future[Pooled] = self.loop.create_future()
        self._pooled[number] = answer
        self.send(message(number))
        try:
            found = await wait(answer)
        finally:
            self._pooled.pop(number, None)
            if answer.cancelled():
                self.send(CancelPool(number))
        if found.error is not None:
            raise (QueueFull if found.queue_full else RequestRefused)(found.error)
        return np.frombuffer(found.rows, np.float32).reshape(-1, found.width)

    async def stats(self) -> Stats:
        """What the engine does now, and what all HTTP processes have counted. Raises ``EngineFailure``."""
        self.require_engine()
        number = self._next_id
        self._next_id += 1
        answer: asyncio.Future[Stats] = self.loop.create_future()
        self._stats[number] = answer
        self.send(StatsWanted(number))
        try:
            return await answer
        finally:
            self._stats.pop(number, None)

    async def change_adapter(self, name: str, folder: str | None, replace: bool = False) -> None:
        """Load the adapter in a folder of the engine's machine, or unload it if that is None.

        Raises ``RequestRefused`` with what was wrong, and ``EngineFailure``.
        """
        self.require_engine()
        number = self._next_id
        self._next_id += 1
        answer: asyncio.Future[str | None] = self.loop.create_future()
        self._changes[number] = answer
        self.send(ChangeAdapter(number, name, folder, replace))
        try:
            problem = await answer
        finally:
            self._changes.pop(number, None)
        if problem is not None:
            raise RequestRefused(problem)

    def observe(self, values: list[float]) -> None:
        """Let the engine's process add up what was counted here; see :class:`.Observations`."""
        self.send(Observed(values))

    def send(self, message: ToEngine) -> None:
        """Send a message soon, unless the engine has gone.

        It waits for two rounds of the event loop, which take microseconds when nothing else is to be done. If many
        requests arrive at a time, those of both rounds reach the engine together, and one step begins all of them.
        """
        if not self._unsent:
            self.loop.call_soon(self.loop.call_soon, self._flush)
        self._unsent += frame(message)

    def _flush(self) -> None:
        data, self._unsent = self._unsent, b""
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def forget(self, id: int) -> bool:
        """Drop a completion; returns False if it has ended."""
        return self._running.pop(id, None) is not None

    def require_engine(self) -> None:
        """Raise ``EngineFailure`` if the engine has failed or ends."""
        if self.failure is not None:
            raise EngineFailure(self.failure)

    def _receive(self, messages: list[FromEngine]) -> None:
        for message in messages:
            if isinstance(message, StepOutputs):
                self._receive_outputs(message)
            elif isinstance(message, Admitted):
                self._settle(message.first_id, None)
            elif isinstance(message, Refused):
                kind = QueueFull if message.queue_full else RequestRefused
                self._settle(message.first_id, kind(message.message))
            elif isinstance(message, Pooled):
                pooled = self._pooled.get(message.id)
                if pooled is not None and not pooled.done():
                    pooled.set_result(message)
            elif isinstance(message, Stats):
                answer = self._stats.get(message.number)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            elif isinstance(message, Adapters):
                self.adapters = {adapter.name: adapter.folder for adapter in message.adapters}
            elif isinstance(message, AdapterChanged):
                changed = self._changes.get(message.number)
                if changed is not None and not changed.done():
                    changed.set_result(message.problem)
            elif isinstance(message, ModelInfo):
                self.info = message
                if not self._has_info.done():
                    self._has_info.set_result(None)
            elif isinstance(message, Ready):
                self.is_ready = True
            elif isinstance(message, Failed):
                self.end_all(message.message)
            elif isinstance(message, ShutDown):
                self.shut_down(message.seconds)

    def _receive_outputs(self, step: StepOutputs) -> None:
        running = self._running
        for id, token_id in zip(step.ids, step.token_ids, strict=True):
            completion = running.get(id)
            if completion is not None:  # otherwise it was cancelled
                completion.token_ids.append(token_id)
                if not completion.is_listed:
                    completion.generation._list(completion)
        for output in step.outputs:
            completion = running.get(output.id)
            if completion is not None:
                completion.add(output)
                if output.finish_reason is not None:
                    del running[output.id]
                completion.generation._list(completion)

    def _settle(self, first_id: int, error: BminfError | None) -> None:
        waiting = self._waiting.get(first_id)
        if waiting is None or waiting.done():
            return
        if error is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(error)

    def end_all(self, why: str) -> None:
        """End everything that runs or waits with an error, in the engine too; nothing new is taken."""
        if self.failure is not None:
            return
        self.failure, self.is_ready = why, False
        self.has_ended.set_result(None)
        futures: list[asyncio.Future[Any]] = [self._has_info, *self._waiting.values(), *self._stats.values()]
        futures += [*self._changes.values(), *self._pooled.values()]
        for future in futures:
            if not future.done():
                future.set_exception(EngineFailure(why))
        running, self._running = self._running, {}
        if running:
            self.send(Cancel(list(running)))
        for completion in running.values():
            completion.add(CompletionOutput(completion.id, [], finish_reason="error", error=why))
            completion.generation._list(completion)


class _Reader(asyncio.Protocol):
    """Reads messages from the engine's socket."""

    def __init__(self, client: EngineClient):
        self._client = client
        self._frames = FrameReader(FromEngine)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._frames.feed(data)
        except msgspec.MsgspecError as error:
            self._client.end_all(f"the engine's process sent a message that cannot be read: {error}")
            self._client.close()
            return
        self._client._receive(messages)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.end_all("the engine's process has ended")
        self._client.shut_down(0)
