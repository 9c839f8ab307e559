"""Simulate nodes: network namespaces on this machine, joined by links of a given rate.

Needs Linux, root, and the programs `ip` and `tc` of iproute2. Each namespace has one interface,
eth0, which is one end of a virtual link. Its other end is in this machine's own namespace and
belongs to a bridge. A token bucket filter (tbf) limits the rate in each direction. If nodes have
packages, each package has a namespace and a link, whose other end belongs to a bridge in the
namespace of its node, and only the node's own link is joined to the other nodes. Names contain the
process id, so that simultaneous runs do not interfere. Namespaces of a run that was killed are
removed by the next run.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from frontier_llm.errors import ConfigError

CLONE_NEWNET = 0x40000000
"""Argument of setns(2): the kind of namespace to enter."""
BURST, LATENCY = "512kb", "200ms"
"""Token bucket filter: size of a burst, and how long a packet may wait before it is dropped."""
_NAME = re.compile(r"flm(\d+)n\d+(p\d+)?")
"""Name of a namespace: the process id, the number of the node and perhaps that of the package."""


@dataclass(frozen=True)
class Packages:
    """Packages of devices in each node."""

    per_node: int
    rate: str | None = None
    """Rate of the link of each package in the syntax of tc; None = that of the node's link."""


@contextmanager
def namespaces(
    count: int, rate: str, packages: Packages | None = None
) -> Iterator[tuple[str, ...]]:
    """Make network namespaces; remove them at the end of the context, also after an exception.

    Args:
        count: number of nodes; nodes and packages together are at most 254.
        rate: rate per link and direction in the syntax of tc: `1gbit`, `200mbit`.
        packages: the packages of each node; None = there are none.

    Yields:
        The names of the namespaces of the nodes in their order, or of all packages.

    Raises:
        ConfigError: this machine or user cannot make namespaces, or the rate is invalid.
    """
    check(rate)
    _remove_stale()
    nodes = tuple(f"flm{os.getpid()}n{node}" for node in range(count))
    of_packages = tuple(
        f"{node}p{index}" for node in nodes for index in range(packages.per_node if packages else 0)
    )
    bridge = f"flm{os.getpid()}b"
    try:
        _do(rate, "ip", "link", "add", bridge, "type", "bridge")
        _do(rate, "ip", "link", "set", bridge, "up")
        for node in nodes:
            _make(node, bridge, rate)
        if packages:
            for node in nodes:
                _make_inner_bridge(node, rate)
            for name in of_packages:
                _make(name, "br0", packages.rate or rate, inside=name.rpartition("p")[0])
        ranks_in = of_packages or nodes
        for index, name in enumerate(ranks_in):
            address = f"10.77.0.{index + 1}/24"
            _do(rate, "ip", "-n", name, "addr", "add", address, "dev", "eth0")
        yield ranks_in
    finally:
        _remove((*of_packages, *nodes), bridge)


@contextmanager
def namespaces_of_ranks(
    ranks: int, link: str | None, per_node: int, packages: Packages | None = None
) -> Iterator[tuple[str, ...]]:
    """Yield the network namespace of each rank; an empty tuple without a rate of links.

    A namespace is a package if there are packages, otherwise a node.
    """
    if link is None:
        yield ()
        return
    nodes = ranks // per_node
    with namespaces(nodes, link, packages) as names:
        yield tuple(names[rank * len(names) // ranks] for rank in range(ranks))


def enter(name: str | None) -> str:
    """Move this process permanently into a namespace; None leaves it where it is.

    Returns:
        The network interface that ranks in this process must use.
    """
    if name is None:
        return "lo"
    with Path("/run/netns", name).open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", name)
    return "eth0"


def check(rate: str) -> None:
    """Check that namespaces can be made here.

    Raises:
        ConfigError: this is not Linux, the user is not root, or a program is missing.
    """
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if sys.platform != "linux":
        raise ConfigError("--link", rate, "Linux: nodes are network namespaces", "omit --link")
    if missing:
        got, todo = f"{rate}, without the program {' and '.join(missing)}", "install it"
        todo += " (Debian: apt-get install iproute2), or omit --link"
        raise ConfigError("--link", got, "iproute2", todo)
    if os.geteuid():
        got, todo = f"{rate}, as user {os.geteuid()}", "run it as root, or omit --link"
        raise ConfigError("--link", got, "root, to make network namespaces", todo)


def _make(name: str, bridge: str, rate: str, inside: str | None = None) -> None:
    """Make a namespace and its link to a bridge, whose rate is limited in each direction.

    `inside` is the namespace of the bridge; None = this machine's own.
    """
    outer, where = _outer_end(name), ["-n", inside] if inside else []
    limit = ["root", "tbf", "rate", rate, "burst", BURST, "latency", LATENCY]
    for command in (
        *joined(name, outer, bridge, where),
        ["tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit],
        ["tc", *where, "qdisc", "add", "dev", outer, *limit],
    ):
        _do(rate, *command)


def joined(name: str, outer: str, bridge: str, where: Sequence[str] = ()) -> list[list[str]]:
    """Return the commands that make a namespace, and a link from its `eth0` to a bridge.

    Args:
        name: name of the namespace.
        outer: name of the link's end at the bridge.
        bridge: name of the bridge.
        where: options of `ip` that name the namespace of the bridge.
    """
    return [
        ["ip", "netns", "add", name],
        ["ip", *where, "link", "add", outer, "type", "veth", "peer", "eth0", "netns", name],
        ["ip", *where, "link", "set", outer, "master", bridge, "up"],
        ["ip", "-n", name, "link", "set", "lo", "up"],
        ["ip", "-n", name, "link", "set", "eth0", "up"],
    ]


def _make_inner_bridge(node: str, rate: str) -> None:
    """Make a bridge in the namespace of a node, to which the node's own link belongs."""
    for words in ("link add br0 type bridge", "link set br0 up", "link set eth0 master br0"):
        _do(rate, "ip", "-n", node, *words.split())


def _do(rate: str, *command: str) -> None:
    """Run a command; the error message names the rate.

    Raises:
        ConfigError: the command failed.
    """
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode:
        output = " ".join((ended.stderr or ended.stdout).split())
        raise ConfigError(
            "--link",
            f"{rate}; {' '.join(command)!r} failed: {output}",
            "a rate such as 1gbit, and a kernel that lets root make namespaces, veth pairs and tbf",
            "fix the cause, or omit --link",
        )


def _remove(names: tuple[str, ...], bridge: str) -> None:
    # the kernel would remove a link with its namespace, but only later
    links = [["ip", "link", "del", name] for name in (*map(_outer_end, names), bridge)]
    for command in (*links, *(["ip", "netns", "del", name] for name in names)):
        subprocess.run(command, check=False, capture_output=True)


def _outer_end(name: str) -> str:
    """Return the name of the interface at the bridge's end of a namespace's link."""
    return name.replace("n", "v")


def _remove_stale() -> None:
    """Remove the namespaces of processes that have ended."""
    listed = subprocess.run(["ip", "netns", "list"], check=False, capture_output=True, text=True)
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
    for name in names:
        match = _NAME.fullmatch(name)
        if match and not psutil.pid_exists(int(match[1])):
            _remove((name,), f"flm{match[1]}b")
