"""Runs requests of this process and yields the pieces of their texts, for threads and for asyncio.

The engine's thread only puts updates in a queue. The text is made in the caller's thread, so a slow caller delays no
other request, and its queue holds at most the tokens that it asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from queue import SimpleQueue

from .engine.core import Engine
from .engine.outputs import Piece, Update, make_result
from .engine.request import Request
from .text.text_stream import TextStream


class Completion:
    """One request and the text of its tokens so far."""

    def __init__(self, request: Request, text: TextStream):
        self.request = request
        self.has_ended = False
        self._stream = text
        self._texts: list[str] = []

    def read(self, update: Update, every_token: bool) -> list[Piece]:
        """The pieces up to ``update``: one per token, or one for all. The last one has the result.

        Raises the request's error.
        """
        if self.has_ended:
            return []
        if self.request.error is not None:
            self.has_ended = True
            raise self.request.error
        count = 1 if every_token else max(update.num_tokens, 1)
        firsts = range(self._stream.num_tokens, update.num_tokens, count)
        pieces = [self._next_piece(update, count) for _ in firsts if not self.has_ended]
        if update.finish_reason is not None and not self.has_ended:  # it ends without another token
            pieces.append(self._next_piece(update, 0))
        return pieces

    def _next_piece(self, update: Update, count: int) -> Piece:
        first = self._stream.num_tokens
        tokens = self.request.output_tokens[first : first + count].tolist()
        new = self._stream.push(tokens, update.finish_reason if first + count == update.num_tokens else None)
        self._texts.append(new.text)
        if new.finish_reason is None:
            return Piece(self.request.index, new.text, tokens)
        self.has_ended = True
        ended = update._replace(num_tokens=self._stream.num_tokens, finish_reason=new.finish_reason)
        result = make_result(ended, "".join(self._texts))
        return Piece(self.request.index, new.text, tokens, result.finish_reason, result)


def run(engine: Engine, completions: Sequence[Completion], every_token: bool) -> Generator[Piece, None, None]:
    """Run requests to their end and yield their pieces: as the tokens come, or at the end of each request.

    Closing the generator, or an error, cancels the requests. Raises what :meth:`.Engine.submit` does, and the error of
    a request.
    """
    if not completions:
        return
    updates: SimpleQueue[Update] = SimpleQueue()
    by_request = _subscribe(completions, updates.put, every_token)
    try:
        engine.submit(list(by_request))
        unfinished = set(by_request)
        while unfinished:
            engine.require_process()  # a stream that was forked would wait for ever
            update = updates.get()
            completion = by_request[update.request]
            yield from _read(engine, completion, update, every_token)
            if completion.has_ended:
                unfinished.discard(update.request)
    finally:
        engine.cancel(list(by_request))


async def arun(engine: Engine, completions: Sequence[Completion], every_token: bool) -> AsyncGenerator[Piece, None]:
    """As :func:`run`, for asyncio."""
    if not completions:
        return
    updates: asyncio.Queue[Update] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def deliver(update: Update) -> None:
        loop.call_soon_threadsafe(updates.put_nowait, update)

    by_request = _subscribe(completions, deliver, every_token)
    try:
        engine.submit(list(by_request))
        unfinished = set(by_request)
        while unfinished:
            update = await updates.get()
            completion = by_request[update.request]
            for piece in _read(engine, completion, update, every_token):
                yield piece
            if completion.has_ended:
                unfinished.discard(update.request)
    finally:
        engine.cancel(list(by_request))


def _read(engine: Engine, completion: Completion, update: Update, every_token: bool) -> list[Piece]:
    """The pieces up to an update. A request whose text ends at a stop string is cancelled."""
    pieces = completion.read(update, every_token)
    if completion.has_ended:
        engine.cancel([completion.request])
    return pieces


def _subscribe(
    completions: Sequence[Completion], deliver: Callable[[Update], None], every_token: bool
) -> dict[Request, Completion]:
    """Let the engine deliver the requests' updates, or only their last ones; returns the completions by request."""

    def on_update(request: Request) -> None:
        if every_token or request.finish_reason is not None:
            deliver(Update.of(request))

    for completion in completions:
        completion.request.on_update = on_update
    return {completion.request: completion for completion in completions}
