"""Ranks without a parent of ours (srun, torchrun): who speaks, who is quiet, with which code."""

import os
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from frontier_llm.errors import DataError, RankFailure, StopRequested
from frontier_llm.parallel import failure
from frontier_llm.parallel.agreement import made_once, run_and_leave
from frontier_llm.parallel.rank import report, run_rank
from frontier_llm.parallel.world import World, init_process_group, listen, make_store
from tests.ranks import run_ranks

SECONDS = timedelta(seconds=20)


def _as_srun_would(work, size, folder):
    """Run `work(world, store)` in processes that know nothing of each other; (code, stderr)."""
    server = listen("127.0.0.1", 0)
    port = server.getsockname()[1]
    server.close()
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

    def whole():
        run_and_leave(work, world, make_store(world, SECONDS))

    code = run_rank(whole, world.rank, failures)
    return report(world.rank, world.size, failures, code) if code else 0


def test_a_failure_that_could_not_be_written_keeps_its_code(tmp_path):
    assert report(0, 2, tmp_path / "absent", 3) == 3


def _broken_last_rank(world, store):
    init_process_group(world, store, torch.device("cpu"), SECONDS)
    if world.rank == world.size - 1:
        time.sleep(0.2)
        raise DataError("the corpus is gone: set data.path=")
    dist.all_reduce(torch.ones(1))


def test_the_cause_speaks_and_the_others_point_at_it(tmp_path):
    codes, said = _as_srun_would(_broken_last_rank, 3, tmp_path)
    assert codes == [1, 1, 1]
    assert said[2] == "the corpus is gone: set data.path=\n"
    assert said[0] == "rank 0 stopped because rank 2 failed\n"
    assert said[1] == "rank 1 stopped because rank 2 failed\n"


def _same_mistake_everywhere(world, store):
    raise ZeroDivisionError("a bug on every rank")


def test_one_of_many_equal_failures_is_told_in_full(tmp_path):
    codes, said = _as_srun_would(_same_mistake_everywhere, 4, tmp_path)
    assert codes == [1] * 4
    assert "".join(said).count("Traceback") == 1


def _hung_rank(world, store):
    init_process_group(world, store, torch.device("cpu"), timedelta(seconds=1))
    if world.rank == 1:
        time.sleep(4)
        os._exit(1)  # srun would kill it
    dist.all_reduce(torch.ones(1))


def test_without_a_cause_the_waiting_ranks_name_the_absent_one(tmp_path):
    codes, said = _as_srun_would(_hung_rank, 3, tmp_path)
    assert codes[0] == codes[2] == 1
    assert "".join(said).count("rank 1 did not come") == 1


def _stop(world, store):
    raise StopRequested("stopped at step 7")


def test_stopping_is_said_by_rank_zero_alone(tmp_path):
    codes, said = _as_srun_would(_stop, 3, tmp_path)
    assert codes == [3, 3, 3]
    assert said == ["stopped at step 7\n", "", ""]


@pytest.mark.parametrize(
    ("error", "speakers"), [(StopRequested("stopped at step 7"), 0), (RankFailure(""), 16)]
)
def test_each_rank_of_many_reads_two_files_at_most(error, speakers, tmp_path, monkeypatch, capsys):
    """All ranks of a job end at once, on a file system that they share."""
    size = 50
    failure.write(failure.describe(0, DataError("the corpus is gone")), tmp_path)
    for rank in range(1, size):
        failure.write(failure.describe(rank, error), tmp_path)
    read, looked = failure._read, []
    monkeypatch.setattr(failure, "_read", lambda path: looked.append(path) or read(path))
    for rank in range(1, size):
        looked.clear()
        assert report(rank, size, tmp_path, 1) == error.exit_code
        assert len(looked) <= 2
    assert capsys.readouterr().err.count("stopped because rank 0 failed") == max(0, speakers - 1)


# made_once


def _store_of(folder, world):
    return dist.FileStore(str(folder / "agreement"), world.size)


def test_what_rank_zero_makes_reaches_all(tmp_path):
    def work(world):
        store = _store_of(tmp_path, world)
        return made_once(world, store, "text", lambda: f"made by {world.rank}", SECONDS)

    assert run_ranks(work, 3) == ["made by 0"] * 3


def test_what_rank_zero_cannot_make_ends_all_with_its_code(tmp_path):
    def fail():
        error = DataError("no such corpus")
        error.exit_code = 2
        raise error

    def work(world):
        store = _store_of(tmp_path, world)
        with pytest.raises((DataError, RankFailure)) as caught:
            made_once(world, store, "text", fail, SECONDS)
        return str(caught.value), caught.value.exit_code

    assert run_ranks(work, 3) == [("no such corpus", 2), ("", 2), ("", 2)]


def test_waiting_for_rank_zero_has_an_end(tmp_path):
    def work(world):
        store = _store_of(tmp_path, world)
        if world.rank == 1:
            with pytest.raises(RankFailure, match="waited for rank 0's text"):
                made_once(world, store, "text", str, timedelta(seconds=1))

    run_ranks(work, 2)
