"""The options that say how tokens are chosen, for every command that generates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., None])

_OPTIONS = (
    click.option("--max-new-tokens", type=int, metavar="N", help="The most tokens to generate. [128]"),
    click.option("--temperature", type=float, metavar="T",
                 help="0 takes the most likely token, more is more random. [0]"),
    click.option("--top-k", type=int, metavar="K", help="Draw from the K most likely tokens; 0 is off. [0]"),
    click.option("--top-p", type=float, metavar="P",
                 help="Draw from the likeliest tokens that have this probability together, over 0; 1 is off. [1]"),
    click.option("--min-p", type=float, metavar="P",
                 help="Drop tokens less likely than this fraction of the most likely one, 0 to 1; 0 is off. [0]"),
    click.option("--repetition-penalty", type=float, metavar="R",
                 help="Over 1 discourages tokens seen before, in the prompt too; 1 is off. [1]"),
    click.option("--frequency-penalty", type=float, metavar="F",
                 help="Subtracted from a token's logit for each time it was generated. [0]"),
    click.option("--presence-penalty", type=float, metavar="F",
                 help="Subtracted from a token's logit once it was generated. [0]"),
    click.option("--seed", type=int, metavar="S",
                 help="The same seed gives the same tokens on the same device. [random]"),
)  # fmt: skip

stop_option = click.option(
    "--stop", multiple=True, metavar="TEXT", help="End before this text. May be given several times."
)


def sampling_options(command: Command) -> Command:
    """The options of :class:`~bminf_lite.engine.sampling_params.SamplingParams` that are numbers; None if not given."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def sampling_overrides(sampling: dict[str, float | None], stop: tuple[str, ...] = ()) -> dict[str, Any]:
    """Those that were given. Raises ``UsageError`` for what is out of range, which needs no model to be told."""
    from ..engine.sampling_params import SamplingParams

    given: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    if stop:
        given["stop"] = stop
    SamplingParams(**given)
    return given
