"""Pickles that are programs: whatever they try, nothing of them runs, and what they cost is bounded."""

from __future__ import annotations

import contextlib
import copyreg
import io
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch_writer import Call, Name, Persistent, Raw, dumps, encode, ordered, rebuild, write_legacy, write_zip

from bminf_lite.checkpoint import torch_pickle
from bminf_lite.checkpoint.torch_file import TorchFile
from bminf_lite.checkpoint.torch_pickle import UnsupportedTorchFileError, load
from bminf_lite.errors import CheckpointError

STORAGE = Persistent(("storage", Name("torch", "FloatStorage"), "0", "cpu", 6))
RAN = "ran"


class Reduces:
    """Pickles as the call that it is given."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


class Stateful:
    """Runs code when it is given a state."""

    def __setstate__(self, state: Any) -> None:
        Path(state).write_text("ran")


def attacks(mark: str) -> dict[str, bytes]:
    """Pickles that would make the file ``mark``, or reach for what could."""
    command = f"echo > {mark}"
    touch = Name("os", "system")
    stateful = Stateful()
    stateful.__dict__["path"] = mark
    copyreg.add_extension("os", "system", 240)
    try:
        extension = pickle.dumps(Reduces(os.system, (command,)), 2)
    finally:
        copyreg.remove_extension("os", "system", 240)
    by_name = encode("os") + encode("system") + b"\x93"
    persistent = Persistent(("storage", Name("torch", "FloatStorage"), "0", "cpu", Call(touch, (command,))))
    return {
        **{f"os.system, protocol {p}": pickle.dumps(Reduces(os.system, (command,)), p) for p in range(6)},
        "eval": pickle.dumps(Reduces(eval, (f"open({mark!r}, 'w')",))),
        "exec": pickle.dumps(Reduces(exec, (f"open({mark!r}, 'w')",))),
        "open": pickle.dumps(Reduces(open, (mark, "w"))),
        "getattr": dumps(Call(Call(Name("builtins", "getattr"), (Name("os", "path"), "os")), ())),
        "subprocess": pickle.dumps(Reduces(subprocess.Popen, ([sys.executable, "-c", f"open({mark!r}, 'w')"],))),
        "stack global": b"\x80\x04" + by_name + encode((command,)) + b"R.",
        "instance": b"(S" + repr(command).encode() + b"\nios\nsystem\n.",
        "object": b"(" + encode(touch) + encode(command) + b"o.",
        "new object": b"\x80\x02" + encode(touch) + encode((command,)) + b"\x81.",
        "new object with keywords": b"\x80\x04" + encode(touch) + encode((command,)) + b"}\x92.",
        "new object of a known name": b"\x80\x02" + encode(Name("collections", "OrderedDict")) + encode(()) + b"\x81.",
        "a module that is no text": b"\x80\x04" + encode(1) + encode("system") + b"\x93.",
        "a name that is no text": b"\x80\x04" + encode("os") + encode(("system",)) + b"\x93.",
        "set state": pickle.dumps(Reduces(Stateful, (), mark)),
        "a state with slots": dumps(Call(Name("collections", "OrderedDict"), (), state=(None, {"x": 1}))),
        "state of a function": dumps(Raw(encode(Name("collections", "OrderedDict")) + encode({"call": 1}) + b"b")),
        "state of a tensor": dumps(Raw(encode(rebuild(STORAGE, 0, (1,), (1,))) + encode({"__class__": 1}) + b"b")),
        "extension": extension,
        "extension by number": b"\x80\x02\x82\xf0" + encode((command,)) + b"R.",
        "persistent identity": dumps(persistent),
        "nested persistent identity": dumps(Persistent(Persistent(("storage", touch, "0", "cpu", 6)))),
        "persistent identity as text": b"Pos.system\n.",
        "as a storage": dumps(rebuild(touch, 0, (1,), (1,))),
        "as a size": dumps(rebuild(STORAGE, 0, (Call(touch, (command,)),), (1,))),
        "as a hook": dumps(Call(Name("torch._utils", "_rebuild_tensor_v2"), (STORAGE, 0, (), (), False, {"h": touch}))),
        "as a key": dumps(Raw(b"}(" + encode(Call(touch, (command,))) + b"Nu")),
        "through the memo": b"\x80\x02" + encode(touch) + b"q\x010h\x01" + encode((command,)) + b"R.",
        "a dotted name": b"\x80\x04" + encode("torch") + encode("_utils.os.system") + b"\x93" + encode((mark,)) + b"R.",
        "a name with a space": b"ctorch._utils _rebuild_tensor_v2\nx\n(tR.",
        "a method of an admitted class": dumps(Call(Name("collections", "OrderedDict.__init_subclass__"), ())),
        "a module of torch": dumps(Call(Name("torch.hub", "load"), (mark, mark))),
        "torch's own loader": dumps(Call(Name("torch.storage", "_load_from_bytes"), (command,))),
        "a storage as a function": dumps(Call(Name("torch", "FloatStorage"), (1 << 40,))),
        "a type as a function": dumps(Call(Name("torch", "float32"), (1,))),
        "a dictionary as a function": dumps(Call({}, ())),
        "arguments that are no tuple": dumps(Call(Name("collections", "OrderedDict"), [1])),
        "too many arguments": dumps(Call(Name("collections", "OrderedDict"), ({},))),
        "too few arguments": dumps(Call(Name("torch._utils", "_rebuild_tensor_v2"), (STORAGE,))),
        "set items of a tuple": dumps(Raw(b"()" + b"(NNu")),
        "append to a tensor": dumps(Raw(encode(rebuild(STORAGE, 0, (1,), (1,))) + b"Na")),
        "set": b"\x80\x04\x8f(\x4b\x01\x90.",
        "byte array": b"\x80\x05\x96" + struct.pack("<Q", 4) + b"abcd.",
        "buffer out of band": b"\x80\x05\x97.",
    }


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that an attack would make."""
    return tmp_path / RAN


@pytest.mark.parametrize("name", attacks(RAN))
def test_nothing_runs(name: str, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attack = attacks(str(mark))[name]
    imported = set(sys.modules)
    for module in (os, subprocess, pickle):
        for function in ("system", "Popen", "loads", "Unpickler"):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, forbidden)
    storages = {"0": bytes(24)}
    inner = attack.removesuffix(b".")
    hidden = {"whole": attack, "value": b"\x80\x02}" + encode("x") + inner.removeprefix(b"\x80\x02") + b"s."}
    for kind, content in hidden.items():
        path = write_zip(tmp_path / f"{kind}.bin", content, storages)
        with pytest.raises(CheckpointError):
            TorchFile(path)
        path = write_legacy(tmp_path / f"{kind}.old", content, {"0": (6, bytes(24))})
        with pytest.raises(CheckpointError):
            TorchFile(path)
    for part in range(3):  # in place of the magic number, the version, and what the system was
        pickles = [dumps(0x1950A86A20F9469CFC6C), dumps(1001), dumps({"little_endian": True})]
        pickles[part] = attack
        path = tmp_path / f"header {part}.old"
        path.write_bytes(b"".join([*pickles, dumps({}), dumps([])]))
        with pytest.raises(CheckpointError):
            TorchFile(path)
    assert not mark.exists()
    assert {m for m in set(sys.modules) - imported if not m.startswith("encodings")} == set()


def forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("a pickle ran")


def test_ignored_names_run_nothing_either(mark: Path) -> None:
    for name, attack in attacks(str(mark)).items():
        try:
            load(io.BytesIO(attack), ignored=("*",))
        except UnsupportedTorchFileError as error:
            assert str(error), name
        assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("os.system, protocol 2", f"'{os.system.__module__}.system'"),
        ("stack global", "'os.system'"),
        ("extension by number", "EXT1"),
        ("torch's own loader", "'torch.storage._load_from_bytes'"),
        ("a storage as a function", "calls a StorageClass"),
        ("too many arguments", "collections.OrderedDict with 1 arguments"),
        ("new object of a known name", "makes an object of"),
    ],
)
def test_what_is_refused_is_named(name: str, words: str) -> None:
    with pytest.raises(UnsupportedTorchFileError) as caught:
        load(io.BytesIO(attacks(RAN)[name]))
    assert words in str(caught.value)


def damaged(code: bytes) -> str:
    with pytest.raises(UnsupportedTorchFileError) as caught:
        load(io.BytesIO(code))
    return str(caught.value)


@pytest.mark.parametrize(
    "code",
    [
        b"",
        b".",
        b"\x80\x02",
        b"N",
        b"NN.",
        b"(.",
        b"(N.",
        b"t.",
        b"\x85.",
        b"a.",
        b"}Ns.",
        b"}(Nu.",
        b"h\x01.",
        b"q\x01.",
        b"R.",
        b"N)R.",
        b"b.",
        b"Nb.",
        b"Q.",
        b"\x93.",
        b"NN\x93.",
        b"X\xff\xff\xff\xffab.",
        b"X\x01\0\0\0\xff",
        b"\x8a\x05abc.",
        b"I1x\n.",
        b"\x8b\xff\xff\xff\xff.",
        b"\x8d" + b"\xff" * 8 + b"a.",
        b"c\n\n.",
        b"ca.",
        b"g-1\n.",
        b"p-1\n.",
        b"Nr\xff\xff\xff\xff.",
        b"Np99999999999999999999\n.",
        b"\xfe.",
        b"\x80\xff.N.",
    ],
)
def test_damaged_pickles(code: bytes) -> None:
    assert damaged(code)


PLAIN: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(-(2**30), 2**30), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(value=PLAIN, protocol=st.integers(2, 5))
def test_plain_values_are_what_python_reads(value: Any, protocol: int) -> None:
    """``protocol`` 2 to 5: what binary pickles contain, frames, memos and shared values included."""
    shared = [value, value, {"again": value}]
    code = pickle.dumps(shared, protocol)
    if any(operation.name == "GLOBAL" for operation, *_ in pickletools.genops(code)):
        return  # how protocol 2 spells bytes, which no checkpoint holds
    got = load(io.BytesIO(code)).value
    assert got == shared
    assert got[0] is got[1] or value is None or isinstance(value, (bool, int, float, str, bytes, tuple))


# -- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nest", [b"\x85", b"a", b"s"], ids=["tuples", "lists", "dictionaries"])
def test_deep_nesting(nest: bytes) -> None:
    depth = 30_000
    code = {
        b"\x85": b")" + b"\x85" * depth,
        b"a": b"]" * depth + b"a" * (depth - 1),
        b"s": b"}K\x01" * depth + b"}" + b"s" * depth,
    }[nest]
    load(io.BytesIO(code + b"."))
    assert damaged(b"}" + code + b"Ns.")  # such a value as a key would have to be hashed


def test_an_operation_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_pickle, "MAX_OPERATIONS", 100)
    load(io.BytesIO(b"](" + b"N" * 96 + b"e."))
    assert "more than 100 operations" in damaged(b"](" + b"N" * 97 + b"e.")


def test_a_pickle_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bminf_lite.checkpoint.torch_file.MAX_PICKLE_BYTES", 1000)
    with pytest.raises(CheckpointError, match="1,000 are allowed"):
        TorchFile(write_zip(tmp_path / "x.bin", dumps({"x": "a" * 1000}), {}))
    with pytest.raises(CheckpointError, match="damaged"):
        TorchFile(write_legacy(tmp_path / "y.bin", dumps({"x": "a" * 1000}), {}))


def laughs() -> bytes:
    """A billion laughs: ten lists of ten of the one before, 30 times over."""
    code = b"]q\0"
    for level in range(30):
        code += b"](" + (b"h" + bytes([level])) * 10 + b"eq" + bytes([level + 1])
    return code


EXPENSIVE: dict[str, Callable[[], bytes]] = {
    "sharing": lambda: b"](" + laughs() + b"e",
    "a large text as a name, again and again": lambda: (
        encode("a" * (1 << 20)) + b"q\0" + b"(" + b"h\0h\0\x93" * 1000 + b"t"
    ),
    "a large tuple as a size, again and again": lambda: (
        b"(" + b"N" * 100_000 + b"tq\0" + b"ctorch\nSize\nq\1" + b"(" + b"h\1h\0\x85R" * 50_000 + b"t"
    ),
    "a large list as an ordered dictionary": lambda: (
        b"](" + b"N" * 100_000 + b"eq\0" + b"ccollections\nOrderedDict\nq\1" + b"(" + b"h\1h\0\x85R" * 50_000 + b"t"
    ),
    "keys that collide": lambda: (
        b"}(" + b"".join(b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"N" for i in range(50_000)) + b"u"
    ),
    "a number of a million digits": lambda: b"\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20),
    "a decimal number of a million digits": lambda: b"I" + b"9" * (1 << 20) + b"\n",
    "marks": lambda: b"(" * 200_000,
    "a memo of many": lambda: b"N" + b"\x94" * 200_000,
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_what_would_be_expensive_is_not(name: str) -> None:
    """Tens of megabytes and a few seconds, where Python's unpickler could be kept busy for hours."""
    code = EXPENSIVE[name]() + b"."
    started = time.process_time()
    try:
        load(io.BytesIO(code))
    except UnsupportedTorchFileError as error:
        assert len(str(error)) < 500
    assert time.process_time() - started < 60


OPERATIONS = st.sampled_from([code.encode("latin-1") for code in sorted(pickletools.code2op)])
PROGRAMS = st.lists(OPERATIONS | st.binary(max_size=60)).map(b"".join)


@given(code=PROGRAMS)
def test_random_programs(code: bytes) -> None:
    for program in (code, code + b".", b"\x80\x02" + encode(ordered()) + code + b"."):
        with contextlib.suppress(UnsupportedTorchFileError):
            load(io.BytesIO(program), ignored=("*",))
