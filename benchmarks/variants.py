"""Source trees that a script compares, each in processes of its own."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

TIME_LIMIT = 200
"""Seconds of one process: a kernel that never ends must not take the rest of the time."""


@dataclass(frozen=True)
class Variant:
    """A source tree, and constants of a module of it."""

    name: str
    folder: Path
    settings: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """From NAME=FOLDER:SETTINGS; raises ``SystemExit`` if it is not of this form or not a tree of this package."""
        name, separator, place = text.partition("=")
        if not separator:
            sys.exit(f"error: {text!r} is not of the form NAME=FOLDER:SETTINGS")
        folder, _, settings = place.partition(":")
        if not (Path(folder) / "bminf_lite").is_dir():
            sys.exit(f"error: {folder!r} of {text!r} holds no folder bminf_lite; give a source tree")
        pairs = (part.split("=") for part in settings.split(";") if part)
        return cls(name, Path(folder).resolve(), {key: ast.literal_eval(value) for key, value in pairs})

    def run(self, script: str, *arguments: str) -> Any:
        """What ``script`` prints as JSON in a process that imports the variant; None, and a report, if it fails."""
        command = [sys.executable, script, "--settings", json.dumps(self.settings), *arguments]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")]),
        }
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, cwd=self.folder, timeout=TIME_LIMIT
            )
            done.check_returncode()
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{self.name}: {error}\n{str(error.stdout)[-2000:]}{str(error.stderr)[-4000:]}", flush=True)
            return None
        return json.loads(done.stdout[done.stdout.index("{") :])


def apply_settings(modules: Sequence[ModuleType], settings: dict[str, Any]) -> None:
    """Set constants of the modules that have them; raises ``SystemExit`` for one that none has."""
    for key, value in settings.items():
        having = [module for module in modules if hasattr(module, key)]
        if not having:
            sys.exit(f"error: no constant {key} in {' or '.join(module.__name__ for module in modules)}")
        for module in having:
            setattr(module, key, value)
