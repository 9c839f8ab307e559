"""Simulate nodes on one machine: each has a network namespace, a host name and a local disk.

A bridge joins the nodes. slurmctld runs outside of them, and this machine's address on the bridge
is CONTROLLER. Needs Linux, root and iproute2.
"""

import os
import subprocess
from pathlib import Path

from benchmarks.testbed.namespaces import joined

BRIDGE = "flmlab"
CONTROLLER = "10.78.0.254"
DEVICE = "eth0"
"""Network interface of every node."""


class Nodes:
    """Nodes `node1`, `node2`, ... in namespaces `lab1`, ... with addresses 10.78.0.1, ..."""

    def __init__(self, count: int, folder: Path) -> None:
        """Set the names; no namespace is made yet.

        Args:
            count: number of nodes.
            folder: folder for the host table of the nodes.
        """
        self.names = tuple(f"node{number}" for number in range(1, count + 1))
        self._hosts = folder / "hosts"

    def up(self) -> None:
        """Make the namespaces, after removing those of an earlier process that was killed."""
        self.down()
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "addr", "add", f"{CONTROLLER}/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        for name in self.names:
            self._make(name)
        nodes = [f"{address(name)} {name}" for name in self.names]
        controller = f"{CONTROLLER} {os.uname().nodename}"
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", controller, *nodes, ""]))

    def down(self) -> None:
        """Remove the namespaces that exist."""
        for name in self.names:
            _run_if_possible("ip", "link", "del", _outer_end(name))
            _run_if_possible("ip", "netns", "del", _namespace(name))
        _run_if_possible("ip", "link", "del", BRIDGE)

    def start(self, name: str, command: str, local: Path, environ: dict[str, str]) -> None:
        """Run a daemon on a node.

        Args:
            name: name of the node.
            command: shell command of a daemon, which puts itself into the background.
            local: path of the node's local disk: a file system in memory that only it can see.
            environ: additional environment variables.
        """
        local.mkdir(parents=True, exist_ok=True)
        in_node = (
            f"mount --bind '{self._hosts}' /etc/hosts; mount -t tmpfs none '{local}'; "
            f"hostname {name}; exec {command}"
        )
        network = f"--net=/var/run/netns/{_namespace(name)}"
        enter_node = ["nsenter", network, "unshare", "--mount", "--uts", "bash", "-c", in_node]
        subprocess.run(enter_node, check=True, env={**os.environ, **environ}, timeout=30)

    def set_link(self, name: str, state: str) -> None:
        """Cut the link of a node (`down`) or restore it (`up`)."""
        _run("ip", "link", "set", _outer_end(name), state)

    def _make(self, name: str) -> None:
        """Make the namespace of a node and its link to the bridge."""
        space = _namespace(name)
        own = ["ip", "-n", space, "addr", "add", f"{address(name)}/24", "dev", DEVICE]
        for command in (*joined(space, _outer_end(name), BRIDGE), own):
            _run(*command)


def address(name: str) -> str:
    """Return the address of a node on the bridge."""
    return f"10.78.0.{name.removeprefix('node')}"


def _namespace(name: str) -> str:
    return name.replace("node", "lab")


def _outer_end(name: str) -> str:
    """Return the name of the interface at the bridge's end of a node's link."""
    return name.replace("node", "flmlab")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _run_if_possible(*command: str) -> None:
    subprocess.run(command, check=False, capture_output=True)
