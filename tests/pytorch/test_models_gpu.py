"""Models with int8 layers on a GPU: streamed from pinned memory, in graphs, compiled, and moved."""

from __future__ import annotations

import pytest
import torch
from test_models import BLOCK_BYTES, Blocks, rotate
from torch_kit import random

from bminf_lite.torch import Int8Linear, streaming, wrap
from bminf_lite.torch.linear import quantize_weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_gpu_quantizes_as_the_cpu_does(dtype):
    weight = random(300, 1000, dtype=dtype)
    for found, expected in zip(quantize_weight(weight.to(GPU)), quantize_weight(weight), strict=True):
        assert torch.equal(found.cpu(), expected)


def test_a_moved_model_computes_the_same():
    model, x = wrap(Blocks()), random(40, 64)
    expected = model(x)
    torch.testing.assert_close(model.to(GPU)(x.to(GPU)).cpu(), expected, rtol=1e-4, atol=1e-4)
    half = model.to(torch.bfloat16)
    assert half(x.to(GPU, torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [1, 40, 300])
def test_rotated_inputs_have_the_cpu_s_codes(rows):
    layer = rotate(wrap(Blocks())).first
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = random(rows, 64, dtype=dtype)
        expected = layer.cpu()(x)
        assert torch.equal(layer.to(GPU)(x.to(GPU)).cpu(), expected)
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.equal(layer(x.to(GPU)).cpu(), layer.cpu()(x.bfloat16()))


def test_streamed_equals_resident_forward_and_backward():
    """Many times: a copy that overtook the work on its buffer would show."""
    whole, streamed = wrap(Blocks(), device=GPU), wrap(Blocks())
    total = sum(t.nbytes for t in [*streamed.parameters(), *streamed.buffers()])
    limit = total - 5 * BLOCK_BYTES + 2 * (BLOCK_BYTES + 2 * 256)
    assert streaming.place(streamed, GPU, limit) == 5
    assert all(v.is_pinned() for layer in streamed.layers for v in (layer[0].codes, layer[2].codes))
    assert streamed.layers[0][0].weight.device == GPU
    for seed in range(20):
        x, results = random(300, 64, seed=seed).to(GPU), []
        for model in (whole, streamed):
            own = x.clone().requires_grad_()
            y = model(own)
            y.square().sum().backward()
            results.append((y.detach(), own.grad))
            model.zero_grad()
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("assign", [False, True])
def test_streamed_layers_load_a_state(assign):
    streamed, x = wrap(Blocks(), memory_limit=50_000, device=GPU), random(300, 64).to(GPU)
    for seed in range(5):
        torch.manual_seed(seed)
        other = Blocks().apply(lambda m: torch.nn.init.normal_(m.weight) if isinstance(m, torch.nn.Linear) else None)
        wrap(other, device=GPU)
        streamed(x)
        streamed.load_state_dict(other.state_dict(), assign=assign)
        assert torch.equal(streamed(x), other(x)) and torch.equal(streamed(x), other(x))


def test_a_model_compiles_without_a_graph_break():
    model, x = wrap(Blocks(), device=GPU), random(40, 64).to(GPU)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x), rtol=1e-4, atol=1e-4)


def test_training_memory_is_bounded():
    """Autograd keeps no codes of streamed layers."""
    model = Blocks(40)
    for index, block in enumerate(model.layers):
        model.layers[index] = torch.nn.Sequential(torch.nn.Linear(1024, 1024), block[1], torch.nn.Linear(1024, 1024))
    model.first = torch.nn.Linear(1024, 1024)
    wrap(model)
    streaming.place(model, GPU, 8 << 20)
    x = random(1, 1024).to(GPU).requires_grad_()
    model(x).sum().backward()  # the gradients of the biases, and cuBLAS's workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(x).sum().backward()
    weight = 4 << 20  # of the layer whose gradient is computed, in fp32
    assert torch.cuda.max_memory_allocated() - before < 3 * weight
    assert sum(isinstance(m, Int8Linear) for m in model.modules()) == 81
