"""A model that makes vectors, scores and labels of texts, for the callers of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from ..backend.values import Pooling
from ..engine.pooling import PoolingRequest, PoolingText
from ..errors import QueueFull, UsageError, require_bool, require_whole
from ..models.parts.classifier import Classifier
from ..text.tokenizer import Tokenizer, require_text
from .scores import ClassifierSettings, Ranked, TokenLabel, cosines, ranked
from .settings import PoolingSettings
from .texts import QUERY_PROMPTS, TEXT_PROMPTS, Text, TextEncoder, first_prompt, is_text

SLICE = 256
"""Texts that are made to tokens at once; the device computes slices while the next one is made."""
BATCHES_AHEAD = 4
"""A slice is made while those before it, more than one, wait for their vectors with fewer tokens than these batches."""


@dataclass(frozen=True)
class PoolingModel:
    """What a model's folder says of its vectors: ``settings``, and how the numbers of a ``classifier`` are read.

    The tokens' vectors have ``features`` elements. ``longest`` are the tokens of a text at most.
    """

    settings: PoolingSettings
    features: int
    vocab_size: int
    longest: int
    classifier: Classifier | None = None
    scores: ClassifierSettings | None = None

    @property
    def dimensions(self) -> int:
        """Elements of a text's vector."""
        return self.settings.size(self.features)

    @property
    def has_classes(self) -> bool:
        """Whether the model classifies texts."""
        return self.classifier is not None and self.classifier.pooling is not None

    def with_pooling(self, pooling: str | None) -> PoolingModel:
        """The model with the pooling of that name instead of its folder's. Raises ``UsageError`` for another name."""
        if pooling is None:
            return self
        known = {kind.value: kind for kind in Pooling}
        if not isinstance(pooling, str) or pooling not in known:
            raise UsageError(f"pooling is {pooling!r}, but must be one of {', '.join(known)}")
        if self.settings.steps and len(self.settings.poolings) > 1:
            raise UsageError(
                f"pooling is {pooling!r}, but the linear layers in this model's folder read the vectors of "
                f"{len(self.settings.poolings)} poolings together: leave it out"
            )
        return replace(self, settings=replace(self.settings, poolings=(known[pooling],)))

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise ``UsageError`` for ``dimensions`` that the model's vectors do not have."""
        if dimensions is not None:
            require_whole("dimensions", dimensions, self.dimensions)


Submitted = tuple[PoolingRequest, "SimpleQueue[PoolingRequest]"]
"""A request that the engine has, and where it puts the request at its end."""


class Pooler:
    """Embeds, ranks and classifies texts by ``submit``, which hands a request to the engine.

    The engine computes batches of up to ``batch_tokens`` tokens.
    """

    def __init__(
        self,
        model: PoolingModel,
        tokenizer: Callable[[], Tokenizer],
        submit: Callable[[PoolingRequest], None],
        batch_tokens: int,
        folder: Path | None = None,
    ):
        self.model = model
        self.folder = folder
        self.texts = TextEncoder(tokenizer, model.settings, model.vocab_size, model.longest)
        self.submit = submit
        self.batch_tokens = batch_tokens

    def embed(
        self,
        texts: Text | Sequence[Text],
        prompt_name: str | None = None,
        prompt: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate: bool = True,
        pooling: str | None = None,
    ) -> np.ndarray:
        """See :meth:`bminf_lite.Model.embed`."""
        one = is_text(texts)
        wanted: list[Any] = [texts] if one else _listed(texts)
        joined, first = None, 0
        for part in self.embedded(wanted, prompt_name, prompt, normalize, dimensions, truncate, pooling):
            if joined is None:
                joined = np.empty((len(wanted), part.shape[1]), np.float32)
            joined[first : first + len(part)] = part
            first += len(part)
        if joined is None:
            joined = np.empty((0, dimensions or self.model.with_pooling(pooling).dimensions), np.float32)
        return joined[0] if one else joined

    def embedded(
        self,
        texts: Sequence[Text],
        prompt_name: str | None = None,
        prompt: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate: bool = True,
        pooling: str | None = None,
    ) -> Iterator[np.ndarray]:
        """As :meth:`embed` for a list, in slices of texts: fp32 ``[n, dimensions]`` each."""
        if self.model.classifier is not None:
            raise UsageError("this model classifies: embed texts with a model that has no such head")
        if is_text(texts) or not isinstance(texts, (Sequence, np.ndarray)):
            raise UsageError(f"give a list of texts, not {'one text' if is_text(texts) else type(texts).__name__}")
        if normalize is not None:
            require_bool("normalize", normalize)
        require_bool("truncate", truncate)
        model = self.model.with_pooling(pooling)
        model.check_dimensions(dimensions)
        before, settings = self.texts.prompt_text(prompt_name, prompt), model.settings

        def encoded(part: Sequence[Text]) -> list[PoolingText]:
            return self.texts.encode(part, before, truncate)

        for vectors in self._vectors(texts, encoded, settings.poolings):
            yield settings.finish(np.stack(vectors), normalize, dimensions)

    def rerank(self, query: str, texts: Sequence[str], top_n: int | None = None, truncate: bool = True) -> list[Ranked]:
        """See :meth:`bminf_lite.Model.rerank`."""
        texts = checked_texts(query, texts, top_n)
        return ranked(self.relevances(query, texts, truncate), texts, top_n)

    def relevances(self, query: str, texts: Sequence[str], truncate: bool = True) -> np.ndarray:
        """The score of each text for a query, fp32 ``[n]``: a reranker's, or the cosine of an embedder's vectors."""
        if self.model.scores is not None:
            self._require_classes()
            self.model.scores.require_one_label()
            numbers = self._numbers([(query, text) for text in texts], truncate)
            return self.model.scores.relevances(numbers)
        names = self.model.settings.prompts
        of_query, of_texts = first_prompt(names, QUERY_PROMPTS), first_prompt(names, TEXT_PROMPTS)
        rows = self.embed(texts, of_texts, normalize=True, truncate=truncate)
        return cosines(rows, self.embed(query, of_query, normalize=True, truncate=truncate))

    def classify(self, texts: Any, truncate: bool = True) -> Any:
        """See :meth:`bminf_lite.Model.classify`."""
        one = isinstance(texts, (str, tuple))
        wanted = [texts] if one else _listed(texts)
        require_bool("truncate", truncate)
        found: Sequence[Any]
        if self.model.classifier is not None and self.model.classifier.pooling is None:
            found = self._token_labels(wanted, truncate)
        else:
            numbers = self._numbers(wanted, truncate)
            assert self.model.scores is not None
            found = self.model.scores.classifications(numbers)
        return found[0] if one else list(found)

    def _numbers(self, texts: Sequence[str | tuple[str, str]], truncate: bool) -> np.ndarray:
        """The numbers of the classifier, fp32 ``[n, labels]``."""
        classifier = self._require_classes()
        require_bool("truncate", truncate)
        assert classifier.pooling is not None

        def encoded(part: Sequence[str | tuple[str, str]]) -> list[PoolingText]:
            pairs = [text for text in part if isinstance(text, tuple)]
            if not pairs:
                return self.texts.encode([str(text) for text in part], truncate=truncate)
            if len(pairs) != len(part) or any(len(pair) != 2 for pair in pairs):
                raise UsageError("give either texts or pairs of texts, not both")
            return self.texts.encode_pairs(pairs, truncate)

        for text in texts:
            if not isinstance(text, tuple):
                require_text(text, "text")
        rows = [classifier(np.stack(v)) for v in self._vectors(texts, encoded, (classifier.pooling,))]
        return np.concatenate(rows) if rows else np.empty((0, len(classifier.out.weight)), np.float32)

    def _require_classes(self) -> Classifier:
        """The head that classifies texts."""
        if self.model.classifier is None or self.model.classifier.pooling is None:
            raise UsageError("this model has no head that classifies texts")
        return self.model.classifier

    def _token_labels(self, texts: Sequence[Any], truncate: bool) -> list[list[TokenLabel]]:
        classifier, scores = self.model.classifier, self.model.scores
        assert classifier is not None and scores is not None
        for text in texts:
            require_text(text, "text")
        encoded = self.texts.encode_with_places(texts, truncate)
        vectors = [v for part in self._vectors([tokens for tokens, _ in encoded], list, ()) for v in part]
        found = []
        for text, (_, one), rows in zip(texts, encoded, vectors, strict=True):
            found.append(
                [
                    TokenLabel(text[first:last], best.label, best.score, first, last)
                    for (first, last), best in zip(one.offsets, scores.classifications(classifier(rows)), strict=True)
                    if first < last
                ]
            )
        return found

    def _vectors(
        self, texts: Sequence[Any], encoded: Callable[[Any], list[PoolingText]], poolings: tuple[Pooling, ...]
    ) -> Iterator[list[np.ndarray]]:
        """The vectors of slices of texts, in order. A slice is made to tokens while those before are computed."""
        waiting: list[Submitted] = []
        try:
            for first in range(0, len(texts), SLICE):
                ended: SimpleQueue[PoolingRequest] = SimpleQueue()
                request = PoolingRequest(encoded(texts[first : first + SLICE]), poolings, ended.put)
                while True:
                    try:
                        self.submit(request)
                        break
                    except QueueFull:
                        if not waiting:
                            raise
                        yield _result(*waiting.pop(0))
                waiting.append((request, ended))
                while len(waiting) > 1 and _num_tokens(waiting) >= BATCHES_AHEAD * self.batch_tokens:
                    yield _result(*waiting.pop(0))
            while waiting:
                yield _result(*waiting.pop(0))
        finally:
            for request, _ in waiting:
                request.is_cancelled = True


def _num_tokens(waiting: Sequence[Submitted]) -> int:
    return sum(len(text.token_ids) for request, _ in waiting for text in request.texts)


def _listed(texts: Any) -> list[Any]:
    """Several texts as a list; ``UsageError`` for what holds none."""
    if not isinstance(texts, Iterable):
        raise UsageError(f"give a text or a list of texts, not {type(texts).__name__}")
    return list(texts)


def _result(request: PoolingRequest, ended: SimpleQueue[PoolingRequest]) -> list[np.ndarray]:
    """The vectors of a request; waits for them, and raises its error."""
    try:
        ended.get()
    except BaseException:
        request.is_cancelled = True
        raise
    if request.error is not None:
        raise request.error
    return request.vectors


def checked_texts(query: Any, texts: Any, top_n: int | None) -> list[str]:
    """The texts to rank; ``UsageError`` if the arguments of a reranking are not what they must be."""
    require_text(query, "query")
    if top_n is not None:
        require_whole("top_n", top_n)
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise UsageError(f"give a list of texts, not {type(texts).__name__}")
    for text in texts:
        require_text(text, "text")
    return list(texts)
