"""Measure how long a run waits for data: to open a corpus at its start, and to read samples.

    python -m benchmarks.bench_data                       # 100 million documents, 2.6e11 tokens
    python -m benchmarks.bench_data --documents 1000000 --json bench.json

The corpus is synthetic: a manifest, a tokenizer, and sparse token and index files of full size. The
file system stores only the headers and the ends of these files. Samples are read twice. In the
first pass the file system fills pages with zeros, which may take longer than reading a disk. In the
second pass the pages are in memory, so that only the reader is measured. Start-up is measured in
new processes, from opening the manifest to the micro-batches of the first step, without imports. It
should not depend on the number of documents, because no index is built. One data-parallel replica
reads the samples, and no model runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from rich.box import HORIZONTALS
from rich.table import Table

from benchmarks.bench_options import bench_parser
from benchmarks.testbed import machine
from frontier_llm.cli.compose import compose
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import at_least, run_command
from frontier_llm.config import RunConfig, decode
from frontier_llm.data.corpora import open_all
from frontier_llm.data.corpus_manifest import (
    FILES_FILE,
    FORMAT,
    MANIFEST_FILE,
    Manifest,
    Split,
    idx_header,
)
from frontier_llm.data.run_loader import make_loader
from frontier_llm.data.sentencepiece_tokenizer import train_tokenizer
from frontier_llm.data.source_format import sha256_of
from frontier_llm.data.tokenizer_source import MODEL_FILE
from frontier_llm.errors import DataError
from frontier_llm.units import format_bytes, format_count

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT_TOKENS = 2600
"""Tokens per document."""
SEQUENCE_LENGTH = 2048
GLOBAL_BATCH = 64
READERS = {
    "GPT windows": ("data=stdlib",),
    "spans (T5)": ("data=stdlib_spans", "model=mt5_tiny"),
    "blend of 3": ("data=blend", "data.corpora=[{name: a, path: /a}, {name: b, path: /b}, "
                   "{name: c, path: /c}]"),
}  # fmt: skip
"""Overrides of each way to read samples."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, print and write its results, and return the exit code."""
    parser = bench_parser(__doc__, rounds=5, folder_for="in which to work")
    add = parser.add_argument
    add("--documents", type=at_least(1), default=10**8, help="default 100 million")
    add("--steps", type=at_least(1), default=20, help="number of steps to read (default 20)")
    add("--start-up", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.start_up:
        print(start_up(options.start_up))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench_data_") as name:
        folder = Path(name)
        manifest = make_corpus(folder, options.documents)
        seconds = [_fresh_start_up(folder) for _ in range(options.rounds)]
        speeds = {
            reader: [samples_per_second(folder, reader, options.steps) for _ in range(2)]
            for reader in READERS
        }
        stored = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    report(manifest, seconds, speeds, stored)
    if options.json:
        facts = {**machine.about(), "documents": options.documents, "tokens": manifest.train.tokens,
                 "start_up_seconds": seconds, "samples_per_second": speeds}  # fmt: skip
        options.json.write_text(json.dumps(facts, indent=1))
    return 0


def make_corpus(folder: Path, documents: int) -> Manifest:
    """Write a corpus of sparse files.

    Args:
        folder: folder of the corpus.
        documents: number of documents in the training split; validation has a thousandth of it.
    """
    tokenizer = train_tokenizer(["a corpus of holes\n" * 100], 300, folder / MODEL_FILE)
    splits = [
        _make_split(folder / "train", documents),
        _make_split(folder / "validation", max(documents // 1000, 1000)),
    ]
    (folder / FILES_FILE).write_text("")
    manifest = Manifest(
        format=FORMAT, name="holes", kind="text", source="nowhere", source_sha256="",
        account=None, pieces=tokenizer.vocabulary, eod=tokenizer.eod, dtype="uint16",
        tokenizer_sha256=sha256_of(folder / MODEL_FILE),
        train=splits[0], validation=splits[1],
    )  # fmt: skip
    (folder / MANIFEST_FILE).write_text(manifest.model_dump_json())
    return manifest


def _make_split(prefix: Path, documents: int) -> Split:
    """Write the token, index and position files of a split, with holes instead of content."""
    tokens = documents * DOCUMENT_TOKENS
    header = idx_header(np.uint16, documents)
    with prefix.with_suffix(".idx").open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + 12 * documents + 8 * (documents + 1))
        stream.seek(-8, os.SEEK_END)
        stream.write(documents.to_bytes(8, "little"))
    for suffix, size in ((".bin", 2 * tokens), (".places", 8 * documents)):
        with prefix.with_suffix(suffix).open("wb") as stream:
            stream.truncate(size)
    return Split(documents=documents, tokens=tokens, text_bytes=4 * tokens, bin_sha256=prefix.name)


def make_config(overrides: Sequence[str]) -> RunConfig:
    """Compose the configuration of a reader."""
    sizes = (f"data.sequence_length={SEQUENCE_LENGTH}", f"data.global_batch={GLOBAL_BATCH}",
             "data.micro_batch=4", "data.vocabulary=300")  # fmt: skip
    if "data=stdlib_spans" in overrides:  # T5 has sentinels for at most 100 spans
        sizes = ("data.sequence_length=1024", *sizes[1:])
    return decode(compose([*overrides, *sizes]))


def start_up(folder: Path) -> float:
    """Return the seconds from opening the manifest to the first step's micro-batches."""
    config = make_config(READERS["GPT windows"])
    start = time.perf_counter()
    corpora = open_all(config.data, [folder])
    with closing(make_loader(config, corpora, 0, 1, train=True)) as loader:
        loader.micro_batches(0)
        return time.perf_counter() - start


def _fresh_start_up(folder: Path) -> float:
    """Return the result of `start_up` in a new process.

    Raises:
        DataError: the process failed; its output has been printed.
    """
    command = [sys.executable, "-m", "benchmarks.bench_data", "--start-up", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, cwd=ROOT)
    if done.returncode:
        raise DataError(f"the start-up process ended with exit code {done.returncode}, see above")
    return float(done.stdout)


def samples_per_second(folder: Path, reader: str, steps: int) -> float:
    """Return the samples per second of reading consecutive steps, from the first."""
    config = make_config(READERS[reader])
    corpora = open_all(config.data, [folder] * len(config.data.sources))
    with closing(make_loader(config, corpora, 0, 1, train=True)) as loader:
        loader.micro_batches(0)
        start = time.perf_counter()
        for step in range(1, steps + 1):
            loader.micro_batches(step * GLOBAL_BATCH)
        return steps * GLOBAL_BATCH / (time.perf_counter() - start)


def report(
    manifest: Manifest, seconds: Sequence[float], speeds: dict[str, list[float]], stored: int
) -> None:
    """Print the results.

    Args:
        manifest: the corpus.
        seconds: start-up times, one per round.
        speeds: samples per second of the first and the second pass, by reader.
        stored: bytes that the file system has stored.
    """
    split = manifest.train
    console = wide_console()
    console.print(
        f"{format_count(split.documents)} documents, {format_count(split.tokens)} tokens "
        f"({format_bytes(2 * split.tokens)} of tokens, of which {format_bytes(stored)} stored)"
    )
    console.print(
        f"start-up to the first micro-batches: {statistics.median(seconds) * 1e3:.0f} ms "
        f"({min(seconds) * 1e3:.0f}..{max(seconds) * 1e3:.0f})"
    )
    table = Table(box=HORIZONTALS, pad_edge=False)
    table.add_column("samples read as")
    for column in ("samples/s, first pass", "second pass"):
        table.add_column(column, justify="right")
    for reader, of_passes in speeds.items():
        table.add_row(reader, *(f"{speed:,.0f}" for speed in of_passes))
    console.print(table)


if __name__ == "__main__":
    sys.exit(run_command(main))
