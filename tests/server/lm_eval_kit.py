"""lm-eval against a server, with a task of a few questions, offline."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from server_process import NAME

QUESTIONS = [
    {"question": "The opposite of hot is", "choices": ["cold", "a terminal", "the file system"], "answer": 0},
    {"question": "Programs are run in a", "choices": ["river", "shell window", "cloud"], "answer": 1},
    {"question": "If the file is not", "choices": ["empty", "found", "a regular file"], "answer": 2},
    {"question": "é 🙂 \n", "choices": ["yes", "no é", "maybe so it is"], "answer": 2},
]
MULTIPLE_CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}
"""A task that scores each choice."""
TOLERANCE = 0.02
"""The tolerance of a sum of log-probabilities: the server computes several prompts in a step, the model here one.

BLAS sums by shape, and a last bit can change an int8 code. A token at a wrong place makes a difference of over 1.
"""


@contextmanager
def offline(folder: Path) -> Iterator[None]:
    """Nothing is fetched, and what is cached lies in a folder."""
    names = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OPENAI_API_KEY": "none"}
    with mock.patch.dict(os.environ, names):
        yield


def evaluate(
    folder: Path,
    url: str,
    config: dict[str, Any],
    model: str = "local-completions",
    path: str = "/v1/completions",
    **options: Any,
) -> list[Any]:
    """The samples of a task over :data:`QUESTIONS`, which is run against the server at ``url``; within ``offline``."""
    lm_eval = pytest.importorskip("lm_eval")
    tasks = importlib.import_module("lm_eval.tasks").TaskManager(include_defaults=False)  # its own are 14,000 files
    questions = folder / "questions.jsonl"
    questions.write_text("\n".join(json.dumps(question) for question in QUESTIONS))
    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        **config,
    }
    found = lm_eval.simple_evaluate(
        model=model,
        model_args={"model": NAME, "base_url": f"{url}{path}", "max_length": 1024, "num_concurrent": 2},
        tasks=[task],
        log_samples=True,
        bootstrap_iters=0,
        task_manager=tasks,
        **options,
    )
    samples = sorted(found["samples"]["local"], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(QUESTIONS)
    return samples


def logprobs(logits: Any, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The log-probability of each token after those before it, float64 ``[tokens]``, and whether it is the likeliest.

    For the first token they are 0 and true. ``logits`` is fp32 ``[tokens, vocab]``.
    """
    logits = np.asarray(logits, np.float64)
    logits -= logits.max(1, keepdims=True)
    scores = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    found = scores[np.arange(len(token_ids) - 1), token_ids[1:]]
    return np.concatenate([[0.0], found]), np.concatenate([[True], found == scores[:-1].max(1)])
