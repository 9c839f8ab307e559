"""A rank opens no more connections to the store than rank 0 has files for."""

import os
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from frontier_llm.cli.compose import compose
from frontier_llm.config import decode
from frontier_llm.launch.rendezvous import MIN_CONNECTIONS, connections_of
from tests.covering import covering
from tests.forked_train import TINY, Training
from tests.ports import reserved_port

DISK = "checkpoint.tiers.local.path={}/disk", "checkpoint.tiers.local.every_steps=1"
CASES = {
    "plain": ("checkpoint.every_steps=2",),
    "without checkpoints": ("checkpoint=off",),
    "disks of nodes": (*DISK, "checkpoint.partner=true"),
    "rounded moments": (*DISK, "checkpoint.moments=int8", "checkpoint.every_steps=2"),
    "disks of nodes and recovery": (
        *DISK, "checkpoint.partner=true", "recovery.enabled=true", "checkpoint.every_steps=2",
    ),
    "copies in memory": (
        "recovery.enabled=true", "recovery.partner_copies=true", "recovery.copies_path={}/memory",
    ),
}  # fmt: skip


def connections(session: int, port: int) -> Counter[int]:
    """Return the connections to a port of each process of a session."""
    found: Counter[int] = Counter()
    for process in psutil.process_iter(["pid"]):
        try:
            if os.getsid(process.pid) == session:
                for entry in process.net_connections("tcp"):
                    if entry.raddr and entry.raddr.port == port:
                        found[process.pid] += 1
        except (psutil.Error, ProcessLookupError):
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", covering(CASES, set(CASES) - {"disks of nodes and recovery"}))
def test_ranks_open_at_most_as_many_connections_as_are_counted(tmp_path: Path, case: str) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 300)
    keys = [
        *TINY, f"data.path={tmp_path}/text.txt", f"run.dir={tmp_path}/run", "launch.ranks=2",
        "launch.ranks_per_node=1", "trainer.steps=30",
        *(key.format(tmp_path) for key in CASES[case]),
    ]  # fmt: skip
    limit = connections_of(decode(compose(keys)), has_roster=True)
    most = 0
    with reserved_port() as port:
        training = Training(*keys, f"launch.port={port}")
        while os.waitid(os.P_PID, training.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            most = max([most, *connections(training.pid, port).values()])
            time.sleep(0.02)
    ended = training.wait()
    assert ended.code == 0, ended.text
    assert 2 <= most <= limit
    assert limit >= MIN_CONNECTIONS
