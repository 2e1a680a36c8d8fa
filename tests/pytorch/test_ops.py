"""The operators on the CPU: definitions, gradients, registration, and what they refuse."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch_kit import FLOATS, assert_near, random, random_codes

from bminf_lite.backend import rotation
from bminf_lite.torch import _definitions, _kernels, ops

OPERATORS = torch.ops.bminf_lite
F = torch.nn.functional
WIDE = torch.float64


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = WIDE) -> torch.Tensor:
    return random(*shape, dtype=dtype, seed=seed).requires_grad_()


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, WIDE], ids=str)
def test_norms_and_softmax_are_torch_s(dtype):
    x, weight, bias = (random(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(2, 3, 40), (40,), (40,)]))
    wide = [v.double() for v in (x, weight, bias)]
    assert_near(ops.softmax(x), torch.softmax(wide[0], -1))
    terms = wide[1].abs() * 8 + wide[2].abs()
    assert_near(ops.layer_norm(x, weight, bias), F.layer_norm(wide[0], (40,), wide[1], wide[2]), terms)
    assert_near(ops.rms_norm(x, weight), F.rms_norm(wide[0], (40,), wide[1], 1e-6), terms)


def test_softmax_scales_then_adds_then_masks():
    x, bias = random(2, 4, 6, 8), random(6, 8, seed=1)
    mask = random(2, 1, 1, 8, seed=2) > 0
    mask[1] = False
    expected = torch.softmax((0.3 * x + bias).double().masked_fill(~mask, -torch.inf), -1).nan_to_num(0)
    found = ops.softmax(x, 0.3, bias, mask)
    assert_near(found, expected, expected * 4)
    assert (found[1] == 0).all() and (found[0][..., ~mask[0, 0, 0]] == 0).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_in_place_results_are_the_others_in_the_same_memory(dtype):
    x, weight, bias = (random(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(3, 24), (24,), (24,)]))
    w = random(24, 24, dtype=dtype, seed=3)
    for function, arguments, expected in [
        (ops.softmax_, (0.5,), ops.softmax(x, 0.5)),
        (ops.layer_norm_, (weight, bias), ops.layer_norm(x, weight, bias)),
        (ops.rms_norm_, (weight,), ops.rms_norm(x, weight)),
    ]:
        own = x.clone()
        address = own.data_ptr()
        assert function(own, *arguments) is own and own.data_ptr() == address
        assert torch.equal(own, expected)
    for transpose in (True, False):
        expected = x.double() @ (w.T if transpose else w).double()
        assert_near(ops.square_linear_(x.clone(), w, transpose), expected, x.double().abs() @ w.double().abs())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_quantized_rows_and_their_products(dtype):
    x, (codes, scale), bias = random(2, 5, 48, dtype=dtype), random_codes(7, 48), random(7, dtype=dtype)
    row_codes, row_scale = ops.quantize_rows(x)
    assert (x.double() - row_codes * row_scale[..., None].double()).abs().max() <= row_scale.max() * 0.5001
    sums = (row_codes.double() @ codes.double().T).float()
    expected = (row_scale[..., None] * (scale * sums) + bias.float()).to(dtype)
    assert torch.equal(ops.int8_linear(x, codes, scale, bias), expected)
    wide = x.double() @ (codes * scale[:, None].double()).T
    assert_near(
        ops.int8_linear(x, codes, scale, dynamic=False),
        wide,
        x.double().abs() @ (codes * scale[:, None]).abs().double().T,
    )


@pytest.mark.parametrize("block", [1, 2, 16, 256])
def test_rotated_values_are_the_definition_s(block):
    for dtype in FLOATS:
        x = random(2, 3, 512, dtype=dtype) * 50
        found = ops.rotated(x, block)
        assert found.dtype == torch.float32
        assert np.array_equal(found.numpy(), rotation.rotated(x.float().numpy(), block))
    wide = random(3, 512, dtype=WIDE)
    torch.testing.assert_close(ops.rotated(ops.rotated(wide, block), block), wide)
    assert ops.rotated(random(0, 512), block).shape == (0, 512)


@pytest.mark.parametrize("block", [0, 3, 32])
def test_blocks_that_do_not_divide_are_refused(block):
    with pytest.raises(ValueError, match=rf"x \[2, 48\] has no blocks of {block}: give a power of two that divides"):
        ops.rotated(random(2, 48), block)
    with pytest.raises(ValueError, match=r"not torch\.int32"):
        ops.rotated(torch.ones(2, 48, dtype=torch.int32), 16)


def test_dot_in_all_forms():
    a, b = random(3, 5), random(5, 4, seed=1)
    (a_codes, a_scale), (b_codes, b_scale) = random_codes(3, 40), random_codes(4, 40, seed=1)
    expected = a_codes.double() @ b_codes.double().T * a_scale[:, None] * b_scale
    for ta in (False, True):
        for tb in (False, True):
            torch.testing.assert_close(ops.dot(a.mT if ta else a, b.mT if tb else b, ta, tb), a @ b)
            left, right = a_codes.mT if ta else a_codes, b_codes if tb else b_codes.mT
            found = ops.dot(left, right, ta, tb, a_scale=a_scale, b_scale=b_scale, dtype=torch.float32)
            assert_near(found, expected.double())


# -- gradients ---------------------------------------------------------------------------------------------------------

BIAS, MASK = leaf(5, seed=4), torch.tensor([True, True, False, True, True])


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_of_softmax(in_place):
    function = ops.softmax_ if in_place else ops.softmax
    for bias, mask in ((None, None), (leaf(5, seed=4), MASK), (leaf(3, 1, 5, seed=4), None)):
        inputs = (leaf(3, 2, 5), bias)
        gradcheck(lambda x, b, mask=mask: function(x.clone(), 0.7, b, mask), inputs)


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_of_norms(in_place):
    layer_norm, rms_norm = (ops.layer_norm_, ops.rms_norm_) if in_place else (ops.layer_norm, ops.rms_norm)
    x, weight, bias = leaf(3, 5), leaf(5, seed=1), leaf(5, seed=2)
    gradcheck(lambda x, w, b: layer_norm(x.clone(), w, b), (x, weight, bias))
    gradcheck(lambda x, w: rms_norm(x.clone(), w), (x, weight))
    gradcheck(lambda x: layer_norm(x.clone()), (x,))
    gradcheck(lambda x: rms_norm(x.clone()), (x,))


def test_gradients_of_views_that_are_overwritten():
    def network(x, weight):
        y, z = x.clone(), x.clone()
        ops.rms_norm_(y[:, 2:6], weight)
        ops.layer_norm_(z.view(3, 2, 4)[:, 1], weight)
        return y * z

    inputs = leaf(3, 8), leaf(4, seed=1)
    gradcheck(network, inputs)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (compiled, network))
    torch.testing.assert_close(found, expected)


def test_gradients_of_products():
    (codes, scale), x, bias = random_codes(4, 5), leaf(3, 5), leaf(4, seed=1)
    gradcheck(lambda x, b: ops.int8_linear(x, codes, scale, b, dynamic=False), (x, bias))
    gradcheck(lambda x: ops.rotated(x, 4), (leaf(3, 8),))
    w = random(5, 5, dtype=WIDE, seed=2)
    for transpose in (True, False):
        gradcheck(lambda x, t=transpose: ops.square_linear_(x.clone(), w, t), (x,))
        for other in (True, False):
            a, b = leaf(*((5, 3) if transpose else (3, 5)), seed=3), leaf(*((4, 5) if other else (5, 4)), seed=4)
            gradcheck(lambda a, b, t=transpose, o=other: ops.dot(a, b, t, o), (a, b))


def test_second_gradients_are_right_or_refused():
    (codes, scale), x = random_codes(4, 5), leaf(3, 5)
    gradgradcheck(lambda x: ops.int8_linear(x, codes, scale, dynamic=False).square(), (x,))
    for function in (ops.softmax, ops.rms_norm, lambda x: ops.layer_norm_(x.clone())):
        (dx,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second gradients"):
            dx.sum().backward()


def test_a_quantized_input_has_the_gradient_of_the_dequantized_weight():
    (codes, scale), x, bias = random_codes(4, 32), leaf(3, 32, dtype=torch.float32), leaf(4, dtype=torch.float32)
    dy = random(3, 4)
    ops.int8_linear(x, codes, scale, bias).backward(dy)
    assert_near(x.grad, dy.double() @ (codes * scale[:, None].double()))
    assert_near(bias.grad, dy.double().sum(0), dy.double().abs().sum(0))


def test_a_weight_of_zero_gives_nan_not_a_plausible_gradient_in_place():
    weight = torch.tensor([1.0, 0.0, 2.0, 1.0], requires_grad=True)
    ops.rms_norm_(leaf(2, 4, dtype=torch.float32).clone(), weight).sum().backward()
    assert weight.grad[1].isnan()


def test_overwriting_what_backward_needs_raises():
    x = leaf(2, 4, dtype=torch.float32).clone()
    y = ops.softmax_(x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_overwriting_a_leaf_that_requires_a_gradient_raises():
    with pytest.raises(RuntimeError, match="leaf Variable"):
        ops.softmax_(leaf(2, 4, dtype=torch.float32))


# -- registration ------------------------------------------------------------------------------------------------------


def calls() -> dict[str, tuple[object, ...]]:
    """Arguments of each operator, floats requiring gradients where they may."""
    (codes, scale), x, own = random_codes(4, 6), leaf(3, 6, dtype=torch.float32), random(3, 6)
    weight, bias = leaf(6, seed=1, dtype=torch.float32), leaf(6, seed=2, dtype=torch.float32)
    statistics = torch.rand(3), torch.rand(3)
    return {
        "softmax": (x, 0.5, bias, random(3, 1) > 0),
        "softmax_": (x.clone(), 0.5, bias, None),
        "softmax_backward": (own, own, 1.0),
        "norm": (own, weight.detach(), bias.detach(), 1e-5, True),
        "norm_": (own.clone(), weight.detach(), bias.detach(), 1e-5, True),
        "norm_with_statistics": (x, weight, bias, 1e-5, True),
        "norm_with_statistics_": (x.clone(), weight, bias, 1e-5, True),
        "norm_backward": (own, own, False, weight.detach(), bias.detach(), *statistics, True, True),
        "quantize_rows": (x,),
        "int8_dot": (codes, codes, scale, scale, torch.float16),
        "int8_linear": (x, codes, scale, leaf(4, dtype=torch.float32), True),
        "int8_linear_backward": (random(3, 4), codes, scale),
        "square_linear_": (x.clone(), random(6, 6), True),
    }


@pytest.mark.parametrize("name", ops.SCHEMAS)
def test_opcheck(name):
    torch.library.opcheck(getattr(OPERATORS, name).default, calls()[name])


def test_compiled_without_a_graph_break():
    """Forward and backward, with the operators that overwrite among them."""
    codes, scale = random_codes(8, 8)
    w = random(8, 8, seed=5)

    def network(x, weight, bias):
        y = ops.layer_norm(x, weight, bias)
        y = ops.int8_linear(y, codes, scale, bias, dynamic=True) + y
        y = ops.square_linear_(ops.rms_norm_(y * 2, weight) * 1.5, w)
        return ops.softmax_(y * 1.5, 0.5, bias).square().sum() + ops.softmax(y).square().sum()

    inputs = [random(3, 8), random(8, seed=1), random(8, seed=2)]
    results = []
    for function in (network, torch.compile(network, fullgraph=True, backend="aot_eager")):
        own = [v.clone().requires_grad_() for v in inputs]
        function(*own).backward()
        results.append([v.grad for v in own])
    torch.testing.assert_close(results[0], results[1])


def test_inference_mode_and_autocast():
    codes, scale = random_codes(8, 16)
    x = random(3, 16)
    with torch.inference_mode():
        ops.softmax_(x.clone())
        ops.rms_norm(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.int8_linear(x, codes, scale).dtype == torch.bfloat16
        assert ops.layer_norm(x).dtype == torch.float32
        assert ops.int8_linear(x.double(), codes, scale).dtype == torch.float64  # as F.linear


@pytest.mark.parametrize("function", [ops.rms_norm, ops.softmax_, ops.layer_norm_, ops.quantize_rows])
def test_vmap_is_refused(function):
    with pytest.raises(NotImplementedError, match="leading dimensions"):
        torch.vmap(function)(random(3, 2, 8))


@pytest.mark.parametrize("function", [ops.rms_norm, ops.softmax, ops.quantize_rows])
def test_forward_mode_gradients_are_refused(function):
    x = random(3, 8)
    with pytest.raises(NotImplementedError, match="no forward-mode gradient"):
        torch.func.jvp(function, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        function(x)


def test_meta_tensors_have_shapes():
    codes, scale = random_codes(4, 8)
    x = random(3, 8).to("meta")
    assert ops.int8_linear(x, codes.to("meta"), scale.to("meta")).shape == (3, 4)
    assert ops.rms_norm(x).shape == ops.softmax(x).shape == (3, 8)


def test_overwriting_counts_as_a_version_without_gradients():
    x, w = random(4, 8), random(8, 8)
    for function in (ops.softmax_, ops.rms_norm_, ops.layer_norm_, lambda x: ops.square_linear_(x, w)):
        with torch.no_grad():
            before = x._version
            function(x)
            assert x._version > before


def test_exported_with_a_dynamic_batch():
    codes, scale = random_codes(4, 8)

    class Network(torch.nn.Module):
        def forward(self, x):
            return ops.softmax(ops.int8_linear(ops.rms_norm(x), codes, scale))

    x = random(3, 8)
    exported = torch.export.export(Network(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for rows in (2, 5):
        x = random(rows, 8)
        assert torch.equal(exported.module()(x), Network()(x))


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused():
    codes, scale = random_codes(4, 8)
    for call, message in [
        (lambda: ops.softmax(random(2, 3), bias=random(4)), "does not broadcast"),
        (lambda: ops.softmax(random(2, 3), mask=random(3)), "must be bool"),
        (lambda: ops.rms_norm(random(2, 3), random(4)), r"must be \[3\]"),
        (lambda: ops.int8_linear(random(2, 3), codes, scale), "must end in 8"),
        (lambda: ops.int8_linear(random(2, 8), codes.float(), scale), "must be int8"),
        (lambda: ops.int8_linear(random(2, 8), codes, scale[:3]), r"must be \[4\]"),
        (lambda: ops.int8_linear_backward(random(2, 8), codes, scale), "must end in 4"),
        (lambda: ops.square_linear_(random(2, 3), random(4, 4)), "square"),
        (lambda: ops.square_linear_(random(2, 3), random(3, 3).requires_grad_()), "requires a gradient"),
        (lambda: ops.dot(codes, codes.mT), "need a_scale"),
        (lambda: ops.dot(codes, random(8, 4)), "both factors"),
        (lambda: ops.dot(random(2, 3), random(3, 2), a_scale=scale), "belong to int8"),
        (lambda: ops.dot(random(2, 3), random(2, 3)), "inner sizes 3 and 2"),
        (lambda: ops.dot(random(3), random(3, 2)), "must be matrices"),
        (lambda: ops.quantize_rows(torch.tensor(1.0)), "at least one dimension"),
        (lambda: ops.dot(codes, codes, False, True, a_scale=scale, b_scale=scale, dtype=torch.int32), "not torch.int"),
        (lambda: ops.int8_linear(torch.empty(2, 0), codes[:, :0], scale), "at least 1"),
        *(
            (lambda f=f: f(torch.ones(2, 8, dtype=torch.int64)), "fp32, fp16, bf16")
            for f in (ops.softmax, ops.rms_norm_, ops.quantize_rows, lambda x: ops.int8_linear(x, codes, scale))
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_empty_tensors():
    codes, scale = random_codes(4, 8)
    assert ops.softmax(torch.empty(0, 8)).shape == (0, 8)
    x = torch.empty(3, 0, requires_grad=True)
    ops.softmax(x).sum().backward()
    assert x.grad.shape == (3, 0)
    assert ops.rms_norm(torch.empty(2, 0, 8)).shape == (2, 0, 8)
    assert ops.int8_linear(torch.empty(0, 8), codes, scale).shape == (0, 4)
    assert copy.copy(ops.quantize_rows(torch.empty(0, 8)))[0].shape == (0, 8)


def test_infinities_and_overflows_pass_without_a_warning():
    codes, scale = random_codes(8, 8)
    w, low = random(8, 8), torch.full((8,), -torch.inf)
    for value in (torch.inf, -torch.inf, torch.nan, 3e38):
        for function in (
            lambda x: ops.softmax(x, 2.0, low),
            ops.layer_norm,
            ops.rms_norm,
            lambda x: ops.int8_linear(x, codes, scale),
            lambda x: ops.int8_linear(x, codes, scale, dynamic=False),
            lambda x: ops.square_linear_(x.clone(), w),
        ):
            x = random(3, 8)
            x[1] = value
            with warnings.catch_warnings(action="error"):
                function(x.requires_grad_()).square().sum().backward()
            assert x.grad[::2].isfinite().all()


# -- the short way -----------------------------------------------------------------------------------------------------


def test_calls_past_the_dispatcher_do_the_same(monkeypatch):
    """As GPU tensors are called, with the definitions in place of the kernels."""
    called = []

    def watched(name):
        function = vars(_definitions)[name]
        return lambda *arguments: called.append(name) or function(*arguments)

    codes, scale = random_codes(4, 8)
    x, w, weight = random(3, 8), random(8, 8), random(8, seed=1)
    functions = {
        "softmax": lambda x: ops.softmax(x, 0.5),
        "softmax_": lambda x: ops.softmax_(x, 0.5),
        "norm": lambda x: ops.layer_norm(x, weight),
        "norm_": lambda x: ops.rms_norm_(x, weight),
        "quantize_rows": ops.quantize_rows,
        "int8_linear": lambda x: ops.int8_linear(x, codes, scale),
        "square_linear_": lambda x: ops.square_linear_(x, w),
    }
    expected = {name: function(x.clone()) for name, function in functions.items()}
    monkeypatch.setattr(ops, "_ON_GPU", {name: watched(name) for name in ops.SCHEMAS})
    monkeypatch.setattr(ops, "_only_dispatches_to_gpu", lambda arguments: True)
    for name, function in functions.items():
        own = x.clone()
        found = function(own)
        torch.testing.assert_close(found, expected[name], rtol=0, atol=0)
        assert called[-1] == name and (own._version > 0) == name.endswith("_")
        count = len(called)
        recorded = function(x.clone().requires_grad_() * 1)  # those in place by the dispatcher
        assert len(called) == count + (not name.endswith("_"))
        if name in ("softmax", "norm", "int8_linear"):
            torch.testing.assert_close(recorded, expected[name], rtol=0, atol=0)
            recorded.sum().backward()
            assert called[-1].endswith("_backward")


@pytest.mark.parametrize("seed", range(60))
def test_rows_that_are_equally_far_apart_are_read_where_they_are(seed):
    generator = torch.Generator().manual_seed(seed)
    draw = [int(v) for v in torch.randint(0, 4, (12,), generator=generator)]
    sizes = [max(1, v) for v in draw[: 1 + seed % 4]]
    x = torch.arange(10_000).as_strided([4 * size for size in sizes], torch.empty([4 * s for s in sizes]).stride())
    x = x[tuple(slice(0, size, 1 + v % 2) for size, v in zip(sizes, draw[4:], strict=False))]
    x = x.transpose(0, -1) if draw[11] == 0 else x.expand(3, *x.shape) if draw[11] == 1 else x
    layout = _kernels._layout(x.shape, x.stride())
    offsets = x.reshape(-1, x.shape[-1]) - x.flatten()[0]
    distances = offsets[:, 0].diff().unique()
    evenly = len(distances) <= 1 and torch.equal(offsets - offsets[:, :1], torch.arange(x.shape[-1]).expand_as(offsets))
    pitch = int(distances[0]) if len(distances) else x.shape[-1]
    assert layout == ((pitch, len(offsets), x.shape[-1]) if evenly and pitch >= x.shape[-1] else None)
