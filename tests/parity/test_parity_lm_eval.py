"""What lm-eval measures over HTTP is what transformers computes with the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from parity_kit import reopened, torch

pytest.importorskip("starlette", reason="the server needs the extra serve")
pytest.importorskip("lm_eval", reason="needs the extra clients")

import lm_eval_kit
import tool_templates
import transformers
from server_process import ServerProcess, demo_folder

pytestmark = pytest.mark.parity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled model, which is fp32."""
    return demo_folder(tmp_path / "model", tool_templates.NOT_THINKING)


@pytest.fixture
def server(folder: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(folder)
    yield process
    assert process.stop() == 0, process.log


def test_log_likelihoods_of_lm_eval_are_those_of_transformers(folder: Path, server: ServerProcess, tmp_path: Path):
    with lm_eval_kit.offline(tmp_path):
        samples = lm_eval_kit.evaluate(tmp_path, server.url, lm_eval_kit.MULTIPLE_CHOICE)
    hf, tokenizer = reopened(folder), transformers.AutoTokenizer.from_pretrained(folder)
    compared = 0
    for question, sample in zip(lm_eval_kit.QUESTIONS, samples, strict=True):
        context = tokenizer(str(question["question"]).rstrip(), add_special_tokens=False).input_ids
        for choice, (response,) in zip(question["choices"], sample["resps"], strict=True):
            whole = tokenizer(f"{question['question']} {choice}", add_special_tokens=False).input_ids
            with torch.no_grad():
                logits = hf(torch.tensor([whole])).logits[0].numpy()
            scores, is_greedy = lm_eval_kit.logprobs(logits, whole)
            expected = scores[len(context) :].sum()
            assert float(response[0]) == pytest.approx(expected, abs=lm_eval_kit.TOLERANCE), (question, choice)
            assert (str(response[1]) == "True") == is_greedy[len(context) :].all()
            compared += 1
    assert compared == 12
