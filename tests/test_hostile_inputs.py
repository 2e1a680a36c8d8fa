"""A hundred checkpoints with one hostile file each: an error of ours that names the file, in bounded time.

Those in :data:`HARMLESS` give a result: nothing asks for what is wrong with them.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint

import bminf_lite
from bminf_lite.errors import BminfError

pytestmark = pytest.mark.filterwarnings("error", "ignore:.*not obeyed here:UserWarning")
SECONDS = 10
"""The processor time that one input may take; the slowest takes about 1 second."""
Change = Callable[[Path], None]


def merged(name: str, **changes: Any) -> Change:
    """Change an object in a JSON file."""

    def change(folder: Path) -> None:
        path = folder / name
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(old | changes))

    return change


def raw(name: str, content: bytes) -> Change:
    """Replace a file."""
    return lambda folder: (folder / name).write_bytes(content) and None  # type: ignore[func-returns-value]


def header(entries: Any, data: bytes = b"", length: int | None = None) -> Change:
    """A safetensors file with a header."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return raw("model.safetensors", struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(shape: list[Any], offsets: list[Any], dtype: Any = "F32") -> dict[str, Any]:
    return {"model.norm.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def weights(edit: Callable[[dict[str, np.ndarray]], None]) -> Change:
    """Change tensors."""

    def change(folder: Path) -> None:
        tensors = tiny_checkpoint.tensors(tiny_checkpoint.CONFIG)
        edit(tensors)
        tiny_checkpoint.save(folder, tiny_checkpoint.CONFIG, tensors)

    return change


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def indexed(content: bytes) -> Change:
    """An index of shards in place of the only file."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_bytes(content)

    return change


DEEP = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
CONFIG, GENERATION, TOKENIZER, SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
TEMPLATE = "chat_template.jinja"
INPUTS: dict[str, Change] = {
    # config.json
    **{
        f"config: {key} is {value!r:.30}": merged(CONFIG, **{key: value})
        for key, value in (
            ("model_type", None),
            ("model_type", ["llama"]),
            ("model_type", "../llama"),
            ("architectures", {}),
            ("vocab_size", 2**62),
            ("vocab_size", "260"),
            ("vocab_size", -1),
            ("hidden_size", 0),
            ("hidden_size", 1e308),
            ("num_hidden_layers", 10**9),
            ("num_hidden_layers", 2.5),
            ("num_attention_heads", 3),
            ("num_key_value_heads", 0),
            ("head_dim", 2**40),
            ("max_position_embeddings", 2**63),
            ("rms_norm_eps", "x"),
            ("rms_norm_eps", -1),
            ("rope_theta", 10**400),
            ("rope_scaling", {"rope_type": "yarn", "factor": "x"}),
            ("rope_scaling", [1]),
            ("rope_scaling", {"type": "linear", "factor": 0}),
            ("hidden_act", "import os"),
            ("eos_token_id", 10**12),
            ("bos_token_id", "x"),
            ("tie_word_embeddings", "no"),
            ("text_config", []),
            ("quantization_config", "int8"),
            ("quantization_config", {"quant_method": ["x"]}),
            ("quantization", {"group_size": 64, "bits": 4}),
            ("sliding_window", -5),
        )
    },
    "config: nests deeply": raw(CONFIG, DEEP),
    "config: a list": raw(CONFIG, b"[]"),
    "config: empty": raw(CONFIG, b""),
    "config: a name twice": raw(CONFIG, b'{"model_type": "llama", "model_type": "gpt2"}'),
    "config: no UTF-8": raw(CONFIG, b'{"model_type": "\xff"}'),
    "config: NaN": raw(CONFIG, b'{"vocab_size": NaN}'),
    "config: 10,000 digits": raw(CONFIG, b'{"vocab_size": ' + b"9" * 10_000 + b"}"),
    # generation_config.json
    **{
        f"generation: {key} is {value!r:.30}": merged(GENERATION, **{key: value})
        for key, value in (
            ("eos_token_id", "x"),
            ("eos_token_id", [[1]]),
            ("temperature", "hot"),
            ("temperature", 1e308),
            ("top_k", -3),
            ("top_p", 7),
            ("repetition_penalty", 0),
            ("suppress_tokens", [10**9]),
            ("bad_words_ids", [[1], "x"]),
            ("stop_strings", [3]),
            ("stop_strings", "\ud800"),
            ("max_new_tokens", 10**18),
            ("sequence_bias", {"a": "b"}),
            ("no_repeat_ngram_size", 10**9),
            ("forced_bos_token_id", -1),
        )
    },
    "generation: a list": raw(GENERATION, b"[1]"),
    "generation: nests deeply": raw(GENERATION, DEEP),
    # tokenizer.json and the files beside it
    "tokenizer: backtracks": merged(TOKENIZER, pre_tokenizer=regex("(x+x+)+y")),
    "tokenizer: matches nothing": merged(
        TOKENIZER, normalizer={"type": "Replace", "pattern": {"Regex": "\\b"}, "content": "x"}
    ),
    "tokenizer: no expression": merged(TOKENIZER, pre_tokenizer=regex("(")),
    "tokenizer: makes a million of one": merged(
        TOKENIZER, normalizer={"type": "Replace", "pattern": {"String": "t"}, "content": "t" * 10**6}
    ),
    "tokenizer: an empty model": merged(TOKENIZER, model={"type": "BPE", "vocab": {}, "merges": []}),
    "tokenizer: no model": merged(TOKENIZER, model=None),
    "tokenizer: a list": raw(TOKENIZER, b"[]"),
    "tokenizer: nests deeply": raw(TOKENIZER, DEEP),
    "tokenizer: cut": raw(TOKENIZER, b'{"version": "1.0", "model'),
    "tokenizer: an id of 2^32 - 1": merged(TOKENIZER, model={"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}),
    "tokenizer: a merge of nothing": merged(TOKENIZER, model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}),
    "tokenizer: an added id of 2^31": merged(
        TOKENIZER,
        added_tokens=[
            {
                "id": 2**31,
                "content": "x",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
    ),
    "settings: a class": merged(SETTINGS, tokenizer_class="os.system"),
    "settings: a list": raw(SETTINGS, b"[]"),
    "settings: a wrong token": merged(SETTINGS, eos_token={"content": 3}),
    "settings: an unknown token": merged(SETTINGS, bos_token="<none>"),
    "settings: added": merged(SETTINGS, added_tokens_decoder={"x": {"content": "y"}}),
    "settings: a far id": merged(SETTINGS, added_tokens_decoder={"999999999": {"content": "y", "special": True}}),
    "added tokens: a list": raw("added_tokens.json", b"[1]"),
    "added tokens: no number": raw("added_tokens.json", b'{"a": "b"}'),
    "special tokens: numbers": raw("special_tokens_map.json", b'{"eos_token": 5}'),
    # templates
    "template: endless": raw(TEMPLATE, b"{% for i in range(10**9) %}x{% endfor %}"),
    "template: imports": raw(TEMPLATE, b"{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "template: syntax": raw(TEMPLATE, b"{% if %}"),
    "template: divides": raw(TEMPLATE, b"{{ 1 / 0 }}"),
    "template: recursion": raw(TEMPLATE, b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
    "template: a long text": raw(TEMPLATE, b"{{ 'x' * 10**10 }}"),
    "template: no UTF-8": raw(TEMPLATE, b"\xff\xfe"),
    # weights
    "weights: empty": raw("model.safetensors", b""),
    "weights: text": raw("model.safetensors", b"hello " * 100),
    "weights: a long header": header({}, length=2**63),
    "weights: a header of nothing": header({}, length=0),
    "weights: a list": header([]),
    "weights: nests deeply": header(DEEP),
    "weights: no JSON": header(b"{" * 50),
    "weights: far offsets": header(entry([32], [0, 2**62]), b"0" * 128),
    "weights: offsets backwards": header(entry([32], [128, 0]), b"0" * 128),
    "weights: a size of -1": header(entry([-1], [0, 128]), b"0" * 128),
    "weights: 2^80 elements": header(entry([2**40, 2**40], [0, 128]), b"0" * 128),
    "weights: an unknown type": header(entry([32], [0, 128], "F1000"), b"0" * 128),
    "weights: a number as a type": header(entry([32], [0, 128], 5), b"0" * 128),
    "weights: NaN": weights(lambda t: t["model.norm.weight"].fill(np.nan)),
    "weights: 3e38": weights(lambda t: t["lm_head.weight"].fill(3e38)),
    "weights: prefixed": weights(lambda t: [t.update({f"_orig_mod.{k}": t.pop(k)}) for k in list(t)] and None),
    # the index
    "index: elsewhere": indexed(b'{"weight_map": {"a": "../../etc/passwd"}}'),
    "index: no map": indexed(b'{"weight_map": 3}'),
    "index: nests deeply": indexed(DEEP),
    "index: a NUL": indexed(b'{"weight_map": {"a": "b\\u0000"}}'),
}


HARMLESS = {
    "config: architectures is {}",
    "config: bos_token_id is 'x'",
    "config: text_config is []",
    "config: sliding_window is -5",
    "config: eos_token_id is 1000000000000",  # generation_config.json precedes it
    "generation: suppress_tokens is [1000000000]",
    "generation: max_new_tokens is 1000000000000000000",
    "tokenizer: an added id of 2^31",
    "settings: a class",
    "settings: an unknown token",
    "settings: a far id",
}
NAMED = {
    "generation": "generation_config.json",
    "template": "the chat template",
    "tokenizer: an empty model": "empty",
    "template: no UTF-8": "chat_template.jinja",
}


def outcomes(folder: Path) -> list[str]:
    """What loading, generating and migrating give: the messages of errors of ours."""
    messages = []

    def attempt(function: Callable[[], Any]) -> None:
        try:
            function()
        except BminfError as error:
            messages.append(str(error))

    def generate() -> None:
        with bminf_lite.load(folder, device="cpu") as model:
            attempt(lambda: model.generate("the quick brown fox", max_new_tokens=2))
            attempt(lambda: model.generate("x" * 40, max_new_tokens=2))
            attempt(lambda: model.generate([{"role": "user", "content": "the"}], max_new_tokens=2))

    attempt(generate)
    attempt(lambda: bminf_lite.migrate(folder, folder.parent / "int8"))
    return messages


@pytest.mark.parametrize("name", INPUTS)
def test_a_hostile_file(tmp_path: Path, name: str) -> None:
    folder = tiny_checkpoint.write(tmp_path / "model")
    INPUTS[name](folder)
    start = time.process_time()
    messages = outcomes(folder)
    assert time.process_time() - start < SECONDS
    for message in messages:
        assert message and len(message) < 20_000 and "Traceback" not in message, message
    assert bool(messages) == (name not in HARMLESS)
    expected = NAMED.get(name) or NAMED.get(name.partition(":")[0]) or str(folder)
    assert not messages or any(expected in message for message in messages), messages


def test_there_are_a_hundred() -> None:
    assert len(INPUTS) >= 100 and set(INPUTS) >= HARMLESS
