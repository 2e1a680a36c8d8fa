"""What others use as clients, against a real server: openai, anthropic, LangChain, LlamaIndex, lm-eval, curl.

The model is the bundled one, which was not trained to chat: what it says is not checked, but that every client reads it
as the server wrote it, and that what a grammar promises holds.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import shutil
import socket
import subprocess
import time
from enum import Enum
from pathlib import Path

import httpx
import lm_eval_kit
import numpy as np
import pytest
import tool_templates
from embedding_kit import write_encoder
from lm_eval_kit import MULTIPLE_CHOICE, QUESTIONS, TOLERANCE, logprobs
from server_process import DEMO, NAME, ServerProcess, demo_folder

from bminf_lite.api import load

pytest.importorskip("starlette", reason="the server needs the extra serve")

SAY = [{"role": "user", "content": "Say something about the terminal."}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": WEATHER}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = demo_folder(tmp_path_factory.mktemp("clients") / "model", tool_templates.NOT_THINKING)
    process = ServerProcess(folder, "--seed", "1")
    yield process
    assert process.stop() == 0, process.log
    assert "Traceback" not in process.log


# -- openai -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def openai(server):
    with pytest.importorskip("openai").OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_models(openai):
    assert [model.id for model in openai.models.list()] == [NAME]
    assert openai.models.retrieve(NAME).object == "model"


def test_openai_chat(openai):
    options = {"model": NAME, "messages": SAY, "temperature": 0, "max_completion_tokens": 12}
    whole = openai.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert whole.usage.completion_tokens == 12 == len(choice.logprobs.content)
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    chunks = list(openai.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == choice.message.content
    usage = chunks[-1].usage
    assert chunks[-1].choices == []
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 12)
    assert chunks[-2].choices[0].finish_reason == "length"


def test_openai_completions(openai):
    options = {"model": NAME, "temperature": 0, "max_tokens": 6}
    whole = openai.completions.create(prompt=["The cat", "A file"], n=2, **options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text == whole.choices[1].text, "greedy"
    pieces = [chunk.choices[0].text for chunk in openai.completions.create(prompt="The cat", stream=True, **options)]
    assert "".join(pieces) == whole.choices[0].text
    echo = openai.completions.create(model=NAME, prompt="The cat", max_tokens=0, echo=True, logprobs=1).choices[0]
    assert echo.text == "The cat" == "".join(echo.logprobs.tokens) and echo.logprobs.token_logprobs[0] is None


def test_openai_errors(openai):
    errors = pytest.importorskip("openai")
    with pytest.raises(errors.BadRequestError) as caught:
        openai.chat.completions.create(model=NAME, messages=SAY, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(errors.NotFoundError, match="gpt-4o"):
        openai.chat.completions.create(model="gpt-4o", messages=SAY)


def test_openai_many_at_once_some_cancelled(server):
    module = pytest.importorskip("openai")

    async def one(client, number):
        """Why the completion ended; None for one that is left."""
        stream = await client.chat.completions.create(
            model=NAME, messages=SAY, max_tokens=20, seed=number, stream=True, extra_body={"ignore_eos": True}
        )
        async for chunk in stream:
            reason = chunk.choices[0].finish_reason
            if number % 2:
                await stream.close()
                break
        return reason

    async def all_of_them():
        async with module.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(12)))

    assert asyncio.run(all_of_them()) == ["length", None] * 6


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_openai_tools(openai, choice):
    options = {
        "model": NAME,
        "messages": SAY,
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "seed": 1,
    }
    (answer,) = openai.chat.completions.create(**options).choices
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (call,) = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather" and arguments["city"] in ("Paris", "Rome") and 1 <= arguments["days"] <= 9
    with openai.chat.completions.stream(**options) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and json.loads(done[0].arguments) == arguments, "the same seed"
    conversation = [*SAY, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    openai.chat.completions.create(**{**options, "messages": conversation, "tool_choice": "auto", "max_tokens": 3})


def test_openai_structured_output(openai):
    pydantic = pytest.importorskip("pydantic")

    class Colour(str, Enum):
        red = "red"
        blue = "blue"

    class Answer(pydantic.BaseModel):
        colour: Colour
        numbers: list[Colour] = pydantic.Field(max_length=2)
        is_true: bool

    options = {"model": NAME, "max_tokens": 600, "seed": 1}
    parsed = openai.chat.completions.parse(messages=SAY, response_format=Answer, **options).choices[0].message.parsed
    assert isinstance(parsed, Answer)
    tools = [pytest.importorskip("openai").pydantic_function_tool(Answer)]
    options |= {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    answer = openai.chat.completions.parse(messages=SAY, **options).choices[0]
    assert isinstance(answer.message.tool_calls[0].function.parsed_arguments, Answer)
    response = openai.responses.parse(model=NAME, input="Hi", text_format=Answer, max_output_tokens=600)
    assert isinstance(response.output_parsed, Answer)


def test_openai_responses(openai):
    options = {"model": NAME, "input": "Say something.", "temperature": 0, "max_output_tokens": 8}
    whole = openai.responses.create(**options)
    assert whole.output_text and whole.usage.output_tokens == 8 and whole.status == "incomplete"
    events = list(openai.responses.create(**options, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    called = openai.responses.create(
        model=NAME, input="Hi", tools=[tool], tool_choice="required", parallel_tool_calls=False, max_output_tokens=200
    )
    assert json.loads(called.output[-1].arguments)["city"] in ("Paris", "Rome")


# -- anthropic --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def anthropic(server):
    module = pytest.importorskip("anthropic")
    with module.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_anthropic_messages(anthropic):
    options = {"model": "claude-any", "max_tokens": 8, "messages": SAY, "extra_body": {"temperature": 0}}
    whole = anthropic.messages.create(**options, system="Be brief.")
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 8 and whole.content[0].text
    with anthropic.messages.stream(**options, system="Be brief.") as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage.output_tokens == 8


def test_anthropic_models(anthropic):
    (model,) = anthropic.models.list()
    assert model.type == "model" and model.display_name == model.id and model.created_at.year >= 2026
    assert anthropic.models.retrieve(model.id) == model


def test_anthropic_tools(anthropic):
    tool = {"name": "weather", "description": "The weather", "input_schema": WEATHER}
    options = {
        "model": "claude-any",
        "max_tokens": 200,
        "messages": SAY,
        "tools": [tool],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    whole = anthropic.messages.create(**options)
    assert whole.stop_reason == "tool_use" and whole.content[-1].input["city"] in ("Paris", "Rome")
    with anthropic.messages.stream(**options) as stream:
        assert stream.get_final_message().content[-1].input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": whole.content[-1].id, "content": "sunny"}
    conversation = [*SAY, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    anthropic.messages.create(**{**options, "messages": conversation, "tool_choice": {"type": "auto"}, "max_tokens": 3})


def test_anthropic_errors(anthropic):
    with pytest.raises(pytest.importorskip("anthropic").BadRequestError, match="max_tokens"):
        anthropic.messages.create(model="claude-any", max_tokens=0, messages=SAY)


# -- LangChain --------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # importing it takes seconds
def test_langchain(server):
    chat = pytest.importorskip("langchain_openai").ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=NAME, temperature=0, max_tokens=400, max_retries=0
    )
    whole = chat.invoke("Say something.", max_tokens=8)
    assert whole.content and whole.usage_metadata["output_tokens"] == 8
    pieces = list(chat.stream("Say something.", max_tokens=8))
    assert "".join(piece.content for piece in pieces) == whole.content
    assert [answer.content for answer in chat.batch(["Say something."] * 3, max_tokens=8)] == [whole.content] * 3
    tool = {"name": "weather", "description": "The weather", "parameters": WEATHER}
    called = chat.bind_tools([tool], tool_choice="any", parallel_tool_calls=False).invoke("Hi")
    assert called.tool_calls[0]["args"]["city"] in ("Paris", "Rome")
    for method in ("function_calling", "json_schema"):
        schema = {"title": "weather", "description": "The weather", **WEATHER}
        assert chat.with_structured_output(schema, method=method).invoke("Hi")["days"] in range(1, 10)
    with pytest.raises(importlib.import_module("langchain_core.exceptions").ContextOverflowError):
        chat.invoke("terminal " * 2000)


# -- lm-eval ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def lm_eval(server, tmp_path):
    """Run a task of lm-eval against the server."""
    with lm_eval_kit.offline(tmp_path):
        yield lambda config, *model, **options: lm_eval_kit.evaluate(tmp_path, server.url, config, *model, **options)


@pytest.mark.slow
def test_lm_eval_scores_as_the_model_does(lm_eval):
    """Log-likelihoods of continuations, with the server's own tokenizer, equal those of the model in this process."""
    from bminf_lite import load

    samples = lm_eval(MULTIPLE_CHOICE)
    with load(DEMO, device="cpu") as model:
        for question, sample in zip(QUESTIONS, samples, strict=True):
            for choice, (response,) in zip(question["choices"], sample["resps"], strict=True):
                context = model.encode(question["question"].rstrip(), add_special_tokens=False).token_ids
                whole = model.encode(f"{question['question']} {choice}", add_special_tokens=False).token_ids
                scores, is_greedy = logprobs(model.logits(whole), whole)
                assert float(response[0]) == pytest.approx(scores[len(context) :].sum(), abs=TOLERANCE)
                assert (str(response[1]) == "True") == is_greedy[len(context) :].all()


@pytest.mark.slow
def test_lm_eval_rolling_perplexity_is_that_of_the_model(lm_eval):
    from bminf_lite import load

    config = {
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{question}}",
        "doc_to_text": "",
        "metric_list": [{"metric": "word_perplexity"}],
    }
    samples = lm_eval(config)
    with load(DEMO, device="cpu") as model:
        for question, sample in zip(QUESTIONS, samples, strict=True):
            ids = model.encode(question["question"], add_special_tokens=False).token_ids
            whole = [model.tokenizer.bos_id, *ids]
            scores, _ = logprobs(model.logits(whole), whole)
            assert float(sample["resps"][0][0]) == pytest.approx(scores[1:].sum(), abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "path", "options"),
    [
        ("local-completions", "/v1/completions", {}),
        ("local-chat-completions", "/v1/chat/completions", {"apply_chat_template": True}),
    ],
)
def test_lm_eval_generates(lm_eval, model, path, options):
    config = {
        "output_type": "generate_until",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["\n\n", " the"], "max_gen_toks": 12},
    }
    for sample in lm_eval(config, model, path, **options):
        assert isinstance(sample["resps"][0][0], str) and " the" not in sample["resps"][0][0]


# -- curl -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server):
    def curl(path, *arguments):
        return subprocess.run(
            ["curl", "--silent", "--show-error", "--fail", f"{server.url}{path}", *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        ).stdout

    def post(path, body):
        return curl(path, "-H", "Content-Type: application/json", "-d", json.dumps(body))

    assert json.loads(curl("/v1/models"))["data"][0]["id"] == NAME
    answer = json.loads(
        post("/v1/chat/completions", {"model": NAME, "messages": SAY, "max_tokens": 4, "ignore_eos": True})
    )
    assert answer["usage"]["completion_tokens"] == 4
    stream = post("/v1/completions", {"model": NAME, "prompt": "The", "max_tokens": 4, "stream": True})
    assert stream.startswith("data: {") and stream.rstrip().endswith("data: [DONE]")
    assert json.loads(curl("/health"))


GUIDE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (curl .*127\.0\.0\.1:8000.*(?:(?<=\\)\n.*)*)", GUIDE, re.MULTILINE)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", COMMANDS)
def test_curl_as_in_the_guide(server, command):
    command = command.replace("http://127.0.0.1:8000", server.url).replace("curl ", "curl --fail -sS ")
    answer = subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True, timeout=300).stdout
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line not in ("", "data: [DONE]")]
    assert ("data: [DONE]" in answer) == ('"stream": true' in command)
    assert events and all("choices" in json.loads(event) for event in events), answer


def test_the_seed_of_the_command_is_that_of_requests(server):
    body = {"prompt": "The", "max_tokens": 8, "temperature": 1}
    url = f"{server.url}/v1/completions"
    first, again = (httpx.post(url, json=body, timeout=300).json()["choices"] for _ in range(2))
    assert first == again


# -- clients that leave -----------------------------------------------------------------------------------------------


def test_a_client_that_leaves_within_its_request(server):
    """No error of the server's: its log stays as it was."""
    before = server.log
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
        connection.sendall(f'{head}Content-Length: 100\r\n\r\n{{"prompt"'.encode())
        time.sleep(0.2)
    time.sleep(0.3)
    assert httpx.get(f"{server.url}/health", timeout=300).status_code == 200 and server.log == before


# -- embeddings -------------------------------------------------------------------------------------------------------

SENTENCES = ["a cat sits on the mat", "the dog runs", "a red cat"]


@pytest.fixture(scope="module")
def embedding_server(tmp_path_factory):
    folder = write_encoder(tmp_path_factory.mktemp("embedder") / "model")
    process = ServerProcess(folder)
    with load(folder, device="cpu") as model:
        process.expected = model.embed(SENTENCES)
    yield process
    assert process.stop() == 0, process.log
    assert "Traceback" not in process.log


def test_openai_embeddings(embedding_server):
    url = f"{embedding_server.url}/v1"
    with pytest.importorskip("openai").OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for encoding in ({}, {"encoding_format": "float"}):  # by default the client asks for base64
            found = client.embeddings.create(model=NAME, input=SENTENCES, **encoding)
            rows = [item.embedding for item in found.data]
            np.testing.assert_allclose(rows, embedding_server.expected, atol=1e-6)
            assert found.usage.prompt_tokens == found.usage.total_tokens > 10
        short = client.embeddings.create(model=NAME, input=SENTENCES[0], dimensions=8)
        assert len(short.data[0].embedding) == 8
        with pytest.raises(importlib.import_module("openai").BadRequestError, match="dimensions"):
            client.embeddings.create(model=NAME, input="a", dimensions=1000)


def test_langchain_embeddings(embedding_server):
    langchain = pytest.importorskip("langchain_openai")
    options = {"model": NAME, "base_url": f"{embedding_server.url}/v1", "api_key": "none"}
    embeddings = langchain.OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
    np.testing.assert_allclose(embeddings.embed_documents(SENTENCES), embedding_server.expected, atol=1e-6)
    np.testing.assert_allclose(embeddings.embed_query(SENTENCES[1]), embedding_server.expected[1], atol=1e-6)
    asked = asyncio.run(embeddings.aembed_documents(SENTENCES))
    np.testing.assert_allclose(asked, embedding_server.expected, atol=1e-6)


def test_clients_of_the_guide_of_embeddings(embedding_server, capsys):
    for module in ("openai", "langchain_openai", "llama_index.embeddings.openai"):
        pytest.importorskip(module)
    guide = Path(__file__).parents[2] / "docs" / "guides" / "embeddings.md"
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    served = [block for block in blocks if "127.0.0.1:8000" in block]
    for block in served:
        code = block.replace("http://127.0.0.1:8000", embedding_server.url).replace("minilm-int8", NAME)
        exec(compile(code, str(guide), "exec"), {})
    assert len(served) == 2 and [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["32"] * 3


def test_llama_index_embeddings(embedding_server):
    llama_index = pytest.importorskip("llama_index.embeddings.openai")
    url = f"{embedding_server.url}/v1"
    model = llama_index.OpenAIEmbedding(model_name=NAME, api_base=url, api_key="none", max_retries=0)
    np.testing.assert_allclose(model.get_text_embedding_batch(SENTENCES), embedding_server.expected, atol=1e-6)
    np.testing.assert_allclose(model.get_query_embedding(SENTENCES[2]), embedding_server.expected[2], atol=1e-6)
