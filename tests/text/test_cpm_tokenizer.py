"""CPM's tokenizers: texts come back, except for what the published ones normalise and do not know."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import cpm_kit
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.errors import CheckpointError
from bminf_lite.text import cpm_tokenizer
from bminf_lite.text.checkpoint_files import has_tokenizer, load_tokenizer
from bminf_lite.text.cpm_tokenizer import Cpm2Tokenizer, EvaTokenizer
from bminf_lite.text.detokenizer import Detokenizer
from bminf_lite.text.tokenizer import Tokenizer

jieba = pytest.importorskip("jieba")
WORDS = cpm_kit.word_list()
CPM2 = Cpm2Tokenizer(WORDS)
EVA = EvaTokenizer(WORDS)
IDS = {piece: i for i, piece in enumerate(WORDS)}
TEXTS = [*cpm_kit.SENTENCES, "", " ", "\n", "  two  spaces ", "line\nline\n\nline", "技术 mixed的text 123", "a" * 300]
KNOWN = sorted({c for c in "".join(cpm_kit.SENTENCES) if c not in "，！"} | set(map(chr, range(32, 127))) | {"\n"})
"""Characters that the vocabulary has and no normalisation changes."""


@pytest.fixture(scope="module")
def cpm1(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("cpm1")
    (folder / "chinese_vocab.model").write_bytes(cpm_kit.sentencepiece_model())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CPM1Tokenizer"}')
    return load_tokenizer(folder, 1000)


def pieces(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.id_to_piece(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def words_of(text: str) -> str:
    """What a text loses in words of over 200 characters, which are unknown as a whole."""
    return "".join(word for word in cpm_tokenizer.split_words(text) if len(word) <= 200)


@pytest.mark.parametrize("tokenizer", [CPM2, EVA], ids=["cpm2", "eva"])
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    got = tokenizer.decode(tokenizer.encode(text))
    assert got == words_of(text.replace("，", ",").replace("！", "!") if tokenizer is EVA else text)


@given(text=st.text(st.sampled_from(KNOWN), max_size=60) | st.text(max_size=30))
def test_any_text(text: str) -> None:
    """An unknown character (emoji, another script) is one ``<unk>``, and everything else comes back."""
    for tokenizer in (CPM2, EVA):
        ids = tokenizer.encode(text, add_special_tokens=False)
        normal = tokenizer.normalize(text)
        known = [c for c in normal if c.translate(cpm_tokenizer.SPACES) in IDS]
        decoded = "".join(known).translate(cpm_tokenizer.SPACES_BACK)
        assert tokenizer.decode(ids) == decoded
        assert ids.count(tokenizer.unk_id) == len(normal) - len(known)
        stream = Detokenizer(tokenizer)
        assert "".join(map(stream.push, ids)) + stream.flush() == decoded


def test_the_longest_entry_goes_first() -> None:
    assert pieces(CPM2, "北京大学") == ["北京大学"]
    assert pieces(CPM2, "北京大") == ["北京", "大"]
    assert pieces(CPM2, "hello") == ["hello"]
    assert pieces(CPM2, "helm") == ["hel", "m"]
    assert pieces(CPM2, "你好 🙂\x00\t世\n") == ["你好", "▂", "<unk>", "<unk>", "<unk>", "<unk>", "▃"]


def test_full_width_becomes_half_width() -> None:
    """CPM-2 keeps Chinese punctuation and turns the rest; EVA turns punctuation and keeps the rest."""
    text = "ＡＢｃ　１，。！（）？、；：＋＂“”…．"
    assert CPM2.normalize(text) == 'ABc 1，。！（）？、；：+"“”….'
    assert EVA.normalize(text) == 'ＡＢｃ　１,。!()?、;:+"""...．'


def test_special_tokens_around_a_text() -> None:
    """What follows a text that the model is to go on with, and what its decoder begins with."""
    plain = CPM2.encode("今天", add_special_tokens=False)
    assert CPM2.encode("今天") == [*plain, IDS["<s_3>"]] and CPM2.target_ids == (IDS["<s_3>"],)
    assert EVA.encode("今天") == [*plain, IDS["<sep>"], IDS["<s_0>"]] and EVA.target_ids == ()
    assert (CPM2.eos_ids, EVA.eos_ids) == ({IDS["<eod>"]}, {IDS["<sep>"]})
    assert list(CPM2.sentinels) == [IDS[f"<s_{i}>"] for i in range(4)]
    spans = CPM2.encode_spans(["今天", "，", ""])
    assert spans == [*plain, IDS["<s_0>"], IDS["，"], IDS["<s_1>"]]


def test_words_that_look_special_are_words() -> None:
    """``<eod>`` in a prompt is five characters."""
    assert pieces(CPM2, "<eod>") == list("<eod>")
    assert CPM2.decode([IDS["<eod>"], IDS["<s_1>"], IDS["<unk>"], IDS["今天"], 10**6]) == "今天"


@given(turns=st.lists(st.sampled_from(cpm_kit.SENTENCES), min_size=1, max_size=6), longest=st.integers(1, 120))
def test_a_dialogue_keeps_its_last_utterances(turns: list[str], longest: int) -> None:
    encoded = [[*EVA.encode(turn, add_special_tokens=False), IDS["<sep>"]] for turn in turns]
    candidates = [[*chain(*encoded[start:]), IDS["<s_0>"]] for start in range(len(turns))]
    assert EVA.encode_turns(turns, longest) == next((c for c in candidates if len(c) <= longest), candidates[-1])


def test_cpm1_round_trip(cpm1: Tokenizer) -> None:
    for text in [*cpm_kit.SENTENCES, "你好\nhello  world", ""]:
        expected = text.replace("，", ",").replace("！", "!")  # sentencepiece normalises full-width punctuation
        assert cpm1.decode(cpm1.encode(text)) == expected
        stream = Detokenizer(cpm1)
        assert "".join(map(stream.push, cpm1.encode(text))) + stream.flush() == expected
    assert cpm1.eos_token == "<eod>" and len(cpm1.eos_ids) == 1


def test_cpm1_is_sentencepiece_over_words(cpm1: Tokenizer, tmp_path: Path) -> None:
    """The published tokenizer's steps, one by one."""
    sentencepiece = pytest.importorskip("sentencepiece")
    processor = sentencepiece.SentencePieceProcessor(model_proto=cpm_kit.sentencepiece_model())
    for text in [*cpm_kit.SENTENCES, "二〇二一\n🙂 ctrl\x01"]:
        words = " ".join(word.replace(" ", "▂").replace("\n", "▃") for word in jieba.cut(text))
        assert cpm1.encode(text) == processor.encode(words)


def test_segmentation_equals_jieba() -> None:
    for text in [*TEXTS, "他来到了网易杭研大厦", "永和服装饰品有限公司"]:
        assert list(cpm_tokenizer.split_words(text)) == list(jieba.cut(text))


@pytest.mark.parametrize(("name", "kind"), [("CPM2Tokenizer", Cpm2Tokenizer), ("EVATokenizer", EvaTokenizer)])
def test_a_checkpoint_names_its_tokenizer(tmp_path: Path, name: str, kind: type) -> None:
    folder = cpm_kit.write_words(tmp_path, name)
    assert has_tokenizer(folder)
    loaded = load_tokenizer(folder, len(WORDS))
    assert type(loaded) is kind and [loaded.id_to_piece(i) for i in range(len(loaded))] == WORDS
    with pytest.raises(CheckpointError, match=r"vocab\.txt: has .* only 5 rows"):
        load_tokenizer(folder, 5)
    for content, words in ((b"a\nb\n", "no <unk> and no"), (b"\xff\xfe", "cannot be read")):
        (folder / "vocab.txt").write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            load_tokenizer(folder, 100)
    (folder / "vocab.txt").unlink()
    assert not has_tokenizer(folder)
    with pytest.raises(CheckpointError, match=r"has no vocab\.txt"):
        load_tokenizer(folder, 100)


def test_a_malformed_model_file(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CPM1Tokenizer"}')
    (tmp_path / "chinese_vocab.model").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match="not a sentencepiece model"):
        load_tokenizer(tmp_path, 100)


def test_without_jieba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(CheckpointError, match=r"pip install 'bminf-lite\[cpm\]'"):
        cpm_tokenizer.import_extra("jieba")


@pytest.mark.slow
def test_jieba_keeps_nothing_in_the_temporary_folder(tmp_path: Path) -> None:
    """By default jieba loads ``jieba.cache`` from there, or writes it, and prints a message."""
    code = "from bminf_lite.text.cpm_tokenizer import split_words; print(len(list(split_words('今天天气'))))"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert not list(tmp_path.iterdir()) and result.stderr == "" and int(result.stdout) > 0
