"""Checks of grammars beside the event loop. Kept ones are not checked again; a client that leaves ends its checks."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from ..grammar import Grammar
from ..grammar.value import MAX_CHECKERS, Check, is_kept, validate
from .fair_turns import FairTurns

PER_CLIENT = MAX_CHECKERS // 2
"""Checks of one client at a time, so that others find a free checker whatever it sends."""


class GrammarChecks:
    """The checks of one event loop.

    Their threads are not those that render templates, so grammars that take long do not hold up conversations.
    """

    def __init__(self) -> None:
        self._turns: FairTurns[asyncio.Future[None]] = FairTurns(MAX_CHECKERS, PER_CLIENT)
        self._threads = ThreadPoolExecutor(MAX_CHECKERS, "bminf-lite-checks")

    async def validate(self, grammar: Grammar, client: str) -> None:
        """Check a grammar for a client. Raises ``UsageError``.

        One that was found good lately is not checked again, and does not wait for others. If this is cancelled, the
        check is not made, or ends.
        """
        if is_kept(grammar):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.add(client, turn)
        self._start()
        check = Check()
        try:
            await turn
            await asyncio.get_running_loop().run_in_executor(self._threads, validate, grammar, check)
        finally:
            check.cancel()
            if not self._turns.remove(client, turn):
                self._turns.end(client)
                self._start()

    def _start(self) -> None:
        while (started := self._turns.start()) is not None:
            _, turn = started
            if not turn.done():  # else its waiter was cancelled, and is about to end the turn
                turn.set_result(None)
