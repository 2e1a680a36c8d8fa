"""Write a random checkpoint of a model's shape, for measurements that depend on sizes alone, such as migration.

    python benchmarks/make_random_checkpoint.py --shape llama-3-8b OUT

Matrices and embeddings are normal with a standard deviation of 0.02, as at a model's initialization. The weights of
norms are log-normal around 1, and one channel in a thousand is 10 times larger, so that activations have outliers. The
tokenizer is the bundled model's, which has fewer tokens than the shape's vocabulary.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import bminf_lite
from bminf_lite import models
from bminf_lite.bench.model import read_shape
from bminf_lite.checkpoint.tensor_file import DTYPES
from bminf_lite.checkpoint.writer import CheckpointWriter, TensorDeclaration, write_json
from bminf_lite.errors import UsageError
from bminf_lite.models.spec import Parameter, Role

DEMO = Path(bminf_lite.__file__).parent / "demo_model"
BLOCK = 1 << 22


def make(folder: Path, shape: str, layers: int | None = None, dtype: str = "BF16", seed: int = 0) -> None:
    """Write the checkpoint into the new folder; ``layers`` replaces the shape's own number of them."""
    config = read_shape(shape)
    if layers is not None:
        config["num_hidden_layers"] = layers
    architecture = models.find(config)
    spec = architecture.spec(architecture.parse(config))
    parameters = {name: p for name, p in spec.parameters.items() if name not in spec.tied}
    declared = {name: TensorDeclaration(dtype, p.shape) for name, p in parameters.items()}
    folder.mkdir(parents=True)
    writer = CheckpointWriter(folder, declared, set())

    def fill(job: tuple[int, str, int, int]) -> None:
        number, name, first, last = job
        random = np.random.default_rng([seed, number, first])
        if parameters[name].role is Role.VECTOR:
            values = np.exp(random.standard_normal(last - first, np.float32) / 4)
            values[random.random(last - first) < 0.001] *= 10
        else:
            values = random.standard_normal(last - first, np.float32) * np.float32(0.02)
        stored = values.astype(DTYPES[dtype])
        writer.write(name, stored, first * stored.itemsize)

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(fill, _blocks(parameters)))
        writer.finish()
    finally:
        writer.close()
    write_json(folder / "config.json", config)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / file, folder / file)


def _blocks(parameters: Mapping[str, Parameter]) -> Iterator[tuple[int, str, int, int]]:
    """Blocks of elements of each tensor: its number, its name, the first element and the end."""
    for number, (name, parameter) in enumerate(parameters.items()):
        size = int(np.prod(parameter.shape))
        yield from ((number, name, first, min(first + BLOCK, size)) for first in range(0, size, BLOCK))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", required=True, help="a name as in bench --shape, or a config.json")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--dtype", choices=("BF16", "F16", "F32"), default="BF16")
    arguments = parser.parse_args()
    try:
        make(arguments.out, arguments.shape, arguments.layers, arguments.dtype)
    except (UsageError, FileExistsError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
