"""How many clusters compute a product of many rows, and in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.cuda.kernels.gemm.gemm_hopper import BAND_BYTES, BANDS, ROWS, TILE_CONFIGS, band_of, fewest_clusters


@given(st.integers(1, 100_000), st.integers(1, 132))
def test_fewer_clusters_take_as_many_rounds(tiles: int, places: int) -> None:
    def rounds(clusters: int) -> int:
        return -(-tiles // clusters)

    clusters = fewest_clusters(tiles, places)
    assert 1 <= clusters <= min(tiles, places)
    assert rounds(clusters) == rounds(places)
    assert clusters == 1 or rounds(clusters - 1) > rounds(places)


@given(st.integers(1, 200_000))
def test_a_band_has_as_many_rows_as_the_cache_keeps(in_features: int) -> None:
    band = band_of(in_features)
    assert band == min(BANDS) or band * ROWS * in_features <= BAND_BYTES
    assert all(wider * ROWS * in_features > BAND_BYTES for wider in BANDS if wider > band)
    assert all(band % config.cluster == 0 for config in TILE_CONFIGS)
