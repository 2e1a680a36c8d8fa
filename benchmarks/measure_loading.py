"""Time loading a checkpoint from the page cache to the GPU, and reading its files alone.

    python benchmarks/measure_loading.py --shape llama-3-8b --folder /tmp/measure [--memory-limit 6GiB]
    python benchmarks/measure_loading.py --shape llama-3-70b --folder /dev/shm/measure --gpus 1,2 --repeat 2

The command makes a random checkpoint of the shape in ``--folder``, as ``migrate`` writes it (w8a8, the embedding in
bf16), and loads it ``--repeat`` times, each time in a process of its own. "reading" is the time of eight threads that
read the files into memory, "import" that of importing the package, "load" that of :func:`bminf_lite.load`, and "tokens"
that of the first eight tokens after a prompt of eight, which includes compiling kernels that are not in the cache.
``--gpus`` names how many GPUs the model is divided between, or several numbers, which are loaded in turn.
``--profile`` profiles one more load of each. The folder is removed at the end.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

THREADS, BLOCK = 8, 16 << 20


def make_checkpoint(folder: Path, shape: str) -> None:
    """Random w8a8 weights. Norms are 1, so that activations stay finite."""
    from bminf_lite import models
    from bminf_lite.bench.model import read_shape
    from bminf_lite.checkpoint.compressed_tensors import quantization_config
    from bminf_lite.checkpoint.recipe import Scheme
    from bminf_lite.checkpoint.writer import CheckpointWriter, TensorDeclaration
    from bminf_lite.models.spec import Role

    config = read_shape(shape)
    architecture = models.find(config)
    spec = architecture.spec(architecture.parse(config))
    matrices = [n for n, p in spec.parameters.items() if p.role in (Role.LINEAR, Role.HEAD) and n not in spec.tied]
    kept = [name for name in spec.parameters if name not in spec.tied and name not in matrices]
    declared = {name: TensorDeclaration("I8", spec.parameters[name].shape) for name in matrices}
    declared |= {f"{name}_scale": TensorDeclaration("F16", (spec.parameters[name].shape[0], 1)) for name in matrices}
    declared |= {name: TensorDeclaration("BF16", spec.parameters[name].shape) for name in kept}
    quantized = quantization_config({name.removesuffix(".weight"): Scheme.W8A8 for name in matrices})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    writer = CheckpointWriter(folder, declared, set())

    def write(index: int, name: str) -> None:
        random = np.random.default_rng(index)
        shape, nbytes = declared[name].shape, declared[name].nbytes
        if declared[name].dtype == "I8":
            writer.write(name, np.frombuffer(random.bytes(nbytes), np.int8))
            scale = random.uniform(0.5, 1.5, shape[0]) / (73.3 * shape[1] ** 0.5)
            writer.write(f"{name}_scale", scale.astype(np.float16))
        elif len(shape) == 2:
            writer.write(name, np.frombuffer(random.bytes(nbytes), np.uint16) & np.uint16(0xBFFF))  # between -2 and 2
        else:
            writer.write(name, np.full(shape, 0x3F80, np.uint16))

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(write, range(len(matrices + kept)), matrices + kept))
    writer.finish()


def read_all(folder: Path) -> float:
    """Seconds for reading every file block by block, from the page cache if it is there."""
    files = [os.open(path, os.O_RDONLY) for path in sorted(folder.iterdir())]
    places = [(fd, offset) for fd in files for offset in range(0, os.fstat(fd).st_size, BLOCK)]
    buffers = [memoryview(bytearray(BLOCK)) for _ in range(THREADS)]

    def read(first: int) -> None:
        for fd, offset in places[first::THREADS]:
            os.preadv(fd, [buffers[first]], offset)

    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(read, range(THREADS)))
    return time.perf_counter() - start


def child(folder: Path, memory_limit: str | None, gpus: int, profile: bool) -> None:
    """Load once: prints seconds, and the peak of the first GPU's memory in bytes."""
    start = time.perf_counter()
    from bminf_lite.api import load

    imported = time.perf_counter()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    with load(folder, "cuda", memory_limit, gpus=gpus) as model:
        loaded = time.perf_counter()
        profiler.disable()
        model.generate([1, 2, 3, 4, 5, 6, 7, 8], max_new_tokens=8, temperature=0, ignore_eos=True)
        generated = time.perf_counter()
        reserved = model.memory()["peak_reserved"]
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
        return
    names = ("import", "load", "tokens")
    times = (imported - start, loaded - imported, generated - loaded)
    print(json.dumps(dict(zip(names, times, strict=True)) | {"reserved": reserved}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--memory-limit", metavar="SIZE")
    parser.add_argument("--gpus", default="1", help="how many GPUs a load takes, or several numbers with commas")
    parser.add_argument("--repeat", type=int, default=5, help="loads for each number of GPUs")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    checkpoint = args.folder / "checkpoint"
    if args.child:
        child(checkpoint, args.memory_limit, int(args.gpus), args.profile)
        return
    from bminf_lite.cuda.doctor import require_usable  # not at the top: the child measures what importing takes
    from bminf_lite.errors import DeviceError

    try:
        require_usable(0)
    except DeviceError as error:
        sys.exit(f"error: {error}")
    make_checkpoint(checkpoint, args.shape)
    try:
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
        reading = statistics.median(read_all(checkpoint) for _ in range(3))
        print(f"{size / 1e9:.2f} GB; reading {reading:.2f} s, {size / reading / 1e9:.1f} GB/s")
        command = [sys.executable, __file__, "--folder", str(args.folder), "--child"]
        command += ["--memory-limit", args.memory_limit] if args.memory_limit else []
        for gpus in args.gpus.split(","):
            own = [*command, "--gpus", gpus]
            runs = []
            for _ in range(args.repeat):
                done = subprocess.run(own, stdout=subprocess.PIPE, text=True)  # its errors are for the user
                if done.returncode:
                    sys.exit(done.returncode)
                runs.append(json.loads(done.stdout))
                print(", ".join(f"{name} {runs[-1][name]:.2f} s" for name in ("import", "load", "tokens")), flush=True)
            load = statistics.median(run["load"] for run in runs)
            reserved = runs[-1]["reserved"] / 1e9
            used = f"{reserved:.2f} GB of {'the' if gpus == '1' else 'the first'} GPU are in use"
            print(f"--gpus {gpus}: load: median {load:.2f} s, {size / load / 1e9:.1f} GB/s; then {used}", flush=True)
            if args.profile:
                subprocess.run([*own, "--profile"], check=True)
    finally:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
