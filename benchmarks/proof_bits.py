"""Serve a fixed set of requests with the package that is on ``PYTHONPATH``, and print digests of what comes out.

    cd TREE && PYTHONPATH=. python .../proof_bits.py CASES.json --device cpu --worker 0/1

Only the public API is used, so that trees before and after a refactoring can be compared. A line of JSON is printed for
each case and each kind of cache, with the SHA-256 of all token ids and that of the bits of all log-probabilities.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GREEDY: dict[str, Any] = {"temperature": 0.0, "logprobs": 5}
SAMPLED: dict[str, Any] = {
    "temperature": 1.3,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.001,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": {3: 1.5, 5: -2.0},
    "seed": 7,
    "logprobs": 0,
}
NUM_ALONE = 2
"""Requests of the greedy call that are served again, one after the other."""
MEMORY_LIMIT = "2GiB"
"""The limit of each process on a GPU. It fixes the number of blocks of the cache, whatever else runs there."""


@dataclass(frozen=True)
class Case:
    """A checkpoint and the requests that it gets.

    ``prompts`` are token ids; those of an encoder-decoder are sources. Steps have ``max_num_batched_tokens``.
    """

    model: str
    recipe: str
    folder: str
    is_encoder_decoder: bool
    max_num_batched_tokens: int
    max_new_tokens: int
    prompts: list[list[int]]


def save_cases(file: Path, cases: Sequence[Case]) -> None:
    """Write cases, as :func:`load_cases` reads them."""
    file.write_text(json.dumps([asdict(case) for case in cases]))


def load_cases(file: Path) -> list[Case]:
    """The cases in a file."""
    return [Case(**case) for case in json.loads(file.read_text())]


def digest(numbers: Sequence[Any], code: str) -> str:
    """The SHA-256 of lists of numbers, nested as they are: each list is its length and its items, packed as ``code``.

    None, the log-probability of a first token, is packed as a NaN.
    """
    total = hashlib.sha256()

    def add(values: Any) -> None:
        if isinstance(values, (list, tuple)):
            total.update(struct.pack("<q", len(values)))
            for value in values:
                add(value)
        else:
            total.update(struct.pack(code, float("nan") if values is None else values))

    add(list(numbers))
    return total.hexdigest()


def serve(case: Case, device: str, kv_cache: str) -> dict[str, Any]:
    """Run a case's requests; returns digests, and whether requests gave alone what they gave together.

    - The greedy call serves all prompts together, with the most likely tokens.
    - The sampled one goes on behind each output of a decoder with a few more tokens, so prefixes are reused.
    - The log-probabilities of the first prompt's own tokens are computed, if there is a decoder alone.
    - A few prompts are served again one by one, with a salt that keeps them from the prefixes of others.
    """
    import bminf_lite

    assert Path(bminf_lite.__file__).is_relative_to(Path.cwd()), "a tree runs its own package"
    limit = None if device == "cpu" else MEMORY_LIMIT
    options: dict[str, Any] = {"max_new_tokens": case.max_new_tokens, "ignore_eos": True}
    sizes: dict[str, Any] = {"max_batch": 128, "max_num_batched_tokens": case.max_num_batched_tokens}
    with bminf_lite.load(case.folder, device, limit, kv_cache=kv_cache, **sizes) as model:
        greedy = model.generate(case.prompts, **options, **GREEDY)
        turns = case.prompts
        if not case.is_encoder_decoder:
            turns = [p + r.token_ids + p[:5] for p, r in zip(case.prompts, greedy, strict=True)]
        sampled = model.generate(turns, **options, **SAMPLED)
        scored = []
        if not case.is_encoder_decoder:
            one = options | {"max_new_tokens": 1}
            scored = [model.generate(case.prompts[0], prompt_logprobs=True, **one, **GREEDY)]
        alone = [
            model.generate(prompt, cache_salt=f"alone {i}", **options, **GREEDY)
            for i, prompt in enumerate(case.prompts[:NUM_ALONE])
        ]
    results = [*greedy, *sampled, *scored]
    logprobs = [[r.logprobs, r.top_logprobs or [], r.prompt_logprobs or []] for r in results]
    return {
        "tokens": digest([r.token_ids for r in results], "<q"),
        "logprobs": digest(logprobs, "<d"),
        "cached_tokens": sum(r.cached_tokens for r in results),
        "alone_is_together": all(
            (a.token_ids, a.logprobs, a.top_logprobs) == (b.token_ids, b.logprobs, b.top_logprobs)
            for a, b in zip(alone, greedy, strict=False)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-caches", default="fp16,int8")
    parser.add_argument("--worker", default="0/1", help="I/N: of N processes, this one takes every Nth case from I on")
    arguments = parser.parse_args()
    first, step = map(int, arguments.worker.split("/"))
    for case in load_cases(arguments.cases)[first::step]:
        for kv_cache in arguments.kv_caches.split(","):
            start = time.perf_counter()
            try:
                found = serve(case, arguments.device, kv_cache)
            except Exception as error:  # one case that fails leaves the others to be compared
                found = {"error": f"{type(error).__name__}: {error}"}
            found |= {"case": f"{case.model}, {case.recipe}, {kv_cache} cache", "seconds": time.perf_counter() - start}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
