"""docs/models_and_clusters.md: every model, cluster and experiment of `conf/`."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from docs.generate.blocks import DOCS, table
from frontier_llm.cli.compose import groups
from frontier_llm.cli.experiments import Header, composed
from frontier_llm.cli.machine_defaults import OF_THIS_MACHINE
from frontier_llm.cli.package_files import CONF
from frontier_llm.config import RunConfig
from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.planner.choice import choose
from frontier_llm.units import GIB, format_count

PAGE = DOCS / "models_and_clusters.md"
BASES = ("gpt", "llama", "llama3", "mt5", "qwen3")
"""Files of conf/model/ without dimensions, which other models extend."""
SEQUENCE_LENGTH = 2048
"""Tokens per sample assumed in the parameter counts; learned positions have one row per token."""


def models() -> list[str]:
    """Return the names of the models that can be built."""
    return [name for name in groups()["model"] if name not in BASES]


def resolved(config: RunConfig, ranks: int) -> ResolvedLayout:
    """Resolve the layout of a configuration on `ranks` ranks, with bf16 mixed precision."""
    return ResolvedLayout.resolve(config, ranks, config.cluster.ranks_per_node, precision="bf16")


def files() -> dict[Path, str]:
    """Return the text of the page, by its path."""
    return {PAGE: page()}


def page() -> str:
    """Return the text of the page."""
    return "\n".join([*_introduction(), *_models(), *_experiments(), *_clusters(), ""])


def _introduction() -> Iterator[str]:
    yield "# Models, experiments and clusters"
    yield ""
    yield (
        "This page is written by `python -m docs.generate models_and_clusters --write` from "
        "`conf/`. A test checks that it is current."
    )
    yield ""


def _models() -> Iterator[str]:
    yield "## Models (`model=NAME`)"
    yield ""
    yield (
        "Parameters are counted from the shapes of the matrices, without padding. A matrix that is "
        "both embedding and head counts once, and a table of learned positions has "
        f"{SEQUENCE_LENGTH} rows. *Hidden* and *FFN* are widths; *gated* feed-forward blocks have "
        "three matrices, others two. *Heads* gives those of keys and values after a slash, if they "
        "are fewer. The first lines of each file in `conf/model` name its source."
    )
    yield ""
    rows = []
    for name in models():
        model = composed(f"model={name}").model
        rows.append((f"`{name}`", *_dimension_cells(model)))
    columns = "name|parameters|layers|hidden|heads|FFN|vocabulary"
    yield from _table(columns, rows)


def _dimension_cells(model: ModelConfig) -> tuple[object, ...]:
    ffn = f"{model.ffn}{', gated' if model.gated else ''}"
    return (
        format_count(count_parameters(model, SEQUENCE_LENGTH)),
        model.layers,
        model.hidden,
        f"{model.heads}/{model.kv_heads}" if model.kv_heads != model.heads else model.heads,
        ffn,
        model.vocabulary,
    )


def _experiments() -> Iterator[str]:
    yield "## Experiments (`experiment=NAME`)"
    yield ""
    yield (
        "The first lines of each file in `conf/experiment` name the source of the experiment, the "
        "values that we chose ourselves, and the command that starts it. All experiments train on "
        "the source files of Python's standard library. To train on another corpus, add "
        "`data=text data.path=FILE` (for mT5 `data=text_spans data.path=FILE`). The choices of an "
        "experiment can be changed on the command line, for example with `sharding=zero3`."
    )
    yield ""
    yield (
        "*Factors* are the numbers of ranks over which parameters, gradients and optimizer states "
        "are sharded; with `sharding=amsp`, those that the planner chooses for this number of "
        "ranks. *Model states* is the memory of these three on the fullest rank in mixed "
        "precision, including gathered parameters but not activations, next to the memory of the "
        "device."
    )
    yield ""
    rows = []
    for name in groups()["experiment"]:
        header = Header.read(CONF / "experiment" / f"{name}.yaml")
        config = composed(f"experiment={name}")
        config = choose(config, header.ranks, config.cluster.ranks_per_node)
        rows.append((f"`{name}`", *_layout_cells(config, header)))
    columns = (
        "name|model|cluster|ranks|tensor x pipeline x data|global batch|factors|model states, GiB"
    )
    yield from _table(columns, rows)


def _layout_cells(config: RunConfig, header: Header) -> tuple[object, ...]:
    layout = resolved(config, header.ranks)
    grid, factors = layout.grid, layout.factors
    return (
        config.model.name,
        config.cluster.name,
        header.ranks,
        f"{grid.tensor} x {grid.pipeline} x {grid.data}",
        config.data.global_batch,
        f"{factors.params}, {factors.grads}, {factors.optimizer}",
        f"{fullest_stage_bytes(layout) / GIB:.2f} of {config.cluster.device.memory_gib:g}",
    )


def fullest_stage_bytes(layout: ResolvedLayout) -> int:
    """Return the bytes of model states on a rank of the stage with the most bytes."""
    return max(sum(layout.state_bytes(stage).values()) for stage in range(layout.grid.pipeline))


def _clusters() -> Iterator[str]:
    yield "## Clusters (`cluster=NAME`)"
    yield ""
    yield (
        "A rank uses one device (on MI250X one GCD, half of the package). The TFLOP/s columns are "
        "peak speeds of dense matrix products. A dash means that the peak is unknown or that the "
        "device does not support the format; a run then prints no MFU. Links are listed from the "
        "nearest to the farthest, with the number of ranks that each link connects in parentheses "
        "and its bandwidth in GB/s per rank and direction. The default, `cluster=auto`, chooses "
        "the file that describes the GPUs of this machine "
        "([installing](install.md#the-first-command)). Each file of `conf/cluster` names the "
        "source of its figures, or says that they are estimates."
    )
    yield ""
    clusters = [
        composed(f"cluster={name}").cluster
        for name in groups()["cluster"]
        if name not in OF_THIS_MACHINE
    ]
    rows = [(f"`{cluster.name}`", *_hardware_cells(cluster)) for cluster in clusters]
    columns = (
        "name|device|ranks per node|memory, GiB|memory, GB/s|fp32, TFLOP/s|bf16, TFLOP/s|"
        "fp16, TFLOP/s|links, GB/s"
    )
    yield from _table(columns, rows)


def _hardware_cells(cluster: ClusterConfig) -> tuple[object, ...]:
    device = cluster.device
    links = (
        f"{link.name} ({link.ranks or 'all'}): {link.gb_per_second:g}" for link in cluster.links
    )
    return (
        device.name,
        cluster.ranks_per_node,
        f"{device.memory_gib:g}",
        f"{device.memory_gb_per_second:g}",
        *(
            f"{device.peak_tflops[name]:g}" if name in device.peak_tflops else "-"
            for name in ("fp32", "bf16", "fp16")
        ),
        ", ".join(links),
    )


def _table(columns: str, rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Yield a table and an empty line; `columns` are names separated by `|`."""
    yield from table(columns.split("|"), rows)
    yield ""
