"""Measures bminf_lite.torch on a GPU beside eager torch, torch.compile, Triton, torch._int_mm and bitsandbytes.

    python benchmarks/bench_torch.py results.json [section ...] [--prepare]

Sections: rows, square, linear, tiles, dot, backward, host, stream, lora, decode, engine; all by default. A library that
is not installed has no results. A section that fails is reported and left out. Device times are of CUDA graphs'
replays.
``--prepare`` calls everything that is compiled once, which fills the compilers' caches, and measures nothing.
``torch_report.py`` makes tables and plots of the results.
"""

# ruff: noqa: B023 - each lambda runs in the iteration that makes it

from __future__ import annotations

import functools
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bminf_lite.bench.model import read_shape
from bminf_lite.cuda.runtime.libraries import driver_release
from bminf_lite.torch import Int8Linear, _kernels, ops, streaming, wrap
from bminf_lite.torch._choices import TileChoices, row_class
from bminf_lite.torch.measuring import bandwidth, measure

try:
    import triton_peers
except ImportError:
    triton_peers = None  # type: ignore[assignment]
try:
    import bitsandbytes
except ImportError:
    bitsandbytes = None

GPU = torch.device("cuda", 0)
ELEMENTS = 1 << 26
"""The elements of a tensor of rows: 128 MiB in 16 bits, more than the L2 cache holds."""
WIDTHS = (256, 1024, 2048, 4096, 8192, 16384)
LINEARS = {"q, o": (4096, 4096), "k, v": (4096, 1024), "gate, up": (4096, 14336), "down": (14336, 4096)}
"""in_features and out_features of the products of a layer of LLaMA 8B."""
GIB = 1 << 30
PROMPT, DECODED, ROUNDS = 512, 64, 3
"""Tokens before decoding, decoded tokens, and how often that and the measurement of host times are repeated."""
DECODED_SHAPE = "llama-3-8b"
COMPILED_CASE = "compiled, static cache"
Peers = dict[str, Callable[..., Any]]


@dataclass
class Recorder:
    """The results so far, which ``path`` holds too. With ``prepare`` functions are called and not measured."""

    path: Path
    about: dict[str, Any]
    prepare: bool
    results: list[dict[str, Any]] = field(default_factory=list)

    def add(self, section: str, case: str, name: str, found: dict[str, Any]) -> None:
        """One result, which is printed and written too: the process may be ended before the next."""
        self.results.append({"section": section, "case": case, "name": name, **found})
        self.path.write_text(json.dumps({"about": self.about, "results": self.results}, indent=1))
        share = "" if found.get("bandwidth_share") is None else f"{found['bandwidth_share']:6.1%}"
        host = f"host {found['host_seconds'] * 1e6:6.1f}" if "host_seconds" in found else ""
        print(f"{section:9} {case:28} {name:16} {found['seconds'] * 1e6:12.1f} us {share} {host}", flush=True)

    def time(
        self,
        section: str,
        case: str,
        peers: Peers,
        *arguments: Any,
        nbytes: int = 0,
        graph: bool = True,
        rounds: int = 1,
    ) -> None:
        """Measure each of ``peers``; one that fails is left out. Without ``graph`` a call may take the host longer.

        Of several ``rounds``, in each of which all peers are measured, the one with the median host time counts.
        """
        measured: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
        for _ in range(rounds):
            for name in list(measured):
                function, found = peers[name], measured[name]
                failure = self._time(function, arguments, nbytes, graph, found)
                if failure and graph and not self.prepare:  # some libraries cannot be captured
                    failure = self._time(function, arguments, nbytes, False, found)
                if failure:
                    print(f"{section:9} {case:28} {name:16} failed: {failure}", flush=True)
                    del measured[name]
                elif len(found) == rounds:
                    self.add(section, case, name, sorted(found, key=lambda f: f["host_seconds"])[rounds // 2])

    def _time(
        self, function: Callable[..., Any], arguments: Any, nbytes: int, graph: bool, found: list[dict[str, Any]]
    ) -> str:
        """Measure one function and add that to ``found``; returns why it failed."""
        try:
            if self.prepare:
                function(*arguments)
            else:
                values = measure(function, *arguments, bytes_moved=nbytes, batches=7, seconds=0.02, graph=graph)
                found.append(asdict(values) | {"graph": graph})
        except Exception as error:
            return (str(error) or type(error).__name__).splitlines()[0][:120]
        return ""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for one shape."""
    return torch.compile(function, dynamic=False)


def rows(to: Recorder) -> None:
    """Softmax and norms over rows, fp16 and fp32, against the engine's kernels, torch, its compiler and Triton."""
    engine = engine_rows()
    for dtype in (torch.float16, torch.float32):
        for k in WIDTHS:
            torch._dynamo.reset()
            x = torch.randn(ELEMENTS // k, k, device=GPU, dtype=dtype)
            weight, bias = torch.randn(2, k, device=GPU, dtype=dtype).unbind(0)
            weight, bias = weight.contiguous(), bias.contiguous()
            peers: dict[str, Peers] = {
                "softmax": {"ours": ops.softmax, "torch": lambda x: torch.softmax(x, -1)},
                "layer_norm": {
                    "ours": lambda x, w=weight, b=bias: ops.layer_norm(x, w, b),
                    "torch": lambda x, w=weight, b=bias: F.layer_norm(x, w.shape, w, b),
                },
                "rms_norm": {
                    "ours": lambda x, w=weight: ops.rms_norm(x, w),
                    "torch": lambda x, w=weight: F.rms_norm(x, w.shape, w, 1e-6),
                },
            }
            if triton_peers:
                peers["softmax"]["triton"] = triton_peers.softmax
                peers["layer_norm"]["triton"] = lambda x: triton_peers.norm(x, weight, bias, 1e-5)
                peers["rms_norm"]["triton"] = lambda x: triton_peers.norm(x, weight, None, 1e-6)
            if engine is not None:
                for name, function in engine(x, weight, bias).items():
                    peers[name]["engine"] = function
            for name, by_library in peers.items():
                by_library["compile"] = compiled(by_library["torch"])
                to.time("rows", f"{name} {str(dtype)[6:]} {k}", by_library, x, nbytes=2 * x.nbytes)


def engine_rows() -> Callable[..., dict[str, Callable[..., Any]]] | None:
    """The engine's own kernels: softmax as it is, norms of fp32 rows. None without CuPy."""
    try:
        import cupy as cp
    except ImportError:
        return None
    from bminf_lite.backend.values import Norm
    from bminf_lite.cuda.kernels.launcher import Launcher, StepContext
    from bminf_lite.cuda.kernels.rowwise.rows import RowKernels
    from bminf_lite.cuda.kernels.rowwise.softmax import Softmax
    from bminf_lite.cuda.runtime.driver import Device

    launcher = Launcher(Device(0), 0)
    softmax, norms, step = Softmax(launcher), RowKernels(launcher), StepContext()

    def functions(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> dict[str, Callable[..., Any]]:
        source, out = cp.from_dlpack(x), cp.empty(x.shape, cp.dtype(str(x.dtype)[6:]))

        def on_stream(work: Callable[[], None]) -> Callable[..., None]:
            def run(_: torch.Tensor) -> None:
                launcher.stream = torch.cuda.current_stream().cuda_stream
                work()

            return run

        found = {"softmax": on_stream(lambda: softmax.launch(step, source, 1.0, None, None, out))}
        if x.dtype == torch.float32:
            w, b = cp.from_dlpack(weight), cp.from_dlpack(bias)
            layer, rms = Norm(w, 1e-5, b, True), Norm(w, 1e-6)
            found["layer_norm"] = on_stream(lambda: norms.norm(step, source, layer, out))
            found["rms_norm"] = on_stream(lambda: norms.norm(step, source, rms, out))
        return found

    return functions


def square(to: Recorder) -> None:
    """square_linear_ of 8,192 rows against cuBLAS and Triton, which need memory for the result, fp16."""
    for n in (512, 1024, 2048, 4096, 8192):
        x, w = torch.randn(8192, n, device=GPU, dtype=torch.float16), torch.randn(n, n, device=GPU, dtype=torch.float16)
        w /= n**0.5
        peers: Peers = {"ours": ops.square_linear_, "torch": F.linear}
        if triton_peers:
            peers["triton"] = lambda x, w: triton_peers.matmul(x, w.t())
        to.time("square", f"n={n}", peers, x, w)


def weight_of(k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and a bf16 weight of the same size."""
    codes = torch.randint(-127, 128, (n, k), device=GPU, dtype=torch.int8)
    return codes, torch.rand(n, device=GPU) * 1e-3, torch.randn(n, k, device=GPU, dtype=torch.bfloat16)


def plain_int8_linear(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """w8a8 in PyTorch's own operations, for its compiler."""
    row_scale = x.abs().amax(-1, keepdim=True).float() / 127
    row_codes = (x / row_scale).round().clamp(-127, 127).to(torch.int8)
    return (torch._int_mm(row_codes, codes.t()) * scale * row_scale).to(x.dtype)


def linear(to: Recorder) -> None:
    """int8_linear against bf16 nn.Linear and other int8 products, at few and at many rows."""
    for case, (k, n) in LINEARS.items():
        codes, scale, weight = weight_of(k, n)
        of_library = library_linear(codes, scale) if bitsandbytes else None
        for count in (1, 4, 16, 2048):
            torch._dynamo.reset()
            x = torch.randn(count, k, device=GPU, dtype=torch.bfloat16)
            row_codes = torch.randint(-127, 128, (max(count, 32), k), device=GPU, dtype=torch.int8)
            peers: Peers = {
                "w8a8": lambda x: ops.int8_linear(x, codes, scale),
                "w8a16": lambda x: ops.int8_linear(x, codes, scale, dynamic=False),
                "torch": lambda x: F.linear(x, weight),
                "_int_mm": lambda x: torch._int_mm(row_codes, codes.t()),
            }
            if count > 16:  # what _int_mm takes
                peers["compile"] = compiled(lambda x: plain_int8_linear(x, codes, scale))
            if triton_peers:
                peers["triton"] = lambda x: triton_peers.int8_linear(x, codes, scale)
            if of_library is not None:
                peers["bitsandbytes"] = of_library
            to.time("linear", f"{case} rows={count}", peers, x)


def tiles(to: Recorder) -> None:
    """Int8 products of many rows with the tiles that were measured, and with the modelled ones."""
    own = _kernels.kernels_of(torch.empty(1, device=GPU))
    assert own.products_verified
    for case, (k, n) in LINEARS.items():
        codes, scale, _ = weight_of(k, n)
        for count in (128, 512, 1000, 2048, 8192):
            x = torch.randint(-127, 128, (count, k), device=GPU, dtype=torch.int8)
            row_scale = torch.rand(count, device=GPU)

            def product(choices: TileChoices) -> None:
                own.tiles, kept = choices, own.tiles
                ops.dot(x, codes, False, True, a_scale=row_scale, b_scale=scale, dtype=torch.bfloat16)
                own.tiles = kept

            start = time.perf_counter()
            product(own.tiles)
            torch.cuda.synchronize()
            first = time.perf_counter() - start
            peers: Peers = {"measured": lambda: product(own.tiles), "modelled": lambda: product(Modelled())}
            to.time("tiles", f"{case} rows={count}", peers)
            chosen = own.tiles.known((row_class(count), n, k, torch.bfloat16))
            print(f"  {chosen}, first product {first * 1e3:.1f} ms", flush=True)


class Modelled(TileChoices):
    """Chooses nothing, which leaves the modelled configuration."""

    def measure(self, *arguments: Any) -> None:
        """Nothing."""


def library_linear(codes: torch.Tensor, scale: torch.Tensor) -> Callable[..., Any]:
    """bitsandbytes' layer without outlier columns, of an fp16 input, made at the first call."""
    n, k = codes.shape

    @functools.cache
    def layer() -> nn.Module:
        made = bitsandbytes.nn.Linear8bitLt(k, n, bias=False, has_fp16_weights=False, threshold=0.0)
        weight = (codes * scale[:, None]).half().cpu()
        made.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        return made.to(GPU)

    return lambda x: layer()(x.half())


def dot(to: Recorder) -> None:
    """Products of 2,048 x 4,096 by 4,096 x 4,096 in the four forms: int8 with scales, and bf16."""
    (a, a_scale, a_float), (b, b_scale, b_float) = weight_of(4096, 2048), weight_of(4096, 4096)
    for ta in (False, True):
        for tb in (False, True):
            left, right = (a.t().contiguous() if ta else a), (b if tb else b.t().contiguous())
            wide = (a_float.t().contiguous() if ta else a_float), (b_float if tb else b_float.t().contiguous())
            m, w = (left.t() if ta else left), (right.t() if tb else right)
            peers: Peers = {
                "ours": lambda: ops.dot(left, right, ta, tb, a_scale=a_scale, b_scale=b_scale, dtype=torch.bfloat16),
                "ours, bf16": lambda: ops.dot(*wide, ta, tb),
                "torch, bf16": lambda: (wide[0].t() if ta else wide[0]) @ (wide[1].t() if tb else wide[1]),
                "_int_mm": lambda: torch._int_mm(m.contiguous(), w),
            }
            if triton_peers:
                peers["triton"] = lambda: triton_peers.matmul(m, w, a_scale, b_scale, torch.bfloat16)
            form = f"{'a.T' if ta else 'a'} @ {'b.T' if tb else 'b'}"
            to.time("dot", form, peers)


def backward(to: Recorder) -> None:
    """The input gradient of int8_linear against bf16's, 2,048 rows, and gradients of RMSNorm."""
    for case, (k, n) in LINEARS.items():
        codes, scale, weight = weight_of(k, n)
        dy = torch.randn(2048, n, device=GPU, dtype=torch.bfloat16)
        peers: Peers = {
            "ours": lambda dy: ops.int8_linear_backward(dy, codes, scale),
            "torch": lambda dy: dy @ weight,
        }
        to.time("backward", case, peers, dy)
    for k in (1024, 4096, 8192):
        x = torch.randn(ELEMENTS // 2 // k, k, device=GPU, dtype=torch.bfloat16)
        weight, dy = torch.randn(k, device=GPU, dtype=torch.bfloat16), torch.randn_like(x)
        for name, function in (
            ("ours", lambda x, w: ops.rms_norm(x, w)),
            ("torch", lambda x, w: F.rms_norm(x, w.shape, w, 1e-6)),
        ):
            own, gain = x.clone().requires_grad_(), weight.clone().requires_grad_()
            y = function(own, gain)
            gradient = {name: lambda: torch.autograd.grad(y, (own, gain), dy, retain_graph=True)}
            to.time("backward", f"rms_norm bfloat16 {k}", gradient, graph=False)


def host(to: Recorder) -> None:
    """The host's time of a call on small tensors, without gradients."""
    codes, scale, weight = weight_of(256, 256)
    x, gain = torch.randn(16, 256, device=GPU, dtype=torch.bfloat16), torch.ones(256, device=GPU, dtype=torch.bfloat16)
    row, out = x[:1].clone(), torch.empty_like(x)
    peers: Peers = {
        "softmax": lambda: ops.softmax(x),
        "softmax_": lambda: ops.softmax_(out),
        "rms_norm": lambda: ops.rms_norm(x, gain),
        "layer_norm": lambda: ops.layer_norm(x, gain, gain),
        "quantize_rows": lambda: ops.quantize_rows(x),
        "int8_linear, 1 row": lambda: ops.int8_linear(row, codes, scale),
        "int8_linear, 16 rows": lambda: ops.int8_linear(x, codes, scale),
        "torch.softmax": lambda: torch.softmax(x, -1),
        "F.rms_norm": lambda: F.rms_norm(x, gain.shape, gain, 1e-6),
        "F.linear": lambda: F.linear(x, weight),
    }
    if triton_peers:
        peers["triton softmax"] = lambda: triton_peers.softmax(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            to.time("host", mode.__name__, peers, graph=False, rounds=ROUNDS)


def random_linear(k: int, n: int) -> Int8Linear:
    codes = torch.randint(-127, 128, (n, k), device=GPU, dtype=torch.int8)
    return Int8Linear(codes, torch.full((n,), 1 / 64 / k**0.5, device=GPU))


def random_llama(shape: str) -> nn.Module:
    """A transformers model of a shape of ``bminf-lite bench`` with random codes in all of its linear layers."""
    import transformers
    from accelerate import init_empty_weights

    config = transformers.AutoConfig.for_model(**read_shape(shape))
    config.dtype = torch.bfloat16
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, module in list(model.named_modules()):
        path, _, attribute = name.rpartition(".")
        if isinstance(module, nn.Linear):
            setattr(model.get_submodule(path), attribute, random_linear(module.in_features, module.out_features))
            continue
        for key, parameter in list(module.named_parameters(recurse=False)):
            values = torch.randn(parameter.shape, device=GPU, dtype=torch.bfloat16) / 64 + (parameter.dim() == 1)
            module.register_parameter(key, nn.Parameter(values))
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.device.type == "meta":
                raise RuntimeError(f"{name}.{key} has no value")
    return model


def link_speed() -> float:
    """Bytes per second from pinned memory to the GPU."""
    source = torch.empty(GIB, dtype=torch.int8, pin_memory=True)
    target = torch.empty_like(source, device=GPU)
    return GIB / measure(functools.partial(target.copy_, source, True), batches=5, seconds=0.3).seconds


def peaks() -> dict[str, int]:
    """The peaks of torch's allocator since they were last reset, in bytes."""
    return {"peak": torch.cuda.max_memory_allocated(), "peak_reserved": torch.cuda.max_memory_reserved()}


def stream(to: Recorder) -> None:
    """Forward of a model of LLaMA 70B's shape, 2,048 tokens, in 24 GiB: the share of the link that the copies reach.

    All 80 layers have memory of their own: 70 GB on the GPU while the model is made, and 50 GB of pinned memory.
    """
    link = link_speed()
    model = random_llama("llama-3-70b").eval()
    streamed = streaming.place(model, GPU, 22 * GIB)
    stream = next(
        layer.host_codes.stream
        for layer in model.modules()
        if isinstance(layer, Int8Linear) and isinstance(layer.host_codes, streaming.StreamedCodes)
    )
    tokens = torch.randint(0, model.get_input_embeddings().num_embeddings, (1, 2048), device=GPU)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    with torch.no_grad():
        for index in range(1 + ROUNDS):
            torch.cuda.synchronize()
            before, start = stream.copied_bytes, time.perf_counter()
            model(input_ids=tokens, use_cache=False, logits_to_keep=1)
            torch.cuda.synchronize()
            if index:
                seconds.append(time.perf_counter() - start)
            copied = stream.copied_bytes - before
    median = statistics.median(seconds)
    share = copied / median / link
    print(f"{streamed} of 80 blocks streamed, link {link / 1e9:.1f} GB/s, {share:.1%} of it, {peaks()}")
    found = {"seconds": median, "link": link, "share": share, "blocks": streamed, "copied": copied, **peaks()}
    to.add("stream", "70B shape, 2,048 tokens", "forward", found)


def lora(to: Recorder) -> None:
    """Steps of LoRA training of a model of LLaMA 8B's shape with 512 tokens, within a limit for its weights."""
    import peft

    link, model = link_speed(), random_llama("llama-3-8b")
    streamed = streaming.place(model, GPU, int(3.5 * GIB))
    adapters = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trained = peft.get_peft_model(model, adapters)
    trained.enable_input_require_grads()
    trained.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained.train()
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-4)
    tokens = torch.randint(0, model.get_input_embeddings().num_embeddings, (1, 512), device=GPU)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses = []

    def step() -> None:
        loss = trained(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    found = asdict(measure(step, batches=3, seconds=0.1))
    values = [round(float(loss), 3) for loss in losses]
    print(f"{streamed} of 32 blocks streamed, {peaks()}, {values}")
    to.add(
        "lora", "8B shape, 512 tokens", "step", found | {"link": link, "blocks": streamed, "losses": values} | peaks()
    )


def decode(to: Recorder, shape: str = DECODED_SHAPE, device: str = "cuda") -> None:
    """Tokens of a model of LLaMA 8B's shape with a static cache: compiled in bf16 and wrapped, then both eagerly.

    Each model is compiled in a process of its own, both at the same time; they take turns when they are measured.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for name in ("bf16", "w8a8"):
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=serve_decode, args=(name, shape, device, theirs)))
        processes[-1].start()
        theirs.close()
    for case in ("ready",) if to.prepare else ("ready", COMPILED_CASE, "eager"):
        for name, pipe in list(pipes.items()):
            try:
                pipe.send(case)
                found = pipe.recv()
            except (EOFError, OSError):
                print(f"decode    {case:28} {name:16} failed", flush=True)
                del pipes[name]
                continue
            if found:
                to.add("decode", case, name, found)
    for pipe in pipes.values():
        pipe.close()
    for process in processes:
        process.join()


def serve_decode(name: str, shape: str, device: str, pipe: Connection) -> None:
    """Compile one of the models; then answer each case by its measurement, until the pipe is closed."""
    from bench_peers import Transformers

    peer = Transformers(read_shape(shape), device, torch.bfloat16)
    if name != "bf16":
        wrap(peer.model, name)
        torch.cuda.empty_cache()
    start = time.perf_counter()
    peer.run(1, PROMPT, DECODED, compiled=True)
    print(f"  {name} compiled in {time.perf_counter() - start:.1f} s", flush=True)
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        if case == "ready":
            pipe.send(None)
            continue
        rounds = [peer.run(1, PROMPT, DECODED, compiled=case == COMPILED_CASE) for _ in range(ROUNDS)]
        first, token = (statistics.median(values) for values in zip(*rounds, strict=True))
        pipe.send({"seconds": token, "first": first, "allocated": torch.cuda.memory_allocated()})


def engine(to: Recorder, shape: str = DECODED_SHAPE, device: str = "cuda") -> None:
    """The same tokens by the engine, and how many times as fast as the compiled int8 model it is, if that was run."""
    from bench_peers import engine_peer

    run, close = engine_peer(read_shape(shape), device)
    try:
        run(1, PROMPT, DECODED)
        found = [run(1, PROMPT, DECODED) for _ in range(0 if to.prepare else ROUNDS)]
    finally:
        close()
    if found:
        first, token = (statistics.median(values) for values in zip(*found, strict=True))
        to.add("decode", "engine", "w8a8", {"seconds": token, "first": first})
        for result in to.results:
            if (result["section"], result["case"], result["name"]) == ("decode", COMPILED_CASE, "w8a8"):
                print(f"  the engine decodes {result['seconds'] / token:.2f} times as fast as the wrapped model")


SECTIONS = {
    "rows": rows,
    "square": square,
    "linear": linear,
    "tiles": tiles,
    "dot": dot,
    "backward": backward,
    "host": host,
    "stream": stream,
    "lora": lora,
    "decode": decode,
    "engine": engine,
}
COMPILED = ("rows", "linear", "tiles", "square", "dot", "decode", "engine")
"""Sections in which something is compiled."""


def version(library: Any) -> str:
    return "" if library is None else library.__version__


def main(arguments: list[str]) -> None:
    path, chosen = Path(arguments[0]), [a for a in arguments[1:] if not a.startswith("--")]
    prepare = "--prepare" in arguments
    about = {
        "gpu": torch.cuda.get_device_name(0),
        "driver": driver_release(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version(triton_peers and triton_peers.triton),
        "bitsandbytes": version(bitsandbytes),
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/bench_torch.py results.json",
        "copy_bandwidth": 0.0 if prepare else bandwidth(GPU),
    }
    to = Recorder(path, about, prepare)
    print(about)
    for name in chosen or (COMPILED if to.prepare else SECTIONS):
        start = time.perf_counter()
        try:
            SECTIONS[name](to)
        except Exception:
            traceback.print_exc()
        torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
