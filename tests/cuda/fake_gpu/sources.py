"""What the sources in ``cuda/kernels`` say of each kernel: its template's parameters, and its own with their types."""

from __future__ import annotations

import functools
import re
import struct
from dataclasses import dataclass

from bminf_lite.cuda.runtime import compiler

LETTERS = {
    "int": "i", "long long": "q", "float": "f", "u64": "Q", "unsigned long long": "Q", "unsigned": "I", "double": "d",
    "bool": "?", "TensorMap": "T",
}  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """One parameter: ``letter`` as in a signature, ``type`` without ``const``."""

    name: str
    type: str
    letter: str


@dataclass(frozen=True)
class Declaration:
    """A ``__global__`` function."""

    name: str
    template: tuple[str, ...]
    parameters: tuple[Parameter, ...]

    @property
    def signature(self) -> str:
        """A letter for each parameter; those of a struct count one by one."""
        return "".join(p.letter for p in self.parameters)

    def unpack(self, parameters: bytes) -> dict[str, int | float]:
        """Values by name."""
        values = struct.unpack("@" + self.signature.replace("p", "P").replace("T", "128s"), parameters)
        return dict(zip((p.name for p in self.parameters), values, strict=True))


def split_expression(expression: str) -> tuple[str, tuple[str, ...]]:
    """``"bminf::k<1, 2>"`` -> ``"k"`` and ``("1", "2")``."""
    name, _, arguments = expression.partition("<")
    return name.removeprefix("bminf::"), tuple(a.strip() for a in arguments.rstrip(">").split(",") if a.strip())


@functools.cache
def declarations(source: str) -> dict[str, Declaration]:
    """The kernels of a source file by name."""
    text = (compiler.SOURCES / source).read_text(encoding="utf-8")
    headers = compiler._included(text, compiler.SOURCES)
    text, everything = (_without_comments(t) for t in (text, "\n".join([*headers.values(), text])))
    pattern = r"(?:template\s*<([^>]*)>\s*)?__global__\s+void\s*(?:__launch_bounds__\(.*?\)\s+)?(\w+)\s*\(([^)]*)\)"
    found = {}
    for template, name, parameters in re.findall(pattern, text, re.DOTALL):
        names = tuple(part.split()[-1] for part in template.split(",") if part.strip())
        found[name] = Declaration(name, names, tuple(_parameters(parameters.split(","), everything)))
    return found


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


def _parameters(parts: list[str], text: str) -> list[Parameter]:
    found: list[Parameter] = []
    for part in parts:
        words = re.sub(r"\b(const|__restrict__|__grid_constant__)\b", " ", part)
        match = re.fullmatch(r"\s*(.*?)\s*(\*?)\s*(\w+)\s*", words, re.DOTALL)
        assert match, part
        kind, star, name = match.groups()
        if star:
            found.append(Parameter(name, kind, "p"))
        elif kind in LETTERS:
            found.append(Parameter(name, kind, LETTERS[kind]))
        else:
            found += _fields(kind, text)
    return found


def _fields(struct_name: str, text: str) -> list[Parameter]:
    """The members of a struct, up to its first function."""
    match = re.search(rf"struct {struct_name} \{{(.*?)(?:__device__|\}};)", text, re.DOTALL)
    assert match, struct_name
    found: list[Parameter] = []
    for statement in match[1].split(";"):
        first, *others = statement.split(",")
        if not first.strip():
            continue
        found += _parameters([first], text)
        for other in others:
            pointer = "*" in other
            found.append(Parameter(other.strip(" *\n"), found[-1].type, "p" if pointer else LETTERS[found[-1].type]))
    return found
