"""The settings in a folder of sentence-transformers: how a text becomes one vector.

``modules.json`` lists the modules: the model, a pooling, and behind it linear layers and a normalization.
``sentence_bert_config.json`` bounds the length of a text, and ``config_sentence_transformers.json`` has prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..backend.values import Pooling
from ..checkpoint.reader import open_tensor_file
from ..errors import CheckpointError
from ..files import is_within, parse_json, read_small_file
from ..gguf_files.encoders import pooling_of
from ..gguf_files.header import find_gguf, read_header
from ..models.parts.classifier import HEAD_ACTIVATIONS, HostLinear

MODULES, LIMITS, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
FLAGS = {
    "pooling_mode_cls_token": Pooling.FIRST,
    "pooling_mode_max_tokens": Pooling.MAX,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_mean_sqrt_len_tokens": Pooling.MEAN_SQRT_LEN,
    "pooling_mode_weightedmean_tokens": Pooling.WEIGHTED_MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}
"""The older spelling of poolings, in the order in which their vectors are joined."""
FUNCTIONS = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
"""Classes of PyTorch -> functions of a linear layer."""
ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
"""The modules that are run. There may be several linear layers."""
LEFT_OUT = ("Dropout",)
"""Modules that only a training uses."""


def identity(x: np.ndarray) -> np.ndarray:
    """``x``."""
    return x


def sigmoid(x: np.ndarray) -> np.ndarray:
    """``1 / (1 + exp(-x))`` in fp32, without an overflow."""
    small = np.exp(-np.abs(x))
    y: np.ndarray = np.where(x >= 0, 1, small) / (1 + small)
    return y.astype(np.float32)


STEP_FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": identity,
    "sigmoid": sigmoid,
    **HEAD_ACTIVATIONS,
}


@dataclass(frozen=True)
class DenseStep:
    """``f(x @ weight.T + bias)`` of pooled vectors, plus ``x`` or its product with ``residual`` if ``has_residual``."""

    linear: HostLinear
    activation: str
    has_residual: bool = False
    residual: HostLinear | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """fp32 ``[n, in]`` -> fp32 ``[n, out]``."""
        y: np.ndarray = STEP_FUNCTIONS[self.activation](self.linear(x))
        if self.has_residual:
            y = y + (x if self.residual is None else self.residual(x))
        return y


@dataclass(frozen=True)
class PoolingSettings:
    """How a text becomes a vector.

    - ``poolings``: the vectors of several are joined, in this order.
    - ``include_prompt``: whether the tokens of a prompt take part in the pooling.
    - ``steps``: linear layers behind it. ``normalize``: the result has length 1.
    - ``prompts``: texts that are put before a text, by name; they may be empty. ``default_prompt`` is the name of the
      one that is used where none is named.
    - ``max_length``: tokens of a text at most; what is more is cut off. None leaves it to the model.
    - ``lower_case``: texts are lowered first.
    """

    poolings: tuple[Pooling, ...] = (Pooling.MEAN,)
    include_prompt: bool = True
    steps: tuple[DenseStep, ...] = ()
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_length: int | None = None
    lower_case: bool = False

    def finish(self, pooled: np.ndarray, normalize: bool | None = None, dimensions: int | None = None) -> np.ndarray:
        """Vectors fp32 ``[n, out]`` of joined poolings fp32 ``[n, features]``.

        ``dimensions`` keeps the first elements alone, before the normalization. ``normalize`` is that of the settings
        if it is None.
        """
        for step in self.steps:
            pooled = step(pooled)
        pooled = pooled[:, :dimensions]
        if self.normalize if normalize is None else normalize:
            lengths = np.sqrt(np.sum(np.square(pooled), axis=1, keepdims=True))
            pooled = pooled / np.maximum(lengths, np.float32(1e-12))
        return np.ascontiguousarray(pooled, np.float32)

    def size(self, features: int) -> int:
        """Elements of a vector, of a model whose tokens have vectors of ``features`` elements."""
        if self.steps:
            return int(self.steps[-1].linear.weight.shape[0])
        return features * len(self.poolings)


def read_settings(folder: Path, default: Pooling, features: int) -> PoolingSettings:
    """The settings in ``folder``, of a model whose tokens have vectors of ``features`` elements.

    Without ``modules.json`` the pooling is ``default``, and vectors get length 1; a GGUF file may name the pooling.
    Raises ``CheckpointError`` that names the file, for a module that is not known and for one that does not fit the
    model.
    """
    if (gguf := find_gguf(folder)) is not None:
        name = pooling_of(read_header(gguf))
        return PoolingSettings((default if name is None else Pooling(name),))
    prompts, limits = _object(folder / PROMPTS), _object(folder / LIMITS)
    found: dict[str, Any] = {"poolings": (default,), "normalize": True}
    if (folder / MODULES).is_file():
        found = _read_modules(folder, features)
    longest = limits.get("max_seq_length")
    if longest is not None and (type(longest) is not int or longest < 3):
        raise CheckpointError(
            f"{folder / LIMITS}: max_seq_length is {longest!r}, but must be a number of tokens, from 3"
        )
    texts = prompts.get("prompts") or {}
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise CheckpointError(f"{folder / PROMPTS}: prompts is {texts!r}, but must map names to texts")
    name = prompts.get("default_prompt_name")
    if name is not None and name not in texts:
        raise CheckpointError(f"{folder / PROMPTS}: default_prompt_name is {name!r}, which is none of {list(texts)}")
    return PoolingSettings(
        **found,
        prompts=texts,
        default_prompt=name,
        max_length=longest,
        lower_case=limits.get("do_lower_case") is True,
    )


def _read_modules(folder: Path, features: int) -> dict[str, Any]:
    path, problems = folder / MODULES, []
    modules = _parsed(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{path} must hold a list of modules")
    poolings: tuple[Pooling, ...] | None = None
    include_prompt, normalize, steps, width = True, False, [], features
    last = -1
    for module in modules:
        kind, where = str(module.get("type")).rpartition(".")[2], module.get("path") or ""
        place = ORDER.index(kind) if kind in ORDER else last
        if place < last or (place == last and kind in ORDER[:2]):
            problems.append(f"{kind} is behind {ORDER[last]}; modules are run in the order {', '.join(ORDER)}")
        last = max(last, place)
        if not isinstance(where, str) or (where and not is_within(where)):
            raise CheckpointError(f"{path}: {where!r} is no folder inside of this one")
        if kind == "Transformer":
            if where:
                problems.append(f"the model is in {where}; move its files into the folder itself")
        elif kind == "Pooling":
            poolings, include_prompt = _read_pooling(folder / where, features)
            width = features * len(poolings)
        elif kind == "Dense":
            steps.append(_read_dense(folder / where, width))
            width = steps[-1].linear.weight.shape[0]
        elif kind == "Normalize":
            normalize = True
        elif kind not in LEFT_OUT:
            problems.append(f"a module is {module.get('type')!r}, but must be one of {', '.join(ORDER)}")
    if poolings is None:
        problems.append("there is no module Pooling")
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems)}")
    return {"poolings": poolings, "include_prompt": include_prompt, "normalize": normalize, "steps": tuple(steps)}


def _read_pooling(folder: Path, features: int) -> tuple[tuple[Pooling, ...], bool]:
    path = folder / "config.json"
    config = _object(path)
    modes = config.get("pooling_mode") or [pooling.value for flag, pooling in FLAGS.items() if config.get(flag)]
    modes = [modes] if isinstance(modes, str) else modes or [Pooling.MEAN.value]
    known = {pooling.value: pooling for pooling in Pooling}
    if not isinstance(modes, list) or not all(isinstance(mode, str) and mode in known for mode in modes):
        raise CheckpointError(f"{path}: the pooling is {modes!r}, but must be of {', '.join(known)}")
    width = config.get("embedding_dimension", config.get("word_embedding_dimension", features))
    if width != features:
        raise CheckpointError(
            f"{path}: tokens have {width!r} elements there, and {features:,} by the model's config.json"
        )
    return tuple(known[mode] for mode in modes), config.get("include_prompt", True) is not False


def _read_dense(folder: Path, features: int) -> DenseStep:
    path = folder / "config.json"
    config = _object(path)
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in FUNCTIONS:
        raise CheckpointError(f"{path}: activation_function is {name!r}, but must be one of {', '.join(FUNCTIONS)}")
    file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"{folder}: has none of {', '.join(WEIGHT_FILES)}")
    tensors = {key: values.astype(np.float32) for key, values in open_tensor_file(file).items()}
    weight, bias, residual = (tensors.get(key) for key in ("linear.weight", "linear.bias", "residual.weight"))
    if weight is None or weight.ndim != 2 or weight.shape[1] != features:
        found = "is missing" if weight is None else f"has shape {list(weight.shape)}"
        raise CheckpointError(f"{file}: linear.weight {found}; it must read vectors of {features:,} elements")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise CheckpointError(f"{file}: linear.bias has shape {list(bias.shape)}, but must be {[weight.shape[0]]}")
    has_residual = config.get("use_residual") is True
    if has_residual and (residual.shape if residual is not None else (features, features)) != weight.shape:
        raise CheckpointError(f"{file}: residual.weight must have the shape of linear.weight, {list(weight.shape)}")
    own = None if residual is None else HostLinear(residual, None)
    return DenseStep(HostLinear(weight, bias), FUNCTIONS[name], has_residual, own)


def _parsed(path: Path) -> Any:
    try:
        return parse_json(read_small_file(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file does not exist."""
    found = _parsed(path) if path.exists() else {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object, but holds {type(found).__name__}")
    return found
