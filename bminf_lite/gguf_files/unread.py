"""Metadata of a GGUF model that would change its results and that nothing here has read: they are refused by name.

:class:`ReadHeader` notes which keys are asked for. All others of the architecture are compared with :data:`NEUTRAL`.
The keys are those of llama.cpp (``LLM_KV_NAMES`` in ``llama-arch.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .header import GgufHeader


@dataclass(frozen=True)
class ReadHeader(GgufHeader):
    """A header that notes in ``read`` which keys of the architecture :meth:`of_model` was asked for."""

    read: set[str] = field(default_factory=set)

    def of_model(self, key: str, default: Any = None) -> Any:
        """The metadata ``{architecture}.{key}``."""
        self.read.add(key)
        return super().of_model(key, default)


def _any(value: Any) -> bool:
    return True


def _none(value: Any) -> bool:
    """Whether a number, a flag, a text or a list says nothing."""
    return not any(value) if isinstance(value, list) else value in (0, "", "none", None)


def _one_or_none(value: Any) -> bool:
    return value in (0, 1)


NEUTRAL: Mapping[str, Callable[[Any], bool]] = {
    # Sizes that the shapes of tensors tell too, and notes for programs.
    "vocab_size": _any,
    "feed_forward_length": _any,
    "attention.head_count_kv": _any,
    "context_length": _any,
    "tensor_data_layout": _any,
    "rope.scaling.finetuned": _any,
    "rope.scaling.original_context_length": _any,
    "use_parallel_residual": _any,  # StableLM's converter writes it always; the tensors tell
    "expert_used_count": _any,  # without an expert_count
    "interleave_moe_layer_step": _any,
    "pooling_type": _any,  # of embeddings
    "classifier.output_labels": _any,
    # A model has one kind of norms, and its own number was read.
    "attention.layer_norm_epsilon": _any,
    "attention.layer_norm_rms_epsilon": _any,
    "attention.group_norm_epsilon": _any,
    "attention.causal": lambda value: value is True,
    # Factors, of which llama.cpp leaves out those that are 0.
    "logit_scale": _one_or_none,
    "residual_scale": _one_or_none,
    "embedding_scale": _one_or_none,
    "attention.output_scale": _one_or_none,
    "expert_weights_scale": _one_or_none,
    "expert_group_scale": _one_or_none,
    "rope.scaling.alpha": _one_or_none,
    "rope.scaling.mscale": _one_or_none,
}
"""Values that change nothing of keys that were not asked for. Of other keys, only values that say nothing do."""


def unread_problems(header: ReadHeader, config: Mapping[str, Any]) -> list[str]:
    """The keys that would change the results, each with its value. ``config`` is what was made of the others.

    An architecture of which no base of the rotation was read has no rotation.
    """
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    head_dim = config.get("head_dim") or (config.get("hidden_size") or config.get("n_embd") or 0) // heads
    same = dict.fromkeys(("key_length", "value_length", "key_length_swa", "value_length_swa"), head_dim)
    sizes = {f"attention.{key}": size for key, size in same.items()}
    sizes |= dict.fromkeys(("rope.dimension_count", "rope.dimension_count_swa"), head_dim)
    prefix = f"{header.architecture}."
    found = []
    for name, value in header.metadata.items():
        key = name.removeprefix(prefix)
        if key == name or key in header.read or (key.startswith("rope.") and "rope.freq_base" not in header.read):
            continue
        is_neutral = NEUTRAL.get(key, _none)
        if not (value == sizes[key] if key in sizes else is_neutral(value)):
            text = repr(value)
            found.append(f"{name} is {text[:60]}, which would change the results and is not read")
    return found
