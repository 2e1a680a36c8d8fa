"""``generate``: continue a prompt or answer a message, printing the text as it appears."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import UsageError
from ..files import read_small_file
from ..memory.sizes import format_size
from ._finish import finish_text, max_new_tokens
from ._options import (
    UserPath,
    adapter_option,
    context_option,
    given_options,
    gpus_option,
    max_batch_option,
    model_options,
    sampling_options,
    speculative_option,
    stop_option,
)
from ._prompts import Prompt, read_file, read_stdin

if TYPE_CHECKING:
    from ..api import Model
    from ..engine.outputs import Piece, Result
    from ..engine.speculative import SpeculativeConfig
    from ..grammar import Grammar
    from ..text.prompts import EncodedPrompt


@click.command()
@model_options
@gpus_option
@click.argument("prompt", metavar="[PROMPT | -]", required=False)
@click.option(
    "--prompts",
    metavar="FILE.jsonl",
    type=UserPath(exists=True, dir_okay=False, path_type=Path),
    help='Many prompts: an object per line with "prompt" or "messages", and an optional "id".',
)
@sampling_options
@stop_option
@click.option("--chat", is_flag=True, help="Treat the prompt as a user's message, in the checkpoint's chat template.")
@click.option("--system", metavar="TEXT", help="With --chat: the system message.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per result, when it is complete.")
@click.option(
    "--logprobs",
    metavar="[K]",
    is_flag=False,
    flag_value=0,
    type=click.IntRange(0, 20),
    help="With --json: the log-probability of each token, and the K most likely tokens with theirs.",
)
@click.option(
    "--json-schema",
    metavar="FILE",
    type=UserPath(exists=True, dir_okay=False, path_type=Path),
    help="The text is JSON that this schema accepts.",
)
@click.option("--regex", metavar="PATTERN", help="The text is one that this regular expression matches as a whole.")
@click.option("--choice", multiple=True, metavar="TEXT", help="The text is one of these. Give it several times.")
@click.option("--ignore-eos", is_flag=True, help="Continue after an end-of-sequence token.")
@max_batch_option
@context_option
@speculative_option
@adapter_option
@click.option("--stats", is_flag=True, help="Report tokens, times and speeds on stderr.")
@click.option("--check", is_flag=True, help="Name the layer where a NaN or an infinity first appears; slow.")
def generate(
    model: Path,
    prompt: str | None,
    prompts: Path | None,
    device: str,
    memory_limit: int | None,
    kv_cache: str,
    gpus: int,
    chat: bool,
    system: str | None,
    as_json: bool,
    stats: bool,
    check: bool,
    logprobs: int | None,
    json_schema: Path | None,
    regex: str | None,
    choice: tuple[str, ...],
    ignore_eos: bool,
    max_batch: int,
    context: int | None,
    speculative: SpeculativeConfig | str | None,
    adapter: dict[str, str],
    stop: tuple[str, ...],
    **sampling: float | None,
) -> None:
    """Generate text with a model.

    Continues PROMPT with the model in the folder MODEL, and prints the text as it appears. With - the prompt is read
    from stdin. The defaults of sampling options are those of the model's generation_config.json, or else those in
    brackets.

    \b
    Example:
      bminf-lite generate MODEL "Once upon a time" --max-new-tokens 64 --temperature 0.8
      bminf-lite generate MODEL --chat "Why is the sky blue?" --stats
      bminf-lite generate MODEL --chat "Is the sky blue?" --choice yes --choice no
      bminf-lite generate MODEL --prompts questions.jsonl --json > answers.jsonl
    """
    from ..api import load

    if (prompt is None) == (prompts is None):
        raise click.UsageError("Give either PROMPT (or - for stdin) or --prompts.")
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat.")
    if logprobs is not None and not as_json:
        raise click.UsageError("--logprobs needs --json.")
    flags = {"logprobs": logprobs, "ignore_eos": ignore_eos or None}
    given = given_options(sampling | flags, stop)
    grammar = grammar_of(json_schema, regex, choice)
    wanted = read_file(prompts) if prompts is not None else [read_stdin() if prompt == "-" else Prompt(str(prompt))]
    if chat:
        wanted = [p.as_chat(system) for p in wanted]
    with load(
        model,
        device=device,
        memory_limit=memory_limit,
        max_batch=max_batch,
        kv_cache=kv_cache,
        context=context,
        check=check,
        speculative=speculative,
        adapters=adapter or None,
        max_adapters=1,
        gpus=gpus,
    ) as loaded:
        started = time.perf_counter()
        pieces = loaded.stream(encode(loaded, wanted), grammar=grammar, adapter=next(iter(adapter), None), **given)
        streams = prompts is None and not as_json
        results = print_stream(pieces) if streams else print_results(pieces, wanted, as_json)
        if stats:
            limits = max_new_tokens(loaded, given), loaded.engine_config.context_length
            click.echo(stats_text(results, time.perf_counter() - started, *limits), err=True)
            if memory := loaded.memory():
                click.echo(memory_text(memory), err=True)
            if experts := loaded.expert_cache():
                click.echo(experts_text(experts), err=True)


def grammar_of(json_schema: Path | None, regex: str | None, choice: tuple[str, ...]) -> Grammar | None:
    """What the text must look like; ``UsageError`` for a bad grammar, before a model is loaded."""
    from ..grammar import Structure, only_structure, validate

    given = [
        Structure("--json-schema", "json_schema", json_schema),
        Structure("--regex", "regex", regex),
        Structure("--choice", "choice", choice or None),
    ]
    structure = only_structure([structure for structure in given if structure.value is not None])
    if structure is None:
        return None
    if json_schema is not None:
        try:
            structure = structure._replace(value=read_small_file(json_schema).decode())
        except (OSError, UnicodeDecodeError) as error:
            problem = getattr(error, "strerror", None) or error
            raise UsageError(f"{json_schema} cannot be read as text: {problem}") from error
    grammar = structure.grammar()
    validate(grammar)
    return grammar


def encode(model: Model, prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
    """The tokens of each prompt, conversations by the chat template. Raises ``UsageError`` with every bad prompt."""
    encoded: list[EncodedPrompt] = []
    problems: list[str] = []
    for prompt in prompts:
        try:
            encoded.append(model.encode(prompt.content))
        except UsageError as error:  # noqa: PERF203, the others' problems are wanted too
            problems.append(f"prompt {prompt.id}: {error}" if prompt.id is not None else str(error))
    if problems:
        raise UsageError("\n  ".join(problems))
    return encoded


def print_stream(pieces: Iterable[Piece]) -> list[Result]:
    """Print one prompt's text as it appears."""
    for piece in pieces:
        click.echo(piece.text, nl=False)
        if piece.result is not None:
            click.echo()
            return [piece.result]
    return []


def print_results(pieces: Iterable[Piece], prompts: Sequence[Prompt], as_json: bool) -> list[Result]:
    """Print the results in the order of their prompts, each as soon as it and those before it are complete."""
    from tqdm import tqdm

    done: dict[int, Result] = {}
    printed = 0
    with tqdm(total=len(prompts), unit="prompt", disable=None if len(prompts) > 1 else True) as progress:
        for piece in pieces:
            if piece.result is None:
                continue
            done[piece.index] = piece.result
            progress.update()
            while printed in done:
                with progress.external_write_mode():
                    click.echo(result_text(done[printed], prompts[printed].id, as_json))
                printed += 1
    return [done[i] for i in range(printed)]


def result_text(result: Result, name: str | int | None, as_json: bool) -> str:
    """A result as a line of JSON, with its prompt's id if there is one, or as text under a heading."""
    if as_json:
        return json.dumps(({} if name is None else {"id": name}) | result.to_dict(), ensure_ascii=False)
    return f"--- {name}\n{result}"


def stats_text(results: Sequence[Result], seconds: float, limit: int, context: int) -> str:
    """Tokens, times and speeds; ``seconds`` is the wall-clock time of the whole run.

    ``limit`` is ``max_new_tokens``, and ``context`` the model's.
    """
    lines = [
        f"prompt {t.prompt_tokens} tokens in {t.prompt_seconds:.3f} s ({t.prompt_tokens_per_second:.1f} tokens/s), "
        f"new {t.new_tokens} tokens in {t.total_seconds:.3f} s (decode {t.decode_tokens_per_second:.1f} tokens/s), "
        f"finished by {finish_text(r, limit, context)}"
        for r in results
        for t in [r.timings]
    ]
    if len(results) > 1:
        new = sum(r.timings.new_tokens for r in results)
        speed = new / seconds
        lines.append(f"total {len(results)} prompts, {new} new tokens in {seconds:.3f} s ({speed:.1f} tokens/s)")
    if checks := sum(r.drafts for r in results):
        drafted, accepted = sum(r.draft_tokens for r in results), sum(r.accepted_tokens for r in results)
        mean = 1 + accepted / checks
        lines.append(f"drafts {accepted} of {drafted} accepted in {checks} checks ({mean:.2f} tokens a check)")
    return "\n".join(lines)


def memory_text(memory: dict[str, int]) -> str:
    """The most GPU memory that the model used."""
    used, reserved, limit = (format_size(memory[name]) for name in ("peak_used", "peak_reserved", "limit"))
    return f"GPU memory {used} used and {reserved} reserved at most, {limit} allowed"


def experts_text(experts: dict[str, int]) -> str:
    """How many experts were on the GPU when they were needed."""
    needed = experts["hits"] + experts["misses"]
    return (
        f"{experts['slots']:,} of {experts['experts']:,} experts on the GPU, {experts['hits'] / max(needed, 1):.1%} of "
        f"those that steps needed; {format_size(experts['copied_bytes'])} of others copied"
    )
