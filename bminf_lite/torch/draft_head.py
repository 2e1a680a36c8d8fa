"""An EAGLE-3 head (:mod:`bminf_lite.models._eagle3`) as a module of PyTorch.

A head that guesses several tokens reads its own output in place of the model's features. So it is trained as it is
used (*training-time test* of https://arxiv.org/abs/2503.01840): for each token of a text, step 0 reads the model's
features, and step ``j`` what step ``j - 1`` has computed for the token before. In step ``j`` a token attends to the
step-0 entries of tokens at least ``j`` before it, and to the entries of steps 1 to ``j`` of the last ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn import functional

from ..models import _eagle3 as eagle3
from ..models._eagle3 import Eagle3Config


class Head(torch.nn.Module):
    """A head whose parameters are the tensors of its file, but for ``fc``.

    The model's streams are divided by ``stream_scales`` fp32 ``[layers * features]``, and the file's ``fc`` has the
    quotients: streams grow from layer to layer, and a few features may be 30 times as large as the others, so that they
    would drown all else for long.
    """

    def __init__(self, config: Eagle3Config, seed: int, stream_scales: torch.Tensor | None = None):
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
        size = config.num_features * config.target_hidden_size
        self.factors = torch.nn.Buffer(torch.ones(size) if stream_scales is None else 1 / stream_scales)

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
        """``fc`` of the token before, fp32: ``[B, T, layers * features]`` -> ``[B, T, features]``."""
        return before(((streams * self.factors) @ self.weight(eagle3.FC).T).float(), 1)

    def hidden(self, embedded: torch.Tensor, streams: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """What ``lm_head`` reads in each step: ``[B, T, features]`` of tokens' embeddings, and of streams as above."""
        config = self.config
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
            yield self.norm(residual, eagle3.NORM)
            features = before(residual, 1)

    def forward(self, embedded: torch.Tensor, streams: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """The logits of each step, ``[B, T, draft_vocab_size]``."""
        return [x @ self.weight(eagle3.HEAD).T for x in self.hidden(embedded, streams, steps)]

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def tensors(self) -> dict[str, np.ndarray]:
        """The tensors of the file, fp32, by their names there."""
        names = eagle3.spec(self.config).parameters
        found = {name: self.values[_key(name)].detach() for name in names}
        found[f"{eagle3.FC}.weight"] = found[f"{eagle3.FC}.weight"] * self.factors
        return {name: values.cpu().numpy() for name, values in found.items()}


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
