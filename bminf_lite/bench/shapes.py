"""Model shapes: configurations in the form of a checkpoint's ``config.json``, for models with random weights."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from ..checkpoint.reader import read_json
from ..errors import UsageError


def shape_names() -> list[str]:
    """The shapes that come with the package, sorted."""
    folder = resources.files("bminf_lite").joinpath("configs")
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))


def read_shape(name: str) -> dict[str, Any]:
    """The configuration of the shape ``name``, or that in the file ``name``.

    Raises ``UsageError`` if there is neither, ``CheckpointError`` for a file that is not a JSON object.
    """
    if name in shape_names():
        with resources.as_file(resources.files("bminf_lite").joinpath("configs", f"{name}.json")) as path:
            return read_json(path)
    if Path(name).is_file():
        return read_json(Path(name))
    raise UsageError(f"--shape {name!r} is neither a file nor one of: {', '.join(shape_names())}")
