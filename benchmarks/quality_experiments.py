"""What int8 costs a real model, by fake quantization of every product: the experiments of docs/quantization.md.

    python benchmarks/quality_experiments.py MODEL.gguf TEXT... [--tokens N] [--only PATTERN]

Each matrix product of a model of transformers is replaced by one whose weight and input are rounded as int8 would be,
in fp32 on the CPU. What is rounded, in which groups of columns and after which rotation is set for each kind of product
(``q``, ``k``, ``v``, ``o``, ``gate``, ``up``, ``down``, ``head``) by a :class:`Rounding`. The divergence is
``sum p log(p / q)`` of the rounded model's probabilities ``q`` from the float model's ``p``, its mean over tokens.

The texts are read in separate windows of 512 tokens; ``--tokens`` are scored of each text. The float model's
logarithms of probabilities are kept: 4 bytes for each token and word of the vocabulary.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bminf_lite.backend.rotation import rotated
from bminf_lite.checkpoint.offline_rotation import stream_rotation
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.text.checkpoint_files import load_tokenizer

WINDOW = 512
HEAD_ROWS = 64
KINDS = ("q", "k", "v", "o", "gate", "up", "down", "head")
STREAM_READERS = ("q", "k", "v", "gate", "up", "head")
STREAM_WRITERS = ("o", "down")


@dataclass(frozen=True)
class Rounding:
    """How a product is rounded.

    ``rotation`` is the largest block of a Hadamard transform of the input and of the weight's rows; 1 is none. It is
    lowered to a power of two that divides the width. ``inputs`` and ``weights`` say in what groups of columns each is
    rounded: ``None`` for not at all, 0 for one scale per row, else the size of a group. ``stream`` is the rotation that
    is folded into the weights (R1): the gain of the norm moves into a reader's weight, and both are multiplied by one
    random orthogonal matrix; a writer's rows are. ``heads`` is R2: outputs of ``v`` and inputs of ``o``, head by head.
    """

    rotation: int = 1
    inputs: int | None = 0
    weights: int | None = 0
    stream: bool = False
    heads: bool = False


FLOAT = Rounding(inputs=None, weights=None)


@functools.cache
def hadamard(size: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix over the root of its size, fp32 ``[size, size]``."""
    return torch.from_numpy(rotated(np.eye(size, dtype=np.float32), size))


def block_rotated(x: torch.Tensor, limit: int) -> torch.Tensor:
    """Blocks of the last axis times a Hadamard matrix; the largest block up to ``limit`` that divides the width."""
    features = x.shape[-1]
    block = min(limit, features & -features)
    if block == 1:
        return x
    inner = 1 << (block.bit_length() // 2)  # the matrix is the Kronecker product of two smaller ones
    parts = x.reshape(-1, block // inner, inner) @ hadamard(inner)
    return (hadamard(block // inner) @ parts).reshape(x.shape)


def rounded(x: torch.Tensor, group: int | None, fp16_scale: bool = False) -> torch.Tensor:
    """``x`` as int8 codes times scales hold it, with a scale for each ``group`` columns of a row; 0 is the row.

    A group that does not divide the row is lowered to the largest power of two that does.
    """
    if group is None:
        return x
    groups = x if group == 0 else x.unflatten(-1, (-1, min(group, x.shape[-1] & -x.shape[-1])))
    scale = torch.maximum(groups.amax(-1, keepdim=True), -groups.amin(-1, keepdim=True)) / 127
    if fp16_scale:
        scale = scale.half().float()
    scale.masked_fill_(scale == 0, 1)
    return (groups / scale).round_().clamp_(-127, 127).mul_(scale).reshape(x.shape)


class RoundedLinear(torch.nn.Module):
    """A linear layer whose product :meth:`prepare` rounds."""

    def __init__(self, linear: torch.nn.Linear, kind: str, gain: torch.Tensor | None, head_dim: int):
        super().__init__()
        self.weight, self.bias = linear.weight.data, None if linear.bias is None else linear.bias.data
        self.kind, self.gain, self.head_dim = kind, gain, head_dim
        self.rounding = FLOAT
        self.prepared = self.weight
        self.stream: Callable[[torch.Tensor], torch.Tensor] | None = None

    def prepare(self, rounding: Rounding) -> None:
        same, self.rounding = replace(rounding, inputs=self.rounding.inputs) == self.rounding, rounding
        if same:
            return
        if rounding == FLOAT:
            self.prepared = self.weight
            return
        turn_output = self._output_turn(rounding)
        weight = self._turned(self.weight, rounding, is_weight=True)
        if turn_output is not None:
            weight = turn_output(weight.T.contiguous()).T
        weight = rounded(weight, rounding.weights, fp16_scale=True)
        if turn_output is not None:  # the stream stays as it is: the output is turned back, exactly but for fp32
            weight = self._output_turn_back(rounding)(weight.T.contiguous()).T.contiguous()
        self.prepared = weight

    def _output_turn(self, rounding: Rounding) -> Callable[[torch.Tensor], torch.Tensor] | None:
        if rounding.stream and self.kind in STREAM_WRITERS:
            return orthogonal(self.weight.shape[0])[0]
        if rounding.heads and self.kind == "v":
            return lambda x: block_rotated(x, self.head_dim & -self.head_dim)
        return None

    def _output_turn_back(self, rounding: Rounding) -> Callable[[torch.Tensor], torch.Tensor]:
        if rounding.stream and self.kind in STREAM_WRITERS:
            return orthogonal(self.weight.shape[0])[1]
        return lambda x: block_rotated(x, self.head_dim & -self.head_dim)

    def _turned(self, x: torch.Tensor, rounding: Rounding, is_weight: bool) -> torch.Tensor:
        """An input, or the weight's rows, after the rotations of inputs."""
        if rounding.stream and self.kind in STREAM_READERS:
            assert self.gain is not None
            x = orthogonal(x.shape[-1])[0](x * self.gain if is_weight else x / self.gain)
        if rounding.heads and self.kind == "o":
            x = block_rotated(x, self.head_dim & -self.head_dim)
        return block_rotated(x, rounding.rotation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rounding != FLOAT:
            x = rounded(self._turned(x, self.rounding, is_weight=False), self.rounding.inputs)
        return torch.nn.functional.linear(x, self.prepared, self.bias)


_ORTHOGONAL: dict[int, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {}


def orthogonal(features: int) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """Multiplication by the matrix of the stream that a migration folds in, and by its inverse."""
    if features not in _ORTHOGONAL:
        matrix = torch.from_numpy(stream_rotation(features)(np.eye(features, dtype=np.float32)))
        _ORTHOGONAL[features] = (lambda x: x @ matrix), (lambda x: x @ matrix.T)
    return _ORTHOGONAL[features]


@dataclass
class Model:
    """A float model with replaceable products; ``expected`` are the float model's ``log p``, fp32 ``[n, vocab]``.

    ``has_stream``: its residual stream can be rotated in the weights.
    """

    network: torch.nn.Module
    linears: Sequence[RoundedLinear]
    head: RoundedLinear
    windows: Sequence[torch.Tensor]
    has_stream: bool
    expected: list[torch.Tensor] = field(default_factory=list)

    @torch.inference_mode()
    def log_probabilities(self) -> Iterator[torch.Tensor]:
        """``log p`` of the tokens that follow, for a few rows at a time."""
        for window in self.windows:
            hidden = self.network.model(window[None]).last_hidden_state[0][:-1]
            yield from (self.head(rows).log_softmax(-1) for rows in hidden.split(HEAD_ROWS))

    @torch.inference_mode()
    def measure(self, setting: Mapping[str, Rounding]) -> tuple[float, float]:
        """The divergence, and the ratio of the perplexities, with a rounding for each kind of product."""
        for linear in self.linears:
            linear.prepare(setting.get(linear.kind, FLOAT))
        self.head.prepare(setting.get("head", FLOAT))
        targets = torch.cat([window[1:] for window in self.windows])
        divergences, losses, done = [], [], 0
        for p, q in zip(self.expected, self.log_probabilities(), strict=True):
            divergences.append((p.exp() * (p - q)).sum(-1))
            target = targets[done : (done := done + len(p)), None]
            losses.append((p.gather(1, target) - q.gather(1, target))[:, 0])
        return torch.cat(divergences).double().mean().item(), torch.cat(losses).double().mean().exp().item()


def kind_of(name: str) -> str:
    return name.rpartition(".")[2].removesuffix("_proj").replace("lm_head", "head")


def load(path: Path, texts: Sequence[Path], tokens: int) -> Model:
    network = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with open_model(path) as opened:
        tokenizer = load_tokenizer(path, opened.config.vocab_size)
    windows = []
    for text in texts:
        ids = torch.tensor(tokenizer.encode(text.read_text(encoding="utf-8"))[: tokens + tokens // WINDOW])
        windows += list(ids.split(WINDOW))
    config, offset = network.config, 1.0 if "gemma" in network.config.model_type else 0.0
    linears = []
    for layer in network.model.layers:
        mlp_norm = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
        for part, norm in ((layer.self_attn, layer.input_layernorm), (layer.mlp, mlp_norm)):
            for name, child in list(part.named_children()):
                if isinstance(child, torch.nn.Linear):
                    gain = norm.weight.data + offset if kind_of(name) in STREAM_READERS else None
                    linears.append(RoundedLinear(child, kind_of(name), gain, config.head_dim))
                    setattr(part, name, linears[-1])
    head = RoundedLinear(network.lm_head, "head", network.model.norm.weight.data + offset, 0)
    has_stream = not hasattr(network.model.layers[0], "post_feedforward_layernorm")
    model = Model(network, linears, head, windows, has_stream)
    model.expected = list(model.log_probabilities())
    return model


def everywhere(rounding: Rounding, **others: Rounding) -> dict[str, Rounding]:
    """The same rounding for every kind of product but those in ``others``."""
    return {kind: others.get(kind, rounding) for kind in KINDS}


def experiments() -> dict[str, dict[str, Rounding]]:
    """All experiments by name."""
    plain, turned, w8a16 = Rounding(), Rounding(rotation=1024), Rounding(inputs=None)
    stream, heads = Rounding(stream=True), Rounding(stream=True, heads=True)
    found = {
        "w8a8": everywhere(plain),
        "all rotated": everywhere(turned),
        "all rotated, blocks of 256": everywhere(Rounding(256)),
        "all rotated, blocks of 64": everywhere(Rounding(64)),
        "all rotated, inputs alone": everywhere(replace(turned, weights=None)),
        "all rotated, weights alone": everywhere(replace(turned, inputs=None)),
        "offline: stream and heads, down online": everywhere(
            stream, v=heads, o=heads, down=Rounding(1024, stream=True)
        ),
        "offline: heads, others online": everywhere(turned, v=Rounding(1024, heads=True), o=Rounding(heads=True)),
        "all rotated but o": everywhere(turned, o=plain),
        "all rotated, head w8a16": everywhere(turned, head=w8a16),
        "all rotated, head w8a16 rotated": everywhere(turned, head=replace(turned, inputs=None)),
        "all rotated, head float": everywhere(turned, head=FLOAT),
        "w8a16": everywhere(w8a16),
    }
    for size in (128, 64, 32):
        found[f"all rotated, weights in groups of {size}"] = everywhere(replace(turned, weights=size))
        found[f"all rotated, inputs in groups of {size}"] = everywhere(replace(turned, inputs=size))
        found[f"all rotated, both in groups of {size}"] = everywhere(Rounding(1024, size, size))
        found[f"w8a16, groups of {size}"] = everywhere(Rounding(inputs=None, weights=size))
    found["not rotated, both in groups of 64"] = everywhere(Rounding(1, 64, 64))
    found["all rotated in blocks of 64, both in groups of 64"] = everywhere(Rounding(64, 64, 64))
    for kind in KINDS:
        found[f"inputs of {kind} alone, rotated"] = {kind: Rounding(1024, weights=None)}
    for kind in KINDS:
        found[f"weights of {kind} alone, rotated"] = {kind: Rounding(1024, inputs=None)}
    for kind in KINDS:
        found[f"inputs of {kind} alone"] = {kind: Rounding(weights=None)}
    found |= {f"all rotated, blocks of {size}": everywhere(Rounding(size)) for size in (16, 32, 128)}
    found["w8a8, head w8a16"] = everywhere(plain, head=w8a16)
    found["w8a8, down rotated"] = everywhere(plain, down=turned)
    found["w8a8, down and head rotated"] = everywhere(plain, down=turned, head=turned)
    found["w8a16 rotated"] = everywhere(replace(turned, inputs=None))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=1024, help="scored tokens of each text")
    parser.add_argument("--only", nargs="+", default=["*"], help="names of experiments, with * for any characters")
    args = parser.parse_args()
    model = load(args.model, args.texts, args.tokens)
    print(f"{args.model.name}, {sum(len(w) - 1 for w in model.windows):,} tokens\n\n| | divergence | ratio | s |")
    print("|---|---|---|---|")
    for name, setting in experiments().items():
        if any(rounding.stream for rounding in setting.values()) and not model.has_stream:
            continue
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in args.only):
            start = time.perf_counter()
            divergence, ratio = model.measure(setting)
            print(f"| {name} | {divergence:.5f} | {ratio:.4f} | {time.perf_counter() - start:.0f} |", flush=True)


if __name__ == "__main__":
    main()
