"""English prose out of a Python installation: the text that the demo model is trained and measured on.

The sources are part of every Python installation and under the PSF licence: the doc strings and block comments of the
standard library (parsed, never imported), the doc strings of its compiled modules (imported, since they have no source;
none of them acts on import), and the language topics of ``help()``. Doctests, code, tables and markup are removed,
wrapped lines are joined, and no paragraph is kept twice.

A document belongs to a *subject*: a top-level module (``_json``, ``json.decoder`` and ``test.test_json`` are all
``json``) or a topic. Whole subjects are held out, so none of their text is in the training data. A training paragraph
that shares a long run of words with the held-out or validation text is dropped as well.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import io
import itertools
import re
import sys
import sysconfig
import tokenize
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SPLITS = ("heldout", "validation", "train")
SPLIT_BYTES = {"heldout": 80_000, "validation": 100_000}  # about; the last subject added may go past it
LARGEST_SUBJECT_BYTES = 15_000  # in the two small splits, so that each has many subjects
SHARED_WORDS = 12  # a run of this many words in common with a small split keeps a paragraph out of training

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "lib2to3", "data", "cjkencodings"}
_MARKUP = [
    (re.compile(r":(?:[a-z]+:)?[a-z]+:`[~!]?([^`<]+?)(?:\s*<[^`>]*>)?`"), r"\1"),  # :meth:`text <target>`
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`_+"), r"\1"),  # `text <target>`_
    (re.compile(r"``([^`]+)``"), r"\1"),
    (re.compile(r"`([^`]+)`_*"), r"\1"),
    (re.compile(r"\*\*?([^*\s][^*]*?)\*\*?"), r"\1"),
    (re.compile(r"::$", re.MULTILINE), ":"),
    (re.compile(r"\s*\[\d+\]_?"), ""),  # footnote marks
]
_SIGNATURE = re.compile(r"^[\w.]+\([^)]*\)(?: *-> *\S+)?\n(?:--\n)?")  # before a compiled doc string
_NOT_PROSE = re.compile(
    r">>>|^\s*\.\. |^[-=~^+|#*_ ]{3,}$|https?://\S{40}|\|.*\||[{}\\]|__\w+__ = |^\s*\w+ = |-\*-", re.MULTILINE
)
_LIST_ITEM = re.compile(r"^\s*(?:[-*o+]|\(?\w[.)]|\d+[.)])\s+")
_WORD = re.compile(r"[A-Za-z]{2,}")


@dataclass(frozen=True)
class Document:
    """One text on one subject; paragraphs hold no line breaks. ``supporting`` text (tests) is only ever trained on."""

    subject: str
    paragraphs: tuple[str, ...]
    supporting: bool = False

    @property
    def text(self) -> str:
        return "\n\n".join(self.paragraphs)


def paragraphs(text: str, shortest: int = 3) -> Iterator[str]:
    """The paragraphs of ``text`` that are English sentences of at least ``shortest`` words, markup removed."""
    text = inspect.cleandoc(text.expandtabs())
    for block in re.split(r"\n\s*\n", text):
        if _NOT_PROSE.search(block):
            continue
        lines = block.splitlines()
        if len({len(line) - len(line.lstrip()) for line in lines[1:]}) > 2:  # ragged indentation: code or a table
            continue
        starts = [i for i, line in enumerate(lines) if i == 0 or _LIST_ITEM.match(line)] + [len(lines)]
        for first, last in itertools.pairwise(starts):
            joined = re.sub(r"\s+", " ", " ".join(lines[first:last])).strip()
            for pattern, replacement in _MARKUP:
                joined = pattern.sub(replacement, joined)
            joined = _LIST_ITEM.sub("", joined)
            if _is_prose(joined, shortest):
                yield joined


def _is_prose(text: str, shortest: int) -> bool:
    words = _WORD.findall(text)
    letters = sum(c.isalpha() or c == " " for c in text)
    return (
        len(words) >= shortest
        and text.isascii()
        and text[0].isalpha()
        and (text[-1] in ".:!?" or len(words) >= 12)
        and letters >= 0.88 * len(text)
        and text.count("_") <= 0.06 * len(text)
        and max(map(len, text.split())) <= 40
    )


def _subject(module: str) -> str:
    parts = [p for p in module.split(".") if p not in ("test", "tests")]
    name = parts[0] if parts else module
    return name.removeprefix("test_").lstrip("_").removeprefix("py") or name


def _doc_strings(tree: ast.Module) -> Iterator[str]:
    """A module's doc strings as texts: its own, then each top-level function's, and each class's with its methods'."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    yield ast.get_docstring(tree) or ""
    for node in tree.body:
        if isinstance(node, kinds):
            yield "\n\n".join(filter(None, (ast.get_docstring(n) for n in ast.walk(node) if isinstance(n, kinds))))


def _block_comments(source: str) -> str:
    """Comments of two lines or more that stand alone, one paragraph each."""
    blocks: list[list[str]] = []
    last_line = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            if token.start[0] != last_line + 1:
                blocks.append([])
            blocks[-1].append(token.string.lstrip("#:"))
            last_line = token.start[0]
    return "\n\n".join("\n".join(block) for block in blocks if len(block) > 1)


def _from_sources(root: Path) -> Iterator[tuple[str, str, bool]]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED_FOLDERS.intersection(parts) or parts[0] == "pydoc_data" or parts[-1].startswith("bad"):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError, ValueError):  # test data that is broken on purpose
            continue
        subject = _subject(".".join(parts))
        supporting = bool({"test", "tests", "idle_test"}.intersection(parts))
        for text in (*_doc_strings(tree), _block_comments(source)):
            yield subject, text, supporting


def _from_compiled_modules() -> Iterator[tuple[str, str, bool]]:
    for name in sorted(sys.stdlib_module_names):
        spec = importlib.util.find_spec(name) if not name.startswith(("_test", "_xx", "xx")) else None
        if spec is None or not (
            spec.loader is importlib.machinery.BuiltinImporter
            or isinstance(spec.loader, importlib.machinery.ExtensionFileLoader)
        ):
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:  # a library that it needs is not installed
            continue
        yield _subject(name), module.__doc__ or "", False
        for _, member in sorted(vars(module).items()):
            if isinstance(member, type) and member.__module__ in (name, name.lstrip("_"), "builtins"):
                members = [member, *(m for _, m in sorted(vars(member).items()) if not isinstance(m, type))]
            elif isinstance(member, types.BuiltinFunctionType):
                members = [member]
            else:
                continue
            docs = [m.__doc__ for m in members if isinstance(m.__doc__, str)]
            yield _subject(name), "\n\n".join(_SIGNATURE.sub("", doc) for doc in docs), False


def _from_topics() -> Iterator[tuple[str, str, bool]]:
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield f"topic {name}", text, False


def documents(stdlib: Path | None = None) -> list[Document]:
    """All documents of this installation (or of the standard library under ``stdlib``), no paragraph twice."""
    seen: set[str] = set()
    found = []
    sources = _from_sources(stdlib or Path(sysconfig.get_path("stdlib")))
    for subject, text, supporting in (*_from_topics(), *_from_compiled_modules(), *sources):
        kept = []
        for paragraph in paragraphs(text):
            key = " ".join(_WORD.findall(paragraph.lower()))
            if key not in seen:
                seen.add(key)
                kept.append(paragraph)
        if kept:
            found.append(Document(subject, tuple(kept), supporting))
    return found


def split(found: Iterable[Document]) -> dict[str, list[Document]]:
    """Documents by split, whole subjects at a time, in an order that depends on the subjects' names alone."""
    by_subject: dict[str, list[Document]] = defaultdict(list)
    for document in found:
        by_subject[document.subject].append(document)
    result: dict[str, list[Document]] = {name: [] for name in SPLITS}
    size = dict.fromkeys(SPLIT_BYTES, 0)
    for subject in sorted(by_subject, key=lambda s: hashlib.sha256(s.encode()).hexdigest()):
        primary = [d for d in by_subject[subject] if not d.supporting]
        length = sum(len(d.text) for d in primary)
        small = next((name for name, limit in SPLIT_BYTES.items() if size[name] < limit), None)
        if small is not None and 0 < length <= LARGEST_SUBJECT_BYTES:
            result[small] += primary
            size[small] += length
        else:
            result["train"] += by_subject[subject]
    result["train"] = _without_shared_text(result["train"], result["heldout"] + result["validation"])
    return result


def _runs(paragraph: str) -> set[tuple[str, ...]]:
    words = paragraph.lower().split()
    return {tuple(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1)}


def _without_shared_text(training: list[Document], reserved: list[Document]) -> list[Document]:
    taken = set().union(*(_runs(p) for d in reserved for p in d.paragraphs))
    kept = (Document(d.subject, tuple(p for p in d.paragraphs if not _runs(p) & taken), d.supporting) for d in training)
    return [d for d in kept if d.paragraphs]
