"""The parameters of every kernel, as the compiler laid them out, are those that its declaration is read as.

The other half, that each launch's signature is the declaration's, is checked wherever the fake GPU makes a kernel.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from cubin_info import kernel_info, offsets_and_sizes
from fake_gpu.sources import LETTERS, declarations
from instantiations import families

from bminf_lite.cuda.runtime import compiler

pytestmark = pytest.mark.usefixtures("nvrtc")

ARCH = "sm_90a"


def one_of_each() -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    """For each source, one instantiation of each of its kernels: the expression and the macros."""
    found: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {}
    for family in families(ARCH):
        name = family.name.partition("<")[0].removeprefix("bminf::")
        expression = family.expression(next(iter(family.all())))
        found.setdefault(family.source, {}).setdefault(name, (expression, family.defines))
    return {source: list(kernels.values()) for source, kernels in found.items()}


CASES = one_of_each()


def test_every_kernel_is_here():
    for source in (f"{file.parent.name}/{file.name}" for file in Path(str(compiler.SOURCES)).rglob("*.cu")):
        assert len(CASES[source]) == len(declarations(source)), source


@pytest.mark.parametrize("source", CASES)
def test_parameters_lie_where_the_signature_puts_them(source: str):
    expressions, defines = [e for e, _ in CASES[source]], CASES[source][0][1]
    cubin = compiler.compile(source, ARCH, expressions, defines)
    for expression, declaration in zip(expressions, declarations(source).values(), strict=True):
        info = kernel_info(cubin.image, cubin.symbols[expression])
        assert declaration.name in expression
        expected = offsets_and_sizes(declaration.signature)
        if len(info.parameters) == 1 < len(expected):  # a struct
            assert info.parameters[0][1] in (sum(expected[-1]), -(-sum(expected[-1]) // 8) * 8)
        else:
            assert info.parameters == expected, declaration.signature
            assert letters(cubin.symbols[expression]) == declaration.signature, expression
        assert 0 < info.max_threads <= 1024


def letters(symbol: str) -> str:
    """A kernel's signature from its mangled name, by the C++ runtime; skips the test where there is none."""
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except OSError as error:
        pytest.skip(str(error))
    demangle.restype, demangle.argtypes = ctypes.c_char_p, (ctypes.c_char_p, *[ctypes.c_void_p] * 3)
    text = demangle(symbol.encode(), None, None, None).decode()
    types = text[text.rindex("(") + 1 : -1].split(", ")
    known = LETTERS | {"unsigned int": "I"}
    return "".join("p" if t.endswith("*") else known.get(t.removeprefix("bminf::"), "?") for t in types)
