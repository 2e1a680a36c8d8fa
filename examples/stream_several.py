"""Stream the completions of several prompts that are decoded together."""

from importlib.resources import files
from pathlib import Path

import bminf_lite

PROMPTS = ["The module", "Return a list", "Raise an error if"]
params = bminf_lite.SamplingParams(temperature=0.8, top_p=0.9, max_new_tokens=24, seed=1)

with bminf_lite.load(Path(str(files("bminf_lite"))) / "demo_model", max_batch=8) as model:
    texts = dict(enumerate(PROMPTS))
    for piece in model.stream(PROMPTS, params):
        texts[piece.index] += piece.text
        if piece.result is not None:
            print(f"{piece.index}: {texts[piece.index]!r}")
