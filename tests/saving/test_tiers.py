"""Where the checkpoints of a run may lie, as each of its nodes sees it."""

from pathlib import Path

import pytest

from frontier_llm.checkpoint.folders import step_folder
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.saving.run_directory import refuse_other_place, to_yaml, write_config
from frontier_llm.saving.tiers import local_root, newest_folder, tiers_of
from frontier_llm.telemetry.jsonl import METRICS_FILE
from tests.values import tiny_values


def make(tmp_path: Path, *keys: str) -> RunConfig:
    places = f"run.dir={tmp_path}/run", f"checkpoint.tiers.local.path={tmp_path}/disk"
    return RunConfig.model_validate(tiny_values(*places, *keys))


@pytest.mark.parametrize("node", range(3))
def test_each_node_has_its_folder_and_that_of_the_node_before(node: int, tmp_path: Path) -> None:
    config = make(tmp_path, "checkpoint.partner=true", "checkpoint.keep_every_steps=50")
    root = local_root(config)
    assert root is not None
    run_dir, own, copies = tiers_of(config, node, 3)
    assert run_dir.folder == tmp_path / "run/checkpoints"
    assert own.folder == root / f"node_0000{node}"
    assert copies.folder == root / f"copy_of_node_0000{(node - 1) % 3}"
    assert [tier.is_redundant for tier in (run_dir, own, copies)] == [False, False, True]
    assert [tier.keep_every_steps for tier in (run_dir, own, copies)] == [50, None, None]


def test_tiers_that_a_run_does_not_use_are_absent(tmp_path: Path) -> None:
    assert len(tiers_of(make(tmp_path), 0, 3)) == 2
    assert len(tiers_of(make(tmp_path, "checkpoint.partner=true"), 0, 1)) == 2
    assert len(tiers_of(make(tmp_path, "checkpoint.tiers.local.path=null"), 0, 3)) == 1


def test_the_newest_checkpoint_of_all_tiers_is_found(tmp_path: Path) -> None:
    config = make(tmp_path)
    assert newest_folder(config) is None
    run_dir, node = tiers_of(config)
    for tier, step in ((run_dir, 4), (node, 6), (run_dir, 5)):
        (tier.folder / step_folder(step)).mkdir(parents=True, mode=0o700)
    (run_dir.folder / f"{step_folder(8)}.partial").mkdir()
    node.folder.parent.chmod(0o700)
    assert newest_folder(config) == node.folder / step_folder(6)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_changed_place_on_the_nodes_is_looked_into(
    in_memory: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = local_root(make(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert root is not None
    copies = "recovery.partner_copies=true", f"recovery.copies_path={tmp_path}/disk"
    other = "checkpoint.tiers.local.path=null"
    before = make(tmp_path, *((*copies, other) if in_memory else ()))
    (tmp_path / "run").mkdir()
    write_config(tmp_path / "run", to_yaml(before.model_dump(mode="json")))
    (tmp_path / "run" / METRICS_FILE).write_text('{"step": 7}\n')
    now = make(tmp_path, other)
    refuse_other_place(make(tmp_path))
    assert not capsys.readouterr().err
    refuse_other_place(now)
    assert f"{root} may have steps up to 7" in capsys.readouterr().err
    (root / "copy_of_node_00001" / step_folder(6)).mkdir(parents=True)
    key = "recovery.copies_path" if in_memory else "checkpoint.tiers.local.path"
    with pytest.raises(ConfigError, match=f"has steps up to 6(.|\n)*{key}={tmp_path}/disk, or"):
        refuse_other_place(now)
    for allowed in (key, key.partition(".")[0]):
        refuse_other_place(make(tmp_path, other, f"run.allow_changes=[{allowed}]"))
    values = to_yaml(before.model_dump(mode="json")).replace(f"{tmp_path}/disk", "~/disk")
    write_config(tmp_path / "run", values)
    refuse_other_place(make(tmp_path))
    with pytest.raises(ConfigError, match="has steps up to 6"):
        refuse_other_place(now)
    (tmp_path / "run/checkpoints" / step_folder(6)).mkdir(parents=True)
    refuse_other_place(now)
    assert not capsys.readouterr().err
