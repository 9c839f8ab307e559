"""The page docs/models_and_clusters.md: every model, cluster and experiment of `conf/`.

`python tools/tables.py` says whether the page is current; with `--write` it writes it.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontier_llm.config import RunConfig, decode
from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.config.model import ModelConfig
from frontier_llm.config.rules import data_size
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.geometry.layout import MIXED_BYTES, make_grid, predict_bytes, resolve_factors
from frontier_llm.geometry.partition import Factors
from frontier_llm.units import GIB, format_count
from tools.compose import CONF, compose, groups
from tools.marked_page import keep_current
from tools.options import ending

PAGE = CONF.parent / "docs" / "models_and_clusters.md"
BASES = ("gpt", "llama", "mt5")
"""Files of conf/model/ that lack dimensions: other models start from them."""
SEQUENCE_LENGTH = 2048
"""Rows of the learned position tables in the counts of the models' table."""


@dataclass(frozen=True)
class Header:
    """What the first comments of an experiment say."""

    title: str
    """The first sentence or two."""
    ranks: int
    """Ranks it is meant for (`# ranks: N`)."""
    run: str
    """The command that runs it (`# run: ...`)."""

    @classmethod
    def read(cls, path: Path) -> "Header":
        """Read the comments above the first key of conf/experiment/*.yaml.

        Raises:
            ValueError: no `ranks` or no `run` there.
        """
        comments = _comments(path)
        matches = [re.fullmatch(r"(\w+): (.+)", comment) for comment in comments]
        keyed = {match[1]: match[2] for match in matches if match}
        if not {"ranks", "run"} <= keyed.keys():
            raise ValueError(f"{path.name}: '# ranks: N' and '# run: COMMAND' belong on top")
        first = next(i for i, comment in enumerate(comments) if comment.startswith("ranks: "))
        return cls(
            title=" ".join(comments[:first]),
            ranks=int(keyed["ranks"]),
            run=keyed["run"],
        )


@cache
def composed(*overrides: str) -> RunConfig:
    """Compose and decode once; a configuration cannot be changed."""
    return decode(compose(overrides))


def models() -> list[str]:
    """Return the names of the models that can be built."""
    return [name for name in groups()["model"] if name not in BASES]


def factors_of(config: RunConfig, ranks: int) -> Factors:
    """Return the factors that cut the model states of a configuration on so many ranks."""
    return resolve_factors(config, make_grid(config, ranks, config.cluster.ranks_per_node))


def state_bytes(config: RunConfig, ranks: int) -> int:
    """Return the model states of the fullest rank in mixed precision, as the run holds them."""
    factors = factors_of(config, ranks)
    return max(
        sum(predict_bytes(config, stage, factors, MIXED_BYTES).values())
        for stage in range(config.parallel.pipeline)
    )


def page() -> str:
    """Write the page."""
    return "\n".join([*_introduction(), *_models(), *_experiments(), *_clusters(), ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or say whether it is current."""
    return keep_current(__doc__, "tools/tables.py", arguments, lambda: {PAGE: page()})


def _introduction() -> Iterator[str]:
    yield "# Models, experiments and clusters"
    yield ""
    yield "Written by `python tools/tables.py --write` from `conf/`; a test holds it current."
    yield ""


def _models() -> Iterator[str]:
    yield "## Models (`model=NAME`)"
    yield ""
    yield (
        "Parameters are counted from the shapes, each once, without padding, with "
        f"{SEQUENCE_LENGTH} rows where positions are learned."
    )
    yield ""
    rows = []
    for name in models():
        model = composed(f"model={name}").model
        title = " ".join(_comments(CONF / "model" / f"{name}.yaml"))
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
        "Each file of `conf/experiment` says in its first lines where it comes from, which "
        "figures are ours, and the command that runs it. All read the standard library's "
        "sources until `data=text data.path=FILE` names a corpus. The factors cut parameters, "
        "gradients and optimizer states; states are those of the fullest rank in mixed precision, "
        "with what is gathered for a while and without activations."
    )
    yield ""
    rows = []
    for name in groups()["experiment"]:
        header = Header.read(CONF / "experiment" / f"{name}.yaml")
        config = composed(f"experiment={name}")
        rows.append((f"`{name}`", *_layout(config, header)))
    columns = (
        "name|model|cluster|ranks|tensor x pipeline x data|sequence|global batch|"
        "micro-batches a replica|recompute|factors|states, GiB of device"
    )
    yield from _table(columns, rows)


def _layout(config: RunConfig, header: Header) -> tuple[object, ...]:
    data, parallel = config.data, config.parallel
    replicas = data_size(config, header.ranks)
    factors = factors_of(config, header.ranks)
    return (
        config.model.name,
        config.cluster.name,
        header.ranks,
        f"{parallel.tensor} x {parallel.pipeline} x {replicas}",
        data.sequence_length,
        data.global_batch,
        data.global_batch // (replicas * data.micro_batch),
        config.recompute,
        f"{factors.params}, {factors.grads}, {factors.optimizer}",
        f"{state_bytes(config, header.ranks) / GIB:.2f} of {config.cluster.device.memory_gib:g}",
    )


def _clusters() -> Iterator[str]:
    yield "## Clusters (`cluster=NAME`)"
    yield ""
    yield (
        "A rank is one device (on MI250X one GCD). Peaks are dense, by compute format; a dash is "
        "unknown or unsupported, and no MFU is printed for it. Links are gigabytes a second a "
        "rank in one direction, nearest first, with the ranks that share them."
    )
    yield ""
    clusters = [composed(f"cluster={name}").cluster for name in groups()["cluster"]]
    rows = [(f"`{cluster.name}`", *_hardware(cluster)) for cluster in clusters]
    columns = (
        "name|device|ranks a node|memory, GiB|memory, GB/s|fp32 TFLOP/s|bf16|fp16|links|"
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


def _comments(path: Path) -> list[str]:
    """Return the comments above the first key; a backslash joins a line to the next."""
    lines: list[str] = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        text = line.removeprefix("#").strip()
        if lines and lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\") + text
        elif not text.startswith("@package"):
            lines.append(text)
    return lines


if __name__ == "__main__":
    sys.exit(ending(main))
