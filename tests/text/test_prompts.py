"""Token ids as callers give them: packed once, and refused with the value, its place and the bound."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from bminf_lite.errors import UsageError
from bminf_lite.text.prompts import validate_lists, validate_token_ids

IDS = [0, 1, 7, 99]


DTYPES = (np.int8, np.int32, np.int64, np.uint64, ">i4")


@pytest.mark.parametrize(
    "given",
    [
        IDS,
        tuple(IDS),
        array("i", IDS),
        array("Q", IDS),
        [np.int64(i) for i in IDS],
        *(np.array(IDS, dtype) for dtype in DTYPES),
        np.array([IDS, IDS]).T[:, 0],
    ],
)
def test_ids_of_every_integer_type_become_a_new_int32_array(given):
    packed = validate_token_ids(given, 100)
    assert (packed.typecode, packed.tolist()) == ("i", IDS)
    packed[0] = 5
    assert given[0] == 0


@pytest.mark.parametrize("given", [[], (), range(0), np.array([]), array("i")])
def test_no_ids(given):
    assert len(validate_token_ids(given, 100)) == 0


@pytest.mark.parametrize(
    "wrong", [1.5, 2.0, True, False, np.True_, np.float32(1), None, "a", b"a", [1], -1, 100, 2**31, 2**64, -(2**80)]
)
def test_the_first_wrong_id_is_named(wrong):
    for given in ([*IDS * 1000, wrong, -3], (*IDS * 1000, wrong)):
        with pytest.raises(UsageError) as error:
            validate_token_ids(given, 100)
        assert str(error.value) == f"token 4000 is {wrong!r}, but a token id is a whole number from 0 to 99"


@pytest.mark.parametrize("given", [np.array([1.0]), np.array([True]), np.array([[1]]), np.array([2**63], np.uint64)])
def test_arrays_that_hold_no_ids(given):
    with pytest.raises(UsageError, match=r"token 0 is .*, but a token id is a whole number from 0 to 99"):
        validate_token_ids(given, 100)


@pytest.mark.parametrize("given", [3, 2.5, None, b"ab", bytearray(b"ab"), {1: 2}, np.array(1), iter([1])])
def test_what_is_no_list(given):
    with pytest.raises(
        UsageError, match=f"a prompt is text, token ids or messages, but this one is {type(given).__name__}"
    ):
        validate_token_ids(given, 100)


SEVERAL = [IDS, [99], [], [3, 2]]


@pytest.mark.parametrize("of", [list, *(lambda ids, dtype=dtype: np.array(ids, dtype) for dtype in DTYPES)])
def test_several_lists_become_int32_arrays(of):
    found = validate_lists([of(ids) for ids in SEVERAL], 100)
    assert found is not None and [ids.tolist() for ids in found] == SEVERAL
    assert all(ids.dtype == np.int32 for ids in found)


@pytest.mark.parametrize("wrong", [1.5, True, False, np.True_, None, "a", [1], -1, 100, 2**31, 2**64, -(2**80)])
def test_several_lists_with_a_wrong_id_are_left_to_the_check_of_each(wrong):
    assert validate_lists([IDS, [0, wrong, 1], [2]], 100) is None


@pytest.mark.parametrize(
    "lists", [[], ["ab"], [IDS, "ab"], [IDS, np.array(IDS)], [np.array([1]), np.array([1], np.int16)], [tuple(IDS)],
              [np.array([[1]])], [np.array([True])], [np.array([1.0])], [np.array([2**63], np.uint64)], [np.array(1)]]
)  # fmt: skip
def test_what_is_not_several_lists_of_one_kind_is_left_to_the_check_of_each(lists):
    assert validate_lists(lists, 100) is None
