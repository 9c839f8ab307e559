"""The tables of docs/models_and_clusters.md: every model, cluster and experiment of `conf/`."""

from collections.abc import Iterator

from docs.generate.blocks import headed
from docs.generate.predictions import ranks_of
from frontier_llm.cli.compose import groups
from frontier_llm.cli.experiments import composed
from frontier_llm.cli.machine_defaults import OF_THIS_MACHINE
from frontier_llm.config import RunConfig
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.planner.choice import choose
from frontier_llm.units import GIB, format_count

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


@headed("name", "parameters", "layers", "hidden", "heads", "FFN", "vocabulary")
def _models() -> Iterator[tuple[object, ...]]:
    for name in models():
        model = composed(f"model={name}").model
        sides = [model] if model.encoder == model else [model.encoder, model]
        heads = [
            f"{side.heads}/{side.kv_heads}" if side.kv_heads != side.heads else f"{side.heads}"
            for side in sides
        ]
        yield (
            f"`{name}`",
            format_count(count_parameters(model, SEQUENCE_LENGTH)),
            model.layers,
            " + ".join(str(side.hidden) for side in sides),
            " + ".join(heads),
            " + ".join(f"{3 if model.gated else 2}x{side.ffn}" for side in sides),
            model.vocabulary,
        )


@headed(
    "name", "model", "cluster", "ranks", "tensor x pipeline x data", "global batch", "factors",
    "model states, GiB",
)  # fmt: skip
def _experiments() -> Iterator[tuple[object, ...]]:
    for name in groups()["experiment"]:
        ranks = ranks_of(name)
        config = composed(f"experiment={name}")
        config = choose(config, ranks, config.cluster.ranks_per_node)
        layout = resolved(config, ranks)
        grid = layout.grid
        yield (
            f"`{name}`",
            config.model.name,
            config.cluster.name,
            ranks,
            f"{grid.tensor}x{grid.pipeline}x{grid.data}",
            config.data.global_batch,
            layout.factors.in_words,
            f"{fullest_stage_bytes(layout) / GIB:.2f} of {config.cluster.device.memory_gib:g}",
        )


def fullest_stage_bytes(layout: ResolvedLayout) -> int:
    """Return the bytes of model states on a rank of the stage with the most bytes."""
    return max(sum(layout.state_bytes(stage).values()) for stage in range(layout.grid.pipeline))


@headed(
    "name", "device", "ranks per node", "memory, GiB", "memory, GB/s", "fp32, TFLOP/s",
    "bf16, TFLOP/s", "fp16, TFLOP/s", "links, GB/s",
)  # fmt: skip
def _clusters() -> Iterator[tuple[object, ...]]:
    names = (name for name in groups()["cluster"] if name not in OF_THIS_MACHINE)
    for cluster in [composed(f"cluster={name}").cluster for name in names]:
        device, peaks = cluster.device, cluster.device.peak_tflops
        links = (
            f"{link.name} ({link.ranks or 'all'}): {link.gb_per_second:g}" for link in cluster.links
        )
        yield (
            f"`{cluster.name}`",
            device.name,
            cluster.ranks_per_node,
            f"{device.memory_gib:g}",
            f"{device.memory_gb_per_second:g}",
            *(f"{peaks[name]:g}" if name in peaks else "-" for name in ("fp32", "bf16", "fp16")),
            ", ".join(links),
        )


PAGES = {
    "docs/models_and_clusters.md": {
        "models": _models, "experiments": _experiments, "clusters": _clusters,
    },
}  # fmt: skip
