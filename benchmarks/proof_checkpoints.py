"""Write the checkpoints and requests of the proof: every architecture with tiny random weights, by several recipes.

    PYTHONPATH=TREE python proof_checkpoints.py FOLDER

Both trees of a comparison read the same folder. Tiny models have widths that no kernel likes, such as 48. A few wide
ones have the head sizes of published models, and enough requests that a step has more rows than a tile.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from proof_bits import Case, save_cases

sys.path += [str(Path(__file__).parents[1] / "tests" / part) for part in ("api", "engine", "models")]

from test_every_architecture import CONFIGS
from tiny_models import Golden, RandomWeights, random_tokens

import bminf_lite
from bminf_lite import models

SEED = 7
MAX_NEW_TOKENS = 24
RECIPES = ("w8a8", "w8a16", "float")
_WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}
WIDE: dict[str, dict[str, Any]] = {
    "wide llama": {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, **_WIDE},
    "wide gemma3_text": {
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        **_WIDE,
    },
    "wide gpt2": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 2,
        "n_head": 12,
        "vocab_size": 4097,
        "n_positions": 1024,
    },
    "wide cpm2": {
        "model_type": "cpm2",
        "vocab_size": 4096,
        "d_model": 512,
        "d_ff": 1280,
        "d_kv": 64,
        "num_heads": 8,
        "num_layers": 2,
        "num_decoder_layers": 2,
    },
}


def prompts(vocab_size: int, lengths: list[int], shared: int) -> list[list[int]]:
    """Random prompts; those after the first begin with its first ``shared`` tokens where they are longer than that."""
    found = [random_tokens(i, length, vocab_size).tolist() for i, length in enumerate(lengths)]
    return [found[0], *(found[0][:shared] + p[shared:] if len(p) > shared else p for p in found[1:])]


def write_model(folder: Path, name: str, config: dict[str, Any], recipes: list[str]) -> list[Case]:
    """Write a model's checkpoints, one for each recipe; returns their cases."""
    folder.mkdir(parents=True)
    golden = Golden(name, config, SEED, "", random_tokens(1, 1, 2), random_tokens(1, 1, 2))
    source = golden.save(folder / "float", RandomWeights(config, SEED).tensors)
    is_wide = name in WIDE
    # Steps of 48 or 256 tokens, which the first prompts exceed; a wide model then has 70 sequences of 1 to 60 tokens.
    lengths = [300, 290, *(1 + 7 * i % 60 for i in range(70))] if is_wide else [110, 100, 7, 31, 1]
    parsed = models.find(config).parse(config)
    requests = prompts(parsed.vocab_size, lengths, 90)
    cases = []
    for recipe in recipes:
        if recipe != "float":
            bminf_lite.migrate(source, folder / recipe, recipe, device="cpu")
        path = str((folder / recipe).resolve())
        num_tokens = 256 if is_wide else 48
        cases.append(Case(name, recipe, path, parsed.is_encoder_decoder, num_tokens, MAX_NEW_TOKENS, requests))
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", help="names separated by commas; all by default")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    arguments = parser.parse_args()
    configs = CONFIGS | WIDE
    chosen = arguments.models.split(",") if arguments.models else list(configs)
    cases = []
    for name in chosen:
        folder = arguments.folder / name.replace(" ", "-")
        cases += write_model(folder, name, configs[name], arguments.recipes.split(","))
    save_cases(arguments.folder / "cases.json", cases)


if __name__ == "__main__":
    main()
