"""What ``/metrics`` shows: Prometheus metrics under vLLM's names, so that dashboards made for vLLM show them.

HTTP processes count what happens to requests in :class:`Observations`, a plain list of numbers. Each sends what it has
newly counted to the engine's process a few times per second. There the lists are added up, so that a scrape shows all
processes, whichever answers it, and nothing is lost when one of them ends. The engine's own numbers come from
:class:`.EngineStats`.

Names, help texts and buckets are those of vLLM's ``v1/metrics/loggers.py``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine.core import EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST

FINISHED_REASONS = ("stop", "length", "abort", "error", "deadline")
"""Values of the label ``finished_reason``. ``deadline`` is this server's own."""

_REASON_OF = {"context": "length", "cancelled": "abort"}
_TIME_TO_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_TIME_PER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip


def finished_reason(finish_reason: str) -> str:
    """The label of a completion's finish reason."""
    return _REASON_OF.get(finish_reason, finish_reason)


def token_bounds(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 and so on up to ``most``."""
    return tuple(m * 10.0**e for e in range(len(str(most))) for m in (1, 2, 5) if m * 10**e <= most)


@dataclass(frozen=True)
class _Histogram:
    """Counts of values up to each bound and beyond the last, and the sum of the values: ``bounds + 2`` numbers."""

    name: str
    documentation: str
    bounds: tuple[float, ...]
    offset: int

    @property
    def size(self) -> int:
        return len(self.bounds) + 2

    def observe(self, values: list[float], value: float, weight: int = 1) -> None:
        """Count ``value``, ``weight`` times."""
        values[self.offset + bisect_left(self.bounds, value)] += weight
        values[self.offset + len(self.bounds) + 1] += value * weight

    def family(self, values: Sequence[float], labels: dict[str, str]) -> Metric:
        numbers = values[self.offset : self.offset + self.size]
        buckets, count = [], 0.0
        for bound, in_bucket in zip((*map(repr, self.bounds), "+Inf"), numbers[:-1], strict=True):
            count += in_bucket
            buckets.append((bound, count))
        family = HistogramMetricFamily(self.name, self.documentation, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, numbers[-1])
        return family


class Observations:
    """What was counted of requests: ``values``, a list of numbers that may be added to those of other processes.

    ``context_length`` bounds the histograms of tokens. Lists can be added if they were made with the same one.
    """

    def __init__(self, context_length: int):
        self._size = 1 + len(FINISHED_REASONS)
        tokens = token_bounds(context_length)
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", _TIME_TO_FIRST_TOKEN
        )
        self.inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _TIME_PER_TOKEN
        )
        self.time_per_output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Histogram of time_per_output_token_seconds per request.",
            _TIME_PER_TOKEN,
        )
        self.e2e_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", _REQUEST_LATENCY
        )
        self.queue_time = self._histogram(
            "vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", _REQUEST_LATENCY
        )
        self.prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds",
            "Histogram of time spent in PREFILL phase for request.",
            _REQUEST_LATENCY,
        )
        self.decode_time = self._histogram(
            "vllm:request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", _REQUEST_LATENCY
        )
        self.inference_time = self._histogram(
            "vllm:request_inference_time_seconds",
            "Histogram of time spent in RUNNING phase for request.",
            _REQUEST_LATENCY,
        )
        self.prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Number of prefill tokens processed.", tokens
        )
        self.generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Number of generation tokens processed.", tokens
        )
        self.max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "Histogram of the max_tokens request parameter.", tokens
        )
        self.n = self._histogram(
            "vllm:request_params_n", "Histogram of the n request parameter.", (1.0, 2.0, 5.0, 10.0, 20.0)
        )
        self.values = [0.0] * self._size

    def _histogram(self, name: str, documentation: str, bounds: tuple[float, ...]) -> _Histogram:
        histogram = _Histogram(name, documentation, bounds, self._size)
        self._size += histogram.size
        return histogram

    @property
    def histograms(self) -> list[_Histogram]:
        """All of them."""
        return [h for h in vars(self).values() if isinstance(h, _Histogram)]

    def add_tokens(self, count: int) -> None:
        """Count generated tokens."""
        self.values[0] += count

    def add_finished(self, finish_reason: str) -> None:
        """Count a completion that has ended."""
        self.values[1 + FINISHED_REASONS.index(finished_reason(finish_reason))] += 1

    def take(self) -> list[float]:
        """What was counted since the last call."""
        taken, self.values = self.values, [0.0] * self._size
        return taken

    def families(self, values: Sequence[float], labels: dict[str, str]) -> Iterator[Metric]:
        """The metrics of ``values``; an empty list stands for zeros."""
        values = values or [0.0] * self._size
        yield _counter("vllm:generation_tokens", "Number of generation tokens processed.", labels, values[0])
        finished = CounterMetricFamily(
            "vllm:request_success",
            "Count of successfully processed requests.",
            labels=[*labels, "finished_reason"],
        )
        for reason, count in zip(FINISHED_REASONS, values[1:], strict=False):
            finished.add_metric([*labels.values(), reason], count)
        yield finished
        for histogram in self.histograms:
            yield histogram.family(values, labels)


def render(model_name: str, stats: EngineStats, observations: Observations, values: Sequence[float]) -> bytes:
    """The answer to a scrape, in Prometheus's text format.

    ``values`` are the totals of all HTTP processes, which have ``observations`` of the same form.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape(model_name, stats, observations, values))
    return generate_latest(registry)


class _Scrape(Collector):
    def __init__(self, model_name: str, stats: EngineStats, observations: Observations, values: Sequence[float]):
        self.labels = {"model_name": model_name, "engine": "0"}
        self.stats = stats
        self.observations = observations
        self.values = values

    def collect(self) -> Iterator[Metric]:
        labels, stats = self.labels, self.stats
        blocks = stats.blocks_used + stats.blocks_cached + stats.blocks_free
        for name, documentation, value in (
            ("vllm:num_requests_running", "Number of requests in model execution batches.", stats.running),
            ("vllm:num_requests_waiting", "Number of requests waiting to be processed.", stats.waiting),
            (
                "vllm:kv_cache_usage_perc",
                "KV-cache usage. 1 means 100 percent usage.",
                stats.blocks_used / blocks if blocks else 0.0,
            ),
        ):
            gauge = GaugeMetricFamily(name, documentation, labels=list(labels))
            gauge.add_metric(list(labels.values()), value)
            yield gauge
        for name, documentation, value in (
            (
                "vllm:prefix_cache_queries",
                "Prefix cache queries, in terms of number of queried tokens.",
                stats.prompt_tokens,
            ),
            ("vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", stats.cached_tokens),
            ("vllm:num_preemptions", "Cumulative number of preemption from the engine.", stats.preemptions),
            ("vllm:prompt_tokens", "Number of prefill tokens processed.", stats.prompt_tokens),
        ):
            yield _counter(name, documentation, labels, value)
        if stats.accepted_per_position:
            yield from _drafts(stats, labels)
        yield from self.observations.families(self.values, labels)


def _drafts(stats: EngineStats, labels: dict[str, str]) -> Iterator[Metric]:
    """The counters of an engine that may draft. Names and help texts are those of vLLM's ``v1/spec_decode/metrics.py``.

    ``accepted_tokens / drafts + 1`` is the mean number of tokens of a check.
    """
    for name, documentation, value in (
        ("vllm:spec_decode_num_drafts", "Number of spec decoding drafts.", stats.drafts),
        ("vllm:spec_decode_num_draft_tokens", "Number of draft tokens.", stats.draft_tokens),
        ("vllm:spec_decode_num_accepted_tokens", "Number of accepted tokens.", stats.accepted_tokens),
    ):
        yield _counter(name, documentation, labels, value)
    family = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted tokens per draft position.",
        labels=[*labels, "position"],
    )
    for position, count in enumerate(stats.accepted_per_position):
        family.add_metric([*labels.values(), str(position)], count)
    yield family


def _counter(name: str, documentation: str, labels: dict[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, documentation, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family
