"""The measurement of the host's time runs requests to their end."""

from __future__ import annotations

import measure_host


def test_every_request_is_served() -> None:
    decoding, mixed = measure_host.measure(requests=6, sequences=4, tokens=8)
    assert len(decoding) + len(mixed) >= 16 and mixed, "two waves of eight tokens"
    assert all(seconds >= 0 for seconds in decoding + mixed)


def test_a_call_takes_no_less_than_its_steps() -> None:
    seconds, busy = measure_host.measure_calls(requests=6, sequences=4, tokens=8, step_seconds=1e-3)
    assert seconds >= busy >= 16e-3, "two waves of eight tokens"


def test_a_second_turn_takes_longer_than_its_step() -> None:
    seconds = measure_host.measure_turns(cached=200, new=8, step_seconds=1e-3, turns=12)
    assert len(seconds) == 2 and all(s > 0 for s in seconds)


def test_checks_have_parts() -> None:
    parts = measure_host.measure_checks(steps=20, drafts=3)
    assert list(parts) == ["plan", "build", "execute", "sample", "record"] and min(parts.values()) >= 0
