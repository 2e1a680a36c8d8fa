"""The command line. Each file of this folder is a command of the same name, unless the name starts with ``_``.

An underscore in a file's name is a hyphen in the command's. Commands parse arguments, call the Python API and print:
results on stdout, progress and messages on stderr. A file's functions import what takes time to load, such as NumPy, so
that ``--help`` is quick.

Exit codes: 0; 1 for a failed job; 2 for wrong usage; 130 after Ctrl-C, and 128 plus the number of another signal that
asks the process to end, after it has removed unfinished files. An error is one message, with a traceback only under
``--debug``. Output that cannot be written is a failed job, without a message if the reader has closed the pipe.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import pkgutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from ..errors import BminfError, UsageError
from ..version import __version__

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130


def _debug_option() -> click.Option:
    """``--debug``, accepted before and after the command's name."""

    def remember(context: click.Context, _: click.Parameter, value: bool) -> None:
        root = context.find_root()
        root.obj = root.obj or value

    text = "Show a traceback when something fails."
    return click.Option(["--debug"], is_flag=True, expose_value=False, is_eager=True, callback=remember, help=text)


class CommandLine(click.Group):
    """Finds the commands in this folder, and turns exceptions into messages and exit codes."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(context):
            return None
        module = name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"{__name__}.{module}"), module)
        if not any(p.name == "debug" for p in command.params):
            command.params.append(_debug_option())
        return command

    def main(self, *args: Any, **options: Any) -> Any:
        """click's ``main``, which also handles output that cannot be written or encoded."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        if sys.stdout is None:  # every result would be lost without a word
            _print_error(UsageError("stdout is closed: connect it to a terminal, a file or a pipe"))
            sys.exit(WRONG_USAGE)
        try:
            with _signals_end_in_order():
                return super().main(*args, **options)
        except OSError as error:  # from printing help, a version or a message: invoke() handles those of commands
            _print_error(error)
            sys.exit(FAILED)
        finally:
            _discard_stdout()

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader of the output has closed the pipe: click ends the process quietly
            if context.obj:
                traceback.print_exception(error)
            else:
                _print_error(error)
            if isinstance(error, KeyboardInterrupt):
                context.exit(INTERRUPTED)
            context.exit(WRONG_USAGE if isinstance(error, UsageError) else FAILED)


@contextmanager
def _signals_end_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP raise ``SystemExit``, so that unfinished files are removed and streams are closed."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_error(error: BaseException) -> None:
    with suppress(OSError):  # stderr cannot be written: the exit code remains
        click.echo(_message(error), err=True)


def _discard_stdout() -> None:
    """Drop output that could not be written: Python would retry at exit, report it and change the exit code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:  # noqa: PERF203, either may fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _has_working_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        hint = f"; {error}" if error.args else ""
        return f"\ninterrupted{hint}"  # on the line below the terminal's "^C"
    if isinstance(error, BminfError):
        return f"error: {error}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) and not error.filename:
        return f"error: the output cannot be written: {error.strerror}; make room, or write it elsewhere"
    if isinstance(error, FileNotFoundError) and not error.filename and not _has_working_folder():
        return "error: the working directory has been deleted: change to another one, or give absolute paths"
    if isinstance(error, OSError) and error.strerror:
        return f"error: {error.strerror}" + (f": {error.filename}" if error.filename else "")
    if isinstance(error, MemoryError):
        return f"error: the host's memory does not suffice ({error}); take a smaller model, batch or context"
    return f"error: {type(error).__name__}: {error} (run again with --debug for the traceback)"


main = CommandLine(
    "bminf-lite",
    params=[_debug_option()],
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Migrate a language-model checkpoint to int8, and generate text with it.

    \b
    Example:
      bminf-lite demo
      bminf-lite migrate Llama-3.2-1B Llama-3.2-1B-int8
      bminf-lite generate Llama-3.2-1B-int8 "Once upon a time"
    """,
)
click.version_option(__version__, prog_name="bminf-lite")(main)
