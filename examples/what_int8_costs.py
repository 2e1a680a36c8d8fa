"""Measure what int8 costs a model on a text, and find the products that lose most."""

import tempfile
from importlib.resources import files
from pathlib import Path

import bminf_lite

source = Path(str(files("bminf_lite"))) / "demo_model"
text = source / "heldout.txt"  # a text of the kind that the model will see

with tempfile.TemporaryDirectory() as folder:
    bminf_lite.migrate(source, Path(folder) / "int8")
    found = bminf_lite.compare(Path(folder) / "int8", source, text, tokens=1024)
    print(found)
    for linear in sorted(found.linears, key=lambda linear: linear.own.snr_db)[:3]:
        print(f"{linear.own.snr_db:5.1f} dB  {linear.scheme}  {linear.name}")
