"""Measure what constrained decoding costs the host in each step: taking the new tokens, and computing the masks.

    python benchmarks/measure_grammar.py [TOKENIZER.json]

Sequences follow a JSON schema, each at a place of its own, and take random allowed tokens, which is harder than what a
model writes. Without a file the vocabulary has 128,000 tokens: all bytes, and the most frequent words and parts of
words of Python's standard library.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from bminf_lite.grammar import Grammar
from bminf_lite.grammar.matcher import GrammarCompiler, MaskRow, Matcher, fill_masks
from bminf_lite.text.json_tokenizer import JsonTokenizer

SIZE = 128_000
END = "<|end|>"
STEPS = 200
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z0-9.]{1,20}@[a-z0-9]{1,20}\\.(com|org)$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "integer"}, "city": {"type": "string"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
        "notes": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "email", "address", "notes"],
    "additionalProperties": False,
}


def large_vocabulary(size: int = SIZE) -> JsonTokenizer:
    """A byte-level vocabulary of words and parts of words."""
    words_of: Counter[str] = Counter()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py")):
        words_of.update(re.findall(r" ?\w+|\s+|[^\w\s]+", path.read_text(errors="ignore")))
    counts: Counter[str] = Counter()
    for word, count in words_of.items():
        for n in range(1, min(len(word), 16) + 1):
            counts[word[:n]] += count
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    words = ("".join(part for part, _ in spell(word)) for word, _ in counts.most_common(2 * size))
    pieces = list(dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *words]))[: size - 1]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return JsonTokenizer(backend, {"eos_token": END})


def steps(compiler: GrammarCompiler, ends: frozenset[int], size: int, count: int) -> Iterator[tuple[float, float]]:
    """Seconds of each step of ``count`` sequences, and of the processor's cores."""
    rng, grammar = np.random.default_rng(0), Grammar.json_schema(SCHEMA)
    masks = np.zeros((count, -(-size // 32)), np.uint32)
    matchers: list[Matcher | None] = [None] * count
    tokens = np.zeros(count, np.int64)
    for step in range(STEPS):
        for i, matcher in enumerate(matchers):
            if matcher is None or tokens[i] in ends or rng.random() < 0.01:
                matchers[i], tokens[i] = compiler.matcher(grammar, ends), -1
        started, cpu = time.perf_counter(), time.process_time()
        for matcher, token in zip(matchers, tokens.tolist(), strict=True):
            if matcher is not None and token >= 0:
                matcher.accept(token)
        fill_masks(masks, [MaskRow(matcher, i) for i, matcher in enumerate(matchers) if matcher is not None])
        seconds = time.perf_counter() - started, time.process_time() - cpu
        tokens[:] = [random_token(mask, rng) for mask in masks]
        if step >= STEPS // 10:
            yield seconds


def random_token(mask: np.ndarray, rng: np.random.Generator) -> int:
    """A token that a mask allows."""
    drawn = rng.integers(0, 32 * len(mask), 64)
    allowed = drawn[mask[drawn // 32] >> (drawn % 32).astype(np.uint32) & 1 == 1]
    if len(allowed) == 0:
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        rng.shuffle(allowed)
    return int(allowed[0])


def main() -> None:
    if len(sys.argv) > 1:
        tokenizer = JsonTokenizer(tokenizers.Tokenizer.from_file(sys.argv[1]))
        ends = frozenset([min(tokenizer.special_ids)])
    else:
        tokenizer = large_vocabulary()
        ends = tokenizer.eos_ids
    compiler = GrammarCompiler(tokenizer, len(tokenizer))
    for kind in ("first", "next"):
        started = time.perf_counter()
        compiler.matcher(Grammar.json_schema(SCHEMA | {"title": kind}), ends)
        print(f"the {kind} grammar: {(time.perf_counter() - started) * 1e3:.1f} ms")
    compiler.matcher(Grammar.json_schema(SCHEMA), ends)
    started = time.perf_counter()
    compiler.matcher(Grammar.json_schema(SCHEMA), ends)
    print(f"a grammar that is kept: {(time.perf_counter() - started) * 1e6:.0f} us")
    print(f"{len(tokenizer):,} tokens, {len(os.sched_getaffinity(0))} cores; microseconds per step")
    print("sequences  median  99th percentile  of all cores, per sequence")
    for count in (1, 8, 32, 256):
        wall, cpu = np.array(list(steps(compiler, ends, len(tokenizer), count))).T * 1e6
        print(
            f"{count:9} {np.median(wall):7.0f} {np.percentile(wall, 99):16.0f} {cpu.mean() / count:27.0f}", flush=True
        )


if __name__ == "__main__":
    main()
