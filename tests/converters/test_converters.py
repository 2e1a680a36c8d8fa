"""Small checkpoints in the naming of CPM-1, CPM-2 and EVA, cut over processes as in training, and converted.

How a tensor is cut is written here independently, from the model's side: by heads, and by rows or columns of a matrix.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch_writer
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

import bminf_lite
from bminf_lite.checkpoint.opened_model import describe_model
from bminf_lite.cli import main
from bminf_lite.models.spec import Role

CPM1 = {
    "model_type": "cpm1",
    "vocab_size": 48,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 20,
}
CPM2 = {
    "model_type": "cpm2",
    "vocab_size": 48,
    "d_model": 24,
    "d_ff": 36,
    "d_kv": 5,
    "num_heads": 6,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "relative_attention_num_buckets": 32,
}
EVA = CPM2 | {"model_type": "eva", "attn_scale": True, "num_layers": 1, "num_decoder_layers": 2}
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "cpm-1": (CPM1, ["--heads", "6"]),
    "cpm-2": (CPM2, []),
    "eva": (EVA, ["--attn-scale"]),
}
WORDS = [
    "<unk>",
    "<s>",
    "</s>",
    "▃",
    "<sep>",
    "<pad>",
    "<mask>",
    "<go>",
    "<eod>",
    "▁",
    ",",
    "▂",
    "的",
    "<s_0>",
    "<s_1>",
]
TOKENS = {
    "cpm-1": (None, 7),
    "cpm-2": (WORDS.index("<s>"), WORDS.index("<eod>")),
    "eva": (WORDS.index("<s_0>"), WORDS.index("<sep>")),
}
"""For each model, the decoder's first token and the one that ends a text."""


def convert(model: str, source: Path, out: Path, vocabulary: Path, *more: str) -> Result:
    return CliRunner().invoke(main, ["convert", model, str(source), str(out), "--vocabulary", str(vocabulary), *more])


def random_tensors(config: dict[str, Any], dtype: Any = np.float16) -> dict[str, np.ndarray]:
    spec = describe_model(config).spec
    random = np.random.default_rng(1)
    return {
        name: (random.standard_normal(p.shape) * (0.1 if p.role is Role.VECTOR else 0.5)).astype(dtype)
        for name, p in spec.parameters.items()
        if name not in spec.tied
    }


def cut(name: str, tensor: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """What one process of the training has of a tensor."""
    kind = name.rsplit(".", 2)[-2]
    if kind in ("query_key_value", "project", "project_kv"):  # some heads of the query, of the key and of the value
        parts = 2 if kind == "project_kv" else 3
        heads = 6 // ranks
        by_head = tensor.reshape(parts, 6, -1, *tensor.shape[1:])[:, rank * heads : (rank + 1) * heads]
        return by_head.reshape(-1, *tensor.shape[1:])
    if kind in ("word_embeddings", "word_embeds", "lm_head", "project_q", "dense_h_to_4h", "wi_0", "wi_1"):
        return np.split(tensor, ranks)[rank]
    if kind in ("dense", "dense_4h_to_h", "wo", "relative_attention_bias") and tensor.ndim == 2:
        return np.split(tensor, ranks, 1)[rank]
    return tensor


def write_shards(
    folder: Path, tensors: dict[str, np.ndarray], ranks: int, prefix: str = "module.", legacy: bool = False
) -> Path:
    """A checkpoint as DeepSpeed saves it in the folder of an iteration; in fp16, as the models were published."""
    inner = folder / "80000"
    inner.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("80000\n")
    for rank in range(ranks):
        part = {f"{prefix}{k}": np.ascontiguousarray(cut(k, v, rank, ranks)) for k, v in tensors.items()}
        if "word_embeds.weight" in tensors:
            part[f"{prefix}encoder.word_embeds.weight"] = part[f"{prefix}word_embeds.weight"]
            part[f"{prefix}role_embeds.weight"] = np.zeros((2, 24), np.float16)
        torch_writer.save(inner / f"mp_rank_{rank:02d}_model_states.pt", part, legacy, entry="module")
    return folder


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_become_the_tensors_that_they_were_cut_from(
    tmp_path: Path, vocabulary: Path, model: str, ranks: int
) -> None:
    config, more = MODELS[model]
    tensors = random_tensors(config)
    source = write_shards(tmp_path / "source", tensors, ranks, legacy=ranks == 2)
    out = tmp_path / "out"
    result = convert(model, source, out, vocabulary, "--recipe", "merge", *more)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"wrote {out}\n", "")
    merged = load_file(out / "model.safetensors")
    assert merged.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(merged[name], tensor, err_msg=name)
    written = json.loads((out / "config.json").read_text())
    assert {k: written[k] for k in config} == config
    assert (written.get("decoder_start_token_id"), written["eos_token_id"]) == TOKENS[model]
    name = "chinese_vocab.model" if model == "cpm-1" else "vocab.txt"
    assert (out / name).read_bytes() == vocabulary.read_bytes()


@pytest.mark.parametrize("model", MODELS)
def test_int8_is_what_migrating_the_merged_checkpoint_gives(tmp_path: Path, vocabulary: Path, model: str) -> None:
    config, more = MODELS[model]
    source = write_shards(tmp_path / "source", random_tensors(config), 2)
    for recipe, name in (("merge", "merged"), ("w8a8", "int8")):
        assert convert(model, source, tmp_path / name, vocabulary, "--recipe", recipe, *more).exit_code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["int8", "merged", "source", "vocab.txt"]
    bminf_lite.migrate(tmp_path / "merged", tmp_path / "expected", "w8a8")
    for file in (tmp_path / "expected").iterdir():
        assert (tmp_path / "int8" / file.name).read_bytes() == file.read_bytes()
    with bminf_lite.load(tmp_path / "int8", device="cpu") as loaded:
        assert loaded.logits([1, 2, 3], source=None if model == "cpm-1" else [13, 12, 11]).shape == (3, 48)


def test_a_single_file(tmp_path: Path, vocabulary: Path) -> None:
    """``merge.pt``, a state_dict of the whole model, without a wrapper."""
    tensors = random_tensors(CPM1)
    torch_writer.save(tmp_path / "merge.pt", tensors)
    result = convert("cpm-1", tmp_path / "merge.pt", tmp_path / "out", vocabulary, "--recipe", "merge", "--heads", "6")
    assert result.exit_code == 0, result.output
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert all(np.array_equal(merged[name], tensor) for name, tensor in tensors.items())


def failed(source: Path, vocabulary: Path, *more: str) -> str:
    out = source.parent / "never"
    result = convert("cpm-1", source, out, vocabulary, *more)
    assert result.exit_code == 1 and not out.exists() and not list(source.parent.glob(".merged*"))
    return result.stderr


def test_shards_that_do_not_fit(tmp_path: Path, vocabulary: Path) -> None:
    tensors = random_tensors(CPM1)
    source = write_shards(tmp_path / "source", tensors, 2)
    assert "--heads" in failed(source, vocabulary)
    second = source / "80000" / "mp_rank_01_model_states.pt"
    part = {k: np.ascontiguousarray(cut(k, v, 1, 2)) for k, v in tensors.items()}
    for change, words in [
        ({"transformer.final_layernorm.weight": np.ones(24, np.float16)}, "not the same in all shards"),
        ({"word_embeddings.weight": np.ones((25, 24), np.float16)}, "another shape or type"),
        ({"extra": np.ones(1, np.float16)}, "differs from the first shard in extra"),
    ]:
        torch_writer.save(second, part | change, entry="module")
        assert words in failed(source, vocabulary, "--heads", "6")
    second.rename(second.with_name("mp_rank_02_model_states.pt"))
    assert "those between" in failed(source, vocabulary, "--heads", "6")


def test_checkpoints_of_something_else(tmp_path: Path, vocabulary: Path) -> None:
    tensors = random_tensors(CPM1)
    source = tmp_path / "source"
    for change, words in [
        ({"prompt.weight": np.ones(3, np.float16)}, "unknown tensor 'prompt.weight'"),
        ({"transformer.layers.1.mlp.dense_h_to_4h.bias": np.ones(5, np.float16)}, "is [5] when merged"),
        ({"transformer.layers.7.input_layernorm.weight": np.ones(24, np.float16)}, "none of the model's"),
    ]:
        torch_writer.save(tmp_path / "x.pt", tensors | change)
        assert words in failed(tmp_path / "x.pt", vocabulary, "--heads", "6")
    del tensors["transformer.final_layernorm.bias"]
    torch_writer.save(tmp_path / "x.pt", tensors)
    text = failed(tmp_path / "x.pt", vocabulary, "--heads", "6")
    assert "missing tensor 'transformer.final_layernorm.bias'" in text
    torch_writer.save(tmp_path / "x.pt", {"word_embeddings.weight": tensors["word_embeddings.weight"]})
    assert "not CPM-1" in failed(tmp_path / "x.pt", vocabulary)
    assert "does not exist" in failed(source, vocabulary)
    source.mkdir()
    assert "holds neither" in failed(source, vocabulary)
    torch_writer.save(source / "a.pt", tensors)
    torch_writer.save(source / "b.pt", tensors)
    assert "name the one" in failed(source, vocabulary)
    whole = write_shards(tmp_path / "whole", random_tensors(CPM1), 1)
    assert "does not exist" in failed(whole, tmp_path / "none", "--heads", "6")


def test_mistakes_are_told_before_anything_is_merged(
    tmp_path: Path, vocabulary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_shards(tmp_path / "source", random_tensors(CPM1), 2), tmp_path / "out"
    monkeypatch.setattr("bminf_lite.converters.model_parallel.CheckpointWriter", None)

    def told(code: int, *more: str, model: str = "cpm-1") -> str:
        result = convert(model, source, out, vocabulary, *more)
        assert result.exit_code == code
        return result.stderr

    assert "neither built in" in told(2, "--recipe", "no-such-recipe")
    assert "--calibrate" in told(2, "--recipe", "auto")
    assert "an option of cpm-1" in told(2, "--heads", "6", model="eva")
    assert "an option of eva" in told(2, "--attn-scale")
    out.mkdir()
    assert "already exists" in told(1)
    out.rmdir()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    assert "the disk is full" in told(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"source", vocabulary.name})


@pytest.mark.parametrize("recipe", ["merge", "w8a8"])
def test_an_interrupted_merge_leaves_nothing(
    tmp_path: Path, vocabulary: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    source = write_shards(tmp_path / "source", random_tensors(CPM1), 2)
    monkeypatch.setattr("bminf_lite.converters.model_parallel.CheckpointWriter.write", interrupt)
    assert convert("cpm-1", source, tmp_path / "out", vocabulary, "--heads", "6", "--recipe", recipe).exit_code == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"source", vocabulary.name})
