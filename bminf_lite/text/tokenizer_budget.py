"""What a ``tokenizer.json`` may make of a text: bounds for files that multiply it.

``Replace`` of "a" by "aa", forty times, makes 10^12 characters of one. A tokenizer of the library computes that, in
memory, already for the tokens that the file adds. So the file is looked at before the library gets it. Each step of its
pipeline has a factor, the most characters that it makes of one.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..errors import CheckpointError, checkpoint_error
from ..files import TooManyValues, parse_json

MAX_VALUES = 1 << 23
"""The values that a file may hold; the largest vocabularies, of 262,144 tokens, have 2 million with their merges."""
MAX_STEPS = 64
"""The steps that a part of the pipeline may have; published files have six at most."""
MAX_GROWTH = 16.0
"""The growth that all replacements together may cause; published files make one character of a run of spaces."""
MAX_FORM_GROWTH = 32.0
"""The characters that a table of the file may make of one. NFKC makes 18 of an Arabic ligature."""
MAX_ADDED = 1_000
"""Characters, or tokens, that are put around a text."""
MAX_TOKEN = 4_096
"""Characters of a token."""
MAX_AFFIX = 100
"""Characters before or after the parts of a word, which the library joins for each character."""
MAX_WORD = 10_000
"""Characters of a word that WordPiece cuts, in a time that grows with their square."""
MAX_DEPTH = 8
REMEDY = "get the tokenizer from where the model was published"

PARTS = ("normalizer", "pre_tokenizer", "decoder")


def check_budget(content: bytes, source: object) -> None:
    """Raise ``CheckpointError`` for a ``tokenizer.json`` that must not be given to the library.

    What is not JSON passes: the library says what is wrong.
    """
    try:
        value = _without_vocabulary(content)
        if value is None:
            value = parse_json(content, _unique_parts, MAX_VALUES)
    except TooManyValues as error:
        raise CheckpointError(f"{source}: {error}") from None
    except (ValueError, RecursionError):
        return
    if isinstance(value, dict) and (problems := problems_of(value)):
        raise checkpoint_error(source, problems, REMEDY)


def check_tokens(tokens: Iterable[str], source: object) -> None:
    """Raise ``CheckpointError`` for a vocabulary with a token that is too long."""
    longest = max(map(len, tokens), default=0)
    if longest > MAX_TOKEN:
        problem = f"a token of the vocabulary has {longest:,} characters, and {MAX_TOKEN:,} are allowed"
        raise CheckpointError(f"{source}: {problem}; {REMEDY}")


def _without_vocabulary(content: bytes) -> dict[str, Any] | None:
    """The parts of the file before ``model``, the last, in a tenth of the time; None if there is more behind it."""
    text, end, found = content.decode(), 0, {}
    start = _KEY.match(text, 0)
    while start is not None and (key := json.loads(start[1])) != "model":
        if key in found:
            return None
        found[key], end = _DECODER.raw_decode(text, start.end())
        start = _KEY.match(text, end)
    if start is None or _MAY_BE_A_PART.search(text, start.end()):
        return None
    return found


def _unique_parts(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the file. A part that is there twice is refused: the library may use the first."""
    value = dict(pairs)
    names = [name for name, _ in pairs if name in (*PARTS, "post_processor", "model")]
    if len(names) > len(set(names)):
        raise TooManyValues(f"an object of it has {max(names, key=names.count)!r} twice")
    return value


_DECODER = json.JSONDecoder()
_KEY = re.compile(r'\s*[{,]\s*("(?:[^"\\]|\\.)*")\s*:\s*')
_MAY_BE_A_PART = re.compile(
    r'"(?:normalizer|pre_tokenizer|decoder|post_processor|added_tokens)"\s*:\s*[\[{]|\\u00[2-7]|'
    r'"(?:continuing_subword_prefix|end_of_word_suffix)"\s*:\s*"[^"]|"max_input_chars_per_word"'
)
"""In a vocabulary these words are followed by numbers. The second form may hide letters of them."""


def problems_of(content: Mapping[str, Any]) -> list[str]:
    """What is wrong with the content of a ``tokenizer.json``; empty for one that the library can be given."""
    found = [problem for part in PARTS for problem in _part_problems(part, content.get(part))]
    return found + list(_frame_problems(content.get("post_processor"))) + list(_model_problems(content.get("model")))


def _part_problems(part: str, value: Any) -> Iterator[str]:
    steps = list(_steps(value, 0))
    if len(steps) > MAX_STEPS:
        yield f"{part} has more than {MAX_STEPS} steps"
        return
    growth = 1.0
    for step in steps:
        kind = str(step.get("type"))
        if kind in _FACTORS:
            growth *= _FACTORS[kind](step)
        if kind == "Precompiled":
            yield from (f"{part}: its table of characters {problem}" for problem in _table_problems(step))
        if kind == "Prepend" and len(str(step.get("prepend"))) > MAX_ADDED:
            yield f"{part} puts {len(str(step['prepend'])):,} characters before a text, and {MAX_ADDED:,} are allowed"
    if growth > MAX_GROWTH:
        yield f"{part} makes up to {growth:.3g} characters of one, and {MAX_GROWTH:g} are allowed"


def _steps(value: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """The steps of a part, those of sequences within sequences included; at most one more than may be."""
    if depth > MAX_DEPTH:
        yield from [{}] * (MAX_STEPS + 1)
    if not isinstance(value, dict) or depth > MAX_DEPTH:
        return
    if value.get("type") != "Sequence":
        yield value
        return
    count = 0
    for key in ("normalizers", "pretokenizers", "decoders", "processors"):
        for inner in value.get(key) or () if isinstance(value.get(key), list) else ():
            for step in _steps(inner, depth + 1):
                yield step
                count += 1
                if count > MAX_STEPS:
                    return


def _replaced(step: Mapping[str, Any]) -> float:
    """A regular expression may match nothing, between any two characters."""
    pattern, content = step.get("pattern"), len(str(step.get("content") or ""))
    text = pattern.get("String") if isinstance(pattern, dict) else None
    return max(content / len(text), 1.0) if isinstance(text, str) and text else 1.0 + content


_FACTORS: dict[Any, Callable[[Mapping[str, Any]], float]] = {
    "Replace": _replaced,
    "ByteLevel": lambda step: 2.0,  # of a text of two-byte characters; of ASCII none
    "BertNormalizer": lambda step: 3.0,  # spaces around a Chinese character
}
"""Forms of Unicode are not counted: they change few characters, and a second one changes nothing more."""


def _table_problems(step: Mapping[str, Any]) -> Iterator[str]:
    """Problems of a SentencePiece model's table: the size of a trie in bytes, the trie, and texts that end with zeros.

    The library makes room for the trie before it reads it.
    """
    try:
        table = base64.b64decode(str(step.get("precompiled_charsmap") or ""), validate=True)
    except (binascii.Error, ValueError):
        return  # the library says what is wrong
    size, rest = int.from_bytes(table[:4], "little"), table[4:]
    if size > len(rest):
        yield f"claims {size:,} bytes, but has {len(rest):,}"
    factor = max((len(text.decode(errors="replace")) for text in rest[size:].split(b"\0")), default=1)
    if factor > MAX_FORM_GROWTH:
        yield f"makes {factor:,} characters of one, and {MAX_FORM_GROWTH:g} are allowed"


def _frame_problems(value: Any) -> Iterator[str]:
    added = 0
    for step in _steps(value, 0):
        if step.get("type") != "TemplateProcessing":
            continue
        tokens, pieces = step.get("special_tokens"), step.get("single")
        ids = {k: len(t["ids"]) for k, t in _items(tokens) if isinstance(t, dict) and isinstance(t.get("ids"), list)}
        for piece in pieces if isinstance(pieces, list) else ():
            special = piece.get("SpecialToken") if isinstance(piece, dict) else None
            added += ids.get(special.get("id"), 1) if isinstance(special, dict) else 0
    if added > MAX_ADDED:
        yield f"post_processor puts {added:,} tokens around a text, and {MAX_ADDED:,} are allowed"


def _model_problems(model: Any) -> Iterator[str]:
    if not isinstance(model, dict):
        return
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(model.get(key), str) and len(model[key]) > MAX_AFFIX:
            yield f"model.{key} has {len(model[key]):,} characters, and {MAX_AFFIX} are allowed"
    word = model.get("max_input_chars_per_word")
    if isinstance(word, int) and word > MAX_WORD:
        yield f"model.max_input_chars_per_word is {word:,}, and {MAX_WORD:,} is the most"


def _items(value: Any) -> Any:
    return value.items() if isinstance(value, dict) else ()
