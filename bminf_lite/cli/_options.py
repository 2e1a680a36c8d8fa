"""Arguments, options, progress bars and texts that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from ..errors import BminfError, UsageError
from ..files import expand
from ..memory.sizes import parse_size

if TYPE_CHECKING:
    from tqdm import tqdm

    from ..engine.sampling_params import SamplingOptions
    from ..engine.speculative import SpeculativeConfig

Command = TypeVar("Command", bound=Callable[..., Any])


def size(value: str) -> int:
    """The bytes of an option that is an amount of memory, such as ``6GiB``."""
    try:
        return parse_size(value)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None


def require_number(perplexity: float) -> None:
    """Raise ``BminfError`` if a perplexity is a NaN, which a NaN among the model's logits leads to."""
    if math.isnan(perplexity):
        raise BminfError(
            "the model's logits hold a NaN or an infinity, so nothing can be measured; bminf-lite generate --check "
            "finds the layer"
        )


class UserPath(click.Path):
    """A path that the system can look up, whether or not there is something."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        """See :func:`bminf_lite.files.expand`."""
        try:
            expand(value, "path" if param is None else param.human_readable_name)
        except UsageError as error:
            self.fail(str(error), param, context)
        return super().convert(value, param, context)


PATH = UserPath(path_type=Path)
OUTPUT = UserPath(dir_okay=False, path_type=Path)

model_argument = click.argument("model", metavar="MODEL", type=PATH)
text_argument = click.argument("text", metavar="FILE", type=PATH)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def completes(
    *values: str, or_file: bool = False
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """What a shell's tab key offers for an option: the values that begin as typed, or files if none does."""

    def complete(context: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
        found = [CompletionItem(value) for value in values if value.startswith(typed)]
        return found or ([CompletionItem(typed, type="file")] if or_file else [])

    return complete


device_option = click.option(
    "--device",
    default="auto",
    shell_complete=completes("auto", "cpu", "cuda"),
    show_default=True,
    metavar="auto|cpu|cuda|cuda:N",
    help="Where to compute: auto takes a GPU if one can be used, otherwise the CPU.",
)
gpus_option = click.option(
    "--gpus",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    metavar="N",
    help="Divide the model among N GPUs, from the one of --device on.",
)
memory_limit_option = click.option(
    "--memory-limit",
    type=size,
    metavar="SIZE",
    help="The most GPU memory to use, for example 6GiB or 800MiB; by default almost all that is free.",
)
_KV_CACHE = "The type of the key-value cache; int8 takes half the memory."
kv_cache_option = click.option(
    "--kv-cache", type=click.Choice(["fp16", "int8"]), default="fp16", show_default=True, help=_KV_CACHE
)


tokens_option = click.option(
    "--tokens", type=click.IntRange(min=2), metavar="N", help="Score the first N tokens of FILE only."
)
max_batch_option = click.option(
    "--max-batch", type=int, default=16, show_default=True, metavar="N", help="The most sequences to decode together."
)
batched_tokens_option = click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    metavar="N",
    help="The most tokens of a step. With more, prompts are faster, and requests wait longer for each other.",
)
context_option = click.option(
    "--context", type=int, metavar="N", help="Tokens that the cache must have room for; by default the model's context."
)


def parse_speculative(context: click.Context, param: click.Parameter, value: str | None) -> SpeculativeConfig | None:
    """The value of ``--speculative``; ``UsageError`` for a bad one, before a model is loaded."""
    from ..engine.speculative import SpeculativeConfig

    return SpeculativeConfig.from_value(value)


def _parse_speculative_or_auto(
    context: click.Context, param: click.Parameter, value: str
) -> SpeculativeConfig | str | None:
    return value if value == "auto" else parse_speculative(context, param, value)


speculative_option = click.option(
    "--speculative",
    metavar="METHOD|JSON",
    default="auto",
    show_default=True,
    callback=_parse_speculative_or_auto,
    help="Check guesses of the next tokens: ngram, suffix, mtp (a layer of the checkpoint), none, or options as JSON. "
    "auto takes ngram where results have the same bits with it.",
)


def parse_adapters(context: click.Context, param: click.Parameter, values: Any) -> dict[str, str]:
    """Adapters as ``NAME=FOLDER``, by name. Raises ``BadParameter`` for others, and for a name that occurs twice."""
    found: dict[str, str] = {}
    for value in (values,) if isinstance(values, str) else values or ():
        name, separator, folder = value.partition("=")
        if not (name and separator and folder):
            raise click.BadParameter(f"{value!r} is not NAME=FOLDER, such as french=adapters/french")
        if name in found:
            raise click.BadParameter(f"{name!r} is given twice")
        found[name] = folder
    return found


adapters_option = click.option(
    "--adapter",
    metavar="NAME=FOLDER",
    multiple=True,
    callback=parse_adapters,
    help="A LoRA adapter that PEFT saved in FOLDER, for requests for the model NAME. May be given several times.",
)
adapter_option = click.option(
    "--adapter",
    metavar="NAME=FOLDER",
    callback=parse_adapters,
    help="A LoRA adapter that PEFT saved in FOLDER, which changes the model.",
)


def adapter_room_options(command: Command) -> Command:
    """The room that a model has for adapters."""
    count = "Adapters that the requests of a step may have beside each other; also room for later ones."
    rank = "The largest rank of an adapter; by default 16, or that of the given ones if it is more."
    command = click.option("--max-adapter-rank", type=click.IntRange(1), metavar="N", help=rank)(command)
    return click.option("--max-adapters", type=click.IntRange(1), metavar="N", help=count)(command)


def window_options(command: Command) -> Command:
    """The windows in which a text is read."""
    window = "Tokens that the model sees at once; by default its context, 1024 at most."
    stride = "Tokens from one window to the next; by default half the window."
    command = click.option("--stride", type=int, metavar="N", help=stride)(command)
    return click.option("--window", type=int, metavar="N", help=window)(command)


def model_options(command: Command) -> Command:
    """The argument MODEL, and the options of :func:`bminf_lite.load` that every command for text has."""
    for option in (kv_cache_option, memory_limit_option, device_option, model_argument):
        command = option(command)
    return command


stop_option = click.option(
    "--stop", multiple=True, metavar="TEXT", help="End the completion before this text. May be given several times."
)

_SAMPLING_OPTIONS = (
    ("--max-new-tokens", int, "N", "The most tokens to generate. [128]"),
    ("--temperature", float, "T", "0 takes the most likely token; larger is more random. [0]"),
    ("--top-k", int, "K", "Draw from the K most likely tokens; 0 is off. [0]"),
    ("--top-p", float, "P", "Draw from the fewest most likely tokens whose probabilities add up to P; 1 is off. [1]"),
    ("--min-p", float, "P", "Drop tokens less likely than P times the most likely one, 0 to 1; 0 is off. [0]"),
    ("--repetition-penalty", float, "R", "Over 1 discourages tokens of the prompt and the completion; 1 is off. [1]"),
    ("--frequency-penalty", float, "F", "Subtracted from a token's logit for each time it was generated. [0]"),
    ("--presence-penalty", float, "F", "Subtracted from a token's logit once it was generated. [0]"),
    ("--seed", int, "S", "The same seed gives the same tokens on the same device. [random]"),
)


def sampling_options(command: Command) -> Command:
    """The numbers among :class:`~bminf_lite.engine.sampling_params.SamplingParams`; None if not given."""
    for name, kind, metavar, text in reversed(_SAMPLING_OPTIONS):
        command = click.option(name, type=kind, metavar=metavar, help=text)(command)
    return command


def given_options(sampling: Mapping[str, Any], stop: tuple[str, ...] = ()) -> SamplingOptions:
    """The sampling options that were given; ``UsageError`` if one is out of range, before a model is loaded."""
    from ..engine.sampling_params import SamplingParams

    given = cast("SamplingOptions", {name: value for name, value in sampling.items() if value is not None})
    if stop:
        given["stop"] = stop
    SamplingParams.from_checkpoint({}, **given)
    return given


def progress_callback(bar: tqdm[Any]) -> Callable[[int, int, str], None]:
    """A callback that updates a progress bar: parts that are done, all parts, and the name of the current part."""

    def progress(done: int, total: int, part: str) -> None:
        bar.total = total
        bar.set_postfix_str(part, refresh=False)
        bar.update(done - bar.n)

    return progress


def size_text(size: float) -> str:
    """A number of bytes in powers of 1000, as file sizes usually are: ``17.0 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
