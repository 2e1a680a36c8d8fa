"""Text to measure or to calibrate on: read and validated, then cut into windows of tokens.

A file is one document of plain text, or JSONL with a document per line. All checks happen before a model's weights are
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..checkpoint.opened_model import ModelSource, open_model
from ..errors import UsageError
from ..files import read_file_or_pipe
from ..models import ModelConfig
from ..quantize.stages import split_for_encoder_decoder
from ..text.checkpoint_files import load_tokenizer
from ..text.jsonl import decode_utf8, parse_lines
from ..text.long_text import encode_document, special_frame
from ..text.tokenizer import Tokenizer

T = TypeVar("T")
DEFAULT_WINDOW = 1024


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of one document, int32 ``[n]``, of which the last ``scored`` are to be predicted.

    Before them may stand the tokens that begin every text of the tokenizer.

    Each is predicted from the tokens before it in the window, so ``scored`` is less than ``n``. For an encoder-decoder
    ``source`` holds the earlier tokens, and ``tokens`` begins with the decoder's start tokens.
    """

    tokens: np.ndarray
    scored: int
    source: np.ndarray | None = None

    def for_encoder_decoder(self, start: Sequence[int]) -> Window:
        """The same text for an encoder-decoder whose decoder starts with ``start``; scores at most half of the text."""
        tokens, source = split_for_encoder_decoder(self.tokens, start, len(self.tokens) - self.scored)
        return Window(tokens, len(self.tokens) - len(source), source)


def read_texts(path: Path) -> list[str]:
    """The documents of a file: all of it, or with the suffix ``.jsonl`` the ``text`` of each line's object.

    Documents of white space alone are left out. Raises ``UsageError`` for a file that cannot be read, is empty, binary
    or not UTF-8, and for JSONL with lines that are not objects with a ``text``, which the message lists.
    """
    return _read_documents(path, _text_of)


def read_prompts(path: Path) -> list[str | list[Any]]:
    """As :func:`read_texts`, but a line of JSONL may have ``messages`` in place of a ``text``: those of a conversation,
    which are returned as a list.
    """
    return _read_documents(path, _prompt_of)


def _read_documents(path: Path, parse: Callable[[dict[str, Any], int], T]) -> list[str | T]:
    """The documents of a file of which ``parse`` reads the lines of JSONL."""
    try:
        content = read_file_or_pipe(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if b"\0" in content:
        raise UsageError(f"{path}: is binary: byte {content.index(0)} is zero; give UTF-8 text, or JSONL")
    text = decode_utf8(content, path)
    texts: list[str | T] = [text]
    if path.suffix.lower() == ".jsonl":
        texts = [*parse_lines(text, path, parse)]
    texts = [t for t in texts if not isinstance(t, str) or t.strip()]
    if not texts:
        raise UsageError(f"{path}: holds no text; give a file with some hundred words at least")
    return texts


def _text_of(value: dict[str, Any], number: int) -> str:
    text = value.get("text")
    if not isinstance(text, str):
        found = f"text is {type(text).__name__}" if "text" in value else f"has no text, but {list(value)}"
        raise ValueError(f'{found}; each line is an object such as {{"text": "Once upon a time"}}')
    return text


def _prompt_of(value: dict[str, Any], number: int) -> str | list[Any]:
    if "messages" not in value:
        return _text_of(value, number)
    messages = value["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages is {messages!r}, not a list of messages")
    return messages


def encode_texts(texts: Iterable[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """The tokens of each document, int32, framed by the tokenizer's special tokens as a prompt is."""
    return [encode_document(tokenizer, text) for text in texts]


def text_frame(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that the tokenizer puts before and behind every text, int32, which may be none."""
    none = np.zeros(0, np.int32)
    return special_frame(tokenizer, "text") or (none, none)


def leading_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """The tokens that the tokenizer puts before every text, int32: mostly the token of a text's begin, or none."""
    return text_frame(tokenizer)[0]


def framed_pieces(
    documents: Iterable[np.ndarray], length: int, frame: tuple[np.ndarray, np.ndarray]
) -> list[np.ndarray]:
    """Documents, int32, as texts of up to ``length`` tokens, each with the ``frame`` that the documents have."""
    before, behind = frame
    room, pieces = max(length - len(before) - len(behind), 1), []
    for document in documents:
        begins = len(before) > 0 and np.array_equal(document[: len(before)], before)
        ends = len(behind) > 0 and np.array_equal(document[-len(behind) :], behind)
        body = document[len(before) * begins : len(document) - len(behind) * ends]
        pieces += [np.concatenate([before, body[i : i + room], behind]) for i in range(0, len(body), room)]
    return [piece.astype(np.int32) for piece in pieces]


def windows_for(
    folder: Path, texts: Iterable[str], window: int | None = None, stride: int | None = None
) -> list[Window]:
    """``texts`` in windows for the model in ``folder``, by its tokenizer and context; its weights are not read.

    ``window`` is by default the context, or :data:`DEFAULT_WINDOW` if that is shorter; ``stride`` is by default half
    the window. Raises ``CheckpointError`` for a folder that holds no model, ``UsageError`` as :func:`sliding_windows`.
    """
    config = parse_config(folder)
    window = min(config.context_length, DEFAULT_WINDOW) if window is None else window
    stride = max(window // 2, 1) if stride is None else stride
    check_window(window, stride, config.context_length)
    tokenizer = load_tokenizer(folder, config.vocab_size)
    documents = encode_texts(texts, tokenizer)
    return fit_windows(sliding_windows(documents, window, stride, leading_tokens(tokenizer)), config)


def parse_config(folder: str | Path | ModelSource) -> ModelConfig:
    """The parsed configuration of the model in a folder; raises ``CheckpointError``."""
    with open_model(folder) as model:
        return model.config


def fit_windows(windows: Sequence[Window], config: ModelConfig) -> list[Window]:
    """The windows for a model of this configuration; see :meth:`Window.for_encoder_decoder`."""
    if not config.is_encoder_decoder:
        return list(windows)
    return [window.for_encoder_decoder(config.decoder_start_token_ids) for window in windows]


def check_window(window: int, stride: int, context: int | None = None) -> None:
    """Raise ``UsageError`` unless ``window`` fits ``context`` and ``stride`` is at most the window."""
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
    documents: Sequence[Sequence[int] | np.ndarray],
    window: int,
    stride: int | None = None,
    leading: Sequence[int] | np.ndarray = (),
) -> list[Window]:
    """Windows of up to ``window`` tokens, one every ``stride`` tokens of each document, that score each token once.

    A window scores the tokens that no earlier window scored. So after a document's first window each scored token has
    at least ``window - stride`` tokens before it. Without a ``stride``, or with one as long as the window, windows do
    not overlap, and the first token of each is not scored because no token of the text is before it.

    If a document begins with the tokens ``leading``, each of its windows does: a model that was trained to see them
    first predicts badly without them. They count as tokens of the window, and are not scored. llama.cpp's perplexity
    does so too (https://github.com/ggml-org/llama.cpp/pull/1303). Raises ``UsageError`` as :func:`check_window` does,
    if ``leading`` leaves no room for two tokens, and if there is no token to score.
    """
    stride = window if stride is None else stride
    check_window(window, stride)
    before = np.asarray(leading, np.int32)
    windows: list[Window] = []
    for document in documents:
        tokens = np.asarray(document, np.int32)
        if len(before) and np.array_equal(tokens[: len(before)], before):
            windows += _windows_behind(before, tokens[len(before) :], window, stride)
        else:
            windows += _windows_behind(before[:0], tokens, window, stride)
    if not windows:
        lengths = max((len(d) for d in documents), default=0)
        raise UsageError(f"the text is too short: scoring needs 2 tokens at least, not {lengths}; give a longer text")
    return windows


def _windows_behind(leading: np.ndarray, tokens: np.ndarray, window: int, stride: int) -> Iterator[Window]:
    """Windows of one document that begin with ``leading`` each, which is not part of ``tokens``."""
    room = window - len(leading)
    if len(tokens) > room and room < 2:
        problem = f"the window is {window:,} tokens; it must be {len(leading) + 2:,} or more"
        raise UsageError(f"{problem}, because each window begins with the {len(leading):,} tokens that begin a text")
    stride = min(stride, room)
    done = 0 if len(leading) else 1
    for start in range(0, len(tokens), stride):
        end = min(start + room, len(tokens))
        done = max(done, start + 1) if start else done
        if end > done:
            yield Window(np.concatenate([leading, tokens[start:end]]), end - done)
        done = end
        if end == len(tokens):
            break


def truncate_windows(windows: Sequence[Window], count: int) -> list[Window]:
    """The first windows, which score ``count`` tokens together; the last one is cut short."""
    taken: list[Window] = []
    for window in windows:
        if count <= 0:
            break
        excess = max(window.scored - count, 0)
        end = len(window.tokens) - excess
        taken.append(replace(window, tokens=window.tokens[:end], scored=window.scored - excess))
        count -= window.scored
    return taken
