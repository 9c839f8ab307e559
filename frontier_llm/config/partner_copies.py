"""Turn `recovery.partner_copies` into the checkpoint settings that make these copies.

Copies in memory are node-local checkpoints on a file system in memory, after every step. They
therefore outlive the processes, are complete or absent, and are read like any other checkpoint.
"""

from frontier_llm.config.checkpoint import LocalTierConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import refuse

_KEY = "recovery.partner_copies"
KEPT = 2
"""Number of steps of which copies are kept: the newest may not be complete on all nodes yet."""


def with_partner_copies(config: RunConfig) -> RunConfig:
    """Return the configuration with the checkpoint settings of copies in memory, if it wants them.

    A ConfigError is raised if node-local checkpoints have another place, or are not written lazily.
    """
    recovery, checkpoint = config.recovery, config.checkpoint
    if not recovery.partner_copies:
        return config
    path = checkpoint.tiers.local.path
    refuse(
        (path not in (None, recovery.copies_path), _KEY,
         f"true, with checkpoint.tiers.local.path={path}",
         "no other node-local checkpoints, because the copies are node-local checkpoints",
         f"set checkpoint.tiers.local.path=null; or save to {path} after every step instead: "
         f"{_KEY}=false checkpoint.tiers.local.every_steps=1 checkpoint.partner=true"),
        (checkpoint.mode != "lazy", _KEY, f"true, with checkpoint.mode={checkpoint.mode}",
         "lazy, so that training does not wait for a copy after every step",
         f"set checkpoint=lazy, or {_KEY}=false"),
    )  # fmt: skip
    local = LocalTierConfig(path=recovery.copies_path, every_steps=1, keep=KEPT)
    tiers = checkpoint.tiers.model_copy(update={"local": local})
    return config.changed("checkpoint", tiers=tiers, partner=True)
