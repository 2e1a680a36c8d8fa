"""Reranking by a model that generates: how much likelier it finds "yes" than "no", asked about a query and a text.

The words are those of Qwen3-Reranker (https://arxiv.org/abs/2506.05176), in the form of the model's chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..engine.core import Engine
from ..engine.request import Request
from ..errors import UsageError
from ..request_builder import build_logits_request
from ..text.prompts import PromptEncoder
from .settings import sigmoid

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
YES, NO = "yes", "no"


@dataclass(frozen=True)
class Questions:
    """Asks about a query and a text, in tokens. ``prompts`` has the model's tokenizer and chat template."""

    prompts: PromptEncoder

    @property
    def answers(self) -> list[int]:
        """The tokens of "yes" and "no". Raises ``UsageError`` for a model whose tokens lack them."""
        found = [self.prompts.tokenizer.piece_to_id(word) for word in (YES, NO)]
        if None in found:
            raise UsageError(f"the model's vocabulary has no token for {YES!r} or {NO!r}, by which texts are ranked")
        return [token for token in found if token is not None]

    def prompt(self, query: str, text: str, instruction: str | None = None, truncate: bool = True) -> Sequence[int]:
        """The tokens of the question about a text, whose end is cut off if it must be, and may be.

        Raises ``UsageError`` for a model without a chat template, and for a question that does not fit the context.
        """
        tokenizer, longest = self.prompts.tokenizer, self.prompts.limits.context_length - 1
        ids = self._question(query, text, instruction or INSTRUCTION)
        while truncate and text and (excess := len(ids) - longest) > 0:
            own = tokenizer.encode(text, add_special_tokens=False)
            kept = tokenizer.decode(own[: max(len(own) - excess, 0)]).rstrip("\ufffd")  # a part of a character
            text = kept[: len(text) - 1]
            ids = self._question(query, text, instruction or INSTRUCTION)
        return self.prompts.encode(ids).token_ids

    def _question(self, query: str, text: str, instruction: str) -> list[int]:
        question = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}"
        messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": question}]
        rendered = self.prompts.render(messages, enable_thinking=False)
        return self.prompts.tokenizer.encode(rendered, add_special_tokens=False)


@dataclass(eq=False)
class Judgement:
    """Questions to the engine, ``requests``, and the ``logits`` of the answers to each, fp32 ``[answers]``."""

    requests: list[Request] = field(default_factory=list)
    logits: dict[int, np.ndarray] = field(default_factory=dict)
    problems: list[BaseException] = field(default_factory=list)

    @property
    def error(self) -> BaseException | None:
        """The first error; None if all went well."""
        return next((e for e in (*(request.error for request in self.requests), *self.problems) if e is not None), None)

    @property
    def rows(self) -> np.ndarray:
        """The logits of all questions, fp32 ``[n, answers]``."""
        return np.stack([self.logits[number] for number in range(len(self.requests))])


@dataclass(frozen=True)
class Judge:
    """Has the engine of a model on ``ops`` compute the logits of answers behind questions."""

    engine: Engine
    ops: Backend

    def start(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[int], on_end: Callable[[Judgement], None]
    ) -> Judgement:
        """Let questions join the engine's requests, all or none; they share the steps and the beginnings of prompts.

        ``on_end`` is called in the engine's thread when all have ended. Raises what :meth:`.Engine.submit` does.
        """
        found, tokens, left = Judgement(), list(answers), len(prompts)

        def taker(number: int) -> Callable[[int, Any], None]:
            def take(position: int, logits: Any) -> None:
                try:
                    found.logits[number] = np.array(self.ops.host(logits)[-1][tokens], np.float32)
                except BaseException as error:
                    found.problems.append(error)

            return take

        def on_update(request: Request) -> None:
            nonlocal left
            if request.finish_reason is not None:
                left -= 1
                if left == 0:
                    on_end(found)

        found.requests += [
            build_logits_request(ids, (), taker(number), on_update, start=len(ids) - 1)
            for number, ids in enumerate(prompts)
        ]
        self.engine.submit(found.requests)
        return found


@dataclass(frozen=True)
class YesNoReranker:
    """Asks a model that generates about each text, all texts at once."""

    questions: Questions
    judge: Judge

    def scores(
        self, query: str, texts: Sequence[str], instruction: str | None = None, truncate: bool = True
    ) -> np.ndarray:
        """``p(yes) / (p(yes) + p(no))`` of each text, fp32 ``[n]``. With ``truncate`` texts are cut to fit the context.

        Raises ``UsageError`` as :class:`Questions` does.
        """
        answers = self.questions.answers
        prompts = [self.questions.prompt(query, text, instruction, truncate) for text in texts]
        if not prompts:
            return np.empty(0, np.float32)
        ended: SimpleQueue[Judgement] = SimpleQueue()
        judgement = self.judge.start(prompts, answers, ended.put)
        try:
            ended.get()
        finally:
            self.judge.engine.cancel(judgement.requests)
        if judgement.error is not None:
            raise judgement.error
        return relevances(judgement.rows)


def relevances(rows: np.ndarray) -> np.ndarray:
    """The relevance of each text, fp32 ``[n]``, of the logits of "yes" and "no", fp32 ``[n, 2]``."""
    return sigmoid(rows[:, 0] - rows[:, 1])
