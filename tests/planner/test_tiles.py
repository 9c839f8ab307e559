"""Products take whole waves of tiles."""

import pytest

from frontier_llm.cli.experiments import composed
from frontier_llm.planner.block import Product
from frontier_llm.planner.compute import SPLITS, TILES, Speed, tile_flops

A100 = 108


def _share(m, k, n, count=1):
    """Speed of a product as a share of the peak."""
    return 2 * m * k * n * count / (A100 * tile_flops(m, k, n, count, A100))


def test_large_products_run_at_full_speed_and_none_is_faster():
    assert 0.95 < _share(16384, 16384, 16384) <= 1
    for size in (64, 100, 1000, 5000):
        assert _share(size, size, size) <= 1


def test_a_tile_more_than_a_wave_starts_another_wave():
    rows, columns = TILES[0].rows, TILES[0].columns
    full = tile_flops(rows * A100, 8192, columns, 1, A100)
    more = tile_flops(rows * (A100 + 1), 8192, columns, 1, A100)
    assert 1.05 < more / full < 2


def test_products_with_few_tiles_are_split_along_the_inner_dimension():
    few = tile_flops(256, 65536, 256, 1, A100)
    assert few < 0.5 * 2 * TILES[0].rows * TILES[0].columns * 65536
    assert SPLITS[0] == 1


def test_products_of_many_heads_fill_the_processors_together():
    one, many = _share(512, 64, 512), _share(512, 64, 512, count=64)
    assert many > 2 * one


def test_reading_the_operands_limits_a_thin_product():
    device = composed("cluster=a100_80g").cluster.device
    speed = Speed(device, "bf16")
    thin = Product(65536, 8, 65536)
    bandwidth = device.memory_gb_per_second * 1e9 * device.calibration.memory_share
    assert speed.product(thin) == pytest.approx(2 * 65536**2 / bandwidth, rel=0.01)
