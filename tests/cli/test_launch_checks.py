"""What launch checks before a job waits in a queue, and what it predicts."""

import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_lab.commands import preprocess
from frontier_lab.jobs import launch_checks
from frontier_lab.jobs.launch import main
from frontier_lab.jobs.launch_options import seconds_of, time_limit, with_joined_values
from frontier_llm.checkpoint.folders import FOLDER, MANIFEST, step_folder
from frontier_llm.cli.compose import compose
from frontier_llm.cli.package_files import CONF_DIR_VARIABLE
from frontier_llm.config import decode
from frontier_llm.errors import ConfigError, DataError, FrontierError, LaunchError
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import estimate
from frontier_llm.planner.step_time import checkpoint_bytes
from frontier_llm.telemetry.jsonl import METRICS_FILE
from frontier_llm.units import GIB

pytestmark = pytest.mark.slow

JOB = ["cluster=frontier_mi250x", "launch.nodes=1", "precision=bf16", "data.global_batch=64",
       "data.sequence_length=256"]  # fmt: skip


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Work in an empty folder with stand-ins for sbatch and qsub, which note their arguments."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("sbatch", "qsub"):
        (programs / name).write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/{name}\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _text(folder: Path, size: int = 4000) -> list[str]:
    """Write a text and return the settings with which it is trained."""
    words = "a line of text with some words that differ, number {}\n"
    (folder / "my text.txt").write_text("".join(words.format(n) for n in range(size)))
    return ["data=text", f"data.path={folder}/my text.txt", "data.vocabulary=300"]


def _predicted(*overrides):
    config = decode(compose([*JOB, *overrides]))
    return Candidate.of(config, 8, 8)


# Data


@pytest.mark.usefixtures("site")
def test_the_length_of_a_laptop_is_mentioned(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv(CONF_DIR_VARIABLE, str(tmp_path))
    (tmp_path / "experiment").mkdir()
    keys = {"long": "data: {sequence_length: 512}", "none": "trainer: {steps: 9}"}
    for name, text in keys.items():
        (tmp_path / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    warning = "warning    data.sequence_length=256 is the default for a laptop"
    cases = {"checkpoint=off": True, "data.sequence_length=256": False, "experiment=long": False,
             "experiment=none": True}  # fmt: skip
    for override, warned in cases.items():
        assert main([*JOB[:4], override]) == 0
        printed = capsys.readouterr().out
        assert (warning in printed) == warned
        length = 512 if override == "experiment=long" else 256
        assert f"batch      64 samples of {length} tokens\n" in printed


@pytest.mark.usefixtures("site")
def test_the_corpus_is_named_with_what_is_read_of_it(capsys, tmp_path):
    assert main([*JOB, "trainer.steps=5", "data.directory=new"]) == 0
    assert "corpus     data=stdlib, the sources of Python's standard" in capsys.readouterr().out
    text = _text(tmp_path)
    assert preprocess.main(text) == 0
    (manifest,) = (tmp_path / "corpora").glob("*/manifest.json")
    tokens = json.loads(manifest.read_text())["train"]["tokens"]
    capsys.readouterr()
    assert main([*JOB, "trainer.steps=5", *text]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "corpus " in line)
    assert line.startswith("corpus     data=text, prepared in corpora: ")
    read = float(line.split("read ")[1].removesuffix(" times"))
    assert read == pytest.approx(5 * 64 * 256 / tokens, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["data=text", "data.path=nowhere.txt"], "nowhere.txt"),
        (["data=text", "data.path=empty"], "no text"),
        (["data.tokenizer=nowhere.model"], "nowhere.model"),
        (["data=blend", "data.corpora=[{name: a, path: gone}]"], "gone"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_data_that_is_not_there_does_not_reach_sbatch(site, settings, named):
    (site / "empty").mkdir()
    with pytest.raises((ConfigError, DataError), match=named):
        main(["--submit", *JOB, *settings])
    assert not (site / "sbatch").exists()


def test_a_large_corpus_must_be_prepared_and_the_command_prepares_it(site, monkeypatch, capsys):
    monkeypatch.setattr(launch_checks, "SMALL_SOURCE", 100_000)
    job = [*JOB, *_text(site), "trainer.steps=3"]
    with pytest.raises(ConfigError) as caught:
        main(["--submit", *job])
    assert not (site / "sbatch").exists()
    command = shlex.split(caught.value.todo.splitlines()[-1])
    assert command[:2] == ["frontier-llm", "preprocess"]
    assert preprocess.main(command[2:]) == 0
    assert main(["--submit", *job]) == 0
    assert "prepared in" in capsys.readouterr().out
    assert "trainer.steps=3" in (site / "sbatch").read_text()


def test_a_changed_text_or_setting_needs_another_preparation(site, monkeypatch):
    monkeypatch.setattr(launch_checks, "SMALL_SOURCE", 0)
    job = [*JOB, *_text(site)]
    preprocess.main(job)
    assert main(job) == 0
    with pytest.raises(ConfigError, match="not prepared"):
        main([*job[:-1], "data.vocabulary=301"])
    _text(site, 4001)
    with pytest.raises(ConfigError, match="not prepared"):
        main(job)


def test_a_blend_is_prepared_with_its_shared_tokenizer(site, monkeypatch):
    monkeypatch.setattr(launch_checks, "SMALL_SOURCE", 0)
    _text(site)
    (site / "other.txt").write_text("other words, one after the other\n" * 2000)
    corpora = "data.corpora=[{name: a, path: 'my text.txt'}, {name: b, path: other.txt}]"
    job = [*JOB, "data=blend", corpora, "data.vocabulary=300"]
    with pytest.raises(ConfigError, match="not prepared"):
        main(job)
    preprocess.main(job)
    assert main(job) == 0
    (next((site / "corpora").glob("*.model"))).unlink()
    with pytest.raises(ConfigError, match="not prepared"):
        main(job)


def test_the_first_node_may_prepare_a_small_corpus(site, capsys):
    assert main([*JOB, *_text(site)]) == 0
    assert "the first node prepares" in capsys.readouterr().out
    assert not (site / "corpora").exists()


def test_the_command_of_a_user_with_own_files_names_them(site):
    conf = site / "my conf"
    (conf / "data").mkdir(parents=True)
    (conf / "data" / "mine.yaml").write_text("defaults: [text]\npath: large.txt\n")
    (site / "large.txt").write_bytes(b"words\n" * (12 << 20))
    command = ["--conf-dir", str(conf), "launch", *JOB, "data=mine"]
    ended = subprocess.run(
        [sys.executable, "-m", "frontier_llm", *command], check=False, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert ended.returncode == 2
    words = shlex.split(ended.stderr.splitlines()[-1])
    assert words[:3] == ["frontier-llm", f"--conf-dir={conf}", "preprocess"]
    assert words[3:] == [*JOB, "data=mine"]


def test_the_checks_do_without_torch(site):
    code = (
        "import sys; from frontier_lab.jobs.launch import main; "
        f"main({[*JOB, *_text(site)]!r}); sys.exit('torch' in sys.modules)"
    )
    root = {"PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, **root}).returncode == 0


# Run directory


def test_a_run_directory_that_a_job_could_not_use_is_refused(site):
    (site / "file").touch()
    for folder in ("file/run", "/proc/run"):
        with pytest.raises(ConfigError, match="is none"):
            main([*JOB, f"run.dir={folder}"])
    _trained(site / "used")
    with pytest.raises(ConfigError, match="saved nothing"):
        main([*JOB, "run.dir=used"])
    with pytest.raises(ConfigError, match="required"):
        main([*JOB, "run.dir=new", "run.resume=required"])
    assert main([*JOB, "run.dir=new"]) == 0
    assert not (site / "new").exists()


def _trained(folder: Path) -> None:
    folder.mkdir()
    (folder / METRICS_FILE).write_text("{}\n")


def _saved(folder: Path, step: int, config) -> None:
    """Write what remains of a checkpoint when only its configuration is read."""
    checkpoint = folder / FOLDER / step_folder(step)
    checkpoint.mkdir(parents=True)
    values = config.model_dump(mode="json")
    (checkpoint / MANIFEST).write_text(json.dumps({"meta": {"config": values}}))


def test_a_run_that_cannot_resume_like_this_is_refused(site, capsys):
    _saved(site / "run", 40, _predicted("trainer.steps=100").config)
    assert main([*JOB, "run.dir=run", "trainer.steps=100"]) == 0
    assert "60 steps" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="allow_changes"):
        main([*JOB, "run.dir=run", "trainer.steps=100", "optimizer.warmup_steps=7"])


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (["trainer.steps=200"], 3),
        (["trainer.steps=60"], 2),
        (["trainer.steps=10"], 1),
        (["trainer.steps=400", "checkpoint.keep=1", "checkpoint.keep_every_steps=200"], 4),
        (["trainer.steps=400", "checkpoint=off"], 0),
    ],
    ids=str,
)
def test_space_for_the_checkpoints_that_are_kept(site, monkeypatch, capsys, settings, count):
    """checkpoint.every_steps=50, keep=2: one more exists while the newest one is written."""
    size = checkpoint_bytes(_predicted(*settings))
    for free, fits in ((count * size, True), (count * size - 1, count == 0)):
        usage = type("Usage", (), {"free": free})
        monkeypatch.setattr(launch_checks.shutil, "disk_usage", lambda _, usage=usage: usage)
        assert main([*JOB, *settings]) == 0
        assert ("warning" not in capsys.readouterr().out) == fits
        if not fits:
            # fewer are kept only where more than the two of checkpoint.keep=1 are needed
            todo = r"lower checkpoint\.keep" if count == 3 else "smaller model"
            needed = "1 checkpoint of" if count == 1 else f"{count} checkpoints of"
            with pytest.raises(LaunchError, match=rf"(?s){needed}.*{todo}"):
                main(["--submit", *JOB, *settings])
    assert not (site / "sbatch").exists()


def test_the_size_of_a_checkpoint_is_twelve_bytes_per_parameter():
    config = decode(compose(["experiment=frontier_22b"]))
    size = checkpoint_bytes(Candidate.of(config, 16, 8))
    assert size == pytest.approx(12 * 22.1e9, rel=0.02)
    assert size > 200 * GIB


# Time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("30:15", 1815), ("2:30:15", 9015), ("02:00:00", 7200), ("1-12", 129600),
        ("1-12:30", 131400), ("1-12:30:15", 131415), ("0", math.inf), ("UNLIMITED", math.inf),
        ("00:00:00", math.inf), ("100:00:00", 360000),
    ],
)  # fmt: skip
def test_the_times_of_slurm(text, seconds):
    """The formats of the manual page of sbatch; zero is no limit."""
    assert seconds_of(text, "slurm") == seconds


@pytest.mark.parametrize("text", ["", "2h", "1:2:3:4", "1-", "-5", "1-2:3:4:5", "1.5", "30 min"])
def test_a_time_that_slurm_does_not_know_is_refused(text):
    with pytest.raises(ConfigError, match="days-hours"):
        seconds_of(text, "slurm")


@given(
    days=st.integers(0, 9), hours=st.integers(0, 23), minutes=st.integers(0, 59),
    seconds=st.integers(1, 59),
)  # fmt: skip
def test_each_format_of_a_time_has_its_seconds(days, hours, minutes, seconds):
    whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    clock = f"{24 * days + hours}:{minutes:02d}:{seconds:02d}"
    assert seconds_of(f"{days}-{hours}:{minutes:02d}:{seconds:02d}", "slurm") == whole
    assert seconds_of(clock, "slurm") == seconds_of(clock, "pbs") == whole
    assert seconds_of(f"{whole // 60}:{seconds:02d}", "slurm") == whole
    assert seconds_of(str(whole), "pbs") == whole
    assert seconds_of(f"{whole // 60}:{seconds:02d}", "pbs") == whole


def test_the_command_line_s_limit_counts_before_the_script_s(tmp_path):
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/sh\n#SBATCH --nodes=2\n#SBATCH --time=02:00:00\necho --time=5\n")

    def seconds(*options, **environ):
        return time_limit(options, script, environ).seconds

    assert seconds() == 7200
    assert seconds(SBATCH_TIMELIMIT="30") == 1800
    for options in (["--time=10"], ["--time", "10"], ["-t10"], ["-t", "10"], ["-t", "9", "-t10"]):
        assert seconds("-A", "P", *options, SBATCH_TIMELIMIT="30") == 600
    script.write_text("#!/bin/sh\n")
    assert time_limit([], script, {}) is None


def test_the_limit_of_pbs_is_one_of_its_resources():
    script = Path("polaris.pbs")
    assert time_limit(["-lselect=1", "-A", "P"], script) is None
    for options in (["-lselect=1,walltime=90"], ["-lwalltime=0:10", "-lwalltime=1:30,place=pack"]):
        assert time_limit(options, script).seconds == 90
    for wrong in ("2h", "1-0", "1:2:3:4"):
        with pytest.raises(ConfigError, match="hours:minutes:seconds"):
            time_limit([f"-lwalltime={wrong}"], script)


SLOW = ["experiment=frontier_22b"]
"""About 3.5 minutes per step on 2 nodes; 100 steps, a checkpoint every 50."""


def _shown(capsys, *arguments):
    assert main([*SLOW, *arguments]) == 0
    return capsys.readouterr().out


def test_the_prediction_is_that_of_the_planner(site, capsys):
    found = estimate(Candidate.of(decode(compose(SLOW)), 16, 8))
    said = _shown(capsys, "--time=1-0")
    assert 195 < found.time.seconds < 205
    assert "3 min 20 s per step" in said
    assert found.tokens_per_second * 86400 == pytest.approx(550e6, rel=0.02)
    assert "550M tokens per day" in said
    assert "of 64 GiB per device" in said
    assert "100 steps: 5 h" in said
    assert "--chain" not in said


@pytest.mark.parametrize(("time", "per_job"), [("02:00:00", 30), ("03:00:00", 47)])
def test_a_limit_for_some_steps_names_the_chain_s_length(site, capsys, time, per_job):
    """Five minutes for the start, five and two steps before the end (launch.stop_minutes)."""
    step = estimate(Candidate.of(decode(compose(SLOW)), 16, 8)).time.seconds
    assert per_job == (seconds_of(time, "slurm") - 300 - 300 - 2 * step) // step
    said = _shown(capsys, f"--time={time}")
    jobs = math.ceil(100 / per_job)
    assert f"100 steps: all take {jobs} jobs, because --time={time} has time for {per_job}" in said
    assert f"(--chain={jobs})" in said
    assert "(--chain" not in _shown(capsys, f"--time={time}", f"--chain={jobs}")


def test_a_limit_too_short_to_save_names_one_that_suffices(site, capsys):
    with pytest.raises(FrontierError):
        main(["--submit", *SLOW, "--time=00:15:00"])
    with pytest.raises(ConfigError, match="nothing is saved") as caught:
        main([*SLOW, "--time=00:15:00"])
    assert not (site / "sbatch").exists()
    enough = caught.value.todo.split()[-1]
    assert enough.startswith("--time=00:2")
    assert "100 steps: all take 100 jobs" in _shown(capsys, enough)


def test_the_script_s_limit_is_refused_only_at_submission(site, capsys):
    job = ["data.global_batch=20480"]  # two hours per step
    assert "warning    --time=02:00:00" in _shown(capsys, *job)
    with pytest.raises(FrontierError):
        main(["--submit", *SLOW, *job])
    assert not (site / "sbatch").exists()


def test_pbs_saves_only_at_the_interval_of_checkpoints(site, capsys):
    """Two seconds per step: 50 steps, the start and a checkpoint take 440 s."""
    job = ["-A", "P", "experiment=datastates_7b", "trainer.steps=10000"]
    with pytest.raises(ConfigError, match=r"checkpoint\.every_steps") as caught:
        main([*job, "-l", "walltime=00:07:00"])
    enough = caught.value.todo.rpartition("walltime=")[2]
    assert main([*job, "-l", f"walltime={enough}"]) == 0
    assert "10000 steps: all take 200 jobs" in capsys.readouterr().out
    assert main([*job, "-l", "walltime=00:07:00", "checkpoint.every_steps=5"]) == 0


# Command line


def test_values_that_look_like_overrides_stay_with_their_options():
    given = ["-v", "A=1,B=2", "-W", "depend=afterok:1", "-l", "walltime=1:0:0", "--export", "X=1"]
    wanted = ["-vA=1,B=2", "-Wdepend=afterok:1", "-lwalltime=1:0:0", "--export=X=1"]
    assert with_joined_values([*given, "model=gpt_tiny"]) == [*wanted, "model=gpt_tiny"]
    for_slurm = ["-W", "trainer.steps=3", "-v", "model=gpt_tiny"]
    assert with_joined_values(for_slurm) == for_slurm


@pytest.mark.parametrize("given", [["--export=A=1"], ["--export", "A=1"]])
def test_variables_of_the_user_and_of_the_job_are_both_exported(site, capsys, given):
    assert main([*given, *JOB]) == 0
    words = shlex.split(capsys.readouterr().out.partition("command")[2])
    (exported,) = (word for word in words if word.startswith("--export="))
    assert exported.startswith("--export=A=1,FRONTIER_LLM_SCRIPTS=")


def test_a_key_of_a_scaling_curve_is_given_once(site, capsys):
    curve = ["--scaling=weak", "planner.nodes=[1,2]", "launch.nodes=7", "data.global_batch=64"]
    assert main([*curve, "cluster=frontier_mi250x", "precision=bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if line.startswith("command")]
    for command, nodes in zip(commands, (1, 2), strict=True):
        assert command.count("launch.nodes=") == 1
        assert command.count("data.global_batch=") == 1
        assert command.endswith(f"launch.nodes={nodes} data.global_batch={64 * nodes}")


@pytest.mark.parametrize(("nodes", "micro_batch"), [(1, 4), (2, 4), (4, 2), (8, 1)])
def test_the_default_micro_batch_suits_all_ranks_of_a_job(site, capsys, nodes, micro_batch):
    job = ["cluster=h100_8", "data.global_batch=64", f"launch.nodes={nodes}"]
    assert decode(compose(job)).data.micro_batch == micro_batch
    assert decode(compose([*job[:2], f"planner.nodes=[1,{nodes}]"])).data.micro_batch == micro_batch
    assert main(job) == 0
    assert (f"{nodes} node," if nodes == 1 else f"{nodes} nodes,") in capsys.readouterr().out
