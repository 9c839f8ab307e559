"""The table of the first command in docs/install.md: what it chooses on which devices."""

import contextlib
import io
from collections.abc import Iterator
from unittest.mock import patch

from docs.generate.blocks import table
from frontier_llm.cli import machine_defaults
from frontier_llm.cli.compose import Composed
from frontier_llm.cli.machine_defaults import cluster_of_this_machine
from frontier_llm.cli.run_preparation import check_run
from frontier_llm.errors import ConfigError
from frontier_llm.launch.visible_devices import VisibleDevices
from frontier_llm.planner.candidate import Candidate

H100 = VisibleDevices("cuda", "NVIDIA H100 80GB HBM3", 79.1, 1)
H200 = VisibleDevices("cuda", "NVIDIA H200", 139.8, 1)
DEVICES = {
    "no GPU": None,
    "1 H100": H100,
    "1 H200": H200,
    "8 A100, 80 GB": VisibleDevices("cuda", "NVIDIA A100-SXM4-80GB", 79.2, 8),
    "8 A100, 40 GB": VisibleDevices("cuda", "NVIDIA A100-SXM4-40GB", 39.4, 8),
    "4 A100, 40 GB": VisibleDevices("cuda", "NVIDIA A100-SXM4-40GB", 39.4, 4),
    "8 GCDs of MI250X": VisibleDevices("hip", "AMD Instinct MI250X", 64.0, 8),
    "1 GCD (`ROCR_VISIBLE_DEVICES=0`)": VisibleDevices("hip", "AMD Instinct MI250X", 64.0, 1),
    "2 L40S, which no file describes": VisibleDevices("cuda", "NVIDIA L40S", 44.4, 2),
    "a quarter of an H100 (MIG)": VisibleDevices(
        "cuda", "NVIDIA H100 80GB HBM3 MIG 2g.20gb", 19.6, 1
    ),
}
"""Visible devices by their name in the table; None = a CPU. Names and memory are as drivers report
them."""


def first(devices: VisibleDevices | None, *overrides: str) -> tuple[dict[str, str], str, str]:
    """Prepare a run as `frontier-llm train` does, up to the start of its ranks.

    Returns:
        What was chosen, the line about the cluster, and the refusal; empty texts = there is none.
    """
    said = io.StringIO()
    cluster_of_this_machine.cache_clear()
    with (
        patch.object(machine_defaults, "visible_devices", lambda: devices),
        contextlib.redirect_stderr(said),
    ):
        composed = Composed.of(overrides)
        config = composed.config
        ranks, refusal = config.launch.ranks, ""
        try:
            check_run(Candidate.of(config, ranks, ranks), composed, overrides)
        except ConfigError as error:
            refusal = str(error)
    cluster_of_this_machine.cache_clear()
    chosen = {
        "cluster": config.cluster.name,
        "ranks": ranks,
        "pipeline": config.parallel.pipeline,
        "micro-batch": config.data.micro_batch,
        "precision": config.precision.name,
        "attention": config.attention,
    }
    return {name: str(value) for name, value in chosen.items()}, said.getvalue(), refusal


def choices() -> Iterator[str]:
    """Yield the table of choices."""
    rows = {name: first(devices)[0] for name, devices in DEVICES.items()}
    head = ("devices", *next(iter(rows.values())))
    yield from table(head, ([name, *chosen.values()] for name, chosen in rows.items()))


def refusals() -> Iterator[str]:
    """Yield the message of a model that is too large for one GPU."""
    yield "```text"
    _, said, refusal = first(H100, "model=llama3_8b")
    yield from said.splitlines()
    yield from refusal.splitlines()
    yield "```"


PAGES = {"docs/install.md": {"first command": choices, "first refusals": refusals}}
