"""``chat``: a dialogue at the terminal."""

from __future__ import annotations

import io
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import BminfError, UsageError
from ._options import device_option, kv_cache_option, memory_limit_option, model_argument
from ._prompts import require_stdin
from ._sampling import sampling_options, sampling_overrides, stop_option

if TYPE_CHECKING:
    from ..api import Model

PROMPT = "> "
CLEAR = "/clear"


@click.command()
@model_argument
@device_option
@memory_limit_option
@kv_cache_option
@sampling_options
@stop_option
@click.option("--system", metavar="TEXT", help="The system message.")
def chat(
    model: Path,
    device: str,
    memory_limit: int | None,
    kv_cache: str,
    stop: tuple[str, ...],
    system: str | None,
    **sampling: float | None,
) -> None:
    """Talk to a model.

    Each line is answered by the model in the folder MODEL, which must have a chat template or be EVA; what was said
    before is remembered as far as the model's context reaches. Ctrl-C stops an answer, /clear forgets everything but
    the system message, and Ctrl-D ends. Options of sampling that are not given come from the model's
    generation_config.json, and else are as in brackets.

    \b
    Example:
      bminf-lite chat Llama-3.2-1B-Instruct-int8 --temperature 0.7
      bminf-lite chat EVA-2-int8 --top-k 10 --temperature 0.85 --repetition-penalty 1.2
    """
    from ..api import load

    require_stdin()
    given = sampling_overrides(sampling, stop)
    with load(model, device=device, memory_limit=memory_limit, kv_cache=kv_cache) as loaded:
        dialogue = Dialogue(loaded, system, given)
        loaded.encode([*dialogue.start, {"role": "user", "content": "?"}])  # refused before the first line, if ever
        if sys.stdin.isatty():
            click.echo(f"{loaded.describe()}. Ctrl-C stops an answer, {CLEAR} starts anew, Ctrl-D ends.", err=True)
        run_dialogue(dialogue)


class Dialogue:
    """What was said so far, and the model that answers."""

    def __init__(self, model: Model, system: str | None, options: dict[str, Any]):
        self.model = model
        self.options = options
        self.start = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[dict[str, str]] = []

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.turns = []

    def answer(self, text: str) -> None:
        """Print an answer as it comes. Ctrl-C ends it there; what was said by then is part of the dialogue.

        What cannot be answered (too long, no memory for it) is told and forgotten, and the dialogue goes on.
        """
        self.turns.append({"role": "user", "content": text})
        try:
            said = self._print_reply(self._fitting_prompt())
        except BminfError as error:
            self.turns.pop()
            click.echo(f"error: {error}", err=True)
        else:
            self.turns.append({"role": "assistant", "content": said})

    def _print_reply(self, prompt: Any) -> str:
        """The answer, printed, as far as it came."""
        said = ""
        try:
            with closing(self.model.stream(prompt, **self.options)) as pieces:
                for piece in pieces:
                    said += piece.text
                    click.echo(piece.text, nl=False)
        except KeyboardInterrupt:
            pass
        finally:
            click.echo()
        return said

    def _fitting_prompt(self) -> Any:
        """The dialogue in tokens, without its first exchanges if the model's context cannot hold them."""
        kept = self.turns
        while True:
            try:
                prompt = self.model.encode([*self.start, *kept])
            except UsageError:
                if len(kept) < 3:
                    raise
                kept = kept[2:]
                continue
            if len(kept) < len(self.turns):
                click.echo(f"(forgotten: the first {len(self.turns) - len(kept)} messages)", err=True)
                self.turns = kept
            return prompt


def run_dialogue(dialogue: Dialogue) -> None:
    """Read lines and have them answered, until the end of the input."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 is refused as a prompt, and no more
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401, line editing and history for input()
    while True:
        try:
            line = input(PROMPT if at_terminal else "").strip()
        except EOFError:
            if at_terminal:
                click.echo(err=True)
            return
        except KeyboardInterrupt:
            click.echo(err=True)
            continue
        if line == CLEAR:
            dialogue.clear()
        elif line.startswith("/"):
            click.echo(f"error: there is no {line.split()[0]}; the only command is {CLEAR}", err=True)
        elif line:
            dialogue.answer(line)
