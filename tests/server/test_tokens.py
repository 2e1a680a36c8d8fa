"""``/tokenize``, ``/detokenize``, ``/tokenizer_info``, ``/v1/models``, and encoder-decoders: ``/v1/fill_blank``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import api_kit
import cpm_kit
import pytest
from api_kit import NAME, TOKENIZER, LiveServer
from hypothesis import given
from hypothesis import strategies as st

import bminf_lite
from bminf_lite.text.infilling import fill_spans


@given(text=st.text("abc é𝄞\n", max_size=40), special=st.booleans())
def test_text_to_tokens_and_back(fake: LiveServer, text: str, special: bool):
    answer = fake.json("/tokenize", {"prompt": text, "add_special_tokens": special, "return_token_strs": True})
    assert answer["tokens"] == TOKENIZER.encode(text, special) and answer["count"] == len(answer["tokens"])
    assert answer["token_strs"] == [TOKENIZER.id_to_piece(i) for i in answer["tokens"]]
    assert answer["max_model_len"] == 1024
    assert fake.json("/detokenize", {"tokens": answer["tokens"]}) == {"prompt": text}


def test_a_long_text(fake: LiveServer):
    text = "Return the list. " * 2000
    assert fake.json("/tokenize", {"prompt": text})["tokens"] == TOKENIZER.encode(text)


def test_a_conversation(fake: LiveServer):
    body = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False}
    tokens = fake.json("/tokenize", body)["tokens"]
    assert tokens == TOKENIZER.encode("<user>Hi\n", add_special_tokens=False)
    special = fake.json("/tokenize", body | {"add_special_tokens": True})["tokens"]
    assert special == TOKENIZER.encode("<user>Hi\n")


def test_the_tokenizer_is_read_before_the_first_request(tmp_path: Path):
    server = api_kit.fake_server(api_kit.folder_with_template(tmp_path))
    try:
        for path in tmp_path.iterdir():
            path.unlink()
        assert server.json("/tokenize", {"prompt": "Hi"})["tokens"] == TOKENIZER.encode("Hi")
    finally:
        server.close()


def test_what_the_tokenizer_is(fake: LiveServer):
    info = fake.http.get("/tokenizer_info").json()
    assert info["eos_token"] == info["bos_token"] == "<|endoftext|>" and info["chat_template"]
    assert info["model_max_length"] == 1024


def test_models(fake: LiveServer):
    answer = fake.http.get("/v1/models").json()
    assert answer["object"] == "list" and answer["data"][0]["id"] == NAME
    assert answer["data"][0]["max_model_len"] == 1024
    assert fake.http.get(f"/v1/models/{NAME}").json() == answer["data"][0]
    assert fake.http.get("/v1/models/other").status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "Hi"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "x"}, "model"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/v1/fill_blank", {"text": "a <span>"}, "text"),
        ("/v1/fill_blank", {}, "text"),
    ],
)
def test_a_wrong_value_is_named(fake: LiveServer, path: str, body: dict[str, object], param: str | None):
    response = fake.post(path, body)
    assert response.status_code in (400, 404) and response.json()["error"]["param"] == param, response.text


# -- encoder-decoders -------------------------------------------------------------------------------------------------

TEXT = "今天<span>不错，我们去<span>。"


@pytest.fixture(scope="module")
def cpm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[bminf_lite.Model, LiveServer]]:
    pytest.importorskip("jieba")
    folder = cpm_kit.write(tmp_path_factory.mktemp("fill") / "model", "cpm2")
    with bminf_lite.load(folder, device="cpu") as model:
        server = api_kit.model_server(model)
        yield model, server
        server.close()


def test_blanks_are_filled_as_the_model_fills_them(cpm2):
    model, server = cpm2
    options = {"temperature": 1.0, "seed": 2, "frequency_penalty": 0.5}
    expected = model.fill_blank(TEXT, max_new_tokens=7, **options)
    answer = server.json("/v1/fill_blank", {"text": TEXT, "max_tokens": 7, **options})
    assert answer["text"] == fill_spans(TEXT, expected)
    assert answer["fillings"] == [{"position": f.position, "text": f.text} for f in expected]
    assert answer["usage"]["completion_tokens"] <= 7 and answer["finish_reason"] in ("stop", "length")
    for body, words in (({"text": "none"}, "<span>"), ({"text": TEXT, "temperature": -1}, "temperature")):
        response = server.post("/v1/fill_blank", body)
        assert response.status_code == 400 and words in response.json()["error"]["message"]


def test_an_encoder_decoder_completes(cpm2):
    model, server = cpm2
    expected = model.generate("今天天气", max_new_tokens=6, temperature=1.0, seed=4)
    body = {"prompt": "今天天气", "max_tokens": 6, "temperature": 1.0, "seed": 4}
    assert server.json("/v1/completions", body)["choices"][0]["text"] == expected.text
    echoed = server.json("/v1/completions", body | {"echo": True})["choices"][0]["text"]
    assert echoed == "今天天气" + expected.text
    response = server.post("/v1/completions", body | {"echo": True, "logprobs": 1})
    assert response.status_code == 400 and response.json()["error"]["param"] == "echo"
