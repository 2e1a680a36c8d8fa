"""What runs in the process that :mod:`.worker_process` starts: ``python worker_loop.py PROGRAM``.

PROGRAM is a file with a function ``start(setup)``, which returns the function that makes the reply to a request. The
first line of standard input is the setup, a JSON object; the reply to it is an empty object. Each later line is a
request. The setup's ``path`` becomes the import path, and its ``memory`` bounds the bytes of address space once the
program has started. Neither this file nor a program imports anything of the package, so that they start quickly.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    sys.path[:] = setup["path"]
    reply = load(sys.argv[1]).start(setup)
    limit_memory(setup["memory"])
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(reply(json.loads(line))), flush=True)


def load(path: str) -> Any:
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("program", path)
    assert spec is not None and spec.loader is not None, path
    program = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def limit_memory(size: int) -> None:
    """Make allocations beyond ``size`` bytes of address space fail. Only Linux enforces it."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


if __name__ == "__main__":
    main()
