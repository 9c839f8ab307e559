"""The rank, size and node of this process, read from the environment of srun or torchrun.

This module does not import torch: a wrong configuration is rejected before that slow import.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from frontier_llm.launch import slurm
from frontier_llm.launch.slurm import EnvironmentMismatchError, SlurmTask, is_srun_task, read_task

_MOST_NAMED = 16
"""Largest number of ranks that a message names."""
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """The place of this process in the job."""

    rank: int
    size: int
    local_rank: int
    """Number of this process on its machine, from 0; selects the device."""
    ranks_per_node: int
    """Consecutive ranks that count as one node. A local launch may set it below the number of ranks
    on the machine, to test several nodes."""
    host: str
    launcher: Literal["local", "slurm", "torchrun"]
    master_address: str
    master_port: int
    job: str = ""
    """Prefix of this job's keys in the store, so that a store of another job at the same port is
    not mistaken for this job's."""
    hosts: tuple[str, ...] = ()
    """Names of the nodes in the order of the ranks; empty if the launcher does not provide them."""
    generation: int = 0
    """How often ranks of this job have been given to processes anew (membership/)."""

    @property
    def node_ranks(self) -> range:
        """The ranks of this rank's node."""
        first = self.rank // self.ranks_per_node * self.ranks_per_node
        return range(first, min(first + self.ranks_per_node, self.size))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "World | None":
        """Read the variables of srun or torchrun; return None if neither started this process."""
        task = read_task(environ) if is_srun_task(environ) else None
        present = [name for name in _TORCHRUN_VARIABLES[:3] if name in environ]
        missing = [name for name in _TORCHRUN_VARIABLES if name not in environ]
        if task is not None:
            _check_agreement(task, environ)
        if present and not missing:
            return _from_torchrun(environ)
        if task is not None:
            return cls(**asdict(task), host=platform.node(), launcher="slurm")
        if present:
            raise EnvironmentMismatchError(
                f"{', '.join(present)} set, but not {', '.join(missing)}: start with torchrun or "
                f"srun, or unset {', '.join(present)} for a local run"
            )
        return None

    def name_ranks(self, ranks: Sequence[int]) -> str:
        """Name ranks and, if the launcher provides them, their hosts: `rank 3 (node2)`.

        Only the first 16 ranks are named; the number of the others follows.
        """
        more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
        named = ranks[:_MOST_NAMED]
        return ", ".join(f"rank {rank}{self._host_suffix(rank)}" for rank in named) + more

    def _host_suffix(self, rank: int) -> str:
        per_host = self.size // len(self.hosts) if self.hosts else 0
        return f" ({self.hosts[rank // per_host]})" if per_host else ""

    def with_ranks_per_node(self, ranks_per_node: int | None) -> "World":
        """Return a copy with another number of ranks per node; None keeps the number."""
        return replace(self, ranks_per_node=ranks_per_node or self.ranks_per_node)


def _from_torchrun(environ: Mapping[str, str]) -> World:
    size = slurm.number(environ, "WORLD_SIZE", range(1, 1 << 31))
    of_node = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else "WORLD_SIZE"
    per_node = slurm.number(environ, of_node, range(1, size + 1))
    if size % per_node:
        raise EnvironmentMismatchError(
            f"WORLD_SIZE={size} is not a multiple of LOCAL_WORLD_SIZE={per_node}: start the same "
            "number of ranks on each node (torchrun --nproc-per-node)"
        )
    return World(
        rank=slurm.number(environ, "RANK", range(size)),
        size=size,
        local_rank=slurm.number(environ, "LOCAL_RANK"),
        ranks_per_node=per_node,
        host=platform.node(),
        launcher="torchrun",
        master_address=environ["MASTER_ADDR"],
        master_port=slurm.number(environ, "MASTER_PORT", range(1 << 16)),
        job=environ.get("TORCHELASTIC_RUN_ID", ""),
    )


def _check_agreement(task: SlurmTask, environ: Mapping[str, str]) -> None:
    """Raise an error if the variables of srun and torchrun give different ranks.

    They may differ if each task of srun is an agent of torchrun, which starts the ranks of a node.
    """
    if environ.get("GROUP_WORLD_SIZE") == str(task.size):
        return
    for name, value in (("RANK", task.rank), ("WORLD_SIZE", task.size)):
        if name in environ and environ[name] != str(value):
            slurm = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS"}[name]
            raise EnvironmentMismatchError(
                f"two launchers disagree: {name}={environ[name]}, but {slurm}={value}; unset "
                f"{name}, or start with only one of srun and torchrun"
            )
