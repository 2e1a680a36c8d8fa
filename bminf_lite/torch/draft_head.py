"""Trains an EAGLE-3 head (:mod:`bminf_lite.models._eagle3`) on texts that its model has written.

A head that guesses several tokens reads its own output in place of the model's features. So it is trained as it is
used (*training-time test* of https://arxiv.org/abs/2503.01840): for each token of a text, step 0 reads the model's
features, and step ``j`` what step ``j - 1`` has computed for the token before. In step ``j`` a token attends to the
step-0 entries of tokens at least ``j`` before it, and to the entries of steps 1 to ``j`` of the last ones. The labels
are the model's most likely next tokens, and a later step counts less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from ..models import _eagle3 as eagle3
from ..models._eagle3 import Eagle3Config

STEP_WEIGHT = 0.8
"""The weight of the loss of a step relative to the one before."""
IGNORED = -100


@dataclass(frozen=True)
class TrainingText:
    """What a model has computed for one text of ``T`` tokens.

    ``embedded`` fp32 ``[T, features]`` are the rows of its table, ``streams`` fp16 ``[layers, T, features]`` its
    residual stream before the layers that the head reads, and ``labels`` int64 ``[T]`` its most likely next tokens.
    """

    embedded: np.ndarray
    streams: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class TrainingOptions:
    """``epochs`` over all texts, ``batch`` texts at a time, with AdamW at ``rate``, which falls to 0 as a cosine.

    A head learns to guess ``steps`` tokens one after another.
    """

    epochs: int = 10
    batch: int = 8
    rate: float = 1e-3
    steps: int = 4
    seed: int = 0


def torch_device(device: str) -> str:
    """Where torch computes for a model on ``device``, which is that of :func:`bminf_lite.load`."""
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def draft_tokens(labels: Sequence[np.ndarray], count: int) -> np.ndarray:
    """The ``count`` most frequent tokens of ``labels``, int64 in ascending order; less frequent ones fill it up."""
    most = int(max(int(own.max()) for own in labels)) + 1
    frequency = np.bincount(np.concatenate(labels), minlength=max(most, count))
    return np.sort(np.argsort(-frequency, kind="stable")[:count])


class Head(torch.nn.Module):
    """A head whose parameters are the tensors of its file."""

    def __init__(self, config: Eagle3Config, seed: int):
        super().__init__()
        self.config = config
        self.values = torch.nn.ParameterDict()
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in eagle3.spec(config).parameters.items():
            shape = parameter.shape
            values = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator)
            scale = 1.0 if len(shape) == 1 else 1 / math.sqrt(shape[1])
            self.values[_key(name)] = torch.nn.Parameter(values * scale)
        rotary = config.rotary
        assert rotary is not None
        assert rotary.size == config.head_dim, "heads of the LLaMA family are rotated as a whole"
        self.frequencies = torch.nn.Buffer(torch.from_numpy(np.asarray(rotary.frequencies, np.float32)))

    def weight(self, name: str) -> torch.Tensor:
        """The tensor ``{name}.weight``."""
        return self.values[_key(f"{name}.weight")]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """An RMSNorm over the last axis."""
        return functional.rms_norm(x, x.shape[-1:], self.weight(name), self.config.norm_eps)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Queries or keys ``[B, heads, T, size]`` at their positions."""
        angles = torch.arange(x.shape[2], device=x.device)[:, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def features(self, streams: torch.Tensor) -> torch.Tensor:
        """``fc`` of the token before: ``[B, layers, T, features]`` -> ``[B, T, features]``."""
        joined = torch.cat(streams.unbind(1), dim=-1)
        return before(joined @ self.weight(eagle3.FC).T, 1)

    def forward(self, embedded: torch.Tensor, streams: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """The logits of each step, ``[B, T, draft_vocab_size]``."""
        config, found = self.config, []
        features, normed_tokens = self.features(streams), self.norm(embedded, eagle3.INPUT_NORM)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for _ in range(steps):
            normed = self.norm(features, eagle3.FEATURE_NORM)
            x = torch.cat([normed_tokens, normed], dim=-1)
            q, k, v = (self._heads(x @ self.weight(name).T) for name in eagle3.QKV)
            group = config.heads // config.kv_heads
            keys.append(self.rotated(k).repeat_interleave(group, dim=1))
            values.append(v.repeat_interleave(group, dim=1))
            mixed = attend(self.rotated(q), keys, values)
            mixed = mixed.transpose(1, 2).flatten(2)
            hidden = (normed if config.norm_before_residual else features) + mixed @ self.weight(eagle3.OUT).T
            y = self.norm(hidden, eagle3.MLP_NORM)
            gate, up, down = (self.weight(f"{eagle3.LAYER}.mlp.{name}_proj") for name in ("gate", "up", "down"))
            residual = hidden + (functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
            found.append(self.norm(residual, eagle3.NORM) @ self.weight(eagle3.HEAD).T)
            features = before(residual, 1)
        return found

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def tensors(self) -> dict[str, np.ndarray]:
        """The tensors of the file, fp32, by their names there."""
        names = eagle3.spec(self.config).parameters
        return {name: self.values[_key(name)].detach().cpu().numpy() for name in names}


def _key(name: str) -> str:
    """The key of a tensor in a :class:`torch.nn.ParameterDict`, which may have no dot."""
    return name.replace(".", "/")


def before(x: torch.Tensor, count: int) -> torch.Tensor:
    """Rows of the tokens ``count`` before, 0 where there are none, along the last axis but one."""
    return functional.pad(x, (0, 0, count, 0))[..., : x.shape[-2], :]


def attend(q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attention in the last of several steps, ``[B, heads, T, size]``; keys and values are those of every step."""
    step, tokens = len(keys) - 1, q.shape[2]
    scale = 1 / math.sqrt(q.shape[-1])
    places = torch.arange(tokens, device=q.device)
    hidden = places[None, :] > places[:, None] - step
    scores = [(q @ keys[0].transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf)]
    own = []
    for back in range(step):  # the token ``back`` before, in the step in which the chain has reached it
        key, value = (before(x[step - back], back) for x in (keys, values))
        score = (q * key).sum(-1, keepdim=True) * scale
        scores.append(score.masked_fill((places < back)[:, None], -torch.inf))
        own.append(value)
    weights = torch.cat(scores, dim=-1).nan_to_num(neginf=-1e30).softmax(-1)
    mixed = weights[..., :tokens] @ values[0]
    for place, value in enumerate(own):
        mixed = mixed + weights[..., tokens + place : tokens + place + 1] * value
    return mixed


def train(
    texts: Sequence[TrainingText],
    config: Eagle3Config,
    tokens: np.ndarray,
    options: TrainingOptions,
    device: str = "cpu",
    report: Callable[[int, float], None] = lambda epoch, loss: None,
) -> dict[str, np.ndarray]:
    """Train a head whose draft tokens are the model's ``tokens``, int64 ``[draft_vocab_size]``; returns its tensors.

    ``report`` is called behind each epoch with its number and the mean loss.
    """
    torch.manual_seed(options.seed)
    head = Head(config, options.seed).to(device)
    number_of = np.full(config.vocab_size, IGNORED, np.int64)
    number_of[tokens] = np.arange(len(tokens))
    optimizer = torch.optim.AdamW(head.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0)
    num_batches = -(-len(texts) // options.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * num_batches)
    random = np.random.default_rng(options.seed)
    for epoch in range(options.epochs):
        losses = []
        for some in np.array_split(random.permutation(len(texts)), num_batches):
            loss = _loss(head, [texts[i] for i in some], number_of, options.steps, device)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        report(epoch, float(np.mean(losses)))
    return head.tensors()


def _loss(head: Head, texts: Sequence[TrainingText], number_of: np.ndarray, steps: int, device: str) -> torch.Tensor:
    """The weighted mean over the steps of the cross-entropy of labels that are draft tokens."""
    length = max(len(text.labels) for text in texts)
    embedded = np.stack([_padded(text.embedded, length) for text in texts])
    streams = np.stack([_padded(text.streams, length) for text in texts]).astype(np.float32)
    labels = np.full((len(texts), length), IGNORED, np.int64)
    for row, text in zip(labels, texts, strict=True):
        row[: len(text.labels)] = number_of[text.labels]
    wanted = torch.from_numpy(labels).to(device)
    logits = head(torch.from_numpy(embedded).to(device), torch.from_numpy(streams).to(device), steps)
    total = torch.zeros((), device=device)
    for step, own in enumerate(logits):
        shown = wanted.clone()
        shown[:, : step + 1] = IGNORED  # the chain begins behind the first token
        loss = functional.cross_entropy(own.flatten(0, 1), shown.flatten(), ignore_index=IGNORED)
        total = total + STEP_WEIGHT**step * loss.nan_to_num()
    return total / sum(STEP_WEIGHT**step for step in range(steps))


def _padded(x: np.ndarray, length: int) -> np.ndarray:
    widths = [(0, 0)] * x.ndim
    widths[-2] = (0, length - x.shape[-2])
    return np.pad(x, widths)
