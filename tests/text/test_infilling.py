"""Blanks of T5, whose sentinels are ``<extra_id_0>``, ...; test_cpm_models.py tests CPM-2's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny_checkpoint
import tokenizer_kit
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

import bminf_lite
from bminf_lite.api import Model
from bminf_lite.errors import UsageError
from bminf_lite.text.checkpoint_files import load_tokenizer
from bminf_lite.text.infilling import SPAN, FilledSpan, encode_blanks, fill_spans
from bminf_lite.text.prompts import EncodedPrompt

CONFIG = {
    "model_type": "t5",
    "vocab_size": 16,
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 8,
    "num_heads": 4,
    "num_layers": 2,
    "decoder_start_token_id": 0,
    "eos_token_id": 7,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("t5")
    tiny_checkpoint.save(folder, CONFIG, tiny_checkpoint.tensors(CONFIG))
    tokenizer = tokenizer_kit.metaspace()
    tokenizer.add_special_tokens([f"<extra_id_{i}>" for i in range(4)][::-1])
    tokenizer.save(str(folder / "tokenizer.json"))
    return bminf_lite.load(folder, device="cpu")


def test_a_t5_fills_blanks(model: Model) -> None:
    text = f"the {SPAN} cats {SPAN}"
    tokenizer = model.tokenizer
    first, second, third = tokenizer.sentinels[:3]
    source = tuple(tokenizer.encode("the <extra_id_0> cats <extra_id_1>"))
    prompt = EncodedPrompt(source, False, (first,), frozenset([third]))
    for seed in range(200):  # until a random model over sixteen tokens writes the sentinels in order
        options = {"max_new_tokens": 40, "temperature": 1.0, "seed": seed}
        tokens = model.generate(prompt, **options).token_ids
        if tokens.count(second) == 1 and tokens.index(second) > 1 and tokens[-1] == third:
            break
    fillings = model.fill_blank(text, **options)
    at = tokens.index(second)
    expected = [tokens[:at], tokens[at + 1 : -1]]
    assert [f.text for f in fillings] == [tokenizer.decode(part) for part in expected]
    assert [f.position for f in fillings] == [4, text.rindex(SPAN)]
    model.fill_blank(SPAN * 3, max_new_tokens=1)
    with pytest.raises(UsageError, match="give 1 to 3"):
        model.fill_blank(SPAN * 4)


def test_fillings_have_no_special_tokens_even_if_they_are_normalized(tmp_path: Path) -> None:
    backend = tokenizer_kit.metaspace()
    names = ["<extra_id_0>", "<extra_id_1>", "<END>"]
    backend.add_special_tokens([AddedToken(name, normalized=True, special=True) for name in names])
    backend.normalizer = normalizers.Lowercase()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, 1000)
    second, end = (backend.token_to_id(name) for name in names[1:])
    tokens = [*tokenizer.encode("the cat"), end, second]
    (filling,) = encode_blanks(tokenizer, f"see {SPAN}").fillings(tokenizer, tokens, frozenset([second]))
    assert filling.text == tokenizer.decode(tokens[:-2])


@given(parts=st.lists(st.text("ab<>", max_size=4), min_size=2, max_size=5))
def test_fillings_go_where_their_blanks_are(parts: list[str]) -> None:
    text = SPAN.join(parts)
    split = text.split(SPAN)
    positions = [m.start() for m in re.finditer(SPAN, text)]
    assert [text[p : p + len(SPAN)] for p in positions] == [SPAN] * (len(split) - 1)
    fillings = [FilledSpan(p, f"[{i}]") for i, p in enumerate(positions)]
    whole = fill_spans(text, fillings)
    assert whole == split[0] + "".join(f"[{i}]{part}" for i, part in enumerate(split[1:]))
