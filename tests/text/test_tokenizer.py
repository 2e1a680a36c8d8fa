"""Tokenizers read from a checkpoint's folder, and the errors for files and text that are invalid."""

from __future__ import annotations

import json

import pytest
import tokenizer_kit
from tokenizers import AddedToken, normalizers, processors

from bminf_lite.errors import CheckpointError, UsageError
from bminf_lite.text.checkpoint_files import has_tokenizer, load_tokenizer
from bminf_lite.text.json_tokenizer import JsonTokenizer

CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "chat_template": "from the config"}


def write(folder, backend=None, config=None, special=None):
    (folder / "tokenizer.json").write_text((backend or tokenizer_kit.byte_level()).to_str(), encoding="utf-8")
    for name, value in (("tokenizer_config.json", config), ("special_tokens_map.json", special)):
        if value is not None:
            (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return folder


def test_a_folder_gives_text_and_special_tokens(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, config=CONFIG), 1000)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == ("<s>", "</s>", "from the config")
    assert tokenizer.id_to_piece(tokenizer.bos_id) == "<s>"
    assert [tokenizer.id_to_piece(i) for i in tokenizer.eos_ids] == ["</s>"]
    assert tokenizer.id_to_piece(len(tokenizer)) is None
    ids = tokenizer.encode("hello 🙂")
    assert tokenizer.decode([tokenizer.bos_id, *ids, *tokenizer.eos_ids]) == "hello 🙂"
    assert not tokenizer.byte_fallback


def test_a_folder_s_name_need_not_be_utf_8(tmp_path):
    (folder := tmp_path / "\udcff").mkdir()
    assert load_tokenizer(write(folder), 1000).decode(load_tokenizer(folder, 1000).encode("the")) == "the"


def test_other_files_are_optional_and_special_tokens_may_have_their_own(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path), 1000)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (None, frozenset(), None)
    assert load_tokenizer(write(tmp_path, config={}, special={"eos_token": "</s>"}), 1000).eos_token == "</s>"


def test_the_post_processor_frames_a_prompt(tmp_path):
    backend = tokenizer_kit.sentencepiece_like()
    tokenizer = load_tokenizer(write(tmp_path, backend, {**CONFIG, "add_bos_token": True}), 1000)
    assert tokenizer.encode("the")[0] == tokenizer.bos_id
    assert tokenizer.encode("the").count(tokenizer.bos_id) == 1
    assert tokenizer.bos_id not in tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.byte_fallback


@pytest.mark.parametrize("add", [True, False, None])
@pytest.mark.parametrize("processor", [None, processors.ByteLevel()])
@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "PreTrainedTokenizerFast", None])
def test_without_a_frame_in_the_post_processor_the_configuration_decides(tmp_path, add, processor, name):
    """For classes whose configuration frames prompts: DeepSeek Coder has LLaMA's, and byte-level pieces."""
    backend = tokenizer_kit.byte_level()
    if processor is not None:
        backend.post_processor = processor
    config = {**CONFIG, "add_bos_token": add, "add_eos_token": add, "tokenizer_class": name}
    tokenizer = load_tokenizer(write(tmp_path, backend, config), 1000)
    framed = add is True and name == "LlamaTokenizerFast"
    plain = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a") == ([tokenizer.bos_id, *plain, *tokenizer.eos_ids] if framed else plain)


def test_settings_of_training_do_not_cut_or_pad_a_prompt(tmp_path):
    backend = tokenizer_kit.byte_level()
    whole = backend.encode("hello there").ids
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    assert load_tokenizer(write(tmp_path, backend), 1000).encode("hello there") == whole


@pytest.mark.parity
@pytest.mark.parametrize("kind", [tokenizer_kit.byte_level, tokenizer_kit.sentencepiece_like, tokenizer_kit.metaspace])
def test_ids_and_text_are_those_of_transformers(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    config = {**CONFIG, "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    expected = transformers.AutoTokenizer.from_pretrained(write(tmp_path, kind(), config))
    tokenizer = load_tokenizer(tmp_path, 1000)
    for text in ("", "the cat", " hé\n🙂 ", "</s>the<s>", "<0x41>", "你"):
        for special in (True, False):
            ids = tokenizer.encode(text, special)
            assert ids == expected.encode(text, add_special_tokens=special)
            assert tokenizer.decode(ids) == expected.decode(ids, skip_special_tokens=True)


# -- the chat template ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "template"),
    [
        ([{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}], "b"),
        ([{"name": "tool_use", "template": "a"}], None),
        (None, None),
    ],
)
def test_the_chat_template_is_the_file_else_the_default_of_the_configuration(tmp_path, value, template):
    assert load_tokenizer(write(tmp_path, config={"chat_template": value}), 1000).chat_template == template
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of the processor"}', encoding="utf-8")
    expected = "of the processor" if value is None else template
    assert load_tokenizer(tmp_path, 1000).chat_template == expected
    (tmp_path / "chat_template.jinja").write_text("from the file é", encoding="utf-8")
    found = load_tokenizer(tmp_path, 1000)
    assert found.chat_template == found.tool_chat_template == "from the file é"


def test_a_template_for_conversations_with_tools(tmp_path):
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    found = load_tokenizer(write(tmp_path, config={"chat_template": named}), 1000)
    assert (found.chat_template, found.tool_chat_template) == ("a", "b")
    (tmp_path / "chat_template.jinja").write_text("d")
    found = load_tokenizer(tmp_path, 1000)
    assert (found.chat_template, found.tool_chat_template) == ("d", "d")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("c")
    found = load_tokenizer(tmp_path, 1000)
    assert (found.chat_template, found.tool_chat_template) == ("d", "c")


@pytest.mark.parametrize("value", [3, {"default": "a"}, ["a"], [{"name": "default", "template": 1}]])
def test_a_chat_template_must_be_text(tmp_path, value):
    with pytest.raises(CheckpointError, match="chat_template"):
        load_tokenizer(write(tmp_path, config={"chat_template": value}), 1000)


# -- bad input --------------------------------------------------------------------------------------------------------


def test_a_missing_tokenizer_is_reported_with_the_way_to_convert_another_format(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*token ids work"):
        load_tokenizer(tmp_path, 1000)
    (tmp_path / "vocab.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"vocab\.json but neither merges\.txt nor tokenizer\.json.*Copy"):
        load_tokenizer(tmp_path, 1000)
    (tmp_path / "merges.txt").write_bytes(b"")  # of a model whose tokenizer's class is not known
    with pytest.raises(CheckpointError, match=r"vocab\.json.*AutoTokenizer"):
        load_tokenizer(tmp_path, 1000)


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"the tokenizer has ids up to \d+, but the embedding only 3 rows"):
        load_tokenizer(write(tmp_path), 3)


def test_one_id_far_beyond_the_embedding_is_refused(tmp_path):
    folder = write(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = 2**31  # the library would count up to it to write the vocabulary
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"ids up to {2**31}, but the embedding only 1000 rows"):
        load_tokenizer(folder, 1000)


def test_added_tokens_without_a_row_are_text(tmp_path):
    """Gemma 3 1B has the tokenizer of the multimodal sizes, whose last token its embedding lacks."""
    whole = load_tokenizer(write(tmp_path, config={"eos_token": "</s>"}), 1000)
    last = whole.encode("<tool>")
    tokenizer = load_tokenizer(tmp_path, last[0])
    assert last == [len(tokenizer)] == [len(whole) - 1]
    assert tokenizer.decode(tokenizer.encode("a<tool>")) == "a<tool>" and last[0] not in tokenizer.encode("a<tool>")
    with pytest.raises(CheckpointError, match=rf"ids up to {last[0]}, but the embedding only {last[0]} rows"):
        load_tokenizer(write(tmp_path, config={"eos_token": "<tool>"}), last[0])


def test_an_empty_special_token_is_none(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, config={"bos_token": "", "eos_token": {"content": ""}}), 1000)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_ids) == (None, None, frozenset())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"null"])
def test_a_malformed_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path, 1000)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"\xff", b"[" * 100000, b'{"eos_token": 7}', b'{"eos_token": {', rb'{"eos_token": "\ud800"}'],
)
def test_a_malformed_configuration_is_named(tmp_path, name, content):
    write(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config|special_tokens_map|eos_token|special token"):
        load_tokenizer(tmp_path, 1000)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_folder_in_the_place_of_a_file_is_named(tmp_path, name):
    (write(tmp_path) / name).mkdir()
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: it is not a regular file$"):
        load_tokenizer(tmp_path, 1000)


def test_all_problems_of_a_vocabulary_are_listed(tmp_path):
    backend = tokenizer_kit.sentencepiece_like()
    size = len(load_tokenizer(write(tmp_path, backend), 1000))
    load_tokenizer(tmp_path, size)
    write(tmp_path, backend, {"bos_token": "<one>", "eos_token": "<two>"})
    with pytest.raises(CheckpointError, match=rf"<one>.*<two>.*{size - 1}\b.*\b{size - 1} rows"):
        load_tokenizer(tmp_path, size - 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [(b"bytes", "bytes"), (None, "NoneType"), (3, "int"), (["a"], "list"), ("ab\ud800c", r"character 2 is '\\ud")],
)
def test_only_text_is_encoded(text, words):
    with pytest.raises(UsageError, match=words):
        JsonTokenizer(tokenizer_kit.byte_level()).encode(text)


def test_text_that_the_vocabulary_cannot_express_is_refused(tmp_path):
    backend = json.loads(tokenizer_kit.metaspace().to_str())
    backend["model"]["unk_id"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path, 1000).encode("ü")


def test_ids_may_be_unknown_but_not_out_of_range():
    tokenizer = JsonTokenizer(tokenizer_kit.byte_level())
    assert tokenizer.decode([]) == tokenizer.decode([10**6, 2**32 - 1]) == ""
    for wrong in (-1, 2**32):
        with pytest.raises(UsageError, match=str(wrong)):
            tokenizer.decode([5, wrong])


def test_sentinels_stand_for_missing_parts() -> None:
    """T5's are ``<extra_id_0>``, ``<extra_id_1>``, ...; they need not be in order, nor have ids in order."""
    backend = tokenizer_kit.metaspace()
    assert JsonTokenizer(backend).sentinels == []
    backend.add_special_tokens(["<extra_id_2>", "<extra_id_1>", "<extra_id_0>", "<extra_id_9>"])
    tokenizer = JsonTokenizer(backend)
    ids = [backend.token_to_id(f"<extra_id_{i}>") for i in range(3)]
    assert tokenizer.sentinels == ids
    spans = tokenizer.encode_spans(["the ", " cats", ""])
    assert [i for i in spans if i in ids] == ids[:2]
    assert spans == tokenizer.encode("the <extra_id_0> cats<extra_id_1>")
    assert tokenizer.encode_turns(["the cat"], 10) is None and tokenizer.target_ids == ()


def test_special_tokens_have_no_text_even_if_they_are_normalized(tmp_path):
    backend = tokenizer_kit.byte_level()
    backend.add_special_tokens([AddedToken("<END>", normalized=True, special=True)])
    backend.normalizer = normalizers.Lowercase()
    tokenizer = load_tokenizer(write(tmp_path, backend, CONFIG), 1000)
    end = backend.token_to_id("<END>")
    assert tokenizer.decode([*tokenizer.encode("hello"), end]) == "hello"


def byte_level_files(folder, **config):
    """GPT-2's files, without a tokenizer.json."""
    backend = tokenizer_kit.byte_level()
    model = json.loads(backend.to_str())["model"]
    vocab = {**model["vocab"], "<|endoftext|>": len(model["vocab"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return backend


def test_gpt2_s_older_files_are_read(tmp_path):
    backend = byte_level_files(tmp_path)
    assert has_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, 1000)
    text = "hello there, naïve café 🙂"
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.decode([*tokenizer.encode(text), *tokenizer.eos_ids]) == text
    assert tokenizer.bos_token == tokenizer.eos_token == "<|endoftext|>" and len(tokenizer.eos_ids) == 1


def test_opt_s_older_files_are_read(tmp_path):
    byte_level_files(tmp_path, tokenizer_class="GPT2Tokenizer", bos_token="</s>", eos_token="</s>", add_bos_token=True)
    tokenizer = load_tokenizer(tmp_path, 1000)
    assert tokenizer.encode("hello")[0] == tokenizer.bos_id and tokenizer.eos_token == "</s>"


def test_other_files_of_the_same_name_are_not_guessed(tmp_path):
    byte_level_files(tmp_path, tokenizer_class="Qwen2Tokenizer")
    assert not has_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="where transformers is installed") as caught:
        load_tokenizer(tmp_path, 1000)
    assert "sentencepiece" not in str(caught.value)
