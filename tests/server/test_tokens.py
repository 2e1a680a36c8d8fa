"""``/tokenize``, ``/detokenize``, ``/tokenizer_info``, ``/v1/models``, and encoder-decoders: ``/v1/fill_blank``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
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


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_a_text_on_which_the_tokenizer_panics_is_a_request_s_fault(tmp_path: Path, path: str):
    """As an expression of the file that backtracks without an end; other texts are served."""
    file = api_kit.folder_with_template(tmp_path) / "tokenizer.json"
    content = json.loads(file.read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": "z"}
    file.write_text(json.dumps(content))
    server = api_kit.fake_server(tmp_path)
    try:
        answer = server.post(path, {"model": NAME, "prompt": "x" * 40})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "prompt", answer.text
        assert "tokenizer.json cannot turn 'xxx" in error["message"]
        server.json(path, {"model": NAME, "prompt": "Hi"})
    finally:
        server.close()


def test_tokens_on_which_the_decoder_panics_end_a_request_and_not_the_server(tmp_path: Path):
    file = api_kit.folder_with_template(tmp_path) / "tokenizer.json"
    content = json.loads(file.read_text())
    endless = {"type": "Replace", "pattern": {"Regex": r"([\s\S]+[\s\S]+)+\z."}, "content": "z"}
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"], endless]}
    file.write_text(json.dumps(content))
    server = api_kit.fake_server(tmp_path)
    try:
        body = {"model": NAME, "prompt": "Hi", "max_tokens": 80}
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 500
        assert f"{file} cannot turn these tokens into text" in answer.json()["error"]["message"]
        events = server.events("/v1/completions", body)
        assert f"{file} cannot turn these tokens into text" in events[-1]["error"]["message"]
        server.json("/v1/completions", body | {"max_tokens": 2})
        refused = server.post("/detokenize", {"tokens": list(range(40, 120))})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tokens"
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
    assert answer["data"][0]["type"] == "model" and answer["data"][0]["display_name"] == NAME  # Anthropic's
    created = datetime.fromisoformat(answer["data"][0]["created_at"])
    assert created.timestamp() == answer["data"][0]["created"] and created.tzinfo is not None
    assert answer["data"][0]["capabilities"] == {"chat": True, "rerank": False}
    assert answer["data"][0]["default_sampling_params"] == {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": None,
    }
    assert (answer["has_more"], answer["first_id"], answer["last_id"]) == (False, NAME, NAME)
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


LONG = "Return the list. " * 600_000
"""10 MB: 27 s of one process, which nobody could use meanwhile, and 3 GB of memory."""


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/detokenize", {"tokens": [5] * 1025}, "tokens"),
        ("/v1/completions", {"model": NAME, "prompt": LONG}, "prompt"),
        ("/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": LONG}]}, "messages"),
    ],
)
def test_a_text_far_beyond_the_context_is_refused_at_once(
    fake: LiveServer, path: str, body: dict[str, object], param: str
):
    start = time.process_time()  # of this process, whose threads serve
    answer = fake.http.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert "too long" in answer.text or "the model's context has 1,024" in answer.text
    assert time.process_time() - start < 10


def test_others_are_served_while_a_long_text_is_tokenized(fake: LiveServer):
    """A text that passes the bound, of 250,000 characters, in many requests at a time."""
    text = ("Return the list of names, please. " * 10_000)[:250_000]
    with ThreadPoolExecutor(4) as pool:
        long = [pool.submit(fake.http.post, "/tokenize", json={"prompt": text}, timeout=120) for _ in range(8)]
        delays = []
        while not all(future.done() for future in long):
            start = time.perf_counter()
            assert fake.json("/tokenize", {"prompt": "Hi"})["count"] > 0
            delays.append(time.perf_counter() - start)
        counts = {future.result().json()["count"] for future in long}
    assert counts == {len(TOKENIZER.encode(text))}
    assert sorted(delays)[len(delays) // 2] < 0.5  # of 0.2 s for each long text, if they had the interpreter's lock


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", r'{"prompt": "a\ud800"}', "prompt"),
        ("/tokenize", r'{"prompt": "\uDFFF"}', "prompt"),
        ("/v1/completions", r'{"model": "x", "prompt": ["ok", "\udc00b"]}', "prompt[1]"),
        ("/v1/completions", r'{"model": "x", "prompt": "ok", "stop": "\ud83d"}', "stop"),
        ("/v1/chat/completions", r'{"messages": [{"role": "user", "content": "\ud83d!"}]}', "messages[0].content"),
        ("/v1/chat/completions", r'{"messages": [{"role": "user", "c\ud83d": ""}]}', "messages[0]"),
        ("/tokenize", r'{"\ud83d": 1}', None),
    ],
)
def test_half_of_a_surrogate_pair_names_the_field(fake: LiveServer, path: str, body: str, param: str | None):
    answer = fake.http.post(path, content=body.encode(), headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param
    assert error["message"].startswith(f"{param or 'the body'}: has half of a surrogate pair")


def test_a_whole_surrogate_pair_is_a_character(fake: LiveServer):
    headers = {"content-type": "application/json"}
    answer = fake.http.post("/tokenize", content=rb'{"prompt": "\ud83d\ude00"}', headers=headers)
    assert answer.json()["tokens"] == TOKENIZER.encode("\U0001f600")
