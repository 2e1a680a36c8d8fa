"""Tokenizers from GGUF metadata cut texts as the tokenizers do that the metadata came from."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from bminf_lite.errors import CheckpointError
from bminf_lite.gguf_files.header import GgufHeader
from bminf_lite.gguf_files.tokenizer import tokenizer_files
from bminf_lite.gguf_files.words import LLAMA3, WORDS
from bminf_lite.text.checkpoint_files import load_tokenizer
from bminf_lite.text.json_tokenizer import JsonTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    "In 1984, 1234567 people said: “Good morning!”  They'll see, she'd know.",
    "for i in range(10):\n    print(i, i ** 2)\n\n\nreturn x",
    "Ein schöner Tag; les élèves étaient là. 日本語 も 少し。",
] * 20
TEXTS = [*CORPUS[:4], "", " ", "  leading and trailing  ", "a\tb\r\n\r\nc", "émigré 😀 <s> naïve", "x" * 300]
CONTROL, NORMAL, BYTE = 3, 1, 6


def header(**metadata: Any) -> GgufHeader:
    return GgufHeader((Path("model.gguf"),), {f"tokenizer.{key}": value for key, value in metadata.items()}, {})


def load(found: GgufHeader) -> JsonTokenizer:
    return JsonTokenizer.from_texts(tokenizer_files(found), Path("model.gguf"), 10**6)


def of(prefix: str, **values: Any) -> dict[str, Any]:
    return {f"{prefix}.{key}": value for key, value in values.items()}


@pytest.fixture(scope="module")
def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    """As LLaMA's: BPE with bytes for what it does not know, and no normalisation."""
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=trained,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        minloglevel=2,
        num_threads=1,
        split_digits=True,
        allow_whitespace_only_pieces=True,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())


@pytest.fixture(scope="module")
def from_scores(sentencepiece_model: sentencepiece.SentencePieceProcessor) -> JsonTokenizer:
    processor = sentencepiece_model
    ids = range(processor.vocab_size())
    types = [CONTROL if processor.is_control(i) else BYTE if processor.is_byte(i) else NORMAL for i in ids]
    return load(
        header(
            **of(
                "ggml",
                model="llama",
                tokens=[processor.id_to_piece(i) for i in ids],
                token_type=types,
                scores=[processor.get_score(i) for i in ids],
                bos_token_id=1,
                eos_token_id=2,
                unknown_token_id=0,
            )
        )
    )


@pytest.mark.parametrize("text", TEXTS)
def test_scores_of_sentencepiece(text: str, sentencepiece_model: Any, from_scores: JsonTokenizer) -> None:
    text = text.replace("<s>", "")
    assert from_scores.encode(text) == [1, *sentencepiece_model.encode(text)]
    ids = from_scores.encode(text, add_special_tokens=False)
    assert from_scores.decode(ids) == text


@given(text=st.text("abc dehilo\n.,19é", max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_text_by_scores(text: str, sentencepiece_model: Any, from_scores: JsonTokenizer) -> None:
    assert from_scores.encode(text, add_special_tokens=False) == sentencepiece_model.encode(text)


def trained(expression: str | None) -> tokenizers.Tokenizer:
    """BPE over bytes, whose words are those of a regular expression, or GPT-2's of the library."""
    backend = tokenizers.Tokenizer(models.BPE())
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None)
    cuts = [] if expression is None else [pre_tokenizers.Split(Regex(expression), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_of])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, show_progress=False, special_tokens=["<|end|>"]
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@pytest.mark.parametrize(("pre", "expression"), [("gpt-2", None), ("default", None), ("llama-bpe", LLAMA3)])
def test_merges_of_bytes(pre: str, expression: str | None) -> None:
    backend = trained(expression)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(merge) for merge in model["merges"]]
    types = [CONTROL if token == "<|end|>" else NORMAL for token in tokens]
    end = backend.token_to_id("<|end|>")
    found = load(
        header(
            **{"chat_template": "{{ messages }}", "chat_template.tool_use": "{{ tools }}"},
            **of(
                "ggml",
                model="gpt2",
                pre=pre,
                tokens=tokens,
                merges=merges,
                token_type=types,
                bos_token_id=end,
                eos_token_id=end,
                add_bos_token=False,
            ),
        )
    )
    for text in TEXTS:
        assert found.encode(text) == backend.encode(text).ids
        assert found.decode(found.encode(text)) == text
    assert found.encode("a<|end|>b").count(end) == 1
    assert found.eos_ids == {end} and end in found.special_ids
    assert (found.chat_template, found.tool_chat_template) == ("{{ messages }}", "{{ tools }}")


def test_llama_3_starts_with_its_token_unless_the_file_says_otherwise() -> None:
    tokens = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    common = of("ggml", model="gpt2", tokens=tokens, merges=[], token_type=[CONTROL, *[NORMAL] * 256], bos_token_id=0)
    assert load(header(**common, **of("ggml", pre="llama-bpe"))).encode("a")[0] == 0
    assert load(header(**common, **of("ggml", pre="qwen2"))).encode("a")[0] != 0
    assert load(header(**common, **of("ggml", pre="qwen2", add_bos_token=True))).encode("a")[0] == 0


@pytest.mark.parametrize("name", sorted(WORDS))
def test_every_expression_keeps_the_text(name: str) -> None:
    words = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in WORDS[name].expressions]
    cut = pre_tokenizers.Sequence(words)
    for text in TEXTS:
        assert "".join(word for word, _ in cut.pre_tokenize_str(text)) == text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-4o", "get|User|Name| DON'T| |123|45|日本語x| (|x|/y|);\n"),
        ("tekken", "get|User|Name| DON|'T| |1|2|3|4|5|日本語x| (|x|/y|);\n"),
        ("kimi-k2", "get|User|Name| DON'T| |123|45|日本語|x| (|x|/y|);\n"),
        ("deepseek-v3", "getUserName| DON|'T| |123|45|日本語|x| (|x|/y|);\n"),
        ("glm4", "getUserName| DON|'T| |123|45|日本語x| (|x|/y|);\n"),
        ("qwen35", "getUserName| DON|'T| |1|2|3|4|5|日本語x| (|x|/y|);\n"),
        ("seed-coder", "getUserName| DON|'T| |1|2|3|4|5|日本語x| (|x|/y|);|\n"),
        ("deepseek-coder", "getUserName| DON|'|T| |1|2|3|4|5|日本語|x| (|x|/|y|);|\n"),
        ("deepseek-llm", "getUserName| DON|'|T| |12345|日本語|x| (|x|/|y|);|\n"),
        ("bloom", "getUserName| DON'T| 12345日本語x| (|x/y|)|;|\n"),
    ],
)
def test_words(name: str, words: str) -> None:
    cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(x), "isolated") for x in WORDS[name].expressions])
    text = "getUserName DON'T 12345日本語x (x/y);\n"
    assert "|".join(word for word, _ in cut.pre_tokenize_str(text)) == words


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "holds no vocabulary"),
        (of("ggml", model="rwkv", tokens=["a"]), "'rwkv', not one of llama, gpt2, bert, t5"),
        (of("ggml", model="bert", tokens=["a"]), r"lacks tokenizer\.ggml\.unknown_token_id, and a token \[UNK\]"),
        (of("ggml", model="t5", tokens=["a"], scores=[0.0]), r"lacks tokenizer\.ggml\.unknown_token_id"),
        (of("ggml", model="t5", tokens=["a"], scores=[True]), "does not have a number for each token"),
        (
            of("ggml", model="t5", tokens=["a"], scores=[0.0], unknown_token_id=0, precompiled_charsmap=["x"]),
            "precompiled_charsmap must be a list of bytes",
        ),
        (
            of("ggml", model="t5", tokens=["a"], scores=[0.0], unknown_token_id=0, precompiled_charsmap=[1, 2, 3]),
            "a vocabulary that the tokenizers library cannot read",
        ),
        (of("ggml", model="gpt2", pre="klingon", tokens=["a"]), "'klingon' is not supported; the nearest"),
        (of("ggml", model="llama", tokens=["a"], scores=[]), "does not have a number for each token"),
    ],
)
def test_an_unknown_vocabulary_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        tokenizer_files(header(**metadata))


# -- vocabularies that are not in order -------------------------------------------------------------------------------

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def bytes_with(*tokens: str, types: dict[str, int] | None = None, **ids: Any) -> GgufHeader:
    """A vocabulary of bytes, and then ``tokens``."""
    listed = [*ALPHABET, *tokens]
    kinds = [(types or {}).get(token, NORMAL) for token in listed]
    return header(**of("ggml", model="gpt2", tokens=listed, merges=[], token_type=kinds, **ids))


def test_tokens_with_the_same_text_have_it_all(tmp_path: Path) -> None:
    """The last of them is found in a text, as in llama.cpp. A migrated folder keeps them."""
    found = bytes_with("<x>", "<y>", "<x>", "a", types={"<x>": CONTROL, "<y>": CONTROL})
    first, last = len(ALPHABET), len(ALPHABET) + 2
    tokenizer = load(found)
    for name, content in tokenizer_files(found).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    for loaded in (tokenizer, load_tokenizer(tmp_path, 1000)):
        assert len(loaded) == last + 2 and loaded.encode("<x>a") == [last, last + 1]
        assert loaded.id_to_piece(first) == loaded.id_to_piece(last) == "<x>"
        assert {first, last} <= loaded.special_ids
        assert loaded.decode([ALPHABET.index("a"), last + 1, first, ALPHABET.index("b")]) == "aab"


def test_an_empty_token_has_no_text() -> None:
    tokenizer = load(bytes_with("", "<x>", types={"": CONTROL, "<x>": CONTROL}))
    assert tokenizer.id_to_piece(len(ALPHABET)) is None and tokenizer.encode("a<x>")[-1] == len(ALPHABET) + 1
    assert tokenizer.decode([len(ALPHABET), ALPHABET.index("a")]) == "a"


def test_special_tokens_have_the_names_that_templates_use() -> None:
    names = {"bos": 0, "eos": 1, "unknown": 2, "padding": 3, "seperator": 4, "mask": 5}
    tokenizer = load(bytes_with(**{f"{name}_token_id": i for name, i in names.items()}))
    used = ("bos", "eos", "unk", "pad", "sep", "mask")
    assert tokenizer.special_tokens == {f"{name}_token": ALPHABET[i] for i, name in enumerate(used)}


def test_tokens_that_end_a_turn_have_no_text_whatever_their_type() -> None:
    tokenizer = load(bytes_with("<|im_end|>", "<tool>", types={"<tool>": 4}))
    assert tokenizer.encode("<|im_end|><tool>") == [len(ALPHABET), len(ALPHABET) + 1]
    assert tokenizer.decode([len(ALPHABET), len(ALPHABET) + 1]) == "<tool>"


@pytest.mark.parametrize(("name", "text"), [("Phi-3 mini", "b"), ("phi3", "b"), ("Qwen", " b")])
def test_phi_3_s_control_tokens_take_the_space_behind_them(name: str, text: str) -> None:
    found = bytes_with("<|user|>", "<s>", types={"<|user|>": CONTROL, "<s>": CONTROL})
    found = GgufHeader(found.paths, {**found.metadata, "general.name": name}, {})
    tokenizer = load(found)
    assert tokenizer.decode(tokenizer.encode("<|user|> b")) == text
    assert tokenizer.decode(tokenizer.encode("<s> b")) == " b"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (bytes_with(bos_token_id=999), r"bos_token_id is 999, but the vocabulary has 256 tokens"),
        (bytes_with(add_bos_token=True), r"add_bos_token, and no tokenizer\.ggml\.bos_token_id"),
        (bytes_with(add_eos_token=True), r"add_eos_token, and no tokenizer\.ggml\.eos_token_id"),
        (header(**of("ggml", model="gpt2", tokens=["a"], token_type=[1, 1])), "token_type does not have a number for"),
        (header(**of("ggml", model="gpt2", tokens=["a", 3])), "must be a list of texts"),
    ],
)
def test_metadata_that_contradict_each_other_are_refused(found: GgufHeader, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        tokenizer_files(found)


def test_sentencepiece_has_its_own_special_tokens_where_a_file_names_none() -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a"]
    types = [2, CONTROL, CONTROL, *[BYTE] * 256, NORMAL, NORMAL]
    tokenizer = load(header(**of("ggml", model="llama", tokens=tokens, token_type=types, scores=[0.0] * len(tokens))))
    assert tokenizer.encode("a")[0] == tokenizer.bos_id == 1 and tokenizer.eos_ids == {2}


BYTES = "".join(sorted(pre_tokenizers.ByteLevel.alphabet()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (of("ggml", merges=["t h", "q"]), r"merges\[1\] is 'q', which does not make a token of two others"),
        (of("ggml", merges=["t h", "h t"]), r"merges\[1\] is 'h t'"),
        (of("ggml", merges=["t h", "th e"]), r"merges\[1\] is 'th e'"),
        (of("ggml", merges=[3, "t h", ""]), r"merges\[0\] is 3.*\n.*merges\[2\] is ''"),
        (of("ggml", merges="t h"), "merges must be a list of texts"),
        (of("ggml", model="llama", scores=[0.0] * 256), "scores does not have a number for each token"),
        (of("ggml", model="llama", scores=[0.0] * 256 + ["1"]), "scores does not have a number for each token"),
        (of("ggml", model="llama", scores=[0.0] * 256 + [float("nan")]), "scores does not have a number"),
        (of("ggml", model="llama", scores=7), "scores does not have a number for each token"),
    ],
)
def test_wrong_merges_and_scores_name_the_file(values: dict[str, Any], message: str) -> None:
    right = of(
        "ggml", model="gpt2", pre="gpt-2", tokens=[*BYTES, "th"], merges=["t h"], scores=[0.0] * 257, bos_token_id=0
    )
    assert load(header(**right)).encode("the")
    with pytest.raises(CheckpointError, match=rf"(?s)^model\.gguf: .*{message}"):
        load(header(**right | values))
