"""What tests of the engine's client have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fake_engine import FakeEngine

from bminf_lite.server.client import EngineClient, Generation
from bminf_lite.server.engine_server import EngineServer
from bminf_lite.server.protocol import ModelInfo


@asynccontextmanager
async def connected(engine: FakeEngine, info: ModelInfo) -> AsyncIterator[EngineClient]:
    """A client of an engine that is served alone for it."""
    server = EngineServer(engine, info)
    client = await EngineClient.connect(server.connect())
    try:
        yield client
    finally:
        client.close()
        server.close()
        engine.close()


async def read(generation: Generation) -> dict[int, list[int]]:
    """The tokens of each completion."""
    tokens: dict[int, list[int]] = {}
    async for output in generation:
        tokens.setdefault(output.index, []).extend(output.token_ids)
    return tokens


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    while not condition():
        await asyncio.sleep(0.002)
