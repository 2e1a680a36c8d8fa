"""``/v1/embeddings``, ``/v1/rerank``, ``/score`` and ``/classify``, over the ASGI application and over HTTP."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tiny_checkpoint
from adapter_files import random_adapter
from embedding_kit import write_encoder, write_modules

import bminf_lite
from bminf_lite.server import application

TEXTS = ["a cat sits on the mat", "the dog runs", "now"]
PROMPTS = {"prompts": {"query": "query : ", "document": "passage : "}}


class Served:
    """A model behind its application, and requests to it."""

    def __init__(self, folder: Path, **options: Any):
        self.model = bminf_lite.load(folder, device="cpu", **options)
        self.app = application(self.model, served_model_name="mine")

    def request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path, json=body)

        return asyncio.run(run())

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.request("POST", path, body)

    @property
    def capabilities(self) -> set[str]:
        """What ``/v1/models`` says that the model does."""
        found = self.request("GET", "/v1/models").json()["data"][0]["capabilities"]
        return {name for name, can in found.items() if can}

    def json(self, path: str, body: Any) -> Any:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def error(self, path: str, body: Any) -> str:
        response = self.post(path, body)
        assert response.status_code in (400, 404), response.text
        return response.json()["error"]["message"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_encoder(tmp_path_factory.mktemp("served") / "embedder")
    write_modules(folder, {"pooling_mode_mean_tokens": True}, {}, **PROMPTS)
    return folder


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[Served]:
    served = Served(folder)
    yield served
    served.model.close()


def served_classifier(folder: Path, kind: str, labels: int) -> Served:
    names = {str(i): f"L{i}" for i in range(labels)}
    return Served(write_encoder(folder, architectures=[f"BertFor{kind}Classification"], id2label=names))


def test_vectors_as_numbers_and_in_base64(embedder: Served):
    expected = embedder.model.embed(TEXTS)
    found = embedder.json("/v1/embeddings", {"model": "mine", "input": TEXTS})
    assert found["object"] == "list" and found["model"] == "mine"
    assert [item["index"] for item in found["data"]] == [0, 1, 2]
    np.testing.assert_allclose([item["embedding"] for item in found["data"]], expected, atol=1e-6)
    assert found["usage"] == {"prompt_tokens": 8 + 5 + 3, "total_tokens": 16}
    found = embedder.json("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"})
    row = np.frombuffer(base64.b64decode(found["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(row, expected[0], atol=1e-6)


def test_token_ids_dimensions_and_prompts(embedder: Served):
    assert embedder.capabilities == {"embeddings", "rerank"}
    ids = [embedder.model.tokenizer.encode(text) for text in TEXTS]
    for given in (ids, ids[0]):
        rows = [item["embedding"] for item in embedder.json("/v1/embeddings", {"input": given})["data"]]
        np.testing.assert_allclose(rows, embedder.model.embed(TEXTS)[: len(rows)], atol=1e-6)
    body = {"input": TEXTS, "dimensions": 8, "prompt_name": "query"}
    rows = [item["embedding"] for item in embedder.json("/v1/embeddings", body)["data"]]
    np.testing.assert_allclose(rows, embedder.model.embed(TEXTS, prompt_name="query", dimensions=8), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": []}, "input: must be a text"),
        ({"input": TEXTS, "dimensions": 33}, "dimensions is 33, but must be 1 to 32"),
        ({"input": [[99]]}, "text 0: token 0 is 99"),
        ({"input": "cat " * 40, "truncate": False}, "it has 42 tokens, but the model reads 24"),
        ({"input": TEXTS, "prompt_name": "other"}, "the model's prompts are"),
        ({"input": ["a"] * 2049}, "2,048 at most"),
        ({"input": TEXTS, "model": "yours"}, "is not served here"),
        ({"input": TEXTS, "encoding_format": "int8"}, "encoding_format"),
        ({"input": TEXTS, "truncate_prompt_tokens": 5}, "truncate_prompt_tokens: is not supported: truncate says"),
        ({"input": TEXTS, "add_special_tokens": False}, "add_special_tokens: is not supported: give /v1/embeddings"),
        ({"input": TEXTS, "embed_dtype": "float16"}, "embed_dtype: is not supported"),
    ],
)
def test_wrong_requests_name_the_field(embedder: Served, body: dict[str, Any], words: str):
    assert words in embedder.error("/v1/embeddings", body)


def test_fields_that_change_nothing_are_taken(embedder: Served):
    neutral = {"truncate_prompt_tokens": -1, "add_special_tokens": True, "endianness": "native", "user": "me"}
    assert embedder.json("/v1/embeddings", {"input": TEXTS} | neutral) == embedder.json(
        "/v1/embeddings", {"input": TEXTS}
    )
    for path, body in (
        ("/v1/rerank", {"query": "a dog", "documents": TEXTS}),
        ("/score", {"text_1": "a dog", "text_2": TEXTS}),
        ("/classify", {"input": TEXTS}),
    ):
        assert "use_activation: is not supported" in embedder.error(path, body | {"use_activation": False})


def test_the_length_of_an_embedder_is_what_it_reads_of_a_text(tmp_path: Path, embedder: Served):
    assert embedder.json("/tokenize", {"prompt": "a dog"})["max_model_len"] == 24
    folder = write_encoder(tmp_path / "model")
    write_modules(folder, {"pooling_mode_mean_tokens": True})
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    served = Served(folder)
    assert served.request("GET", "/v1/models").json()["data"][0]["max_model_len"] == 9
    served.model.close()


def test_each_text_leaves_out_its_own_prompt(tmp_path: Path):
    folder = write_encoder(tmp_path / "model")
    prompts = {"query": "the red query on the mat : ", "document": "passage : "}
    write_modules(folder, {"pooling_mode_mean_tokens": True, "include_prompt": False}, {}, prompts=prompts)
    served = Served(folder)
    expected = {hit.index: hit.score for hit in served.model.rerank("a dog", TEXTS)}
    found = served.json("/v1/rerank", {"query": "a dog", "documents": TEXTS})["results"]
    assert {hit["index"]: hit["relevance_score"] for hit in found} == pytest.approx(expected, abs=1e-5)
    served.model.close()


def test_what_is_read_with_each_text_counts(tmp_path: Path, embedder: Served):
    prompt = "a" * (16 << 10)
    assert len(embedder.json("/v1/embeddings", {"input": ["a"] * 4, "prompt": prompt})["data"]) == 4
    body = {"input": ["a"] * 2000, "prompt": prompt}
    assert "2,000 texts have 32,770,000 characters" in embedder.error("/v1/embeddings", body)
    served = served_classifier(tmp_path / "model", "Sequence", 1)
    body = {"query": prompt, "documents": ["a"] * 2000}
    assert "(the limit body)" in served.error("/v1/rerank", body)
    served.model.close()


def test_an_embedder_ranks_and_does_not_generate(embedder: Served):
    found = embedder.json("/v1/rerank", {"query": "a dog", "documents": TEXTS, "top_n": 2})
    expected = embedder.model.rerank("a dog", TEXTS, top_n=2)
    assert [hit["index"] for hit in found["results"]] == [hit.index for hit in expected]
    assert found["results"][0]["document"] == {"text": expected[0].text}
    np.testing.assert_allclose(found["results"][0]["relevance_score"], expected[0].score, atol=1e-5)
    scores = embedder.json("/score", {"text_1": "a dog", "text_2": TEXTS})["data"]
    assert {item["index"]: round(item["score"], 4) for item in scores}[expected[0].index] == round(expected[0].score, 4)
    assert len(embedder.json("/v1/rerank", {"query": "a dog", "documents": ["a"] * 2048})["results"]) == 2048
    body = {"query": "a dog", "documents": ["a"] * 2049}
    assert "documents has 2,049 texts, but may have 2,048" in embedder.error("/v1/rerank", body)
    assert "makes vectors of texts" in embedder.error("/v1/completions", {"prompt": "a"})
    messages = [{"role": "user", "content": "a"}]
    assert "makes vectors of texts" in embedder.error("/v1/chat/completions", {"messages": messages})
    assert "classifies" in embedder.error("/classify", {"input": TEXTS})
    stats = embedder.model.stats()
    assert stats.texts > 0 and stats.waiting == 0


def test_requests_at_once_share_the_engine(embedder: Served):
    async def run() -> list[Any]:
        transport = httpx.ASGITransport(embedder.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            posts = (client.post("/v1/embeddings", json={"input": text}) for text in TEXTS * 8)
            return [response.json()["data"][0]["embedding"] for response in await asyncio.gather(*posts)]

    np.testing.assert_allclose(asyncio.run(run()), np.tile(embedder.model.embed(TEXTS), (8, 1)), atol=1e-6)


def test_a_reranker(tmp_path: Path):
    served = served_classifier(tmp_path / "model", "Sequence", 1)
    expected = served.model.rerank("a dog", TEXTS)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        body = {"query": "a dog", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]], "return_documents": False}
        found = served.json(path, body)["results"]
        assert [hit["index"] for hit in found] == [hit.index for hit in expected] and "document" not in found[0]
        np.testing.assert_allclose([hit["relevance_score"] for hit in found], [h.score for h in expected], atol=1e-5)
    by_index = {hit.index: hit.score for hit in expected}
    found = served.json("/v1/score", {"text_1": ["a dog"] * 3, "text_2": TEXTS})
    np.testing.assert_allclose([item["score"] for item in found["data"]], [by_index[i] for i in range(3)], atol=1e-5)
    assert "give one, or as many" in served.error("/score", {"text_1": TEXTS[:2], "text_2": TEXTS})
    assert "it has no embeddings" in served.error("/v1/embeddings", {"input": "a"})
    served.model.close()


def test_a_classifier(tmp_path: Path):
    served = served_classifier(tmp_path / "model", "Sequence", 3)
    expected = served.model.classify(TEXTS)
    found = served.json("/classify", {"input": TEXTS})["data"]
    assert [item["label"] for item in found] == [one.label for one in expected]
    np.testing.assert_allclose(found[0]["probs"], list(expected[0].scores.values()), atol=1e-6)
    assert found[0]["num_classes"] == 3
    steps = served.model.stats().texts
    assert "3 labels" in served.error("/v1/rerank", {"query": "a", "documents": TEXTS})
    assert served.model.stats().texts == steps
    served.model.close()


def test_a_model_that_labels_tokens(tmp_path: Path):
    served = served_classifier(tmp_path / "model", "Token", 1)
    assert "labels tokens" in served.error("/v1/rerank", {"query": "a", "documents": TEXTS})
    assert "no head that classifies texts" in served.error("/classify", {"input": TEXTS})
    served.model.close()


def test_a_model_that_generates_makes_no_vectors(tmp_path: Path):
    served = Served(tiny_checkpoint.write(tmp_path / "model"))
    assert served.capabilities <= {"chat"}
    no_answers = "the model's vocabulary has no token for 'yes' or 'no'"
    assert no_answers in served.error("/v1/rerank", {"query": "a", "documents": ["b"]})
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/classify", {"input": "a"})):
        assert "this model generates text" in served.error(path, body)
    assert served.json("/v1/completions", {"prompt": "a", "max_tokens": 2})["usage"]["completion_tokens"] == 2
    served.model.close()


def test_one_server_generates_and_embeds(tmp_path: Path):
    source = tiny_checkpoint.write(tmp_path / "model")
    adapters = {"french": random_adapter(tmp_path / "french", source)}
    served = Served(source, embeddings=True, adapters=adapters)
    assert "adapters make no vectors" in served.error("/v1/embeddings", {"input": "a cat", "model": "french"})
    expected = served.model.embed("a cat")
    found = served.json("/v1/embeddings", {"input": "a cat"})
    np.testing.assert_allclose(found["data"][0]["embedding"], expected, atol=1e-6)
    assert served.json("/v1/completions", {"prompt": "a", "max_tokens": 2})["usage"]["completion_tokens"] == 2

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            completion = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 40})
            vectors = (client.post("/v1/embeddings", json={"input": "a cat"}) for _ in range(6))
            return await asyncio.gather(completion, *vectors)

    completion, *vectors = asyncio.run(run())
    assert completion.status_code == 200
    for response in vectors:
        np.testing.assert_allclose(response.json()["data"][0]["embedding"], expected, atol=1e-6)
    served.model.close()


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that generates, whose tokens have "yes" and "no"."""
    folder = tiny_checkpoint.write(tmp_path_factory.mktemp("judge") / "model", max_position_embeddings=1024)
    tokenizer = tiny_checkpoint.byte_tokenizer()
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    served = Served(folder, embeddings=True)
    yield served
    served.model.close()


def test_a_model_that_generates_ranks_by_yes_and_no(judge: Served):
    assert judge.capabilities == {"chat", "rerank", "embeddings"}
    for instruction in (None, "find cats"):
        expected = judge.model.rerank("the cat", TEXTS, instruction=instruction)
        body = {"query": "the cat", "documents": TEXTS, "instruction": instruction}
        found = judge.json("/v1/rerank", body)
        assert [hit["index"] for hit in found["results"]] == [hit.index for hit in expected]
        scores = [hit["relevance_score"] for hit in found["results"]]
        np.testing.assert_allclose(scores, [hit.score for hit in expected], atol=1e-5)
        assert found["usage"]["total_tokens"] > 3 * 50
        by_index = {hit.index: hit.score for hit in expected}
        found = judge.json("/score", {"text_1": "the cat", "text_2": TEXTS, "instruction": instruction})
        np.testing.assert_allclose(
            [item["score"] for item in found["data"]], [by_index[i] for i in range(3)], atol=1e-5
        )
    long = {"query": "the cat", "documents": ["a cat sits on the mat " * 60]}
    assert 0 < judge.json("/v1/rerank", long)["results"][0]["relevance_score"] < 1
    assert "documents: the prompt is too long" in judge.error("/v1/rerank", {**long, "truncate": False})
    assert "may have 2,048 at most" in judge.error("/v1/rerank", {"query": "a", "documents": ["a"] * 2049})
    assert judge.model.stats().running == judge.model.stats().waiting == 0


def test_an_instruction_is_for_models_that_generate(embedder: Served):
    body = {"query": "a dog", "documents": TEXTS, "instruction": "find dogs"}
    assert "instruction is for models that generate text" in embedder.error("/v1/rerank", body)


def test_questions_of_a_client_that_has_gone_are_cancelled(judge: Served):
    """The engine ends the requests, and answers others as before."""

    async def run() -> Any:
        transport = httpx.ASGITransport(judge.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"query": "the cat", "documents": TEXTS * 200}
            gone = asyncio.create_task(client.post("/v1/rerank", json=body))
            while not judge.model.stats().waiting + judge.model.stats().running:
                await asyncio.sleep(0.001)
            gone.cancel()
            return await client.post("/v1/rerank", json={"query": "the cat", "documents": TEXTS})

    assert len(asyncio.run(run()).json()["results"]) == 3
    while judge.model.stats().running:
        time.sleep(0.001)
