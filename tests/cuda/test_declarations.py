"""A kernel's parameters are read from its declaration, and lie where the compiler put them."""

from __future__ import annotations

import pytest

from bminf_lite.cuda.runtime.declarations import kernel_name, parse_declarations


def test_parameters_and_template() -> None:
    text = """
    // __global__ void not_this(int a);
    template <class T, int N>
    __device__ void helper(T* x);
    template <int D, class CACHE>
    __global__ void __launch_bounds__(blocks_of(D) * 2, 1)
        k(const void* x, long long pitch, CACHE *__restrict__ out, float scale, bool aligned, unsigned seed,
          const __grid_constant__ TensorMap map /* boxes */) {}
    __global__ void plain(const Both p) {}
    """
    found = parse_declarations(text, "struct Both { const float *a, *b; // two\n int n; __device__ int f(); };")
    assert found.keys() == {"k", "plain"}
    assert (found["k"].template, found["k"].signature) == (("D", "CACHE"), "pqpf?IT")
    assert [p.name for p in found["k"].parameters] == ["x", "pitch", "out", "scale", "aligned", "seed", "map"]
    assert (found["plain"].template, found["plain"].signature) == ((), "ppi")
    assert kernel_name("bminf::attend<64, true>") == "attend"


@pytest.mark.parametrize("text", ["k(short x) {}", "k(Missing p) {}", "k(int* x"])
def test_what_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_declarations(f"__global__ void {text}")
