"""Checkpoints that others have quantized are read as the float models that their definitions state, to the bit."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import quantized_kit as kit
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_kit import FORMS, Form

import bminf_lite
from bminf_lite.backend.quantization import quantize_weight
from bminf_lite.checkpoint.inspect import inspect
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.reader import open_checkpoint
from bminf_lite.checkpoint.recipe import Recipe, Scheme
from bminf_lite.errors import CheckpointError
from bminf_lite.models.spec import FusedExperts

GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 3, "sliding_window": 7,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "rope_parameters": {"rope_type": "default"},
}  # fmt: skip
UP = "model.layers.0.mlp.up_proj"


def named(forms: list[Form]) -> list[Any]:
    return [pytest.param(form, id=f"{number} {form.label}") for number, form in enumerate(forms)]


@pytest.mark.parametrize("form", named(FORMS))
def test_values_are_those_of_the_definition(form: Form, tmp_path: Path) -> None:
    stored, expected = kit.model(form)
    with open_model(kit.save(tmp_path, kit.CONFIG | {"quantization_config": form.config}, stored)) as model:
        assert model.checkpoint.tensors.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(model.checkpoint.read(name), values, name)
        info = model.checkpoint.tensors[f"{UP}.weight"]
        parts = [v for k, v in stored.items() if k.startswith(f"{UP}.") and not k.endswith(form.extra or " ")]
        assert (info.stored_as, info.stored_bytes) == (form.label, sum(part.nbytes for part in parts))


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_part_of_a_tensor_is_a_part_of_the_whole(data: st.DataObject, tmp_path_factory: Any) -> None:
    form = data.draw(st.sampled_from(FORMS))
    stored, expected = kit.model(form)
    folder = kit.save(tmp_path_factory.mktemp("model"), kit.CONFIG | {"quantization_config": form.config}, stored)
    with open_checkpoint(folder) as checkpoint:
        name = data.draw(st.sampled_from(sorted(checkpoint.tensors)))
        whole = np.ascontiguousarray(expected[name]).reshape(-1).view(np.uint8)
        first = data.draw(st.integers(0, len(whole) - 1))
        part = np.empty(data.draw(st.integers(1, len(whole) - first)), np.uint8)
        checkpoint.read_into(name, part.data, first)
        np.testing.assert_array_equal(part, whole[first : first + len(part)])


def test_experts_in_mxfp4_are_those_of_the_float_checkpoint(tmp_path: Path) -> None:
    """The values of the published layout, ``[experts, out, in]``, are the transposes of transformers' tensors."""
    stored, floats = kit.mxfp4_experts(GPT_OSS)
    config = GPT_OSS | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    folder, plain = kit.save(tmp_path / "mxfp4", config, stored), kit.save(tmp_path / "plain", GPT_OSS, floats)
    with open_model(folder) as model, open_model(plain) as other:
        assert model.checkpoint.tensors.keys() == other.checkpoint.tensors.keys()
        for name, info in other.checkpoint.tensors.items():
            assert model.checkpoint.tensors[name].dtype == info.dtype == "BF16"
            np.testing.assert_array_equal(model.checkpoint.read(name), other.checkpoint.read(name), name)
    logits = []
    for path in (folder, plain):
        bminf_lite.migrate(path, tmp_path / f"{path.name}-int8")
        for loaded in (path, tmp_path / f"{path.name}-int8"):
            with bminf_lite.load(loaded, device="cpu") as ready:
                logits.append(ready.logits([1, 5, 9, 30, 2]))
    np.testing.assert_array_equal(logits[0], logits[2])
    np.testing.assert_array_equal(logits[1], logits[3])


def test_all_scales_of_mxfp4_are_exact_in_bf16(tmp_path: Path) -> None:
    """Every value of FP4 with every exponent that keeps it finite, subnormal ones too."""
    bits = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 16), (253, 1)).reshape(1, 253, 16, 16)
    scales = np.broadcast_to(np.arange(253, dtype=np.uint8)[None, :, None], (1, 253, 16))
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    folder = kit.save(tmp_path, config, {"x_blocks": bits, "x_scales": scales})
    values = kit.fp4_by_bits(bits.reshape(253, 256)).astype(np.float64)
    with open_checkpoint(folder) as checkpoint:
        found = checkpoint.read("x_blocks")[0]
    np.testing.assert_array_equal(found.astype(np.float64), values * np.exp2(np.arange(253.0) - 127)[:, None])


def test_experts_in_one_fp8_tensor(tmp_path: Path) -> None:
    """Blocks begin anew in each expert; scales may also be one for each expert."""
    random = kit.Random(3)
    codes, scales = random.fp8((3, 50, 64)), random.scales((3, 2, 3))
    alone, single = random.fp8((3, 50, 64)), random.scales((3, 1, 1))
    config = {"model_type": "x", "quantization_config": kit.FP8}
    with open_checkpoint(kit.save(tmp_path / "a", config, {"w": codes, "w_scale_inv": scales})) as checkpoint:
        for expert, values in enumerate(checkpoint.read("w")):
            expected = codes[expert].astype(np.float32) * kit.scale_of(scales[expert], (50, 64), (40, 24))
            np.testing.assert_array_equal(values, expected)
    config = {"model_type": "x", "quantization_config": kit.FP8 | {"weight_block_size": None}}
    with open_checkpoint(kit.save(tmp_path / "b", config, {"w": alone, "w_scale_inv": single})) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("w"), alone.astype(np.float32) * single)


@pytest.mark.parametrize("form", named([FORMS[0], FORMS[6]]))
def test_it_migrates_as_the_float_checkpoint_does(form: Form, tmp_path: Path) -> None:
    stored, values = kit.model(form)
    folder = kit.save(tmp_path / "source", kit.CONFIG | {"quantization_config": form.config}, stored)
    plain = kit.save(tmp_path / "plain", kit.CONFIG, values)
    report = bminf_lite.migrate(folder, tmp_path / "out")
    other = bminf_lite.migrate(plain, tmp_path / "other")
    assert {t.name: t.snr_db for t in report.tensors} == {t.name: t.snr_db for t in other.tensors}
    assert report.dequantized == (form.label,) and other.dequantized == ()
    assert f"the source is quantized ({form.label}): what it lost then" in str(report)
    with open_checkpoint(tmp_path / "out") as found, open_checkpoint(tmp_path / "other") as expected:
        assert found.tensors.keys() == expected.tensors.keys()
        for name in expected.tensors:
            np.testing.assert_array_equal(found.read(name), expected.read(name), name)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert report.bytes_before == sum(v.nbytes for k, v in stored.items())


@pytest.mark.parametrize(("low", "recipe"), [(120, "w8a8"), (120, "w8a16"), (110, "groups"), (110, "w8a8")])
def test_int8_holds_mxfp4_within_three_exponents_exactly(low: int, recipe: str, tmp_path: Path) -> None:
    """So it does in groups of a block. In wider rows the error is at most that of scales that fill the codes."""
    form = Form("MXFP4", FORMS[20].config, lambda random, shape: kit.mxfp4_layer(random, shape, low))
    stored, values = kit.model(form)
    folder = kit.save(tmp_path / "source", kit.CONFIG | {"quantization_config": form.config}, stored)
    chosen = Recipe("groups", Scheme.W8A16, Scheme.W8A16, group_size=32) if recipe == "groups" else recipe
    report = bminf_lite.migrate(folder, tmp_path / "out", chosen)
    shares = {t.name: t.exact_share for t in report.tensors if t.exact_share is not None}
    assert shares.keys() == {name for name in values if "proj" in name}
    is_exact = low == 120 or recipe == "groups"
    with open_model(tmp_path / "out") as model:
        for name, share in shares.items():
            weight, own = values[name], model.checkpoint.weight(name).dequantize()
            np.testing.assert_array_equal(share, np.mean(own == weight), name)
            plain = quantize_weight(weight).dequantize()
            # The errors are compared before scales are rounded to fp16, which moves products by 127 * 2^-11 of a step.
            assert (np.square(own - weight).sum(1) <= 1.1 * np.square(plain - weight).sum(1)).all()
            assert (share == 1) == is_exact, name
    assert (": 100.0000% of the values" in str(report)) == is_exact


def test_layers_that_the_configuration_leaves_out_stay_float(tmp_path: Path) -> None:
    stored, values = kit.model(FORMS[11])
    for part in ("weight", "weight_scale", "input_scale"):
        del stored[f"{UP}.{part}"]
    stored[f"{UP}.weight"] = values[f"{UP}.weight"]
    config = FORMS[11].config | {"ignore": ["lm_head", "re:.*up_proj"], "kv_cache_scheme": {"num_bits": 8}}
    stored["model.layers.0.self_attn.k_scale"] = np.ones((), np.float32)
    with open_model(kit.save(tmp_path, kit.CONFIG | {"quantization_config": config}, stored)) as model:
        assert model.checkpoint.tensors[f"{UP}.weight"].stored_as == ""
        assert model.checkpoint.tensors["model.layers.0.mlp.gate_proj.weight"].stored_as == "FP8 (compressed-tensors)"


def test_inspect_names_the_types_of_the_file(tmp_path: Path) -> None:
    stored, _ = kit.model(FORMS[10])
    found = inspect(kit.save(tmp_path, kit.CONFIG | {"quantization_config": FORMS[10].config}, stored))
    assert found["tensors"][f"{UP}.weight"]["stored_as"] == "AWQ int4"
    assert found["tensors"][f"{UP}.weight"]["shape"] == [96, 64]


GPTQ, AWQ, PACKED, FP8_ROWS, NVFP4 = FORMS[6], FORMS[10], FORMS[16], FORMS[11], FORMS[19]
BAD_TENSORS: list[tuple[Form, str, Any, str]] = [
    (FORMS[0], "weight_scale_inv", None, f"'{UP}.weight' is quantized, and '{UP}.weight_scale_inv' is missing"),
    (FORMS[0], "weight_scale_inv", np.ones((3, 2), np.float32), "has shape [3, 2]; beside"),
    (FORMS[0], "weight_scale_inv", np.ones((3, 3), np.int8), "is I8; beside"),
    (FORMS[0], "weight", np.ones((96, 64), np.float32), f"tensor '{UP}.weight' is F32; beside"),
    (FORMS[3], "weight_scale_inv", np.ones(5, np.float32), "has shape [5]; beside"),
    (GPTQ, "qweight", None, f"'{UP}.weight'"),
    (GPTQ, "qweight", np.ones((8, 96), np.int8), "is I8 [8, 96]; it must be a matrix of I32"),
    (GPTQ, "qzeros", None, f"'{UP}.qweight' is quantized, and '{UP}.qzeros' is missing, I32 [4, 12]"),
    (GPTQ, "scales", np.ones((5, 96), np.float16), "has shape [5, 96]; beside"),
    (GPTQ, "g_idx", np.zeros(63, np.int32), "has shape [63]; beside"),
    (AWQ, "qzeros", np.ones((4, 11), np.int32), "has shape [4, 11]; beside"),
    (PACKED, "weight_shape", np.array([96, 72]), "weight_packed has shape [96, 8]"),
    (PACKED, "weight_shape", np.array([96, -1]), "weight_packed has shape [96, 8]"),
    (PACKED, "weight_shape", None, f"'{UP}.weight_shape' is missing"),
    (PACKED, "weight_zero_point", None, f"'{UP}.weight_zero_point' is missing"),
    (PACKED, "weight_zero_point", np.ones((96, 4), np.int32), "has shape [96, 4]; beside"),
    (PACKED, "weight_packed", None, f"'{UP}.weight_packed' is missing, a matrix of I32"),
    (FP8_ROWS, "weight_scale", None, f"'{UP}.weight' is quantized, and '{UP}.weight_scale' is missing"),
    (FP8_ROWS, "weight", None, f"'{UP}.weight' is missing, a matrix of F8_E4M3"),
    (NVFP4, "weight_global_scale", None, f"'{UP}.weight_global_scale' is missing"),
    (NVFP4, "weight_scale", np.ones((96, 4), np.float32), "is F32; beside"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "part", "value", "expected"), BAD_TENSORS)
def test_a_tensor_that_does_not_fit_is_named(form: Form, part: str, value: Any, expected: str, tmp_path: Path) -> None:
    stored, _ = kit.model(form)
    stored = {k: v for k, v in stored.items() if k != f"{UP}.{part}"}
    if value is not None:
        stored[f"{UP}.{part}"] = value
    with (
        pytest.raises(CheckpointError) as caught,
        open_model(kit.save(tmp_path, kit.CONFIG | {"quantization_config": form.config}, stored)),
    ):
        pass
    assert expected in str(caught.value) and str(tmp_path) in str(caught.value)


BAD_VALUES: list[tuple[Form, str, Any, str]] = [
    (FORMS[0], "weight_scale_inv", np.full((3, 3), np.inf, np.float32), "holds a scale that is inf"),
    (FORMS[2], "weight_scale_inv", np.full((3, 3), 255, np.uint8), "holds a scale that is nan"),
    (GPTQ, "scales", np.full((4, 96), np.nan, np.float16), "holds a scale that is nan"),
    (GPTQ, "g_idx", np.full(64, 4, np.int32), "holds the group 4, and there are 4"),
    (GPTQ, "g_idx", np.full(64, -1, np.int32), "holds the group -1, and there are 4"),
    (NVFP4, "weight_global_scale", np.zeros(1, np.float32), "weight_global_scale' is 0, and scales are divided by it"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "part", "value", "expected"), BAD_VALUES)
def test_a_value_that_means_nothing_is_named(form: Form, part: str, value: Any, expected: str, tmp_path: Path) -> None:
    stored, _ = kit.model(form)
    stored[f"{UP}.{part}"] = value
    folder = kit.save(tmp_path / "source", kit.CONFIG | {"quantization_config": form.config}, stored)
    with pytest.raises(CheckpointError) as caught:
        bminf_lite.migrate(folder, tmp_path / "out")
    assert expected in str(caught.value) and f"{UP}.{part}" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_code_that_is_no_number_is_named(tmp_path: Path) -> None:
    stored, _ = kit.model(FORMS[0])
    codes = stored[f"{UP}.weight"].view(np.uint8).copy()
    codes[7, 3] = 127
    stored[f"{UP}.weight"] = codes.view(ml_dtypes.float8_e4m3fn)
    folder = kit.save(tmp_path / "source", kit.CONFIG | {"quantization_config": FORMS[0].config}, stored)
    with pytest.raises(CheckpointError, match=f"'{UP}.weight' holds a NaN or an infinity, first in row 7"):
        bminf_lite.migrate(folder, tmp_path / "out")


@pytest.mark.parametrize("change", [{"x_scales": None}, {"x_blocks": np.zeros((2, 4, 1, 15), np.uint8)},
                                    {"x_scales": np.zeros((2, 4, 2), np.uint8)}])  # fmt: skip
def test_blocks_of_mxfp4_that_do_not_fit_are_named(change: dict[str, Any], tmp_path: Path) -> None:
    tensors = {"x_blocks": np.zeros((2, 4, 1, 16), np.uint8), "x_scales": np.zeros((2, 4, 1), np.uint8)} | change
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    folder = kit.save(tmp_path, config, {k: v for k, v in tensors.items() if v is not None})
    with pytest.raises(CheckpointError, match=next(iter(change))):
        open_checkpoint(folder)


BAD_SETTINGS: list[tuple[dict[str, Any], list[str]]] = [
    ({"weight_block_size": [128]}, ["weight_block_size is [128]"]),
    ({"weight_block_size": [0, 128]}, ["weight_block_size is [0, 128]"]),
    (kit.GPTQ | {"bits": 3}, ["bits is 3; this version reads 2 or 4 or 8 of gptq"]),
    (kit.GPTQ | {"bits": "4", "group_size": 0}, ["2 problems", "bits is '4'", "group_size is 0"]),
    (kit.GPTQ | {"checkpoint_format": "marlin"}, ["checkpoint_format is 'marlin'"]),
    (kit.GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, ["dynamic gives some layers settings of their own"]),
    (kit.GPTQ | {"dynamic": 1}, ["dynamic gives some layers settings of their own"]),
    (AWQ.config | {"version": "gemv"}, ["version is 'gemv'; this version reads gemm"]),
    (kit.compressed(num_bits=3, type="float"), ["group_0.weights.num_bits is 3"]),
    (kit.compressed(num_bits=4, strategy="row"), ["group_0.weights.strategy is 'row'"]),
    (kit.compressed(num_bits=4, type="float", group_size=64), ["group_size is 64; FP4 has groups of 16"]),
    (kit.compressed(type="float", strategy="block"), ["group_0.weights.block_structure is None"]),
    (kit.compressed(type="float", dynamic=True), ["group_0.weights.dynamic is True"]),
    (kit.compressed("re:(", type="float"), ["'re:(' is not a regular expression"]),
    (kit.compressed(type="float") | {"sparsity_config": {"format": "2:4"}}, ["sparsity_config is"]),
    (kit.compressed(type="float") | {"transform_config": {"config_groups": {"R4": {}}}}, ["transform_config"]),
    ({"quant_method": "bitsandbytes"}, ["quant_method is 'bitsandbytes'", "gptq, awq"]),
    ({"quant_method": ["gptq"]}, ["quant_method is ['gptq']"]),
]  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), BAD_SETTINGS)
def test_a_setting_that_cannot_be_read_is_named(config: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    config = config if "quant_method" in config else kit.FP8 | config
    folder = kit.save(tmp_path, kit.CONFIG | {"quantization_config": config}, {})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert all(text in str(caught.value) for text in [*expected, "config.json"])


@pytest.mark.parametrize("form", named([FORMS[0], FORMS[5], FORMS[14]]))
def test_memory_is_that_of_a_few_rows_and_packed_tensors(form: Form, tmp_path: Path) -> None:
    """Of a matrix of 8 MB in fp32, read in rows of a mebibyte, the codes (1 or 2 MB) and some blocks are in memory."""
    stored, _ = form.make(kit.Random(1), (2048, 1024))
    tensors = {f"x.{part}": values for part, values in stored.items()}
    folder = kit.save(tmp_path, {"model_type": "llama", "quantization_config": form.config}, tensors)
    with open_checkpoint(folder) as checkpoint:
        buffer = np.empty(1 << 20, np.uint8)
        tracemalloc.start()
        try:
            for offset in range(0, 8 << 20, 1 << 20):
                checkpoint.read_into("x.weight", buffer.data, offset)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    # Packed words and their transpose are 2 MB, a block and its copies are 5 times 1 MiB.
    assert peak < 7.5e6


INT4_LAYOUTS = np.load(Path(__file__).parents[1] / "data" / "int4_layouts.npz")
"""Made by AutoGPTQ 0.7.1 and AutoAWQ 0.2.9 themselves: tools/make_int4_goldens.py."""


@pytest.mark.parametrize("case", sorted({name.partition("/")[0] for name in INT4_LAYOUTS}))
def test_int4_is_what_its_makers_read(case: str, tmp_path: Path) -> None:
    found = {name.partition("/")[2]: INT4_LAYOUTS[name] for name in INT4_LAYOUTS if name.startswith(f"{case}/")}
    weight, bits = found.pop("weight"), int(found.pop("bits"))
    config = {"quant_method": "awq" if case == "awq" else "gptq", "bits": bits, "group_size": 32}
    tensors = {f"x.{part}": values for part, values in found.items()}
    with open_checkpoint(kit.save(tmp_path, {"model_type": "x", "quantization_config": config}, tensors)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("x.weight"), weight)


@pytest.mark.parametrize("form", named([FORMS[0], FORMS[5], FORMS[14]]))
def test_a_float_checkpoint_that_claims_to_be_quantized_is_refused(form: Form, tmp_path: Path) -> None:
    _, values = kit.model(form)
    folder = kit.save(tmp_path, kit.CONFIG | {"quantization_config": form.config}, values)
    with pytest.raises(CheckpointError, match=r"and there is no tensor .*remove quantization_config from config\.json"):
        open_checkpoint(folder)


def test_experts_that_threads_read_in_turn_are_dequantized_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of rows of two experts in turn, as two threads of a migration read them."""
    stored, _ = kit.mxfp4_experts(GPT_OSS)
    config = GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}
    calls, parts = [], FusedExperts.parts
    monkeypatch.setattr(FusedExperts, "parts", lambda self, values: (calls.append(1), parts(self, values))[1])
    with open_model(kit.save(tmp_path, config, stored)) as model:
        buffer = np.empty(64 * 2, np.uint8)
        for row in range(10):
            for name in ("0.gate_proj", "1.up_proj", "0.up_proj"):
                tensor = f"model.layers.0.mlp.experts.{name}.weight"
                model.checkpoint.read_into(tensor, buffer.data, row * len(buffer))
    assert len(calls) == 2
