"""GGUF files give the tensors, the configuration and the logits of the Hugging Face folder that they came from."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import OFFSET_NORMS, Golden, RandomWeights, case_without_golden, goldens, mixers, random_tokens
from tolerances import assert_close

import bminf_lite
from bminf_lite import models
from bminf_lite.checkpoint import gguf_file
from bminf_lite.checkpoint.inspect import inspect
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.reader import open_checkpoint
from bminf_lite.errors import CheckpointError
from bminf_lite.gguf_files.config import config_json
from bminf_lite.gguf_files.header import read_header

gguf = pytest.importorskip("gguf", reason="GGUF needs the package gguf")
import gguf_kit  # noqa: E402

WHOLE = (
    "llama",
    "qwen2",
    "qwen3",
    "phi3",
    "olmo2",
    "granite",
    "stablelm",
    "starcoder2",
    "phi",
    "cohere",
    "cohere2",
    "smollm3",
    "nemotron",
    "falcon",
    "gpt_neox",
    "gpt2",
    "gemma2",
    "gemma3_text",
    "bloom",
    "seed_oss",
    "glm4",
    "exaone4",
    "olmo3",
    "ministral3",
    "gpt_bigcode",
    "gemma",
    "olmo",
    "ernie4_5",
    "arcee",
    "jais2",
    "hunyuan_v1_dense",
)
KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1"]
FURTHER: dict[str, dict[str, Any]] = {
    "ernie4_5": {"rope.freq_base": 500000.0},
    "granite": {"attention.scale": 0.15, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0},
    "smollm3": {"rope.freq_base": 2000000.0},
    "cohere": {"logit_scale": 0.0625, "rope.freq_base": 500000.0},
    "cohere2": {"logit_scale": 0.0625, "attention.sliding_window": 4096},
    "gemma2": {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "attention.sliding_window": 6},
    "exaone4": {"attention.sliding_window": 6, "attention.sliding_window_pattern": [True, False, True]},
    "olmo3": {
        "attention.sliding_window": 6,
        "attention.sliding_window_pattern": [True, False, True],
        "rope.freq_base": 500000.0,
    },
    "ministral3": {
        "rope.freq_base": 1000000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 16384,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "rope.scaling.yarn_log_multiplier": 1.0,
        "attention.temperature_scale": 0.1,
    },
    "gemma3_text": {
        "final_logit_softcapping": 2.0,
        "attention.sliding_window": 6,
        "attention.sliding_window_pattern": 3,
        "rope.freq_base": 1000000.0,
    },
}
CASE = {
    "granite": "multipliers",
    "qwen2": "tied head",
    "falcon": "grouped, two norms",
    "gemma3_text": "pattern of three, soft-cap",
    "exaone4": "layer types",
    "olmo3": "layer types",
}


def golden_of(family: str) -> Golden:
    found = list(goldens(family))
    return next((golden for golden in found if golden.name == CASE.get(family)), found[0])


def wide(kind: str = "llama", **changes: Any) -> Golden:
    """A model whose matrices have whole blocks of 32 in each row."""
    config = {
        "model_type": kind,
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    } | changes
    plain = case_without_golden("cpm1")
    return Golden("wide", config, 5, "", random_tokens(5, 33, 97), plain.logits)


@pytest.mark.parametrize("family", WHOLE)
def test_tensors_and_logits_are_those_of_the_folder(family: str, tmp_path: Path) -> None:
    golden = golden_of(family)
    path = gguf_kit.write(tmp_path / "model.gguf", golden, **FURTHER.get(family, {}))
    expected = RandomWeights(golden.config, golden.seed).tensors
    with open_model(path) as model:
        assert model.checkpoint.tensors.keys() == expected.keys()
        for name, values in expected.items():
            error = np.abs(model.checkpoint.read(name) - values).max()
            assert error <= (6e-8 if family in OFFSET_NORMS and name.endswith("norm.weight") else 0), name
    with bminf_lite.load(path, device="cpu") as loaded:
        assert_close(loaded.logits(golden.tokens), golden.logits, "logits", np.float32, np.abs(golden.logits).max())


@pytest.mark.parametrize("kind", KINDS)
def test_types_are_read_as_the_package_dequantizes_them(kind: str, tmp_path: Path) -> None:
    golden = wide()
    path = gguf_kit.write(tmp_path / "model.gguf", golden, kind)
    expected = {
        name: gguf_kit.as_stored(name, values, kind)
        for name, values in RandomWeights(golden.config, golden.seed).tensors.items()
    }
    with open_checkpoint(path) as checkpoint:
        for name, values in expected.items():
            np.testing.assert_array_equal(checkpoint.read(name).astype(np.float32), values, name)


def test_q8_0_is_exact(tmp_path: Path) -> None:
    """A code times an fp16 scale has 19 bits, which fp32 holds."""
    golden, name = wide(), "model.layers.1.mlp.down_proj.weight"
    path = gguf_kit.write(tmp_path / "model.gguf", golden, "Q8_0")
    reader = gguf.GGUFReader(path)
    (raw,) = (tensor.data for tensor in reader.tensors if tensor.name == "blk.1.ffn_down.weight")
    blocks = raw.reshape(-1, 34)
    scales, codes = blocks[:, :2].copy().view(np.float16).astype(np.float64), blocks[:, 2:].view(np.int8)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensors[name].stored_as == "Q8_0"
        np.testing.assert_array_equal(checkpoint.read(name).reshape(-1, 32), scales * codes)


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_part_of_a_tensor_is_a_part_of_the_whole(data: st.DataObject, tmp_path_factory: Any) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    path = gguf_kit.write(tmp_path_factory.mktemp("gguf") / "model.gguf", wide(), kind)
    with open_checkpoint(path) as checkpoint:
        name = data.draw(st.sampled_from(sorted(checkpoint.tensors)))
        whole = checkpoint.read(name).reshape(-1).view(np.uint8)
        first = data.draw(st.integers(0, len(whole) - 1))
        part = np.empty(data.draw(st.integers(1, len(whole) - first)), np.uint8)
        checkpoint.read_into(name, part.data, first)
        np.testing.assert_array_equal(part, whole[first : first + len(part)])


@pytest.mark.parametrize(
    ("case", "metadata"),
    [
        ("linear rope", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        (
            "yarn rope",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
        ),
        ("small theta, old key", {}),
        ("biases", {}),
    ],
)
def test_rotary_scalings_and_biases_of_llama(case: str, metadata: dict[str, Any], tmp_path: Path) -> None:
    golden = next(golden for golden in goldens("llama") if golden.name == case)
    path = gguf_kit.write(tmp_path / "model.gguf", golden, **metadata)
    with bminf_lite.load(path, device="cpu") as loaded:
        assert_close(loaded.logits(golden.tokens), golden.logits, "logits", np.float32, np.abs(golden.logits).max())


def test_yarn_is_in_the_layers_of_olmo_3_without_a_window(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    golden = next(golden for golden in goldens("olmo3") if golden.name == "layer types")
    metadata = FURTHER["olmo3"] | {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    found = config_json(read_header(gguf_kit.write(tmp_path / "model.gguf", golden, **metadata)))
    expected = golden.config | {"rope_theta": 500000.0, "rope_scaling": yarn}
    parse = models.find(expected).parse
    assert parse(found).layer_parts == parse(expected).layer_parts != parse(golden.config).layer_parts


def test_factors_of_frequencies_stand_for_llama_3_s_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = next(golden for golden in goldens("llama") if golden.name == "llama3 rope")
    scaled = np.array(mixers(models.find(golden.config).parse(golden.config))[0].rotary.frequencies)
    plain = 500.0 ** (-np.arange(0, 2 * len(scaled), 2) / (2 * len(scaled)))
    close = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
        close(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
    path = gguf_kit.write(tmp_path / "model.gguf", golden)
    with bminf_lite.load(path, device="cpu") as loaded:
        error = np.abs(loaded.logits(golden.tokens) - golden.logits).max()
    assert error < 1e-4 * np.abs(golden.logits).max()


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_it_migrates(kind: str, tmp_path: Path) -> None:
    """The folder runs without the GGUF file, and is the same as that of a folder with the dequantized tensors."""
    golden = wide()
    path = gguf_kit.write(tmp_path / "model.gguf", golden, kind)
    tensors = RandomWeights(golden.config, golden.seed).tensors
    stored = {name: gguf_kit.as_stored(name, values, kind) for name, values in tensors.items()}
    folder = golden.save(tmp_path / "folder", stored)
    report = bminf_lite.migrate(path, tmp_path / "out")
    other = bminf_lite.migrate(folder, tmp_path / "other")
    assert {t.name: t.snr_db for t in report.tensors} == {t.name: t.snr_db for t in other.tensors}
    assert report.dequantized == (("Q8_0",) if kind == "Q8_0" else ()) and other.dequantized == ()
    assert ("the source is quantized (Q8_0): what it lost then" in str(report)) == (kind == "Q8_0")
    logits = []
    for out in (tmp_path / "out", tmp_path / "other"):
        with bminf_lite.load(out, device="cpu") as model:
            logits.append(model.logits(golden.tokens))
    np.testing.assert_array_equal(*logits)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


def test_inspect_names_the_types_of_the_file(tmp_path: Path) -> None:
    found = inspect(gguf_kit.write(tmp_path / "model.gguf", wide(), "Q4_0"))
    assert found["model_type"] == "llama"
    tensor = found["tensors"]["model.layers.0.mlp.up_proj.weight"]
    assert tensor["stored_as"] == "Q4_0" and tensor["dtype"] == "F32"
    assert "stored_as" not in found["tensors"]["model.norm.weight"]


def test_a_folder_with_one_file_and_split_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    whole = gguf_kit.write(tmp_path / "a" / "model.gguf", wide())
    with open_checkpoint(tmp_path / "a") as checkpoint:
        expected = {name: checkpoint.read(name) for name in checkpoint.tensors}
    folder = tmp_path / "b"
    folder.mkdir()
    split(whole, folder)
    for path in (folder, folder / "model-00001-of-00002.gguf"):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.tensors.keys() == expected.keys()
            for name, values in expected.items():
                np.testing.assert_array_equal(checkpoint.read(name), values)
    (folder / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"part model-00002-of-00002.gguf of 2 is missing"):
        open_checkpoint(folder)


def split(path: Path, folder: Path, architecture: str = "llama", second: str | None = None) -> None:
    """Two parts: the metadata with the first half of the tensors, or those before ``second``, and the rest."""
    reader = gguf.GGUFReader(path)
    names = [tensor.name for tensor in reader.tensors]
    half = len(names) // 2 if second is None else names.index(second)
    for part, tensors in enumerate((reader.tensors[:half], reader.tensors[half:])):
        writer = gguf.GGUFWriter(folder / f"model-0000{part + 1}-of-00002.gguf", architecture)
        if part == 0:
            for name, field in reader.fields.items():
                if name.startswith(f"{architecture}."):
                    gguf_kit.add(writer, name, field.contents())
        for tensor in tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def test_two_models_in_a_folder_are_not_guessed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        gguf_kit.write(tmp_path / f"{name}.gguf", wide())
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models \(a.gguf, b.gguf\)"):
        open_checkpoint(tmp_path)


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    path = gguf_kit.write(tmp_path / "model.gguf", wide())
    content = path.read_bytes()
    for size in (0, 3, 40, 400, 3000, len(content) - 5):
        damaged = tmp_path / f"{size}.gguf"
        damaged.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=f"{size}.gguf"):
            open_model(damaged)
    (tmp_path / "text.gguf").write_text("hello " * 100)
    with pytest.raises(CheckpointError, match="is no GGUF file"):
        open_model(tmp_path / "text.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_count": 8}, "expert_count is 8, but the tensors hold none"),
        ({"attention.head_count": 7}, "is not a multiple of"),
        ({"attention.head_count": 6, "rope.dimension_count": 16}, "does not fit the numbers of heads"),
    ],
)
def test_what_cannot_be_run_is_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = gguf_kit.write(tmp_path / "model.gguf", wide(), **metadata)
    with pytest.raises(CheckpointError, match=message):
        open_model(path)


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'mamba' is not supported; .*llama"):
        open_model(tmp_path / "model.gguf")


@pytest.mark.parametrize(("kind", "large"), [("gemma2", 46), ("gemma3_text", 62)])
def test_the_largest_gemmas_scale_queries_by_another_size(kind: str, large: int, tmp_path: Path) -> None:
    for layers, size in ((large - 1, 32), (large, 16)):
        path = gguf_kit.write(tmp_path / f"{layers}.gguf", wide(kind, head_dim=32, hidden_size=64), block_count=layers)
        assert config_json(read_header(path))["query_pre_attn_scalar"] == size


@pytest.mark.parametrize(
    ("family", "metadata", "message"),
    [
        ("olmo", {"attention.clamp_kqv": 8.0}, "limits queries, keys and values to 8.0"),
        ("olmo", {"attention.layer_norm_epsilon": 1e-6}, "but OLMo's norms have 1e-05"),
        ("olmo2", {"attention.sliding_window": 16}, "windows, and does not say in which layers"),
        ("exaone4", {"attention.sliding_window": 16}, "windows, and does not say in which layers"),
        ("glm4", {"rope.dimension_sections": [2, 2]}, "rotations by sections"),
        ("glm4", {"nextn_predict_layers": 1}, "further layers"),
        ("ministral3", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "lacks the numbers of YaRN"),
    ],
)
def test_what_a_file_does_not_say_or_cannot_be_run(
    family: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = gguf_kit.write(tmp_path / "model.gguf", next(goldens(family)), **metadata)
    with pytest.raises(CheckpointError, match=message):
        open_model(path)


@pytest.mark.parametrize(
    ("family", "name", "metadata"),
    [
        ("exaone4", "no window", {}),
        ("gemma", "multi-head, tied", {"rope.freq_base": 10000.0}),
        ("ernie4_5", "biases, untied", {"rope.freq_base": 500000.0}),
        ("arcee", "biases, own head size", {}),
        ("jais2", "own head size, linear rope", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        ("seed_oss", "all biases", {}),
        ("seed_oss", "no biases", {}),
        ("glm4", "whole heads", {}),
        ("glm4", "no biases", {}),
        ("gpt_bigcode", "untied, inner size", {}),
    ],
)
def test_further_configurations(family: str, name: str, metadata: dict[str, Any], tmp_path: Path) -> None:
    golden = next(golden for golden in goldens(family) if golden.name == name)
    path = gguf_kit.write(tmp_path / "model.gguf", golden, **metadata)
    with bminf_lite.load(path, device="cpu") as loaded:
        assert_close(loaded.logits(golden.tokens), golden.logits, "logits", np.float32, np.abs(golden.logits).max())


def test_without_the_package_the_error_says_how_to_install_it(tmp_path: Path) -> None:
    path = gguf_kit.write(tmp_path / "model.gguf", wide())
    code = (
        "import sys; sys.modules['gguf'] = None\n"
        "from bminf_lite.checkpoint.reader import open_checkpoint\n"
        f"open_checkpoint({str(path)!r})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'bminf-lite[gguf]'" in result.stderr


def test_text_comes_from_the_file_and_from_the_migrated_folder(tmp_path: Path) -> None:
    """The demo model's own vocabulary, once from its folder and once from the metadata of a GGUF file."""
    folder = Path(bminf_lite.__file__).parent / "demo_model"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    text = {
        "vocabulary": vocabulary["model"]["vocab"],
        "merges": vocabulary["model"]["merges"],
        "added": {token["content"]: token["id"] for token in vocabulary["added_tokens"]},
    }
    with open_checkpoint(folder) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    golden = Golden("demo", config, 0, "", np.arange(20), np.empty(0))
    path = gguf_kit.write(tmp_path / "demo.gguf", golden, tensors=tensors, text=text)
    bminf_lite.migrate(folder, tmp_path / "int8")
    bminf_lite.migrate(path, tmp_path / "gguf-int8")
    for source, other in ((folder, path), (tmp_path / "int8", tmp_path / "gguf-int8")):
        with bminf_lite.load(source, device="cpu") as one, bminf_lite.load(other, device="cpu") as two:
            prompts = ["The method returns", "for i in range(3):\n"]
            texts = [m.generate(prompts, max_new_tokens=12, temperature=0) for m in (one, two)]
            assert [r.text for r in texts[0]] == [r.text for r in texts[1]]
            assert [r.token_ids for r in texts[0]] == [r.token_ids for r in texts[1]]


def test_it_can_be_calibrated(tmp_path: Path) -> None:
    path = gguf_kit.write(tmp_path / "model.gguf", wide(), "Q8_0")
    ids = random_tokens(7, 600, 97)
    report = bminf_lite.migrate(path, tmp_path / "out", "w8a8-smooth", calibrate=ids, device="cpu")
    assert report.calibration["products"] and report.cost["kl"] < 0.05


VALUES = [0, -1, 3, 2**31, 1e30, math.nan, math.inf, "x", [], [1, 2], True, 10**6]
ADDED = (
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.key_length",
    "attention.scale",
    "attention.temperature_scale",
    "rope.dimension_count",
    "logit_scale",
    "expert_count",
)


@pytest.mark.parametrize("family", ["llama", "phi3", "nemotron", "ministral3", "gemma3_text", "glm4", "gpt_neox"])
def test_any_number_in_the_metadata_is_read_or_refused_with_the_file_s_name(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf_kit.write(tmp_path / "model.gguf", golden_of(family), **FURTHER.get(family, {}))
    assert_any_number_is_read_or_refused(path, monkeypatch)


def assert_any_number_is_read_or_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key of a file with each of ``VALUES``."""
    header = read_header(path)
    keys = [key for key in header.metadata if key != "tokenizer.ggml.tokens"]
    for key in dict.fromkeys([*keys, *(f"{header.architecture}.{name}" for name in ADDED)]):
        for value in VALUES:
            changed = replace(header, metadata=header.metadata | {key: value})
            monkeypatch.setattr(gguf_file, "read_header", lambda _, found=changed: found)
            try:
                found = gguf_file.open_gguf(path)
            except CheckpointError as error:
                assert str(error).startswith(str(path)) and "config.json" not in str(error), (key, value)
            else:
                for file in found.files:
                    file.close()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"attention.head_count": 0}, "llama.attention.head_count is 0, but must be a whole number from 1 to"),
        ({"attention.head_count": 3}, "llama.attention.head_count (3) is not a multiple of llama."),
        ({"attention.head_count": 100}, "llama.attention.head_count is 100, but embedding_length is 64"),
        ({"embedding_length": "x"}, "llama.embedding_length is 'x', but must be a whole number"),
        ({"feed_forward_length": 2**31 - 1}, "llama.feed_forward_length is 2147483647, not a whole number from 1 to"),
        ({"attention.layer_norm_rms_epsilon": 3.0}, "llama.attention.layer_norm_rms_epsilon is 3.0, not a number"),
    ],
)
def test_sizes_have_the_names_of_the_metadata(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = gguf_kit.write(tmp_path / "model.gguf", wide(), **metadata)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))}: {re.escape(message)}"):
        open_model(path)
