"""``chat``: a dialogue at the terminal."""

from __future__ import annotations

import io
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import BminfError, UsageError
from ._finish import max_new_tokens
from ._options import (
    adapter_option,
    context_option,
    given_options,
    gpus_option,
    model_options,
    sampling_options,
    speculative_option,
    stop_option,
)
from ._prompts import require_stdin

if TYPE_CHECKING:
    from ..api import Model
    from ..engine.sampling_params import SamplingOptions
    from ..engine.speculative import SpeculativeConfig
    from ..text.prompts import EncodedPrompt

PROMPT = "> "
CLEAR = "/clear"
MAX_LINE = 1 << 24
"""Characters of a line from a file or a pipe: more than any context holds."""


@click.command()
@model_options
@gpus_option
@sampling_options
@stop_option
@context_option
@speculative_option
@adapter_option
@click.option("--system", metavar="TEXT", help="The system message.")
def chat(
    model: Path,
    device: str,
    memory_limit: int | None,
    kv_cache: str,
    gpus: int,
    context: int | None,
    speculative: SpeculativeConfig | str | None,
    adapter: dict[str, str],
    stop: tuple[str, ...],
    system: str | None,
    **sampling: float | None,
) -> None:
    """Talk to a model.

    The model in the folder MODEL, which must have a chat template or be EVA, answers each line. It remembers the
    dialogue as far as its context leaves room for an answer, and says what it forgets. Ctrl-C stops an answer, /clear
    forgets everything but the system message, and Ctrl-D ends. The defaults of sampling options are those of the
    model's generation_config.json, or else those in brackets.

    \b
    Example:
      bminf-lite chat Llama-3.2-1B-Instruct-int8 --temperature 0.7
      bminf-lite chat EVA-2-int8 --top-k 10 --temperature 0.85 --repetition-penalty 1.2
    """
    from ..api import load

    require_stdin()
    given = given_options(sampling, stop)
    with load(
        model,
        device=device,
        memory_limit=memory_limit,
        kv_cache=kv_cache,
        context=context,
        speculative=speculative,
        adapters=adapter or None,
        max_adapters=1,
        gpus=gpus,
    ) as loaded:
        dialogue = Dialogue(loaded, system, given, next(iter(adapter), None))
        loaded.encode([*dialogue.start, {"role": "user", "content": "?"}])  # an error appears before the first line
        if sys.stdin.isatty():
            click.echo(f"{loaded.describe()}. Ctrl-C stops an answer, {CLEAR} starts anew, Ctrl-D ends.", err=True)
        run_dialogue(dialogue)


class Dialogue:
    """The messages so far, and the model that answers."""

    def __init__(self, model: Model, system: str | None, options: SamplingOptions, adapter: str | None = None):
        self.model = model
        self.adapter = adapter
        self.options = options
        self.start = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[dict[str, str]] = []

    def answer(self, text: str) -> None:
        """Print an answer while it is generated. Ctrl-C cuts it off; the part until then stays in the dialogue.

        A line that cannot be answered (it is too long, or memory is short) is reported and forgotten.
        """
        self.turns.append({"role": "user", "content": text})
        try:
            said = self._print_reply(self._fitting_prompt())
        except KeyboardInterrupt:  # before the answer has begun
            self.turns.pop()
            click.echo()
        except BminfError as error:
            self.turns.pop()
            click.echo(f"error: {error}", err=True)
        else:
            self.turns.append({"role": "assistant", "content": said})

    def _print_reply(self, prompt: EncodedPrompt) -> str:
        """Print the answer, and return it up to an interrupt."""
        said, result = "", None
        try:
            with closing(self.model.stream(prompt, adapter=self.adapter, **self.options)) as pieces:
                for piece in pieces:
                    said, result = said + piece.text, piece.result
                    click.echo(piece.text, nl=False)
        except KeyboardInterrupt:
            pass
        finally:
            click.echo()
        if result is not None and result.finish_reason == "context":
            click.echo(f"(cut: the model's context of {self._context_length:,} tokens is full)", err=True)
        return said

    @property
    def _context_length(self) -> int:
        return self.model.engine_config.context_length

    def _fitting_prompt(self) -> EncodedPrompt:
        """The dialogue in tokens, without the first exchanges that leave no room for an answer in the context.

        An answer gets room for ``max_new_tokens``, but for half of the context at most.
        """
        kept = self.turns
        room = min(max_new_tokens(self.model, self.options), self._context_length // 2)
        if self.model.engine_config.is_encoder_decoder:
            room = 0  # the decoder has a context of its own
        while True:
            try:
                prompt = self.model.encode([*self.start, *kept])
                fits = len(prompt.token_ids) + room <= self._context_length
            except UsageError:
                fits = False
                if len(kept) < 3:
                    raise
            if not fits and len(kept) >= 3:
                kept = kept[2:]
                continue
            if len(kept) < len(self.turns):
                click.echo(f"(forgotten: the first {len(self.turns) - len(kept)} messages)", err=True)
                self.turns = kept
            return prompt


def _piped_line() -> str:
    """The next line of stdin, of which at most :data:`MAX_LINE` characters are kept. Raises ``EOFError`` at the end."""
    line = sys.stdin.readline(MAX_LINE)
    if not line:
        raise EOFError
    if len(line) == MAX_LINE and not line.endswith("\n"):
        click.echo(f"error: a line has more than {MAX_LINE:,} characters; the rest of it is left out", err=True)
        rest = line
        while rest and not rest.endswith("\n"):
            rest = sys.stdin.readline(MAX_LINE)
    return line


def run_dialogue(dialogue: Dialogue) -> None:
    """Read and answer lines until the end of the input."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 then becomes an invalid prompt
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401, line editing and history for input()
    while True:
        try:
            line = (input(PROMPT) if at_terminal else _piped_line()).strip()
        except EOFError:
            if at_terminal:
                click.echo(err=True)
            return
        except KeyboardInterrupt:
            click.echo(err=True)
            continue
        if line == CLEAR:
            dialogue.turns = []
        elif line.startswith("/"):
            click.echo(f"error: there is no {line.split()[0]}; the only command is {CLEAR}", err=True)
        elif line:
            dialogue.answer(line)
