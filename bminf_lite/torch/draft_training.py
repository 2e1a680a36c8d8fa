"""Trains an EAGLE-3 head (:mod:`.draft_head`) on texts that its model has written.

The labels are the model's most likely next tokens with their probabilities, behind the prompts, and a later step
counts less. The features are those that the model has computed for the texts, so it is run once for each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import dlpack

from ..models import _eagle3 as eagle3
from ..models._eagle3 import Eagle3Config
from .draft_head import Head

STEP_WEIGHT = 0.8
"""The weight of the loss of a step relative to the one before."""
WARM_UP = 0.04
"""The part of training in which the rate grows from 0."""
NUM_LABELS = 16
"""Next tokens whose probabilities are learnt."""
LOGITS = 2**27
"""The most logits that are computed at a time."""
SORTED = 16
"""Batches whose texts are sorted by their lengths, so that they are padded little."""
SAMPLE = 8192
"""About the most tokens of which sizes of features are taken."""
ABSENT = -1
"""The number of a token that the head lacks."""
READ = ("tokens", "streams", "labels", "probabilities", "embeddings")
"""The tensors of :class:`TrainingTexts`."""


@dataclass(frozen=True)
class TrainingTexts:
    """What a model has computed for texts of ``N`` tokens in all, one behind another.

    ``tokens`` are int64 ``[N]``, ``streams`` fp16 ``[N, layers * features]`` its residual stream before each layer that
    the head reads, ``labels`` int32 and ``probabilities`` fp16 ``[N, K]`` its most likely next tokens, the first one
    first. Text ``i`` lies at ``starts[i]`` to ``starts[i + 1]``, and begins with a prompt of ``prompts[i]`` tokens.
    ``embeddings`` fp16 ``[vocab, features]`` has rows for the tokens that occur.
    """

    tokens: torch.Tensor
    streams: torch.Tensor
    labels: torch.Tensor
    probabilities: torch.Tensor
    starts: np.ndarray
    prompts: np.ndarray
    embeddings: torch.Tensor

    @classmethod
    def empty(
        cls, lengths: Sequence[int], prompts: Sequence[int], width: int, features: int, vocab: int
    ) -> TrainingTexts:
        """Room for texts of these lengths, whose streams have ``width`` values a token."""
        total = sum(lengths)
        return cls(
            torch.zeros(total, dtype=torch.int64),
            torch.empty(total, width, dtype=torch.float16),
            torch.empty(total, NUM_LABELS, dtype=torch.int32),
            torch.empty(total, NUM_LABELS, dtype=torch.float16),
            np.cumsum([0, *lengths]),
            np.asarray(prompts, np.int64),
            torch.zeros(vocab, features, dtype=torch.float16),
        )

    @property
    def learnt(self) -> torch.Tensor:
        """Which tokens a head guesses behind, bool ``[N]``: those of completions."""
        found = torch.ones(len(self.tokens), dtype=torch.bool)
        for start, count in zip(self.starts, self.prompts, strict=False):
            found[start : start + count] = False
        return found

    @property
    def nbytes(self) -> int:
        """The bytes of what training reads."""
        return sum(getattr(self, name).nbytes for name in READ)

    def to(self, device: str) -> TrainingTexts:
        """The same on a device of torch."""
        return replace(self, **{name: getattr(self, name).to(device) for name in READ})


@dataclass(frozen=True)
class TrainingOptions:
    """``epochs`` over all texts, of ``batch`` tokens at a time and of at most ``seconds``, with AdamW.

    The rate grows to ``rate`` and then falls to 0 as a cosine. A head learns to guess ``steps`` tokens one after
    another.
    """

    epochs: int = 10
    batch: int = 4096
    rate: float = 1e-3
    steps: int = 5
    seconds: float = math.inf
    seed: int = 0


@dataclass(frozen=True)
class Progress:
    """What an epoch, counted from 0, has brought: the mean ``loss``, and the part of each step's guesses that are the
    model's most likely token.
    """

    epoch: int
    loss: float
    right: Sequence[float]
    tokens: int
    seconds: float


def torch_device(device: str) -> str:
    """Where torch computes for a model on ``device``, which is that of :func:`bminf_lite.load`."""
    if device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return device if device.startswith("cuda:") else "cuda"


def on_host(x: Any, turn_back: np.ndarray | None = None) -> torch.Tensor:
    """Rows of a stream, fp32 ``[T, features]`` of a backend, as fp16 on the host.

    ``turn_back`` fp32 ``[features, features]`` undoes a rotation.
    """
    found = dlpack.from_dlpack(x)
    if turn_back is not None:
        found = found @ torch.from_numpy(turn_back).to(found.device)
    return found.to(torch.float16).cpu()


def likely_tokens(logits: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely tokens int32 and their probabilities fp16, ``[T, K]`` on the host, of a backend's logits fp32
    ``[T, vocab]``.
    """
    found = dlpack.from_dlpack(logits)
    largest, tokens = found.topk(NUM_LABELS)
    probabilities = (largest - found.logsumexp(1, keepdim=True)).exp()
    return tokens.to(torch.int32).cpu(), probabilities.to(torch.float16).cpu()


def draft_tokens(labels: np.ndarray, count: int) -> np.ndarray:
    """The ``count`` most frequent tokens of ``labels``, int64 in ascending order; less frequent ones fill it up."""
    frequency = np.bincount(labels.reshape(-1), minlength=count)
    return np.sort(np.argsort(-frequency, kind="stable")[:count])


def train(
    texts: TrainingTexts,
    config: Eagle3Config,
    tokens: np.ndarray,
    options: TrainingOptions,
    device: str = "cpu",
    report: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, np.ndarray]:
    """Train a head whose draft tokens are the model's ``tokens``, int64 ``[draft_vocab_size]``; returns its tensors.

    ``report`` is called behind each epoch. On a GPU products are computed in bf16, and sums in fp32.
    """
    torch.manual_seed(options.seed)
    head = Head(config, options.seed, stream_scales(texts)).to(device)
    number_of = torch.full((config.vocab_size,), ABSENT, dtype=torch.int64)
    number_of[torch.from_numpy(tokens)] = torch.arange(len(tokens))
    batches = Batches(texts, number_of, device)
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=device != "cpu"
    )
    random = np.random.default_rng(options.seed)
    begin, done, total = time.monotonic(), 0, options.epochs * len(batches.order(random, options.batch))
    for epoch in range(options.epochs):
        counts = torch.zeros(2, options.steps, device=device)
        losses, seen, seconds = [], 0, 0.0
        for rows in batches.order(random, options.batch):
            seconds = time.monotonic() - begin
            progress = max(done / total, seconds / options.seconds)
            if progress >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = options.rate * schedule(progress)
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu"):
                loss, right = _loss(head, batches.read(rows, options.steps))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
            counts += right
            seen += int(batches.lengths[rows].sum())
            done += 1
        if losses:
            mean, rights = float(torch.stack(losses).mean()), (counts[0] / counts[1]).tolist()
            report(Progress(epoch, mean, rights, seen, time.monotonic() - begin))
        if seconds >= options.seconds:
            break
    return head.tensors()


def stream_scales(texts: TrainingTexts) -> torch.Tensor:
    """The median size of each feature of the streams, fp32 ``[layers * features]``.

    Of models such as LLaMA, the first token of a text has features that are 1,000 times as large as those of others. A
    median does not see them.
    """
    sample = texts.streams[:: max(len(texts.tokens) // SAMPLE, 1)].float().abs()
    found = sample.median(0).values
    return found.clamp(min=max(float(found.median()) / 100, 1e-6))


def schedule(progress: float) -> float:
    """The rate, of the largest, when this part of training is done."""
    if progress < WARM_UP:
        return progress / WARM_UP + 1e-3
    return 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))


class Batch(NamedTuple):
    """Some texts, whose rows hold any values behind their ends.

    - ``embedded`` fp32 and ``streams`` fp16 ``[B, T, …]``.
    - ``labels`` int64 ``[B, T, K]`` are the labels' numbers in the head, and ``weights`` fp32 their shares. These are 0
      for labels that the head lacks, and all of them where it lacks the most likely one.
    - ``guessed``: for each step the tokens of ``[B * T]`` that a chain can have reached. It begins behind the prompt.
    """

    embedded: torch.Tensor
    streams: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    guessed: Sequence[torch.Tensor]


class Batches:
    """Texts, of which some at a time come to ``device``, or lie there if they take less than half of what is free."""

    def __init__(self, texts: TrainingTexts, number_of: torch.Tensor, device: str):
        if device != "cpu" and texts.nbytes < torch.cuda.mem_get_info(number_of.to(device).device)[0] // 2:
            texts, number_of = texts.to(device), number_of.to(device)
        self.texts, self.device, self.number_of = texts, device, number_of
        self.place = texts.tokens.device
        self.lengths = np.diff(texts.starts)

    def order(self, random: np.random.Generator, count: int) -> list[np.ndarray]:
        """The numbers of each batch's texts, of about ``count`` tokens with padding, in a random order."""
        shuffled = random.permutation(len(self.lengths))
        about = max(round(count / self.lengths.mean()), 1) * SORTED
        found: list[list[int]] = []
        for part in range(0, len(shuffled), about):
            own = shuffled[part : part + about]
            batch: list[int] = []
            for text in own[np.argsort(-self.lengths[own], kind="stable")]:
                if batch and (len(batch) + 1) * self.lengths[batch[0]] > count:
                    found.append(batch)
                    batch = []
                batch.append(int(text))
            found.append(batch)
        return [np.array(found[i]) for i in random.permutation(len(found))]

    def read(self, rows: np.ndarray, steps: int) -> Batch:
        """The texts ``rows``, for as many ``steps``."""
        texts, lengths = self.texts, self.lengths[rows, None]
        places = np.arange(int(lengths.max()))[None]
        valid, prompts = places < lengths, texts.prompts[rows, None]
        at = self._sent(np.where(valid, texts.starts[rows, None] + places, 0), self.place)
        guessed = [valid & (places >= prompts + step) & (places > step) for step in range(steps)]
        labels = self.number_of[texts.labels[at].long()]
        weights = texts.probabilities[at].float() * (labels >= 0)
        weights = torch.where(labels[..., :1] >= 0, weights / weights.sum(-1, keepdim=True).clamp(min=1e-9), 0)
        rest = [self._sent(np.flatnonzero(own), self.device) for own in guessed]
        return Batch(
            texts.embeddings[texts.tokens[at]].to(self.device).float(),
            texts.streams[at].to(self.device),
            labels.clamp(min=0).to(self.device),
            weights.to(self.device),
            rest,
        )

    def _sent(self, x: np.ndarray, device: Any) -> torch.Tensor:
        """Integers on a device, without waiting for it."""
        found = torch.from_numpy(np.ascontiguousarray(x))
        return found.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else found


def _loss(head: Head, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted mean of the steps' cross-entropies, and how many guesses of each are right, and are made."""
    matrix, labels, weights = head.weight(eagle3.HEAD), batch.labels.flatten(0, 1), batch.weights.flatten(0, 1)
    total, counts, steps = torch.zeros((), device=matrix.device), [], len(batch.guessed)
    hidden = head.hidden(batch.embedded, batch.streams, steps)
    for step, (x, at) in enumerate(zip(hidden, batch.guessed, strict=True)):
        own = x.flatten(0, 1)[at], matrix, labels[at], weights[at]
        loss, count = SoftCrossEntropy.apply(*own)  # type: ignore[no-untyped-call]
        total = total + STEP_WEIGHT**step * loss
        counts.append(count)
    return total / sum(STEP_WEIGHT**step for step in range(steps)), torch.stack(counts, dim=1)


class SoftCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of ``x @ matrix.T``, whose gradients are computed at once, some rows at a time.

    So no more than :data:`LOGITS` logits lie in memory. The second result, int64 ``[2]``, counts the rows whose largest
    logit is that of their first label, and all rows. Those without weights are left out.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, matrix: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``x [n, features]``, ``matrix [vocab, features]``, ``labels`` and ``weights`` ``[n, K]``.

        The weights of a row sum to 1, or to 0.
        """
        dtype = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else x.dtype
        cast, of_matrix, of_x = matrix.to(dtype), torch.zeros_like(matrix), torch.empty_like(x)
        known = weights.sum(1) > 0
        shares = weights.float() / known.sum().clamp(min=1)
        loss, right = torch.zeros((), device=x.device), torch.zeros((), device=x.device, dtype=torch.int64)
        count = max(LOGITS // len(matrix), 1)
        with torch.autocast(x.device.type, enabled=False):
            for start in range(0, len(x), count):
                some = slice(start, start + count)
                rows, own, share = x[some].to(dtype), labels[some], shares[some]
                logits = (rows @ cast.T).float()
                right += ((logits.argmax(1) == own[:, 0]) & known[some]).sum()
                logits = logits.log_softmax(1)
                loss -= (share * logits.gather(1, own)).sum()
                gradient = logits.exp_().mul_(share.sum(1, keepdim=True))
                gradient = gradient.scatter_add_(1, own, -share).to(dtype)
                of_x[some] = gradient @ cast
                of_matrix += gradient.T @ rows
        counts = torch.stack([right, known.sum()])
        ctx.save_for_backward(of_x, of_matrix)
        ctx.mark_non_differentiable(counts)
        return loss, counts

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> Any:  # type: ignore[override]
        """The gradients of ``x`` and ``matrix``."""
        of_x, of_matrix = ctx.saved_tensors
        return of_x * gradient, of_matrix * gradient, None, None
