"""Opening checkpoints: whole, sharded, quantized by others, and broken in every known way."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import tensors as random_tensors
from tiny_checkpoints import CONFIG, MakeCheckpoint

from bminf_lite.backend.quantization import Int8Weight
from bminf_lite.checkpoint.compressed_tensors import pack, quantization_config, unpack
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.reader import open_checkpoint
from bminf_lite.checkpoint.recipe import Scheme
from bminf_lite.errors import CheckpointError, UsageError

LINEAR = "model.layers.0.mlp.up_proj"
FORMS = pytest.mark.parametrize("form", ["safetensors", "bin", "legacy"])


def message(folder: Path) -> str:
    """The error of opening the folder."""
    with pytest.raises(CheckpointError) as caught:
        open_model(folder)
    return str(caught.value)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@FORMS
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_reads_every_tensor(make_checkpoint: MakeCheckpoint, shards: int, dtype: Any, form: str) -> None:
    tensors = random_tensors(CONFIG, dtype=dtype)
    folder = make_checkpoint(tensors=tensors, shards=shards, form=form)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    with open_model(folder) as model:
        checkpoint = model.checkpoint
        assert checkpoint.config["vocab_size"] == 40 and checkpoint.generation_config == {"eos_token_id": 2}
        assert checkpoint.manifest == {} and checkpoint.quantization is None
        assert checkpoint.tensors.keys() == tensors.keys()
        for name, expected in tensors.items():
            got = checkpoint.weight(name) if expected.ndim == 2 else checkpoint.vector(name)
            assert not isinstance(got, Int8Weight) and got.dtype == expected.dtype
            np.testing.assert_array_equal(got, expected)
        assert set(checkpoint.files()) == set(folder.iterdir()) - {folder / "generation_config.json"}


def test_safetensors_go_before_torch_files(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    with open_checkpoint(folder) as checkpoint:
        assert [file.name for file in checkpoint.files()] == ["config.json", "model.safetensors"]


def test_of_very_many_problems_the_first_and_the_last_are_listed(make_checkpoint: MakeCheckpoint) -> None:
    text = message(make_checkpoint(tensors=random_tensors(CONFIG), num_hidden_layers=1000))
    assert len(text.splitlines()) == 43 and text.endswith("export the model again")
    assert "more ..." in text and "missing tensor 'model.layers.999." in text


def test_wrong_tensors_are_listed_together(make_checkpoint: MakeCheckpoint) -> None:
    tensors = random_tensors(CONFIG)
    del tensors["model.norm.weight"]
    tensors["extra"] = np.zeros(3, np.float32)
    tensors[f"{LINEAR}.weight"] = np.zeros((3, 5), np.float32)
    tensors["lm_head.weight"] = np.zeros((40, 16), np.int32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    text = message(make_checkpoint(tensors=tensors))
    assert "4 problems" in text
    assert "missing tensor 'model.norm.weight', F32 or F16 or BF16 [16]" in text
    assert "unexpected tensor 'extra', F32 [3]" in text
    assert f"tensor '{LINEAR}.weight' has shape [3, 5]; config.json needs [24, 16]" in text
    assert "tensor 'lm_head.weight' is I32; it must be F32 or F16 or BF16" in text


def test_reading_what_is_not_there(make_checkpoint: MakeCheckpoint) -> None:
    tensors = random_tensors(CONFIG) | {"codes.weight": np.zeros((2, 2), np.int8), "count": np.zeros(1, np.int64)}
    with open_checkpoint(make_checkpoint(tensors=tensors)) as checkpoint:
        for read in (checkpoint.read, checkpoint.vector, checkpoint.weight):
            with pytest.raises(CheckpointError, match="has no tensor 'absent'"):
                read("absent")
        with pytest.raises(CheckpointError, match="'count' is I64"):
            checkpoint.vector("count")
        with pytest.raises(CheckpointError, match="does not cover it"):
            checkpoint.weight("codes.weight")


# What is wrong with the files


def test_not_a_folder(tmp_path: Path) -> None:
    assert "does not exist" in message(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    assert "is a file, neither a folder nor GGUF; give the folder that holds" in message(tmp_path / "file")
    (tmp_path / "config.json").write_text("{}")
    assert message(tmp_path / "file").endswith(f"; give its folder, {tmp_path}")


@pytest.mark.parametrize(
    "text, expected",
    [
        (None, "config.json: does not exist"),
        ("{", "not valid JSON"),
        ("[1]", "must hold a JSON object"),
        ("\xff", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
    ids=["absent", "cut", "list", "bytes", "deep"],
)
def test_config_that_cannot_be_read(make_checkpoint: MakeCheckpoint, text: str | None, expected: str) -> None:
    folder = make_checkpoint()
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert expected in message(folder)


def test_only_files_of_other_libraries(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    (folder / "model.safetensors").rename(folder / "tf_model.h5")
    text = message(folder)
    assert "tf_model.h5" in text and "reads model.safetensors and pytorch_model.bin" in text
    assert "save_pretrained" in text


def test_a_folder_without_a_configuration_says_which_to_give(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = make_checkpoint()
    assert f"{folder.parent / 'config.json'}: does not exist; give the folder {folder}" in message(folder.parent)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    assert f"give the folder {snapshot}, which has one" in message(tmp_path / "models--a--b")
    (snapshot / "config.json").rename(snapshot / "adapter_config.json")
    assert "is an adapter, not a model; give its base model's folder" in message(snapshot)


def test_a_link_to_weights_that_were_not_copied(make_checkpoint: MakeCheckpoint) -> None:
    weights = make_checkpoint() / "model.safetensors"
    weights.unlink()
    weights.symlink_to("../../blobs/0123")
    expected = f"{weights}: is a link to ../../blobs/0123, which does not exist; copy that file too"
    assert message(weights.parent) == expected


def test_no_weights_and_no_index(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(shards=2)
    (folder / "model.safetensors.index.json").unlink()
    assert "copy the missing index" in message(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert "holds no weights" in message(folder)


@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        (["model.fp16.safetensors"], "if model.fp16.safetensors is the whole model, rename it to model.safetensors"),
        (["my-model.safetensors"], "if my-model.safetensors is the whole model, rename it to model.safetensors"),
        (["pytorch_model.fp16.bin"], "if pytorch_model.fp16.bin is the whole model, rename it to pytorch_model.bin"),
        (["a.safetensors", "b.safetensors"], "rename the one that is the whole model to model.safetensors"),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], "copy the missing index"),
        (
            ["model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors"],
            "copy model.safetensors.index.fp16.json from where the shards came from, as model.safetensors.index.json",
        ),
        (["adapter_model.safetensors"], r"it is an adapter: merge it into its base model"),
        (["consolidated.00.pth"], "its weights are in consolidated.00.pth"),
        (["consolidated.safetensors"], "get the files for transformers"),
        (["weights.00.safetensors"], "get the files for transformers"),
        (["weights.npz"], "its weights are in weights.npz"),
    ],
)
def test_weights_of_other_names_get_a_remedy(make_checkpoint: MakeCheckpoint, names: list[str], remedy: str) -> None:
    folder = make_checkpoint()
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    for name in names:
        (folder / name).write_bytes(weights)
    text = message(folder)
    assert remedy in text and names[0] in text and len(text.splitlines()) == 1, text


@pytest.mark.parametrize("value", [{"group_size": 64, "bits": 4}, {"group_size": 32, "bits": 8, "mode": "affine"}])
def test_models_quantized_by_mlx_are_named(make_checkpoint: MakeCheckpoint, value: dict[str, Any]) -> None:
    folder = make_checkpoint(quantization=value)
    text = message(folder)
    assert f"is quantized by MLX (quantization: {value['bits']} bits, groups of {value['group_size']})" in text
    assert "get the unquantized model" in text and str(folder) in text


def test_missing_shards_are_all_listed(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(shards=3)
    (folder / "model-00001-of-00003.safetensors").unlink()
    (folder / "model-00003-of-00003.safetensors").unlink()
    text = message(folder)
    assert "the shard model-00001-of-00003.safetensors is missing" in text and "model-00003" in text


OUTSIDE = ["../outside.safetensors", "/etc/passwd", "a/../../b.safetensors", "sub/x.safetensors", "..", ""]
NO_NAMES = ["c:\\x.safetensors", "x\0.safetensors", 5, None]


@pytest.mark.parametrize("name", OUTSIDE + NO_NAMES)
def test_index_stays_inside_its_folder(make_checkpoint: MakeCheckpoint, name: Any) -> None:
    folder = make_checkpoint(shards=2)
    save_file({"x": np.zeros(1, np.float32)}, folder.parent / "outside.safetensors")
    (folder / "sub").mkdir()
    save_file({"x": np.zeros(1, np.float32)}, folder / "sub" / "x.safetensors")
    edit_json(folder / "model.safetensors.index.json", weight_map={"x": name})
    text = message(folder)
    assert "outside this folder" in text or "not a safetensors file" in text


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_index_without_a_map(make_checkpoint: MakeCheckpoint, weight_map: Any) -> None:
    folder = make_checkpoint(shards=2)
    edit_json(folder / "model.safetensors.index.json", weight_map=weight_map)
    assert "weight_map must map" in message(folder)


def test_shards_that_disagree_with_the_index(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(shards=2)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    first, second = sorted(set(weight_map.values()))
    mine = [name for name, file in weight_map.items() if file == first]
    save_file({"model.norm.weight": np.zeros(16, np.float32), mine[0]: np.zeros(1, np.float32)}, folder / second)
    edit_json(index, weight_map=weight_map | {mine[1]: second})
    text = message(folder)
    assert f"tensor '{mine[0]}' is in more than one shard: {first}, {second}" in text
    assert f"places tensor '{mine[1]}' in {second}, but it is in {first}" in text


def test_the_shards_say_what_they_hold_and_not_the_index(make_checkpoint: MakeCheckpoint) -> None:
    """The index of Flan-T5 XL names two copies of the embedding, and its shards hold neither."""
    folder = make_checkpoint(shards=2)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    first, *_ = weight_map.values()
    del weight_map["model.norm.weight"]
    edit_json(index, weight_map=weight_map | {"nowhere": first})
    with open_model(folder) as model:
        assert "model.norm.weight" in model.checkpoint.tensors and "nowhere" not in model.checkpoint.tensors


def test_damage_in_several_shards_is_reported_together(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(shards=3)
    os.truncate(folder / "model-00001-of-00003.safetensors", 0)
    os.truncate(folder / "model-00003-of-00003.safetensors", 500)
    text = message(folder)
    assert "2 problems" in text and "00001-of-00003.safetensors: is empty" in text and "truncated" in text


def test_linked_files_are_followed(make_checkpoint: MakeCheckpoint) -> None:
    """Download caches keep the files elsewhere and link to them; only the index's names must stay inside."""
    folder = make_checkpoint()
    (folder / "model.safetensors").rename(folder.parent / "blob")
    (folder / "model.safetensors").symlink_to("../blob")
    open_model(folder).close()


# Quantized checkpoints


def quantized(
    make_checkpoint: MakeCheckpoint, name: str, scheme: Scheme, scale_dtype: Any = np.float16, flat: bool = False
) -> tuple[Path, dict[str, Int8Weight]]:
    """A checkpoint as other tools write it: codes down to -128, scales of any type and shape."""
    random = np.random.default_rng(0)
    tensors, weights = {}, {}
    for tensor, value in random_tensors(CONFIG).items():
        if value.ndim != 2 or "embed" in tensor:
            tensors[tensor] = value
            continue
        module = tensor.removesuffix(".weight")
        codes = random.integers(-128, 128, value.shape, dtype=np.int8)
        scale = random.uniform(1e-3, 1e-2, len(value)).astype(scale_dtype)
        weights[tensor] = Int8Weight(codes, scale, scheme is Scheme.W8A8)
        tensors[f"{module}.weight_scale"] = scale if flat else scale[:, None]
        if scheme is Scheme.W8A16:
            tensors[f"{module}.weight_packed"] = pack(codes).view(np.int32)
            tensors[f"{module}.weight_shape"] = np.array(codes.shape, np.int64)
        else:
            tensors[tensor] = codes
    config = quantization_config({tensor.removesuffix(".weight"): scheme for tensor in weights})
    return make_checkpoint(name, tensors, quantization_config=config), weights


@pytest.mark.parametrize("scheme", [Scheme.W8A8, Scheme.W8A16])
@pytest.mark.parametrize("scale_dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("flat", [False, True])
def test_quantized_layouts(make_checkpoint: MakeCheckpoint, scheme: Scheme, scale_dtype: Any, flat: bool) -> None:
    folder, weights = quantized(make_checkpoint, "q", scheme, scale_dtype, flat)
    with open_model(folder) as model:
        for name, expected in weights.items():
            got = model.weights().weight(name)
            assert isinstance(got, Int8Weight) and got.dynamic == (scheme is Scheme.W8A8)
            assert got.codes.dtype == np.int8
            assert got.scale.dtype == scale_dtype and got.scale.shape == got.codes.shape[:1]
            np.testing.assert_array_equal(got.codes, expected.codes)
            np.testing.assert_array_equal(got.scale, expected.scale)


def test_naive_layout_and_one_scale_for_a_tensor(make_checkpoint: MakeCheckpoint) -> None:
    folder, weights = quantized(make_checkpoint, "q", Scheme.W8A8)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    config["format"] = config["config_groups"]["group_0"]["format"] = "naive-quantized"
    config["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    edit_json(folder / "config.json", quantization_config=config)
    tensors = load_file(folder / "model.safetensors") | {f"{LINEAR}.weight_scale": np.array([0.5], np.float32)}
    save_file(tensors, folder / "model.safetensors")
    with open_model(folder) as model:
        got = model.weights().weight(f"{LINEAR}.weight")
        assert isinstance(got, Int8Weight)
        np.testing.assert_array_equal(got.scale, np.full(24, 0.5, np.float32))
        np.testing.assert_array_equal(got.codes, weights[f"{LINEAR}.weight"].codes)


@pytest.mark.parametrize(
    "scheme, change, expected",
    [
        (Scheme.W8A8, {f"{LINEAR}.weight_scale": np.full((24, 1), np.nan, np.float32)}, "NaN or an infinity"),
        (Scheme.W8A8, {f"{LINEAR}.weight_scale": np.ones(7, np.float32)}, "weight_scale' has shape [7]"),
        (Scheme.W8A8, {f"{LINEAR}.weight_scale": None}, f"missing tensor '{LINEAR}.weight_scale'"),
        (Scheme.W8A8, {f"{LINEAR}.weight": np.ones((24, 16), np.float32)}, "is F32; it must be I8"),
        (Scheme.W8A8, {f"{LINEAR}.weight_zero_point": np.ones((24, 1), np.int8)}, "only symmetric weights"),
        (Scheme.W8A8, {f"{LINEAR}.weight_zero_point": np.zeros((24, 1), np.int8)}, None),
        (Scheme.W8A16, {f"{LINEAR}.weight_shape": np.array([24, 99], np.int64)}, "takes weight_packed [24, 25]"),
        (Scheme.W8A16, {f"{LINEAR}.weight_shape": np.array([24, -4], np.int64)}, "takes weight_packed [24, -1]"),
        (Scheme.W8A16, {f"{LINEAR}.weight_packed": np.zeros((24, 3), np.int32)}, "config.json needs [24, 4]"),
    ],
)
def test_broken_quantized_layers(
    make_checkpoint: MakeCheckpoint, scheme: Scheme, change: dict[str, Any], expected: str | None
) -> None:
    folder, _ = quantized(make_checkpoint, "q", scheme)
    tensors = load_file(folder / "model.safetensors") | change
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors")
    told = contextlib.nullcontext() if expected is None else pytest.raises(CheckpointError, match=re.escape(expected))
    with told, open_model(folder) as model:
        model.weights().weight(f"{LINEAR}.weight")


@given(st.integers(0, 6), st.integers(0, 9), st.integers(0, 2**32))
def test_packing_is_invertible(rows: int, columns: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(-128, 128, (rows, columns), dtype=np.int8)
    packed = pack(codes).view(np.int32)
    assert packed.shape == (rows, -(-columns // 4))
    np.testing.assert_array_equal(unpack(packed, columns), codes)
    words = packed.view(np.uint32).astype(np.int64)
    for column in range(columns):
        shifted = words[:, column // 4] >> (8 * (column % 4)) & 0xFF
        np.testing.assert_array_equal(shifted - 128, codes[:, column])


def test_a_checkpoint_closes_its_files(make_checkpoint: MakeCheckpoint) -> None:
    before = len(os.listdir("/proc/self/fd"))
    model = open_model(make_checkpoint(shards=3))
    model.close()
    model.close()
    assert "gptq" in message(make_checkpoint("quantized", quantization_config={"quant_method": "gptq"}))
    assert "missing" in message(make_checkpoint("less", tensors={"x": np.zeros(1, np.float32)}))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
@pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
def test_pipes_and_devices_neither_block_nor_fill_memory(
    make_checkpoint: MakeCheckpoint, name: str, target: str
) -> None:
    folder = make_checkpoint()
    (folder / name).unlink(missing_ok=True)
    if target == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(target)
    with pytest.raises(
        CheckpointError, match=rf"{name}: (cannot be read: it is not a regular file|is a device, a pipe)"
    ):
        open_checkpoint(folder)


def test_a_configuration_of_absurd_size_is_refused(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    os.truncate(folder / "config.json", 1 << 40)
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read: it has 1,099,511,627,776 bytes"):
        open_checkpoint(folder)


def test_a_home_folder_is_expanded_and_other_types_are_refused(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint()
    monkeypatch.setenv("HOME", str(folder.parent))
    open_checkpoint(f"~/{folder.name}").close()
    with pytest.raises(UsageError, match="path is 3, but must be the path of a folder"):
        open_checkpoint(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("config.json", b'{"x": [' + b"1," * (1 << 21) + b"1]}", "values, and 2,097,152 are allowed"),
        ("config.json", b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nests too deeply"),
        ("config.json", b'{"x": ' + b"1" * 5_000 + b"}", "is not valid JSON"),
        ("config.json", b" " * (1 << 24) + b"{}", "it has 16,777,218 bytes, and 16,777,216 are allowed"),
        ("generation_config.json", b'{"x":' + b"{" * 100_000, "is not valid JSON"),
        ("bminf_lite.json", b'{"files": [' + b"0," * (1 << 21) + b"0]}", "values, and 2,097,152 are allowed"),
        ("model.safetensors.index.json", b'{"x":' + b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_json_files_have_a_budget(make_checkpoint: MakeCheckpoint, name: str, content: bytes, problem: str) -> None:
    folder = make_checkpoint(shards=2)
    (folder / name).write_bytes(content)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=rf"{name}.*{problem}"):
        open_checkpoint(folder)
    assert time.process_time() - start < 3


def test_a_value_of_a_file_does_not_fill_the_screen(make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(CheckpointError, match=r"characters \.\.\.") as caught:
        open_model(make_checkpoint(num_attention_heads=[1] * 100_000))
    assert len(str(caught.value)) < 6_000
