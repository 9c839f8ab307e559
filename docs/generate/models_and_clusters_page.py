"""Write docs/models_and_clusters.md: every model, cluster and experiment of `conf/`.

`python -m docs.generate.models_and_clusters_page` checks whether the page is current; with
`--write` it writes the page.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence

from docs.generate.marked_page import keep_current
from frontier_llm.cli.compose import groups
from frontier_llm.cli.experiments import Header, comments, composed
from frontier_llm.cli.options import run_command
from frontier_llm.cli.package_files import CONF
from frontier_llm.config import RunConfig
from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.units import GIB, format_count

PAGE = CONF.parent / "docs" / "models_and_clusters.md"
BASES = ("gpt", "llama", "mt5")
"""Files of conf/model/ without dimensions, which other models extend."""
SEQUENCE_LENGTH = 2048
"""Rows of learned position tables in the parameter counts."""


def models() -> list[str]:
    """Return the names of the models that can be built."""
    return [name for name in groups()["model"] if name not in BASES]


def resolved(config: RunConfig, ranks: int) -> ResolvedLayout:
    """Return the layout of a configuration on a number of ranks in mixed precision."""
    return ResolvedLayout.resolve(config, ranks, config.cluster.ranks_per_node, precision="bf16")


def page() -> str:
    """Return the text of the page."""
    return "\n".join([*_introduction(), *_models(), *_experiments(), *_clusters(), ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or check whether it is current."""
    return keep_current(
        __doc__, "docs.generate.models_and_clusters_page", arguments, lambda: {PAGE: page()}
    )


def _introduction() -> Iterator[str]:
    yield "# Models, experiments and clusters"
    yield ""
    yield (
        "This page is written by `python -m docs.generate.models_and_clusters_page --write` from "
        "`conf/`. A test checks that it is current."
    )
    yield ""


def _models() -> Iterator[str]:
    yield "## Models (`model=NAME`)"
    yield ""
    yield (
        "Parameters are counted from the shapes, without padding; shared matrices count once, and "
        f"learned positions have {SEQUENCE_LENGTH} rows."
    )
    yield ""
    rows = []
    for name in models():
        model = composed(f"model={name}").model
        title = " ".join(comments(CONF / "model" / f"{name}.yaml"))
        rows.append((f"`{name}`", *_dimensions(model), title))
    columns = "name|parameters|layers|hidden|heads|KV heads|FFN|vocabulary|positions|source"
    yield from _table(columns, rows)


def _dimensions(model: ModelConfig) -> tuple[object, ...]:
    ffn = f"{model.ffn}{', gated' if model.gated else ''}"
    return (
        format_count(count_parameters(model, SEQUENCE_LENGTH)),
        model.layers,
        model.hidden,
        model.heads,
        model.kv_heads,
        ffn,
        model.vocabulary,
        model.positions,
    )


def _experiments() -> Iterator[str]:
    yield "## Experiments (`experiment=NAME`)"
    yield ""
    yield (
        "The first lines of each file in `conf/experiment` give its source, the figures that we "
        "chose, and the command that starts it. All train on the sources of Python's standard "
        "library unless `data=text data.path=FILE` (for mT5 `data=text_spans`) names a corpus. "
        "Every choice of a group can be changed on the command line, such as `sharding=zero3`. "
        "Factors are the ranks over which parameters, gradients and optimizer states are sharded. "
        "States are the model states of the fullest rank in mixed precision, with gathered "
        "parameters and without activations."
    )
    yield ""
    rows = []
    for name in groups()["experiment"]:
        header = Header.read(CONF / "experiment" / f"{name}.yaml")
        config = composed(f"experiment={name}")
        rows.append((f"`{name}`", *_layout(config, header)))
    columns = (
        "name|model|cluster|ranks|tensor x pipeline x data|sequence|global batch|"
        "micro-batches per replica|recompute|factors|states, GiB of device"
    )
    yield from _table(columns, rows)


def _layout(config: RunConfig, header: Header) -> tuple[object, ...]:
    data, layout = config.data, resolved(config, header.ranks)
    grid, factors = layout.grid, layout.factors
    return (
        config.model.name,
        config.cluster.name,
        header.ranks,
        f"{grid.tensor} x {grid.pipeline} x {grid.data}",
        data.sequence_length,
        data.global_batch,
        layout.micro_batches,
        config.recompute,
        f"{factors.params}, {factors.grads}, {factors.optimizer}",
        f"{layout.fullest_stage_bytes / GIB:.2f} of {config.cluster.device.memory_gib:g}",
    )


def _clusters() -> Iterator[str]:
    yield "## Clusters (`cluster=NAME`)"
    yield ""
    yield (
        "A rank is one device (on MI250X one GCD). Peaks are dense, by compute format; a dash "
        "means unknown or unsupported, and no MFU is printed. Links are in GB/s per rank and "
        "direction, nearest first, with the number of ranks that share them."
    )
    yield ""
    clusters = [composed(f"cluster={name}").cluster for name in groups()["cluster"]]
    rows = [(f"`{cluster.name}`", *_hardware(cluster)) for cluster in clusters]
    columns = (
        "name|device|ranks per node|memory, GiB|memory, GB/s|fp32 TFLOP/s|bf16|fp16|links|"
        "host cores|host memory, GiB"
    )
    yield from _table(columns, rows)
    yield "### Sources"
    yield ""
    for cluster in clusters:
        yield f"`{cluster.name}`"
        yield ""
        yield f"- device: {cluster.device.source}"
        yield f"- host: {cluster.host.source}"
        yield from (f"- {link.name}: {link.source}" for link in cluster.links)
        yield from (f"- {place.name}: {place.source}" for place in cluster.storage)
        yield ""


def _hardware(cluster: ClusterConfig) -> tuple[object, ...]:
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
        cluster.host.cores,
        f"{cluster.host.memory_gib:g}",
    )


def _table(columns: str, rows: Iterable[Iterable[object]]) -> Iterator[str]:
    names = columns.split("|")
    yield "| " + " | ".join(names) + " |"
    yield "|" + "---|" * len(names)
    for row in rows:
        yield "| " + " | ".join(str(cell) for cell in row) + " |"
    yield ""


if __name__ == "__main__":
    sys.exit(run_command(main))
