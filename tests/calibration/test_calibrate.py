"""What is measured goes into the cluster's figures, and says so."""

import functools
from types import SimpleNamespace

import pytest

from frontier_lab.calibration.device import DeviceFigures, KernelFigures, ProductFigures, Sample
from frontier_lab.calibration.host_times import (
    CASES,
    TENSOR_CASE,
    SmallSteps,
    cases_of,
    host_times,
)
from frontier_lab.calibration.links import LinkFigures, Speed, fit_speed
from frontier_lab.calibration.ranks import Figures, combine, measured
from frontier_lab.commands.calibrate import cluster_file, main, small_config
from frontier_llm.cli.experiments import composed
from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.config.engine import HostTimes
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.memory import fullest

PRODUCTS = (
    ProductFigures("fp32", 0.05, 20.0, (Sample(64, 64, 64, 1e-4),)),
    ProductFigures("bf16", 0.3, 30.0, (Sample(64, 64, 64, 2e-5),)),
)
DEVICE = DeviceFigures("a test", 5e9, (KernelFigures("bf16", 0.1, 0.05, 1.5, 2e9, 3e9),), 3e-6)
LINKS = LinkFigures(2, Speed(50e-6, 1.5e9), {"all_reduce": Speed(70e-6, 1e9)}, 0.25)
USED_BYTES = {CASES[0]: 2e9, CASES[2]: 2.1e9}
SECONDS = dict(zip(CASES, (1.0, 2.5, 4.5), strict=True))


@functools.cache
def small():
    return {"fp32": {case: small_config("fp32", case, 2) for case in CASES}}


def figures(links=LINKS, seconds=SECONDS):
    return Figures(2, PRODUCTS, DEVICE, links, SmallSteps({"fp32": seconds}, USED_BYTES))


@pytest.mark.parametrize("name", ["a/b", "", "../x", "cpu_laptop"])
def test_a_name_that_cannot_be_written_is_refused_before_measuring(name, monkeypatch):
    monkeypatch.setattr(
        "frontier_lab.commands.calibrate.measure", lambda *_: pytest.fail("measured")
    )
    with pytest.raises(ConfigError, match="--write"):
        main(["--write", name])
    assert cluster_file("my-own_1").name == "my-own_1.yaml"


def test_a_load_is_allowed_for_a_file_alone(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--any-load"])
    assert "--any-load without --write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("foreign", "options", "writes"),
    [(3.0, [], False), (3.0, ["--any-load"], True), (0.05, [], True)],
)
def test_a_disturbed_measurement_is_not_written(
    monkeypatch, tmp_path, capsys, foreign, options, writes
):
    """Of ten seconds in which the ranks of the calibration use two cores."""
    seconds, name = iter([0.0, 10.0]), "frontier_lab.commands.calibrate"
    busy, own = iter([0.0, 10 * (2 + foreign)]), iter([0.0, 20.0])
    monkeypatch.setattr(f"{name}.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(f"{name}.busy_seconds", lambda: next(busy))
    monkeypatch.setattr(f"{name}.own_seconds", lambda: next(own))
    monkeypatch.setattr(f"{name}.measure", lambda *_: figures())
    monkeypatch.setattr(f"{name}.FORMATS", {"cpu": ("fp32",)})
    path = tmp_path / "mine.yaml"
    monkeypatch.setattr(f"{name}.cluster_file", lambda _: path)
    arguments = ["--write", "mine", "cluster=cpu_laptop", *options]
    if writes:
        assert main(arguments) == 0
    else:
        with pytest.raises(ConfigError, match=r"other programs used 3\.0 cores"):
            main(arguments)
    assert path.exists() == writes
    assert ("warning: other programs" in capsys.readouterr().out) == (writes and foreign > 1)


def test_measured_figures_replace_the_files():
    before = composed("cluster=cpu_laptop").cluster
    values = measured(before.model_dump(mode="json"), figures(), small())
    cluster = ClusterConfig.model_validate(values)
    calibration, link = cluster.device.calibration, cluster.links[0]
    assert calibration.products["bf16"].tflops == 0.3
    assert calibration.products["fp32"].half_size == 20
    assert calibration.memory_share == 0.5  # of 10 GB/s
    assert calibration.kernel_us == 3
    assert calibration.attention_share == 0.333
    assert calibration.hidden_share == 0.25
    assert calibration.kernels["bf16"].weight_gradient_ratio == 1.5
    assert calibration.kernels["bf16"].quantise_gb_per_second == 3
    assert (link.gb_per_second, link.latency_us) == (1.5, 50)
    assert link.collectives["all_reduce"].latency_us == 70
    assert "measured on a test" in calibration.source
    assert "measured on a test" in link.source


@pytest.mark.parametrize("case", USED_BYTES)
def test_a_small_model_is_planned_to_use_what_was_measured(case):
    before = composed("cluster=cpu_laptop").cluster
    cluster = ClusterConfig.model_validate(
        measured(before.model_dump(mode="json"), figures(), small())
    )
    candidate = Candidate.of(small()["fp32"][case], 2, 2).with_cluster(cluster)
    assert fullest(candidate).total == pytest.approx(USED_BYTES[case], abs=1e6)
    assert cluster.device.calibration.slack_share > 0


def test_on_a_cpu_the_host_takes_what_the_kernels_do_not():
    before = composed("cluster=cpu_laptop").cluster
    values = measured(before.model_dump(mode="json"), figures(), small())
    host = ClusterConfig.model_validate(values).device.calibration.host["fp32"]
    plain = host_times(SECONDS, dict.fromkeys(CASES, 0.0), HostTimes())
    assert 0 < host.layer_us < 0.95 * plain.layer_us
    # four layers more, in four micro-batches, take 2 s
    assert plain.layer_us * (1 + plain.backward_share) == pytest.approx(2e6 / 16)
    # three micro-batches more take 1.5 s, of which two layers take a part
    assert plain.micro_batch_us == pytest.approx(0.5e6 - 2 * 2e6 / 16)


def test_tensor_ranks_take_what_their_messages_and_layers_do_not():
    """Six layers in four micro-batches take 0.6 s longer than without tensor ranks."""
    assert cases_of(2) == cases_of(8) == (*CASES, TENSOR_CASE)
    assert cases_of(1) == cases_of(3) == CASES
    config = small_config("fp32", TENSOR_CASE, 8)
    assert Candidate.of(config, 8, 8).layout.micro_batches == TENSOR_CASE.micro_batches
    planned = dict.fromkeys(CASES, 0.5) | {TENSOR_CASE: 0.7}
    seconds = {**SECONDS, TENSOR_CASE: SECONDS[CASES[2]] + 0.8}
    host = host_times(seconds, planned, HostTimes())
    assert (1 + host.backward_share) * host.tensor_us == pytest.approx(0.6e6 / 24)
    without = host_times(SECONDS, dict.fromkeys(CASES, 0.5), HostTimes())
    assert without == host.model_copy(update={"tensor_us": 0.0})


def test_what_was_not_measured_stays():
    before = composed("cluster=a100_80g").cluster
    values = measured(before.model_dump(mode="json"), figures(links=None), small())
    cluster = ClusterConfig.model_validate(values)
    assert cluster.links == before.links
    assert cluster.device.memory_gib == before.device.memory_gib
    for name in ("hidden_share", "slack_share"):
        assert getattr(cluster.device.calibration, name) == getattr(before.device.calibration, name)


def test_ranks_count_alike():
    slower = {case: 3 * seconds for case, seconds in SECONDS.items()}
    steps = combine([figures(), figures(seconds=slower)]).small_steps.seconds["fp32"]
    assert steps == pytest.approx({case: 2 * seconds for case, seconds in SECONDS.items()})


def test_latency_and_bandwidth_are_found_again():
    samples = [(sent, 2 * 30e-6 + sent / 2e9) for sent in (1e3, 1e5, 1e6, 8e6)]
    assert fit_speed(samples, steps=2) == pytest.approx(Speed(30e-6, 2e9))
