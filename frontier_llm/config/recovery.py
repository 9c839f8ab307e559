"""The section `recovery`: how a run continues when one of its processes dies."""

from pydantic import Field

from frontier_llm.config.paths import NodePathName
from frontier_llm.config.section import Section


class RecoveryConfig(Section):
    """Replacement of dead ranks while the others keep their states in memory."""

    enabled: bool = False
    """Whether another process takes the place of a rank that has died, on one machine and under
    srun, but not under torchrun. The other ranks keep their states. Those of the dead rank come
    from a replica that has the same ones (sharding.optimizer smaller than the number of replicas),
    from copies in memory (partner_copies), or from the newest checkpoint, which all ranks then
    load. The interrupted step is done again."""
    spares: int = Field(0, ge=0)
    """Number of processes that have loaded their libraries and wait for a rank. If none waits, a
    new process is started, which takes a fraction of a second longer. Under srun these are the
    last tasks of the job."""
    tries: int = Field(10, ge=1)
    """How many times ranks may be replaced without a new step in between, before the run ends."""
    partner_copies: bool = False
    """Whether the states of every step are copied to the memory of the own node and of the next
    node, in the background. A dead rank's states come from there if no other rank holds them, and
    all ranks go back to the newest step that is complete: usually one or two steps. On a single
    node they are copied to its own memory only, and survive the death of ranks."""
    copies_path: NodePathName = "/dev/shm/frontier_llm-$UID"
    """With partner_copies, a directory on a file system in memory (tmpfs) of each node. The copies
    are in folders that only the user can open."""
    timeout_seconds: float = Field(3.0, gt=0)
    """With gloo, time limit of a collective. In one of a hundred deaths a rank notices the death
    only by this limit. A limit that is too short costs a new connection of all ranks, and no step;
    then it is doubled."""
