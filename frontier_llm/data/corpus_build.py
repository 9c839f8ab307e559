"""Run the stages of preparing a corpus, each on several worker processes.

The stages are: scan the source files, choose text for the tokenizer, tokenise the parts of the
source, and merge the parts. data/prepare.py calls them in this order.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType

from frontier_llm.config.data import CorpusConfig, DataConfig
from frontier_llm.data.corpus_manifest import (
    FILES_FILE,
    FORMAT,
    MANIFEST_FILE,
    Manifest,
)
from frontier_llm.data.corpus_parts import SPLITS, PartFiles, SkippedTexts, plan_parts
from frontier_llm.data.encoder import Encoder
from frontier_llm.data.part_merger import Merger, find_duplicates
from frontier_llm.data.part_writer import PartReader, PartWriter
from frontier_llm.data.source import Source
from frontier_llm.data.source_format import Scan
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.data.tokenizer_source import digest_tokenizer
from frontier_llm.data.worker_pool import run_jobs
from frontier_llm.errors import DataError

Progress = Callable[[str, float], None]
"""A function that is called with the name of a stage and its finished fraction, from 0 to 1."""


def scan_files(source: Source, workers: int, report: Progress) -> list[Scan]:
    """Read all files once; return the digest of each and the cuts, where it can be divided.

    Raises:
        DataError: a file cannot be read.
    """
    progress = _StageProgress("reading the sources", source.size, report)
    scans: dict[int, Scan] = {}
    for index, scan in run_jobs(source.scan, range(len(source.files)), workers):
        scans[index] = scan
        progress.add(source.files[index].size)
    return [scans[index] for index in range(len(source.files))]


@dataclass
class CorpusBuild:
    """Runs the stages that prepare one corpus.

    Attributes:
        corpus: configuration of the corpus.
        config: configuration that all corpora share.
        source: files of the corpus.
        scans: result of `scan_files`, one scan per file of the source.
        workers: number of processes.
        report: called with the progress of each stage.
    """

    corpus: CorpusConfig
    config: DataConfig
    source: Source
    scans: Sequence[Scan]
    workers: int
    report: Progress

    def __post_init__(self) -> None:
        self.parts = plan_parts(self.scans)
        self.reader = PartReader(self.source, {"refuse": False, "skip": True}[self.config.broken])

    def choose_texts(self, text_bytes: float) -> list[str]:
        """Return training documents for a tokenizer, about `text_bytes` bytes in total.

        A hash of its name decides whether a document is chosen, so every call chooses the same.

        Raises:
            DataError: there is no document for training, or none for validation.
        """
        percent = 100 * text_bytes / self.source.size
        validation_percent = self.config.validation_percent

        def choose(number: int) -> tuple[list[str], list[int]]:
            """Return the chosen texts of a part, and its documents per split."""
            texts, counts = [], [0, 0]
            for _, _, document in self.reader.documents(self.parts[number], SkippedTexts()):
                validation = document.is_validation(validation_percent)
                counts[validation] += 1
                if not validation and document.falls_in(percent, salt="tokenizer"):
                    texts.append(document.text)
            return texts, counts

        progress = self._progress("choosing text for the tokenizer")
        texts: dict[int, list[str]] = {}
        counts = [0, 0]
        for number, (chosen, part_counts) in run_jobs(choose, self._part_numbers, self.workers):
            texts[number] = chosen
            counts = [sum(pair) for pair in zip(counts, part_counts, strict=True)]
            progress.add(self.parts[number].size)
        self.check_splits(*counts)
        return [text for number in self._part_numbers for text in texts[number]]

    def tokenise(self, tokenizer: Tokenizer, files: PartFiles) -> None:
        """Tokenise and write all parts that are not done.

        Raises:
            DataError: the source cannot be used, or a worker was killed.
        """
        encoder = Encoder(tokenizer, _token_type(tokenizer))
        writer = PartWriter(self.reader, encoder, files, self.config.validation_percent)
        progress = self._progress("tokenising")
        missing = [number for number in self._part_numbers if not files.is_done(number)]
        progress.add(self._size(self._part_numbers) - self._size(missing))
        for number, _ in run_jobs(
            lambda number: writer.write(self.parts[number]), missing, self.workers
        ):
            progress.add(self.parts[number].size)

    def merge(self, tokenizer: Tokenizer, files: PartFiles, folder: Path) -> None:
        """Merge the parts into a folder that already holds the tokenizer, and write the manifest.

        Raises:
            DataError: a split is empty.
        """
        # counted in files: each part has one token file per split
        total = len(SPLITS) * len(self.parts)
        progress = _StageProgress("merging the parts", total, self.report)
        repeated = None
        if self.config.unique:
            repeated = find_duplicates(files, [len(files.rows(n)) for n in self._part_numbers])
        dtype = _token_type(tokenizer)
        merger = Merger(files, len(self.parts), dtype, repeated, lambda: progress.add(1))
        train, validation = (merger.write_split(split, folder) for split in range(len(SPLITS)))
        self.check_splits(train.documents, validation.documents)
        used = self._write_file_list(merger, folder / FILES_FILE)
        skipped = self._skipped(files)
        manifest = Manifest(
            format=FORMAT,
            name=self.corpus.name,
            kind=self.corpus.kind,
            source=str(self.source.root),
            source_sha256=self.source.digest(self.scans),
            files=len(self.source.files),
            skipped_files=len(self.source.files) - used,
            empty_documents=skipped.empty,
            broken_documents=skipped.broken,
            repeated_documents=sum(int(mask.sum()) for mask in repeated or ()),
            examples=tuple(skipped.examples),
            pieces=tokenizer.vocabulary,
            eod=tokenizer.eod,
            dtype="uint16" if dtype is np.uint16 else "int32",
            tokenizer_sha256=digest_tokenizer(folder),
            train=train,
            validation=validation,
        )
        (folder / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=2) + "\n")

    def check_splits(self, train: int, validation: int) -> None:
        """Raise a DataError if there are no documents for training or none for validation."""
        if not (train and validation):
            raise DataError(
                f"{self.source.root} has {train} documents for training and {validation} for "
                f"validation, at data.validation_percent={self.config.validation_percent}; both "
                "need some\n  do: add text, or raise data.validation_percent"
            )

    @property
    def _part_numbers(self) -> range:
        return range(len(self.parts))

    def _size(self, numbers: Iterable[int]) -> int:
        """Return the total size of some parts in bytes."""
        return sum(self.parts[number].size for number in numbers)

    def _progress(self, stage: str) -> "_StageProgress":
        """Return the progress of a stage that reads all parts, counted in bytes."""
        return _StageProgress(stage, self._size(self._part_numbers), self.report)

    def _skipped(self, files: PartFiles) -> SkippedTexts:
        """Return the counts of skipped texts of all parts.

        The list of examples begins with the files that hold no text.
        """
        skipped = SkippedTexts()
        for file, scan in zip(self.source.files, self.scans, strict=True):
            if not scan.cuts:
                skipped.add(SkippedTexts(examples=[f"{file.name}: {scan.problem}"]))
        for number in self._part_numbers:
            skipped.add(files.skipped(number))
        return skipped

    def _write_file_list(self, merger: Merger, path: Path) -> int:
        """Write one line per source file in order; return the number of files with documents."""
        count = len(self.source.files)
        train, validation = (merger.count_by_file(split, count) for split in range(len(SPLITS)))
        with path.open("w") as stream:
            for index, (file, scan) in enumerate(zip(self.source.files, self.scans, strict=True)):
                line = {
                    "name": file.name,
                    "bytes": file.size,
                    "sha256": scan.sha256,
                    "train": int(train[index]),
                    "validation": int(validation[index]),
                }
                stream.write(json.dumps(line) + "\n")
        return int(np.count_nonzero(train + validation))


@dataclass
class _StageProgress:
    """Counts the progress of one stage and reports it once per percent."""

    stage: str
    total: int
    report: Progress
    done: int = 0
    reported_percent: int = -1

    def add(self, amount: int) -> None:
        """Count a further `amount` of `total` as done."""
        self.done += amount
        percent = 100 * self.done // max(self.total, 1)
        if percent > self.reported_percent:
            self.reported_percent = percent
            self.report(self.stage, min(percent, 100) / 100)


def _token_type(tokenizer: Tokenizer) -> type[np.uint16] | type[np.int32]:
    """Return the smallest type of Megatron's format that can store every token id."""
    found: type[np.uint16] | type[np.int32] = DType.optimal_dtype(tokenizer.vocabulary)
    return found
