"""Grammars on the vocabularies that checkpoints have: the text of allowed tokens matches."""

from __future__ import annotations

import re
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizer_kit
import tokenizers
from grammar_kit import EOS, VOCAB_SIZE, make_compiler
from tokenizers import decoders, models

import bminf_lite
from bminf_lite.errors import UsageError
from bminf_lite.grammar import Grammar
from bminf_lite.grammar import matcher as matcher_module
from bminf_lite.grammar.matcher import MATCHERS_PER_LEXER, GrammarCompiler, MaskRow, Matcher, fill_masks
from bminf_lite.text.checkpoint_files import load_tokenizer
from bminf_lite.text.cpm_tokenizer import Cpm1Tokenizer, Cpm2Tokenizer, EvaTokenizer
from bminf_lite.text.json_tokenizer import JsonTokenizer
from bminf_lite.text.text_stream import TextStream
from bminf_lite.text.tokenizer import Tokenizer

DEMO = Path(bminf_lite.__file__).parent / "demo_model"
WORDS = [*"abc12\u2582\u2583{}:", "ab", "\u4f60\u597d", "\u2581", "\u25811", "12\u4f60"]


def masks_of(matchers: list[Matcher], vocab_size: int, *, held: bool = False) -> np.ndarray:
    """bool ``[matchers, vocab]``: which tokens are allowed."""
    words = np.zeros((len(matchers) + 2, -(-vocab_size // 32)), np.uint32)
    fill_masks(words, [MaskRow(m, i + 1, held) for i, m in enumerate(matchers)])
    assert not words[0].any() and not words[-1].any()
    bits = np.unpackbits(words[1:-1].view(np.uint8), axis=1, bitorder="little").astype(bool)
    assert not bits[:, vocab_size:].any()
    return bits[:, :vocab_size]


ENDS = {"eos_token": "</s>"}


def vocabularies() -> dict[str, tuple[Tokenizer, str, str]]:
    """Tokenizers of each kind, with a regex that their tokens can write, and a text that precedes it."""
    first = ["<unk>", "<eod>", "<sep>", "<s_0>"]
    return {
        "byte level": (JsonTokenizer(tokenizer_kit.byte_level(), ENDS), "[a-zé你🙂 ]{4,12}!", "hello"),
        "byte fallback": (
            JsonTokenizer(tokenizer_kit.sentencepiece_like(), ENDS),
            "( |the|cat|é|漢){3,8}\n?",
            "the cat",
        ),
        "T5": (JsonTokenizer(tokenizer_kit.metaspace(), ENDS), "[sé theca]{3,12}", "the cat"),
        "CPM-1": (Cpm1Tokenizer([*first, *WORDS], lambda text: []), "( ?[abc12]){3,9}\n你好", ""),
        "CPM-2": (Cpm2Tokenizer([*first, *WORDS]), "( ?[abc12]){3,9}\n你好", ""),
        "EVA": (EvaTokenizer([*first, *WORDS]), r"\{[abc12你]{2,9}:\}", ""),
        "demo": (load_tokenizer(DEMO, 2048), r"[A-Z][a-z]{1,9}(, [a-zäü]{1,7}){0,4}\.", "The module"),
    }


@pytest.mark.parametrize("name", vocabularies())
def test_the_text_of_allowed_tokens_matches(name):
    tokenizer, pattern, before = vocabularies()[name]
    vocab_size = len(tokenizer) + 37
    compiler = GrammarCompiler(tokenizer, vocab_size)
    rng, seen = np.random.default_rng(3), set()
    prompt = tokenizer.encode(before, add_special_tokens=False) if before else []
    for _ in range(40):
        matcher, tokens = compiler.matcher(Grammar.regex(pattern), tokenizer.eos_ids), []
        while not tokenizer.eos_ids & set(tokens):
            allowed = np.flatnonzero(masks_of([matcher], vocab_size)[0])
            assert allowed.max() < len(tokenizer)
            tokens.append(int(rng.choice(allowed)))
            matcher.accept(tokens[-1])
        text = TextStream(tokenizer, before=prompt).push(tokens, "stop").text
        assert re.fullmatch(pattern, text), (text, tokens)
        seen.add(text)
    assert len(seen) > 5


def test_vocabularies_whose_text_depends_on_more_than_tokens_are_refused():
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "##s": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UsageError, match=r"cannot be constrained by a grammar.*WordPiece"):
        GrammarCompiler(JsonTokenizer(backend), 3).matcher(Grammar.regex("the"), frozenset({0}))
    with pytest.raises(UsageError, match="end-of-sequence token, and this one has none"):
        make_compiler().matcher(Grammar.regex("a"), frozenset())


def test_matchers_of_one_grammar_are_independent_and_filled_together():
    compiler, grammar = make_compiler(), Grammar.regex("[a-c]{1,9}|[0-9]{3}")
    matchers = [compiler.matcher(grammar, EOS) for _ in range(9)]
    for i, matcher in enumerate(matchers):
        for _ in range(i % 4):
            allowed = np.flatnonzero(masks_of([matcher], VOCAB_SIZE)[0])
            matcher.accept(int(allowed[i % len(allowed)]))
    together = masks_of(matchers, VOCAB_SIZE)
    assert len(np.unique(together, axis=0)) > 3
    for matcher, mask in zip(matchers, together, strict=True):
        np.testing.assert_array_equal(masks_of([matcher], VOCAB_SIZE)[0], mask)


def test_many_completions_of_a_grammar_share_a_few_lexers(monkeypatch):
    """Masks of one lexer are computed one after another, so 24 completions have several; a single one has one."""
    monkeypatch.setattr(matcher_module, "thread_count", lambda: 3)
    monkeypatch.setattr(matcher_module, "QUICK_SECONDS", 60.0)  # on a busy machine too
    compiler, grammar = make_compiler(), Grammar.regex("[a-c]{1,9}")
    for _ in range(3 * MATCHERS_PER_LEXER):
        assert compiler.matcher(grammar, EOS).lexer == 1, "a matcher that is gone takes no place"
    several = [compiler.matcher(grammar, EOS) for _ in range(5 * MATCHERS_PER_LEXER)]
    counts = Counter(matcher.lexer for matcher in several)
    assert len(counts) == 3 and max(counts.values()) - min(counts.values()) <= MATCHERS_PER_LEXER
    masks = masks_of(several[::-1], VOCAB_SIZE)
    assert masks[0].any() and (masks == masks[0]).all()


def test_a_grammar_that_takes_long_is_compiled_once(monkeypatch):
    monkeypatch.setattr(matcher_module, "QUICK_SECONDS", 0.0)
    compiler, grammar = make_compiler(), Grammar.regex("[a-c]{1,9}")
    several = [compiler.matcher(grammar, EOS) for _ in range(5 * MATCHERS_PER_LEXER)]
    assert {matcher.lexer for matcher in several} == {1}


def test_lexers_that_were_not_used_for_long_are_forgotten(monkeypatch):
    monkeypatch.setattr(matcher_module, "MAX_CACHED", 2)
    compiler = make_compiler()
    numbers = [compiler.matcher(Grammar.choice([text]), EOS).lexer for text in "abacab"]
    assert numbers == [1, 2, 1, 3, 1, 4]


def test_vocabularies_of_few_sets_of_ends_are_kept(monkeypatch):
    """Requests choose the tokens that end them, and a vocabulary takes up to a hundred megabytes."""
    monkeypatch.setattr(matcher_module, "MAX_VOCABULARIES", 2)
    compiler, grammar = make_compiler(), Grammar.choice(["yes", "no"])
    sets = [EOS | {end} for end in (1, 2, 3)]
    for ends in sets:
        compiler.matcher(grammar, ends)
    assert list(compiler._vocabularies) == sets[1:]
    assert {ends for _, ends in compiler._compiled} == set(compiler._vocabularies)


def test_the_end_is_held_back_unless_it_is_all_that_is_left():
    compiler = GrammarCompiler(load_tokenizer(DEMO, 2048), 2048)
    ends = frozenset({0, 33, 2047})
    matcher = compiler.matcher(Grammar.regex("ab?"), ends)
    tokenizer = load_tokenizer(DEMO, 2048)
    matcher.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    free, held = masks_of([matcher], 2048)[0], masks_of([matcher], 2048, held=True)[0]
    assert free[list(ends)].all() and not held[list(ends)].any()
    assert set(np.flatnonzero(free != held)) == ends and held.any()
    matcher.accept(tokenizer.encode("b", add_special_tokens=False)[0])
    assert set(np.flatnonzero(masks_of([matcher], 2048, held=True)[0])) == ends


def test_an_end_that_is_not_allowed_is_refused():
    matcher = make_compiler().matcher(Grammar.regex("abc"), EOS)
    with pytest.raises(UsageError, match="the regex cannot be followed"):
        matcher.accept(1)


def test_threads_may_compile_the_same_and_other_grammars():
    compiler, found, errors = make_compiler(), [], []

    def work(thread: int) -> None:
        try:
            for n in range(20):
                matcher = compiler.matcher(Grammar.regex(f"[ab]{{1,{1 + (n + thread) % 5}}}"), EOS)
                found.append(masks_of([matcher], VOCAB_SIZE)[0].sum())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(found) == 80
