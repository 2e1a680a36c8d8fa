"""What the divergence of two models is measured of: predictions of tokens, or the vectors that they make of texts.

A model that generates predicts each token of a text; the divergence is that of :mod:`.divergence`, in nats per token.
Of another one each window of tokens is a text, and the divergence is ``1 - cosine`` of its vectors, in the mean: of the
vectors that a folder of sentence-transformers asks for, of what a classifier of texts reads, or of each token where
tokens are classified. It is about half of the squared distance of vectors of length 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .. import backend
from ..backend.operations.rows import pooled
from ..backend.values import Pooling
from ..checkpoint.opened_model import ModelSource, OpenedModel
from ..loading import pooling_settings
from ..pooling.settings import PoolingSettings
from ..quantize.calibration import sample_rows
from .blockwise import Batch, LayerwiseCheckpoint, batch_windows
from .compare import LOGIT_ROWS
from .corpus import Window
from .divergence import DivergenceAccumulator

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class VectorDivergence:
    """Vectors of ``vectors`` texts, or tokens, of a model and a reference: the mean and the least of their cosines."""

    vectors: int
    mean_cosine: float
    least_cosine: float

    @property
    def mean(self) -> float:
        """The mean of ``1 - cosine``; NaN for vectors that are not finite."""
        return 1 - self.mean_cosine

    def to_dict(self) -> dict[str, Any]:
        """The numbers as JSON values; None for those that are not finite."""
        found = {"divergence": self.mean, "mean_cosine": self.mean_cosine, "least_cosine": self.least_cosine}
        finite = {name: value if np.isfinite(value) else None for name, value in found.items()}
        return {"vectors": self.vectors, **finite}


class Result(Protocol):
    """A divergence."""

    @property
    def mean(self) -> float:
        """Its mean over what was compared; NaN for outputs that are not finite."""
        ...


class Accumulator(Protocol):
    """Collects outputs of two models, in the order of the text."""

    def add(self, reference: np.ndarray, model: np.ndarray, targets: np.ndarray) -> None:
        """Outputs of both models; ``targets`` are the tokens that follow in the text, if they are predictions."""
        ...

    def result(self) -> Result:
        """The divergence of all that was added."""
        ...


class Outputs(Protocol):
    """What of a model is compared."""

    unit: str

    def parts(self, batch: Batch, most: int | None = None) -> list[np.ndarray]:
        """The rows of a batch whose outputs are computed at once; of ``most`` predictions at most, in one part."""
        ...

    def finished(self, rows: np.ndarray) -> np.ndarray:
        """What is compared, made of the head's output for the rows of a part."""
        ...

    def targets(self, batch: Batch, rows: np.ndarray) -> np.ndarray:
        """The tokens that are predicted."""
        ...

    def accumulator(self) -> Accumulator:
        """A new one."""
        ...


class Predictions:
    """The predictions of a model that generates: logits fp32 ``[n, vocab]``."""

    unit = "nats per token"

    def parts(self, batch: Batch, most: int | None = None) -> list[np.ndarray]:
        """A few rows at a time: logits of all would not fit in memory."""
        if most is not None:
            return [batch.rows[sample_rows(len(batch.rows), most)]]
        return [batch.rows[first : first + LOGIT_ROWS] for first in range(0, len(batch.rows), LOGIT_ROWS)]

    def finished(self, rows: np.ndarray) -> np.ndarray:
        """The logits themselves."""
        return rows

    def targets(self, batch: Batch, rows: np.ndarray) -> np.ndarray:
        """The token in the next row of each."""
        following: np.ndarray = batch.tokens[rows + 1]
        return following

    def accumulator(self) -> DivergenceAccumulator:
        """A new one."""
        return DivergenceAccumulator()


@dataclass(frozen=True)
class Vectors:
    """The vectors of texts: of a text's tokens its ``poolings``, finished by ``settings``; tokens' without poolings."""

    poolings: tuple[Pooling, ...]
    settings: PoolingSettings | None

    unit = "(1 - cosine)"

    def parts(self, batch: Batch, most: int | None = None) -> list[np.ndarray]:
        """Each window, which is a text."""
        ends = np.cumsum([len(window.tokens) for window in batch.windows])
        return [np.arange(end - len(window.tokens), end) for window, end in zip(batch.windows, ends, strict=True)]

    def finished(self, rows: np.ndarray) -> np.ndarray:
        """Vectors of a text's tokens, fp32 ``[n, features]``, as one vector ``[1, out]``."""
        if not self.poolings:
            return rows
        vector = np.concatenate([pooled(rows, pooling) for pooling in self.poolings])[None]
        return vector if self.settings is None else self.settings.finish(vector)

    def targets(self, batch: Batch, rows: np.ndarray) -> np.ndarray:
        """None."""
        return rows[:0]

    def accumulator(self) -> VectorAccumulator:
        """A new one."""
        return VectorAccumulator()


class VectorAccumulator:
    """Collects vectors fp32 ``[n, out]`` of two models."""

    def __init__(self) -> None:
        self._cosines: list[np.ndarray] = []

    def add(self, reference: np.ndarray, model: np.ndarray, targets: np.ndarray) -> None:
        """Vectors of the same texts; they predict no ``targets``."""
        a, b = reference.astype(np.float64), model.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            lengths = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
            self._cosines.append(np.minimum((a * b).sum(axis=1) / lengths, 1))

    def result(self) -> VectorDivergence:
        """The cosines of all vectors that were added."""
        cosines = np.concatenate(self._cosines)
        return VectorDivergence(len(cosines), float(cosines.mean()), float(cosines.min()))


def outputs_of(model: OpenedModel) -> Outputs:
    """What is compared of an open model. Raises ``CheckpointError`` for a folder whose pooling cannot be read."""
    config: Any = model.config
    if config.generates:
        return Predictions()
    if config.classifier is not None:
        pooling = config.classifier.pooling
        return Vectors(() if pooling is None else (pooling,), None)
    settings = pooling_settings(model, may_embed=True)
    return Vectors(settings.poolings, settings)


def vector_divergence(
    model: Path,
    source: Path | ModelSource,
    windows: Sequence[Window],
    device: str,
    progress: Progress | None = None,
) -> VectorDivergence:
    """The divergence of the vectors of the model in a folder from those of its ``source``, whose texts are ``windows``.

    Both run a layer at a time. ``progress`` is called with layers.
    """
    batches = batch_windows(windows)
    with (
        closing(backend.create(device)) as ops,
        LayerwiseCheckpoint(source, ops) as reference,
        LayerwiseCheckpoint(model, ops) as own,
    ):
        outputs, models = outputs_of(reference.opened), (reference, own)
        states = [each.start(batches) for each in models]
        names = reference.layerwise.names
        for layer, name in enumerate(names):
            if progress:
                progress(layer, len(names), name)
            for number, each in enumerate(models):
                layer_fn = each.layerwise.build(layer)
                states[number] = [
                    each.run(layer_fn, state, batch) for state, batch in zip(states[number], batches, strict=True)
                ]
        heads, total = [each.layerwise.output() for each in models], VectorAccumulator()
        for number, batch in enumerate(batches):
            for rows in outputs.parts(batch):
                found = [
                    outputs.finished(each.rows(head, state[number].residual[rows]))
                    for each, head, state in zip(models, heads, states, strict=True)
                ]
                total.add(found[0], found[1], outputs.targets(batch, rows))
        if progress:
            progress(len(names), len(names), "done")
        return total.result()
