"""What `python train.py` chooses on the devices of a machine, and which changes a refusal names."""

import re

import pytest

from docs.generate.__main__ import main
from docs.generate.first_command import DEVICES, H100, H200, first
from frontier_lab.commands import dry_run, plan
from frontier_llm.cli import machine_defaults
from frontier_llm.cli.compose import compose
from frontier_llm.config import decode
from frontier_llm.config.rules import check
from frontier_llm.errors import ConfigError
from frontier_llm.launch.visible_devices import VisibleDevices
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.fit_check import check_fits
from tests.covering import covering

CHOSEN = {
    "no GPU": ("cpu_laptop", 4, 2, 4),
    "1 H100": ("h100_8", 1, 1, 4),
    "1 H200": ("h200_8", 1, 1, 4),
    "8 A100, 80 GB": ("a100_80g", 8, 1, 2),
    "8 A100, 40 GB": ("a100_40g_8", 8, 1, 2),
    "4 A100, 40 GB": ("juwels_a100_40g", 4, 1, 4),
    "8 GCDs of MI250X": ("frontier_mi250x", 8, 1, 2),
    "1 GCD (`ROCR_VISIBLE_DEVICES=0`)": ("frontier_mi250x", 1, 1, 4),
    "2 L40S, which no file describes": ("other_gpu", 2, 1, 4),
    "a quarter of an H100 (MIG)": ("other_gpu", 1, 1, 4),
}
"""Cluster, ranks, pipeline stages and micro-batch."""


def _see(monkeypatch, devices):
    monkeypatch.setattr(machine_defaults, "visible_devices", lambda: devices)
    machine_defaults.cluster_of_this_machine.cache_clear()


@pytest.fixture(autouse=True)
def _forget():
    yield
    machine_defaults.cluster_of_this_machine.cache_clear()


@pytest.mark.parametrize("name", DEVICES)
def test_the_first_command_fits_the_machine(name):
    chosen, said, refusal = first(DEVICES[name])
    keys = ("cluster", "ranks", "pipeline", "micro-batch")
    assert tuple(chosen[key] for key in keys) == tuple(map(str, CHOSEN[name]))
    assert (chosen["precision"], chosen["attention"]) == ("auto", "sdpa")
    assert refusal == ""
    assert (DEVICES[name] is None) == (said == "")
    if DEVICES[name]:
        assert DEVICES[name].name in said


def test_a_length_that_no_layout_fits_is_named_with_one_that_does():
    _, _, refusal = first(None, "data.sequence_length=1000000")
    assert refusal.startswith("configuration error at data.sequence_length\n  got:    1000000: ")
    assert "  do:     set data.sequence_length=16384 (" in refusal


@pytest.mark.exhaustive
def test_the_table_in_the_documentation_is_current(capsys):
    assert main(["first_command"]) == 0, capsys.readouterr().err


def test_of_several_files_the_line_names_those_that_were_not_chosen():
    _, said, _ = first(DEVICES["4 A100, 40 GB"])
    assert "; cluster=perlmutter_a100_40g and cluster=polaris_a100_40g and cluster=" in said
    assert said.endswith(" would fit, too\n")


@pytest.mark.parametrize(
    ("site", "name", "wanted"),
    [
        ("perlmutter", "4 A100, 40 GB", "perlmutter_a100_40g"),
        ("LUMI", "8 GCDs of MI250X", "lumi_mi250x"),
        ("LUMI", "1 GCD (`ROCR_VISIBLE_DEVICES=0`)", "lumi_mi250x"),
        ("frontier", "8 GCDs of MI250X", "frontier_mi250x"),
        ("perlmutter", "8 A100, 80 GB", "a100_80g"),
    ],
)
def test_in_a_job_of_slurm_the_file_of_the_site_comes_first(monkeypatch, site, name, wanted):
    monkeypatch.setenv("SLURM_CLUSTER_NAME", site)
    assert first(DEVICES[name])[0]["cluster"] == wanted


def test_a_gpu_without_a_file_has_its_own_memory_and_no_peak(monkeypatch, capsys):
    _see(monkeypatch, DEVICES["2 L40S, which no file describes"])
    device = decode(compose(["precision=bf16"])).cluster.device
    assert (device.name, device.kind, device.memory_gib) == ("NVIDIA L40S", "cuda", 44.4)
    assert (device.peak_tflops, device.calibration.products) == ({}, {})
    check(decode(compose(["precision=bf16"])), 2)
    assert capsys.readouterr().err.count("\n") == 1, "the line is printed once"


@pytest.mark.parametrize(
    "devices", covering([H100, H200], [H200]), ids=lambda devices: devices.name
)
def test_a_refusal_names_changes_that_fit_this_gpu(monkeypatch, devices):
    _, _, refusal = first(devices, "model=llama3_8b")
    assert f"GiB of {devices.name.split()[1]} SXM (cluster=" in refusal
    assert "cpu_laptop" not in refusal
    named = re.findall(r"([\w.= ]+) \(([\d.]+) GiB\)", refusal.partition("do:")[2])
    assert 2 <= len(named) <= 4
    _see(monkeypatch, devices)
    for text, gib in named:
        overrides = [word for word in text.split() if "=" in word]
        config = decode(compose(["model=llama3_8b", *overrides][1 if "model=" in text else 0 :]))
        peak = check_fits(Candidate.of(config, 1, 1)).total / 2**30
        assert peak == pytest.approx(float(gib), abs=0.01)
        assert peak < 0.95 * devices.memory_gib


MI250X = DEVICES["8 GCDs of MI250X"]
L40S = VisibleDevices("cuda", "NVIDIA L40S", 44.4, 8)


@pytest.mark.parametrize(
    "devices", covering([MI250X, L40S], [L40S]), ids=lambda devices: devices.name
)
def test_named_changes_take_the_memory_that_pasting_them_gives(monkeypatch, devices):
    _, _, refusal = first(devices, "model=llama3_8b")
    named = re.findall(r"([\w.= ]+) \(([\d.]+) GiB\)", refusal.partition("do:")[2])
    texts = [" ".join(word for word in text.split() if "=" in word) for text, _ in named]
    assert len(set(texts)) == len(texts) >= 2
    assert any("parallel.tensor=" in text for text in texts)
    _see(monkeypatch, devices)
    for text, (_, gib) in zip(texts, named, strict=True):
        model = [] if "model=" in text else ["model=llama3_8b"]
        pasted = decode(compose([*text.split(), *model]))
        peak = check_fits(Candidate.of(pasted, 8, 8)).total / 2**30
        assert peak == pytest.approx(float(gib), abs=0.01)


def test_where_no_layout_fits_the_refusal_says_how_many_ranks_do():
    _, _, refusal = first(DEVICES["2 L40S, which no file describes"], "model=llama3_8b")
    ranks = int(re.search(r"start (\d+) ranks on as many devices with sharding", refusal)[1])
    overrides = [f"launch.ranks={ranks}", "model=llama3_8b", "sharding=zero3", "cluster=a100_40g_8"]
    assert first(None, *overrides, "cluster.device.memory_gib=44.4")[2] == ""
    overrides[0] = f"launch.ranks={ranks // 2}"
    assert first(None, *overrides, "cluster.device.memory_gib=44.4")[2] != ""


@pytest.mark.parametrize("devices", [H100, H200], ids=lambda devices: devices.name)
def test_the_limit_is_the_memory_that_the_driver_gives(monkeypatch, devices):
    _see(monkeypatch, devices)
    assert decode(compose([])).cluster.device.memory_gib == devices.memory_gib
    assert decode(compose(["cluster.device.memory_gib=75"])).cluster.device.memory_gib == 75
    other = decode(compose(["cluster=a100_40g_8"])).cluster.device
    assert other.memory_gib == 39.5, "the GPU here is another one"


def test_a_plan_for_an_unknown_gpu_says_how_to_measure_it(monkeypatch):
    _see(monkeypatch, L40S)
    with pytest.raises(ConfigError, match=r"NVIDIA L40S.*\n.*\n.*calibrate --write NAME"):
        plan.main(["model=gpt_tiny"])


def test_a_dry_run_takes_names_of_experiments_only():
    with pytest.raises(ConfigError, match="write frontier-llm train plan=dry_run cluster=auto"):
        dry_run.main(["cluster=auto"])
    for word in ("frontier_22", "experiment=frontier_22"):
        with pytest.raises(ConfigError, match="did you mean experiment=frontier_22b") as refused:
            dry_run.main([word])
        assert "frontier_1t, " in refused.value.wants


def test_a_dry_run_takes_an_experiment_like_every_command(capsys, monkeypatch):
    built = []

    def build_kinds(candidate, every):
        built.append(candidate)
        return candidate.stages.kinds

    monkeypatch.setattr(dry_run, "build", build_kinds)
    assert dry_run.main(["experiment=laptop_3d", "frontier_22b"]) == 0
    few, many = capsys.readouterr().out.splitlines()
    assert few.startswith("laptop_3d: 2 stages at 8 ranks, as planned (")
    wanted = "frontier_22b: 8 stages at 16 ranks, as planned (3 built, 5 equal to these, "
    assert many.startswith(wanted)
    assert [candidate.config.model.name for candidate in built] == ["gpt_tiny", "gpt_22b"]


def test_an_optimizer_whose_keys_are_given_is_not_exchanged():
    _, _, refusal = first(H200, "model=llama3_8b", "optimizer.beta1=0.8")
    assert "set model=" in refusal
    assert "optimizer=" not in refusal


def test_under_srun_the_ranks_are_those_of_the_job(monkeypatch):
    task = {
        "SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0",
        "SLURM_STEP_ID": "0", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_STEP_NUM_TASKS": "16", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "8(x2)",
    }  # fmt: skip
    for name, value in task.items():
        monkeypatch.setenv(name, value)
    chosen, _, refusal = first(DEVICES["1 GCD (`ROCR_VISIBLE_DEVICES=0`)"])
    assert (chosen["ranks"], chosen["micro-batch"], refusal) == ("16", "1", "")


def test_a_user_s_file_comes_first_if_its_ranks_fit(monkeypatch, tmp_path):
    (tmp_path / "cluster").mkdir()
    for name, per_node in (("z_eight", 8), ("z_two", 2)):
        text = f"defaults: [h100_8]\nname: {name}\nranks_per_node: {per_node}\n"
        (tmp_path / "cluster" / f"{name}.yaml").write_text(text)
    monkeypatch.setenv("FRONTIER_LLM_CONF_DIR", str(tmp_path))
    for count, wanted in ((8, "z_eight"), (2, "z_two"), (1, "z_eight")):
        devices = VisibleDevices("cuda", H100.name, H100.memory_gib, count)
        _see(monkeypatch, devices)
        assert machine_defaults.cluster_of_this_machine() == wanted


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [([], 2), (["launch.ranks=1"], 1), (["launch.ranks=3"], 1), (["launch.ranks=6"], 2),
     (["parallel.tensor=2"], 2), (["parallel.tensor=4"], 1),
     (["launch.ranks=8", "cluster=polaris_a100_40g"], 1)],
)  # fmt: skip
def test_the_default_number_of_stages_divides_the_ranks(overrides, expected):
    assert compose(overrides)["parallel"]["pipeline"] == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["launch.ranks=8", "parallel.pipeline=1"], 2),
        (["launch.ranks=8", "parallel.tensor=2", "parallel.pipeline=2"], 4),
        (["launch.ranks=3", "parallel.pipeline=1"], 4),  # refused by a rule
        (["launch.ranks=16", "parallel.pipeline=1"], 1),
        (["launch.ranks=16", "parallel.pipeline=1", "data.micro_batch=4"], 4),
    ],
)
def test_the_default_micro_batch_divides_the_samples_per_replica(overrides, expected):
    assert compose(overrides)["data"]["micro_batch"] == expected
