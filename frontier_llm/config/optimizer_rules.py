"""Check the settings of the optimizer and of its learning-rate schedule."""

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError


def check_optimizer(config: RunConfig) -> None:
    """Refuse settings of the optimizer that contradict each other.

    Raises:
        ConfigError: the error names the key to change.
    """
    _check_rates(config)
    _check_cooldown(config)
    _check_timescale(config)


def _check_rates(config: RunConfig) -> None:
    optimizer = config.optimizer
    if optimizer.minimum_learning_rate > optimizer.learning_rate:
        raise ConfigError(
            "optimizer.minimum_learning_rate",
            optimizer.minimum_learning_rate,
            f"at most optimizer.learning_rate ({optimizer.learning_rate})",
            f"set optimizer.minimum_learning_rate={optimizer.learning_rate} or less: the schedule "
            "decays to it",
        )


def _check_cooldown(config: RunConfig) -> None:
    optimizer = config.optimizer
    if optimizer.schedule != "wsd":
        return
    if optimizer.cooldown_steps is not None and optimizer.cooldown_share is not None:
        raise ConfigError(
            "optimizer.cooldown_share",
            f"{optimizer.cooldown_share}, with optimizer.cooldown_steps={optimizer.cooldown_steps}",
            "the length of the cooldown either in steps or as a share of the run",
            "set optimizer.cooldown_share=null, or optimizer.cooldown_steps=null",
        )
    warmup, end, cooldown = optimizer.warmup_steps, config.decay_steps, config.cooldown_steps
    # a run that ends within its warm-up has no cooldown, as it has no decay in other schedules
    if cooldown > end or (warmup < end and warmup + cooldown > end):
        limit = max(1, end - warmup)
        in_steps = optimizer.cooldown_steps is not None
        key = "optimizer.cooldown_steps" if in_steps else "optimizer.cooldown_share"
        raise ConfigError(
            key,
            f"a cooldown of {cooldown} steps after a warm-up of {warmup}",
            f"both phases within the {end} steps until the end of the schedule "
            "(optimizer.decay_steps, or else trainer.steps)",
            f"set optimizer.cooldown_steps={limit}"
            + ("" if in_steps else " and optimizer.cooldown_share=null")
            + ", or a smaller optimizer.warmup_steps",
        )


def _check_timescale(config: RunConfig) -> None:
    optimizer = config.optimizer
    if optimizer.schedule != "inverse_sqrt":
        return
    timescale, warmup = optimizer.timescale_steps, optimizer.warmup_steps
    if timescale is None and warmup == 0:
        raise ConfigError(
            "optimizer.timescale_steps",
            "null, with optimizer.warmup_steps=0",
            "the step from which on the learning rate falls, if there is no warm-up",
            "set optimizer.timescale_steps=10000 (as T5 does), or optimizer.warmup_steps=4000",
        )
    if timescale is not None and timescale < warmup:
        raise ConfigError(
            "optimizer.timescale_steps",
            timescale,
            f"at least optimizer.warmup_steps ({warmup}): the learning rate falls after the "
            "warm-up",
            f"set optimizer.timescale_steps={warmup}",
        )
