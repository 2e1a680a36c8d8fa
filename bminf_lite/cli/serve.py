"""``serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ._options import (
    adapter_room_options,
    adapters_option,
    batched_tokens_option,
    context_option,
    gpus_option,
    model_options,
    speculative_option,
)

if TYPE_CHECKING:
    from ..engine.speculative import SpeculativeConfig

ENGINE_FAILED = 70
"""The exit code after the device has failed, so that a supervisor starts the server again: EX_SOFTWARE."""


@click.command()
@model_options
@gpus_option
@click.option("--embeddings", is_flag=True, help="Answer /v1/embeddings too, with a decoder that generates.")
@click.option(
    "--replicas",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    metavar="N",
    help="Serve N copies of the model, each on GPUs of its own, behind one address.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address or name to listen at.")
@click.option("--port", default=8000, show_default=True, metavar="N", help="The port; 0 takes a free one.")
@click.option("--api-key-file", metavar="FILE", help="A key on each line, one of which each request must send.")
@click.option("--allow-unauthenticated", is_flag=True, help="Serve other machines without asking for a key.")
@click.option(
    "--keyless",
    multiple=True,
    metavar="PATH",
    help="A path that needs no key; by default /, /health, /health/live and /health/ready.",
)
@click.option(
    "--allowed-host",
    multiple=True,
    metavar="NAME",
    help="A host name of the server, beside localhost and IP addresses; * allows every name.",
)
@click.option(
    "--allowed-origin",
    multiple=True,
    metavar="ORIGIN",
    help="A site whose pages may use the server, such as https://chat.example; * allows all.",
)
@click.option(
    "--served-model-name",
    multiple=True,
    metavar="NAME",
    help="The model's name in requests, or several; by default that of its folder.",
)
@context_option
@click.option("--max-batch", type=int, metavar="N", help="The most sequences to decode together.")
@click.option(
    "--max-queue",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    metavar="N",
    help="The most requests that wait; one more is answered with 429.",
)
@batched_tokens_option
@speculative_option
@adapters_option
@adapter_room_options
@click.option(
    "--limit",
    multiple=True,
    metavar="NAME=N",
    help="Another bound: body (bytes), n, max_tokens, idle_seconds and others; docs/serving.md.",
)
@click.option(
    "--http-workers",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Processes that speak HTTP, of each replica; by default one for four cores, four at most.",
)
@click.option(
    "--request-log",
    metavar="FILE",
    help="Write a line of JSON for each request, without its texts, to this file; - is stderr.",
)
@click.option(
    "--tool-call-format",
    metavar="NAME",
    help="How the model writes function calls, such as hermes; by its template if not given.",
)
@click.option(
    "--seed",
    type=int,
    metavar="S",
    help="The seed of requests that give none: the same request gets the same answer. [random]",
)
@click.option(
    "--split-special-tokens",
    is_flag=True,
    help="What users and tools say is text, also where it spells control tokens.",
)
@click.option(
    "--shutdown-timeout",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long running requests may go on after SIGTERM.",
)
def serve(
    model: Path,
    device: str,
    memory_limit: int | None,
    kv_cache: str,
    gpus: int,
    embeddings: bool,
    replicas: int,
    host: str,
    port: int,
    api_key_file: str | None,
    allow_unauthenticated: bool,
    keyless: tuple[str, ...],
    allowed_host: tuple[str, ...],
    allowed_origin: tuple[str, ...],
    served_model_name: tuple[str, ...],
    context: int | None,
    max_batch: int | None,
    max_queue: int,
    max_num_batched_tokens: int,
    speculative: SpeculativeConfig | str | None,
    adapter: dict[str, str],
    max_adapters: int | None,
    max_adapter_rank: int | None,
    limit: tuple[str, ...],
    http_workers: int | None,
    request_log: str | None,
    tool_call_format: str | None,
    seed: int | None,
    split_special_tokens: bool,
    shutdown_timeout: float,
) -> None:
    """Serve a model over HTTP, as OpenAI's clients expect.

    Listens at localhost until SIGTERM or Ctrl-C; then it takes no more requests, and ends when those that run have
    ended. A second signal ends it at once. The exit code is 70 after the device has failed.

    \b
    Example:
      bminf-lite serve MODEL
      bminf-lite serve MODEL --adapter french=adapters/french --adapter sql=adapters/sql
      bminf-lite serve MODEL --host 0.0.0.0 --api-key-file keys.txt --allowed-host llm.example.org
    """
    from ..server import require_extra

    require_extra()
    if max_adapter_rank and not (adapter or max_adapters):
        raise click.UsageError("--max-adapter-rank is for adapters: give --adapter or --max-adapters too.")
    from ..adapters import MAX_ADAPTERS
    from ..api import load
    from ..server.client import EngineFailure
    from ..server.launcher import (
        checked_format,
        checked_seconds,
        default_http_workers,
        launch,
        model_names,
        require_safe,
    )
    from ..server.limits import DEFAULT_LIMITS
    from ..server.listener import Address, Listener
    from ..server.request_log import checked_path
    from ..server.security import OPEN_PATHS, Security, digests, read_keys
    from ..server.settings import ServerSettings

    keys = read_keys(api_key_file) if api_key_file is not None else []
    security = Security(digests(keys), keyless or OPEN_PATHS, allowed_host, allowed_origin)
    names, form = model_names(served_model_name, model), checked_format(tool_call_format)
    settings = ServerSettings(
        names, security, DEFAULT_LIMITS.changed(limit), checked_path(request_log), form, seed, split_special_tokens
    )
    address, seconds = Address(host, port), checked_seconds(shutdown_timeout)
    require_safe(address, settings, allow_unauthenticated)
    if replicas > 1:
        from ..backend import replica_devices
        from ..server.launcher import default_front_processes
        from ..server.replicas import replica_commands, serve_replicas

        commands = replica_commands(sys.argv[1:], replica_devices(device, replicas, gpus))
        with closing(Listener(address, http_workers or default_front_processes(replicas))) as front:
            serve_replicas(commands, front, settings, seconds, lambda message: click.echo(message, err=True))
        return
    with (
        closing(Listener(address, http_workers or default_http_workers())) as listener,
        load(
            model,
            device=device,
            memory_limit=memory_limit,
            max_batch=max_batch,
            kv_cache=kv_cache,
            context=context,
            max_queue=max_queue,
            max_num_batched_tokens=max_num_batched_tokens,
            speculative=speculative,
            adapters=adapter if adapter or max_adapters else None,
            max_adapters=max_adapters or MAX_ADAPTERS,
            max_adapter_rank=max_adapter_rank,
            gpus=gpus,
            embeddings=embeddings,
        ) as loaded,
    ):
        try:
            launch(loaded, listener, settings, seconds, lambda message: click.echo(message, err=True))
        except EngineFailure as error:
            click.echo(f"error: {error}", err=True)
            sys.stderr.flush()
            os._exit(ENGINE_FAILED)  # a device that has failed may not return from giving its memory back
