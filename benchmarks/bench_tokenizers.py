"""Compare the speed of preprocessing with tokenizers of several kinds, on the same text.

    python -m benchmarks.bench_tokenizers                        # 100 MB, 2 workers, 3 rounds
    python -m benchmarks.bench_tokenizers --quick --json bench.json

A contender is a tokenizer: a sentencepiece model that frontier-llm trained, and tokenizer.json
files that are built like those of GPT-2, Llama 3 and Qwen 2 (peers/tokenizer_families.py). All are
trained on the same part of the text, with the same size of vocabulary. A turn is the work of
frontier-llm preprocess in a new process. The text is the one of benchmarks.bench_preprocess: source
code and documentation of this machine, each file once.

After the rounds, the tokens of every document are compared with those of the contender's library,
which encodes whole documents in batches with as many threads. The columns "library MB/s" and
"differ" show how fast this is, and how many documents have other tokens. The libraries do not look
for special tokens in the text. A document with the character U+2581 is not compared for
sentencepiece, which would encode it as a blank. If a document differs, the exit code is 1.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset
from rich.box import HORIZONTALS
from rich.table import Table

from benchmarks.bench_options import bench_parser, parse_bench
from benchmarks.bench_preprocess import MEGA, Outcome, make_input, sample_texts, turn
from benchmarks.peers.preprocess_peers import prepare_input
from benchmarks.peers.tokenizer_families import FAMILIES, train_family
from benchmarks.testbed import machine
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import at_least, positive, run_command
from frontier_llm.data.corpus_parts import SPLITS
from frontier_llm.data.sentencepiece_tokenizer import SPACE_MARK, train_tokenizer
from frontier_llm.data.tokenizer_source import MODEL_FILE
from frontier_llm.units import MIB

BATCH_CHARACTERS = 2 * MIB
"""Size of the batches of documents that the libraries encode."""
QUICK = {"megabytes": 1.0, "rounds": 1, "vocabulary": 1000}
Encode = Callable[[list[str]], list[list[int]]]
"""A library's function that encodes a batch of documents."""


@dataclass
class Comparison:
    """Comparison of a corpus with the tokens of the library."""

    documents: int = 0
    """Number of documents that were compared."""
    differ: int = 0
    """Number of these documents that have other tokens."""
    text_bytes: int = 0
    """Size of these documents in UTF-8."""
    seconds: float = 0.0
    """Time that the library took to encode them."""

    def add(self, encode: Encode, texts: list[str], found: Sequence[Sequence[int]]) -> None:
        """Encode a batch of texts and compare the tokens with `found`."""
        start = time.perf_counter()
        wanted = encode(texts)
        self.seconds += time.perf_counter() - start
        self.documents += len(texts)
        self.text_bytes += sum(len(text.encode()) for text in texts)
        self.differ += sum(list(ours) != theirs for ours, theirs in zip(found, wanted, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, print and write its results; return 1 if a token differs."""
    options = _options(arguments)
    console = wide_console()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench_tokenizers_") as name:
        base = Path(name)
        text_bytes = make_input(base / "input.jsonl", options.megabytes * MEGA)
        console.print(f"{text_bytes / MEGA:.0f} MB of text, {options.workers} workers")
        folders = make_tokenizers(base, options.vocabulary)
        outcomes = {name: Outcome(name) for name in folders}
        for _ in range(options.rounds):
            for name, folder in folders.items():
                turn(outcomes[name], sys.executable, folder, options.workers, "ours")
        # all workers are forked before a library starts threads
        corpora = {
            name: prepare_input(folder, options.workers)
            for name, folder in folders.items()
            if not outcomes[name].error
        }
        comparisons = {
            name: compare(corpus, folders[name], options.workers)
            for name, corpus in corpora.items()
        }
    rows = [Row(outcome, comparisons.get(name)) for name, outcome in outcomes.items()]
    console.print(make_table(rows, text_bytes))
    if options.json:
        facts = {**machine.about(), "text_bytes": text_bytes, "workers": options.workers,
                 "vocabulary": options.vocabulary, "rows": list(map(asdict, rows))}  # fmt: skip
        options.json.write_text(json.dumps(facts, indent=1))
    return 0 if all(row.equal for row in rows) else 1


@dataclass
class Row:
    """Results of one contender."""

    outcome: Outcome
    comparison: Comparison | None
    """None if the contender failed."""

    @property
    def equal(self) -> bool:
        """Whether all documents were compared and have the tokens of the library."""
        found = self.comparison
        return found is not None and found.documents > 0 and found.differ == 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(
        __doc__, rounds=3, folder_for="in which to work", quick="1 MB of text, 1 round"
    )
    add = parser.add_argument
    add("--megabytes", type=positive, default=100, help="size of the text (default 100)")
    add("--workers", type=at_least(1), default=2, help="worker processes (default 2)")
    add("--vocabulary", type=at_least(300), default=32000, help="tokens (default 32000)")
    return parse_bench(parser, arguments, QUICK)


def make_tokenizers(base: Path, vocabulary: int) -> dict[str, Path]:
    """Train a tokenizer per contender on the first texts of the input.

    Returns:
        By the name of the contender, a folder with its tokenizer and a link to the input.
    """
    texts = sample_texts(base)
    folders = {}
    for name in ("sentencepiece", *FAMILIES):
        folders[name] = base / name
        folders[name].mkdir()
        (folders[name] / "input.jsonl").symlink_to(base / "input.jsonl")
        if name in FAMILIES:
            train_family(name, texts, vocabulary, folders[name])
        else:
            train_tokenizer(texts, vocabulary, folders[name] / MODEL_FILE)
    return folders


def compare(corpus: Path, folder: Path, threads: int) -> Comparison:
    """Compare the tokens of a prepared corpus with the tokens of the library.

    Args:
        corpus: folder of the corpus.
        folder: folder of the contender.
        threads: number of threads of the library.
    """
    is_model = (folder / MODEL_FILE).exists()
    encode = (load_sentencepiece if is_model else load_tokenizers)(folder, threads)
    comparison = Comparison()
    texts: list[str] = []
    found: list[list[int]] = []
    size = 0
    for text, tokens in documents(corpus, folder / "input.jsonl"):
        if not (is_model and SPACE_MARK in text):
            texts.append(text)
            found.append(tokens)
            size += len(text)
        if size >= BATCH_CHARACTERS:
            comparison.add(encode, texts, found)
            texts, found, size = [], [], 0
    comparison.add(encode, texts, found)
    return comparison


def documents(corpus: Path, source: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield the text of each document and its tokens, without the token that ends it."""
    places = [np.fromfile(corpus / f"{split}.places", dtype=np.int64) for split in SPLITS]
    tokens = [IndexedDataset(str(corpus / split)) for split in SPLITS]
    position = [0] * len(SPLITS)
    with source.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            for split in range(len(SPLITS)):
                at = position[split]
                if at < len(places[split]) and places[split][at] == number:
                    position[split] += 1
                    yield json.loads(line)["text"], tokens[split][at][:-1].tolist()
    assert position == [len(found) for found in places], "a document has no text in the input"


def load_sentencepiece(folder: Path, threads: int) -> Encode:
    """Return the function of sentencepiece that encodes a batch."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / MODEL_FILE))
    return partial(model.encode, num_threads=threads)


def load_tokenizers(folder: Path, threads: int) -> Encode:
    """Return the function of tokenizers that encodes a batch."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(threads)}
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True

    def encode(texts: list[str]) -> list[list[int]]:
        return [found.ids for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    return encode


def make_table(rows: Sequence[Row], text_bytes: int) -> Table:
    """Return the table; the ratio is the median over rounds of the time of sentencepiece / time."""
    table = Table(title="tokenizers", title_justify="left", box=HORIZONTALS, pad_edge=False)
    table.add_column("tokenizer")
    headings = ("seconds", "min..max", "CPU s", "MB/s", "speed / sentencepiece", "tokens",
                "peak MiB", "library MB/s", "documents", "differ")  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    first = rows[0].outcome
    for row in rows:
        outcome, found = row.outcome, row.comparison
        if found is None:
            table.add_row(outcome.name, f"failed: {outcome.error}")
            continue
        seconds = statistics.median(outcome.seconds)
        ratios = [a / b for a, b in zip(first.seconds, outcome.seconds, strict=False)]
        table.add_row(
            outcome.name,
            f"{seconds:.1f}",
            f"{min(outcome.seconds):.1f}..{max(outcome.seconds):.1f}",
            f"{statistics.median(outcome.cpu_seconds):.1f}",
            f"{text_bytes / seconds / MEGA:.1f}",
            f"{statistics.median(ratios):.2f}" if ratios else "-",
            f"{outcome.tokens:,}",
            f"{outcome.peak_bytes / MIB:.0f}",
            f"{found.text_bytes / found.seconds / MEGA:.1f}",
            f"{found.documents:,}",
            f"{found.differ:,}",
        )
    return table


if __name__ == "__main__":
    sys.exit(run_command(main))
