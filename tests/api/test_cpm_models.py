"""CPM-1, CPM-2 and EVA continue text, fill blanks and answer in a dialogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cpm_kit
import pytest

import bminf_lite
from bminf_lite.api import Model
from bminf_lite.errors import UsageError
from bminf_lite.text.infilling import SPAN, FilledSpan, fill_spans
from bminf_lite.text.prompts import EncodedPrompt

pytest.importorskip("jieba")
IDS = {word: i for i, word in enumerate(cpm_kit.VOCABULARY)}
TEXT = f"今天{SPAN}不错，我们去{SPAN}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cpm")
    for model_type in ("cpm2", "eva"):
        cpm_kit.write(folder / model_type, model_type)
    return folder


@pytest.fixture
def cpm2(folder: Path) -> Model:
    return bminf_lite.load(folder / "cpm2", device="cpu")


@pytest.fixture
def eva(folder: Path) -> Model:
    return bminf_lite.load(folder / "eva", device="cpu")


@pytest.fixture
def says(cpm2: Model, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[EncodedPrompt]]:
    """Makes the model write the given tokens, and returns the prompts that it gets."""

    def make(*tokens: str) -> list[EncodedPrompt]:
        prompts: list[EncodedPrompt] = []
        original = cpm2.generate

        def generate(prompt: EncodedPrompt, **options: Any) -> Any:
            prompts.append(prompt)
            return replace(original(prompt, **options | {"max_new_tokens": 1}), token_ids=[IDS[t] for t in tokens])

        monkeypatch.setattr(cpm2, "generate", generate)
        return prompts

    return make


def test_each_blank_gets_the_tokens_after_its_sentinel(cpm2: Model, says: Callable[..., list[EncodedPrompt]]) -> None:
    prompts = says("天气", "▂", "不错", "<s_1>", "北京", "大学", "<s_2>")
    fillings = cpm2.fill_blank(TEXT)
    assert fillings == [FilledSpan(2, "天气 不错"), FilledSpan(TEXT.rindex(SPAN), "北京大学")]
    assert fill_spans(TEXT, fillings) == "今天天气 不错不错，我们去北京大学"
    (prompt,) = prompts
    assert prompt.target == (IDS["<s_0>"],) and prompt.stop_ids == {IDS["<s_2>"]}
    sentinels = [IDS[f"<s_{i}>"] for i in range(4)]
    assert [i for i in prompt.token_ids if i in sentinels] == sentinels[:2]
    assert prompt.token_ids[-1] == IDS["<s_1>"]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["天气", "<eod>"], ["天气", ""]),
        (["天气"], ["天气", ""]),
        (["<s_1>", "北京", "<s_2>"], ["", "北京"]),
        (["天气", "<s_3>", "<s_1>", "北京", "<s_0>"], ["天气", "北京"]),
    ],
)
def test_blanks_that_the_model_does_not_reach_are_empty(cpm2, says, tokens, expected) -> None:  # type: ignore[no-untyped-def]
    says(*tokens)
    assert [f.text for f in cpm2.fill_blank(TEXT)] == expected


def test_filling_blanks_is_generation_with_sentinels(cpm2: Model) -> None:
    """The stop token ends generation, and sampling options apply."""
    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 4, "frequency_penalty": 0.5, "presence_penalty": 0.1}
    source = tuple(cpm2.tokenizer.encode_spans(TEXT.split(SPAN)))
    free = cpm2.generate(EncodedPrompt(source, False, (IDS["<s_0>"],)), **options, ignore_eos=True).token_ids
    for stop in (IDS["<s_2>"], free[3]):
        prompt = EncodedPrompt(source, False, (IDS["<s_0>"],), frozenset([stop]))
        tokens = cpm2.generate(prompt, **options).token_ids
        assert tokens == (free[: free.index(stop) + 1] if stop in free else free)
        if stop == IDS["<s_2>"]:
            assert IDS["<s_1>"] not in tokens
            assert [f.text for f in cpm2.fill_blank(TEXT, **options)] == [cpm2.tokenizer.decode(tokens), ""]


@pytest.mark.parametrize("text", ["no blank", SPAN * 4, "", 5])
def test_invalid_texts_with_blanks(cpm2: Model, text: Any) -> None:
    with pytest.raises(UsageError):
        cpm2.fill_blank(text)
    with pytest.raises(UsageError, match="stop"):
        cpm2.fill_blank(TEXT, stop="。")


def test_continuing_a_text(cpm2: Model) -> None:
    """The last sentinel ends the source and begins the decoder's tokens."""
    prompt = cpm2.encode("今天天气")
    assert list(prompt.token_ids) == [IDS["今天"], IDS["天气"], IDS["<s_3>"]]
    assert prompt.target == (IDS["<s_3>"],) and not prompt.continues
    framed = cpm2.generate("今天天气", max_new_tokens=9)
    assert cpm2.generate(prompt, max_new_tokens=9).token_ids == framed.token_ids
    assert framed.text == cpm2.tokenizer.decode(framed.token_ids)
    assert "".join(piece.text for piece in cpm2.stream("今天天气", max_new_tokens=9)) == framed.text


def test_a_dialogue(eva: Model) -> None:
    turns = ["今天天气不错。", "我们去北京大学看看", "你好"]
    separator = IDS["<sep>"]
    expected = [i for turn in turns for i in [*eva.tokenizer.encode(turn, add_special_tokens=False), separator]]
    result = eva.dialogue(turns, max_new_tokens=9)
    assert eva.generate([*expected, IDS["<s_0>"]], max_new_tokens=9).token_ids == result.token_ids
    roles = ["user", "assistant", "user"]
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
    assert eva.generate(messages, max_new_tokens=9).token_ids == result.token_ids
    assert eva.generate(turns[0], max_new_tokens=9).token_ids == eva.dialogue(turns[:1], max_new_tokens=9).token_ids


def test_a_long_dialogue_loses_its_start(eva: Model) -> None:
    turns = ["今天天气不错"] * 40
    prompt = eva.encode([{"role": "user", "content": turn} for turn in turns])
    assert 56 < len(prompt.token_ids) <= 64
    with pytest.raises(UsageError, match="64 at most"):
        eva.dialogue(["今天" * 100])


@pytest.mark.parametrize("context", ["你好", [], [5], [None, "x"]])
def test_invalid_dialogues(eva: Model, context: Any) -> None:
    with pytest.raises(UsageError):
        eva.dialogue(context)


def test_unsupported_conversations(cpm2: Model, eva: Model) -> None:
    with pytest.raises(UsageError, match="chat template"):
        cpm2.dialogue(["你好"])
    with pytest.raises(UsageError, match="must be text"):
        eva.generate([{"role": "user", "content": 3}])
    with pytest.raises(UsageError, match="only text is supported"):
        eva.generate([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    parts = [{"role": "user", "content": [{"type": "text", "text": "你好"}]}]
    assert eva.encode(parts) == eva.encode([{"role": "user", "content": "你好"}])


def test_cpm1_generates(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    folder = cpm_kit.write_cpm1(tmp_path / "cpm1")
    with bminf_lite.load(folder, device="cpu") as model:
        result = model.generate("今天天气不错", max_new_tokens=8)
        assert result.text == "".join(piece.text for piece in model.stream("今天天气不错", max_new_tokens=8))
        assert model.eos_ids == model.tokenizer.eos_ids
        with pytest.raises(UsageError, match="encoder-decoder"):
            model.fill_blank(TEXT)


def test_migrated_models_keep_their_vocabulary(folder: Path, tmp_path: Path) -> None:
    for model_type in ("cpm2", "eva"):
        bminf_lite.migrate(folder / model_type, tmp_path / model_type)
        with bminf_lite.load(tmp_path / model_type, device="cpu") as model:
            assert isinstance(model.generate("你好", max_new_tokens=4).text, str)
