"""Keeps the fastest cublasLt algorithm of each product, and the choice between kernels, across processes.

An :class:`AlgorithmStore` belongs to one GPU model, driver, cublasLt version and workspace size. They are part of the
file's name, so an upgrade begins a new, empty store. A file that cannot be read counts as empty, and cublasLt checks
each stored algorithm before its use, so a damaged file cannot change results.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ...runtime import cubin_cache
from ...runtime.cublaslt import Algorithm

FORMAT = 2


class AlgorithmStore:
    """Algorithms and choices by a key that describes the product, in memory and in a small JSON file.

    ``identity`` names all that an algorithm depends on; with ``folder`` None, the store is in memory only.
    """

    def __init__(self, identity: str, folder: Path | None) -> None:
        self._folder = folder
        self._file = f"matmul-{hashlib.sha256(f'{FORMAT} {identity}'.encode()).hexdigest()[:32]}.json"
        self._known = self._read()

    def get(self, key: str) -> Algorithm | None:
        """A copy of the algorithm kept for ``key``; None if there is none."""
        stored = self._known.get(key)
        return Algorithm.from_buffer_copy(bytes.fromhex(stored)) if isinstance(stored, str) else None

    def put(self, key: str, algorithm: Algorithm) -> None:
        """Keep an algorithm in memory and on disk, merged with the entries of other processes."""
        self._keep(key, bytes(algorithm).hex())

    def choice(self, key: str) -> bool | None:
        """The choice kept for ``key``; None if there is none."""
        stored = self._known.get(key)
        return stored if isinstance(stored, bool) else None

    def put_choice(self, key: str, choice: bool) -> None:
        """Keep a choice as :meth:`put` does an algorithm."""
        self._keep(key, choice)

    def _keep(self, key: str, value: str | bool) -> None:
        self._known = {**self._read(), **self._known, key: value}
        if self._folder is not None:
            cubin_cache.write(self._folder, self._file, json.dumps(self._known, indent=1).encode())

    def _read(self) -> dict[str, str | bool]:
        content = None if self._folder is None else cubin_cache.read(self._folder, self._file)
        return {} if content is None else json.loads(content)
