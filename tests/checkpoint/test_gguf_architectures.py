"""Every architecture of GGUF files has a case whose file is written, opened and run."""

from __future__ import annotations

import pytest

from bminf_lite.gguf_files.architectures import TABLE

gguf = pytest.importorskip("gguf", reason="GGUF needs the package gguf")
import test_gguf  # noqa: E402
import test_gguf_encoders  # noqa: E402
import test_gguf_mixtures  # noqa: E402
import test_gguf_recurrent  # noqa: E402


def test_every_model_type_of_the_table_is_written_and_read() -> None:
    tested = {*test_gguf.WHOLE, "gemma4_text"}  # the last by tests of its own
    for cases in (test_gguf_mixtures.CASES, test_gguf_recurrent.CASES):
        tested |= {family for family, *_ in cases.values()}
    tested |= {test_gguf_encoders.case(name).config["model_type"] for name in test_gguf_encoders.CASES}
    made = {name for converted in TABLE.values() for name in (converted.model_type, *converted.others)}
    assert made <= tested


def test_the_package_knows_every_architecture() -> None:
    assert set(TABLE) <= set(gguf.MODEL_ARCH_NAMES.values())
