"""The files beside ``tokenizer.json``: added tokens, special tokens that only a configuration names, and flags."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import tokenizer_kit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from bminf_lite.errors import CheckpointError
from bminf_lite.text.checkpoint_files import load_tokenizer

ROWS = 1000
KINDS = {"byte level": tokenizer_kit.byte_level, "sentencepiece": tokenizer_kit.sentencepiece_like}
NEW = ("<|turn|>", "<|over|>", "<call>", "über")
NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "image_token")


def write(folder: Path, backend: Tokenizer | str, **files) -> Path:
    """A folder with ``tokenizer.json`` and other JSON files, by their names without the ending."""
    text = backend if isinstance(backend, str) else backend.to_str()
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


@st.composite
def flags(draw, text: str, is_special: bool) -> dict:
    """An entry of ``added_tokens_decoder``. The library keeps a token special that was so."""
    chosen = draw(st.fixed_dictionaries({}, optional=dict.fromkeys(("lstrip", "rstrip", "single_word"), st.booleans())))
    special = is_special or draw(st.booleans())
    return {"content": text, **chosen, "special": special, "normalized": draw(st.booleans())}


def special_tokens_maps(names: dict) -> st.SearchStrategy[dict]:
    """``special_tokens_map.json`` has texts, or objects with flags."""
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    forms = {name: st.sampled_from([text, {"content": text, **plain}]) for name, text in names.items()}
    return st.fixed_dictionaries(forms)


def further_special_tokens(texts: list[str]) -> st.SearchStrategy[dict]:
    """The forms in which ``tokenizer_config.json`` has special tokens beside the named ones."""
    lists, names = st.lists(st.sampled_from(texts), unique=True, max_size=3), st.sampled_from(texts)
    return st.one_of(
        st.just({}),
        st.fixed_dictionaries({"additional_special_tokens": lists}),
        st.fixed_dictionaries({"extra_special_tokens": lists}),
        st.fixed_dictionaries({"extra_special_tokens": st.fixed_dictionaries({"turn_token": names})}),
        st.fixed_dictionaries({"turn_token": names}),
    )


OPTIONS = ("split_special_tokens", "add_bos_token", "add_eos_token")


@st.composite
def folders(draw) -> tuple[str, list, dict]:
    """A kind of pipeline, the added tokens of ``tokenizer.json``, and the folder's other files, of all forms."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    content = json.loads(KINDS[kind]().to_str())
    known = {t["content"]: t | {"special": draw(st.booleans())} for t in content["added_tokens"] if draw(st.booleans())}
    free = 1 + max([*content["model"]["vocab"].values(), *(token["id"] for token in known.values())])
    new = draw(st.lists(st.sampled_from(NEW), unique=True))
    ids = {text: free + i for i, text in enumerate(new)}
    texts = ["<s>", "</s>", *new, "<|late|>", "the"]
    names = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(texts))
    named, further = draw(names), draw(further_special_tokens(texts))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **further}
    config |= draw(st.dictionaries(st.sampled_from(OPTIONS), st.booleans()))
    files = {"tokenizer_config": config}
    if draw(st.booleans()):
        files["special_tokens_map"] = draw(special_tokens_maps(draw(names)))
    if draw(st.booleans()):
        listed = {**ids, **{text: token["id"] for text, token in known.items() if draw(st.booleans())}}
        special = {text for text, token in known.items() if token["special"]} | {text for text in texts if named}
        config["added_tokens_decoder"] = {str(i): draw(flags(text, text in special)) for text, i in listed.items()}
    elif new:
        files["added_tokens"] = ids
    return kind, list(known.values()), files


TEXTS = ("the cat", "<|turn|>user the <|over|> a</s>", " <call>x<call> über überall", "<s>hé <|late|> the</s>\n")


@pytest.mark.parity
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(folders())
def test_a_folder_reads_as_in_transformers(case):
    """Ids of texts, the text of ids, and the special tokens that a chat template gets."""
    transformers = pytest.importorskip("transformers")
    kind, added, files = case
    content = json.loads(KINDS[kind]().to_str()) | {"added_tokens": added}
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), json.dumps(content), **files)
        expected = transformers.AutoTokenizer.from_pretrained(folder)
        found = load_tokenizer(folder, ROWS)
    assert found.special_tokens == expected.special_tokens_map
    for text in TEXTS:
        for frames in (False, True):
            ids = found.encode(text, frames)
            assert ids == expected.encode(text, add_special_tokens=frames), text
        special = {i for i, t in expected.added_tokens_decoder.items() if t.special and t.normalized}
        ids = [i for i in ids if i not in special]  # the library does not drop them from a text, which is a fault
        assert found.decode(ids) == expected.decode(ids, skip_special_tokens=True), (text, ids)


# -- ids and rows -----------------------------------------------------------------------------------------------------


def encoded(folder: Path, text: str, rows: int = ROWS) -> list[int]:
    return load_tokenizer(folder, rows).encode(text, add_special_tokens=False)


@pytest.mark.parametrize("place", ["added_tokens", "added_tokens_decoder"])
@pytest.mark.parametrize("gap", [0, 1, 40])
def test_an_added_token_has_the_id_that_a_file_states(tmp_path, place, gap):
    """transformers gives it the next id, which has another row of the embedding if the vocabulary is padded."""
    backend = tokenizer_kit.byte_level()
    first = backend.get_vocab_size() + gap
    ids = {"<|turn|>": first, "<|over|>": first + 1 + gap}
    listed = {str(i): {"content": text, "special": True} for text, i in ids.items()}
    files = {"added_tokens": ids} if place == "added_tokens" else {"tokenizer_config": {place: listed}}
    found = encoded(write(tmp_path, backend, **files), "<|turn|>the<|over|>")
    assert found == [first, *backend.encode("the").ids, first + 1 + gap]


def test_an_id_that_another_token_has_is_refused(tmp_path):
    folder = write(tmp_path, tokenizer_kit.byte_level(), added_tokens={"<|turn|>": 7})
    with pytest.raises(CheckpointError, match=r"'<\|turn\|>' has the id 7 in one file, and .* in tokenizer\.json"):
        load_tokenizer(folder, ROWS)


def test_a_gap_in_a_vocabulary_without_places_is_refused(tmp_path):
    backend = tokenizer_kit.metaspace()
    size = backend.get_vocab_size()
    write(tmp_path, backend, added_tokens={"<|turn|>": size})
    assert encoded(tmp_path, "<|turn|>") == [size]
    write(tmp_path, backend, added_tokens={"<|turn|>": size + 3})
    with pytest.raises(CheckpointError, match=rf"has the id {size + 3}, but the vocabulary's next is {size}"):
        load_tokenizer(tmp_path, ROWS)


def test_tokens_that_a_configuration_names_get_a_row_if_the_embedding_has_one(tmp_path):
    backend = tokenizer_kit.byte_level()
    size = backend.get_vocab_size()
    folder = write(tmp_path, backend, tokenizer_config={"pad_token": "<pad>", "extra_special_tokens": ["<x>", "<y>"]})
    assert encoded(folder, "<pad><x><y>", size + 3) == [size, size + 1, size + 2]
    two = encoded(folder, "<pad><x><y>", size + 2)
    assert two[:2] == [size, size + 1] and max(two[2:]) < size
    assert load_tokenizer(folder, size).special_tokens == {"pad_token": "<pad>"}


def test_a_stated_token_without_a_row_is_text(tmp_path):
    backend = tokenizer_kit.byte_level()
    size = backend.get_vocab_size()
    folder = write(tmp_path, backend, added_tokens={"<|turn|>": size, "<|over|>": size + 1})
    found = encoded(folder, "<|turn|><|over|>", size + 1)
    assert found[0] == size and max(found[1:]) < size


def test_the_decoder_of_added_tokens_replaces_the_older_files(tmp_path):
    backend = tokenizer_kit.byte_level()
    size = backend.get_vocab_size()
    listed = {str(size): {"content": "<|turn|>", "special": True}}
    folder = write(
        tmp_path,
        backend,
        added_tokens={"<|over|>": size},
        special_tokens_map={"pad_token": "<s>"},
        tokenizer_config={"added_tokens_decoder": listed},
    )
    assert encoded(folder, "<|turn|>") == [size] and len(encoded(folder, "<|over|>")) > 1
    assert load_tokenizer(folder, ROWS).special_tokens == {}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config", {"added_tokens_decoder": []}, "added_tokens_decoder must be an object"),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "a"}}}, r"\['x'\] is for no token id"),
        ("tokenizer_config", {"added_tokens_decoder": {"9": "a"}}, "is 'a', but must be an object"),
        ("tokenizer_config", {"added_tokens_decoder": {"9": {"content": 3}}}, "is 3, but must be text"),
        ("tokenizer_config", {"added_tokens_decoder": {"9": {"content": "a", "lstrip": 1}}}, "lstrip 1, but may have"),
        ("tokenizer_config", {"added_tokens_decoder": {"9": {"content": "a", "x": True}}}, "has x True, but may have"),
        ("tokenizer_config", {"added_tokens_decoder": {"9" * 30: {"content": "a"}}}, "is for no token id"),
        ("tokenizer_config", {"extra_special_tokens": 3}, "extra_special_tokens must be a list"),
        ("tokenizer_config", {"extra_special_tokens": ["a", 3]}, r"extra_special_tokens\[1\] is 3"),
        ("tokenizer_config", {"extra_special_tokens": {"a": None}}, "a is None, but must be text"),
        ("tokenizer_config", {"pad_token": 3}, "pad_token is 3, but must be text"),
        ("tokenizer_config", {"split_special_tokens": "yes"}, "split_special_tokens is 'yes', but must be true"),
        ("tokenizer_config", {"add_prefix_space": 1}, "add_prefix_space is 1, but must be true or false"),
        ("tokenizer_config", {"pad_token": "\ud800"}, "cannot be written as UTF-8"),
        ("special_tokens_map", {"pad_token": {"content": "a", "lstrip": None}}, "pad_token has lstrip None"),
        ("added_tokens", {"a": "b"}, "'a' has the id 'b', but must have one from 0"),
        ("added_tokens", {"a": -1}, "'a' has the id -1"),
        ("added_tokens", {"a": True}, "'a' has the id True"),
        ("added_tokens", {"a": 2**40}, f"'a' has the id {2**40}"),
        ("added_tokens", ["a"], r"added_tokens\.json must hold a JSON object"),
    ],
)
def test_a_wrong_value_beside_the_tokenizer_is_named(tmp_path, file, content, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(write(tmp_path, tokenizer_kit.byte_level(), **{file: content}), ROWS)
    assert str(tmp_path) in str(caught.value)


def test_all_wrong_values_are_listed(tmp_path):
    wrong = {"pad_token": 3, "split_special_tokens": 1, "added_tokens_decoder": {"x": {}}}
    with pytest.raises(CheckpointError, match=r"pad_token.*'x'.*split_special_tokens"):
        load_tokenizer(write(tmp_path, tokenizer_kit.byte_level(), tokenizer_config=wrong), ROWS)


def test_special_tokens_in_a_text_are_text_if_the_configuration_splits_them(tmp_path):
    config = {"split_special_tokens": True, "bos_token": "<s>"}
    folder = write(tmp_path, tokenizer_kit.sentencepiece_like(), tokenizer_config=config)
    tokenizer = load_tokenizer(folder, ROWS)
    framed, plain = tokenizer.encode("</s>the"), tokenizer.encode("</s>the", add_special_tokens=False)
    assert framed == [tokenizer.bos_id, *plain] and not tokenizer.special_ids & set(plain)
    assert tokenizer.decode(plain) == "</s>the"


# -- what a class of transformers adds --------------------------------------------------------------------------------


def digits_apart() -> Tokenizer:
    """As StarCoder and SmolLM."""
    backend = tokenizer_kit.byte_level()
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of])
    return backend


def with_end_of_text(backend: Tokenizer) -> Tokenizer:
    backend.add_special_tokens(["<|endoftext|>"])
    return backend


@pytest.mark.parity
@pytest.mark.parametrize(
    "name",
    [
        "GPT2Tokenizer",
        "GPT2TokenizerFast",
        "CodeGenTokenizer",
        "GPTNeoXTokenizerFast",
        "PreTrainedTokenizerFast",
        "NoSuchTokenizer",
        None,
    ],
)
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "opt", "gpt_neox", "granite", None])
@pytest.mark.parametrize("prefix", [True, False, None])
@pytest.mark.parametrize("written", [True, False])
def test_the_space_before_a_text_is_that_of_the_class(tmp_path, name, model_type, prefix, written):
    """``written`` is what ``tokenizer.json`` says."""
    transformers = pytest.importorskip("transformers")
    backend = with_end_of_text(tokenizer_kit.byte_level())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=written)
    config = {"tokenizer_class": name, "add_prefix_space": prefix, "bos_token": "<s>", "eos_token": "</s>"}
    config = {key: value for key, value in config.items() if value is not None}
    write(tmp_path, backend, tokenizer_config=config, config={"model_type": model_type} if model_type else {})
    expected, found = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path, ROWS)
    for text in ("the cat", " the", "hello</s>the"):
        assert found.encode(text) == expected.encode(text)
    named = {name: text for name, text in expected.special_tokens_map.items() if text in backend.get_vocab()}
    assert found.special_tokens == named  # transformers adds the defaults of a class to a vocabulary without them


@pytest.mark.parametrize("prefix", [False, None])
def test_a_class_changes_no_more_than_the_space(tmp_path, prefix):
    """transformers builds the pipeline of ``GPT2Tokenizer`` anew, and digits are no longer apart."""
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": prefix}
    tokenizer = load_tokenizer(write(tmp_path, digits_apart(), tokenizer_config=config), ROWS)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("the 12")] == ["the", " ", "1", "2"]


@pytest.mark.parity
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("written", ["normalizer", "metaspace", "none"])
def test_the_space_before_a_text_of_llama_s_class(tmp_path, adds, legacy, written):
    """Where the configuration says something else than ``tokenizer.json``; that counts where they agree."""
    transformers = pytest.importorskip("transformers")
    content = json.loads(tokenizer_kit.sentencepiece_like().to_str())
    if written != "normalizer":
        content["normalizer"]["normalizers"] = content["normalizer"]["normalizers"][1:]
    if written == "metaspace":
        scheme = "always" if legacy else "first"
        content["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    if written == "none":
        content["decoder"]["decoders"].pop()
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "add_prefix_space": adds,
        "legacy": legacy,
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    write(tmp_path, json.dumps(content), tokenizer_config=config)
    expected, found = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path, ROWS)
    texts = ["the cat", "he", "<s>the</s> cat"]
    if adds and written == "normalizer":  # then it precedes what stands behind a special token, as in LLaMA 2
        texts.pop()
    for text in texts:
        ids = found.encode(text)
        assert ids == expected.encode(text), text
        assert found.decode(ids) == expected.decode(ids, skip_special_tokens=True)


# -- GPT-2's older files ----------------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_prefix_space": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"pad_token": "<|late|>", "split_special_tokens": True},
    ],
)
@pytest.mark.parametrize("place", ["added_tokens", "added_tokens_decoder"])
def test_older_files_read_as_in_transformers(tmp_path, options, place):
    transformers = pytest.importorskip("transformers")
    model = json.loads(tokenizer_kit.byte_level().to_str())["model"]
    size = len(model["vocab"])
    vocab = {**model["vocab"], "<|endoftext|>": size}
    flags = {"special": True, "lstrip": True, "rstrip": False, "single_word": False, "normalized": False}
    listed = {str(size + 1): {"content": "<|turn|>", **flags}}
    config = {"tokenizer_class": "GPT2Tokenizer", **options} | ({place: listed} if place.endswith("decoder") else {})
    for name, value in {
        "vocab": vocab,
        "tokenizer_config": config,
        "config": {"model_type": "gpt2"},
        "added_tokens": {"<|turn|>": size + 1},
        "special_tokens_map": {"bos_token": "<s>", "eos_token": "</s>"},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, model["merges"])]))
    expected, found = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path, ROWS)
    assert found.special_tokens == expected.special_tokens_map
    for text in ("the cat", "the <|turn|>cat</s>", "<|endoftext|>hello<|late|>"):
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == expected.decode(found.encode(text), skip_special_tokens=True)
