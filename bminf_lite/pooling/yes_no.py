"""Reranking by a model that generates: how much likelier it finds "yes" than "no", asked about a query and a text.

The words are those of Qwen3-Reranker (https://arxiv.org/abs/2506.05176), in the form of the model's chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
class YesNoReranker:
    """Asks a model that generates about each text, all texts at once: they share the question's beginning."""

    prompts: PromptEncoder
    engine: Engine
    ops: Backend

    def scores(
        self, query: str, texts: Sequence[str], instruction: str | None = None, truncate: bool = True
    ) -> np.ndarray:
        """``p(yes) / (p(yes) + p(no))`` of each text, fp32 ``[n]``. With ``truncate`` texts are cut to fit the context.

        Raises ``UsageError`` for a model without a chat template, or whose tokens lack the two words, and for a
        question that does not fit the context.
        """
        tokenizer = self.prompts.tokenizer
        answers = [tokenizer.piece_to_id(word) for word in (YES, NO)]
        if None in answers:
            raise UsageError(f"the model's vocabulary has no token for {YES!r} or {NO!r}, by which texts are ranked")
        rows: dict[int, np.ndarray] = {}
        problems: list[BaseException] = []
        ended: SimpleQueue[Request] = SimpleQueue()

        def taker(number: int) -> Callable[[int, Any], None]:
            def take(position: int, logits: Any) -> None:
                try:
                    rows[number] = np.array(self.ops.host(logits)[-1][answers], np.float32)
                except BaseException as error:
                    problems.append(error)

            return take

        prompts = [self._prompt(query, text, instruction or INSTRUCTION, truncate) for text in texts]
        requests = [
            build_logits_request(ids, (), taker(number), ended.put, start=len(ids) - 1)
            for number, ids in enumerate(prompts)
        ]
        try:
            self.engine.submit(requests)
            for _ in requests:
                ended.get()
        finally:
            self.engine.cancel(requests)
        for error in (*(request.error for request in requests), *problems):
            if error is not None:
                raise error
        return sigmoid(np.array([rows[n][0] - rows[n][1] for n in range(len(texts))], np.float32))

    def _prompt(self, query: str, text: str, instruction: str, truncate: bool) -> Sequence[int]:
        """The tokens of the question about a text, whose end is cut off if it must be."""
        tokenizer, longest = self.prompts.tokenizer, self.prompts.limits.context_length - 1
        ids = self._question(query, text, instruction)
        while truncate and text and (excess := len(ids) - longest) > 0:
            own = tokenizer.encode(text, add_special_tokens=False)
            kept = tokenizer.decode(own[: max(len(own) - excess, 0)]).rstrip("\ufffd")  # a part of a character
            text = kept[: len(text) - 1]
            ids = self._question(query, text, instruction)
        return self.prompts.encode(ids).token_ids

    def _question(self, query: str, text: str, instruction: str) -> list[int]:
        question = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}"
        messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": question}]
        rendered = self.prompts.render(messages, enable_thinking=False)
        return self.prompts.tokenizer.encode(rendered, add_special_tokens=False)
