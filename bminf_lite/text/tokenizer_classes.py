"""What the tokenizer classes of transformers 5 add to the files of a checkpoint.

``tokenizer.json`` holds the whole pipeline, and here it counts. Classes of transformers 5 such as ``GPT2Tokenizer`` and
``LlamaTokenizer`` build a pipeline of their own around the file's vocabulary, which loses what the file has beyond it,
for example the digits that SmolLM splits (https://github.com/huggingface/transformers/pull/48219). Of a class, only
what a configuration can say is taken: default special tokens and ``add_prefix_space``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenizerClass:
    """A class of transformers.

    - ``special_tokens`` has, by name, those that it has where no file names others.
    - ``prefix_space``: the default of ``add_prefix_space``; None for a class without that option, and for one whose
      default ``tokenizer.json`` states.
    - ``has_prefix_option``: ``add_prefix_space`` of a configuration counts.
    - ``frames``: ``add_bos_token`` and ``add_eos_token`` count where the post-processor adds no token. transformers 4
      did so. transformers 5 ignores both fields beside a ``tokenizer.json``, and DeepSeek Coder loses its begin-of-text
      token, with which it was trained.
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    prefix_space: bool | None = None
    has_prefix_option: bool = False
    frames: bool = False


_END = "<|endoftext|>"
_ENDS = {"unk_token": _END, "bos_token": _END, "eos_token": _END}
_GPT2 = TokenizerClass(_ENDS, prefix_space=False, has_prefix_option=True)
GENERIC = TokenizerClass()
"""A class that takes all from the files."""
LLAMA = TokenizerClass(
    {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, has_prefix_option=True, frames=True
)
"""The class for SentencePiece's pipelines."""

CLASSES: Mapping[str, TokenizerClass] = {
    "GPT2Tokenizer": _GPT2,
    "CodeGenTokenizer": _GPT2,
    "GPTNeoXTokenizer": TokenizerClass(
        {**_ENDS, "pad_token": "<|padding|>"}, prefix_space=False, has_prefix_option=True, frames=True
    ),
    "Qwen2Tokenizer": TokenizerClass(
        {"unk_token": _END, "eos_token": _END, "pad_token": _END}, prefix_space=False, has_prefix_option=True
    ),
    "CohereTokenizer": TokenizerClass(
        {
            "unk_token": "<UNK>",
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "sep_token": "<SEP>",
            "mask_token": "<MASK_TOKEN>",
        },
        prefix_space=False,
        has_prefix_option=True,
        frames=True,
    ),
    "LlamaTokenizer": LLAMA,
    "GemmaTokenizer": TokenizerClass(
        {
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
        frames=True,
    ),
    "T5Tokenizer": TokenizerClass({"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}),
}
"""The classes by name, without the ending ``Fast``. Other classes are :data:`GENERIC`."""

_GENERIC_NAME = "TokenizersBackend"
_OF_MODELS = {
    **dict.fromkeys(("gpt2", "gptj", "codegen", "opt", "phi", "starcoder2", "jais2"), "GPT2Tokenizer"),
    **dict.fromkeys(("qwen2", "qwen3"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
    **dict.fromkeys(("t5", "mt5"), "T5Tokenizer"),
    **dict.fromkeys(("gpt_neox", "olmo"), "GPTNeoXTokenizer"),
    **dict.fromkeys(
        (
            "ernie4_5",
            "glm",
            "glm4",
            "gpt_bigcode",
            "granite",
            "granitemoeshared",
            "hyperclovax",
            "ministral",
            "ministral3",
            "mistral",
            "nemotron",
            "olmo2",
            "olmo3",
            "phi3",
            "stablelm",
            "umt5",
        ),
        _GENERIC_NAME,
    ),
}
"""The class that transformers registers for a ``model_type``; models that are not here have the class they name."""
_MISNAMED = ("ernie4_5", "hyperclovax", "nemotron", "phi3", "qwen2")
"""Models whose folders name another class than that of their tokenizer."""


def tokenizer_class(model_type: object, declared: object) -> TokenizerClass:
    """The class that ``AutoTokenizer`` takes for a ``model_type`` whose files name the class ``declared``."""
    registered = _OF_MODELS.get(model_type) if isinstance(model_type, str) else None
    name = declared.removesuffix("Fast") if isinstance(declared, str) else None
    if name is None or (model_type in _MISNAMED and registered != name):
        name = registered
    elif registered == _GENERIC_NAME:
        name = None
    return CLASSES.get(name or "", GENERIC)
