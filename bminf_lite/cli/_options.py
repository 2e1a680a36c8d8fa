"""Options that several commands share, and sizes for people."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import UsageError

model_argument = click.argument("model", metavar="MODEL", type=click.Path(path_type=Path))

text_argument = click.argument("text", metavar="FILE", type=click.Path(path_type=Path))

window_option = click.option(
    "--window", type=int, metavar="N", help="Tokens that the model sees at once; by default its context, 1024 at most."
)

stride_option = click.option(
    "--stride", type=int, metavar="N", help="Tokens from one window to the next; by default half the window."
)

device_option = click.option(
    "--device", default="auto", show_default=True, metavar="auto|cpu|cuda|cuda:N",
    help="Where to run: auto takes a GPU if one can be used, and else the CPU.",
)  # fmt: skip


class Size(click.ParamType):
    """An amount of memory such as ``6GiB``, in bytes."""

    name = "size"

    def convert(self, value: str | int, parameter: click.Parameter | None, context: click.Context | None) -> int:
        from ..memory.sizes import parse_size

        try:
            return parse_size(value)
        except UsageError as error:
            self.fail(str(error), parameter, context)


memory_limit_option = click.option(
    "--memory-limit", type=Size(), metavar="SIZE",
    help="The most GPU memory to use, for example 6GiB or 800MiB; by default almost all that is free.",
)  # fmt: skip

kv_cache_option = click.option(
    "--kv-cache", type=click.Choice(["fp16", "int8"]), default="fp16", show_default=True,
    help="The type of the key-value cache; int8 takes half the memory.",
)  # fmt: skip


def size_text(size: float) -> str:
    """A number of bytes in powers of 1000, as files are usually measured: ``17.0 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
