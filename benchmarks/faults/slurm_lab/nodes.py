"""Simulated nodes on one machine: each has a network namespace, a host name and a local disk.

A bridge joins them; slurmctld uses this machine's address on it. Needs Linux, root and iproute2.
"""

import os
import subprocess
from pathlib import Path

BRIDGE = "flmlab"
CONTROLLER = "10.78.0.254"
DEVICE = "eth0"


class Nodes:
    """Namespaces `lab1`, `lab2`, ... with hosts `node1`, `node2`, ... from 10.78.0.1 on."""

    def __init__(self, count: int, folder: Path) -> None:
        """Set the names; nothing is made yet.

        Args:
            count: number of nodes.
            folder: folder for the host table of the nodes.
        """
        self.names = tuple(f"node{number}" for number in range(1, count + 1))
        self._hosts = folder / "hosts"

    def up(self) -> None:
        """Make the namespaces, after removing those of an earlier lab that was killed."""
        self.down()
        _do("ip", "link", "add", BRIDGE, "type", "bridge")
        _do("ip", "addr", "add", f"{CONTROLLER}/24", "dev", BRIDGE)
        _do("ip", "link", "set", BRIDGE, "up")
        for name in self.names:
            self._make(name)
        table = [f"{address(name)} {name}" for name in self.names]
        here = f"{CONTROLLER} {os.uname().nodename}"
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", here, *table, ""]))

    def down(self) -> None:
        """Remove the namespaces that exist."""
        for name in self.names:
            _try("ip", "link", "del", _outer(name))
            _try("ip", "netns", "del", _namespace(name))
        _try("ip", "link", "del", BRIDGE)

    def start(self, name: str, command: str, local: Path, environ: dict[str, str]) -> None:
        """Run a daemon on a node.

        Args:
            name: name of the node.
            command: shell command; it must put itself into the background.
            local: path at which only this node sees a file system in memory.
            environ: additional environment variables.
        """
        local.mkdir(parents=True, exist_ok=True)
        inside = (
            f"mount --bind '{self._hosts}' /etc/hosts; mount -t tmpfs none '{local}'; "
            f"hostname {name}; exec {command}"
        )
        outside = [
            "nsenter",
            f"--net=/var/run/netns/{_namespace(name)}",
            "unshare",
            "--mount",
            "--uts",
        ]
        subprocess.run(
            [*outside, "bash", "-c", inside], check=True, env={**os.environ, **environ}, timeout=30
        )

    def set_link(self, name: str, state: str) -> None:
        """Cut the link of a node (`down`) or restore it (`up`)."""
        _do("ip", "link", "set", _outer(name), state)

    def _make(self, name: str) -> None:
        space, outer = _namespace(name), _outer(name)
        for command in (
            ["ip", "netns", "add", space],
            ["ip", "link", "add", outer, "type", "veth", "peer", "name", DEVICE, "netns", space],
            ["ip", "link", "set", outer, "master", BRIDGE, "up"],
            ["ip", "-n", space, "link", "set", "lo", "up"],
            ["ip", "-n", space, "addr", "add", f"{address(name)}/24", "dev", DEVICE],
            ["ip", "-n", space, "link", "set", DEVICE, "up"],
        ):
            _do(*command)


def address(name: str) -> str:
    """Return the address of a node on the bridge."""
    return f"10.78.0.{name.removeprefix('node')}"


def _namespace(name: str) -> str:
    return name.replace("node", "lab")


def _outer(name: str) -> str:
    """Return the name of the outer end of a node's link."""
    return name.replace("node", "flmlab")


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _try(*command: str) -> None:
    subprocess.run(command, check=False, capture_output=True)
