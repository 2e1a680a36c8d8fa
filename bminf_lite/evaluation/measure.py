"""Perplexity and comparison of checkpoints on a text, as a caller names them: folders, a file or texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from ..api import Model, load
from ..errors import UsageError, require_bool, require_function, require_whole
from ..files import expand
from ..placement import is_int8_cache
from .compare import Comparison, check_pair
from .compare import compare as compare_windows
from .corpus import read_texts, truncate_windows, windows_for
from .perplexity import Perplexity, window_losses
from .report import check_report_path, write_report

Text = str | Path | Sequence[str]
"""A file, UTF-8 text or JSONL with a ``text`` per line, by its path; or a list of documents."""

_LONGEST_PATH = 4095
"""The most bytes of a path on Linux."""

Progress = Callable[[int, int, str], None]
"""Called with the parts that are done, the number of parts, and the name of the next one."""


def perplexity(
    model: str | Path | Model,
    text: Text,
    *,
    window: int | None = None,
    stride: int | None = None,
    tokens: int | None = None,
    device: str = "auto",
    memory_limit: int | str | None = None,
    kv_cache: str = "fp16",
    progress: Progress | None = None,
) -> Perplexity:
    """How well a model, a loaded one or a checkpoint's folder, predicts ``text``.

    ``text`` is the path of a file, UTF-8 or JSONL with a ``text`` per line, or a list of texts. It is read in windows
    of ``window`` tokens (by default the model's context, 1,024 at most), one every ``stride`` tokens (half a window).
    Each token is predicted once. With ``tokens`` only the first ones are read.
    ``device``, ``memory_limit`` and ``kv_cache`` are those of :func:`bminf_lite.load`, for a folder. Raises
    ``UsageError`` for an unfit text or window, and what ``load`` raises.
    """
    _check_lengths(window, stride, tokens)
    require_function("progress", progress)
    folder = _folder_of(model)
    windows = windows_for(folder, _texts(text), window, stride)
    if tokens is not None:
        windows = truncate_windows(windows, tokens)
    with _loaded(model, device, memory_limit, kv_cache) as loaded:
        losses = []
        for i, loss in enumerate(window_losses(loaded, windows)):
            losses.append(loss)
            if progress is not None:
                progress(i + 1, len(windows), "")
        return Perplexity.from_losses(np.concatenate(losses))


def compare(
    model: str | Path,
    reference: str | Path,
    text: Text,
    *,
    window: int | None = None,
    stride: int | None = None,
    tokens: int | None = None,
    layers: bool = True,
    report: str | Path | None = None,
    device: str = "auto",
    memory_limit: int | str | None = None,
    kv_cache: str = "fp16",
    progress: Progress | None = None,
) -> Comparison:
    """Compare the checkpoint in the folder ``model`` with the one that it was made from, in ``reference``, on ``text``.

    Both are read a layer at a time. ``text`` and the windows are those of :func:`perplexity`. Without ``layers`` only
    predictions are compared. ``report`` names an HTML file to write plots and a table of all layers into. ``kv_cache``
    is that of the model; the reference's is never int8. Raises ``UsageError`` for models that do not belong together
    and for an unfit text, ``CheckpointError``, ``DeviceError`` and ``OutOfMemory``.
    """
    _check_lengths(window, stride, tokens)
    require_bool("layers", layers)
    require_function("progress", progress)
    int8_cache = is_int8_cache(kv_cache)
    model, reference = expand(model, "model"), expand(reference, "reference")
    target = None if report is None else expand(report, "report")
    if target is not None:
        check_report_path(target)
    texts = _texts(text)
    windows = windows_for(model, texts, window, stride)
    check_pair(model, reference, texts)
    if tokens is not None:
        windows = truncate_windows(windows, tokens)
    result = compare_windows(
        model, reference, windows, device, memory_limit, layers=layers, progress=progress, int8_cache=int8_cache
    )
    if target is not None:
        write_report(target, result, model, reference, Path(text) if isinstance(text, (str, Path)) else Path("text"))
    return result


def _check_lengths(window: int | None, stride: int | None, tokens: int | None) -> None:
    for name, value in (("window", window), ("stride", stride), ("tokens", tokens)):
        if value is not None:
            require_whole(name, value)


def _texts(text: Text) -> list[str]:
    if isinstance(text, str) and ("\n" in text or len(text) > _LONGEST_PATH):
        raise UsageError("a text that is one string must be the path of a file; put the text itself into a list")
    if isinstance(text, (str, Path)):
        return read_texts(expand(text, "text"))
    if not isinstance(text, Sequence) or not text or not all(isinstance(part, str) and part.strip() for part in text):
        raise UsageError("the text must be the path of a file, or a list of texts, none of them empty")
    return list(text)


def _folder_of(model: str | Path | Model) -> Path:
    if not isinstance(model, Model):
        return expand(model, "model")
    if model.folder is None:
        raise UsageError("this model was made without a folder, which the text's tokenizer is read from")
    return model.folder


@contextmanager
def _loaded(model: str | Path | Model, device: str, memory_limit: int | str | None, kv_cache: str) -> Iterator[Model]:
    if isinstance(model, Model):
        yield model
        return
    with closing(load(model, device=device, memory_limit=memory_limit, kv_cache=kv_cache)) as loaded:
        yield loaded
