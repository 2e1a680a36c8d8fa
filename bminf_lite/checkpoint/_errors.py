"""How this package words its errors: one title, then every problem on a line of its own."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import CheckpointError, listed


def checkpoint_error(title: object, problems: Sequence[str], remedy: str = "") -> CheckpointError:
    """An error that lists all ``problems`` under ``title`` (a path, mostly), and at the end what helps against them."""
    text = listed(title, problems)
    if remedy:
        text += ("; " if len(problems) == 1 else "\n") + remedy
    return CheckpointError(text)
