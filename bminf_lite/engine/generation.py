"""The decoding loop, in tokens: schedule, run, postprocess. It knows neither architectures nor text.

The host runs ahead of the device by up to ``max_steps_in_flight`` steps. It therefore learns late that a request has
ended, and drops the tokens of the steps that it launched after the end.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing

from .config import EngineConfig
from .model_runner import DecodingGroup, ModelRunner, Network
from .request import Request
from .scheduler import Scheduler


def generate_tokens(
    network: Network, requests: Sequence[Request], config: EngineConfig
) -> Generator[Request, None, None]:
    """Run requests to their end; yields a request each time it has a new token.

    Prompts must be shorter than the context. Closing the generator, or an error in it, gives the memory back at once.
    Raises ``OutOfMemory``, and ``BminfError`` where the logits hold a NaN or an infinity.
    """
    scheduler = Scheduler(requests, config)
    capacity = scheduler.initial_capacity()
    source_capacity = max(len(r.source_token_ids) for r in requests)
    with closing(ModelRunner(network, config, scheduler.num_slots, capacity, source_capacity)) as runner:
        while scheduler.has_requests:
            yield from _prefill(scheduler, runner)
            yield from _decode(scheduler, runner)


def _prefill(scheduler: Scheduler, runner: ModelRunner) -> Iterator[Request]:
    """Start waiting requests while slots are free: encode sources, process prompts, choose the first tokens."""
    admitted = scheduler.admit()
    if scheduler.config.is_encoder_decoder:
        for requests in scheduler.source_batches(admitted):
            runner.encode_sources({r.slot: r.source_token_ids for r in requests})
    while chunk := scheduler.next_chunk():
        yield from scheduler.finish_chunk(chunk, runner.prefill(chunk))
        scheduler.release()


def _decode(scheduler: Scheduler, runner: ModelRunner) -> Iterator[Request]:
    """Decode the running requests together, until enough of them have finished or a waiting request can start."""
    if not scheduler.running:
        return
    with closing(DecodingGroup(runner, list(scheduler.running))) as group:
        while True:
            while group.steps_in_flight <= runner.ops.max_steps_in_flight and scheduler.should_continue(
                group.requests, group.num_cached_tokens, group.steps_in_flight, runner.capacity
            ):
                group.launch()
            if not group.steps_in_flight:
                break
            yield from scheduler.postprocess(group.requests, group.fetch())
    scheduler.release()
