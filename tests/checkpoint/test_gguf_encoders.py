"""GGUF files of encoders give the tensors and vectors of their folders, and their tokenizers the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embedding_kit import SPECIAL, WORDS, write_encoder
from test_encoders import Case, cases, vectors
from tiny_models import RandomWeights
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from tolerances import assert_close

import bminf_lite
from bminf_lite.backend.base import Backend
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.reader import open_checkpoint
from bminf_lite.errors import CheckpointError

gguf = pytest.importorskip("gguf", reason="GGUF needs the package gguf")
import gguf_encoders  # noqa: E402
from test_gguf import assert_any_number_is_read_or_refused  # noqa: E402

NOMIC = {"model_type": "nomic_bert", "n_embd": 48, "n_inner": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97}
CASES = {
    "bert": ("bert: vectors", {}),
    "bert, three types, large eps": ("bert: relu, three types, large eps", {"hidden_act": "gelu"}),
    "roberta": ("roberta: vectors", {}),
    "xlm_roberta": ("xlm-roberta: vectors", {}),
    "nomic_bert": ("nomic_bert: vectors", NOMIC | {"rotary_emb_base": 1000.0}),
    "modernbert": ("modernbert: vectors", {}),
}


def case(name: str) -> Case:
    """A golden case, or one with other values of its configuration and the vectors that the CPU computes with these."""
    golden, changes = CASES[name]
    found = next(case for case in cases() if case.name == golden)
    if not changes:
        return found
    config = changes if "n_embd" in changes else found.config | changes
    changed = Case(name, config, found.seed, "", found.texts, found.results)
    results = vectors(changed.network(Backend(np.float32)), *found.texts)
    return Case(name, config, found.seed, "", found.texts, results)


def tensors_of(found: Case) -> dict[str, np.ndarray]:
    return RandomWeights(found.config, found.seed).tensors


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    found = case(name)
    path = gguf_encoders.write(tmp_path / "model.gguf", found.config, tensors_of(found))
    ends = np.cumsum([len(text) for text in found.texts])
    with bminf_lite.load(path, device="cpu") as model:
        texts = [text.tolist() for text in found.texts]
        first = model.embed(texts, normalize=False)
        last = model.embed(texts, normalize=False, pooling="lasttoken")
    scale = np.abs(found.results).max()
    assert_close(first, found.results[np.r_[0, ends[:-1]]], "logits", np.float32, scale)
    assert_close(last, found.results[ends - 1], "logits", np.float32, scale)


@pytest.mark.parametrize("name", ["bert", "nomic_bert", "modernbert"])
def test_tensors_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    found = case(name)
    expected = tensors_of(found)
    with open_model(gguf_encoders.write(tmp_path / "model.gguf", found.config, expected)) as model:
        assert model.checkpoint.tensors.keys() == expected.keys()
        for tensor, values in expected.items():
            np.testing.assert_array_equal(model.checkpoint.read(tensor), values)


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        ("bert", {"attention.causal": True}, "attention.causal is True, not false"),
        ("bert", {"pooling_type": 4}, "pooling_type is 4, not one of 1, 2, 3"),
        ("nomic_bert", {"rope.scaling.factor": 2.0}, "has a scaling of the rotation"),
        ("modernbert", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "has a scaling of the rotation"),
        ("modernbert", {"hidden_activation": "mish"}, "mish"),
        ("nomic_bert", {"expert_count": 8}, "mixture of experts, which this version does not run for nomic-bert"),
    ],
)
def test_what_cannot_be_run_is_refused(name: str, metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    found = case(name)
    path = gguf_encoders.write(tmp_path / "model.gguf", found.config, tensors_of(found), **metadata)
    with pytest.raises(CheckpointError, match=message):
        bminf_lite.load(path, device="cpu").close()


@pytest.mark.parametrize("name", ["bert", "nomic_bert", "modernbert"])
def test_any_number_in_the_metadata_is_read_or_refused_with_the_file_s_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = case(name)
    path = gguf_encoders.write(tmp_path / "model.gguf", found.config, tensors_of(found))
    assert_any_number_is_read_or_refused(path, monkeypatch)


def pieces_of_bert(tokens: list[str]) -> list[str]:
    """``phantom`` of the converter: the first piece of a word is marked, not the others."""
    return [t if t in SPECIAL else t[2:] if t.startswith("##") else f"▁{t}" for t in tokens]


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_pieces(lowercase: bool, tmp_path: Path) -> None:
    reference = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    reference.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    reference.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    texts = ["The cats sat, didn't they? Émile's café 日本", "unaffable Numbers 12345", "", "ŽŽ [SEP] <x>"]
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=list(SPECIAL), show_progress=False)
    reference.train_from_iterator(texts * 4, trainer)
    reference.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokens = sorted(reference.get_vocab(), key=reference.get_vocab().get)
    found = tokenizer_of(
        tmp_path,
        model="bert",
        tokens=pieces_of_bert(tokens),
        token_type=[3 if token in SPECIAL else 1 for token in tokens],
    )
    for text in texts:
        assert found.encode(text).ids == reference.encode(text).ids
        pair, expected = found.encode(text, "The cats"), reference.encode(text, "The cats")
        assert (pair.ids, pair.type_ids) == (expected.ids, expected.type_ids)


def test_unigrams(tmp_path: Path) -> None:
    reference = Tokenizer(models.Unigram())
    reference.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace("  ", " ")])
    reference.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    texts = ["The cats sat,  didn't they?", "les élèves 日本語", "a  b", " x"]
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False)
    reference.train_from_iterator(texts * 8, trainer)
    model = json.loads(reference.to_str())["model"]
    found = tokenizer_of(
        tmp_path,
        model="t5",
        tokens=[piece for piece, _ in model["vocab"]],
        scores=[float(score) for _, score in model["vocab"]],
        token_type=[3 if piece in special else 1 for piece, _ in model["vocab"]],
        unknown_token_id=model["unk_id"],
        bos_token_id=0,
        eos_token_id=2,
        add_space_prefix=True,
        remove_extra_whitespaces=True,
    )
    for text in texts:
        ids = reference.encode(text).ids
        assert found.encode(text).ids == [0, *ids, 2]
        assert found.encode(text, "a").ids == [0, *ids, 2, 2, *reference.encode("a").ids, 2]


def tokenizer_of(folder: Path, **values: Any) -> Tokenizer:
    """The tokenizer that is made from metadata of a vocabulary."""
    found = case("bert")
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    path = gguf_encoders.write(folder / "model.gguf", found.config, tensors_of(found), **metadata)
    with open_checkpoint(path) as checkpoint:
        return Tokenizer.from_str(checkpoint.text_files()["tokenizer.json"])


def test_texts_have_the_vectors_of_the_folder_also_migrated(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    with open_checkpoint(folder) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    pieces = pieces_of_bert([*SPECIAL, *WORDS])
    metadata = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * len(WORDS),
    }
    path = gguf_encoders.write(tmp_path / "model.gguf", config, tensors, **metadata)
    bminf_lite.migrate(path, tmp_path / "out", "w8a16")
    texts = ["A cat sits on the mat", "the red dog"]
    with bminf_lite.load(folder, device="cpu") as model:
        expected = model.embed(texts, pooling="cls")
    for source, name in ((path, "logits"), (tmp_path / "out", "")):
        with bminf_lite.load(source, device="cpu") as model:
            found = model.embed(texts)
        if name:
            assert_close(found, expected, name, np.float32, 1.0)
        assert (found * expected).sum(axis=1).min() > 0.999
