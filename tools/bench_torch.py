"""Measures bminf_lite.torch on a GPU beside eager torch, torch.compile, Triton and torch._int_mm; writes JSON.

    python tools/bench_torch.py results.json [section ...]

Sections: rows, square, linear, backward, host, stream, lora; all by default. With --compile rows also measures
torch.compile. A section that fails is reported and left out. Device times are of CUDA graphs' replays.
"""

# ruff: noqa: B023 - each lambda runs in the iteration that makes it

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bminf_lite.cuda.runtime.libraries import driver_release
from bminf_lite.torch import Int8Linear, ops, streaming
from bminf_lite.torch.measuring import Measurement, bandwidth, measure

GPU = torch.device("cuda", 0)
ELEMENTS = 1 << 26
"""Of a tensor of rows: 128 MiB in 16 bits, more than the L2 cache."""
WIDTHS = (256, 1024, 2048, 4096, 8192, 16384)
LINEARS = {"q, o": (4096, 4096), "k, v": (4096, 1024), "gate, up": (4096, 14336), "down": (14336, 4096)}
"""in_features and out_features of the products of a layer of LLaMA 8B."""
COUNTS = {"q, o": 2, "k, v": 2, "gate, up": 2, "down": 1}
Results = list[dict[str, Any]]


def record(results: Results, section: str, case: str, name: str, found: Measurement, **extra: Any) -> None:
    results.append({"section": section, "case": case, "name": name, **asdict(found), **extra})
    share = "" if found.bandwidth_share is None else f"{found.bandwidth_share:6.1%}"
    print(
        f"{section:9} {case:28} {name:16} {found.seconds * 1e6:10.1f} us {share} host {found.host_seconds * 1e6:6.1f}"
    )


def rows(results: Results, compiled: bool) -> None:
    """Softmax and norms over rows, fp16 and fp32, against the engine's kernels and torch."""
    engine = engine_rows()
    for dtype in (torch.float16, torch.float32):
        for k in WIDTHS:
            x = torch.randn(ELEMENTS // k, k, device=GPU, dtype=dtype)
            weight, bias = torch.randn(2, k, device=GPU, dtype=dtype).unbind(0)
            weight, bias = weight.contiguous(), bias.contiguous()
            functions: dict[str, dict[str, Callable[..., Any]]] = {
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
            if engine is not None:
                for name, function in engine(x, weight, bias).items():
                    functions[name]["engine"] = function
            for name, by_library in functions.items():
                if compiled:
                    torch._dynamo.reset()
                    by_library["compile"] = torch.compile(by_library["torch"])
                for library, function in by_library.items():
                    found = measure(function, x, bytes_moved=2 * x.nbytes, batches=7, seconds=0.02, graph=True)
                    record(results, "rows", f"{name} {str(dtype)[6:]} {k}", library, found)


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


def square(results: Results, compiled: bool) -> None:
    """square_linear_ of 8,192 rows against cuBLAS, fp16."""
    for n in (512, 1024, 2048, 4096, 8192):
        x, w = torch.randn(8192, n, device=GPU, dtype=torch.float16), torch.randn(n, n, device=GPU, dtype=torch.float16)
        w /= n**0.5
        for name, function in (("ours", ops.square_linear_), ("cuBLAS", F.linear)):
            record(results, "square", f"n={n}", name, measure(function, x, w, batches=7, seconds=0.02, graph=True))


def weight_of(k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and a bf16 weight of the same size."""
    codes = torch.randint(-127, 128, (n, k), device=GPU, dtype=torch.int8)
    return codes, torch.rand(n, device=GPU) * 1e-3, torch.randn(n, k, device=GPU, dtype=torch.bfloat16)


def linear(results: Results, compiled: bool) -> None:
    """int8_linear against bf16 nn.Linear, and torch._int_mm alone, at few and at many rows."""
    for case, (k, n) in LINEARS.items():
        codes, scale, weight = weight_of(k, n)
        for count in (1, 4, 16, 2048):
            x = torch.randn(count, k, device=GPU, dtype=torch.bfloat16)
            row_codes = torch.randint(-127, 128, (max(count, 32), k), device=GPU, dtype=torch.int8)
            for name, function in (
                ("w8a8", lambda x: ops.int8_linear(x, codes, scale)),
                ("w8a16", lambda x: ops.int8_linear(x, codes, scale, dynamic=False)),
                ("bf16", lambda x: F.linear(x, weight)),
                ("_int_mm", lambda x: torch._int_mm(row_codes, codes.t())),
            ):
                found = measure(function, x, batches=7, seconds=0.02, graph=True)
                record(results, "linear", f"{case} rows={count}", name, found)


def backward(results: Results, compiled: bool) -> None:
    """The input gradient of int8_linear against bf16's, 2,048 rows."""
    for case, (k, n) in LINEARS.items():
        codes, scale, weight = weight_of(k, n)
        dy = torch.randn(2048, n, device=GPU, dtype=torch.bfloat16)
        for name, function in (
            ("ours", lambda dy: torch.ops.bminf_lite.int8_linear_backward(dy, codes, scale)),
            ("bf16", lambda dy: dy @ weight),
        ):
            record(results, "backward", case, name, measure(function, dy, batches=7, seconds=0.02, graph=True))
    for k in (1024, 4096, 8192):
        x = torch.randn(ELEMENTS // 2 // k, k, device=GPU, dtype=torch.bfloat16)
        weight, dy = torch.randn(k, device=GPU, dtype=torch.bfloat16), torch.randn_like(x)
        for name, function in (
            ("ours", lambda x, w: ops.rms_norm(x, w)),
            ("torch", lambda x, w: F.rms_norm(x, w.shape, w, 1e-6)),
        ):
            own, gain = x.clone().requires_grad_(), weight.clone().requires_grad_()
            y = function(own, gain)
            found = measure(lambda: torch.autograd.grad(y, (own, gain), dy, retain_graph=True), batches=7, seconds=0.02)
            record(results, "backward", f"rms_norm bfloat16 {k}", name, found)


def host(results: Results, compiled: bool) -> None:
    """The host's time of a call on small tensors, without gradients."""
    codes, scale, weight = weight_of(256, 256)
    x, gain = torch.randn(16, 256, device=GPU, dtype=torch.bfloat16), torch.ones(256, device=GPU, dtype=torch.bfloat16)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for name, function in (
                ("softmax", lambda: ops.softmax(x)),
                ("softmax_", lambda: ops.softmax_(x)),
                ("rms_norm", lambda: ops.rms_norm(x, gain)),
                ("int8_linear", lambda: ops.int8_linear(x, codes, scale)),
                ("torch.softmax", lambda: torch.softmax(x, -1)),
                ("F.linear", lambda: F.linear(x, weight)),
            ):
                record(results, "host", mode.__name__, name, measure(function, batches=9, seconds=0.05))


class Block(nn.Module):
    """The products of a layer of LLaMA 70B, one behind the other, with random codes."""

    WIDTH, INNER, KEYS = 8192, 28672, 1024

    def __init__(self) -> None:
        super().__init__()
        sizes = [(self.WIDTH, self.WIDTH + 2 * self.KEYS), (self.WIDTH, self.WIDTH), (self.WIDTH, 2 * self.INNER)]
        self.qkv, self.o, self.gate_up = (random_linear(k, n) for k, n in sizes)
        self.down = random_linear(self.INNER, self.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.o(self.qkv(x)[..., : self.WIDTH])
        gate, up = self.gate_up(ops.rms_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def random_linear(k: int, n: int) -> Int8Linear:
    codes = torch.randint(-127, 128, (n, k), device=GPU, dtype=torch.int8)
    return Int8Linear(codes, torch.full((n,), 1 / 64 / k**0.5, device=GPU))


class Stack(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stream(results: Results, compiled: bool) -> None:
    """Forward of streamed layers of LLaMA 70B's shape, 2,048 tokens: the share of the link that the copies reach."""
    count = 8
    model = Stack(count)
    nbytes = sum(layer.codes.numel() for layer in model.modules() if isinstance(layer, Int8Linear))
    streamed = streaming.place(model, GPU, nbytes * 2 // count + (64 << 20))
    codes = model.layers[0].down.host_codes
    assert isinstance(codes, streaming.StreamedCodes)
    source = torch.empty(1 << 30, dtype=torch.int8, pin_memory=True)
    target = torch.empty_like(source, device=GPU)
    link = (1 << 30) / measure(functools.partial(target.copy_, source, True), batches=5, seconds=0.3).seconds
    x = torch.randn(2048, Block.WIDTH, device=GPU, dtype=torch.bfloat16)
    del target
    with torch.no_grad():
        torch.cuda.reset_peak_memory_stats()
        model(x)
        before = codes.stream.copied_bytes
        model(x)
        copied = codes.stream.copied_bytes - before
        found = measure(model, x, batches=5, seconds=0.5)
    share = copied / found.seconds / link
    print(f"{streamed} of {count} blocks streamed, link {link / 1e9:.1f} GB/s, {share:.1%} of it")
    peak = torch.cuda.max_memory_allocated()
    record(results, "stream", "70B shape", "forward", found, link=link, share=share, peak=peak, blocks=streamed)


def lora(results: Results, compiled: bool) -> None:
    """Steps of LoRA training of a model of LLaMA 8B's shape with 512 tokens, within a limit for its weights."""
    import peft
    import transformers
    from accelerate import init_empty_weights

    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, dtype=torch.bfloat16,
    )  # fmt: skip
    with init_empty_weights():
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    for name, module in list(model.named_modules()):
        path, _, attribute = name.rpartition(".")
        if isinstance(module, nn.Linear):
            setattr(model.get_submodule(path), attribute, random_linear(module.in_features, module.out_features))
        for key, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(module, nn.Linear):
                values = torch.randn(parameter.shape, device=GPU, dtype=torch.bfloat16) / 64 + (parameter.dim() == 1)
                module.register_parameter(key, nn.Parameter(values))
    limit = int(3.5 * (1 << 30))
    streamed = streaming.place(model, GPU, limit)
    adapters = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trained = peft.get_peft_model(model, adapters)
    trained.enable_input_require_grads()
    trained.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained.train()
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-4)
    tokens = torch.randint(0, 128256, (1, 512), device=GPU)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses = []

    def step() -> None:
        loss = trained(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    found = measure(step, batches=3, seconds=0.1)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    values = [round(float(loss), 3) for loss in losses]
    print(f"{streamed} of 32 blocks streamed, peak {peak / 2**30:.2f} GiB, reserved {reserved / 2**30:.2f}, {values}")
    record(results, "lora", "8B shape, 512 tokens", "step", found, peak=peak, blocks=streamed, losses=values)


SECTIONS = {
    "rows": rows, "square": square, "linear": linear, "backward": backward, "host": host, "stream": stream,
    "lora": lora,
}  # fmt: skip


def main(arguments: list[str]) -> None:
    path, chosen = Path(arguments[0]), [a for a in arguments[1:] if not a.startswith("--")] or list(SECTIONS)
    results: Results = []
    about = {
        "gpu": torch.cuda.get_device_name(0), "driver": driver_release(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "command": " ".join(["tools/bench_torch.py", *arguments[1:]]),
        "copy_bandwidth": bandwidth(GPU),
    }  # fmt: skip
    print(about)
    for name in chosen:
        try:
            SECTIONS[name](results, "--compile" in arguments)
        except Exception:
            traceback.print_exc()
        path.write_text(json.dumps({"about": about, "results": results}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
