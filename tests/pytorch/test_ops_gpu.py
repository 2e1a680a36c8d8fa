"""The operators on a GPU: the CPU definitions' values, in torch's memory, on torch's stream."""

from __future__ import annotations

import threading

import pytest
import torch
from test_ops import calls
from torch import Tensor
from torch_kit import FLOATS, assert_near, random, random_codes

from bminf_lite.cuda.kernels.gemm.gemm_hopper import TILE_CONFIGS
from bminf_lite.torch import _kernels, ops
from bminf_lite.torch._choices import row_class

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
F = torch.nn.functional
GPU = torch.device("cuda", 0)
SHAPES = [(1, 1), (3, 7), (5, 1000), (300, 256), (4, 4096), (3, 8200), (2, 16384), (3, 16390)]
"""Narrow and wide rows, with and without vectors, few and many, in registers and in several passes."""


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return random(*shape, dtype=dtype, seed=seed).to(GPU)


def wide(x: Tensor) -> Tensor:
    """The values in float64 on the CPU."""
    return x.detach().double().cpu()


def with_gradients(function, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    """The result, and the gradients of the inputs."""
    own = [v.detach().clone().requires_grad_() for v in inputs]
    y = function(*own)
    return [y.detach(), *torch.autograd.grad(y, own, dy)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax(shape, dtype):
    x, dy = on_gpu(*shape, dtype=dtype), on_gpu(*shape, dtype=dtype, seed=1)
    found = with_gradients(lambda x: ops.softmax(x, 0.5), [x], dy)
    expected = torch.softmax(wide(x) * 0.5, -1)
    assert_near(found[0], expected, expected * 4)
    y = wide(found[0])  # the gradient is that of the rounded result
    terms = 0.5 * y * (wide(dy).abs() + (y * wide(dy)).abs().sum(-1, keepdim=True))
    assert_near(found[1], 0.5 * y * (wide(dy) - (y * wide(dy)).sum(-1, keepdim=True)), terms)
    own = x.clone()
    assert torch.equal(ops.softmax_(own, 0.5), found[0])


@pytest.mark.parametrize("k", [64, 77])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_biases_and_masks_that_broadcast(dtype, k):
    x = on_gpu(2, 3, 5, k, dtype=dtype)
    for sizes in [(k,), (5, k), (3, 5, k), (3, 1, k), (2, 1, 1, k), (2, 1, 5, k), (2, 3, 5, k), (5, 1), (1, 1, 1, k)]:
        bias, mask = on_gpu(*sizes, seed=1), on_gpu(*sizes, seed=2) > 0
        scores = (wide(x) * 0.3 + wide(bias)).masked_fill(~mask.cpu(), -torch.inf)
        expected = torch.softmax(scores, -1).nan_to_num(0)
        assert_near(ops.softmax(x, 0.3, bias, mask), expected, expected * 8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "kind"), [(d, k) for d in FLOATS for k in dict.fromkeys((d, torch.float32))], ids=str
)
@pytest.mark.parametrize("center", [True, False])
def test_norms(shape, dtype, kind, center):
    k = shape[-1]
    x, dy = on_gpu(*shape, dtype=dtype), on_gpu(*shape, dtype=dtype, seed=1)
    parameters = [on_gpu(k, dtype=kind, seed=2), on_gpu(k, dtype=kind, seed=3)][: 1 + center]
    function = ops.layer_norm if center else ops.rms_norm
    found = with_gradients(function, [x, *parameters], dy)
    inputs = [wide(v) for v in (x, *parameters)]
    if center:
        expected = with_gradients(lambda x, w, b: F.layer_norm(x, (k,), w, b), inputs, wide(dy))
    else:
        expected = with_gradients(lambda x, w: F.rms_norm(x, (k,), w, 1e-6), inputs, wide(dy))
    n = inputs[0].abs().max() * (inputs[0].var(-1, keepdim=True, correction=0) + 1e-6).rsqrt().nan_to_num()
    largest = [v.abs().max() for v in (*inputs[1:], wide(dy))]
    factor = 1000 if k == 1 else 1  # a row of one element has no deviation
    assert_near(found[0], expected[0], n.max() * largest[0] + 1, factor)
    if k == 1:
        return
    inverse = (
        inputs[0].square().mean(-1, keepdim=True) if not center else inputs[0].var(-1, keepdim=True, correction=0)
    ).rsqrt()
    assert_near(found[1], expected[1], inverse * largest[0] * largest[-1] * n.max() ** 2)
    for actual, reference in zip(found[2:], expected[2:], strict=True):
        assert_near(actual, reference, (wide(dy).abs() * n.max()).sum(0))
    own = x.clone()
    name = ops.layer_norm_ if center else ops.rms_norm_
    assert torch.equal(name(own, *parameters), found[0])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("k", [8224, 9024, 16384])
def test_layer_norms_of_many_wide_rows(k, bias):
    """Blocks that keep weight and bias in shared memory, and those that do not because statistics are wanted."""
    x, weight = on_gpu(700, k), on_gpu(k, seed=1)
    offsets = on_gpu(k, seed=2) if bias else None
    found = ops.layer_norm(x, weight, offsets)
    other = ops.layer_norm(x, weight.clone().requires_grad_(), offsets).detach()
    torch.testing.assert_close(found, other, rtol=1e-6, atol=1e-6)
    assert torch.equal(ops.layer_norm_(x.clone(), weight, offsets), found)


@pytest.mark.parametrize("affine", [0, 1, 2])
@pytest.mark.parametrize("mean", [0, 50])
@pytest.mark.parametrize("k", [4104, 8192, 8200, 12296, 16384])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_layer_norms_of_many_wide_16_bit_rows(dtype, k, mean, affine):
    """Mean and variance come from one pass, which must not cost precision where the mean is large."""
    x = (on_gpu(300, k) + mean).to(dtype)
    x[1] = mean  # no deviation
    parameters = [on_gpu(k, dtype=dtype, seed=seed) for seed in (1, 2)[:affine]]
    expected = F.layer_norm(wide(x), (k,), *map(wide, parameters))
    found = ops.layer_norm(x, *parameters)
    n = (wide(x).abs() + mean) * (wide(x).var(-1, keepdim=True, correction=0) + 1e-5).rsqrt()
    assert_near(found, expected, n * (wide(parameters[0]).abs() if affine else 1) + 1)
    with_statistics = ops.layer_norm(x.clone().requires_grad_(), *parameters).detach()
    assert torch.equal(with_statistics, found)
    assert torch.equal(ops.layer_norm_(x, *parameters), found)


@pytest.mark.parametrize("center", [True, False])
def test_norms_in_place_have_the_gradients_of_the_others(center):
    x, weight, dy = on_gpu(40, 300), on_gpu(300, seed=1).abs() + 0.5, on_gpu(40, 300, seed=2)
    pairs = (ops.layer_norm, ops.layer_norm_) if center else (ops.rms_norm, ops.rms_norm_)
    first, second = (with_gradients(lambda x, w, f=f: f(x * 1, w), [x, weight], dy) for f in pairs)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_quantized_rows_equal_the_definition_s(shape, dtype):
    x = random(*shape, dtype=dtype)
    x[0] = 0
    x[-1, 0] = torch.nan if len(x) > 1 else 0
    for found, expected in zip(ops.quantize_rows(x.to(GPU)), ops.quantize_rows(x), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 32, 33, 100, 300])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (4, 16), (200, 272), (77, 130), (1024, 2000)])
def test_w8a8_equals_the_definition(rows, n, k, bias, dtype):
    x, (codes, scale) = random(rows, k, dtype=dtype), random_codes(n, k)
    offsets = random(n, dtype=dtype, seed=1) if bias else None
    expected = ops.int8_linear(x, codes, scale, offsets)
    found = ops.int8_linear(*(None if v is None else v.to(GPU) for v in (x, codes, scale, offsets)))
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 300])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (77, 130), (100, 1040)])
def test_w8a16_and_gradients(rows, n, k, dtype):
    x, (codes, scale), bias = random(rows, k, dtype=dtype), random_codes(n, k), random(n, dtype=dtype, seed=1)
    dy = on_gpu(rows, n, dtype=dtype, seed=2)
    codes, scale = codes.to(GPU), scale.to(GPU)
    found = with_gradients(
        lambda x, b: ops.int8_linear(x, codes, scale, b, dynamic=False), [x.to(GPU), bias.to(GPU)], dy
    )
    weight = wide(codes) * wide(scale)[:, None]
    assert_near(found[0], wide(x) @ weight.T + wide(bias), wide(x).abs() @ weight.abs().T + 4)
    rounded = (codes.float() * scale[:, None]).to(dtype)
    terms = wide(dy).abs() @ wide(rounded).abs()
    assert_near(found[1], wide(dy) @ wide(rounded), terms)
    assert_near(found[2], wide(dy).sum(0), wide(dy).abs().sum(0), 100 if dtype != torch.float32 else 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_int8_dot_in_all_forms(dtype):
    (a, a_scale), (b, b_scale) = random_codes(40, 96), random_codes(56, 96, seed=1)
    expected = ops.dot(a, b, False, True, a_scale=a_scale, b_scale=b_scale, dtype=dtype)
    a, b, a_scale, b_scale = (v.to(GPU) for v in (a, b, a_scale, b_scale))
    for ta in (False, True):
        for tb in (False, True):
            left, right = (a.mT.contiguous() if ta else a), (b if tb else b.mT.contiguous())
            found = ops.dot(left, right, ta, tb, a_scale=a_scale, b_scale=b_scale, dtype=dtype)
            assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("transpose", [True, False])
def test_square_linear_in_blocks(dtype, transpose, monkeypatch):
    monkeypatch.setattr(_kernels, "WORKSPACE_BYTES", 100 * 48 * 4)
    x, w = on_gpu(2, 333, 48, dtype=dtype), on_gpu(48, 48, dtype=dtype, seed=1)
    factor = wide(w).T if transpose else wide(w)
    expected, terms = wide(x) @ factor, wide(x).abs() @ factor.abs()
    assert_near(ops.square_linear_(x, w, transpose), expected, terms, 16 if dtype == torch.float32 else 1)


@pytest.fixture
def kernels():
    own = _kernels.kernels_of(torch.empty(1, device=GPU))
    if not own.products_verified:
        pytest.skip("int8 products go through torch._int_mm here")
    return own


def test_tiles_are_measured_at_the_first_product_of_a_class(kernels, monkeypatch):
    x, (codes, scale) = on_gpu(700, 1264, dtype=torch.bfloat16), random_codes(1000, 1264)
    expected = ops.int8_linear(x.cpu(), codes, scale)
    codes, scale = codes.to(GPU), scale.to(GPU)
    key = row_class(700), 1000, 1264, torch.bfloat16
    assert torch.equal(ops.int8_linear(x, codes, scale).cpu(), expected)
    assert kernels.tiles.known(key) in TILE_CONFIGS
    monkeypatch.delattr(_kernels, "time_launches")  # nothing is measured again
    assert torch.equal(ops.int8_linear(x[:650], codes, scale).cpu(), expected[:650])


def test_nothing_is_measured_while_a_graph_is_captured(kernels):
    x, (codes, scale) = on_gpu(700, 1280, dtype=torch.bfloat16), random_codes(1008, 1280)
    expected = ops.int8_linear(x.cpu(), codes, scale)
    codes, scale = codes.to(GPU), scale.to(GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.int8_linear(x, codes, scale)
    graph.replay()
    assert torch.equal(y.cpu(), expected)
    assert kernels.tiles.known((row_class(700), 1008, 1280, torch.bfloat16)) is None
    assert torch.equal(ops.int8_linear(x, codes, scale), y)


def test_threads_measure_together(kernels):
    """Each on a stream of its own, with other shapes too."""
    x, results = on_gpu(600, 1296, dtype=torch.float16), {}
    weights = [tuple(v.to(GPU) for v in random_codes(1024 + 8 * (i % 2), 1296)) for i in range(4)]
    torch.cuda.synchronize()

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            results[i] = ops.int8_linear(x, *weights[i]).cpu()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (codes, scale) in enumerate(weights):
        assert torch.equal(results[i], ops.int8_linear(x.cpu(), codes.cpu(), scale.cpu()))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_without_dequantizing_have_the_bits_of_a_single_one(dtype, monkeypatch):
    monkeypatch.setattr(_kernels, "most_gemv_rows", lambda *_: 16)
    x, (codes, scale), bias = on_gpu(13, 1040, dtype=dtype), random_codes(100, 1040), on_gpu(100, seed=1)
    codes, scale = codes.to(GPU), scale.to(GPU)
    found = ops.int8_linear(x, codes, scale, bias, dynamic=False)
    rows = [ops.int8_linear(row, codes, scale, bias, dynamic=False) for row in x]
    assert torch.equal(found, torch.stack(rows))


# -- torch's memory, streams and graphs --------------------------------------------------------------------------------


def test_nothing_is_copied_and_memory_is_torch_s():
    x = on_gpu(64, 1024)
    ops.softmax(x), ops.rms_norm(x), ops.softmax_(x)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    address = x.data_ptr()
    assert ops.softmax_(x).data_ptr() == address
    assert torch.cuda.max_memory_allocated() == before
    y = ops.softmax(x)
    assert torch.cuda.max_memory_allocated() == before + y.nbytes
    strided = on_gpu(64, 2048)[:, :1024]
    del y
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = ops.rms_norm(strided)
    assert torch.cuda.max_memory_allocated() <= before + y.nbytes + 1024  # and the deviations
    torch.testing.assert_close(y, ops.rms_norm(strided.contiguous()), rtol=0, atol=0)


def test_a_thread_without_a_context_launches():
    """As torch's threads of backward are, until something in them needs a context."""
    x = on_gpu(4, 256)
    expected, found = ops.softmax(x), []
    thread = threading.Thread(target=lambda: found.append(ops.softmax(x)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


def test_work_is_on_the_current_stream():
    """Behind a long wait on a side stream, the main stream's view of the result is untouched."""
    x, stream = on_gpu(64, 1024), torch.cuda.Stream()
    expected = ops.softmax(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        ops.softmax_(x)
        done = stream.record_event()
    assert not done.query()
    done.synchronize()
    assert torch.equal(x, expected)


def test_a_graph_replays_the_operators():
    (codes, scale), w = random_codes(256, 256), on_gpu(256, 256, dtype=torch.bfloat16, seed=1) / 16
    codes, scale = codes.to(GPU), scale.to(GPU)

    def work(x):
        y = ops.int8_linear(ops.rms_norm(x), codes, scale)
        return ops.softmax_(ops.square_linear_(y, w))

    x = on_gpu(40, 256, dtype=torch.bfloat16)
    work(x.clone())
    graph = torch.cuda.CUDAGraph()
    static = x.clone()
    with torch.cuda.graph(graph):
        y = work(static)
    for seed in (1, 2):
        fresh = on_gpu(40, 256, dtype=torch.bfloat16, seed=seed)
        static.copy_(fresh)
        graph.replay()
        assert torch.equal(y, work(fresh.clone()))


def test_weights_that_the_kernel_before_wrote_are_read():
    """An optimizer's kernel, or one of ours, may have written the weight just before."""
    x, (codes, scale) = on_gpu(16, 4096, dtype=torch.float16), random_codes(4096, 4096)
    fresh, scale = codes.to(GPU), scale.to(GPU)
    target = torch.zeros_like(fresh)
    expected = ops.int8_linear(x, fresh, scale)
    for _ in range(20):
        target.zero_()
        ops.quantize_rows(x)
        target.copy_(fresh)
        assert torch.equal(ops.int8_linear(x, target, scale), expected)


@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled_without_a_graph_break(dynamic):
    (codes, scale), bias = random_codes(64, 64), on_gpu(64, seed=3)
    codes, scale = codes.to(GPU), scale.to(GPU)

    def network(x, weight):
        y = ops.int8_linear(ops.layer_norm(x, weight, bias), codes, scale, dynamic=dynamic) + x
        return ops.softmax_(ops.rms_norm_(y * 2, weight) * 3, 0.5).square().sum()

    results = []
    for function in (network, torch.compile(network, fullgraph=True)):
        own = [on_gpu(40, 64).requires_grad_(), on_gpu(64, seed=1).requires_grad_()]
        function(*own).backward()
        results.append([v.grad for v in own])
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", sorted(calls()))
def test_opcheck(name):
    arguments = [
        v.detach().to(GPU).requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in calls()[name]
    ]
    if name.endswith("_"):
        arguments[0] = arguments[0].clone()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.bminf_lite, name).default, tuple(arguments), test_utils=tests)


# -- calls past the dispatcher -----------------------------------------------------------------------------------------


def test_overwriting_counts_as_a_version_without_gradients():
    x = on_gpu(4, 256, dtype=torch.bfloat16)
    w = on_gpu(256, 256, dtype=torch.bfloat16, seed=1)
    saved = on_gpu(4, 256).requires_grad_().exp()
    for function in (ops.softmax_, ops.rms_norm_, ops.layer_norm_, lambda x: ops.square_linear_(x, w)):
        with torch.no_grad():
            before = x._version
            function(x)
            assert x._version > before  # by more than one where PyTorch's own operations write it
    with torch.no_grad():
        ops.softmax_(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_profilers_modes_and_subclasses_see_the_operators():
    x, seen = on_gpu(4, 256), []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    expected = ops.softmax(x)
    with Watch():
        assert torch.equal(ops.softmax(x), expected)
    assert torch.ops.bminf_lite.softmax.default in seen
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.softmax(x)
    assert "bminf_lite::softmax" in {event.key for event in profile.key_averages()}
    with pytest.raises(NotImplementedError, match="leading dimensions"):
        torch.vmap(ops.softmax)(x)


def test_tensors_on_different_devices_are_refused():
    x, (codes, scale) = on_gpu(4, 256), random_codes(64, 256)
    for call in (
        lambda: ops.rms_norm(x, random(256)),
        lambda: ops.softmax(x, bias=random(256)),
        lambda: ops.int8_linear(x, codes, scale),
        lambda: ops.square_linear_(x, random(256, 256)),
    ):
        with pytest.raises(ValueError, match=r"move one with \.to\(\)"):
            call()
