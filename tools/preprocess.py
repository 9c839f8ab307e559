"""Turn text into token files: `python tools/preprocess.py [--workers N] data=text data.path=PATH`.

PATH is a file or a folder of text, .jsonl, .jsonl.gz, .jsonl.zst or .parquet. Takes the `data.`
keys that train.py takes, and train.py with the same ones finds what was made (docs/data.md). May
be killed at any time: the next call goes on from the parts that are finished. What is made does
not depend on the number of workers.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.box import HORIZONTALS
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from frontier_llm.config import decode
from frontier_llm.config.data import DataConfig
from frontier_llm.config.reading import check_sources
from frontier_llm.data.corpora import prepare_all
from frontier_llm.data.manifest import MANIFEST_FILE, Manifest
from frontier_llm.units import MIB, format_bytes, format_count, format_seconds
from tools.compose import compose
from tools.console import wide_console
from tools.options import INTERRUPTED, at_least, ending, tool_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare what the command line says; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument("--workers", type=at_least(1), help="processes (default: one a core)")
    parser.add_argument("overrides", nargs="*", metavar="data.KEY=VALUE", help="as for train.py")
    options = parser.parse_intermixed_args(arguments)
    console = wide_console()
    config = decode(compose(options.overrides))
    check_sources(config.data)  # which model reads them is seen when it trains
    start = time.perf_counter()
    try:
        folders = preprocess(config.data, options.workers, console)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from what is finished", file=sys.stderr)
        return INTERRUPTED
    seconds = time.perf_counter() - start
    show(folders, console)
    manifests = [Manifest.load(folder / MANIFEST_FILE) for folder in folders]
    print(throughput(manifests, seconds))
    return 0


class Stages:
    """A bar for each stage, one below the other."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task: TaskID | None = None
        self._what, self._share = "", 0.0

    def show(self, what: str, share: float) -> None:
        """Move the bar of a stage; one that goes back is the next corpus's."""
        if self._task is None or what != self._what or share < self._share:
            self._task = self._bars.add_task(what, total=1.0)
        self._what, self._share = what, share
        self._bars.update(self._task, completed=share, refresh=True)


def preprocess(config: DataConfig, workers: int | None, console: Console) -> tuple[Path, ...]:
    """Prepare all corpora, and show how far it is.

    Raises:
        FrontierError: a source is unusable.
    """
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TaskProgressColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    # no refresher thread: this process forks its workers
    with Progress(*columns, *times, console=console, auto_refresh=False) as bars:
        return prepare_all(config, Stages(bars).show, workers)


def show(folders: Sequence[Path], console: Console) -> None:
    """Print what the corpora hold, and what was left out of them."""
    for folder in folders:
        manifest = Manifest.load(folder / MANIFEST_FILE)
        table = Table(title=str(folder), title_justify="left", box=HORIZONTALS)
        for heading in ("split", "documents", "tokens", "text", "bytes a token"):
            table.add_column(heading, justify="left" if heading == "split" else "right")
        for name, split in (("train", manifest.train), ("validation", manifest.validation)):
            table.add_row(
                name,
                f"{split.documents:,}",
                f"{split.tokens:,}",
                format_bytes(split.text_bytes),
                f"{split.text_bytes / split.tokens:.2f}",
            )
        console.print(table)
        console.print(_left_out(manifest), highlight=False, markup=False)


def throughput(manifests: Sequence[Manifest], seconds: float) -> str:
    """Say how much was made in how long, all stages together."""
    splits = [split for manifest in manifests for split in (manifest.train, manifest.validation)]
    tokens = sum(split.tokens for split in splits)
    text_bytes = sum(split.text_bytes for split in splits)
    return (
        f"{format_seconds(seconds)}: {format_count(tokens / seconds)} tokens/s, "
        f"{text_bytes / seconds / MIB:.1f} MiB/s of text"
    )


def _left_out(manifest: Manifest) -> str:
    """Name what is no document."""
    counts = (
        (manifest.skipped_files, f"of {manifest.files} files without any document"),
        (manifest.empty_documents, "empty documents"),
        (manifest.repeated_documents, "documents that were there before"),
        (manifest.broken_documents, "documents that are no text"),
    )
    said = [f"{count:,} {what}" for count, what in counts if count]
    if not said:
        return f"nothing left out of {manifest.files} files"
    return "\n".join(["left out: " + ", ".join(said), *(f"  {e}" for e in manifest.examples)])


if __name__ == "__main__":
    sys.exit(ending(main))
