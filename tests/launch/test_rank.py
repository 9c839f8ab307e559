"""Ranks that srun or torchrun started: which of them report a failure, and with which exit code."""

import os
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from frontier_llm.errors import DataError, RankFailure, StopRequested
from frontier_llm.launch import failure
from frontier_llm.launch.failure import report_failure, run_rank
from frontier_llm.launch.rendezvous import init_process_group, make_store
from frontier_llm.launch.world import World
from frontier_llm.membership.member import Membership, Place, once
from tests.patience import patient
from tests.ports import reserved_port

SECONDS = timedelta(minutes=5)


def _as_srun_would(work, size, folder):
    """Run `work(world, store)` in processes that no parent watches; return codes and stderr."""
    with reserved_port() as port:
        return _run_at(port, work, size, folder)


def _run_at(port, work, size, folder):
    pids = []
    for rank in range(size):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            with (folder / f"stderr_{rank}").open("w") as sys.stderr:
                os._exit(
                    _rank(
                        work, World(rank, size, rank, size, "h", "slurm", "127.0.0.1", port), folder
                    )
                )
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return codes, [(folder / f"stderr_{rank}").read_text() for rank in range(size)]


def _rank(work, world, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    failures = folder / "failures"

    def connect_and_run():
        once(work)(Membership(Place(0, world, make_store(world, SECONDS))))

    code = run_rank(connect_and_run, world.rank, failures)
    return report_failure(world.rank, world.size, failures, code) if code else 0


def test_a_failure_that_could_not_be_written_keeps_its_code(tmp_path):
    assert report_failure(0, 2, tmp_path / "absent", 3) == 3


def _broken_last_rank(world, store):
    init_process_group(world, store, "gloo", SECONDS)
    if world.rank == world.size - 1:
        time.sleep(0.2)
        raise DataError("the corpus is gone: set data.path=")
    dist.all_reduce(torch.ones(1))


def test_the_cause_is_printed_and_the_other_ranks_point_to_it(tmp_path):
    codes, texts = _as_srun_would(_broken_last_rank, 3, tmp_path)
    assert codes == [1, 1, 1]
    assert texts[2] == "the corpus is gone: set data.path=\n"
    assert texts[0] == "rank 0 stopped because rank 2 failed\n"
    assert texts[1] == "rank 1 stopped because rank 2 failed\n"


def _same_mistake_everywhere(world, store):
    raise ZeroDivisionError("a bug on every rank")


def test_one_of_many_equal_failures_is_printed_in_full(tmp_path):
    codes, texts = _as_srun_would(_same_mistake_everywhere, 4, tmp_path)
    assert codes == [1] * 4
    assert "".join(texts).count("Traceback") == 1


def _hung_rank(world, store):
    init_process_group(world, store, "gloo", SECONDS)
    _set_pg_timeout(timedelta(seconds=patient(0.25)))
    if world.rank == 1:
        time.sleep(patient(1))  # longer than the others wait for it
        os._exit(1)  # srun would kill it
    dist.all_reduce(torch.ones(1))


@pytest.mark.exhaustive
def test_without_a_cause_the_waiting_ranks_name_the_absent_one(tmp_path):
    codes, texts = _as_srun_would(_hung_rank, 3, tmp_path)
    assert codes[0] == codes[2] == 1
    assert "".join(texts).count("rank 1 did not join") == 1


def _stop(world, store):
    raise StopRequested("stopped at step 7")


def test_only_rank_zero_prints_that_the_run_stopped(tmp_path):
    codes, texts = _as_srun_would(_stop, 3, tmp_path)
    assert codes == [3, 3, 3]
    assert texts == ["stopped at step 7\n", "", ""]


@pytest.mark.parametrize(
    ("error", "reporters"), [(StopRequested("stopped at step 7"), 0), (RankFailure(""), 16)]
)
def test_each_rank_of_many_reads_two_files_at_most(error, reporters, tmp_path, monkeypatch, capsys):
    """All ranks of a job end at once, on a file system that they share."""
    size = 50
    failure.write(failure.from_exception(0, DataError("the corpus is gone")), tmp_path)
    for rank in range(1, size):
        failure.write(failure.from_exception(rank, error), tmp_path)
    read, paths = failure._read, []
    monkeypatch.setattr(failure, "_read", lambda path: paths.append(path) or read(path))
    for rank in range(1, size):
        paths.clear()
        assert report_failure(rank, size, tmp_path, 1) == error.exit_code
        assert len(paths) <= 2
    assert capsys.readouterr().err.count("stopped because rank 0 failed") == max(0, reporters - 1)
