"""Which ranks hold the same optimizer states, and whether a copy would repeat the run exactly."""

from frontier_llm.checkpoint.discovery import committed
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.elastic import refit
from frontier_llm.geometry.formats import StateFormats
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.trainer.checkpoint_places import shared_folder


def places_of_states(grid: Grid, factors: Factors) -> list[tuple[int, ...]]:
    """Return a tuple per rank that is equal for ranks with the same optimizer states."""
    places: list[tuple[int, ...]] = []
    for rank in range(grid.size):
        coordinates = grid.coordinates(rank)
        digits = factors.digits(coordinates.data)
        places.append((coordinates.tensor, coordinates.pipeline, *digits[:-1]))
    return places


def obstacle(config: RunConfig, layout: ResolvedLayout) -> str:
    """Return why states in memory would not repeat a run exactly; empty if they would."""
    if config.optimizer.name in ("muon", "adafactor"):
        return f"optimizer={config.optimizer.name} communicates during an update"
    if config.collectives.error_feedback:
        return "rounding errors of gradients (collectives.error_feedback) have no copy"
    formats = StateFormats.at(config.collectives, 1)
    has_refresh = layout.factors.optimizer > layout.factors.params
    if has_refresh and not formats.refresh.is_lossless(2):
        return "parameters are sent with rounding (collectives.refresh_format)"
    return ""


def is_overdue(config: RunConfig, step: int) -> bool:
    """Return whether the newest checkpoint that was due by a step is not in the run directory."""
    is_last = step == config.trainer.steps
    due = step if is_last else step - step % config.checkpoint.every_steps
    newest = max((step for step, _ in committed(shared_folder(config))), default=0)
    return config.checkpoint.mode != "off" and due > newest


def fitted_to(config: RunConfig, size: int) -> RunConfig:
    """Return the configuration with which an elastic run continues on a number of ranks."""
    if not config.launch.elastic:
        return config
    for key, value in refit(config.parallel, config.data, config.sharding, size).items():
        section, name = key.split(".")
        part = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: part})
    return config
