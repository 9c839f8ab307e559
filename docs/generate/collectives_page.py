"""The tables of docs/collectives.md: bytes between nodes, and what can be combined."""

from collections.abc import Iterator
from functools import cache

from docs.generate.blocks import headed, table
from frontier_lab.planning.state_layout import StateLayout
from frontier_llm.cli.compose import Composed
from frontier_llm.config import RunConfig
from frontier_llm.config.support import check_support
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.wire import gather_bytes

NODES, PER_NODE = 4, 8
"""Nodes, and ranks per node, of the table of bytes."""
DATA = NODES * PER_NODE
"""Number of data-parallel ranks."""
ELEMENTS, SMALL = 12 * 6144**2, 13 * 6144
"""Elements of a layer of the 18B model: those of matrices, and those of norms and biases."""
MICRO_BATCHES = (1, 4, 16)
"""Numbers of micro-batches per step, `M` in the table."""
AXES: dict[str, tuple[str, ...]] = {
    "precision": ("fp32", "bf16", "fp16"),
    "collectives": (
        "plain", "bf16", "qwz", "qgz", "zeropp", "zeropp_feedback", "four_bits", "levels",
    ),
    "device": ("cpu", "cuda", "hip"),
}  # fmt: skip
"""What the table of combinations combines."""
TESTED_DEVICES = ("cpu",)
"""Devices on which every combination has run. On other devices only the kernels differ."""
REFUSED = {
    "error feedback = on and precision = fp16": ("zeropp_feedback", "fp16", None),
    "error feedback = on and gradients between nodes = floats": ("zeropp_feedback", "fp32", "bf16"),
}
"""A combination of each kind that is refused: preset, precision, format between nodes."""
RANKS_OVERRIDES = (
    "parallel.pipeline=1", f"launch.ranks={DATA}", f"launch.ranks_per_node={PER_NODE}",
    "precision=bf16", "data.micro_batch=1",
)  # fmt: skip
"""The ranks of the table of bytes."""
SCHEMES = (
    "sharding=zero3 collectives=bf16",
    "sharding=zero3 collectives=zeropp",
    "sharding=zeropp collectives=bf16",
    "sharding=zeropp collectives=zeropp",
)
"""Rows of the table of bytes, by their overrides."""


@headed(
    "scheme", *(f"M = {m}" for m in MICRO_BATCHES),
    *(f"relative to ZeRO-3, M = {m}" for m in MICRO_BATCHES),
)  # fmt: skip
def volumes() -> Iterator[list[str]]:
    """Yield the bytes that leave a node in a step, in multiples of the model in 16 bits."""
    zero3 = [zero3_in_rings(m) for m in MICRO_BATCHES]
    rows = {
        "ZeRO-3 in bf16, in rings": zero3,
        "ZeRO++ as published, without scales": [published(m) for m in MICRO_BATCHES],
        **{f"`{scheme}`": [leaves_a_node(scheme, m) for m in MICRO_BATCHES] for scheme in SCHEMES},
    }
    for name, volumes in rows.items():
        relative = (base / volume for volume, base in zip(volumes, zero3, strict=True))
        yield [name, *(f"{volume:.2f}" for volume in volumes), *(f"1/{v:.1f}" for v in relative)]


def zero3_in_rings(micro_batches: int) -> float:
    """Return the volume of ZeRO-3 in multiples of the 16-bit model.

    Two gathers and a reduce-scatter are rings over all ranks. In a ring one rank of each node sends
    to another node.
    """
    return micro_batches * 3 * gather_bytes(1.0, DATA)


def published(micro_batches: int) -> float:
    """Return the volume of ZeRO++ (arXiv:2306.10209) in multiples of the 16-bit model.

    ZeRO++ sends int8 parameters in the forward pass, no parameters in the backward pass, and int4
    gradients.
    """
    return micro_batches * (0.5 + 0.25) * (1 - 1 / NODES)


def leaves_a_node(scheme: str, micro_batches: int) -> float:
    """Return what the ranks of a node send to other nodes in a step, relative to the 16-bit model.

    Gathers and gradients in fp32 use rings. Other gradients are sent between pairs of ranks.
    """
    batch = f"data.global_batch={DATA * micro_batches}"
    layout = StateLayout.of(_config(*RANKS_OVERRIDES, *scheme.split(), batch))
    size = layout.factors.padded(ELEMENTS + SMALL)
    by_rank = [layout.traffic.unit(rank, size, decayed=ELEMENTS) for rank in range(PER_NODE)]
    inter_bytes = sum(sent.network for of_rank in by_rank for sent in of_rank.values())
    return inter_bytes / (2 * size)


@cache
def _config(*overrides: str) -> RunConfig:
    return Composed.of(overrides).config


def support() -> Iterator[str]:
    """Yield the table of combinations, one row per precision and presets with the same signs."""
    rows: list[list[str]] = []
    for precision in AXES["precision"]:
        presets: dict[tuple[str, ...], list[str]] = {}
        for preset in AXES["collectives"]:
            signs = tuple(_sign(precision, preset, device) for device in AXES["device"])
            presets.setdefault(signs, []).append(f"`{preset}`")
        rows += [[precision, ", ".join(names), *signs] for signs, names in presets.items()]
    yield from table(("precision", "`collectives=`", *AXES["device"]), rows)
    yield ""
    yield "Refused combinations, with the error message:"
    yield ""
    for conditions, combination in REFUSED.items():
        error = refusal(*combination)
        assert error is not None
        yield f"- If {conditions}: `{error.key}` wants {error.wants}"


def refusal(preset: str, precision: str, across: str | None = None) -> ConfigError | None:
    """Return the error for a combination, if it is refused.

    `across` replaces the format of gradients between nodes.
    """
    config = _config(f"collectives={preset}")
    formats: dict[str, object] = {"grads_across_format": across} if across else {}
    collectives = config.collectives.model_copy(update=formats)
    compute = config.precision.model_copy(update={"name": precision})
    try:
        check_support(config.model_copy(update={"collectives": collectives, "precision": compute}))
    except ConfigError as error:
        return error
    return None


def _sign(precision: str, preset: str, device: str) -> str:
    """Return the sign of a combination, which holds for all sharding factors and pipelines."""
    if refusal(preset, precision):
        return "refused"
    return "yes" if device in TESTED_DEVICES else "not run"


PAGES = {"docs/collectives.md": {"bytes": volumes, "support": support}}
