"""A Slurm cluster on this machine: munged, slurmctld and one slurmd per node, without systemd.

munged authenticates messages, slurmctld schedules jobs, and slurmd starts processes on its node.

To install the programs on Debian:

apt-get install --no-install-recommends slurmctld slurmd slurm-client munge iproute2
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from benchmarks.faults.slurm_lab.nodes import CONTROLLER, Nodes, address
from frontier_llm.errors import LaunchError

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "nsenter", "unshare")
PORT = 27500
"""TCP port of slurmctld; the slurmd of node N listens on PORT + N."""
SLURMD_TIMEOUT_SECONDS = 20
"""A node that does not answer for this long counts as down."""
_READY_SECONDS = 30.0
"""Default time limit for all nodes to become idle."""
STOP_SECONDS = 5
"""Time limit for a daemon to end."""


def missing() -> str:
    """Return why no cluster can be started here; empty if one can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if os.geteuid():
        return "root is needed to make network namespaces"
    permitted = subprocess.run(
        ["unshare", "--net", "--mount", "true"], capture_output=True, check=False
    )
    return "" if permitted.returncode == 0 else "this container may not make namespaces"


class SlurmCluster:
    """A context manager that starts and stops the daemons; `nodes` are its simulated machines."""

    def __init__(self, folder: Path, count: int, cores: int, devices: int, local: Path) -> None:
        """Set the size of the cluster; nothing is started yet.

        Args:
            folder: folder for configuration, logs and state; its content is removed.
            count: number of nodes.
            cores: cores per node as Slurm counts them.
            devices: GPUs per node; they exist only for Slurm.
            local: path at which every node sees its own local disk.
        """
        self.folder, self.nodes = folder, Nodes(count, folder)
        self._cores, self._devices, self.local = cores, devices, local
        self.environ: Mapping[str, str] = {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "SlurmCluster":
        reason = missing()
        if reason:
            raise LaunchError(f"no Slurm can be started here: {reason}")
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("run", "log", "state", "spool", "dev", "munge"):
            (self.folder / name).mkdir(parents=True)
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def start_node(self, name: str) -> None:
        """Start or restart the slurmd of a node."""
        self.nodes.start(name, f"slurmd -N {name}", self.local, dict(self.environ))

    def kill_node(self, name: str) -> None:
        """Kill the slurmd of a node and all processes of the node, as a power failure would."""
        for pid in _processes_of(self._pid(name)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ask(self, *command: str) -> str:
        """Run a command of Slurm and return its output.

        Raises:
            LaunchError: the command failed.
        """
        ended = subprocess.run(
            command, env={**os.environ, **self.environ}, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        if ended.returncode:
            message = ended.stderr.strip() or ended.stdout.strip()
            raise LaunchError(f"{' '.join(command)}: {message}")
        return ended.stdout.strip()

    def wait_idle(self, seconds: float = _READY_SECONDS) -> None:
        """Wait until every node is idle.

        Raises:
            LaunchError: a node does not become idle in time.
        """
        deadline = time.monotonic() + seconds
        states = ""
        while time.monotonic() < deadline:
            states = self.ask("sinfo", "--noheader", "--Node", "--partition=batch", "--format=%t")
            if set(states.split()) == {"idle"}:
                return
            time.sleep(0.2)
        raise LaunchError(f"the nodes did not become idle: {states.split()}; see {self.folder}/log")

    def _start(self) -> None:
        """Make the nodes, write the configuration and start all daemons."""
        self.nodes.up()
        self._write_key()
        for number in range(self._devices):
            # Slurm expects GPUs to be character devices, so copies of /dev/null stand for them
            os.mknod(self.folder / "dev" / f"gpu{number}", 0o020666, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(
            f"AutoDetect=off\nName=gpu File={self.folder}/dev/gpu[0-{self._devices - 1}]\n"
        )
        (self.folder / "slurm.conf").write_text(self._configuration())
        run = self.folder / "run"
        self._run(
            "munged", "--force", f"--key-file={self.folder}/munge/key",
            f"--socket={run}/munge.sock", f"--pid-file={run}/munged.pid",
            f"--log-file={self.folder}/log/munged.log", f"--seed-file={self.folder}/munge/seed",
        )  # fmt: skip
        self._run("slurmctld")
        for name in self.nodes.names:
            self.start_node(name)
        self.wait_idle()

    def _stop(self) -> None:
        for name in self.nodes.names:
            self.kill_node(name)
        for name in ("slurmctld", "munged"):
            pid = self._pid(name)
            if pid:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
                    daemon = psutil.Process(pid)
                    daemon.terminate()
                    daemon.wait(STOP_SECONDS)
        self.nodes.down()

    def _write_key(self) -> None:
        """Write the key of munged, which only its owner may read."""
        (self.folder / "munge").chmod(0o700)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    def _run(self, *command: str) -> None:
        environ = {**os.environ, **self.environ}
        subprocess.run(command, check=True, env=environ, capture_output=True, timeout=30)

    def _pid(self, name: str) -> int:
        """Return the process id of a daemon, or of the slurmd of a node; 0 if there is none."""
        file = self.folder / "run" / f"{name}.pid"
        text = file.read_text().strip() if file.exists() else ""
        return int(text or 0)

    def _configuration(self) -> str:
        """Return the content of slurm.conf."""
        folder, host = self.folder, os.uname().nodename
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={address(name)} Port={PORT + number} CPUs={self._cores} "
            f"RealMemory=4000 Gres=gpu:{self._devices} Feature=nvme State=UNKNOWN"
            for number, name in enumerate(self.nodes.names, start=1)
        )
        return f"""\
ClusterName=lab
SlurmctldHost={host}({CONTROLLER})
SlurmctldPort={PORT}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock
CredType=cred/munge
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=3,sched_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
MinJobAge=3600
SlurmctldTimeout=30
SlurmdTimeout={SLURMD_TIMEOUT_SECONDS}
InactiveLimit=0
GresTypes=gpu
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=20
PartitionName=high Nodes=ALL Default=NO MaxTime=60 State=UP PriorityTier=10 PreemptMode=off
"""


def _processes_of(pid: int) -> list[int]:
    """Return all processes of a node, given the process id of its slurmd.

    A node has a UTS namespace (host name) of its own, which all its processes share. They need not
    be children of slurmd, because the daemons that start a job's processes detach from it.
    """
    if not pid:
        return []
    try:
        of_node = (Path("/proc") / str(pid) / "ns/uts").readlink()
    except OSError:
        return []
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "ns/uts").readlink() == of_node:
                found.append(int(process.name))
    of_this_process = Path("/proc/self/ns/uts").readlink()
    return found if of_node != of_this_process else []
