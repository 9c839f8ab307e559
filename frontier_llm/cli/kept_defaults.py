"""Warn of values that a command line keeps although they suit another model or machine."""

from collections.abc import Callable, Sequence

from frontier_llm.cli.compose import compose, gives
from frontier_llm.cli.group_files import key_of
from frontier_llm.config.run import RunConfig

SUITED_TO = {
    "hidden": ("ffn", "head_dim", "score_width", "encoder_hidden"),
    "heads": ("kv_heads", "head_dim", "score_width", "encoder_heads"),
    "layers": ("encoder_layers",),
    "encoder_hidden": ("encoder_ffn", "encoder_head_dim"),
    "encoder_heads": ("encoder_kv_heads", "encoder_head_dim"),
}
"""Dimensions that follow from a dimension of the model, unless its file sets them."""


def warn_of_kept_defaults(
    config: RunConfig, overrides: Sequence[str], warn: Callable[[str], object]
) -> None:
    """Warn of dimensions made for another size of the model, and of samples for a laptop on a GPU.

    A file of conf/model or an experiment may set `ffn`, which does not change with `hidden`.
    """
    if config.cluster.device.kind != "cpu" and not gives(overrides, "data.sequence_length"):
        length = config.data.sequence_length
        warn(f"data.sequence_length={length} is the default for a laptop: set your run's length")
    given = set(map(key_of, overrides))
    if not {f"model.{name}" for name in SUITED_TO} & given:
        return
    of_file = compose([word for word in overrides if not key_of(word).startswith("model.")])
    now, before = config.model.model_dump(), of_file["model"]
    changed = [name for name in SUITED_TO if f"model.{name}" in given and now[name] != before[name]]
    followers = dict.fromkeys(name for driver in changed for name in SUITED_TO[driver])
    kept = [
        f"model.{name}={now[name]}"
        for name in followers
        if now[name] is not None and now[name] == before[name] and f"model.{name}" not in given
    ]
    if kept:
        sizes = ", ".join(f"{name}={before[name]}" for name in changed)
        warn(
            f"{', '.join(kept)}: kept from {before['name']}, which has {sizes}; set them too, or "
            "to null for what follows from the other sizes"
        )
