"""Parses grammars that are not trusted: the program of the process that ``value.py`` starts.

A request holds the kind and the text of a grammar. The reply is ``{"specification": ...}``, the grammar in llguidance's
form, or ``{"problem": ...}``. To find problems, the grammar is built for a vocabulary of single bytes and takes some of
them, in a thread with a stack as small as those of the threads that compute masks. If it names tokens by their ids, the
vocabulary has more tokens, which have no text. The setup holds llguidance's ``limits``, the ``whitespace`` between the
parts of a JSON text, and ``max_choices``.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import Any

TOKEN_ID = "<["
"""How a grammar names a token by its id: ``<[151657]>``."""
STACK_BYTES = 1 << 20
STEPS = 64
"""Bytes of a random text that a grammar must take."""
END = 256
VOCABULARY = 1 << 18
"""Tokens of the vocabulary for grammars that name them by their ids: more than any model has."""
ALLOWED = 200
"""The bias of an allowed token in the result of ``compute_logit_bias``."""
MAX_MESSAGE = 2000
SHARED = frozenset(["$defs", "definitions"])
"""Keys of a schema whose values its parts may refer to."""
LIMIT_WORDS = ("fuel", "too many", "too large", "too big", "limit exceeded")
"""Words in llguidance's messages by which they say that a grammar reached a limit."""
MAX_LOCATED = 300
"""Parts of a schema that are checked on their own to find the one that is wrong."""


ONE_OF = (
    "oneOf is supported where its branches exclude each other by a type, a constant, a required property, a length or "
    "a range, and a value could be accepted by two of these: write anyOf"
)


class GrammarProblem(ValueError):
    """What is wrong with a grammar."""


def start(setup: dict[str, Any]) -> Callable[[dict[str, str]], dict[str, str]]:
    import llguidance

    limits = llguidance.LLParserLimits(**setup["limits"])
    checker = Checker(llguidance, limits, setup["whitespace"], setup["max_choices"])
    threading.stack_size(STACK_BYTES)

    def reply(grammar: dict[str, str]) -> dict[str, str]:
        replies: list[dict[str, str]] = []
        thread = threading.Thread(target=lambda: replies.append(checker.reply(**grammar)))
        thread.start()
        thread.join()
        return replies[0]

    return reply


GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
GBNF_PART = re.compile(r'#[^\r\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]', re.DOTALL)
"""A comment, a literal, or a class of characters."""
HEX = "[0-9a-fA-F]"
GBNF_CHARACTER = re.compile(
    rf"\\u([dD][89abAB]{HEX}{{2}})\\u([dD][c-fC-F]{HEX}{{2}})"
    rf"|\\x({HEX}{{2}})|\\u({HEX}{{4}})|\\U({HEX}{{8}})|\\?.",
    re.DOTALL,
)
LITERAL_ESCAPES = {'"': r"\"", "\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
CLASS_SPECIAL = frozenset("\\[]^&~-")
"""Characters with a meaning in a class of a regular expression, if they are not escaped there."""


def with_plain_escapes(text: str) -> str:
    """A grammar in GBNF with its characters themselves in place of their numbers; another grammar as it is.

    llguidance turns GBNF into Lark, and drops zeros of the numbers then. ``&&`` and ``~~`` in a class mean these
    characters in GBNF, and something else in a regular expression.
    """
    return GBNF_PART.sub(plain_part, text) if GBNF_RULE.search(text) else text


def plain_part(part: re.Match[str]) -> str:
    """A comment, a literal or a class without numbers of characters."""
    text = part[0]
    if text.startswith("#"):
        return text
    begin = "[^" if text.startswith("[^") else text[0]
    write = class_character if begin.startswith("[") else literal_character
    return begin + GBNF_CHARACTER.sub(write, text[len(begin) : -1]) + text[-1]


def number_of(character: re.Match[str]) -> int | None:
    """The code point that an escape has as a number; ``None`` for other escapes and plain characters."""
    high, low, *numbers = character.groups()
    if high is not None:
        return 0x10000 + (int(high, 16) - 0xD800 << 10) + int(low, 16) - 0xDC00
    number = next((int(digits, 16) for digits in numbers if digits is not None), None)
    if number is not None and (number > 0x10FFFF or 0xD800 <= number < 0xE000):
        raise GrammarProblem(f"{character[0]} is no character")
    return number


def literal_character(character: re.Match[str]) -> str:
    number, text = number_of(character), character[0]
    if number is None and text.startswith("\\"):
        return text[1] if text[1] in "[]" else text
    plain = text if number is None else chr(number)
    return LITERAL_ESCAPES.get(plain, plain if plain >= " " and plain != "\x7f" else f"\\x{ord(plain):02x}")


def class_character(character: re.Match[str]) -> str:
    number, text = number_of(character), character[0]
    if number is None:
        return f"\\x{ord(text):02x}" if text in ("&", "~") else text
    plain = chr(number)
    return f"\\x{number:02x}" if plain in CLASS_SPECIAL or plain < " " or plain == "\x7f" else plain


class Bytes:
    """A vocabulary of all bytes, an end-of-sequence token, and tokens without a text, as llguidance takes one."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = END
    special_token_ids = (END,)

    def __init__(self, size: int):
        self.tokens = [bytes([byte]) for byte in range(END)] + [b""] * (size - END)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


class Checker:
    """Turns grammars into llguidance's form, and tries them."""

    def __init__(self, library: Any, limits: Any, whitespace: str, max_choices: int):
        self._library = library
        self._limits = limits
        self._json_options = {"whitespace_pattern": whitespace}
        self._max_choices = max_choices
        self._vocabulary = library.LLTokenizer(Bytes(END + 1))
        self._large_vocabulary: Any = None

    def reply(self, kind: str, text: str) -> dict[str, str]:
        """The reply to one grammar."""
        try:
            specification = self._specification(kind, text)
            problem = self._problem(specification)
        except GrammarProblem as error:
            return {"problem": str(error)}
        except RecursionError:
            return {"problem": "it nests too deeply"}
        except MemoryError:
            return {"problem": "it needs too much memory"}
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            return {"problem": f"llguidance fails: {error}"}
        if problem is None:
            return {"specification": specification}
        if kind == "json_schema":
            problem += self._place(json.loads(text), problem)
        elif kind == "regex":  # the library shows it within a grammar
            problem = problem.split(" (in regex): ")[-1].split("\n   1 | ")[0].strip()
        if any(word in problem for word in LIMIT_WORDS):
            problem = f"it is too complex: {problem}"
        return {"problem": problem if len(problem) <= MAX_MESSAGE else f"{problem[:MAX_MESSAGE]} ..."}

    def _specification(self, kind: str, text: str) -> str:
        matcher = self._library.LLMatcher
        if kind == "json_object":
            return self._of_schema({"type": "object"})
        if kind == "json_schema":
            return self._of_schema(parsed(text, dict))
        if kind == "regex":
            return str(matcher.grammar_from_regex(text))
        if kind == "choice":
            return str(matcher.grammar_from_lark(self._choice(parsed(text, list))))
        try:
            return str(self._library.grammar_from("grammar", with_plain_escapes(text)))
        except ValueError as error:
            raise GrammarProblem(str(error)) from None

    def _of_schema(self, schema: dict[str, Any]) -> str:
        return str(self._library.LLMatcher.grammar_from_json_schema(schema, defaults=self._json_options))

    def _choice(self, options: list[Any]) -> str:
        """The options as one terminal of Lark, which becomes one automaton."""
        wrong = [option for option in options if not isinstance(option, str) or not option]
        if wrong or not options:
            what = f"it has {wrong[0]!r}" if wrong else "it is empty"
            raise GrammarProblem(f"{what}, but must be a list of texts, none of them empty")
        if len(options) > self._max_choices:
            raise GrammarProblem(f"it has {len(options):,} texts, but may have {self._max_choices:,}")
        return "start: TEXT\nTEXT: " + " | ".join(json.dumps(option, ensure_ascii=False) for option in options)

    def _problem(self, specification: str) -> str | None:
        """What keeps a grammar from being used; None if it takes a random text."""
        vocabulary = self._vocabulary
        if TOKEN_ID in specification:
            if self._large_vocabulary is None:
                self._large_vocabulary = self._library.LLTokenizer(Bytes(VOCABULARY))
            vocabulary = self._large_vocabulary
        matcher = self._library.LLMatcher(vocabulary, specification, log_level=0, limits=self._limits)
        random = Random(0)
        for _ in range(STEPS):
            if matcher.is_error():
                problem = str(matcher.get_error()).replace("<non-verbose/>", "").strip()
                if "coerce_one_of" in problem:  # an option of the library
                    return ONE_OF
                return "no text satisfies it" if problem == "NoExtensionBias" else problem.split("\n<")[0]
            if matcher.is_stopped():
                break
            allowed = matcher.compute_logit_bias()
            tokens = [token for token, bias in enumerate(allowed[:END]) if bias == ALLOWED]
            with_id = allowed.find(ALLOWED, END + 1)
            if with_id >= 0:
                tokens.append(with_id)
            if tokens and not matcher.is_error():
                matcher.consume_token(random.choice(tokens))
        return None

    def _place(self, schema: dict[str, Any], problem: str) -> str:
        """Where in a schema the problem is, as a JSON pointer: its smallest part that has the same problem alone."""
        shared: dict[str, Any] = {name: part for name, part in schema.items() if name in SHARED}
        found = ""
        for pointer, part in islice(objects(schema, ""), MAX_LOCATED):
            if pointer.startswith(f"{found}/") and self._problem(self._of_schema({**shared, **part})) == problem:
                found = pointer
        return f" (at {found})" if found else ""


def parsed(text: str, kind: type) -> Any:
    """The JSON value of a text, which must be of a kind."""
    try:
        value = json.loads(text, parse_constant=no_constant)
        text.encode()
    except ValueError as error:
        raise GrammarProblem(f"it is not JSON: {error}") from None
    if not isinstance(value, kind):
        wanted = "a JSON object" if kind is dict else "a list of texts"
        raise GrammarProblem(f"it must be {wanted}, but is {text[:50]!r}")
    return value


def no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def objects(value: Any, pointer: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects within a JSON value and their JSON pointers, each before those within it."""
    if isinstance(value, dict):
        yield pointer, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from objects(item, f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}")
