"""No other user can read, exchange or redirect the checkpoints that a run writes on a node."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from frontier_llm.config import decode
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.errors import ConfigError
from frontier_llm.health.rank_checks import RankReport, check_reports
from frontier_llm.launch.user_folders import find_stranger
from frontier_llm.launch.world import World
from frontier_llm.saving.tiers import local_root, newest_folder
from tests.forked_train import TINY, train
from tests.values import tiny_values

STRANGER = os.getuid() + 4711


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def of_another_user(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, STRANGER, STRANGER)


def below_one_of_another_user(folder: Path) -> None:
    os.chown(folder.parent, STRANGER, STRANGER)


def below_one_that_is_open_to_all(folder: Path) -> None:
    folder.parent.chmod(0o777)


def a_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")


def a_link_to_nothing(folder: Path) -> None:
    folder.symlink_to(folder.parent / "elsewhere")


def a_file(folder: Path) -> None:
    folder.touch()


def with_a_linked_node(folder: Path) -> None:
    folder.mkdir()
    (folder.parent / "elsewhere").mkdir()
    (folder / "node_00000").symlink_to(folder.parent / "elsewhere")


def with_a_linked_step(folder: Path) -> None:
    (folder / "copy_of_node_00001").mkdir(parents=True)
    (folder / "copy_of_node_00001" / "step_00000002").symlink_to("/etc")


ATTACKS = (
    open_to_all, of_another_user, below_one_of_another_user, below_one_that_is_open_to_all, a_link,
    a_link_to_nothing, a_file, with_a_linked_node, with_a_linked_step,
)  # fmt: skip


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def config_of(disk, *more):
    return decode(tiny_values(
        f"run.dir={disk.parent}/run", f"checkpoint.tiers.local.path={disk}",
        "checkpoint.tiers.local.every_steps=2", *more,
    ))  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_stranger_s_folder_is_refused_before_it_is_used(disk, attack):
    config = config_of(disk)
    root = local_root(config)
    attack(root)
    problem = find_stranger(root)
    assert str(disk) in problem
    if os.path.lexists(root):
        with pytest.raises(ConfigError, match="folder that only this user can write"):
            newest_folder(config)
    world = World(2, 4, 0, 2, "b", "slurm", "a", 1, "job", ("a", "b"))
    report = RankReport.of(config, world, Accelerator.of_rank(0), root)
    reports = [replace(report, rank=rank, host="ab"[rank // 2]) for rank in range(4)]
    errors = check_reports(config, 1, world, [replace(r, stranger="") for r in reports]).errors
    assert not any("another user" in error for error in errors)
    errors = check_reports(config, 1, world, reports).errors
    assert f"preflight: {problem} on b, so that another user"[11:] in "\n".join(errors)
    assert "checkpoint.tiers.local.path" in errors[-1]


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o750, 0o775])
def test_a_folder_of_this_user_is_closed_to_others(disk, mode):
    folder = disk / "run"
    folder.mkdir()
    folder.chmod(mode)
    assert find_stranger(folder) == ""
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_sticky_folder_may_belong_to_anyone(disk):
    disk.chmod(0o1777)
    os.chown(disk, STRANGER, STRANGER)
    assert find_stranger(disk / "run") == ""
    assert stat.S_IMODE((disk / "run").stat().st_mode) == 0o700


def test_the_user_id_and_variables_of_the_node_are_replaced(monkeypatch, tmp_path):
    monkeypatch.setenv("NODE_DISK", str(tmp_path))
    for name in ("$UID", "${UID}"):
        config = config_of(tmp_path, f"checkpoint.tiers.local.path=$NODE_DISK/llm-{name}")
        assert local_root(config).parent == tmp_path / f"llm-{os.getuid()}"


@pytest.mark.slow
def test_a_run_writes_to_a_private_folder_and_not_through_a_link(disk):
    (disk.parent / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    keys = (
        *TINY, f"data.path={disk.parent}/text.txt",
        f"run.dir={disk.parent}/run", f"checkpoint.tiers.local.path={disk}", "trainer.steps=2",
        "checkpoint.tiers.local.every_steps=1", "launch.ranks=2", "launch.ranks_per_node=1",
    )  # fmt: skip
    victim = disk.parent / "victim"
    (victim / "step_00000001").mkdir(parents=True)
    root = local_root(config_of(disk))
    root.mkdir()
    (root / "node_00000").symlink_to(victim)
    refused = train(*keys)
    assert refused.code == 2
    assert "node_00000 is a link to" in refused.text
    assert [path.name for path in victim.iterdir()] == ["step_00000001"]
    (root / "node_00000").unlink()
    done = train(*keys)
    assert done.code == 0, done.text
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
