"""The section `launch`: how processes are started and how they connect to each other."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section

TrialValue = Literal["speed", "speed_per_device", "loss"]


class LaunchConfig(Section):
    """Settings of local processes and of a Slurm job (frontier-llm launch).

    `ranks`, `port` and `nodes` have no effect in processes that srun or torchrun started.
    """

    ranks: int = Field(ge=1)
    """Number of processes that are started on this machine, unless srun or torchrun starts them.
    Default: as many as there are visible GPUs; without a GPU, `cluster.ranks_per_node`."""
    ranks_per_node: int | None = Field(ge=1)
    """Number of ranks per node. null = the number that the launcher gives, or all ranks on a single
    machine. A smaller number simulates several nodes on one machine."""
    nodes: int | None = Field(ge=1)
    """Number of nodes that frontier-llm launch requests from Slurm, with cluster.ranks_per_node
    ranks each; null = as many nodes as launch.ranks need."""
    port: int | None = Field(ge=1, le=65535)
    """TCP port at which ranks meet; null = a free port (under srun, a port that follows from the
    job id)."""
    timeout_seconds: float = Field(gt=0)
    """Time limit of a collective with gloo. A collective that takes longer ends the run. With NCCL
    and RCCL this limit applies only if watchdog.enabled=false; otherwise the watchdog has its own
    limits."""
    meeting_seconds: float = Field(gt=0)
    """Seconds that a rank may connect later than rank 0. Until then it loads its libraries."""
    preflight_seconds: float = Field(gt=0)
    """Time limit of the preflight check, which runs one collective in every process group at
    start-up. If ranks do not take part in time, the run names them and ends. The first collective
    creates the communicator, which took about a minute on a node of 8 B200 (NCCL issue 1646, 2025)
    and more on thousands of ranks, so the default is ten minutes."""
    stop_minutes: float = Field(ge=0)
    """Minutes before the end of a Slurm job at which the run saves a checkpoint and stops. The time
    of two steps is added to them. 0 = the run stops only on a signal or a STOP file."""
    trial_minutes: float = Field(gt=0)
    """Time limit of each trial of a sweep (`train.py -m`). A trial that takes longer has failed."""
    trial_value: TrialValue
    """Quantity that a sweep optimises. `speed`: tokens per second, maximised; `speed_per_device`:
    tokens per second divided by the number of devices, maximised, which compares trials on
    different numbers of nodes; `loss`: validation loss, minimised."""
    trial_runner: Literal["train", "plan"] = "train"
    """How a sweep gets the value of a trial. `train`: it starts a run; `plan`: the planner predicts
    speed and memory, which needs no devices."""
    trial_micro_batches: int | None = Field(None, ge=1)
    """Number of micro-batches that each replica of a trial processes per step. data.global_batch of
    the trial follows from it, whatever its number of replicas. null = data.global_batch counts."""
    elastic: bool
    """Whether a run may resume with another number of replicas. Then data.micro_batch and sharding
    factors that are numbers are fitted to this number. The global batch stays the same."""
    threads: int | None = Field(ge=1)
    """CPU threads per rank; null = OMP_NUM_THREADS, or an equal share of the cores if this variable
    is not set."""
