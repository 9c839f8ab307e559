"""Which rank this process is, of how many, and where they meet.

Reading the environment needs no torch; meeting does, and imports it then: a wrong configuration
is refused before anybody has waited for an import.
"""

import errno
import os
import platform
import resource
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from frontier_llm.errors import LaunchError, RankFailure
from frontier_llm.parallel.slurm import EnvironmentMismatchError, SlurmTask, in_step, read_task

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

_MOST_NAMED = 16
_CONNECTIONS_A_RANK = 5
"""To rank 0's store at most: its own, the watchdog's two, one for each tier of checkpoints."""
_OTHER_FILES = 256
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class RankZeroLostError(LaunchError, RankFailure):
    """Rank 0's store does not answer: seldom the cause, mostly what a failure there looks like."""


@dataclass(frozen=True)
class World:
    """This process's place in the job."""

    rank: int
    """Number of this process, from 0."""
    size: int
    """Number of processes."""
    local_rank: int
    """Number of this process on its machine, from 0: chooses the device."""
    ranks_per_node: int
    """Where a node ends: ranks of one node are neighbours. Locally it may be drawn narrower than
    the machine."""
    host: str
    """Name of this machine."""
    launcher: Literal["local", "slurm", "torchrun"]
    """Who started the processes."""
    master_address: str
    """Host of rank 0's store."""
    master_port: int
    """Its TCP port."""
    job: str = ""
    """Prefix of this job's keys: a store of another job at the same port is not taken for ours."""
    hosts: tuple[str, ...] = ()
    """Names of the nodes in the order of the ranks, where the launcher says them."""

    @property
    def node_ranks(self) -> range:
        """The ranks of this rank's node."""
        first = self.rank // self.ranks_per_node * self.ranks_per_node
        return range(first, min(first + self.ranks_per_node, self.size))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "World | None":
        """Read what srun or torchrun said; None where neither started this process.

        Raises:
            LaunchError: (exit code 2) variables are missing or contradict each other.
        """
        task = read_task(environ) if in_step(environ) else None
        present = [name for name in _TORCHRUN_VARIABLES[:3] if name in environ]
        missing = [name for name in _TORCHRUN_VARIABLES if name not in environ]
        if task is not None:
            _refuse_contradiction(task, environ)
        if present and not missing:
            return _from_torchrun(environ)
        if task is not None:
            return _from_slurm(task, environ)
        if present:
            raise EnvironmentMismatchError(
                f"{', '.join(present)} set, but not {', '.join(missing)}: start with torchrun or "
                f"srun, or unset {', '.join(present)} for a local run"
            )
        return None

    def name_ranks(self, ranks: Sequence[int]) -> str:
        """Name ranks and, where the launcher said them, their hosts: `rank 3 (node2)`.

        Of many, the first ones.
        """
        more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
        named = ranks[:_MOST_NAMED]
        return ", ".join(f"rank {rank}{self._where(rank)}" for rank in named) + more

    def _where(self, rank: int) -> str:
        per_host = self.size // len(self.hosts) if self.hosts else 0
        return f" ({self.hosts[rank // per_host]})" if per_host else ""

    def with_nodes_of(self, ranks_per_node: int | None) -> "World":
        """Draw the borders of nodes elsewhere; None leaves them."""
        return replace(self, ranks_per_node=ranks_per_node or self.ranks_per_node)


def make_store(world: World, timeout: timedelta, listen_fd: int | None = None) -> "Store":
    """Meet the other ranks in a key-value store that rank 0 holds.

    Args:
        world: this process's place.
        timeout: how long to wait for rank 0, and afterwards for any key.
        listen_fd: rank 0 only: a listening socket to serve on; the store owns it from here on.

    Raises:
        LaunchError: the port is taken, or rank 0 may not open enough files (at once); not all ranks
            came, or rank 0 did not answer, in time.
    """
    from torch.distributed import TCPStore
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    address = f"{world.master_address}:{world.master_port}"
    try:
        if world.launcher == "torchrun":  # torchrun's agent may hold the store already
            url = f"tcp://{address}?rank={world.rank}&world_size={world.size}"
            store = next(iter(rendezvous(url, timeout=timeout)))[0]
        else:
            if world.rank == 0:
                _make_room(world.size)
            if world.rank == 0 and listen_fd is None:
                listen_fd = listen("", world.master_port).detach()
            store = TCPStore(
                world.master_address,
                world.master_port,
                world_size=world.size,
                is_master=world.rank == 0,
                timeout=timeout,
                wait_for_workers=False,  # _meet does, and can name those that did not come
                master_listen_fd=listen_fd,
            )
    except (RuntimeError, ValueError) as error:
        raise _unreachable(world, address, timeout, error) from None
    store = PrefixStore(f"frontier_llm/{world.job}", store)
    _meet(world, store, address, timeout)
    return store


def _make_room(size: int) -> None:
    """Let this process open as many files as the ranks' connections to its store take.

    Raises:
        LaunchError: it must not.
    """
    needed = _OTHER_FILES + _CONNECTIONS_A_RANK * size
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if allowed == unlimited or allowed >= needed:
        return
    if most != unlimited and most < needed:
        raise LaunchError(
            f"rank 0 may open {most} files on {platform.node()} and needs {needed}: each of {size} "
            f"ranks holds up to {_CONNECTIONS_A_RANK} connections to it. Raise the hard limit "
            "(`ulimit -Hn`; for jobs: /etc/security/limits.conf, or LimitNOFILE of slurmd)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def _meet(world: World, store: "Store", address: str, timeout: timedelta) -> None:
    """Wait until all ranks are here: a rank 0 that fails at once must not leave others knocking."""
    try:
        store.set(f"here/{world.rank}", world.host)
        if store.add("here", 1) == world.size:
            store.set("here/all", "")
        store.wait(["here/all"], timeout)
    except RuntimeError as error:
        if world.rank:
            raise _unreachable(world, address, timeout, error) from None
        absent = [rank for rank in range(world.size) if not store.check([f"here/{rank}"])]
        raise LaunchError(
            f"not all of {world.size} ranks came to rank 0's store at {address} within "
            f"{timeout.total_seconds():.0f} s; absent: {world.name_ranks(absent)}. Did every task "
            "start, and can every node reach that address?"
        ) from None


def init_process_group(
    world: World, store: "Store", device: "torch.device", timeout: timedelta
) -> None:
    """Start torch's process group of all ranks: nccl (or rccl) on devices, gloo on CPUs.

    Args:
        world: this process's place.
        store: where the ranks met.
        device: what this rank computes on.
        timeout: a collective that waits longer fails.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    on_device = device.type == "cuda"
    if world.launcher == "local" and sys.platform == "linux":
        # gloo would resolve the host's name, which on laptops leads nowhere or to a firewall.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if on_device else "gloo",
        store=PrefixStore("process_group", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        # no device_id: with it every group, of which most are not used, would connect at once
    )


def listen(address: str, port: int) -> socket.socket:
    """Bind a TCP port (0: any free one) and listen on it.

    Args:
        address: of the interface; empty for all of them.
        port: of TCP.

    Raises:
        LaunchError: the port is taken.
    """
    everywhere = not address and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (address, port),
            family=socket.AF_INET6 if everywhere else socket.AF_INET,
            backlog=4096,  # every rank of a large job may call at the same moment
            dualstack_ipv6=everywhere,
        )
    except OSError as error:
        raise _port_error(port, error) from None


def _from_torchrun(environ: Mapping[str, str]) -> World:
    size = int(environ["WORLD_SIZE"])
    per_node = int(environ.get("LOCAL_WORLD_SIZE", size))
    if size % per_node:
        raise EnvironmentMismatchError(
            f"WORLD_SIZE={size} is no multiple of LOCAL_WORLD_SIZE={per_node}: start equally many "
            "ranks on each node (torchrun --nproc-per-node)"
        )
    return World(
        rank=int(environ["RANK"]),
        size=size,
        local_rank=int(environ["LOCAL_RANK"]),
        ranks_per_node=per_node,
        host=platform.node(),
        launcher="torchrun",
        master_address=environ["MASTER_ADDR"],
        master_port=int(environ["MASTER_PORT"]),
        job=environ.get("TORCHELASTIC_RUN_ID", ""),
    )


def _from_slurm(task: SlurmTask, environ: Mapping[str, str]) -> World:
    return World(
        rank=task.rank,
        size=task.size,
        local_rank=task.local_rank,
        ranks_per_node=task.ranks_per_node,
        host=platform.node(),
        launcher="slurm",
        master_address=environ.get("MASTER_ADDR", task.hosts[0] if task.hosts else ""),
        master_port=int(environ.get("MASTER_PORT", task.port)),
        job=task.job,
        hosts=task.hosts,
    )


def _refuse_contradiction(task: SlurmTask, environ: Mapping[str, str]) -> None:
    """Refuse ranks that differ, unless each task is the agent of a torchrun of its own."""
    if environ.get("GROUP_WORLD_SIZE") == str(task.size):
        return
    for name, value in (("RANK", task.rank), ("WORLD_SIZE", task.size)):
        if name in environ and environ[name] != str(value):
            slurm = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS"}[name]
            raise EnvironmentMismatchError(
                f"two launchers disagree: {name}={environ[name]}, but {slurm}={value}; unset "
                f"{name}, or start with one of srun and torchrun alone"
            )


def _port_error(port: int, error: OSError) -> LaunchError:
    if error.errno == errno.EADDRINUSE:
        why = f"port {port} on {platform.node()} is in use"
    else:
        why = f"port {port} on {platform.node()} cannot be opened ({error.strerror})"
    return LaunchError(f"{why}: set launch.port= to a free one (under srun: MASTER_PORT)")


def _unreachable(world: World, address: str, timeout: timedelta, error: Exception) -> LaunchError:
    if "EADDRINUSE" in str(error):
        return _port_error(world.master_port, OSError(errno.EADDRINUSE, "in use"))
    reason = str(error).splitlines()[0]
    if world.rank == 0:
        return LaunchError(
            f"not all of {world.size} ranks came to rank 0's store at {address} ({reason}); did "
            "every task start, and can every node reach that address?"
        )
    return RankZeroLostError(
        f"rank {world.rank} on {world.host} did not reach rank 0's store at {address} within "
        f"{timeout.total_seconds():.0f} s ({reason}); did rank 0 start, and is that address "
        "reachable from here? MASTER_ADDR and MASTER_PORT change it"
    )
