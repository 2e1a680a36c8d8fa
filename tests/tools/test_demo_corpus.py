"""The demo model's corpus is prose, and nothing of the held-out text is in the training text."""

from __future__ import annotations

import demo_corpus as corpus
import pytest


def test_markup_goes_and_lines_are_joined():
    text = """Call :meth:`Queue.put <queue.Queue.put>` with
    ``block`` false::

        queue.put(item, block=False)
        x = queue.get()

    - The first item is always
      kept in order.
    - The second one is not.

    >>> Queue().get()
    """
    assert list(corpus.paragraphs(text)) == [
        "Call Queue.put with block false:",
        "The first item is always kept in order.",
        "The second one is not.",
    ]


@pytest.mark.parametrize("text", ["", "x = 1", "a | b | c", "=====", "f(a[0], b[1], c[2])", "Çok güzel bir şey."])
def test_what_is_not_english_prose_goes(text):
    assert list(corpus.paragraphs(text)) == []


def test_splits_share_no_subject_and_no_long_run_of_words():
    def words(subject: int, count: int) -> str:
        return " ".join(f"w{subject}x{i}" for i in range(count))

    found = [corpus.Document(f"s{n}", (words(n, 300),)) for n in range(400)]
    splits = corpus.split(found)
    subjects = {name: {d.subject for d in documents} for name, documents in splits.items()}
    assert sum(map(len, subjects.values())) == len(found)
    for name, size in corpus.SPLIT_BYTES.items():
        assert size <= sum(len(d.text) for d in splits[name]) <= size + corpus.LARGEST_SUBJECT_BYTES

    copied = splits["heldout"][0].paragraphs[0]
    copy = corpus.Document(splits["train"][0].subject, ("Before it. " + copied, "Another paragraph."))
    train = corpus.split([*found, copy])["train"]
    assert all(copied not in d.text for d in train)
    assert any("Another paragraph." in d.paragraphs for d in train)


def test_tests_are_only_trained_on():
    found = [corpus.Document(f"s{n}", (f"word{n} " * 300,), supporting=n % 2 == 1) for n in range(600)]
    splits = corpus.split(found)
    assert not any(d.supporting for d in splits["heldout"] + splits["validation"])
