"""How this package words its errors: one title, then every problem on a line of its own."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import CheckpointError


def checkpoint_error(title: object, problems: Sequence[str]) -> CheckpointError:
    """An error that lists all ``problems`` under ``title`` (a path, mostly)."""
    if len(problems) == 1:
        return CheckpointError(f"{title}: {problems[0]}")
    return CheckpointError(f"{title}: {len(problems)} problems\n" + "\n".join(f"  - {problem}" for problem in problems))
