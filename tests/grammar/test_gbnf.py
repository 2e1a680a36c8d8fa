"""Characters in GBNF: as themselves, or by their numbers, in literals and classes, as llama.cpp reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.errors import UsageError
from bminf_lite.grammar import Grammar
from bminf_lite.grammar.check_worker import END, Bytes, with_plain_escapes
from bminf_lite.grammar.value import LIMITS, specification

llguidance = pytest.importorskip("llguidance")
VOCABULARY = llguidance.LLTokenizer(Bytes(END + 1))
characters = st.characters(codec="utf-8")


def accepts(text: str, grammar: str) -> bool:
    """Whether a grammar in GBNF has a text."""
    made = llguidance.LLMatcher.grammar_from_lark(llguidance.gbnf_to_lark.any_to_lark(with_plain_escapes(grammar)))
    matcher = llguidance.LLMatcher(VOCABULARY, made, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    assert not matcher.is_error(), (grammar, matcher.get_error())
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def escapes(character: str) -> list[str]:
    """All ways to write a character by its number."""
    number = ord(character)
    found = [f"\\U{number:08x}", f"\\U{number:08X}"]
    found += [f"\\u{number:04X}", f"\\u{number:04x}"] if number < 0x10000 else []
    found += [f"\\x{number:02x}"] if number < 0x100 else []
    if number >= 0x10000:
        high, low = divmod(number - 0x10000, 0x400)
        found.append(f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}")
    return found


@given(characters, characters)
def test_a_number_is_the_character(character, other):
    for escape in escapes(character):
        assert accepts(f"x{character}y", f'root ::= "x{escape}y"')
        assert accepts(character, f"root ::= [{escape}]") and accepts(character, f"root ::= [Q{escape}0-9]")
        if other != character:
            assert not accepts(other, f"root ::= [{escape}]")
            assert accepts(other, f"root ::= [^{escape}]")
        assert not accepts(character, f"root ::= [^{escape}]")


@given(st.text(st.characters(codec="utf-8", exclude_characters='"\\'), max_size=8))
def test_characters_stand_for_themselves_in_a_literal(text):
    assert accepts(f"<{text}>", f'root ::= "<{text}>" # "\\u00e9" [ \n')


@given(st.text(st.characters(codec="utf-8", exclude_characters="]\\^-["), min_size=1, max_size=8))
def test_characters_stand_for_themselves_in_a_class(text):
    for character in text:
        assert accepts(character, f"root ::= [{text}]")
        assert not accepts(character, f"root ::= [^{text}]")


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (r'root ::= "caf\u00e9"', ["café"], ["caf", "cafe", "cafe9"]),
        (r'root ::= "a\n\t\r\"\\"', ['a\n\t\r"\\'], ["a"]),
        (r'root ::= "\[x\]"', ["[x]"], ["x"]),
        (r"root ::= [\[\]\\]+", ["[]\\", "\\"], ["a"]),
        (r"root ::= [\u4e00-\u9fff]{2}", ["你好"], ["ab", "你"]),
        (r"root ::= [\x00-\x1f]", ["\x00", "\n", "\x1f"], [" "]),
        (r'root ::= [^"\\\x7F\x00-\x1F]', ["a", "é"], ['"', "\\", "\x7f", "\n"]),
        (r"root ::= [&&a~~z]", ["&", "a", "~", "z"], ["b"]),
        (r"root ::= [a\x2dz]", ["a", "-", "z"], ["b"]),
        (r"root ::= [\x5ea]", ["^", "a"], ["b"]),
        ('item ::= "#\\u0041" ["#]\n# a comment "\\u00e9\nroot ::= item', ['#A"', "#A#"], ["#A"]),
    ],
)
def test_examples(grammar, texts, others):
    assert all(accepts(text, grammar) for text in texts) and not any(accepts(text, grammar) for text in others)


def test_another_notation_is_left_as_it_is():
    lark = 'start: "\\u00e9" /[&&[a]]/ B\nB: "\\x41"'
    assert with_plain_escapes(lark) == lark


@pytest.mark.parametrize("escape", [r"\ud800", r"\udc00", r"\U00110000", r"\ud800a", r"\q", r"\u12", r"\x4"])
@pytest.mark.parametrize("form", ['root ::= "{}"', "root ::= [a{}]"])
def test_what_is_no_character_is_refused(escape, form):
    with pytest.raises(UsageError, match="the grammar cannot be used"):
        specification(Grammar.lark(form.replace("{}", escape)))
