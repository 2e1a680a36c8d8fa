"""A server on loopback in a thread of this process, over a fake engine or a real model, and requests to it."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn
import uvloop
from fake_engine import FakeEngine, fake_info

import bminf_lite
from bminf_lite.engine.request import Request
from bminf_lite.errors import BminfError
from bminf_lite.server.app import create_app
from bminf_lite.server.client import EngineClient
from bminf_lite.server.engine_server import AdapterStore, EngineServer, ServedEngine
from bminf_lite.server.model_info import model_info
from bminf_lite.server.protocol import ModelInfo
from bminf_lite.server.settings import ServerSettings
from bminf_lite.text.checkpoint_files import load_tokenizer

DEMO = Path(bminf_lite.__file__).parent / "demo_model"
VOCAB_SIZE = 2048
END = 0
TOKENIZER = load_tokenizer(DEMO, VOCAB_SIZE)
NAME = "test-model"


class UnconstrainedEngine(FakeEngine):
    """A fake engine that takes requests with a grammar and does not follow it."""

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.matcher = None
        super().submit(requests)


class ScriptedEngine(UnconstrainedEngine):
    """Generates the same tokens for each request, and then an end-of-sequence token.

    Each token's log-probability is its id divided by -1000, and the most likely tokens are 0, 1, 2, ...
    """

    def __init__(self, script: Sequence[int] = (), **options: Any):
        super().__init__(script, **options)
        self.script = script
        self.fail_at: int | None = None  # the number of the token at which a request fails
        self.may_fail = threading.Event()

    def _step(self) -> None:
        for request in self._running:
            request.start_time = request.start_time or time.perf_counter()
            request.max_length = len(request.prompt_token_ids) + request.params.max_new_tokens
            done = len(request.output_token_ids)
            token = self.script[done] if done < len(self.script) else END
            top = [(i, -0.5 - i) for i in range(request.params.logprobs or 0)]
            request.append_token(token, -token / 1000, top)
            if request.prompt_logprobs:
                ids = request.prompt_token_ids
                request.prompt_token_logprobs = [None, *(-i / 1000 for i in ids[1:])]
                top = [(END, -0.25 - i) for i in range(request.num_prompt_top)]
                request.prompt_top_logprobs = [None, *(top for _ in ids[1:])]
            if done == self.fail_at:
                assert self.may_fail.wait(300)
                request.finish_reason, request.error = "error", BminfError("the logits have a NaN")
            request.on_update(request)
        self._running = [r for r in self._running if r.finish_reason is None]


class LiveServer:
    """The application in a thread. ``http`` sends requests to it."""

    def __init__(
        self,
        engine: ServedEngine,
        info: ModelInfo,
        settings: ServerSettings | None = None,
        adapters: AdapterStore | None = None,
    ):
        self.engine = engine
        self._engine_server = EngineServer(engine, info, adapters=adapters)
        self._settings = settings or ServerSettings((NAME,), seed=0)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()), daemon=True)
        self._thread.start()
        assert self._started.wait(300)
        self.http = httpx.Client(base_url=self.url, timeout=300)

    async def _run(self) -> None:
        self.client = await EngineClient.connect(self._engine_server.connect())
        app = create_app(self.client, self._settings)
        # No connection may end between two tests, just when the next request is sent.
        config = uvicorn.Config(app, lifespan="off", log_level="warning", timeout_keep_alive=3600)
        self._server = uvicorn.Server(config)
        self._started.set()
        await self._server.serve([self._socket])
        self.client.close()

    def says(self, text: str) -> list[int]:
        """Let a scripted engine write a text from now on; returns its tokens."""
        assert isinstance(self.engine, ScriptedEngine)
        self.engine.script = TOKENIZER.encode(text, add_special_tokens=False)
        return list(self.engine.script)

    def post(self, path: str, body: Any) -> httpx.Response:
        """Post a value as JSON."""
        return self.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})

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


def info_of(folder: Path) -> ModelInfo:
    """What a fake engine says of its model, whose tokenizer is in a folder."""
    return msgspec.structs.replace(fake_info(str(folder), VOCAB_SIZE, context_length=1024), eos_ids=[END])


def scripted_server(folder: Path, script: str = "", **options: Any) -> LiveServer:
    """A server whose engine writes a text; see :meth:`LiveServer.says`."""
    server = LiveServer(ScriptedEngine(**options), info_of(folder))
    server.says(script)
    return server


def model_server(model: bminf_lite.Model, settings: ServerSettings | None = None) -> LiveServer:
    """A server over a model's engine."""
    return LiveServer(model._engine, model_info(model), settings)


def fake_server(folder: Path = DEMO, **options: Any) -> LiveServer:
    """A server whose engine gives the tokens 1, 2, 3, ... of the demo model's vocabulary."""
    return LiveServer(UnconstrainedEngine(range(1, VOCAB_SIZE), **options), info_of(folder))


CHAT_TEMPLATE = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def folder_with_template(folder: Path, template: str = CHAT_TEMPLATE) -> Path:
    """A copy of the demo model's small files with a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in DEMO.glob("*.json"):
        shutil.copy(path, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder
