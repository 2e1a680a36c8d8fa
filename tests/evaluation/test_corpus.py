"""Evaluation text: what is read, how it is cut, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.errors import UsageError
from bminf_lite.evaluation.corpus import (
    check_window,
    framed_pieces,
    read_texts,
    sliding_windows,
    truncate_windows,
    windows_for,
)

documents = st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(lambda lengths: max(lengths) >= 2)


@given(documents, st.integers(2, 12), st.data())
def test_each_token_is_scored_once_with_enough_before_it(lengths, window, data):
    stride = data.draw(st.integers(1, window - 1))
    texts = [np.arange(n) + 1000 * i for i, n in enumerate(lengths)]
    windows = sliding_windows(texts, window, stride)
    scored = np.concatenate([w.tokens[-w.scored :] for w in windows])
    np.testing.assert_array_equal(scored, np.concatenate([t[1:] for t in texts]))
    for w in windows:
        assert 1 <= w.scored < len(w.tokens) <= window
        first = w.tokens[-w.scored] % 1000
        assert len(w.tokens) - w.scored >= min(first, window - stride)


@given(documents, st.integers(2, 12))
def test_separate_windows_score_all_but_their_first(lengths, window):
    texts = [np.arange(n) + 1000 * i for i, n in enumerate(lengths)]
    windows = sliding_windows(texts, window)
    assert all(w.scored == len(w.tokens) - 1 for w in windows)
    pieces = [t[i : i + window] for t in texts for i in range(0, len(t), window)]
    expected = np.concatenate([p for p in pieces if len(p) > 1])
    np.testing.assert_array_equal(np.concatenate([w.tokens for w in windows]), expected)


@given(documents, st.integers(4, 12), st.integers(1, 12), st.integers(1, 2))
def test_each_window_begins_with_the_tokens_that_begin_a_text(lengths, window, stride, count):
    """They are part of the window, and neither scored nor a context; each token of the text is scored once."""
    leading, texts = np.arange(-count, 0), [np.arange(n) + 1000 * i for i, n in enumerate(lengths)]
    windows = sliding_windows([np.concatenate([leading, t]) for t in texts], window, min(stride, window), leading)
    for w in windows:
        assert 1 <= w.scored <= len(w.tokens) - count <= window - count
        np.testing.assert_array_equal(w.tokens[:count], leading)
        assert np.all(np.diff(w.tokens[count:]) == 1)
    if stride < window - count:
        scored = np.concatenate([w.tokens[-w.scored :] for w in windows])
        np.testing.assert_array_equal(scored, np.concatenate(texts))


def test_a_window_has_room_behind_the_tokens_that_begin_a_text():
    with pytest.raises(UsageError, match="must be 4 or more, because each window begins with the 2 tokens"):
        sliding_windows([[-2, -1, 0, 1, 2]], 3, None, [-2, -1])
    [window] = sliding_windows([[5, 6, 7]], 3, None, [4])
    assert window.scored == 2  # a document that does not begin with them stays as it is


@given(documents, st.integers(2, 12), st.integers(1, 100))
def test_the_first_tokens(lengths, window, count):
    windows = sliding_windows([np.arange(n) + 1000 * i for i, n in enumerate(lengths)], window, max(window // 2, 1))
    scored = np.concatenate([w.tokens[-w.scored :] for w in windows])
    taken = truncate_windows(windows, count)
    np.testing.assert_array_equal(np.concatenate([w.tokens[-w.scored :] for w in taken]), scored[:count])
    assert all(1 <= w.scored < len(w.tokens) for w in taken)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "one\n\ntwo\n", ["one\n\ntwo\n"]),
        ("a.jsonl", '{"text": "one"}\n\n{"text": " \\n"}\n{"text": "dos años", "id": 3}', ["one", "dos años"]),
    ],
)
def test_a_text_is_one_document_and_jsonl_one_per_line(tmp_path: Path, name, content, expected, encoding):
    """A byte order mark and documents of white space are left out."""
    (tmp_path / name).write_text(content, encoding=encoding)
    assert read_texts(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b" \n\t", "holds no text"),
        ("a.jsonl", b"\n", "holds no text"),
        ("a.txt", b"PK\x03\x04\x00\x00", "is binary: byte 4"),
        ("a.txt", "caf\xe9".encode("latin-1"), "not UTF-8 text: byte 3 is 0xe9"),
        ("a.jsonl", b'{"text": "a"}\n{"prompt": "b"}', r"line 2: has no text, but \['prompt'\]"),
        ("a.jsonl", b'{"text": 5}', "line 1: text is int"),
        ("a.jsonl", b'"text"', "line 1: is str"),
        ("a.jsonl", b'{"text": "a"', "line 1: is not JSON"),
    ],
)
def test_files_without_usable_text(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as error:
        read_texts(tmp_path / name)
    assert name in str(error.value)
    for other in ("none.txt", ".", "/dev/zero"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_texts(tmp_path / other)


def test_all_bad_lines_are_told_at_once_up_to_a_limit(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n[1]\n{}\n', encoding="utf-8")
    with pytest.raises(UsageError, match=r"(?s)2 problems.*line 2.*line 3"):
        read_texts(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("x\n" * 1000, encoding="utf-8")
    with pytest.raises(UsageError, match=r"(?s)1,000 problems.*line 20.*960 more.*line 981"):
        read_texts(tmp_path / "a.jsonl")


def test_a_model_s_windows(tmp_path: Path):
    folder = tiny_checkpoint.write(tmp_path / "m")
    windows = windows_for(folder, ["a" * 500, "b" * 9])
    assert [len(w.tokens) for w in windows] == [128] * 6 + [117, 10]
    assert windows[0].tokens[0] == windows[-1].tokens[0] == 256, "<s> before each document"
    assert windows[0].tokens.dtype == np.int32
    assert sum(w.scored for w in windows) == 509
    with pytest.raises(UsageError, match="model's context, 128"):
        windows_for(folder, ["a" * 500], window=129)


@pytest.mark.parametrize("stride", [2, 3, 5, 8])
def test_an_encoder_decoder_s_windows_score_each_token_once(stride: int):
    """After the first half window each token is predicted from a source of half a window or more before it."""
    text = np.arange(100, 141, dtype=np.int32)
    windows = [window.for_encoder_decoder((7, 9)) for window in sliding_windows([text], 8, stride)]
    scored = [window.tokens[-window.scored :].tolist() for window in windows]
    for window, tokens in zip(windows, scored, strict=True):
        assert window.source is not None and len(window.source) >= len(tokens)
        np.testing.assert_array_equal(window.tokens, [7, 9, *tokens])
        assert window.source[-1] + 1 == tokens[0]
    everything = [token for tokens in scored for token in tokens]
    assert len(everything) == len(set(everything))
    if stride <= 4:
        assert everything == text[4:].tolist()


@pytest.mark.parametrize(
    ("window", "stride", "context", "message"),
    [
        (1, 1, None, "must be 2 or more"),
        (9, 4, 8, "2 to the model's context, 8"),
        (8, 9, 8, "stride is 9"),
        (8, 0, None, "stride is 0"),
        (-2, -3, 8, "window is -2.*stride is -3"),
    ],
)
def test_windows_that_make_no_sense(window, stride, context, message):
    with pytest.raises(UsageError, match=message):
        check_window(window, stride, context)
    for lengths in ([], [0], [1, 1]):
        with pytest.raises(UsageError, match="too short"):
            sliding_windows([np.arange(n) for n in lengths], 8)


def test_documents_become_texts_with_their_frame():
    before, behind = np.array([1], np.int32), np.array([2], np.int32)
    documents = [np.array([1, *range(10, 17), 2]), np.array([20, 21])]
    found = framed_pieces(documents, 5, (before, behind))
    assert [piece.tolist() for piece in found] == [[1, 10, 11, 12, 2], [1, 13, 14, 15, 2], [1, 16, 2], [1, 20, 21, 2]]
    none = np.zeros(0, np.int32)
    assert [piece.tolist() for piece in framed_pieces(documents[1:], 1, (none, none))] == [[20], [21]]
