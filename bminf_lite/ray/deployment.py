"""A deployment for Ray Serve: on each replica the server's application over a model of its own.

``serve run examples/serving/ray.yaml`` starts it from a file, whose ``import_path`` is ``bminf_lite.ray:app``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingContext

from ..api import load
from ..errors import UsageError, listed
from ..server.limits import DEFAULT_LIMITS
from ..server.mounted import application
from ..server.security import read_keys

MAX_ONGOING_REQUESTS = 256
"""Requests that a replica takes at a time. More wait before they are given to one, and go to a new replica as well."""
HTTP_OPTIONS = (
    "served_model_name",
    "allowed_origins",
    "request_log",
    "tool_call_format",
    "seed",
    "split_special_tokens",
)
"""What :func:`bminf_lite.server.application` takes as it is."""


@serve.deployment(
    ray_actor_options={"num_cpus": 1, "num_gpus": 1},
    max_ongoing_requests=MAX_ONGOING_REQUESTS,
    health_check_period_s=5,
    health_check_timeout_s=30,
)
@serve.ingress()
class Deployment:
    """OpenAI's and Anthropic's interfaces over a model, for ``serve.run(Deployment.bind(MODEL, ...))``.

    - ``model``: the folder of the checkpoint, on every node that may get a replica.
    - ``load_options``: arguments of :func:`bminf_lite.load`.
    - ``api_key_file``, ``limits``: as ``--api-key-file`` and ``--limit`` of ``bminf-lite serve``, here a mapping.
    - ``http_options``: arguments of :func:`bminf_lite.server.application`: those of :data:`HTTP_OPTIONS`.

    Each replica takes one CPU and one GPU of Ray's; ``Deployment.options(ray_actor_options=...)`` changes that. Raises
    ``UsageError`` for options that do not exist, and what loading raises; then Ray Serve reports the message.
    """

    def __init__(
        self,
        model: str,
        load_options: Mapping[str, Any] | None = None,
        api_key_file: str | None = None,
        limits: Mapping[str, Any] | None = None,
        **http_options: Any,
    ):
        if unknown := sorted(http_options.keys() - set(HTTP_OPTIONS)):
            problems = [f"there is no option {name}; there are {', '.join(HTTP_OPTIONS)}" for name in unknown]
            raise UsageError(listed("options of the server", problems))
        keys = [] if api_key_file is None else read_keys(api_key_file)
        self._model = load(model, **(load_options or {}))
        try:
            self._model.warm_up()
            bounds = replace(DEFAULT_LIMITS, **(limits or {}))
            self._application = application(self._model, api_keys=keys, limits=bounds, **http_options)
        except BaseException:
            self._model.close()
            raise

    def __serve_build_asgi_app__(self) -> Any:
        """What Ray Serve gives HTTP requests to."""
        return self._application

    def check_health(self) -> None:
        """Raise the engine's failure, after which Ray Serve starts another replica."""
        if self._model.engine.failure is not None:
            raise RuntimeError(f"the engine has failed: {self._model.engine.failure}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What :class:`QueuedTokens` decides by."""
        return {"queued_tokens": self._model.stats().queued_tokens}


class QueuedTokens:
    """An autoscaling policy: one replica for ``tokens_per_replica`` tokens of prompts that wait to be read.

    There are never fewer than the requests under way need, at ``target_ongoing_requests`` for each replica. Ray Serve
    applies its delays and bounds to the result.
    """

    def __init__(self, tokens_per_replica: int = 16_384):
        if tokens_per_replica < 1:
            raise UsageError(f"tokens_per_replica is {tokens_per_replica}, but must be 1 or more")
        self._tokens_per_replica = tokens_per_replica

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """The replicas that are wanted."""
        queued = (context.aggregated_metrics or {}).get("queued_tokens", {})
        by_tokens = sum(queued.values()) / self._tokens_per_replica
        by_requests = context.total_num_requests / self._target(context)
        return max(by_tokens, by_requests), {}

    @staticmethod
    def _target(context: AutoscalingContext) -> float:
        assert context.config is not None
        return float(context.config.get_target_ongoing_requests())


def app(args: Mapping[str, Any]) -> Application:
    """The application of a YAML file, whose ``args`` are the arguments of :class:`Deployment`."""
    options = dict(args)
    if "model" not in options:
        raise UsageError("args has no model: give the folder of a checkpoint")
    return Deployment.bind(**options)  # type: ignore[attr-defined,no-any-return]
