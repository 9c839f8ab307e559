"""Check the settings of checkpoints."""

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError

_KEY = "checkpoint.moments"


def check_checkpoint(config: RunConfig) -> None:
    """Refuse reduced moments where no checkpoint would have them.

    Raises:
        ConfigError: the error names the key to change.
    """
    checkpoint, optimizer = config.checkpoint, config.optimizer.name
    local, moments = checkpoint.tiers.local, checkpoint.moments
    if moments == "fp32" or checkpoint.mode == "off":
        return
    exact = f"set {_KEY}=fp32"
    if optimizer != "adamw":
        raise ConfigError(
            _KEY,
            f"{moments}, with optimizer.name={optimizer}",
            "fp32, because only AdamW has two moments in fp32 per parameter",
            f"{exact}, or optimizer=adamw",
        )
    if local.path is None:
        raise ConfigError(
            _KEY,
            f"{moments}, without node-local checkpoints",
            "a directory on the nodes' disks: checkpoints of the run directory are exact",
            f"set checkpoint.tiers.local.path, or {exact}",
        )
    if checkpoint.partner:
        raise ConfigError(
            _KEY,
            f"{moments}, with checkpoint.partner=true",
            "fp32, because checkpoints that are copied to the next node are exact",
            f"{exact}, or checkpoint.partner=false",
        )
    if local.every_steps % checkpoint.every_steps == 0:
        raise ConfigError(
            _KEY,
            f"{moments}, with checkpoint.tiers.local.every_steps={local.every_steps} and "
            f"checkpoint.every_steps={checkpoint.every_steps}",
            "local checkpoints that are not copied to the run directory: those that are copied are "
            "exact",
            f"set a smaller checkpoint.tiers.local.every_steps or a larger checkpoint.every_steps, "
            f"or {exact}",
        )
