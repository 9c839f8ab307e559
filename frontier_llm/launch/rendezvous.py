"""Connects the ranks of a job: a key-value store on rank 0, then torch's process group.

The functions import torch when they are called, because other modules use `listen` and the errors
before torch is imported.
"""

import errno
import os
import platform
import resource
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import LaunchError, RankFailure
from frontier_llm.launch.world import World

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

MIN_CONNECTIONS = 5
"""A rank's connections to the store: one for its main thread, two for its watchdog, one for the
heartbeat of NCCL, and one for a test of groups, a diagnosis or the end."""
_LOOK_SECONDS = 0.1
_OTHER_FILES = 256
"""Files that rank 0 may have open besides connections to its store."""


class RankZeroLostError(LaunchError, RankFailure):
    """Rank 0's store does not answer; usually because rank 0 has failed for another reason."""


def make_store(
    world: World,
    timeout: timedelta,
    listen_fd: int | None = None,
    quiet: timedelta | None = None,
    connections: int = MIN_CONNECTIONS,
) -> "Store":
    """Connect to the key-value store that rank 0 holds, and wait for all ranks.

    Raises a LaunchError if the port is in use; rank 0 may not open enough files; rank 0 did not
    answer, or some ranks did not connect, within `timeout`.

    Args:
        world: rank, size and rank 0's address.
        timeout: how long to wait for rank 0, and afterwards for any key.
        listen_fd: rank 0 only: descriptor of a listening socket, which the store uses and closes.
        quiet: rank 0 only: how long to wait for the next rank, if some have connected; None: as
            long as `timeout` allows.
        connections: rank 0 only: connections of each rank to the store, at most.
    """
    from torch.distributed import TCPStore
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    address = f"{world.master_address}:{world.master_port}"
    try:
        if world.launcher == "torchrun":  # the agent of torchrun may hold the store already
            url = f"tcp://{address}?rank={world.rank}&world_size={world.size}"
            store = next(iter(rendezvous(url, timeout=timeout)))[0]
        else:
            if world.rank == 0:
                raise_file_limit(world.size, connections)
            if world.rank == 0 and listen_fd is None:
                listen_fd = listen(_only_address(world), world.master_port).detach()
            store = TCPStore(
                world.master_address,
                world.master_port,
                world_size=world.size,
                is_master=world.rank == 0,
                timeout=timeout,
                wait_for_workers=False,  # _wait_for_ranks waits, and can name the absent ranks
                master_listen_fd=listen_fd,
            )
    except (RuntimeError, ValueError) as error:
        raise _unreachable(world, address, timeout, error) from None
    store = PrefixStore(f"frontier_llm/{world.job}", store)
    _wait_for_ranks(world, store, address, timeout, quiet)
    return store


def connect_again(address: str, port: int, timeout: timedelta) -> "Store":
    """Open one more connection to a store that another process holds."""
    from torch.distributed import TCPStore

    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def run_as_batch_work() -> None:
    """Let threads that wake up not interrupt others, if this is Linux.

    A thread of gloo (tcp/pair.cc) polls without a pause while another one has its lock.
    """
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def init_process_group(world: World, store: "Store", backend: str, timeout: timedelta) -> None:
    """Start torch's process group of all ranks, with a time limit per collective.

    The backend is `nccl`, which is RCCL on AMD GPUs, or `gloo`.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    if world.launcher == "local" and sys.platform == "linux":
        # gloo would resolve the host's name; on many laptops that fails or a firewall blocks it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if backend == "gloo":
        run_as_batch_work()
    dist.init_process_group(
        backend,
        store=PrefixStore("process_group", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        # without device_id, since it makes NCCL connect every group at once; most are never used
    )


def listen(address: str, port: int) -> socket.socket:
    """Listen on a TCP port (0: any free one) of an interface (empty: all interfaces).

    Raises LaunchError if the port is in use.
    """
    uses_ipv6 = not address and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (address, port),
            family=socket.AF_INET6 if uses_ipv6 else socket.AF_INET,
            backlog=4096,  # all ranks of a large job may connect at the same moment
            dualstack_ipv6=uses_ipv6,
        )
    except OSError as error:
        raise _port_error(port, error) from None


def _only_address(world: World) -> str:
    """Return the one address under which other ranks find rank 0; empty if it is not certain.

    A host may resolve its own name to the loopback interface, to several addresses, or to that of a
    gateway.
    """
    try:
        found = socket.getaddrinfo(world.master_address, None, type=socket.SOCK_STREAM)
        addresses = {str(entry[4][0]) for entry in found if entry[0] == socket.AF_INET}
        if len(addresses) != 1 or any(entry[0] != socket.AF_INET for entry in found):
            return ""
        (address,) = addresses
        if address.startswith("127.") and world.size > world.ranks_per_node:
            return ""
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError:
        return ""
    return address


def connections_of(config: RunConfig, *, has_roster: bool) -> int:
    """Return how many connections a rank of a run has to the store at the same time, at most.

    `has_roster`: whether ranks have the places that a coordinator gives them.
    """
    checkpoint = config.checkpoint
    count = MIN_CONNECTIONS
    if checkpoint.mode != "off":
        count += 1  # the run directory
        if checkpoint.tiers.local.path is not None or config.recovery.partner_copies:
            has_partner = checkpoint.partner or config.recovery.partner_copies
            count += 2 + checkpoint.has_reduced_moments + has_partner  # its disk, and the drain
    if has_roster:
        count += 5  # four of the member, one of its agent
    return count


def raise_file_limit(size: int, connections: int) -> None:
    """Raise the limit of open files, so that all ranks can connect to this process's store.

    Raises LaunchError if the hard limit is too low.
    """
    needed = _OTHER_FILES + connections * size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= needed:
        return
    if hard != unlimited and hard < needed:
        raise LaunchError(
            f"rank 0 may open {hard} files on {platform.node()} and needs {needed}: each of {size} "
            f"ranks holds up to {connections} connections to it. Raise the hard limit "
            "(`ulimit -Hn`; for jobs: /etc/security/limits.conf, or LimitNOFILE of slurmd)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _wait_for_ranks(
    world: World, store: "Store", address: str, timeout: timedelta, quiet: timedelta | None
) -> None:
    """Wait until all ranks have connected.

    Otherwise, if rank 0 failed right after its start, late ranks would time out while connecting.
    """
    start = time.monotonic()
    try:
        store.set(f"here/{world.rank}", world.host)
        if store.add("here", 1) == world.size:
            store.set("here/all", "")
        if world.rank == 0 and quiet is not None:
            timeout = _wait_while_ranks_come(store, quiet, timeout)
        store.wait(["here/all"], timeout)
    except RuntimeError as error:
        if world.rank:
            raise _unreachable(world, address, timeout, error) from None
        absent = [rank for rank in range(world.size) if not store.check([f"here/{rank}"])]
        raise LaunchError(
            f"{len(absent)} of {world.size} ranks did not connect to rank 0's store at {address} "
            f"within {time.monotonic() - start:.0f} s; absent: {world.name_ranks(absent)}. Check "
            "that every task started, and that every node can reach that address"
        ) from None


def _wait_while_ranks_come(store: "Store", quiet: timedelta, timeout: timedelta) -> timedelta:
    """Wait until all ranks have connected, or no more come; return how much longer to wait."""
    start = last = time.monotonic()
    most = 1
    while not store.check(["here/all"]) and time.monotonic() - start < timeout.total_seconds():
        count = store.add("here", 0)
        if count > most:
            most, last = count, time.monotonic()
        if most > 1 and time.monotonic() - last > quiet.total_seconds():
            break
        time.sleep(_LOOK_SECONDS)
    return timedelta(milliseconds=1)


def _port_error(port: int, error: OSError) -> LaunchError:
    if error.errno == errno.EADDRINUSE:
        problem = f"port {port} on {platform.node()} is in use"
    else:
        problem = f"port {port} on {platform.node()} cannot be opened ({error.strerror})"
    return LaunchError(
        f"{problem}: set launch.port to a free one (under srun: "
        "MASTER_PORT, under torchrun: --master-port)"
    )


def _unreachable(world: World, address: str, timeout: timedelta, error: Exception) -> LaunchError:
    if "EADDRINUSE" in str(error):
        return _port_error(world.master_port, OSError(errno.EADDRINUSE, "in use"))
    reason = str(error).splitlines()[0]
    if world.rank == 0:
        return LaunchError(
            f"not all of {world.size} ranks connected to rank 0's store at {address} ({reason}). "
            "Check that every task started, and that every node can reach that address"
        )
    return RankZeroLostError(
        f"rank {world.rank} on {world.host} did not reach rank 0's store at {address} within "
        f"{timeout.total_seconds():.0f} s ({reason}). Check that rank 0 started and that this host "
        "can reach the address; MASTER_ADDR and MASTER_PORT change it"
    )
