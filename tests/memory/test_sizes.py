import pytest
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.errors import UsageError
from bminf_lite.memory.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("6GiB", 6 << 30),
        ("6 gib", 6 << 30),
        ("500MB", 500_000_000),
        ("500M", 500_000_000),
        ("1.5GiB", 3 << 29),
        (".5k", 500),
        ("2TiB", 2 << 40),
        ("1024", 1024),
        ("7b", 7),
        (12345, 12345),
    ],
)
def test_sizes_that_people_write(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "six GiB", "6 GiBs", "-6GiB", "6,5GiB", "0", "0MB", 0, -1, True, 1.5])
def test_anything_else_is_an_error_that_shows_it(text: object) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)  # type: ignore[arg-type]
    assert str(text) in str(caught.value)


@given(st.integers(1, 1 << 50))
def test_what_is_shown_reads_back_within_its_precision(nbytes: int) -> None:
    shown = format_size(nbytes).replace(" bytes", "")
    assert abs(parse_size(shown) - nbytes) <= 0.05 * nbytes
