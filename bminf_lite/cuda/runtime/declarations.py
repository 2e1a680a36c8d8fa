"""Reads the parameters of kernels from their ``__global__`` declarations, so that no other place repeats them.

The parser covers the subset of CUDA C++ that the kernels are written in: parameters are pointers, numbers, a
``TensorMap``, or a struct of these. A type outside that subset raises ``ValueError``.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from .tensor_maps import NBYTES as TENSOR_MAP_BYTES

LETTERS = {
    "int": "i",
    "unsigned": "I",
    "unsigned int": "I",
    "long long": "q",
    "unsigned long long": "Q",
    "u64": "Q",
    "float": "f",
    "double": "d",
    "bool": "?",
    "TensorMap": "T",
}
"""The :mod:`struct` letter of a parameter's type; ``T`` is a tensor map (:mod:`.tensor_maps`)."""
_TEMPLATE = re.compile(r"template\s*<([^<>]*)>\s*")
_KERNEL = re.compile(r"__global__\s+void\s+")
_QUALIFIERS = re.compile(r"\b(?:const|__restrict__|__grid_constant__)\b")
_PARAMETER = re.compile(r"\s*(.*?)\s*(\*?)\s*(\w+)\s*", re.DOTALL)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class CParameter:
    """One parameter; ``letter`` is that of :mod:`struct` (``p`` for a pointer), ``type`` has no ``const``."""

    name: str
    type: str
    letter: str


@dataclass(frozen=True)
class Declaration:
    """A ``__global__`` function: its template parameters and its parameters. Each member of a struct is a parameter."""

    name: str
    template: tuple[str, ...]
    parameters: tuple[CParameter, ...]

    @property
    def signature(self) -> str:
        """The parameters' letters."""
        return "".join(p.letter for p in self.parameters)


def kernel_name(expression: str) -> str:
    """``"bminf::attend<64, true>"`` -> ``"attend"``."""
    return expression.partition("<")[0].rpartition("::")[2].strip()


def parse_declarations(text: str, headers: str = "") -> dict[str, Declaration]:
    """The kernels that ``text`` declares, by name without namespace; structs may be defined in ``headers`` too."""
    text = _COMMENT.sub("", text)
    everything: list[str] = []  # filled when a parameter is a struct
    found = {}
    for match in _KERNEL.finditer(text):
        template = _TEMPLATE.fullmatch(text, max(0, text.rfind("template", 0, match.start())), match.start())
        place = match.end()
        if text.startswith("__launch_bounds__", place):
            place = _closing(text, text.index("(", place)) + 1
        opening = text.index("(", place)
        name = text[place:opening].strip()
        closing = _closing(text, opening)
        parameters: list[CParameter] = []
        for part in text[opening + 1 : closing].split(","):
            if not part.strip():
                continue
            parameter = _parameter(part)
            if parameter.letter:
                parameters.append(parameter)
                continue
            if not everything:
                everything.append(_COMMENT.sub("", headers) + text)
            parameters += _members(parameter.type, everything[0])
        arguments = tuple(part.split()[-1] for part in template[1].split(",")) if template else ()
        found[name] = Declaration(name, arguments, tuple(parameters))
    return found


def struct_format(signature: str) -> str:
    """How :mod:`struct` packs the parameters of a signature.

    ptxas aligns a ``T`` to 64 bytes of the constant bank. Only kernels for compute capability 9.0 have such parameters;
    there the first parameter lies 16 bytes behind a multiple of 64.
    """
    found = "@"
    for letter in signature.replace("p", "P"):
        found += letter if letter != "T" else f"{(48 - struct.calcsize(found)) % 64}x{TENSOR_MAP_BYTES}s"
    return found


def _closing(text: str, opening: int) -> int:
    """The index of the parenthesis that closes the one at ``opening``."""
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise ValueError(f"a parenthesis is not closed: {text[opening : opening + 80]!r}")


def _parameter(declared: str) -> CParameter:
    """One parameter; its letter is empty if the type is neither a pointer nor in ``LETTERS``."""
    match = _PARAMETER.fullmatch(_QUALIFIERS.sub(" ", declared))
    if match is None:
        raise ValueError(f"not a parameter: {declared!r}")
    kind, pointer, name = match.groups()
    kind = " ".join(kind.split())
    return CParameter(name, kind, "p" if pointer else LETTERS.get(kind, ""))


def _members(name: str, text: str) -> list[CParameter]:
    """The members of a struct, up to its first function."""
    match = re.search(rf"\bstruct {re.escape(name)} \{{(.*?)(?:__device__|\}};)", text, re.DOTALL)
    if match is None:
        raise ValueError(f"unknown type of a parameter: {name!r}")
    found: list[CParameter] = []
    for statement in filter(str.strip, match[1].split(";")):
        first, *others = statement.split(",")
        found.append(_parameter(first))
        for other in others:  # "const float *a, *b"
            pointer = "*" in other
            found.append(CParameter(other.strip(" *\n"), found[-1].type, "p" if pointer else LETTERS[found[-1].type]))
    unknown = [member.type for member in found if not member.letter]
    if unknown:
        raise ValueError(f"unknown types of members of {name}: {', '.join(unknown)}")
    return found
