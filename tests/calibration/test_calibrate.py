"""What is measured goes into the cluster's figures, and says so."""

import pytest

from frontier_llm.calibration.device import DeviceFigures
from frontier_llm.calibration.links import LinkFigures
from frontier_llm.calibration.products import ProductFigures
from frontier_llm.cli.calibrate import cluster_file, main, measured
from frontier_llm.cli.experiments import composed
from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.errors import ConfigError

PRODUCTS = [
    ProductFigures("fp32", 0.05, 20.0, ()),
    ProductFigures("bf16", 0.3, 30.0, ()),
]
DEVICE = DeviceFigures("a test", 5e9, "bf16", 0.1, 3e-6)


@pytest.mark.parametrize("name", ["a/b", "", "../x", "cpu_laptop"])
def test_a_name_that_cannot_be_written_is_refused_before_measuring(name, monkeypatch):
    monkeypatch.setattr(
        "frontier_llm.cli.calibrate.measure_links", lambda _: pytest.fail("measured")
    )
    with pytest.raises(ConfigError, match="--write"):
        main(["--write", name])
    assert cluster_file("my-own_1").name == "my-own_1.yaml"


def test_measured_figures_replace_the_files():
    before = composed("cluster=cpu_laptop").cluster
    links = LinkFigures(2, 50e-6, 1.5e9)
    values = measured(before.model_dump(mode="json"), PRODUCTS, DEVICE, links)
    cluster = ClusterConfig.model_validate(values)
    calibration = cluster.device.calibration
    assert calibration.products["bf16"].tflops == 0.3
    assert calibration.products["fp32"].half_size == 20
    assert calibration.memory_share == 0.5  # of 10 GB/s
    assert calibration.kernel_us == 3
    assert calibration.attention_share == 0.333
    assert (cluster.links[0].gb_per_second, cluster.links[0].latency_us) == (1.5, 50)
    assert "measured on a test" in calibration.source
    assert "measured on a test" in cluster.links[0].source


def test_what_was_not_measured_stays():
    before = composed("cluster=a100_80g").cluster
    values = measured(before.model_dump(mode="json"), PRODUCTS, DEVICE, None)
    cluster = ClusterConfig.model_validate(values)
    assert cluster.links == before.links
    assert cluster.device.memory_gib == before.device.memory_gib
    assert cluster.device.calibration.hidden_share == before.device.calibration.hidden_share
