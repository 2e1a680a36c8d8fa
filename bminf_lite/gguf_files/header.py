"""The header of a GGUF file, or of all parts of a split one: metadata, and the place and type of each tensor."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, checkpoint_error
from .header_file import HeaderFile, HeaderProblem

REMEDY = "migrate the model's Hugging Face folder instead"
"""What to do about a file that lacks something, or has what this version does not run."""

INSTALL = "pip install 'bminf-lite[gguf]'"
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor: its row-major ``shape``, its ``type`` (``F16``, ``Q8_0``, ...), its ``nbytes`` from ``offset`` on."""

    path: Path
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """``paths`` are the parts of the file; ``metadata`` holds numbers, texts and lists of them by key."""

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def path(self) -> Path:
        return self.paths[0]

    @property
    def architecture(self) -> str:
        """The name of the architecture, under which its metadata are."""
        return str(self.metadata.get("general.architecture"))

    def of_model(self, key: str, default: Any = None) -> Any:
        """The metadata ``{architecture}.{key}``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that ``path`` names: itself, or the only model in a folder without a ``config.json``."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(file for file in path.glob("*.gguf") if _part_number(file) == 1)
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(f"{path}: holds {len(found)} GGUF models ({names}); give the path of one of them")
    return found[0] if found else None


def read_header(path: Path) -> GgufHeader:
    """The header of the model whose first or only part is ``path``.

    Raises :class:`CheckpointError` if the package ``gguf`` is missing, if a part is missing or damaged.
    """
    headers = [_read_part(part, part.stat().st_mtime_ns) for part in _parts(path)]
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    return GgufHeader(tuple(header.path for header in headers), headers[0].metadata, tensors)


def _part_number(path: Path) -> int:
    match = PART.fullmatch(path.name)
    return int(match[2]) if match else 1


def _parts(path: Path) -> list[Path]:
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    parts = [path.with_name(f"{match[1]}-{i + 1:05}-of-{match[3]}.gguf") for i in range(int(match[3]))]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path.parent}: part {missing[0]} of {len(parts)} is missing; download it again")
    return parts


@functools.lru_cache(maxsize=8)
def _read_part(path: Path, modified: int) -> GgufHeader:
    """The header of one file, read once while the file does not change."""
    try:
        import gguf
    except ImportError:
        raise CheckpointError(f"{path}: reading GGUF needs the package gguf: {INSTALL}") from None
    try:
        header = HeaderFile(path)
    except HeaderProblem as error:
        raise CheckpointError(f"{path}: is no GGUF file that can be read: {error}; download it again") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if problems := _type_problems(header.metadata):
        raise checkpoint_error(path, problems, "export the model again")
    size = path.stat().st_size
    tensors = {}
    for name, entry in header.tensors.items():
        try:
            kind = gguf.GGMLQuantizationType(entry.type_number)
        except ValueError:
            problems.append(f"tensor {name!r} has type {entry.type_number}, which the package gguf does not know")
            continue
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        count = math.prod(entry.shape)
        if count % block_size or (entry.shape and entry.shape[-1] % block_size):
            problems.append(f"tensor {name!r} {list(entry.shape)} has no whole blocks of {block_size} ({kind.name})")
            continue
        if not entry.shape or (len(entry.shape) == 1 and block_size > 1):
            problems.append(f"tensor {name!r} {list(entry.shape)} has no rows ({kind.name})")
            continue
        nbytes, start = count // block_size * block_bytes, header.data_start + entry.offset
        if start + nbytes > size:
            raise CheckpointError(f"{path}: ends before tensor {name!r}; it is truncated: download it again")
        tensors[name] = GgufTensor(path, entry.shape, kind.name, start, nbytes)
    if problems:
        raise checkpoint_error(path, problems, "download it again, or upgrade the package gguf")
    return GgufHeader((path,), header.metadata, tensors)


def _type_problems(metadata: Mapping[str, Any]) -> list[str]:
    """What is wrong with the types of metadata that name things, of those that are there."""
    texts, lists = ("general.architecture", "tokenizer.ggml.model"), ("tokenizer.ggml.tokens",)
    found = [f"{key} is {_short(metadata[key])}, not a text" for key in texts if not _is_text(metadata.get(key, ""))]
    for key in lists:
        values = metadata.get(key, [])
        if not isinstance(values, list) or not all(map(_is_text, values)):
            found.append(f"{key} is {_short(values)}, not a list of texts")
    return found


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _short(value: Any) -> str:
    return repr(value[:5] if isinstance(value, list) else value)[:60]
