"""Adapters over HTTP: listed, chosen as a model, loaded and unloaded behind the key, by openai's client too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapter_files import random_adapter

import bminf_lite

pytest.importorskip("starlette", reason="the server needs the extra serve")
from api_kit import LiveServer
from server_process import NAME, ServerProcess

from bminf_lite.errors import UsageError
from bminf_lite.server import application
from bminf_lite.server.model_info import model_info
from bminf_lite.server.openai import completions
from bminf_lite.server.security import Security, digests
from bminf_lite.server.settings import ServerSettings

KEY = "key-of-a-test"
HEADERS = {"authorization": f"Bearer {KEY}"}
PROMPT = {"prompt": "hello", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def folders(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: random_adapter(folder / name, source, seed=seed) for seed, name in enumerate(("french", "sql"))}


@pytest.fixture(scope="module")
def expected(source: Path, folders: dict[str, Path]) -> dict[str | None, str]:
    """What the library says, with each adapter."""
    with bminf_lite.load(source, device="cpu", adapters=folders) as model:
        return {name: model.generate("hello", max_new_tokens=8, adapter=name).text for name in (None, *folders)}


class Served(LiveServer):
    """A model with adapters, or with none, behind a key, or without."""

    def __init__(self, model: bminf_lite.Model, keys: tuple[str, ...] = (KEY,)):
        self.model = model
        settings = ServerSettings(("base", "alias"), Security(digests(keys)), seed=0)
        super().__init__(model.engine, model_info(model), settings, model.adapter_store)
        self.http.headers.update(HEADERS)

    def text(self, name: str | None) -> str:
        return self.json("/v1/completions", {**PROMPT, **({} if name is None else {"model": name})})["choices"][0][
            "text"
        ]


@pytest.fixture
def served(source: Path, folders: dict[str, Path]) -> Iterator[Served]:
    with bminf_lite.load(source, device="cpu", adapters={"french": folders["french"]}, max_adapters=1) as model:
        server = Served(model)
        yield server
        server.close()


def message(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


def test_a_request_chooses_by_model(served: Served, folders: dict[str, Path], expected: dict[str | None, str]) -> None:
    assert expected[None] != expected["french"] != expected["sql"]
    for name, of in (("french", "french"), ("base", None), (None, None), ("alias", None), ("french", "french")):
        assert served.text(name) == expected[of]
    listed = served.http.get("/v1/models").json()["data"]
    assert [(m["id"], m["parent"]) for m in listed] == [("base", None), ("alias", None), ("french", "base")]
    assert listed[2]["root"] == str(folders["french"])
    assert served.http.get("/v1/models/french").json() == listed[2]
    unknown = served.post("/v1/completions", {**PROMPT, "model": "sql"})
    assert unknown.status_code == 404 and "'sql' is not served here; there are base, alias, french" in message(unknown)
    chat = served.json(
        "/v1/chat/completions", {"model": "french", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    )
    assert chat["model"] == "french"


def test_adapters_are_loaded_and_unloaded(
    served: Served, folders: dict[str, Path], expected: dict[str | None, str]
) -> None:
    body = {"lora_name": "sql", "lora_path": str(folders["sql"])}
    loaded = served.post("/v1/load_lora_adapter", body)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert served.text("sql") == expected["sql"] and served.text("french") == expected["french"]
    again = served.post("/v1/load_lora_adapter", body)
    assert again.status_code == 400 and "adapter 'sql' is loaded already" in message(again)
    replaced = {"lora_name": "sql", "lora_path": str(folders["french"]), "load_inplace": True}
    assert served.post("/v1/load_lora_adapter", replaced).status_code == 200
    assert served.text("sql") == expected["french"]
    gone = served.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert served.post("/v1/completions", {**PROMPT, "model": "sql"}).status_code == 404
    missing = served.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert missing.status_code == 404 and message(missing) == "there is no adapter 'sql'"
    assert served.model.adapters.keys() == {"french"}


def test_an_adapter_that_is_unloaded_while_a_prompt_is_tokenized_does_not_become_the_model(
    served: Served, expected: dict[str | None, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = completions.encode

    async def encode_without_adapters(server: Any, *arguments: Any) -> Any:
        known, server.client.adapters = server.client.adapters, {}
        try:
            await asyncio.sleep(0)
            return await encode(server, *arguments)
        finally:
            asyncio.get_running_loop().call_soon(setattr, server.client, "adapters", known)

    monkeypatch.setattr(completions, "encode", encode_without_adapters)
    assert served.text("french") == expected["french"] != expected[None]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "", "lora_path": "y"}, "lora_name"),
        ({"lora_name": "base", "lora_path": "y"}, "'base' is the name of the model itself"),
        ({"lora_name": "x", "lora_path": "/nothing"}, "does not exist; give the folder that PEFT saved"),
    ],
)
def test_what_cannot_be_loaded_is_told(served: Served, body: dict[str, Any], text: str) -> None:
    response = served.post("/v1/load_lora_adapter", body)
    assert response.status_code == 400 and text in message(response)


def test_without_a_key_nothing_is_loaded(source: Path, folders: dict[str, Path]) -> None:
    body = {"lora_name": "sql", "lora_path": str(folders["sql"])}
    with bminf_lite.load(source, device="cpu", adapters={}) as model:
        server = Served(model, keys=())
        refused = server.post("/v1/load_lora_adapter", body)
        assert refused.status_code == 403 and "start the server with --api-key-file" in message(refused)
        server.close()
        server = Served(model)
        server.http.headers.pop("authorization")
        assert server.post("/v1/load_lora_adapter", body).status_code == 401
        server.close()
    with bminf_lite.load(source, device="cpu") as model:
        server = Served(model)
        refused = server.post("/v1/load_lora_adapter", body)
        assert refused.status_code == 400 and "no room for adapters: start it with --adapter" in message(refused)
        server.close()


def test_an_adapter_is_not_named_as_the_model(source: Path, folders: dict[str, Path]) -> None:
    with bminf_lite.load(source, device="cpu", adapters={"source": folders["sql"]}) as model:
        with pytest.raises(UsageError, match="the adapter 'source' has the name of the model"):
            application(model)
        application(model, served_model_name="base")


def test_openai_picks_adapters(
    source: Path, tmp_path: Path, folders: dict[str, Path], expected: dict[str | None, str]
) -> None:
    """A real server with two HTTP processes: what one loads, both know."""
    openai = pytest.importorskip("openai")
    (tmp_path / "keys").write_text(KEY)
    options = ["--api-key-file", str(tmp_path / "keys"), "--http-workers", "2", "--max-adapters", "2"]
    server = ServerProcess(source, *options, "--adapter", f"french={folders['french']}")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:

        def text(model: str) -> str:
            return str(client.completions.create(model=model, **PROMPT).choices[0].text)

        assert [m.id for m in client.models.list()] == [NAME, "french"]
        assert client.models.retrieve("french").parent == NAME
        assert (text(NAME), text("french")) == (expected[None], expected["french"])
        pieces = client.completions.create(model="french", stream=True, **PROMPT)
        assert "".join(piece.choices[0].text for piece in pieces) == expected["french"]
        body = {"lora_name": "sql", "lora_path": str(folders["sql"])}
        assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, headers=HEADERS).status_code == 200
        for _ in range(8):  # new connections, which either process takes
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as other:
                assert other.completions.create(model="sql", **PROMPT).choices[0].text == expected["sql"]
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log
