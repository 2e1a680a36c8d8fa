"""Files that are wrong on purpose: whatever reads them ends soon, with an error that names what is wrong.

Each input is a change of a checkpoint that works. Loading and generating, migrating, ``inspect`` and ``plan`` are all
tried with it: each succeeds or raises this package's error, and loading or migrating says what the table has.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli_kit
import gguf_bytes
import numpy as np
import pytest
import tiny_checkpoint
from gguf_bytes import array, file_bytes, string
from hostile_kit import bounded, error_of
from safetensors.numpy import save

import bminf_lite

pytest.importorskip("gguf", reason="GGUF needs the package gguf")

NAN, INFINITY, BILLION = float("nan"), float("inf"), 10**9
Change = dict[str, Any] | str | bytes | Callable[[bytes], bytes | None]
"""Fields to set in a file of JSON, or its content, or a function of that; None removes the file."""


def scaling(**values: Any) -> dict[str, Any]:
    return {"rope_scaling": values}


CONFIG: dict[str, tuple[Change, str]] = {
    "cut": ("{", "config.json.* not valid JSON"),
    "empty": ("", "config.json.* not valid JSON"),
    "list": ("[]", "must hold a JSON object, not list"),
    "zeros": ("\0" * 50, "not valid JSON"),
    "UTF-16": (json.dumps(tiny_checkpoint.CONFIG).encode("utf-16"), "not valid JSON"),
    "deep": ('{"a":' * 100_000, "nests too deeply"),
    "number of 5,000 digits": ('{"hidden_size": ' + "9" * 5000 + "}", "not valid JSON"),
    "lone surrogate": ('{"model_type": "\\ud800"}', r"model_type '\\ud800' is not supported"),
    "negative size": ({"hidden_size": -32}, "hidden_size is -32"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    "billions of layers": ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
    "a million layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
    "huge vocabulary": ({"vocab_size": 2**50}, "vocab_size is 1125899906842624"),
    "size as text": ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
    "size of true": ({"hidden_size": True}, "hidden_size is True"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
    "NaN epsilon": ({"rms_norm_eps": NAN}, "rms_norm_eps is nan"),
    "infinite base": ({"rope_theta": INFINITY}, "rope_theta is inf"),
    "factor as text": (scaling(rope_type="linear", factor="x"), "factor is 'x'"),
    "unknown rotation": (scaling(rope_type="zzz"), "rope_type is 'zzz'"),
    "too many factors": (scaling(rope_type="longrope", short_factor=[1] * 4000, long_factor=[1] * 4), "4000 numbers"),
    "context of 2^62": ({"max_position_embeddings": 2**62}, "max_position_embeddings is 4611686018427387904"),
    "activation of code": ({"hidden_act": "__import__('os')"}, "hidden_act is"),
    "path as architecture": ({"model_type": "../x", "architectures": ["../x"]}, "model_type '../x' is not supported"),
    "flag as text": ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    "sizes of other weights": ({"intermediate_size": 47}, r"has shape \[48, 32\]; config.json needs \[47, 32\]"),
    "quantization of text": ({"quantization_config": "int8"}, "quantization_config"),
    "unknown quantization": ({"quantization_config": {"quant_method": "zzz"}}, "zzz"),
    "quantization without groups": ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_c"),
}


def compressed(**changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}}
    group["weights"] |= changes.pop("weights", {})  # type: ignore[operator]
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"g": group}}
    return {"quantization_config": config | changes}


QUANTIZATION: dict[str, tuple[Change, str]] = {
    "a billion bits": (compressed(weights={"num_bits": BILLION}), "quantization_config"),
    "pattern that is none": (compressed(ignore=["re:(("]), r"re:\(\("),
    "pattern of 5,000 groups": (compressed(ignore=["re:" + "(" * 5000 + ")" * 5000]), "quantization_config"),
    "pattern that counts": (compressed(ignore=["re:a{1,65535}{1,65535}"]), "quantization_config"),
    "list of numbers to ignore": (compressed(ignore=[5]), "quantization_config"),
}


def tokenizer(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(json.loads(content) | changes).encode()


def vocabulary(**changes: Any) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        value = json.loads(content)
        value["model"] |= changes
        return json.dumps(value).encode()

    return changed


def added(**token: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": 258, "content": "<x>", "special": True, **flags, **token}


DOUBLES = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
TOKENIZER: dict[str, tuple[Change, str]] = {
    "empty": ("", "tokenizer.json"),
    "list": ("[]", "tokenizer.json"),
    "cut": (lambda content: content[:500], "tokenizer.json"),
    "no model": (lambda content: json.dumps({"version": "1.0"}).encode(), "tokenizer.json"),
    "unknown model": (vocabulary(type="Zzz"), "tokenizer.json"),
    "negative id": (vocabulary(vocab={"a": -1}), "tokenizer.json"),
    "id of 2^31": (vocabulary(vocab={"a": 2**31}), "tokenizer.json"),
    "merges of unknown tokens": (vocabulary(merges=[["zz", "qq"]]), "tokenizer.json"),
    "text that doubles 50 times": (tokenizer(normalizer={"type": "Sequence", "normalizers": [DOUBLES] * 50}), "charac"),
    "expression that is none": (tokenizer(pre_tokenizer=SPLIT | {"pattern": {"Regex": "(("}}), "tokenizer.json"),
    "deep": (lambda content: content[:-1] + b',"x":' + b"[" * 200_000, "tokenizer.json"),
    "added token of a trillion": (tokenizer(added_tokens=[added(id=10**12)]), "tokenizer.json"),
    "added token that is a number": (tokenizer(added_tokens=[1]), "tokenizer.json"),
    "100,000 tokens at the start": (
        tokenizer(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [255] * 100_000, "tokens": ["<s>"] * 100_000}},
            }
        ),
        "too long|tokenizer.json",
    ),
}
TOKENIZER_CONFIG: dict[str, tuple[Change, str]] = {
    "list": ("[]", "tokenizer_config.json"),
    "template of a number": ({"chat_template": 5}, "chat_template"),
    "decoder of a text": ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder"),
    "decoder of a trillion": ({"added_tokens_decoder": {str(10**12): {"content": "a"}}}, "1000000000000|added_tokens"),
    "beginning of a number": ({"bos_token": 5}, "bos_token"),
}
GENERATION: dict[str, tuple[Change, str]] = {
    "list": ("[1]", "generation_config.json"),
    "deep": ("[" * 100_000, "generation_config.json.*nests too deeply"),
    "end of a trillion": ({"eos_token_id": 10**12}, "eos_token_id"),
    "end of a text": ({"eos_token_id": "x"}, "eos_token_id"),
    "ends in lists": ({"eos_token_id": [[1]]}, "eos_token_id"),
    "NaN temperature": ({"temperature": NAN, "do_sample": True}, "temperature"),
    "temperature of a text": ({"temperature": "hot", "do_sample": True}, "temperature"),
    "probability of 7": ({"top_p": 7, "do_sample": True}, "top_p"),
    "top 2^70": ({"top_k": 2**70, "do_sample": True}, "top_k"),
    "no penalty": ({"repetition_penalty": 0}, "repetition_penalty"),
    "words that are text": ({"bad_words_ids": "x"}, "bad_words_ids"),
    "bias of NaN": ({"sequence_bias": [[[1], NAN]]}, "sequence_bias"),
    "sequences of 2^62": ({"no_repeat_ngram_size": 2**62}, "no_repeat_ngram_size"),
    "stop of a number": ({"stop_strings": [5]}, "stop"),
}

TENSORS = tiny_checkpoint.tensors(tiny_checkpoint.CONFIG)
UP = "model.layers.0.mlp.up_proj.weight"


def header(value: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def described(**changes: Any) -> Callable[[bytes], bytes]:
    """Another description of one tensor."""

    def changed(content: bytes) -> bytes:
        end = 8 + int.from_bytes(content[:8], "little")
        value = json.loads(content[8:end])
        value[UP] |= changes
        return header(value, content[end:])

    return changed


def with_value(name: str, number: float) -> bytes:
    values = {key: value.copy() for key, value in TENSORS.items()}
    values[name].flat[0] = number
    return save(values)


ENTRY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
SAFETENSORS: dict[str, tuple[Change, str]] = {
    "empty": (b"", "model.safetensors"),
    "seven bytes": (b"1234567", "model.safetensors"),
    "header of 2^63 bytes": (header({}, length=2**63), "model.safetensors"),
    "header that ends early": (header({}, length=5000), "model.safetensors"),
    "header that is no JSON": (header(b"{{{"), "model.safetensors"),
    "header that is a list": (header([]), "model.safetensors"),
    "deep header": (header(b'{"a":' * 50_000), "model.safetensors"),
    "300,000 entries": (lambda _: header({f"t{i}": ENTRY for i in range(300_000)}), "."),
    "negative place": (described(data_offsets=[-1, 5]), "model.safetensors"),
    "place of 2^62": (described(data_offsets=[0, 2**62]), "model.safetensors"),
    "unknown type": (described(dtype="X99"), "X99"),
    "huge shape": (described(shape=[2**40, 2**40]), "model.safetensors"),
    "shape of text": (described(shape="ab"), "model.safetensors"),
    "cut": (lambda content: content[:-100], "model.safetensors"),
    "page of a web site": (b"<html>404 not found</html>", "model.safetensors"),
    "pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 1\n", "(?i)lfs"),
    "NaN": (with_value(UP, NAN), "NaN"),
    "3e38": (with_value(UP, 3e38), "3e\\+38"),
    "infinite norm": (with_value("model.norm.weight", np.inf), "NaN or an infinity"),
}

FILES = {
    "config.json": CONFIG | QUANTIZATION,
    "tokenizer.json": TOKENIZER,
    "tokenizer_config.json": TOKENIZER_CONFIG,
    "generation_config.json": GENERATION,
    "model.safetensors": SAFETENSORS,
}


def of_model(**metadata: Any) -> bytes:
    return file_bytes({f"llama.{key.replace('__', '.')}": value for key, value in metadata.items()})


def of_words(**metadata: Any) -> bytes:
    return file_bytes({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})


GATE = "blk.0.ffn_gate.weight"
GGUF: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no GGUF file"),
    "another magic": (file_bytes(magic=b"GGML"), "does not begin with GGUF"),
    "version 0": (file_bytes(version=0), "version 0"),
    "2^62 entries": (file_bytes(counts=(None, 2**62)), "4,611,686,018,427,387,904 entries"),
    "2^62 tensors": (file_bytes(counts=(2**62, None)), "4,611,686,018,427,387,904 tensors"),
    "2^62 elements": (of_words(scores=array(6, 2**62)), "tokenizer.ggml.scores claims"),
    "2^40 texts": (of_words(tokens=array(8, 2**40)), "tokenizer.ggml.tokens claims"),
    "lists of lists": (of_words(scores=array(9, 1, struct.pack("<IQ", 9, 1) * 1000)), "list of lists"),
    "unknown type of metadata": (file_bytes({"x": struct.pack("<I", 77)}), "unknown type 77"),
    "text that is no UTF-8": (file_bytes({"general.name": struct.pack("<I", 8) + string(b"\xff\xfe")}), "not UTF-8"),
    "path as architecture": (file_bytes({"general.architecture": "../x"}), "'../x'"),
    "number as architecture": (file_bytes({"general.architecture": 5}), "general.architecture is 5"),
    "alignment of 3": (file_bytes({"general.alignment": 3}), "general.alignment is 3"),
    "billions of layers": (of_model(block_count=2**31), "block_count is 2147483648"),
    "width of text": (of_model(embedding_length="x"), "llama.embedding_length is 'x'"),
    "width of lists": (of_model(embedding_length=[1, 2]), r"llama.embedding_length is \[1, 2\]"),
    "no heads": (of_model(attention__head_count=0), "llama.attention.head_count is 0"),
    "heads of text": (of_model(attention__head_count="x"), "llama.attention.head_count is 'x'"),
    "heads of an empty list": (of_model(attention__head_count=array(4, 0)), r"head_count is \[\]"),
    "heads by layer": (of_model(attention__head_count=[1, 2]), "such layers are not supported"),
    "more heads than width": (of_model(attention__head_count=33), "head_count is 33, but embedding_length is 32"),
    "NaN epsilon": (of_model(attention__layer_norm_rms_epsilon=NAN), "nan"),
    "NaN factor": (of_model(rope__scaling__type="yarn", rope__scaling__factor=NAN), "rope.scaling.factor is nan"),
    "experts": (of_model(expert_count=8), "expert_count is 8, but the tensors hold none"),
    "tokens of a number": (of_words(tokens=-1.5), "tokenizer.ggml.tokens is -1.5"),
    "tokens of numbers": (of_words(tokens=[1, 2]), "tokenizer.ggml.tokens is"),
    "one token": (of_words(tokens=["a"]), "tokenizer.ggml"),
    "merge of one word": (of_words(merges=["nospace"]), "merges.*'nospace'"),
    "model of lists": (of_words(model=["a"]), r"tokenizer.ggml.model is \['a'\]"),
    "end beyond the vocabulary": (of_words(eos_token_id=2**31), "eos_token_id is 2147483648"),
    "cut": (file_bytes()[:-500], "ends before tensor"),
    "cut header": (file_bytes()[:200], "bytes follow"),
    "unknown type of tensor": (file_bytes(kinds={GATE: 999}), f"{GATE}.* type 999"),
    "scales of random bits": (file_bytes(kinds={GATE: 2}), "."),
    "vector in blocks": (file_bytes(kinds={"output_norm.weight": 8}), "output_norm.weight.* no rows"),
    "tensor without sizes": (file_bytes(shapes={GATE: []}), f"{GATE}.* no rows"),
    "tensor of 2^64 values": (file_bytes(shapes={GATE: [2**32, 2**32]}), f"ends before tensor '{GATE}'"),
    "tensor of 50 sizes": (file_bytes(shapes={GATE: [2] * 50}), f"{GATE}.* 50 dimensions"),
    "tensor at 2^62": (file_bytes(offsets={GATE: 2**62}), f"ends before tensor '{GATE}'"),
    "NaN": (file_bytes(values={GATE: NAN}), "NaN"),
}


def changed(folder: Path, source: Path, name: str, change: Change) -> Path:
    """A copy of the checkpoint ``source`` in which one file is another."""
    folder.mkdir()
    for path in source.iterdir():
        if path.name != name:
            (folder / path.name).symlink_to(path)
    before = (source / name).read_bytes()
    if isinstance(change, dict):
        change = json.dumps(json.loads(before) | change)
    content = change(before) if callable(change) else change
    if content is not None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def check(path: Path, out: Path, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Try everything that reads ``path``."""

    def generate() -> None:
        with bminf_lite.load(path, device="cpu") as model:
            model.generate("the", max_new_tokens=2)

    errors = [error_of(generate), error_of(lambda: bminf_lite.migrate(path, out))]
    for command in (["inspect"], ["plan", "--gpu-memory", "6GiB", "--link", "25", "--bandwidth", "300"]):
        with bounded():
            result = cli_kit.run(*command, path)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.output + result.stderr
    assert any(re.search(message, error, re.DOTALL) for error in errors if error), errors
    assert all(len(error) < 20_000 for error in errors)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, id=f"{name}: {case}") for name, cases in FILES.items() for case in cases],
)
def test_a_folder(name: str, case: str, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change, message = FILES[name][case]
    check(changed(tmp_path / "model", source, name, change), tmp_path / "out", message, capfd)


@pytest.mark.parametrize("case", GGUF)
def test_a_gguf_file(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content, message = GGUF[case]
    (tmp_path / "model.gguf").write_bytes(content)
    check(tmp_path / "model.gguf", tmp_path / "out", message, capfd)


def test_the_file_without_a_change_works(tmp_path: Path) -> None:
    """What the table changes is what is refused."""
    (tmp_path / "model.gguf").write_bytes(file_bytes())
    with bminf_lite.load(tmp_path / "model.gguf", device="cpu") as model:
        assert model.generate("ab", max_new_tokens=2) is not None
    assert len(gguf_bytes.metadata()["tokenizer.ggml.tokens"]) == tiny_checkpoint.CONFIG["vocab_size"]


NAMES = tuple(TENSORS)


@pytest.mark.parametrize("place", ["../../../etc/passwd", "/etc/passwd", 5, "a\0b", "x" * 300, ".", "none.safetensors"])
def test_an_index_that_names_other_files(
    place: Any, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = changed(tmp_path / "model", source, "model.safetensors", lambda content: None)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(NAMES, place)}))
    check(folder, tmp_path / "out", "model.safetensors.index.json|does not exist|not a file", capfd)
