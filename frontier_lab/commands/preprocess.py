"""Tokenize text into a corpus: `frontier-llm preprocess [--workers N] data=text data.path=PATH`.

PATH is a file, or a folder of files: text, JSON lines, JSON, Parquet, CSV or TSV, also compressed.
What was read and what was left out is printed at the end. The keys `data.*` are the same as for
frontier-llm train, which finds the corpus again if their values are the same (docs/data.md). If the
command is killed, the next call continues with the parts that are missing. The corpus does not
depend on the number of worker processes.
"""

import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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

from frontier_llm.cli.compose import configured, differs
from frontier_llm.cli.console import plain_table, wide_console
from frontier_llm.cli.group_files import key_of
from frontier_llm.cli.options import at_least, tool_parser
from frontier_llm.config.data import DataConfig
from frontier_llm.config.reading import check_files, check_sources
from frontier_llm.data.corpora import prepare_all
from frontier_llm.data.corpus_build import MERGING
from frontier_llm.data.corpus_manifest import MANIFEST_FILE, Account, Manifest, Tally
from frontier_llm.data.packing import describe_padding, packing_of
from frontier_llm.data.prepared_corpus import streams
from frontier_llm.units import MIB, counted, format_bytes, format_count, format_seconds

_READ = ("data", "experiment")
"""Sections and groups whose overrides change corpora."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the corpora of the command line and print their sizes; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument(
        "--workers", type=at_least(1), help="worker processes (default: one per core)"
    )
    parser.add_argument("overrides", nargs="*", metavar="data.KEY=VALUE", help="as for train")
    options = parser.parse_intermixed_args(arguments)
    console = wide_console()
    composed = configured(options.overrides)
    warn_of_unused(composed.values, options.overrides)
    config = composed.config
    check_files(config)
    check_sources(config.data)  # training checks whether the model can read the corpora
    start = time.perf_counter()
    folders, is_new = preprocess(config.data, options.workers, console)
    seconds = time.perf_counter() - start
    show(folders, config.data.validation_percent, console)
    if config.data.packing == "best_fit":
        show_packing(folders, config.data, console)
    manifests = [Manifest.load(folder / MANIFEST_FILE) for folder in folders]
    print(throughput(manifests, seconds) if is_new else "already prepared")
    return 0


def warn_of_unused(values: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Print which overrides of other sections than `data` do not change the corpora."""
    others = [word for word in overrides if key_of(word).partition(".")[0] not in _READ]
    read = [word for word in overrides if word not in others]
    if others and not differs(read, "data", values):
        print(
            f"{', '.join(others)}: without effect, because preprocess reads only data.*",
            file=sys.stderr,
        )


class Stages:
    """Progress bars, one for each stage of the preparation of each corpus."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task: TaskID | None = None
        self._stage, self._share_done = "", 0.0
        self.has_prepared = False

    def show(self, stage: str, share_done: float) -> None:
        """Update the bar of a stage. If the share decreases, the next corpus has begun."""
        if self._task is None or stage != self._stage or share_done < self._share_done:
            self.end()
            self._task = self._bars.add_task(stage, total=1.0)
        self._stage, self._share_done = stage, share_done
        self.has_prepared |= stage == MERGING
        self._bars.update(self._task, completed=share_done, refresh=True)

    def end(self) -> None:
        """Fill the bar of the last stage, because some stages report no end."""
        if self._task is not None:
            self._bars.update(self._task, completed=1.0, refresh=True)


def preprocess(
    config: DataConfig, workers: int | None, console: Console
) -> tuple[tuple[Path, ...], bool]:
    """Prepare all corpora and show the progress; return their folders, and whether any is new."""
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TaskProgressColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    # without a thread that refreshes the bars, because this process forks its workers
    with Progress(*columns, *times, console=console, auto_refresh=False) as bars:
        stages = Stages(bars)
        folders = prepare_all(config, stages.show, workers)
        stages.end()
        return folders, stages.has_prepared


def show(folders: Sequence[Path], validation_percent: float, console: Console) -> None:
    """Print the sizes of the corpora, and the number of documents that were left out."""
    for folder in folders:
        manifest = Manifest.load(folder / MANIFEST_FILE)
        numbers = ("documents", "tokens", "text", "bytes per token")
        table = plain_table(str(folder), ("split", *numbers), right=numbers)
        for name, split in (("train", manifest.train), ("validation", manifest.validation)):
            table.add_row(
                name,
                f"{split.documents:,}",
                f"{split.tokens:,}",
                format_bytes(split.text_bytes),
                f"{split.text_bytes / split.tokens:.2f}",
            )
        console.print(table)
        show_account(manifest, validation_percent, console)


def show_account(manifest: Manifest, validation_percent: float, console: Console) -> None:
    """Print what was read from the source of a corpus, and what was left out."""
    rows = list(account_rows(manifest, validation_percent))
    width = max(len(amount) for amount, _ in rows)
    for amount, what in rows:
        line = f"{amount:>{width}}  {what}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def account_rows(manifest: Manifest, validation_percent: float) -> Iterator[tuple[str, str]]:
    """Yield (amount, what) for each line of the table of a corpus's account."""
    account = manifest.account
    assert account is not None
    yield _files(account.found), "found"
    yield _files(account.read), "read"
    yield _row(account.documents, "document", "found in them")
    for name, split in (("training", manifest.train), ("validation", manifest.validation)):
        yield _row(split.documents, "document", f"for {name}")
    rows = list(_left_out(account))
    yield from rows or [("0", "nothing left out")]
    for example in account.examples:
        yield "", example
    if account.text.byte_tokens:
        share = f"{account.text.byte_share:.2%} of the text"
        yield _row(account.text.byte_tokens, "byte", f"with a token of its own, {share}")
    for warning in manifest.warnings(validation_percent):
        yield "warning", warning


def _left_out(account: Account) -> Iterator[tuple[str, str]]:
    """Yield (count, what was left out or changed) for all counts that are not 0."""
    for reason, tally in account.left_out.items():
        names = ", ".join(tally.examples)
        more = " ..." if tally.files > len(tally.examples) else ""
        yield _files(tally), f"left out, {reason}: {names}{more}"
    unknown_tokens = counted(account.text.unknown_tokens, "unknown token", ",")
    for count, noun, what in (
        (account.marked_files, "file", "divided at <|endoftext|>, which is left out"),
        (account.empty_documents, "document", "left out, empty"),
        (account.repeated_documents, "document", "left out, repeated"),
        (account.broken_documents, "document", "left out, not text"),
        (account.text.lost, "character", "without a token"),
        (account.text.unknown, "character", f"in {unknown_tokens}"),
        (account.text.changed, "character", "dropped or replaced by the tokenizer"),
        (account.text.end_marks, "mark", "such as <|endoftext|> in documents, as ordinary text"),
        (account.text.ends, "token", "of the end of a document in a text, which is divided there"),
        (account.text.replaced, "surrogate", "without its other half, replaced by U+FFFD"),
    ):
        if count:
            yield _row(count, noun, what)


def _row(count: int, noun: str, what: str) -> tuple[str, str]:
    amount, _, nouns = counted(count, noun, ",").partition(" ")
    return amount, f"{nouns} {what}"


def _files(tally: Tally) -> str:
    return f"{counted(tally.files, 'file', ',')}, {counted(tally.bytes, 'byte', ',')}"


def show_packing(folders: Sequence[Path], data: DataConfig, console: Console) -> None:
    """Print how many samples the documents of each split fill."""
    for stream in itertools.chain.from_iterable(map(streams, folders)):
        packing = packing_of(stream, data)
        console.print(
            f"{stream.prefix}: {counted(len(packing), 'sample', ',')} of "
            f"{data.sequence_length:,} tokens, {describe_padding([packing], data)}",
            highlight=False,
            soft_wrap=True,
        )


def throughput(manifests: Sequence[Manifest], seconds: float) -> str:
    """Return a line with the duration and the throughput, for the corpora of `manifests`."""
    splits = [split for manifest in manifests for split in (manifest.train, manifest.validation)]
    tokens = sum(split.tokens for split in splits)
    text_bytes = sum(split.text_bytes for split in splits)
    return (
        f"{format_seconds(seconds)}: {format_count(tokens / seconds)} tokens/s, "
        f"{text_bytes / seconds / MIB:.1f} MiB/s of text"
    )
