"""A server on loopback in a thread of this process, over a fake engine or a real model, and requests to it."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fake_engine import FakeEngine, fake_info

import bminf_lite
from bminf_lite.server.app import create_app
from bminf_lite.server.client import EngineClient
from bminf_lite.server.engine_server import EngineServer, ServedEngine
from bminf_lite.server.protocol import ModelInfo
from bminf_lite.server.settings import ServerSettings

DEMO = Path(bminf_lite.__file__).parent / "demo_model"
VOCAB_SIZE = 2048
NAME = "test-model"


class LiveServer:
    """The application in a thread. ``http`` sends requests to it."""

    def __init__(self, engine: ServedEngine, info: ModelInfo, settings: ServerSettings | None = None):
        self.engine = engine
        self._engine_server = EngineServer(engine, info)
        self._settings = settings or ServerSettings((NAME,))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._started.wait(20)
        self.http = httpx.Client(base_url=self.url, timeout=30)

    async def _run(self) -> None:
        self.client = await EngineClient.connect(self._engine_server.connect())
        app = create_app(self.client, self._settings)
        self._server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
        self._started.set()
        await self._server.serve([self._socket])
        self.client.close()

    def post(self, path: str, body: Any) -> httpx.Response:
        """Post a value as JSON."""
        return self.http.post(path, json=body)

    def json(self, path: str, body: Any) -> Any:
        """The answer to a request that must succeed."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of the events of a stream; the last one is the text ``[DONE]`` if there is one."""
        with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            text = response.read().decode()
            assert response.status_code == 200, text
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(parse_events(text))

    def close(self) -> None:
        """Stop the server."""
        self.http.close()
        self._server.should_exit = True
        self._thread.join()
        self._engine_server.close()
        self._socket.close()


def parse_events(text: str) -> Iterator[Any]:
    """The data of server-sent events."""
    for event in text.split("\n\n"):
        for line in event.split("\n"):
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)


def fake_server(folder: Path = DEMO, **options: Any) -> LiveServer:
    """A server whose engine gives the tokens 1, 2, 3, ... of the demo model's vocabulary."""
    engine = FakeEngine(range(1, VOCAB_SIZE), **options)
    return LiveServer(engine, fake_info(str(folder), VOCAB_SIZE, context_length=1024))


CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def folder_with_template(folder: Path, template: str = CHAT_TEMPLATE) -> Path:
    """A copy of the demo model's small files with a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in DEMO.glob("*.json"):
        shutil.copy(path, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder
