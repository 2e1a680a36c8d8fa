"""What the engine's process does for texts that become vectors: queues them, and finishes what the engine computes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

import numpy as np

from ..engine.pooling import PoolingRequest, PoolingText
from ..errors import UsageError
from ..pooling.pooler import Pooler
from ..pooling.yes_no import Judge, Judgement
from .protocol import Ask, Pool, Pooled, PoolingInfo


class PoolingService:
    """Answers :class:`.protocol.Pool` by a model's ``pooler``, and :class:`.protocol.Ask` by its ``judge``.

    Either may be None, for a model that does not do that. The requests run in the engine's thread.
    """

    def __init__(self, pooler: Pooler | None, judge: Judge | None = None):
        self._optional_pooler = pooler
        self._judge = judge

    @property
    def _pooler(self) -> Pooler:
        if self._optional_pooler is None:
            raise UsageError("this model makes no vectors of texts")
        return self._optional_pooler

    @property
    def info(self) -> PoolingInfo | None:
        """What HTTP code has to know of the model; None for one that makes no vectors of texts."""
        if self._optional_pooler is None:
            return None
        model = self._pooler.model
        settings, scores = model.settings, model.scores
        return PoolingInfo(
            dimensions=model.dimensions,
            longest=model.longest,
            max_length=settings.max_length,
            lower_case=settings.lower_case,
            include_prompt=settings.include_prompt,
            prompts=dict(settings.prompts),
            default_prompt=settings.default_prompt,
            labels=[] if scores is None else list(scores.labels),
            function="" if scores is None else scores.function,
            relevance="" if scores is None else scores.relevance,
            classifies_tokens=model.classifier is not None and not model.has_classes,
        )

    def request(self, message: Pool, send: Callable[[Pooled], None]) -> PoolingRequest:
        """The engine's request for a message; ``send`` is called, in the engine's thread, with the answer."""
        columns = zip_longest(message.texts, message.token_types, message.num_skipped)
        texts = [PoolingText(np.array(ids, np.int32), types, skipped or 0) for ids, types, skipped in columns]

        def on_update(request: PoolingRequest) -> None:
            try:
                answer = self._answer(message, request)
            except Exception as error:  # which must not end the engine's thread
                answer = Pooled(message.id, b"", 0, str(error) or type(error).__name__)
            send(answer)

        classifier = self._pooler.model.classifier
        poolings = self._pooler.model.settings.poolings
        if classifier is not None:
            poolings = () if classifier.pooling is None else (classifier.pooling,)
        return PoolingRequest(texts, poolings, on_update)

    def ask(self, message: Ask, send: Callable[[Pooled], None]) -> Judgement:
        """Let questions join the engine's requests; ``send`` is called as by :meth:`request`.

        Raises ``UsageError``, and ``QueueFull``.
        """
        if self._judge is None:
            raise UsageError("this model generates no text: it answers no questions")

        def on_end(found: Judgement) -> None:
            if found.error is not None:
                send(Pooled(message.id, b"", 0, str(found.error) or type(found.error).__name__))
            elif len(found.logits) == len(found.requests):  # otherwise it was cancelled
                send(Pooled(message.id, found.rows.tobytes(), len(message.answers)))

        return self._judge.start(message.prompts, message.answers, on_end)

    def submit(self, request: PoolingRequest) -> None:
        """Let the texts of a request wait for the engine. Raises ``UsageError``, and ``QueueFull``."""
        self._pooler.submit(request)

    def _answer(self, message: Pool, request: PoolingRequest) -> Pooled:
        if request.error is not None:
            return Pooled(message.id, b"", 0, str(request.error) or type(request.error).__name__)
        model = self._pooler.model
        if model.classifier is None:
            rows = model.settings.finish(np.stack(request.vectors), message.normalize, message.dimensions)
        elif model.has_classes:
            rows = model.classifier(np.stack(request.vectors))
        else:
            rows = model.classifier(np.concatenate(request.vectors))
        return Pooled(message.id, np.ascontiguousarray(rows, np.float32).tobytes(), rows.shape[1])
