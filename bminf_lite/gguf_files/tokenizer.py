"""A ``tokenizer.json`` and ``tokenizer_config.json`` from the metadata of a GGUF file.

Of models that generate, two kinds of vocabularies are known: SentencePiece's BPE, whose merges follow from the scores
of the tokens, and BPE over bytes with its merges. For the second, ``tokenizer.ggml.pre`` names the regular expression
that cuts a text into words; llama.cpp maps names to expressions, and they are here as the models' own tokenizers have
them (:mod:`.words`). Those of encoders are in :mod:`.encoder_tokenizers`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import CheckpointError, checkpoint_error, choices, library_errors
from .encoder_tokenizers import unigram, word_piece
from .header import GgufHeader
from .special_tokens import NAMES, is_control, named_ids, scores_of, vocabulary
from .words import WORDS

USER_DEFINED = 4
"""The type of tokens that are found in a text before anything else."""
REPEATED_TOKENS = "repeated_tokens"
"""A key of ``tokenizer_config.json``: the ids of tokens whose text a later token has too, each with the later id."""
_STRIPPING = ("phi-3", "phi3")
"""Names of models whose control tokens take the white space behind them; a file does not say so, llama.cpp knows it."""
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_files(header: GgufHeader) -> dict[str, str]:
    """The texts of ``tokenizer.json`` and ``tokenizer_config.json``.

    Raises :class:`CheckpointError` if the file has no vocabulary, or one of another kind.
    """
    metadata = header.metadata
    kind, (tokens, types) = metadata.get("tokenizer.ggml.model"), vocabulary(header)
    if not tokens:
        raise CheckpointError(f"{header.path}: holds no vocabulary (tokenizer.ggml.tokens); give prompts as token ids")
    makers, framed = {"llama": _sentencepiece, "gpt2": _byte_level}, {"bert": word_piece, "t5": unigram}
    if kind not in (*makers, *framed):
        problem = f"tokenizer.ggml.model is {kind!r}, not one of {', '.join((*makers, *framed))}"
        raise CheckpointError(f"{header.path}: {problem}; give prompts as token ids, or add a tokenizer.json")
    named = {name: tokens[i] for name, i in named_ids(header).items()}
    with library_errors(f"{header.path}: holds a vocabulary that the tokenizers library cannot read"):
        backend, adds_bos = (framed[kind](header, tokens), None) if kind in framed else makers[kind](header, tokens)
        strips = any(name in str(metadata.get("general.name", "")).lower() for name in _STRIPPING)
        for token, token_type in zip_longest(tokens, types):
            if token and is_control(token, token_type):
                rstrip = strips and token not in _NOT_STRIPPED
                backend.add_special_tokens([AddedToken(token, special=True, normalized=False, rstrip=rstrip)])
            elif token and token_type == USER_DEFINED:
                backend.add_tokens([AddedToken(token, normalized=False)])
        if adds_bos is not None:
            _frame(header, backend, named, adds_bos)
        pipeline = backend.to_str()
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {theirs: named.get(name) for name, theirs in NAMES.items()}
    if repeated := _repeated(tokens):
        config[REPEATED_TOKENS] = repeated
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    templates = [{"name": name, "template": metadata[key]} for name, key in keys.items() if key in metadata]
    if templates:
        config["chat_template"] = templates
    config = {key: value for key, value in config.items() if value is not None}
    return {"tokenizer.json": pipeline, "tokenizer_config.json": json.dumps(config, ensure_ascii=False)}


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    """The id of each text. Of equal tokens the last counts, as in llama.cpp; empty ones are found in no text."""
    return {token: index for index, token in enumerate(tokens) if token}


def _repeated(tokens: Sequence[str]) -> dict[str, int]:
    """Ids whose text a later token has too, each with the id of the later one: both decode to the same text."""
    ids = _ids(tokens)
    return {str(index): ids[token] for index, token in enumerate(tokens) if token and ids[token] != index}


def _frame(header: GgufHeader, backend: tokenizers.Tokenizer, named: dict[str, str], adds_bos: bool) -> None:
    """A post-processor that puts the begin-of-text and end-of-text tokens around a prompt, if the file says so."""
    metadata = header.metadata
    framing = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", adds_bos),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    used = {kind: named[kind] for kind, added in framing.items() if added and kind in named}
    if missing := [kind for kind, added in framing.items() if added and kind not in named]:
        problem = f"has tokenizer.ggml.add_{missing[0]}_token, and no tokenizer.ggml.{missing[0]}_token_id"
        raise CheckpointError(f"{header.path}: {problem}; export the model again")
    if used:
        parts = [used.get("bos"), "$A", used.get("eos")]
        special = [(token, backend.token_to_id(token)) for token in used.values()]
        single = [part for part in parts if part is not None]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def _sentencepiece(header: GgufHeader, tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    scores = scores_of(header, tokens)
    ids, unknown_id = _ids(tokens), named_ids(header).get("unknown")
    unknown = None if unknown_id is None else tokens[unknown_id]
    model = models.BPE(ids, merges_of(ids, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    prefix = header.metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return backend, True


def merges_of(ids: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of SentencePiece's BPE: every way to make a token of two others, that with the best score first."""
    found = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-scores[index], ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _byte_level(header: GgufHeader, tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    name = header.metadata.get("tokenizer.ggml.pre", "gpt-2")
    name = "gpt-2" if name == "default" else name
    if name not in WORDS:
        problem = f"tokenizer.ggml.pre {name!r} is not supported; {choices(name, WORDS)}"
        raise CheckpointError(f"{header.path}: {problem}; give prompts as token ids, or add a tokenizer.json")
    words = WORDS[name]
    ids = _ids(tokens)
    backend = tokenizers.Tokenizer(models.BPE(ids, _merges(header, ids), ignore_merges=words.ignores_merges))
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in words.expressions]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_of])
    backend.decoder = decoders.ByteLevel()
    return backend, words.adds_bos


def _merges(header: GgufHeader, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that become one, in order. Raises ``CheckpointError`` for other values."""
    merges = header.metadata.get("tokenizer.ggml.merges") or []
    if not isinstance(merges, list):
        raise CheckpointError(f"{header.path}: tokenizer.ggml.merges must be a list of texts; export the model again")
    found, problems = [], []
    for index, merge in enumerate(merges):
        left, _, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if left in ids and right in ids and left + right in ids:
            found.append((left, right))
        else:
            problems.append(f"tokenizer.ggml.merges[{index}] is {merge!r}, which does not make a token of two others")
    if problems:
        raise checkpoint_error(header.path, problems, "export the model again")
    return found
