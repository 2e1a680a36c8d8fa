"""A real server for tests and measurements: the command ``bminf-lite serve`` in a process of its own, on loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import bminf_lite

PACKAGE = Path(bminf_lite.__file__).parent
DEMO = PACKAGE / "demo_model"
NAME = "demo"
"""The name under which the server knows its model."""

_SERVED_AT = re.compile(r"served at (http://\S+)")


def demo_folder(folder: Path, chat_template: str) -> Path:
    """A folder with the demo model's files and a chat template, which that model does not have."""
    folder.mkdir(parents=True)
    for path in DEMO.iterdir():
        if path.suffix in (".json", ".safetensors"):
            (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return folder


class ServerProcess:
    """``bminf-lite serve FOLDER``, which has started: ``url`` is where it answers, ``log`` what it has written.

    The server is on the CPU unless ``options`` have another ``--device``, and takes a free port. Raises
    ``RuntimeError`` with its log if it does not start in ``start_seconds``.
    """

    def __init__(self, folder: Path, *options: str, start_seconds: float = 300):
        command = [sys.executable, "-m", "bminf_lite", "serve", str(folder), "--served-model-name", NAME]
        command += ["--device", "cpu", "--port", "0", *options]  # of an option given twice the last counts
        paths = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.url = ""
        self._lines: list[str] = []
        self._started = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._started.wait(start_seconds) or not self.url:
            self.kill()
            raise RuntimeError(f"the server has not started:\n{self.log}")

    @property
    def log(self) -> str:
        """What the server has written to standard error."""
        return "".join(self._lines)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    def stop(self, seconds: float = 300) -> int:
        """End the server as a supervisor does, with SIGTERM; the result is its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"the server has not ended {seconds:g} s after SIGTERM:\n{self.log}") from None
        self._reader.join(60)
        return code

    def kill(self) -> None:
        """End the server's main process at once, with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)
            if found := _SERVED_AT.search(line):
                self.url = found[1]
                self._started.set()
        self._started.set()
