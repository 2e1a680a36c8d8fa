"""A checkpoint's tensors as a model uses them: under other names, tied, or stored the other way round."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoint import save
from tiny_checkpoint import tensors as random_tensors
from tiny_checkpoints import CONFIG, MakeCheckpoint

from bminf_lite.backend import quantization
from bminf_lite.backend.quantization import Int8Weight, quantize_weight
from bminf_lite.checkpoint import conversion
from bminf_lite.checkpoint.inspect import inspect
from bminf_lite.checkpoint.migrate import migrate
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.recipe import Recipe, Scheme
from bminf_lite.errors import CheckpointError
from bminf_lite.placement import requirements_of

GPT2 = {"model_type": "gpt2", "vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
OPT = {
    "model_type": "opt",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "ffn_dim": 24,
    "max_position_embeddings": 8,
}
MATRIX = "transformer.h.1.mlp.c_fc.weight"
EMBEDDING = "model.embed_tokens.weight"


def write(folder: Path, config: dict[str, Any], prefix: str = "transformer.") -> dict[str, np.ndarray]:
    """A random checkpoint whose file omits ``prefix`` from its names; returns its tensors by their full names."""
    tensors = random_tensors(config)
    save(folder, config, {name.removeprefix(prefix): values for name, values in tensors.items()})
    return tensors


def test_a_tied_head_is_the_embedding(make_checkpoint: MakeCheckpoint) -> None:
    """A copy of it in the file is ignored, and anything else is refused."""
    embedding, untied = random_tensors(CONFIG)[EMBEDDING], random_tensors(CONFIG)
    folder = make_checkpoint(tie_word_embeddings=True)
    copied = make_checkpoint("copied", untied | {"lm_head.weight": embedding}, tie_word_embeddings=True)
    for path in (folder, copied):
        with open_model(path) as model:
            np.testing.assert_array_equal(model.weights().weight("lm_head.weight"), embedding)
    with pytest.raises(CheckpointError, match=rf"'lm_head\.weight' differs from '{EMBEDDING}'"):
        open_model(make_checkpoint("other", untied, tie_word_embeddings=True))
    (folder / "bminf_lite.json").write_text('{"tied_head": "w8a16"}')
    with open_model(folder) as model:
        head = model.weights().weight("lm_head.weight")
    assert isinstance(head, Int8Weight) and not head.dynamic
    np.testing.assert_array_equal(head.codes, quantize_weight(embedding).codes)


@pytest.mark.parametrize(("config", "prefix"), [(GPT2, "transformer."), (OPT, "model.")])
def test_names_without_a_prefix_are_known(tmp_path: Path, config: dict[str, Any], prefix: str) -> None:
    tensors = write(tmp_path / "source", config, prefix)
    migrate(tmp_path / "source", tmp_path / "out")
    for folder in ("source", "out"):
        with open_model(tmp_path / folder) as model:
            for name, parameter in model.spec.parameters.items():
                if parameter.role.value == "vector":
                    np.testing.assert_array_equal(model.weights().vector(name), tensors[name])


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
def test_matrices_stored_in_out_may_be_quantized_when_loaded(tmp_path: Path, recipe: str) -> None:
    """Their file stays what other readers open; the model runs the quantized matrix ``[out, in]``."""
    tensors = write(tmp_path / "source", GPT2, "")
    report = migrate(tmp_path / "source", tmp_path / "out", recipe, portable=True)
    assert report.only_bminf_lite is None
    assert set(report.late) == {n for n in tensors if n.endswith(("c_fc.weight", "c_proj.weight", "c_attn.weight"))}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    with open_model(tmp_path / "source") as model:
        np.testing.assert_array_equal(model.weights().weight(MATRIX), tensors[MATRIX].T)
    with open_model(tmp_path / "out") as model:
        np.testing.assert_array_equal(model.checkpoint.vector(MATRIX), tensors[MATRIX])
        weight = model.weights().weight(MATRIX)
    expected = quantize_weight(tensors[MATRIX].T, dynamic=recipe == "w8a8")
    assert isinstance(weight, Int8Weight) and weight.dynamic == expected.dynamic
    np.testing.assert_array_equal(weight.codes, expected.codes)
    np.testing.assert_array_equal(weight.scale, expected.scale)


@pytest.mark.parametrize("columns", [1, 7, 1024])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
def test_matrices_stored_in_out_become_int8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, dtype: Any, columns: int
) -> None:
    """Stored ``[out, in]`` with a scale per output, whatever number of columns is converted at once."""
    monkeypatch.setattr(conversion, "STRIP_COLUMNS", columns)
    monkeypatch.setattr(quantization, "BLOCK_ELEMENTS", 1)
    tensors = random_tensors(GPT2, dtype=dtype)
    tensors[MATRIX][:, 3] = 0
    save(tmp_path / "source", GPT2, tensors)
    report = migrate(tmp_path / "source", tmp_path / "out", recipe)
    assert MATRIX in report.conv1d and not report.late and "only bminf-lite opens" in str(report)
    manifest = json.loads((tmp_path / "out" / "bminf_lite.json").read_text())
    assert manifest["format_version"] == 3 and "[in, out]" in manifest["only_bminf_lite"]
    with open_model(tmp_path / "out") as model:
        for name in report.conv1d:
            weight, expected = model.weights().weight(name), quantize_weight(tensors[name].T, recipe == "w8a8")
            assert isinstance(weight, Int8Weight) and weight.dynamic == expected.dynamic
            np.testing.assert_array_equal(weight.codes, expected.codes)
            np.testing.assert_array_equal(weight.scale, expected.scale)
            assert model.checkpoint.tensors[name].nbytes == tensors[name].size
            assert model.weights().scheme_of(name).value == recipe


def test_a_rule_keeps_some_of_them_float(tmp_path: Path) -> None:
    tensors = write(tmp_path / "source", GPT2)
    migrate(tmp_path / "source", tmp_path / "out", Recipe("r", Scheme.W8A8, Scheme.W8A8, {"*.h.0.*": Scheme.FLOAT}))
    with open_model(tmp_path / "out") as model:
        name = MATRIX.replace(".1.", ".0.")
        np.testing.assert_array_equal(model.weights().weight(name), tensors[name].T)
        assert isinstance(model.weights().weight(MATRIX), Int8Weight)


@pytest.mark.parametrize("manifest", [{"tied_head": "int3"}, {"quantized_when_loaded": {MATRIX: "int3"}}])
def test_unknown_schemes_in_a_manifest_are_refused(tmp_path: Path, manifest: dict[str, Any]) -> None:
    write(tmp_path / "source", GPT2)
    (tmp_path / "source" / "bminf_lite.json").write_text(json.dumps(manifest))
    with open_model(tmp_path / "source") as model, pytest.raises(CheckpointError, match="'int3', which is no scheme"):
        model.weights()


T5 = {
    "model_type": "t5",
    "vocab_size": 40,
    "d_model": 16,
    "d_ff": 24,
    "d_kv": 8,
    "num_heads": 2,
    "num_layers": 1,
    "decoder_start_token_id": 0,
}
STORED_ONCE = [
    (CONFIG | {"tie_word_embeddings": True}, "model.embed_tokens.weight", "lm_head.weight"),
    (GPT2, "transformer.wte.weight", "lm_head.weight"),
    (T5, "shared.weight", "decoder.embed_tokens.weight"),
    (T5, "shared.weight", "lm_head.weight"),
    (T5 | {"tie_word_embeddings": False}, "shared.weight", "encoder.embed_tokens.weight"),
    (T5 | {"model_type": "mt5"}, "shared.weight", "decoder.embed_tokens.weight"),
]


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize(("config", "name", "stored"), STORED_ONCE)
def test_a_shared_matrix_may_have_the_name_of_any_copy(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, config: dict[str, Any], name: str, stored: str, form: str
) -> None:
    """As ``safetensors.torch.save_model`` stores it: once, under the first of its names in alphabetical order."""
    tensors = random_tensors(config)
    renamed = {stored if key == name else key: values for key, values in tensors.items()}
    source = make_checkpoint(tensors=renamed, form=form, **_instead_of_config(config))
    report = migrate(source, tmp_path / "out")
    assert name in {tensor.name for tensor in report.tensors}
    for folder in (source, tmp_path / "out"):
        with open_model(folder) as model:
            np.testing.assert_array_equal(model.weights().vector(name), tensors[name])
        assert requirements_of(folder).weights > 0
        assert inspect(folder)["parameters"] == sum(values.size for values in tensors.values())


def _instead_of_config(config: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ``make_checkpoint`` for ``config``, whose keys replace those of the tiny LLaMA."""
    return dict.fromkeys(CONFIG.keys() - config.keys()) | config


@pytest.mark.parametrize("model_type", ["t5", "mt5"])
def test_a_newer_t5_may_omit_its_unscaled_head(tmp_path: Path, model_type: str) -> None:
    """transformers 5 ties the head of every T5 unless the file holds another one."""
    config = T5 | {"model_type": model_type, "tie_word_embeddings": True, "scale_decoder_outputs": False}
    tensors = random_tensors(config)
    save(tmp_path / "own", config, tensors)
    save(tmp_path / "shared", config, {k: v for k, v in tensors.items() if k != "lm_head.weight"})
    for name, head in (("own", "lm_head.weight"), ("shared", "shared.weight")):
        report = migrate(tmp_path / name, tmp_path / f"{name}-int8")
        assert (report.tied_head is None) == (name == "own")
        with open_model(tmp_path / name) as model, open_model(tmp_path / f"{name}-int8") as int8:
            assert model.config.logit_scale == 1
            np.testing.assert_array_equal(model.weights().weight("lm_head.weight"), tensors[head])
            weight = int8.weights().weight("lm_head.weight")
            assert isinstance(weight, Int8Weight)
            np.testing.assert_array_equal(weight.codes, quantize_weight(tensors[head]).codes)
    old = T5 | {"model_type": model_type, "tie_word_embeddings": False}
    save(tmp_path / "less", old, {k: v for k, v in tensors.items() if k != "lm_head.weight"})
    with pytest.raises(CheckpointError, match=r"missing tensor 'lm_head\.weight'"):
        open_model(tmp_path / "less")


@pytest.mark.parametrize("value", ["</s>", -1, 10**12, 1 << 24, True, 2.0, [2, 10**30], {"a": 1}])
def test_end_tokens_that_are_no_ids_are_refused_before_a_migration(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, value: Any
) -> None:
    folder = make_checkpoint(eos_token_id=value)
    expected = re.escape(f"{folder}/config.json: eos_token_id is {value!r}, but must be")
    with pytest.raises(CheckpointError, match=f"^{expected}"):
        migrate(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_bad_configuration_is_reported_with_its_folder(make_checkpoint: MakeCheckpoint) -> None:
    for key, value in (("hidden_size", -1), ("model_type", "nonsense")):
        folder = make_checkpoint(key, random_tensors(CONFIG), **{key: value})
        with pytest.raises(CheckpointError, match=rf"^{folder}/config\.json: {key}"):
            open_model(folder)


T5 = {
    "model_type": "t5",
    "vocab_size": 40,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 3,
}


def test_the_generation_config_s_decoder_start_precedes(tmp_path: Path) -> None:
    folder = save(tmp_path / "t5", T5, random_tensors(T5))
    for values, start in (({}, 3), ({"decoder_start_token_id": 7}, 7), ({"decoder_start_token_id": None}, 3)):
        (folder / "generation_config.json").write_text(json.dumps(values))
        with open_model(folder) as model:
            assert model.config.decoder_start_token_ids == (start,) and not model.left_out()
    (folder / "generation_config.json").write_text('{"decoder_start_token_id": 7}')
    migrate(folder, tmp_path / "out", "w8a16")
    with open_model(tmp_path / "out") as model:
        assert model.config.decoder_start_token_ids == (7,)


@pytest.mark.parametrize("start", [-1, 40, True, "0", [7], 1.0])
def test_a_decoder_start_must_be_a_token(tmp_path: Path, start: Any) -> None:
    folder = save(tmp_path / "t5", T5, random_tensors(T5))
    (folder / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": start}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: decoder_start_token_id is .* from 0 to 39"):
        open_model(folder)


def test_a_decoder_alone_needs_no_start(make_checkpoint: MakeCheckpoint) -> None:
    """Some files have one for another library."""
    folder = make_checkpoint()
    (folder / "generation_config.json").write_text('{"decoder_start_token_id": 7}')
    with open_model(folder) as model:
        assert model.config.decoder_start_token_ids == () and "decoder_start_token_id" not in model.checkpoint.config
