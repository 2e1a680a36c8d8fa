"""The text model inside a multimodal one: its configuration, and which tensors of the folder are its own."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from .spec import Role, Spec

TEXT_ALIASES = (
    (r"language_model\.((?:model|lm_head)\..*)", r"\1"),
    (r"model\.(?:language|text)_model\.(.*)", r"model.\1"),
)
"""Names of a text model's tensors inside a multimodal folder, of transformers before version 5 and since."""

_ENDS = (Role.HEAD, Role.EMBEDDING)


def text_config(config: Mapping[str, Any], known: Container[str]) -> Mapping[str, Any]:
    """The configuration of the text model: ``config`` itself, or its ``text_config`` if that is what is ``known``.

    ``known`` are the ``model_type`` that can be run. Keys that the outer configuration decides are taken from there.
    """
    inner = config.get("text_config")
    if config.get("model_type") in known or not isinstance(inner, Mapping) or inner.get("model_type") not in known:
        return config
    outer = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "transformers_version")
    inherited = {key: config[key] for key in (*outer, "bos_token_id", "eos_token_id") if config.get(key) is not None}
    return inherited | dict(inner)


def text_spec(spec: Spec, config: Mapping[str, Any]) -> Spec:
    """The tensors of a text model whose folder, with the outer configuration ``config``, holds other parts too.

    transformers 5 ties the head by the outer ``tie_word_embeddings``, and earlier versions by the text model's. Where
    only the outer one is true, the file may lack the head.

    Tensors outside of the text model's modules (``model.layers``, ``lm_head``, ...) belong to other parts, such as
    towers and projectors.
    """
    absent = dict(spec.tied_if_absent)
    if config.get("tie_word_embeddings") is True:
        head, table = (next(name for name, p in spec.parameters.items() if p.role is role) for role in _ENDS)
        absent |= {} if head in spec.tied else {head: table}
    modules = {re.escape(".".join(name.split(".")[:2])) for name in spec.parameters}
    other_parts = rf"(?!(?:{'|'.join(sorted(modules))})(?:\.|$)).*"
    aliases, ignored = (*TEXT_ALIASES, *spec.aliases), (*spec.ignored, other_parts)
    return replace(spec, aliases=aliases, ignored=ignored, tied_if_absent=absent)
