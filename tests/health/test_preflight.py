"""Misplaced, absent or differently configured ranks are named before the model is built."""

import subprocess
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from frontier_llm.config import decode
from frontier_llm.config.partner_copies import with_partner_copies
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.errors import LaunchError, RankFailure
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.health.preflight import (
    check_all_ranks,
    check_groups,
    collective_trial,
    message_trial,
)
from frontier_llm.health.rank_checks import RankReport, check_reports
from frontier_llm.launch import coordination
from frontier_llm.launch.world import World
from frontier_llm.trainer import connect
from tests.conftest import mount
from tests.covering import covering
from tests.patience import patient
from tests.ranks import run_ranks
from tests.values import tiny_values

CONFIG = decode(tiny_values())
WORLD = World(0, 4, 0, 2, "a", "slurm", "a", 1, "job", ("a", "b"))
CPU = torch.device("cpu")


def _reports(**first):
    reports = [
        RankReport(
            rank=rank,
            host="ab"[rank // 2],
            device=f"pci {rank % 2}",
            device_name="cpu",
            kind="cpu",
            interfaces=("eth0",),
            cores=str(rank % 2),
            digest="d",
            versions={"torch": "2"},
            environment={},
            folders={},
            free_bytes={},
            clock_seconds=100.0,
        )
        for rank in range(4)
    ]
    return [replace(report, **first) if report.rank == 3 else report for report in reports]


def _with_space(report, tier, folder, free):
    return replace(report, folders={tier: str(folder)}, free_bytes={tier: free})


def test_ranks_may_share_a_device_over_gloo_only():
    reports = _reports(device="pci 0")
    for backend, count in (("auto", 1), ("nccl", 1), ("gloo", 0)):
        config = decode(tiny_values(f"collectives.backend={backend}"))
        assert len(check_reports(config, 1, WORLD, reports).errors) == count, backend


def test_correctly_placed_ranks_pass():
    found = check_reports(CONFIG, 1, WORLD, _reports())
    assert (found.errors, found.warnings) == ((), ())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"device": "pci 0"}, "ranks 2, 3 share one device (pci 0 on b)"),
        ({"host": "a", "device": "pci 7"}, "ranks 2 to 3 should share a node, but are on a, b"),
        ({"digest": "other"}, "rank 3 on b has another configuration than rank 0"),
        ({"versions": {"torch": "3"}}, "rank 3 on b has torch 3, rank 0 has 2"),
        (
            {"environment": {"GLOO_SOCKET_IFNAME": "hsn0"}},
            "GLOO_SOCKET_IFNAME=hsn0 on rank 3, but b has only eth0",
        ),
    ],
)
def test_a_problem_that_would_spoil_the_run_is_an_error(changed, words):
    errors = check_reports(CONFIG, 1, WORLD, _reports(**changed)).errors
    assert any(words in error for error in errors), errors


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kind": "cuda", "device_name": "A100"}, "ranks 3 compute on A100"),
        ({"cores": "0"}, "ranks 2, 3 share the cores 0 of b"),
    ],
)
def test_a_condition_that_may_be_intended_is_a_warning(changed, words):
    found = check_reports(CONFIG, 1, WORLD, _reports(**changed))
    assert found.errors == ()
    assert any(words in warning for warning in found.warnings), found.warnings


def test_hosts_with_wrong_clocks_are_warned_of_once():
    reports = [replace(r, clock_seconds=100 + 7.5 * (r.host == "b")) for r in _reports()]
    (warning,) = check_reports(CONFIG, 1, WORLD, reports).warnings
    assert warning.startswith("the clock of b is 7.5 s ahead")
    many = [
        replace(_reports()[0], rank=rank, host=f"n{rank}", clock_seconds=100 - 9.0 * (rank < 1500))
        for rank in range(9600)
    ]
    warnings = check_reports(CONFIG, 1, replace(WORLD, size=9600), many).warnings
    assert len(warnings) < 10
    assert "the clocks of 1496 more hosts are wrong by less" in warnings


def test_variables_are_compared_with_the_cluster_file():
    config = decode(tiny_values("cluster=a100_80g"))
    reports = [replace(r, environment={"NCCL_DEBUG": "INFO"}) for r in _reports()]
    warnings = check_reports(config, 1, WORLD, reports).warnings
    assert any(
        "NCCL_DEBUG is INFO on ranks 0, 1, 2, 3" in w and "wants WARN" in w for w in warnings
    )
    assert any("NCCL_NET_GDR_LEVEL is not set" in w for w in warnings)


def test_one_node_may_lack_the_variable_that_refuses_tcp():
    config = decode(tiny_values("cluster=frontier_mi250x"))
    for hosts, count in (("ab", 1), ("aa", 0)):
        reports = [replace(r, host=hosts[r.rank // 2]) for r in _reports()]
        warnings = check_reports(config, 1, WORLD, reports).warnings
        assert sum(warning.startswith("NCCL_NET is") for warning in warnings) == count


def test_a_tier_without_room_for_a_checkpoint_is_an_error(tmp_path):
    config = decode(tiny_values(f"run.dir={tmp_path}"))
    full = [_with_space(r, "shared", tmp_path, 1000) for r in _reports()]
    error = check_reports(config, 1, WORLD, full).errors[0]
    assert "has 1000 B free, a checkpoint takes" in error
    assert "lower checkpoint.keep if older checkpoints take it" in error
    config = decode(tiny_values(f"run.dir={tmp_path}", "checkpoint.keep=1"))
    error = check_reports(config, 1, WORLD, full).errors[0]
    assert "lower" not in error
    config = decode(tiny_values(f"run.dir={tmp_path}", "checkpoint=off"))
    assert check_reports(config, 1, WORLD, full).errors == ()


@pytest.mark.parametrize(("sharding", "nodes"), [("replicated", 1), ("zero1", 2)])
def test_a_node_needs_space_for_the_states_of_its_ranks(tmp_path, sharding, nodes):
    local = f"checkpoint.tiers.local.path={tmp_path}"
    keys = ("parallel.pipeline=1", f"sharding={sharding}", f"run.dir={tmp_path}/run", local)
    config = decode(tiny_values(*keys))
    whole = 12 * count_parameters(config.model, config.data.sequence_length)
    spread = ResolvedLayout.resolve(config, WORLD.size, WORLD.ranks_per_node).nodes_per_copy
    for free, fits in ((whole // nodes, True), (whole // nodes - 1, False)):
        reports = [_with_space(r, "local", tmp_path, free) for r in _reports()]
        assert (check_reports(config, spread, WORLD, reports).errors == ()) == fits


def test_copies_in_memory_that_a_run_replaces_count_as_free(tmp_path):
    size = 4 << 20
    mount(tmp_path, f"size={size}")
    copies = tmp_path / "run"
    keys = "recovery.enabled=true", "recovery.partner_copies=true"
    config = with_partner_copies(
        decode(tiny_values(*keys, f"recovery.copies_path={tmp_path}", "checkpoint=lazy"))
    )
    try:
        (copies / "node_00000").mkdir(parents=True)
        (copies / "node_00000" / "content").write_bytes(bytes(3 << 20))
        world = replace(WORLD, rank=2)  # the first of its node
        other = RankReport.of(config, world, Accelerator.of_rank(0), tmp_path / "another_run")
        own = RankReport.of(config, world, Accelerator.of_rank(0), copies)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    assert other.free_bytes == {"local": size - (3 << 20)}
    assert own.free_bytes == {"local": size}


def test_an_error_of_many_ranks_is_reported_once():
    reports = [replace(r, versions={"torch": str(min(r.rank, 1))}) for r in _reports()]
    (error,) = check_reports(CONFIG, 1, WORLD, reports).errors
    assert error == "ranks 1, 2, 3 on a, b have torch 1, rank 0 has 0"


def test_nccl_waits_longer_than_the_watchdog():
    day, minute = timedelta(days=1), timedelta(minutes=1)
    unwatched = decode(tiny_values("watchdog.enabled=false"))
    assert connect._collective_timeout(CONFIG, "nccl") == day
    assert connect._collective_timeout(unwatched, "nccl") == minute
    assert connect._collective_timeout(CONFIG, "gloo") == minute


def test_simulated_nodes_are_not_checked_for_placement():
    config = decode(tiny_values("launch.ranks_per_node=2"))
    reports = [replace(report, host="laptop", device="") for report in _reports()]
    assert check_reports(config, 1, WORLD, reports).errors == ()


@pytest.mark.parametrize("saves_locally", [False, True])
def test_a_replaced_rank_may_be_on_another_node_unless_nodes_save_checkpoints(saves_locally):
    path = "/tmp/local" if saves_locally else "null"
    config = decode(tiny_values(f"checkpoint.tiers.local.path={path}"))
    later = replace(WORLD, generation=1)
    found = check_reports(config, 1, later, _reports(host="c"))
    (text,) = found.errors if saves_locally else found.warnings
    assert text.startswith("ranks 2 to 3 have shared a node and are now on b, c")
    assert ("would be incomplete" in text) == saves_locally
    assert not (found.warnings if saves_locally else found.errors)
    moved = [replace(report, host="ac"[report.rank // 2]) for report in _reports()]
    found = check_reports(config, 1, later, moved)
    assert (found.errors, found.warnings) == ((), ()), "a whole node was replaced"


# With real ranks


def _store(folder, world):
    return dist.FileStore(str(folder / "preflight"), world.size)


def _config(seconds):
    return decode(tiny_values(f"launch.meeting_seconds={seconds}", "run.dir=runs/the_same"))


def test_every_rank_reports_and_all_continue(tmp_path):
    def work(world):
        mine = check_all_ranks(
            _config(600), 1, world, _store(tmp_path, world), Accelerator.of_rank(0)
        )
        return mine.rank, mine.cores != "", mine.versions["torch"]

    assert [found[:2] for found in run_ranks(work, 3)] == [(0, True), (1, True), (2, True)]


@pytest.mark.slow
def test_a_rank_that_does_not_report_is_named_with_its_host(tmp_path, monkeypatch):
    limit = round(patient(0.25))
    monkeypatch.setattr(coordination, "_ACKNOWLEDGE_TIMEOUT", timedelta(seconds=limit))

    def work(world):
        # the first report takes a while, and at its end all ranks are at the same place
        store = dist.PrefixStore("first", _store(tmp_path, world))
        check_all_ranks(_config(600), 1, world, store, Accelerator.of_rank(0))
        world = replace(world, ranks_per_node=1, hosts=("a", "b", "c"))
        if world.rank == 2:
            return "absent"
        with pytest.raises((LaunchError, RankFailure)) as caught:
            check_all_ranks(
                _config(limit), 1, world, _store(tmp_path, world), Accelerator.of_rank(0)
            )
        return str(caught.value)

    messages = run_ranks(work, 3)
    assert messages[0].startswith(f"preflight: rank 2 (c) did not report within {limit} s")
    assert messages[1] == ""


def _trials(world):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    trials = [
        collective_trial("whole", dist.group.WORLD),
        collective_trial("tensor", halves[world.rank // 2], exchanges=True),
        collective_trial("experts", halves[world.rank // 2], exchanges=True, reduces=False),
    ]
    pairs = [pair for pair in ((0, 1), (2, 3), (1, 2)) if world.rank in pair]
    names = [f"{low} and {high}" for low, high in pairs]
    messages = [message_trial(*one, dist.group.WORLD) for one in zip(names, pairs, strict=True)]
    return [*trials, *messages]


def _check(trials, world, folder, seconds):
    check_groups(trials, world, _store(folder, world), CPU, timedelta(seconds=seconds))


def test_working_groups_pass(tmp_path):
    run_ranks(lambda world: _check(_trials(world), world, tmp_path, 600), 4)


@pytest.mark.parametrize("left_out", covering(["tensor", "stages 2 and 3"], ["tensor"]))
def test_an_incomplete_group_is_named_with_the_absent_rank(tmp_path, left_out):
    before = ("whole",) if left_out == "tensor" else ("whole", "tensor", "experts")

    def work(world):
        store, early, late = _store(tmp_path, world), [], []
        check_all_ranks(_config(600), 1, world, store, Accelerator.of_rank(0))
        for trial in _trials(world):
            is_complete = trial.name in before or {*(trial.pair or trial.ranks)} == {0, 1}
            (early if is_complete else late).append(trial)
        _check(early, world, tmp_path, 600)
        if world.rank == 3:  # this rank takes another branch
            return ""
        try:
            _check(late, world, tmp_path, patient(0.25))
        except LaunchError as error:
            return str(error)
        return ""

    messages = run_ranks(work, 4)
    ranks = "2, 3" if left_out == "tensor" else "0, 1, 2, 3"
    text = f"preflight: the {left_out} group of ranks {ranks} did not exchange its first messages"
    assert messages[2].startswith(text)
    at = "whole" if left_out == "tensor" else "experts"
    assert f"absent: rank 3 on node0 (at: {at})" in messages[2]
    assert messages[0] == messages[3] == ""


def test_a_message_that_arrives_changed_is_reported(tmp_path, monkeypatch):
    def work(world):
        trial = next(one for one in _trials(world) if one.name.startswith("stages"))
        batch = dist.batch_isend_irecv

        def double(messages):
            messages[0].tensor.mul_(2)
            return batch(messages)

        if world.rank == 0:
            monkeypatch.setattr(dist, "batch_isend_irecv", double)
        try:
            _check([trial], world, tmp_path, 600)
        except LaunchError as error:
            return str(error)
        return ""

    messages = run_ranks(work, 4)
    assert messages[1].startswith("preflight: the stages 0 and 1 group (ranks 0, 1) computed 2")
    assert messages[0] == messages[2] == messages[3] == ""
