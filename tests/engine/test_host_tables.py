"""Block tables on the host equal those of the requests, whatever they gain and give back."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from stub_runner import make_request

from bminf_lite.engine.step_builder import HostTables


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), max_size=40))
def test_tables_are_copied_as_they_change(actions):
    """Blocks are added, passed by a window, and lost with a preemption; rows go to other requests."""
    tables, requests = HostTables(3, 64), {row: make_request([1], arrival=100 + row) for row in (1, 2)}
    held: dict[int, list[int]] = {1: [], 2: []}
    for number, (kind, row) in enumerate(actions, start=1):
        if kind == 0:
            requests[row], held[row] = make_request([1], arrival=number), [number]
        elif kind == 1:
            requests[row].num_preemptions += 1
            held[row] = [0, number]
        elif kind == 2:
            held[row].append(number)
        else:
            passed = len(held[row]) // 2
            held[row][:passed] = [0] * passed
        requests[row].row = row
        tables.update(requests[row], held[row])
        np.testing.assert_array_equal(tables.array[row], held[row] + [0] * (64 - len(held[row])))
