"""Calibrate this machine for the planner, without leaving a file behind."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from frontier_lab.commands import calibrate
from frontier_llm.cli.package_files import CONF_DIR_VARIABLE

NAME = "this_machine"


@contextmanager
def calibrated_conf(ranks: int) -> Iterator[str]:
    """Measure this machine with a number of processes; yield the override that chooses the result.

    `frontier-llm calibrate` writes a cluster file into a temporary folder of configurations. It
    does so also if other programs compute, which a benchmark notices itself.
    """
    with (
        tempfile.TemporaryDirectory(prefix="bench_cluster_") as folder,
        patch.dict(os.environ, {CONF_DIR_VARIABLE: folder}),
    ):
        calibrate.main(["--ranks", str(ranks), "--write", NAME, "--any-load"])
        yield f"cluster={NAME}"
