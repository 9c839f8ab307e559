"""Threads of a rank, the cores there are for them, and the warning when they are too few."""

import os
import platform
import subprocess
import sys

import pytest

from frontier_llm.cli import train
from frontier_llm.config import RunConfig
from frontier_llm.launch import cores
from frontier_llm.launch.cores import available, cgroup_limit, crowding, prepare_environment
from tests.values import tiny_values

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0"}


def config(*overrides):
    return RunConfig.model_validate(tiny_values(*overrides))


@pytest.mark.parametrize(
    ("threads", "ranks", "there", "fitting"),
    [(2, 4, 2, 1), (4, 2, 4, 2), (3, 1, 2, 2), (2, 8, 15, 1)],
)
def test_too_many_threads_are_warned_of_with_a_number_that_fits(threads, ranks, there, fitting):
    warning = crowding(threads, ranks, {}, there)
    assert f"{threads} threads in each of {ranks} rank" in warning
    assert f"on {there} cores" in warning
    assert f"set launch.threads={fitting} (or OMP_NUM_THREADS={fitting})" in warning
    assert crowding(fitting, ranks, {}, there) is None


@pytest.mark.parametrize(("threads", "ranks", "there"), [(2, 4, 8), (1, 4, 2), (7, 8, 56)])
def test_threads_that_fit_and_single_threads_are_not(threads, ranks, there):
    assert crowding(threads, ranks, {}, there) is None


def test_many_more_ranks_than_cores_are_warned_of():
    assert "warning: 9 ranks on 2 cores" in crowding(1, 9, {}, 2)
    assert crowding(1, 8, {}, 2) is None
    assert crowding(1, 64, SRUN, 2) is None


def test_a_task_of_srun_has_cores_of_its_own():
    environ = {**SRUN, "SLURM_CPUS_PER_TASK": "7"}
    assert crowding(7, 8, environ, 7) is None
    assert crowding(7, 8, environ, 56) is None
    assert "14 threads in each of 1 rank on 7 cores" in crowding(14, 8, environ, 56)
    assert "srun -c" in crowding(7, 8, SRUN, 1)


def test_the_environment_is_that_of_srun():
    assert cores.is_srun_task(SRUN)


def _cgroup(tmp_path, lines, files):
    membership = tmp_path / "membership"
    membership.write_text(lines)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return cgroup_limit(tmp_path, membership)


@pytest.mark.parametrize(
    ("lines", "files", "limit"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
        ("0::/not/seen\n", {"cpu.max": "20000 100000\n"}, 1),
        (
            "3:memory:/x\n2:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "400000\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
            4,
        ),
        (
            "2:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        ("3:cpuset:/\n", {"cpu.max": "100000 100000\n"}, None),
    ],
)
def test_a_limit_of_either_version_is_read(tmp_path, lines, files, limit):
    assert _cgroup(tmp_path, lines, files) == limit


def test_without_cgroups_there_is_no_limit(tmp_path):
    assert cgroup_limit(tmp_path, tmp_path / "absent") is None


def test_a_limit_below_the_affinity_counts(monkeypatch):
    monkeypatch.setattr(cores, "cgroup_limit", lambda: 1)
    assert available() == 1
    monkeypatch.setattr(cores, "cgroup_limit", lambda: 10_000)
    assert available() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("how", ["variable", "key"])
def test_a_run_warns_before_it_starts(monkeypatch, capsys, tmp_path, how):
    threads = 2 * available()
    overrides = [f"run.dir={tmp_path / 'run'}", "launch.ranks=4"]
    if how == "variable":
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    else:
        overrides.append(f"launch.threads={threads}")

    class StartedError(Exception):
        pass

    def stop(*_):
        raise StartedError

    monkeypatch.setattr(train, "prepare_environment", stop)
    with pytest.raises(StartedError):
        train.train_on_this_machine(overrides)
    said = capsys.readouterr().err
    assert f"{threads} threads in each of 4 ranks on {available()} core" in said
    assert "launch.threads=1" in said


@pytest.mark.parametrize(("tensor", "expected"), [(1, None), (2, "1")])
def test_a_gpu_has_one_hardware_queue_only_with_tensor_parallelism(tensor, expected):
    environ = {}
    prepare_environment(1, environ, config(f"parallel.tensor={tensor}"))
    assert environ.get(QUEUES) == expected


@pytest.mark.parametrize(("deterministic", "expected"), [(False, None), (True, ":4096:8")])
def test_products_repeat_exactly_only_in_deterministic_runs(deterministic, expected):
    environ = {}
    prepare_environment(1, environ, config(f"trainer.deterministic={deterministic}".lower()))
    assert environ.get(WORKSPACE) == expected


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("cuda", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("hip", {}, {}),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {}),
        ("cuda", {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, {}),
    ],
)
def test_the_allocator_can_extend_its_segments_where_torch_supports_it(
    monkeypatch, kind, given, expected
):
    monkeypatch.setattr(cores, "torch_kind", lambda: kind)
    environ = dict(given)
    prepare_environment(1, environ)
    found = {name: environ[name] for name in cores.ALLOCATOR_VARIABLES if name in environ}
    assert found == given | expected


def test_torch_reads_the_setting_of_the_allocator():
    environ = dict(os.environ)
    prepare_environment(1, environ)
    code = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert "expandable_segments" in done.stdout, done.stderr


RESOLVER = """
import ctypes
libc = ctypes.CDLL(None)
libc.__res_init()
libc.__res_state.restype = ctypes.POINTER(ctypes.c_int * 2)
print(*libc.__res_state().contents)  # seconds and number of attempts
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the variable is glibc's")
def test_processes_do_not_wait_long_for_a_name_server():
    environ = dict(os.environ)
    environ.pop("RES_OPTIONS", None)
    prepare_environment(1, environ)
    command = [sys.executable, "-c", RESOLVER]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]


UNREACHABLE = """
import datetime, socket
import torch.distributed as dist
with socket.socket() as deaf:
    deaf.bind(("127.0.0.1", 0))
    limit = datetime.timedelta(seconds=0.2)
    try:
        dist.TCPStore("127.0.0.1", deaf.getsockname()[1], 1, False, timeout=limit)
    except dist.DistNetworkError:
        pass
"""


def test_warnings_of_torch_do_not_hide_its_errors():
    environ = dict(os.environ)
    environ.pop("TORCH_CPP_LOG_LEVEL", None)
    prepare_environment(1, environ)
    command = [sys.executable, "-c", UNREACHABLE]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    starts = {line[:2] for line in done.stderr.splitlines()}
    assert "[E" in starts
    assert "[W" not in starts


def test_values_that_the_user_set_stay():
    given = {QUEUES: "8", WORKSPACE: ":16:8", "RES_OPTIONS": "timeout:3"}
    environ = dict(given)
    prepare_environment(1, environ, config("parallel.tensor=2", "trainer.deterministic=true"))
    assert given.items() <= environ.items()
