"""Servers that the tests of the interfaces share."""

from __future__ import annotations

from collections.abc import Iterator

import api_kit
import pytest

import bminf_lite


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory):
    """The demo model's tokenizer with a chat template."""
    return api_kit.folder_with_template(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="session")
def fake(chat_folder) -> Iterator[api_kit.LiveServer]:
    """A server whose engine gives tokens that depend on the last token of the prompt."""
    server = api_kit.fake_server(chat_folder)
    yield server
    server.close()


@pytest.fixture(scope="session")
def scripted_(chat_folder) -> Iterator[api_kit.LiveServer]:
    server = api_kit.scripted_server(chat_folder)
    yield server
    server.close()


@pytest.fixture
def scripted(scripted_) -> api_kit.LiveServer:
    """A server whose engine writes a text, of which it has none yet."""
    scripted_.says("")
    return scripted_


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[bminf_lite.Model]:
    """The bundled model with a chat template, on the CPU."""
    folder = api_kit.folder_with_template(tmp_path_factory.mktemp("demo") / "model")
    (folder / "model.safetensors").symlink_to(api_kit.DEMO / "model.safetensors")
    with bminf_lite.load(folder, device="cpu") as model:
        yield model


@pytest.fixture(scope="session")
def demo(demo_model) -> Iterator[api_kit.LiveServer]:
    """A server over the bundled model."""
    server = api_kit.model_server(demo_model)
    yield server
    server.close()
