"""Write a recipe: down projections with float activations, everything else w8a8."""

import tempfile
from importlib.resources import files
from pathlib import Path

import bminf_lite

RECIPE = """
linear = "w8a8"
head = "w8a8"
[rules]
"*.down_proj.weight" = "w8a16"
"""
source = Path(str(files("bminf_lite"))) / "demo_model"

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "mine.toml").write_text(RECIPE)
    for recipe in ("w8a8", folder / "mine.toml", "w8a16"):
        out = folder / f"int8-{Path(recipe).stem}"
        bminf_lite.migrate(source, out, recipe)
        found = bminf_lite.compare(out, source, source / "heldout.txt", tokens=1024, layers=False)
        print(f"{Path(recipe).stem:6}  divergence {found.divergence.kl:.5f} nats per token")
