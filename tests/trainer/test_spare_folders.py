"""Files that are kept for the next checkpoint are deleted, on the node that has them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from frontier_llm.checkpoint.spare_files import SPARE
from frontier_llm.cli.experiments import composed
from frontier_llm.launch.world import World
from frontier_llm.trainer import connect
from frontier_llm.trainer.checkpoint_places import local_folder, partner_folder, shared_folder
from frontier_llm.trainer.spare_folders import remove_spares


def world(rank: int) -> World:
    """Return a rank of two nodes with two ranks each."""
    return World(rank, 4, rank % 2, 2, "a", "slurm", "a", 1, "job", ("a", "b"))


@pytest.mark.parametrize(
    ("rank", "left"), [(0, set()), (1, {"shared", "local", "copy"}), (2, {"shared"})]
)
def test_one_rank_of_a_node_deletes(rank: int, left: set[str], tmp_path: Path) -> None:
    config = composed(f"run.dir={tmp_path}/run", f"checkpoint.tiers.local.path={tmp_path}/disk")
    local = local_folder(config, 0, 2)
    assert local is not None
    folders = {
        "shared": shared_folder(config), "local": local, "copy": partner_folder(config, 1),
    }  # fmt: skip
    for folder in folders.values():
        for name in (SPARE, "step_00000001"):
            (folder / name).mkdir(parents=True)
            (folder / name / "rank_00000.safetensors").write_bytes(b"x")
    remove_spares(config, world(rank))
    assert {name for name, folder in folders.items() if (folder / SPARE).exists()} == left
    assert all((folder / "step_00000001").exists() for folder in folders.values())


def test_they_are_deleted_before_the_free_space_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run that was killed would not start on a disk that its files still fill."""

    class CheckedError(Exception):
        pass

    def check(*_: object) -> None:
        assert not spare.exists()
        raise CheckedError

    config, layout = composed(f"run.dir={tmp_path}/run"), SimpleNamespace(nodes_per_copy=1)
    spare = shared_folder(config) / SPARE
    spare.mkdir(parents=True)
    monkeypatch.setattr(connect, "check_all_ranks", check)
    with pytest.raises(CheckedError):
        connect.connect(config, layout, world(0), None, None)  # type: ignore[arg-type]
