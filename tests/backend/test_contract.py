"""What a backend promises beside its numbers: equal signatures, and no finite results of what is not finite."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from random_values import make_batch, norm_on, random_int8, random_rows

from bminf_lite.backend.base import Backend
from bminf_lite.backend.cache_values import StateArray
from bminf_lite.backend.device import HostDevice
from bminf_lite.backend.values import AttentionSpec, Norm, sequential_tables

BACKENDS = {"cpu": ("bminf_lite.backend.cpu", "CpuBackend"), "cuda": ("bminf_lite.backend.cuda", "CudaBackend")}
NOT_NUMBERS = [np.nan, np.inf, -np.inf]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def subclass(request: pytest.FixtureRequest) -> type[Backend]:
    """Every backend class."""
    module, name = BACKENDS[request.param]
    return getattr(importlib.import_module(module), name)


def public(classes: Iterable[type]) -> dict[str, object]:
    """The public names that some classes define; of two definitions the first one's."""
    return {n: value for cls in reversed([*classes]) for n, value in vars(cls).items() if not n.startswith("_")}


DEVICE = public([HostDevice])
OPERATIONS = public([cls for cls in Backend.__mro__ if issubclass(cls, HostDevice) and cls is not HostDevice])


def own(subclass: type[Backend]) -> dict[str, object]:
    """What a backend overrides or adds, also in classes that it is made of."""
    return public([cls for cls in subclass.__mro__ if cls not in Backend.__mro__])


def test_an_override_has_the_signature_of_what_it_replaces(subclass):
    assert issubclass(subclass, Backend)
    for name, method in own(subclass).items():
        if hasattr(Backend, name) and callable(method):
            assert parameters(method) == parameters(getattr(Backend, name)), name


def parameters(method: object) -> list[tuple[str, object, object]]:
    """Names, kinds and defaults: what a caller relies on. A return type may be narrower."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]  # type: ignore[arg-type]


def test_a_backend_adds_no_public_operation(subclass):
    """A layer could call it, and would then run on this backend alone."""
    methods = {name for name, value in own(subclass).items() if inspect.isfunction(value)}
    assert methods <= OPERATIONS.keys() | DEVICE.keys()


def test_an_operation_is_defined_once():
    """No group of operations overrides another's; a group may add to what the device does at a step."""
    groups = [cls for cls in Backend.__mro__ if issubclass(cls, HostDevice)]
    count = Counter(name for cls in groups for name in vars(cls) if not name.startswith("__"))
    assert [name for name, times in count.items() if times > 1] == ["step"]


SHARED: set[str] = {
    "blocks",
    "delta_net_spec",
    "mamba2_spec",
    "last_token_batch",
    "linear",
    "linear_add",
    "gated_linear",
    "activated_linear",
}
"""Operations that need no kernel: the reference's code serves every device. Four are names of ``product``."""


@pytest.mark.gpu
def test_the_gpu_overrides_every_operation_that_computes():
    """Inherited NumPy code would run on the GPU's arrays, slowly or wrongly, and say nothing."""
    from bminf_lite.backend.cuda.backend import CudaBackend

    operations = {name for name, value in OPERATIONS.items() if inspect.isfunction(value)}
    assert operations - SHARED - own(CudaBackend).keys() == set()


# -- small numbers ----------------------------------------------------------------------------------------------------


def test_rows_too_small_for_a_scale_count_as_zeros(backend):
    """Where ``127 / max`` overflows fp32, and one step above it."""
    tiny = np.float32(127) / np.finfo(np.float32).max
    x = np.array([[tiny / 2, -tiny / 4], [tiny * 2, -tiny]], np.float32)
    codes, scale = (backend.host(v) for v in backend.quantize(backend.array(x)))
    np.testing.assert_array_equal(codes, [[0, 0], [127, -64]])
    np.testing.assert_array_equal(scale, [0, tiny * 2 / np.float32(127)])


# -- what is not a number ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", NOT_NUMBERS)
@pytest.mark.parametrize("kind", ["w8a8", "w8a16", "float"])
def test_products_of_a_row_that_is_not_finite(backend, bad, kind):
    """Nothing finite comes out of it, and the other rows do not notice."""
    rng = np.random.default_rng(1)
    part = random_int8(rng, 24, 40, kind == "w8a8")
    weight = backend.weight([part.dequantize() if kind == "float" else part])
    clean = random_rows(rng, 5, 40, backend.activation_dtype.type)
    x = clean.copy()
    x[2, 17] = bad
    for operation in (
        lambda x: backend.linear(x, weight),
        lambda x: backend.linear(x, weight, fp32=True),
        lambda x: backend.linear_add(x, weight, backend.array(np.ones((5, 24), np.float32))),
        lambda x: backend.gated_linear(x, weight, "silu"),
        lambda x: backend.gated_linear(x, weight, "relu"),
    ):
        y, expected = (backend.host(operation(backend.array(v))).copy() for v in (x, clean))
        assert not np.isfinite(y[2]).any()
        np.testing.assert_array_equal(y[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", NOT_NUMBERS)
@pytest.mark.parametrize("center", [False, True])
def test_a_norm_of_a_row_that_is_not_finite_multiplies_to_nothing_finite(backend, bad, center):
    """As the layers do it: what overflowed in the residual stream shows in the logits."""
    rng = np.random.default_rng(2)
    norm = Norm(np.ones(40, np.float32), 1e-6, np.zeros(40, np.float32) if center else None, center)
    weight = backend.weight([random_int8(rng, 24, 40, True)])
    residual = rng.standard_normal((3, 40)).astype(np.float32)
    residual[1, 3] = bad
    y = backend.host(backend.linear(backend.norm(backend.array(residual), norm_on(backend, norm)), weight, fp32=True))
    assert np.isfinite(y[[0, 2]]).all() and not np.isfinite(y[1]).any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", NOT_NUMBERS)
def test_attention_to_a_value_that_is_not_finite(backend, bad):
    """The token itself and those after it see it; another sequence of the batch does not."""
    spec = AttentionSpec(2, 1, 8, 0.3)
    table = sequential_tables(2, 8)
    cache = backend.layer_cache(3, 1, 8)
    qkv = np.random.default_rng(3).standard_normal((6, spec.qkv_features)).astype(backend.activation_dtype)
    qkv[2, -8:] = bad
    batch = make_batch(backend, [3, 3], [0, 0], table)
    out = backend.host(backend.attention(backend.array(qkv), spec, cache, batch))
    assert not np.isfinite(out[2]).any() and np.isfinite(out[3:]).all()
    batch = make_batch(backend, [1, 1], [3, 3], table)
    out = backend.host(backend.attention(backend.array(qkv[3:5]), spec, cache, batch))
    assert not np.isfinite(out[0]).any() and np.isfinite(out[1]).all()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("max_blocks", [None, 5])
def test_a_block_is_copied_as_a_whole_and_no_other(backend, int8, max_blocks):
    cache = backend.layer_cache(4, 2, 12, int8=int8, max_blocks=max_blocks)
    arrays = cache.arrays
    before = [np.random.default_rng(4).integers(-100, 100, x.shape).astype(x.dtype) for x in arrays]
    for array, values in zip(arrays, before, strict=True):
        backend.assign(array, values)
    other = backend.layer_cache(4, 1, 16, int8=int8)
    backend.assign(other.values, np.full(other.values.shape, 3, other.values.dtype))
    backend.assign(other.values[2], np.full(other.values[2].shape, 5, other.values.dtype))
    backend.copy_blocks([(cache, 1, 3), (other, 2, 0)])
    for array, values in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(backend.host(array), values[[0, 1, 2, 1]])
    assert [int(block.min()) for block in backend.host(other.values)] == [5, 3, 5, 3]
    if max_blocks is not None:
        backend.grow(cache, max_blocks)
        backend.copy_blocks([(cache, 2, 4)])
        for array, values in zip(cache.arrays, before, strict=True):
            np.testing.assert_array_equal(backend.host(array), values[[0, 1, 2, 1, 2]])
    backend.free_layer_cache(cache)


@pytest.mark.parametrize("max_slots", [None, 5])
def test_a_slot_is_copied_in_every_array_of_a_state_and_no_other(backend, max_slots):
    """Also where the arrays' slots are padded on a device, and the states grow."""
    layout = (
        StateArray("state", (3, 5)),
        StateArray("inputs", (7,), None, ring=4),
        StateArray("position", (), "int32"),
        StateArray("large", (96, 1024), "float32"),
    )
    cache = backend.state_cache(4, layout, max_slots=max_slots)
    types = ["float32", backend.activation_dtype, "int32", "float32"]
    assert [(x.shape, x.dtype) for x in cache.arrays] == [
        ((4, *array.slot_shape), np.dtype(kind)) for array, kind in zip(layout, types, strict=True)
    ]
    before = [np.random.default_rng(4).integers(-100, 100, x.shape).astype(x.dtype) for x in cache.arrays]
    for array, values in zip(cache.arrays, before, strict=True):
        for slot in range(4):
            backend.assign(array[slot : slot + 1], values[slot : slot + 1])
    backend.copy_blocks([(cache, 1, 3)])
    for array, values in zip(cache.arrays, before, strict=True):
        np.testing.assert_array_equal(backend.host(array), values[[0, 1, 2, 1]])
    if max_slots is not None:
        backend.grow(cache, max_slots)
        assert cache.num_blocks == max_slots
        backend.copy_blocks([(cache, 2, 4)])
        for array, values in zip(cache.arrays, before, strict=True):
            np.testing.assert_array_equal(backend.host(array), values[[0, 1, 2, 1, 2]])
    backend.free_layer_cache(cache)


def test_fp16_overflow_is_seen(backend):
    """A product past 65504 is an infinity in fp16, and never a large plausible number."""
    weight = backend.weight([np.full((4, 64), 1000, np.float32)])
    y = backend.host(backend.linear(backend.array(np.full((1, 64), 10, backend.activation_dtype)), weight))
    expected = 640000.0 if backend.activation_dtype == np.float32 else np.inf
    np.testing.assert_array_equal(y, expected)
