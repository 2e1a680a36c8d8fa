"""Tiny random models: weights from a seed, alike wherever they are made, and the few lines that run one.

A golden file holds a configuration, a seed, token ids and the logits that transformers computed. The weights come from
the raw output of NumPy's PCG64, whose stream NumPy promises to keep, in the order of the tensors' names.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from bminf_lite import models
from bminf_lite.backend.base import Backend
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.backend.quantization import HostWeight, quantize_weight
from bminf_lite.backend.rotation import rotated, rotation_of
from bminf_lite.backend.values import ForwardBatch, sequential_tables
from bminf_lite.layers.cache import KVCache
from bminf_lite.models.spec import Spec

GOLDENS = Path(__file__).parents[1] / "goldens"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
GPTS = ("gpt2", "opt", "gpt_neox")
ENCODER_DECODERS = ("t5", "mt5", "umt5")
DECODERS = (
    "phi3", "olmo2", "olmo3", "granite", "smollm3", "ministral3", "seed_oss", "stablelm", "cohere", "cohere2", "glm",
    "glm4", "exaone4", "phi", "gptj", "codegen", "falcon", "starcoder2", "gpt_bigcode", "nemotron", "helium",
    "gemma2", "gemma3_text", "bloom", "gemma", "olmo", "ernie4_5", "arcee", "jais2", "cwm", "ministral", "vaultgemma",
    "hyperclovax", "nanochat", "youtu", "minicpm3", "hunyuan_v1_dense", "apertus", "internlm3",
    "iquestcoder", "granite_swa", "gpt_neo",
)  # fmt: skip
"""Other families of decoders."""
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
MAMBAS = ("falcon_h1", "granitemoehybrid", "nemotron_h", "bamba")
STATES = ("lfm2", "lfm3", *DELTA_NETS, *MAMBAS, "olmo_hybrid", "mamba2", "kimi_linear")
"""Families with layers that keep a state."""
LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
"""Families with latent attention. They have experts, too."""
RENAMED = {"kimi_k2": "deepseek_v3"}
"""Families that are another one but for the name, which transformers does not know."""
MIXTURES = (
    "mixtral", "qwen3_moe", "olmoe", "qwen2_moe", "glm4_moe", "granitemoe", "ernie4_5_moe", "minimax_m2", "lfm2_moe",
    "gpt_oss", "llama4_text", *LATENTS, "qwen3_next", "qwen3_5_moe_text",
    "granitemoehybrid", "nemotron_h", "gemma4_text", "kimi_linear", "dots1", "solar_open", "exaone_moe", "hy_v3",
    "granitemoeshared", "mellum", "afmoe", "flex_olmo", "hunyuan_v1_moe", "phimoe",
    "granitemoe_swa", "flint", "cohere2_moe", "laguna",
)  # fmt: skip
"""Families with experts; those of Gemma 4 are in its first case alone."""
SCALED_INPUTS = ("llama4_text",)
"""The families whose routers multiply the inputs of experts, which a GPU computes in w8a8 alone."""
ENCODERS = ("bert", "roberta", "xlm_roberta", "distilbert", "mpnet", "modernbert", "nomic_bert")
"""Families that make vectors of texts, and generate none; their cases are in test_encoders.py."""
EVERY = tuple(dict.fromkeys((*FAMILIES, *GPTS, *ENCODER_DECODERS, *DECODERS, *MIXTURES, *STATES)))

EMBEDDINGS = ("embed_tokens", "embed_positions", "embed_in", "wte", "wpe", "shared", "word_embeds", "word_embeddings",
              "position_embeddings", "relative_attention_bias")  # fmt: skip
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""GPT-2's matrices, which are stored ``[in, out]``."""
OFFSET_NORMS = (
    "nemotron",
    "gemma",
    "gemma2",
    "vaultgemma",
    "gemma3_text",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
"""Families whose norms add 1 to their weights, but for those of a gated DeltaNet."""
UNSCALED = ("Attention.q.weight", "Attention.k.weight", "project_q.weight")
"""T5's, whose scores nothing divides."""


def random_tensors(seed: int, shapes: Mapping[str, tuple[int, ...]], model_type: str = "") -> dict[str, np.ndarray]:
    """fp32 tensors, sized so that attention has contrast, no layer is idle, and biases and gains matter."""
    gain_of_norms = 0 if model_type in OFFSET_NORMS else 1
    sizes = [int(np.prod(shape)) for _, shape in sorted(shapes.items())]
    raw = np.random.PCG64(seed).random_raw(sum(sizes))
    numbers = (raw >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)  # [-1, 1)
    tensors, end = {}, 0
    for (name, shape), size in zip(sorted(shapes.items()), sizes, strict=True):
        uniform, end = numbers[end : end + size], end + size
        if name.endswith(".bias"):
            values = np.float32(0.5) * uniform
        elif name.endswith("A_log"):
            values = np.float32(-2) + uniform
        elif name.endswith(("linear_attn.norm.weight", "linear_attn.o_norm.weight")):
            values = 1 + np.float32(0.3) * uniform
        elif not shape:
            values = np.float32(-1e-6 if name.endswith("eps") else 0.5) * (1 + np.float32(0.3) * uniform)
        elif len(shape) == 1:
            values = gain_of_norms + np.float32(0.3) * uniform
        elif name.removesuffix(".weight").endswith(EMBEDDINGS):
            values = uniform
        else:
            gain = 2.5 if name.endswith(("q_proj.weight", "k_proj.weight", "lm_head.weight")) else 1.7
            if name.endswith(UNSCALED):
                gain = 1.0
            values = np.float32(gain / np.sqrt(shape[0 if name.endswith(CONV1D) else 1])) * uniform
        tensors[name] = values.reshape(shape)
    return tensors


def random_tokens(seed: int, count: int, vocab_size: int) -> np.ndarray:
    """Token ids, int32 ``[count]``."""
    return (np.random.PCG64([seed, 1]).random_raw(count) % np.uint64(vocab_size)).astype(np.int32)


def digest(tensors: Mapping[str, np.ndarray]) -> str:
    """A checksum of names and values, to tell a changed generator from a changed result."""
    total = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        total.update(name.encode() + values.astype("<f4").tobytes())
    return total.hexdigest()[:16]


@dataclass(frozen=True)
class Golden:
    """One configuration, as a ``config.json`` holds it, and transformers' fp32 logits ``[tokens, vocab]``.

    An encoder-decoder also has the ``source`` that its encoder read, and the encoder's output, fp32 ``[n, features]``.
    """

    name: str
    config: dict[str, Any]
    seed: int
    weights: str
    tokens: np.ndarray
    logits: np.ndarray
    source: np.ndarray | None = None
    encoded: np.ndarray | None = None

    def __str__(self) -> str:
        return f"{self.config['model_type']}: {self.name}"

    @property
    def spec(self) -> Spec:
        """The tensors of its checkpoint."""
        architecture = models.find(self.config)
        return architecture.spec(architecture.parse(self.config))

    def save(self, folder: Path, tensors: Mapping[str, np.ndarray]) -> Path:
        """Make ``folder`` a checkpoint of this configuration."""
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(dict(tensors), folder / "model.safetensors")
        return folder

    def logits_with(self, weights: Any, tokens: Any = None, source: Any = None) -> np.ndarray:
        """What the CPU computes with ``weights`` from other tokens or the golden's own, fp32 ``[tokens, vocab]``."""
        model = tiny_model(CpuBackend(), self.config, weights)
        if self.source is not None:
            model.read(self.source if source is None else source)
        return model.run(self.tokens if tokens is None else tokens)


@functools.cache
def _goldens(family: str) -> tuple[Golden, ...]:
    """The committed cases of one family; their arrays are read only, because every test gets the same."""
    cases = json.loads((GOLDENS / f"{family}.json").read_text())
    with np.load(GOLDENS / f"{family}.npz") as file:
        arrays = dict(file)
    for array in arrays.values():
        array.setflags(write=False)

    def golden(name: str, case: dict[str, Any]) -> Golden:
        tokens = np.array(case["tokens"], np.int32)
        source = np.array(case["source"], np.int32) if "source" in case else None
        encoded = arrays.get(f"{name}, encoded")
        return Golden(name, case["config"], case["seed"], case["weights"], tokens, arrays[name], source, encoded)

    return tuple(golden(name, case) for name, case in cases.items())


def goldens(family: str) -> Iterator[Golden]:
    """The committed cases of one family, each with a configuration that a test may change."""
    return (replace(golden, config=copy.deepcopy(golden.config)) for golden in _goldens(family))


def two_of_each_family() -> list[Any]:
    """Every golden as a parameter of a test. All but the first two of each family are marked ``slow``."""
    return [
        pytest.param(golden, id=str(golden), marks=() if i < 2 else pytest.mark.slow)
        for family in EVERY
        for i, golden in enumerate(goldens(family))
    ]


CPM_ENCODER_DECODER = {
    "vocab_size": 97, "d_model": 40, "d_ff": 56, "d_kv": 8, "num_heads": 5, "num_layers": 2, "num_decoder_layers": 2,
}  # fmt: skip
CPM = {
    "cpm1": {"vocab_size": 97, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4},
    "cpm2": CPM_ENCODER_DECODER,
    "eva": CPM_ENCODER_DECODER,
}


def case_without_golden(model_type: str, tokens: int = 11, source: int = 9, **config: Any) -> Golden:
    """A case of a model that transformers does not know, without logits; see also tests/parity."""
    read = None if model_type == "cpm1" else random_tokens(4, source, 97)
    config = {"model_type": model_type, **CPM[model_type], **config}
    return Golden("no golden", config, 1, "", random_tokens(3, tokens, 97), np.empty(0), read)


def one_of_each_architecture() -> list[Golden]:
    """The first golden of each family, and the models that transformers does not know."""
    return [*(next(goldens(family)) for family in EVERY), *map(case_without_golden, CPM)]


class RandomWeights:
    """A model's tensors, float or quantized as migration does it; what a checkpoint is to the layers.

    int8 matrices rotate their input in blocks of up to ``rotation`` elements.
    """

    def __init__(
        self,
        config: dict[str, Any],
        seed: int,
        quantized: bool = False,
        dynamic: bool = True,
        rotation: int = 1,
        architecture: models.Architecture | None = None,
    ):
        architecture = architecture or models.find(config)
        spec = architecture.spec(architecture.parse(config))
        self.tied = spec.tied
        self.transposed = {name for name, p in spec.parameters.items() if p.transposed}
        shapes = {name: p.shape for name, p in spec.parameters.items() if name not in spec.tied}
        self.tensors = random_tensors(seed, shapes, config["model_type"])
        self.quantized = quantized
        self.dynamic = dynamic
        self.rotation = rotation

    def vector(self, name: str) -> np.ndarray:
        return self.tensors[self.tied.get(name, name)]

    def weight(self, name: str) -> HostWeight:
        weight = self.vector(name).T if name in self.transposed else self.vector(name)
        if not self.quantized:
            return weight
        block = rotation_of(weight.shape[1], self.rotation)
        return replace(quantize_weight(rotated(weight, block), self.dynamic), rotation=block)


def reading_architecture(config: dict[str, Any]) -> models.Architecture:
    """The architecture of a model that makes vectors of texts: an encoder, or a decoder without its head."""
    architecture = models.find(config)
    return architecture if config["model_type"].replace("-", "_") in ENCODERS else models.embedder(architecture)


def skip_what_no_gpu_computes(family: str, weights: RandomWeights | None = None) -> None:
    """Skip the test for what a GPU refuses."""
    if family in SCALED_INPUTS and weights is not None and not (weights.quantized and weights.dynamic):
        pytest.skip("a GPU computes experts with scaled inputs in w8a8")


def mixers(config: Any) -> list[Any]:
    """The mixer of each layer of a decoder's configuration."""
    return [sub.part for layer in config.layer_parts for sub in layer.sublayers if sub.part.layouts]


def windows(config: Any) -> tuple[int | None, ...]:
    """The window of each layer of a decoder's configuration."""
    return tuple(mixer.window for mixer in mixers(config))


CAPACITY = 128
"""Tokens that a tiny model's cache holds for each sequence."""


class TinyModel:
    """A model on a backend with a cache of its own, driven step by step."""

    def __init__(
        self, backend: Backend, config: dict[str, Any], weights: RandomWeights, slots: int = 1, int8_cache: bool = False
    ):
        if backend.name.startswith("cuda"):
            skip_what_no_gpu_computes(config["model_type"], weights)
        architecture = models.find(config)
        self.backend = backend
        self.config = architecture.parse(config)
        self.network = architecture.Model(self.config, weights, backend)
        self.cache_layout = self.config.cache_layout.with_int8(int8_cache)
        self.slots = slots
        self.clear()

    def clear(self) -> None:
        """Forget every sequence."""
        self.context_lens = [0] * self.slots
        self.cache = KVCache.for_sequences(self.backend, self.cache_layout, self.slots, CAPACITY)
        self.table = sequential_tables(self.slots, CAPACITY)
        self.tables = self.cache.tables(self.slots, CAPACITY)

    def source_arguments(self, slots: list[int]) -> dict[str, Any]:
        """The arguments of ``ForwardBatch.packed`` for the sources of some slots."""
        return {}

    def run(self, *rows: Sequence[int], slots: Sequence[int] | None = None, all_logits: bool = True) -> np.ndarray:
        """One step with new tokens for each of some slots: logits of all tokens, packed, or of each row's last."""
        slots = list(range(len(rows))) if slots is None else list(slots)
        context_lens, source = [self.context_lens[s] for s in slots], self.source_arguments(slots)
        batch = ForwardBatch.packed(
            self.backend.array, rows, context_lens, [table[slots] for table in self.tables], **source
        )
        for slot, row in zip(slots, rows, strict=True):
            self.context_lens[slot] += len(row)
        return np.array(self.backend.host(self.network(batch, self.cache, all_logits)))


class TinyEncoderDecoder(TinyModel):
    """The same with an encoder: sources are read into slots, and then decoded."""

    def clear(self) -> None:
        super().clear()
        self.cache.source = KVCache.for_sequences(self.backend, self.cache_layout, self.slots, CAPACITY)
        self.source_lens = [0] * self.slots

    def source_arguments(self, slots: list[int]) -> dict[str, Any]:
        return {"source_tables": self.table[slots], "source_lens": [self.source_lens[s] for s in slots]}

    def source_step(self, *sources: Sequence[int], slots: Sequence[int] | None = None) -> ForwardBatch:
        """Whole sources as one step."""
        slots = list(range(len(sources))) if slots is None else list(slots)
        return ForwardBatch.packed(self.backend.array, sources, source_tables=self.table[slots])

    def encode(self, *sources: Sequence[int]) -> np.ndarray:
        """The encoder's output for all tokens, packed."""
        return np.array(self.backend.host(self.network.encode(self.source_step(*sources))))

    def read(self, *sources: Sequence[int], slots: Sequence[int] | None = None) -> None:
        """Read sources into slots, which forget what they held."""
        batch = self.source_step(*sources, slots=slots)
        slots = list(range(len(sources))) if slots is None else list(slots)
        self.network.encode_to_cache(batch, self.cache.source)
        for slot, source in zip(slots, sources, strict=True):
            self.context_lens[slot], self.source_lens[slot] = 0, len(source)


def tiny_model(
    backend: Backend, config: dict[str, Any], weights: RandomWeights, slots: int = 1, int8_cache: bool = False
) -> TinyModel:
    """A model with or without an encoder."""
    is_encoder_decoder = models.find(config).parse(config).is_encoder_decoder
    kind = TinyEncoderDecoder if is_encoder_decoder else TinyModel
    return kind(backend, config, weights, slots, int8_cache)
