"""What a batch is to do: plain values, so that it can be sent to the actors that do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..api import Model, load
from ..engine.sampling_params import SamplingParams
from ..errors import UsageError
from ..server.launcher import model_names
from ..server.limits import Limits
from ..server.settings import ServerSettings
from .plan import Plan
from .rows import OpenAIRows, PlainRows, Row, RowFormat

MAX_BODY = 1 << 30
"""Bytes of a row's request: more than any context holds."""
FIELDS = {"max_new_tokens": "max_tokens"}
"""Names of sampling parameters in requests, where they differ from the engine's."""


@dataclass(frozen=True)
class LoadOptions:
    """Arguments of :func:`bminf_lite.load`, which says what they mean."""

    device: str = "auto"
    memory_limit: int | None = None
    max_batch: int | None = None
    kv_cache: str = "fp16"
    context: int | None = None
    adapters: Mapping[str, str] | None = None


@dataclass(frozen=True)
class BatchJob:
    """A batch, without its input and output.

    - ``model``: the folder of the checkpoint; ``load`` how it is loaded.
    - ``is_openai``: rows are those of OpenAI's batch files.
    - ``sampling``: the parameters of plain rows that give none, under the engine's names.
    - ``seed``: rows without a seed have this one plus their number; None draws at random.
    - ``served_model_names``: what a row may say as ``model``; by default the name of the folder. A row may also name an
      adapter of ``load``.

    Raises ``UsageError`` for sampling parameters that are out of range.
    """

    model: str
    load: LoadOptions = LoadOptions()
    is_openai: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    served_model_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        SamplingParams(seed=self.seed, **self.sampling)  # which checks them
        if self.is_openai and self.sampling:
            given = ", ".join(sorted(self.sampling))
            raise UsageError(f"{given}: the rows of OpenAI's batch files say themselves how they are sampled")

    def open_model(self) -> Model:
        """Load the model. ``UsageError`` for one that generates nothing."""
        model = load(self.model, **asdict(self.load))
        if not model.engine_config.generates:
            model.close()
            raise UsageError(f"{self.model} makes vectors, and answers no rows: bminf-lite embed reads files of texts")
        return model

    def warm_up(self, model: Model) -> None:
        """Prepare the model's memory and its steps."""
        model.warm_up()

    def settings(self, model: Model) -> ServerSettings:
        """How the rows are answered."""
        return ServerSettings(
            model_names(self.served_model_names, model.folder), limits=Limits(body=MAX_BODY, prompts=1 << 20)
        )

    def rows(self, model: Model) -> RowFormat:
        """How rows are requests. Plain rows have the default of ``max_new_tokens`` that the library has."""
        if self.is_openai:
            return OpenAIRows(self.seed)
        params = SamplingParams.from_checkpoint(model.generation_config, **self.sampling)  # type: ignore[typeddict-item]
        given = {FIELDS.get(name, name): value for name, value in self.sampling.items()}
        return PlainRows({**given, "max_tokens": params.max_new_tokens}, self.seed)

    def describe(self, plan: Plan) -> dict[str, Any]:
        """What tells this batch from others: what its results depend on, as JSON."""
        return {
            "version": 1,
            "model": self.model.rstrip("/").rsplit("/", 1)[-1],
            "rows": "openai" if self.is_openai else "plain",
            "sampling": dict(self.sampling),
            "seed": self.seed,
            "kv_cache": self.load.kv_cache,
            **({"adapters": sorted(self.load.adapters)} if self.load.adapters else {}),
            **plan.describe(),
        }


def is_openai(rows: list[Row]) -> bool:
    """Whether the first rows of an input are those of OpenAI's batch files."""
    return any({"custom_id", "body"} <= row.fields.keys() for row in rows)
