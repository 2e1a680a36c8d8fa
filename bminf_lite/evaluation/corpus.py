"""Text to measure or to calibrate on: read and checked, then cut into windows of tokens.

A file is one document of plain text, or JSONL with a document per line. Everything that can be wrong with it is found
before a model's weights are touched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import models
from ..checkpoint.reader import open_checkpoint
from ..errors import UsageError, listed
from ..text.checkpoint_files import load_tokenizer
from ..text.tokenizer import Tokenizer

DEFAULT_WINDOW = 1024


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of one document, int32 ``[n]``, of which the last ``scored`` are predictions to judge.

    Their predecessors in the window are what they are predicted from, so ``scored`` is less than ``n``. For an
    encoder-decoder those are the ``source``, and ``tokens`` begins with those that its decoder starts from.
    """

    tokens: np.ndarray
    scored: int
    source: np.ndarray | None = None

    def for_encoder_decoder(self, start: Sequence[int]) -> Window:
        """The same text for an encoder-decoder that starts from ``start``; it scores half of the text at most."""
        middle = max(-(-len(self.tokens) // 2), len(self.tokens) - self.scored)
        tokens = np.concatenate([start, self.tokens[middle:]]).astype(np.int32)
        return Window(tokens, len(self.tokens) - middle, self.tokens[:middle])


def read_texts(path: Path) -> list[str]:
    """The documents of a file: all of it, or with the suffix ``.jsonl`` the ``text`` of each line's object.

    A byte order mark at the start and documents of white space alone are left out. Raises ``UsageError`` for a file
    that cannot be read, is empty, is binary or not UTF-8, and for JSONL with lines that are no objects with a ``text``:
    in one message.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if b"\0" in content:
        raise UsageError(f"{path}: is binary: byte {content.index(0)} is zero; give UTF-8 text, or JSONL")
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}; convert it to UTF-8"
        ) from None
    texts = _parse_jsonl(path, text) if path.suffix.lower() == ".jsonl" else [text]
    texts = [t for t in texts if t.strip()]
    if not texts:
        raise UsageError(f"{path}: holds no text; give a file with some hundred words at least")
    return texts


def _parse_jsonl(path: Path, content: str) -> list[str]:
    texts, problems = [], []
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(f"line {number}: is not JSON: {error}")
            continue
        if not isinstance(value, dict):
            problems.append(f"line {number}: is {type(value).__name__}, but must be an object with text")
        elif not isinstance(value.get("text"), str):
            found = f"text is {type(value['text']).__name__}" if "text" in value else f"has no text, but {list(value)}"
            problems.append(f'line {number}: {found}; each line is an object such as {{"text": "Once upon a time"}}')
        else:
            texts.append(value["text"])
    if problems:
        raise UsageError(listed(path, problems))
    return texts


def encode_texts(texts: Iterable[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """The tokens of each document, int32, framed by the tokenizer's special tokens as a prompt is."""
    return [np.array(tokenizer.encode(text), np.int32) for text in texts]


def windows_for(
    folder: Path, texts: Iterable[str], window: int | None = None, stride: int | None = None
) -> list[Window]:
    """``texts`` in windows for the model in ``folder``, whose tokenizer and context count; its weights are not read.

    ``window`` is by default the context, or :data:`DEFAULT_WINDOW` if that is shorter; ``stride`` half the window.
    Raises ``CheckpointError`` for a folder that holds no such model, and what :func:`cut` raises.
    """
    config = parse_config(folder)
    window = min(config.context_length, DEFAULT_WINDOW) if window is None else window
    stride = max(window // 2, 1) if stride is None else stride
    check_window(window, stride, config.context_length)
    return fit_windows(
        sliding_windows(encode_texts(texts, load_tokenizer(Path(folder), config.vocab_size)), window, stride), config
    )


def parse_config(folder: str | Path) -> Any:
    """The parsed configuration of the model in a folder; raises ``CheckpointError``."""
    with open_checkpoint(folder) as checkpoint:
        return models.find(checkpoint.config).parse(checkpoint.config)


def fit_windows(windows: Sequence[Window], config: Any) -> list[Window]:
    """The windows for a model of that configuration: those of an encoder-decoder are :meth:`Window.divided`."""
    start = getattr(config, "decoder_start_token_ids", ())
    return [window.for_encoder_decoder(start) for window in windows] if start else list(windows)


def check_window(window: int, stride: int, context: int | None = None) -> None:
    """Raise ``UsageError`` unless ``window`` fits ``context`` and a window every ``stride`` tokens misses none."""
    problems = []
    if context is not None and not 2 <= window <= context:
        problems.append(f"the window is {window:,} tokens; it must be 2 to the model's context, {context:,}")
    elif window < 2:
        problems.append(f"the window is {window:,} tokens; it must be 2 or more")
    if not 1 <= stride <= max(window, 1):
        problems.append(f"the stride is {stride:,} tokens; it must be 1 to the window, {window:,}, to miss no token")
    if problems:
        raise UsageError("; ".join(problems))


def sliding_windows(
    documents: Sequence[Sequence[int] | np.ndarray], window: int, stride: int | None = None
) -> list[Window]:
    """Windows of up to ``window`` tokens, every ``stride`` tokens of each document, that score each token once.

    A window scores what no window before it did, so after the first of a document each scored token follows at least
    ``window - stride`` others. Without a ``stride``, or with one as long as the window, windows are separate and each
    one's first token is not scored, having nothing before it; nor is a document's first. Raises ``UsageError`` for a
    window or stride that makes no sense, and if there is no token to score.
    """
    stride = window if stride is None else stride
    check_window(window, stride)
    windows: list[Window] = []
    for document in documents:
        tokens = np.asarray(document, np.int32)
        done = 1
        for start in range(0, len(tokens), stride):
            end = min(start + window, len(tokens))
            done = max(done, start + 1)
            if end > done:
                windows.append(Window(tokens[start:end], end - done))
            done = end
            if end == len(tokens):
                break
    if not windows:
        lengths = max((len(d) for d in documents), default=0)
        raise UsageError(f"the text is too short: scoring needs 2 tokens at least, not {lengths}; give a longer text")
    return windows


def truncate_windows(windows: Sequence[Window], count: int) -> list[Window]:
    """The first windows, as many as score ``count`` tokens; the last one is cut short."""
    taken: list[Window] = []
    for window in windows:
        if count <= 0:
            break
        excess = max(window.scored - count, 0)
        end = len(window.tokens) - excess
        taken.append(replace(window, tokens=window.tokens[:end], scored=window.scored - excess))
        count -= window.scored
    return taken
