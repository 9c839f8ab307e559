"""The tables of docs/models_and_clusters.md: every model, cluster and experiment of `conf/`."""

from collections.abc import Iterator
from pathlib import Path

from docs.generate.blocks import DOCS, filled, table
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
BASES = ("gemma2", "gemma3", "gpt", "llama", "llama3", "mt5", "qwen3", "t5gemma", "t5gemma2")
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
    """Return the page with its tables."""
    tables = {"models": _models(), "experiments": _experiments(), "clusters": _clusters()}
    return {PAGE: filled(PAGE.read_text(), tables)}


def _models() -> Iterator[str]:
    rows = []
    for name in models():
        model = composed(f"model={name}").model
        rows.append((f"`{name}`", *_dimension_cells(model)))
    yield from table(("name", "parameters", "layers", "hidden", "heads", "FFN", "vocabulary"), rows)


def _dimension_cells(model: ModelConfig) -> tuple[object, ...]:
    sides = [model] if model.encoder == model else [model.encoder, model]
    heads = [
        f"{side.heads}/{side.kv_heads}" if side.kv_heads != side.heads else f"{side.heads}"
        for side in sides
    ]
    return (
        format_count(count_parameters(model, SEQUENCE_LENGTH)),
        model.layers,
        " + ".join(str(side.hidden) for side in sides),
        " + ".join(heads),
        " + ".join(f"{3 if model.gated else 2}x{side.ffn}" for side in sides),
        model.vocabulary,
    )


def _experiments() -> Iterator[str]:
    rows = []
    for name in groups()["experiment"]:
        header = Header.read(CONF / "experiment" / f"{name}.yaml")
        config = composed(f"experiment={name}")
        config = choose(config, header.ranks, config.cluster.ranks_per_node)
        rows.append((f"`{name}`", *_layout_cells(config, header)))
    head = ("name", "model", "cluster", "ranks", "tensor x pipeline x data", "global batch",
            "factors", "model states, GiB")  # fmt: skip
    yield from table(head, rows)


def _layout_cells(config: RunConfig, header: Header) -> tuple[object, ...]:
    layout = resolved(config, header.ranks)
    grid = layout.grid
    return (
        config.model.name,
        config.cluster.name,
        header.ranks,
        f"{grid.tensor}x{grid.pipeline}x{grid.data}",
        config.data.global_batch,
        layout.factors.in_words,
        f"{fullest_stage_bytes(layout) / GIB:.2f} of {config.cluster.device.memory_gib:g}",
    )


def fullest_stage_bytes(layout: ResolvedLayout) -> int:
    """Return the bytes of model states on a rank of the stage with the most bytes."""
    return max(sum(layout.state_bytes(stage).values()) for stage in range(layout.grid.pipeline))


def _clusters() -> Iterator[str]:
    clusters = [
        composed(f"cluster={name}").cluster
        for name in groups()["cluster"]
        if name not in OF_THIS_MACHINE
    ]
    rows = [(f"`{cluster.name}`", *_hardware_cells(cluster)) for cluster in clusters]
    head = ("name", "device", "ranks per node", "memory, GiB", "memory, GB/s", "fp32, TFLOP/s",
            "bf16, TFLOP/s", "fp16, TFLOP/s", "links, GB/s")  # fmt: skip
    yield from table(head, rows)


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
