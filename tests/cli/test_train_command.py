"""train.py as users start it: exit codes, one message, no traceback, no waiting for torch."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.covering import exhaustive
from tests.patience import patient
from tests.texts import documents

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CLEAN = {
    key: value
    for key, value in os.environ.items()
    if not key.startswith(("SLURM_", "MASTER_", "TORCHELASTIC_"))
    and key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
}


def _start(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        env={**CLEAN, **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _train(*arguments, **environment):
    """Return (exit code, stdout, stderr)."""
    process = _start(*arguments, **environment)
    out, err = process.communicate(timeout=patient(60))
    return process.returncode, out, err


@pytest.fixture
def no_torch(tmp_path):
    """An environment in which importing torch or megatron is fatal."""
    folder = tmp_path / "without"
    folder.mkdir()
    for name in ("torch", "megatron"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("parallel.tensr=2",), "parallel.tensr"),
        (("parallel.tensor=3",), "parallel.tensor x parallel.pipeline"),
        *exhaustive(
            (("model=gpt_tny",), "model"),
            (("trainer.steps=many",), "trainer.steps"),
            (("data.global_batch=5",), "data.global_batch"),
        ),
    ],
)
def test_a_wrong_configuration_is_refused_before_torch_is_imported(arguments, key, no_torch):
    code, out, err = _train(*arguments, **no_torch)
    assert code == 2, err
    assert out == ""
    assert err.startswith(f"configuration error at {key}\n  got:    ")
    assert len(err.splitlines()) == 4


def test_help_needs_no_torch(no_torch):
    code, out, err = _train("--help", **no_torch)
    assert (code, err) == (0, "")
    assert "usage: frontier-llm train" in out
    assert "`python train.py` is the same" in out


def test_an_unknown_experiment_of_a_dry_run_is_refused_without_torch(no_torch):
    words = [sys.executable, "-m", "frontier_llm", "dry-run", "experiment=frontier_22"]
    environ = {**CLEAN, "PYTHONPATH": f"{no_torch['PYTHONPATH']}:{ROOT}"}
    ended = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "did you mean experiment=frontier_22b" in ended.stderr


def test_the_composed_configuration_can_be_printed(no_torch):
    code, out, _ = _train("--cfg", "job", "model.layers=7", **no_torch)
    assert code == 0
    values = yaml.safe_load(out)
    assert values["model"]["layers"] == 7
    assert "${" not in out


def test_a_used_run_directory_is_refused(tmp_path, no_torch):
    (tmp_path / "config.yaml").write_text("")
    code, _, err = _train(f"run.dir={tmp_path}", "run.resume=never", **no_torch)
    assert code == 2
    assert "configuration error at run.dir" in err
    assert str(tmp_path) in err
    assert "choose another run.dir" in err


@pytest.mark.exhaustive
def test_a_file_in_place_of_the_run_directory(tmp_path, no_torch):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        code, _, err = _train(f"run.dir={path}", **no_torch)
        assert code == 2
        assert "a file is in the way" in err


def test_a_run_directory_that_cannot_be_written(no_torch):
    code, _, err = _train("run.dir=/proc/run", **no_torch)
    assert code == 2
    assert "got:    /proc/run\n  wants:  a folder that can be written" in err
    assert "Traceback" not in err


def test_launchers_that_disagree_are_the_users_to_mend():
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
    code, _, err = _train(**slurm, SLURM_STEP_NODELIST="localhost", RANK="0", WORLD_SIZE="2")
    assert code == 2
    assert "RANK=0, but SLURM_PROCID=1" in err
    assert "Traceback" not in err


def _srun(size, *arguments):
    tasks = [
        _start(
            *arguments,
            SLURM_JOB_ID=str(os.getpid()),
            SLURM_STEP_ID="0",
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            SLURM_NTASKS=str(size),
            SLURM_STEP_TASKS_PER_NODE=str(size),
            SLURM_STEP_NODELIST="localhost",
            GLOO_SOCKET_IFNAME="lo",
        )
        for rank in range(size)
    ]
    said = [task.communicate(timeout=patient(60))[1] for task in tasks]
    return [task.returncode for task in tasks], said


def test_under_srun_all_ranks_end_with_two_and_rank_zero_alone_speaks(tmp_path):
    codes, said = _srun(2, "parallel.tensr=2", f"run.dir={tmp_path / 'run'}")
    assert codes == [2, 2]
    assert said[0].startswith("configuration error at parallel.tensr\n")
    assert said[1:] == [""]
    assert not (tmp_path / "run").exists()


TINY = (
    "model.layers=2", "model.hidden=32", "model.heads=2", "model.vocabulary=300",
    "data.vocabulary=300", "data.sequence_length=32", "data.global_batch=4", "data.micro_batch=2",
    "trainer.steps=3", "trainer.evaluate_every_steps=null", "trainer.sample_tokens=0",
    "precision=fp32", "telemetry.wandb=off",
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for index, document in enumerate(documents(60)):
        (folder / f"{index}.py").write_text(document)
    prepared = tmp_path_factory.mktemp("prepared")
    return (
        "data=text",
        f"data.path={folder}",
        f"data.directory={prepared}",
        "data.validation_percent=20",
    )


def _check_run(folder):
    text = (folder / "config.yaml").read_text()
    digest = (folder / "config.yaml.sha256").read_text().split()
    assert digest == [hashlib.sha256(text.encode()).hexdigest(), "config.yaml"]
    assert yaml.safe_load(text)["run"]["dir"] == str(folder)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.exhaustive
def test_a_run_under_srun_composes_once(tmp_path, corpus):
    codes, said = _srun(2, *TINY, *corpus, f"run.dir={tmp_path}/${{now:%S%f}}")
    assert codes == [0, 0], said
    (folder,) = tmp_path.iterdir()
    _check_run(folder)
