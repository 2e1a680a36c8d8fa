"""The package's structure: who may import whom, who may name a device, and what an import costs."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import bminf_lite

PACKAGE = Path(bminf_lite.__file__).parent
REPOSITORY = Path(__file__).parents[1]

MAY_IMPORT = {
    "": {
        "api", "server", "migration", "evaluation", "placement", "engine", "grammar", "checkpoint", "memory", "errors",
    },
    "cli": {
        "", "adapters", "api", "batch", "ray", "server", "bench", "converters", "migration", "evaluation", "placement",
        "engine", "grammar", "text", "models", "backend", "checkpoint", "memory", "cuda", "demo_model", "errors",
        "files", "draft_training", "torch",
    },
    "batch": {"api", "server", "engine", "errors", "files"},
    "ray": {"api", "batch", "server", "errors"},
    "server": {"api", "pooling", "request_builder", "engine", "grammar", "text", "errors", "files"},
    "torch": {"backend", "checkpoint", "models", "cuda", "errors", "files"},
    "bench": {
        "api", "placement", "engine", "models", "layers", "backend", "checkpoint", "memory", "cuda", "errors", "files",
    },
    "api": {
        "loading", "adapters", "completions", "request_builder", "pooling", "engine", "grammar", "text", "models",
        "backend", "errors",
    },
    "loading": {
        "adapters", "generation_config", "pooling", "placement", "engine", "models", "layers", "backend", "checkpoint",
        "memory", "errors",
    },
    "adapters": {"placement", "engine", "models", "backend", "checkpoint", "errors"},
    "draft_training": {
        "api", "engine", "models", "layers", "backend", "checkpoint", "torch", "errors",
    },
    "converters": {"checkpoint", "errors", "files"},
    "migration": {"bench", "models", "evaluation", "quantize", "text", "backend", "checkpoint", "errors", "files"},
    "evaluation": {
        "api", "loading", "placement", "pooling", "engine", "quantize", "text", "models", "layers", "backend",
        "checkpoint", "errors", "files",
    },
    "placement": {"engine", "models", "layers", "backend", "checkpoint", "memory", "cuda", "errors", "files"},
    "pooling": {
        "request_builder", "models", "text", "gguf_files", "engine", "checkpoint", "backend", "errors", "files",
    },
    "request_builder": {"engine", "grammar", "text", "errors"},
    "completions": {"engine", "text"},
    "grammar": {"text", "worker_process", "errors", "files"},
    "text": {"gguf_files", "worker_process", "errors", "files"},
    "gguf_files": {"errors"},
    "engine": {"generation_config", "grammar", "layers", "backend", "errors"},
    "quantize": {"models", "layers", "backend", "checkpoint", "errors"},
    "checkpoint": {"generation_config", "models", "gguf_files", "backend", "worker_process", "errors", "files"},
    "models": {"layers", "backend", "errors"},
    "layers": {"backend", "errors"},
    "backend": {"cuda", "memory", "errors"},
    "memory": {"cuda", "errors"},
    "cuda": {"errors", "files"},
    "demo_model": set(),
    "__main__": {"cli"},
    "worker_process": {"errors"},
    "files": {"errors"},
    "generation_config": {"errors"},
    "errors": set(),
}  # fmt: skip
"""By part of the package: what it may import beside itself. ``""`` is ``bminf_lite/__init__.py``, the public API."""

VOCABULARY = {
    "bminf_lite.version",
    "bminf_lite.backend.values",
    "bminf_lite.backend.cache_values",
    "bminf_lite.backend.expert_values",
}
"""Modules that every part may import: a constant, and the plain values that operations exchange."""

MAY_IMPORT_CUPY = ("cuda/", "backend/cuda/", "memory/device.py", "bench/cuda.py")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """All statements below a node; unlike ``ast.walk`` it visits no expression, and most nodes are expressions."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, field, ()):
            if isinstance(node, ast.stmt):
                yield node
            yield from statements(node)


@functools.cache
def imports(path: Path) -> set[str]:
    """The modules that a module imports anywhere in it, functions and type checking included.

    ``from .a import b`` imports ``a.b`` if that is a module, else ``a``.
    """
    package = ["bminf_lite", *path.relative_to(PACKAGE).parent.parts]
    found: set[str] = set()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                place = PACKAGE.parent.joinpath(*base, alias.name)
                is_module = place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()
                found.add(".".join([*base, alias.name] if is_module else base))
    return found


def own_imports(path: Path) -> set[str]:
    """The imported modules that are this package's."""
    return {name for name in imports(path) if name.split(".")[0] == "bminf_lite"}


def part(module: str) -> str:
    """``bminf_lite.backend.base`` -> ``backend``; a name of the public API -> ``""``."""
    names = module.split(".")
    return names[1] if len(names) > 1 and names[1] in MAY_IMPORT else ""


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_dependencies_point_down(path):
    own = part(".".join(["bminf_lite", *path.relative_to(PACKAGE).with_suffix("").parts]))
    used = {part(name) for name in own_imports(path) - VOCABULARY}
    assert used - {own} <= MAY_IMPORT[own], f"{relative(path)} imports {sorted(used - {own} - MAY_IMPORT[own])}"


@pytest.mark.parametrize("folder", ["engine", "models/parts", "backend", "backend/operations", "backend/cuda"])
def test_the_first_page_names_every_module(folder):
    """docs/architecture.md has a table with a sentence for each module of these folders."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    table = text.split(f"**`{folder}/`**", 1)[1].split("\n\n**", 1)[0].split("\n## ", 1)[0]
    names = {path.name for path in (PACKAGE / folder).glob("*.py")} - {"__init__.py"}
    assert names - set(re.findall(r"`(\w+\.py)`", table)) == set()


def test_the_vocabulary_stands_on_nothing():
    assert not any(own_imports(path) - VOCABULARY for path in modules() if module_name(path) in VOCABULARY)


def test_the_parts_have_no_cycle():
    assert not cycles(MAY_IMPORT)


def test_the_modules_have_no_cycle():
    """Imports inside functions and for type checkers count too."""
    by_name = {module_name(path): path for path in modules()}
    graph = {name: (imports(path) & by_name.keys()) - {name} for name, path in by_name.items()}
    assert not cycles(graph)


def test_the_cuda_runtime_knows_no_kernel():
    for path in (PACKAGE / "cuda" / "runtime").glob("*.py"):
        assert not any(name.startswith("bminf_lite.cuda.kernels") for name in own_imports(path)), path.name


def cycles(graph: dict[str, set[str]]) -> list[str]:
    """The nodes that lie on a cycle or between two."""
    remaining = {name: set(uses) for name, uses in graph.items()}
    while leaves := [name for name, uses in remaining.items() if not uses & remaining.keys()]:
        for name in leaves:
            del remaining[name]
    used = set().union(*remaining.values())
    while roots := remaining.keys() - used:
        for name in roots:
            del remaining[name]
        used = set().union(*remaining.values())
    return sorted(remaining)


def module_name(path: Path) -> str:
    names = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_only_the_device_parts_import_cupy(path):
    libraries = {name.split(".")[0] for name in imports(path)}
    if not relative(path).startswith("torch/"):
        assert not libraries & {"torch", "transformers", "peft"}
    if not relative(path).startswith(MAY_IMPORT_CUPY):
        assert not libraries & {"cupy", "cupyx", "cupy_backends"}


@pytest.mark.parametrize("path", [p for p in modules() if relative(p).startswith(("layers/", "models/"))], ids=relative)
def test_layers_and_models_name_no_device(path):
    assert not re.search(r"cupy|cuda|gpu|nvidia|\.device\b", path.read_text(), re.IGNORECASE)


def test_what_there_is_to_compile_is_known_without_cupy():
    """As in a plain test run, whose environment has the compiler and no CuPy."""
    code = "import sys; sys.modules['cupy'] = None; sys.path.insert(0, 'tests/cuda'); import instantiations; print(1)"
    assert python(code) == "1"


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout.strip()


WRITES = {
    "files.py": "write_file, which all others use",
    "checkpoint/writer.py": "weights, in pieces, into the hidden folder of output_folder",
    "checkpoint/output_folder.py": "renames that folder",
    "checkpoint/migrate.py": "copies into that folder",
    "converters/model_parallel.py": "copies into that folder, and a hidden folder beside it",
    "torch/folders.py": "copies into that folder",
    "batch/local.py": "joins blocks into a partial file, and renames it",
    "batch/output.py": "appends to journals",
    "cli/demo.py": "a folder of temporary files",
    "cli/__init__.py": "opens /dev/null",
    "server/request_log.py": "appends",
    "bench/profiler.py": "a switch of the Linux kernel under /proc",
}
"""The modules that open files for writing or rename them, and why a half-written file cannot take an earlier one's
place there. Everything else calls ``write_file`` or ``save_result`` of ``files``."""

ALWAYS_WRITE = {"write_text", "write_bytes", "NamedTemporaryFile", "mkstemp", "mkdtemp", "TemporaryDirectory", "tofile",
                "symlink_to", "hardlink_to", "save_file"}  # fmt: skip
OS_WRITES = {"rename", "replace", "renames", "link", "truncate"}
COPIES = {"copy", "copy2", "copyfile", "copytree", "move"}
NUMPY_WRITES = {"save", "savez", "savez_compressed", "savetxt"}
WRITERS = {"open", "fdopen", "savefig"} | ALWAYS_WRITE | OS_WRITES | COPIES | NUMPY_WRITES
"""Names of functions that may write, copy or rename files: some do as functions of one module only."""


def writes(tree: ast.AST) -> list[int]:
    """The lines with calls that write, copy or rename files."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name not in WRITERS:
            continue
        owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
        strings = [a.value for a in [*node.args, *(k.value for k in node.keywords)] if isinstance(a, ast.Constant)]
        modes = [s for s in strings if isinstance(s, str) and re.fullmatch(r"[rwxabt+]{1,3}", s)]
        if name in ("open", "fdopen"):
            is_write = any(set(mode) & set("wxa+") for mode in modes) or "O_WRONLY" in ast.unparse(node)
            is_write = is_write or "O_RDWR" in ast.unparse(node) or "O_CREAT" in ast.unparse(node)
        elif name == "savefig":
            is_write = not (node.args and ast.unparse(node.args[0]) == "content")  # memory, by this package's habit
        else:
            is_write = (
                name in ALWAYS_WRITE
                or (owner == "os" and name in OS_WRITES)
                or (owner == "shutil" and name in COPIES)
                or (owner == "np" and name in NUMPY_WRITES)
            )
        if is_write:
            found.append(node.lineno)
    return found


def test_files_are_written_in_one_place():
    found = {relative(path) for path in modules() if writes(ast.parse(path.read_text()))}
    assert found == WRITES.keys()


@pytest.mark.parametrize(
    "code", ["open(p, 'w')", "p.open(mode='ab')", "open(p, 'r+b')", "os.open(p, os.O_RDWR)", "p.write_text('')",
             "figure.savefig(path)", "shutil.copy(a, b)", "os.replace(a, b)", "np.savez(p)", "x.tofile(p)"],
)  # fmt: skip
def test_what_writes_is_recognized(code):
    assert writes(ast.parse(code)) and not writes(ast.parse("open(p, 'rb'); s.replace('a', 'w'); x.copy()"))


def tracked_files() -> list[Path]:
    """The repository's files; empty outside a clone."""
    result = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    return [REPOSITORY / name for name in result.stdout.split("\0") if name]


def test_modules_of_tests_have_names_of_their_own():
    """pytest imports them by these names, and cannot import two of one name in one run."""
    names = Counter(path.name for path in (REPOSITORY / "tests").rglob("*.py"))
    assert [name for name, count in names.items() if count > 1 and name != "conftest.py"] == []


def test_no_file_names_a_place_on_its_author_s_machine():
    """Top-level folders that an example would not use."""
    places = re.compile(rb"(?<![\w.~:/-])/(work|root|opt(?!/cuda))/\w+")
    found = {
        f"{path.relative_to(REPOSITORY)}: {match.group().decode()}"
        for path in tracked_files()
        if path.is_file() and (match := places.search(path.read_bytes()))
    }
    assert not found
