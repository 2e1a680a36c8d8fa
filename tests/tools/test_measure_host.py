"""The measurement of the host's time runs requests to their end."""

from __future__ import annotations

import measure_host


def test_every_request_is_served() -> None:
    decoding, mixed = measure_host.measure(requests=6, sequences=4, tokens=8)
    assert len(decoding) + len(mixed) >= 16 and mixed, "two waves of eight tokens"
    assert all(seconds >= 0 for seconds in decoding + mixed)
