"""Bring the bundled model to int8, and generate text with it."""

import tempfile
from importlib.resources import files
from pathlib import Path

import bminf_lite

source = Path(str(files("bminf_lite"))) / "demo_model"  # or the folder of your own checkpoint

with tempfile.TemporaryDirectory() as folder:
    report = bminf_lite.migrate(source, Path(folder) / "int8")
    print(report)
    with bminf_lite.load(Path(folder) / "int8") as model:
        print(model)
        result = model.generate("If the file", max_new_tokens=48, temperature=0.7, seed=5)
        print(f"If the file{result}")
        print(f"{result.timings.decode_tokens_per_second:,.0f} tokens per second, ended by {result.finish_reason}")
    checked = bminf_lite.verify(Path(folder) / "int8")
    print(f"{checked.files} files are as migration wrote them")
