"""Callbacks of a user: all moments in order on all ranks; one that fails is named."""

import sys
from pathlib import Path

import pytest

from frontier_llm.errors import ConfigError
from frontier_llm.trainer.callbacks.callback_list import import_callbacks
from tests.forked_train import TINY, Ended, train
from tests.texts import prose
from tests.trainer.callbacks import my_callbacks

pytestmark = pytest.mark.slow

MINE = my_callbacks.MODULE


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(prose(40))
    return (f"data.path={folder}/text.txt", f"data.directory={folder}/prepared")


def run(corpus: tuple[str, ...], run_dir: Path, names: str, *more: str) -> Ended:
    """Train six steps on two ranks with callbacks of a user."""
    return train(
        *TINY, *corpus, f"run.dir={run_dir}", "trainer.steps=6", f"callbacks=[{names}]",
        "checkpoint.every_steps=2", *more,
    )  # fmt: skip


def moments(run_dir: Path) -> list[str]:
    """Return the moments of rank 0, which must be those of rank 1."""
    first, second = ((run_dir / f"moments_{rank}").read_text().splitlines() for rank in (0, 1))
    assert first == second
    return first


@pytest.mark.parametrize("mode", ["lazy", "blocking"])
def test_every_moment_comes_in_order_on_all_ranks(
    mode: str, corpus: tuple[str, ...], tmp_path: Path
) -> None:
    ended = run(
        corpus, tmp_path, f"{MINE}:Recorder", f"checkpoint={mode}", "trainer.evaluate_every_steps=3"
    )
    assert ended.code == 0, ended.text
    found = moments(tmp_path)
    assert found[0] == "start at 0"
    assert found[-2:] == ["stop, early: False", "close"]
    for step in range(1, 7):
        ours = [
            f"begin {step}", f"update {step} from sample {4 * (step - 1)}",
            *([f"evaluation {step}"] if step % 3 == 0 else []), f"end {step}",
            *([f"checkpoint {step}"] if step % 2 == 0 else []),
        ]  # fmt: skip
        first = found.index(ours[0])
        without_commits = [one for one in found[first:] if not one.startswith("committed")]
        assert without_commits[: len(ours)] == ours
    committed = [one for one in found if one.startswith("committed")]
    assert committed == ["committed 2", "committed 4", "committed 6"]
    for step in (2, 4, 6):
        assert found.index(f"checkpoint {step}") < found.index(f"committed {step}")
    if mode == "blocking":
        assert found[found.index("checkpoint 2") + 1] == "committed 2"


def test_checkpoints_are_kept_until_callbacks_know_of_them(
    corpus: tuple[str, ...], tmp_path: Path
) -> None:
    ended = run(corpus, tmp_path, f"{MINE}:LateNews", "checkpoint=lazy", "checkpoint.keep=1")
    assert ended.code == 0, ended.text
    found = [one for one in moments(tmp_path) if not one.startswith(("begin", "update", "end"))]
    assert found == [
        "start at 0", "checkpoint 2", "checkpoint 4", "evaluation 6", "checkpoint 6",
        "committed 2", "committed 4", "committed 6", "stop, early: False", "close",
    ]  # fmt: skip


def test_a_callback_may_send_the_run_back(corpus: tuple[str, ...], tmp_path: Path) -> None:
    ended = run(corpus, tmp_path, f"{MINE}:GoesBackOnce,{MINE}:Recorder")
    assert ended.code == 0, ended.text
    assert "step 5: step 5 is not to my taste. The run continues from step 4" in ended.text
    found = moments(tmp_path)
    assert found.count("end 5") == 2
    back = found.index("rewind from 5: step 5 is not to my taste")
    assert found[back + 1 : back + 3] == ["begin 5", "update 5 from sample 20"]


def test_a_callback_that_fails_ends_the_run_and_is_named(
    corpus: tuple[str, ...], tmp_path: Path
) -> None:
    ended = run(corpus, tmp_path, f"{MINE}:Recorder,{MINE}:Fails")
    assert ended.code == 1
    assert f"the callback {MINE}:Fails failed in on_step_end" in ended.text
    assert "got:    ValueError: the loss is not to my taste" in ended.text
    assert "my_callbacks.py:" in ended.text
    assert "Traceback" not in ended.text
    assert moments(tmp_path)[-3:] == ["end 2", "error TrainingError", "close"]
    assert "failed in on_step_end" in (tmp_path / "summary.json").read_text()


def test_a_constructor_that_fails_is_named(corpus: tuple[str, ...], tmp_path: Path) -> None:
    ended = run(corpus, tmp_path, f"{MINE}:FailsAtOnce")
    assert ended.code == 1
    assert f"the callback {MINE}:FailsAtOnce failed in __init__" in ended.text


@pytest.mark.parametrize(
    ("name", "wants"),
    [
        ("my_module", "MODULE:CLASS"),
        ("no_such_module:Mine", "No module named 'no_such_module'"),
        ("broken:Mine", "ZeroDivisionError"),
        (f"{MINE}:Absent", "Absent in .* is not there"),
        (f"{MINE}:NoCallback", "a subclass of .*callback.Callback"),
    ],
)
def test_a_name_that_is_no_callback_is_refused(
    name: str, wants: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=wants) as refused:
        import_callbacks([name])
    assert refused.value.key == "callbacks"
    assert refused.value.got == name


def test_a_wrong_name_is_refused_before_any_rank_starts(
    corpus: tuple[str, ...], tmp_path: Path
) -> None:
    ended = run(corpus, tmp_path, "no_such_module:Mine")
    assert ended.code == 2
    assert "configuration error at callbacks" in ended.text
    assert "preflight" not in ended.text


def test_the_current_folder_is_on_the_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_module.py").write_text(
        "from frontier_llm.trainer.callbacks.callback import Callback\n\n\n"
        "class Mine(Callback):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (mine,) = import_callbacks(["my_own_module:Mine"])
    assert mine.__name__ == "Mine"
