"""Random matrices are the same wherever they are made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bminf_lite.backend.base import Backend
from bminf_lite.backend.quantization import Int8Weight
from bminf_lite.backend.random_matrix import RandomMatrix, random_words


def test_words_are_those_of_splitmix64():
    """The first outputs for the seed 1234567, as the generator's authors publish them."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert random_words(1234567, 0, 5).tolist() == known
    assert random_words(1234567, 3, 2).tolist() == known[3:]


@pytest.mark.parametrize("shape", [(1, 1), (3, 13), (40, 64), (2000, 4097)])
def test_codes_are_uniform_and_never_minus_128(shape):
    codes = np.asarray(RandomMatrix(shape, seed=5))
    assert codes.shape == shape and codes.dtype == np.int8 and codes.min() >= -127
    if codes.size > 1000:
        counts = np.bincount(codes.ravel().astype(int) + 127, minlength=255)
        expected = codes.size / 256
        assert (np.abs(counts[1:] - expected) < 6 * expected**0.5).all(), "each code about as often as another"
    assert (codes != np.asarray(RandomMatrix(shape, seed=6))).any()


def test_slices_of_rows_and_of_columns_are_random_matrices_and_any_other_part_is_an_array():
    matrix = RandomMatrix((6, 21), seed=(1 << 64) - 5)
    for index in (
        *(slice(2, 5), slice(3, None), slice(4, 2), slice(-2, None)),
        *((slice(None), slice(8, 21)), (slice(None), slice(8, 16)), (slice(None), slice(0, 13))),
    ):
        part = matrix[index]
        assert isinstance(part, RandomMatrix) and (np.asarray(part) == np.asarray(matrix)[index]).all()
    assert (np.asarray(matrix[:, 8:][2:4]) == np.asarray(matrix)[2:4, 8:]).all()
    for index in ((slice(2, 5), [1, 3]), (slice(None), slice(3, 9))):
        assert isinstance(matrix[index], np.ndarray) and (matrix[index] == np.asarray(matrix)[index]).all()


def test_floats_are_codes_over_a_unit():
    codes, floats = (np.asarray(RandomMatrix((5, 70), dtype, 9)) for dtype in (np.int8, np.float16))
    assert floats.dtype == np.float16
    assert (floats == codes.astype(np.float16) / 64).all()
    larger = RandomMatrix((5, 70), np.float16, 9, unit=2)
    assert (np.asarray(larger) == codes.astype(np.float16) / 2).all()
    assert (np.asarray(larger[2:4]) == np.asarray(larger)[2:4]).all()


@pytest.mark.parametrize(("n", "k"), [(16, 64), (33, 70), (70, 129)])
def test_every_backend_makes_the_same(backend: Backend, n: int, k: int):
    whole = [Int8Weight(RandomMatrix((n, 8 + k), np.int8, seed), np.full(n, 0.01, np.float16)) for seed in (1, 2)]
    parts = [replace(whole[0], codes=RandomMatrix((n, k))), replace(whole[1], codes=whole[1].codes[:, 8:])]
    copies = [Int8Weight(np.asarray(p.codes), p.scale) for p in parts]
    x = np.random.default_rng(0).standard_normal((3, k)).astype(np.float32)
    x = backend.array(x.astype(backend.activation_dtype))
    made, copied = (backend.host(backend.linear(x, backend.weight(w), fp32=True)) for w in (parts, copies))
    assert (made == copied).all()


@pytest.mark.parametrize("unit", [2, 64])
def test_an_embedding_table(backend: Backend, unit: int):
    matrix = RandomMatrix((20, 33), np.float16, 3, unit=unit)
    rows = np.array([0, 7, 19], np.int32)
    values = backend.host(backend.embed(backend.array(rows), backend.table(matrix)))
    assert (values == np.asarray(matrix)[rows]).all()
