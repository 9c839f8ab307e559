"""Network namespaces joined by a bridge, each with a link of a given rate: nodes on one machine.

Needs Linux, root, and `ip` and `tc` of iproute2. Each namespace has one interface, eth0, whose
traffic is shaped both ways by a token bucket. Names hold the process id, so that runs do not
meet, and what a killed run left is removed by the next one.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from frontier_llm.errors import ConfigError

CLONE_NEWNET = 0x40000000
BURST, LATENCY = "512kb", "200ms"
"""Of the token buckets: what may pass at once, and how long a packet may wait before it is lost."""
_NAME = re.compile(r"flm(\d+)n\d+")


@contextmanager
def namespaces(count: int, rate: str) -> Iterator[tuple[str, ...]]:
    """Make namespaces, and remove them again however the block is left.

    Args:
        count: number of nodes, at most 254.
        rate: of each link and direction, as tc has it: `1gbit`, `200mbit`.

    Yields:
        The names, in the order of the nodes.

    Raises:
        ConfigError: it cannot be done here.
    """
    check(rate)
    _remove_stale()
    names = tuple(f"flm{os.getpid()}n{node}" for node in range(count))
    bridge = f"flm{os.getpid()}b"
    try:
        _do(rate, "ip", "link", "add", bridge, "type", "bridge")
        _do(rate, "ip", "link", "set", bridge, "up")
        for node, name in enumerate(names):
            _make(name, node, bridge, rate)
        yield names
    finally:
        _remove(names, bridge)


def enter(name: str | None) -> str:
    """Move this process into a namespace, for good; None = it stays.

    Returns:
        The network interface that ranks there are to use.
    """
    if name is None:
        return "lo"
    with Path("/run/netns", name).open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", name)
    return "eth0"


def check(rate: str) -> None:
    """Refuse at once what cannot work.

    Raises:
        ConfigError: no Linux, not root, or a program is missing.
    """
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if sys.platform != "linux":
        raise ConfigError("--link", rate, "Linux: nodes are network namespaces", "leave it out")
    if missing:
        raise ConfigError(
            "--link",
            f"{rate}, without the program {' and '.join(missing)}",
            "iproute2",
            "install it (Debian: apt-get install iproute2), or leave --link out",
        )
    if os.geteuid():
        raise ConfigError(
            "--link",
            f"{rate}, as user {os.geteuid()}",
            "root: network namespaces are made",
            "run it as root, or leave --link out",
        )


def _make(name: str, node: int, bridge: str, rate: str) -> None:
    outer = _outer(name)
    shape = ["root", "tbf", "rate", rate, "burst", BURST, "latency", LATENCY]
    for command in (
        ["ip", "netns", "add", name],
        ["ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name],
        ["ip", "link", "set", outer, "master", bridge, "up"],
        ["ip", "-n", name, "link", "set", "lo", "up"],
        ["ip", "-n", name, "addr", "add", f"10.77.0.{node + 1}/24", "dev", "eth0"],
        ["ip", "-n", name, "link", "set", "eth0", "up"],
        ["tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape],
        ["tc", "qdisc", "add", "dev", outer, *shape],
    ):
        _do(rate, *command)


def _do(rate: str, *command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise ConfigError(
            "--link",
            f"{rate}; {' '.join(command)!r} said: {said}",
            "a rate such as 1gbit, and a kernel that lets root make namespaces, veth pairs and tbf",
            "mend that, or leave --link out",
        )


def _remove(names: tuple[str, ...], bridge: str) -> None:
    # a link would go with its namespace, but some time later
    links = [["ip", "link", "del", name] for name in (*map(_outer, names), bridge)]
    for command in (*links, *(["ip", "netns", "del", name] for name in names)):
        subprocess.run(command, check=False, capture_output=True)


def _outer(name: str) -> str:
    """Name the end outside of a namespace's link."""
    return name.replace("n", "v")


def _remove_stale() -> None:
    listed = subprocess.run(["ip", "netns", "list"], check=False, capture_output=True, text=True)
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
    for name in names:
        match = _NAME.fullmatch(name)
        if match and not _is_alive(int(match[1])):
            _remove((name,), f"flm{match[1]}b")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
