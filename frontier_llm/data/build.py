"""The work of preparing a corpus, stage by stage, each dealt out to the workers."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType

from frontier_llm.config.data import CorpusConfig, DataConfig
from frontier_llm.data.corpus import Source
from frontier_llm.data.duplicates import find_duplicates
from frontier_llm.data.encoder import Encoder
from frontier_llm.data.formats import Scan, sha256_of
from frontier_llm.data.manifest import (
    FILES_FILE,
    FORMAT,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    Manifest,
)
from frontier_llm.data.merge import Merger
from frontier_llm.data.part_writer import PartWriter, Reader
from frontier_llm.data.parts import SPLITS, Leftovers, PartFiles, plan_parts
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.data.workers import work_through
from frontier_llm.errors import DataError

Progress = Callable[[str, float], None]
"""Told what is being done and the share of it that is, from 0 to 1."""


def scan_files(source: Source, workers: int, report: Progress) -> list[Scan]:
    """Read all files once: what they digest to, and where they can be cut.

    Raises:
        DataError: one cannot be read.
    """
    share = Share("reading the sources", source.size, report)
    scans: dict[int, Scan] = {}
    for index, scan in work_through(source.scan, range(len(source.files)), workers):
        scans[index] = scan
        share.add(source.files[index].size)
    return [scans[index] for index in range(len(source.files))]


@dataclass
class Build:
    """A corpus in the making.

    Attributes:
        corpus: which one.
        config: how it is treated.
        source: its files.
        scans: one a file.
        workers: processes.
        report: told how far it is.
    """

    corpus: CorpusConfig
    config: DataConfig
    source: Source
    scans: Sequence[Scan]
    workers: int
    report: Progress

    def __post_init__(self) -> None:
        self.parts = plan_parts(self.scans)
        self.reader = Reader(self.source, self.config.broken == "skip")

    def choose_texts(self, text_bytes: float) -> list[str]:
        """Choose training documents by their names, about `text_bytes` of them, evenly spread.

        Raises:
            DataError: a split would be empty.
        """
        percent = 100 * text_bytes / self.source.size
        validation_percent = self.config.validation_percent

        def choose(number: int) -> tuple[list[str], list[int]]:
            texts, counts = [], [0, 0]
            for _, _, document in self.reader.documents(self.parts[number], Leftovers()):
                validation = document.is_validation(validation_percent)
                counts[validation] += 1
                if not validation and document.falls_in(percent, salt="tokenizer"):
                    texts.append(document.text)
            return texts, counts

        share = self._share("choosing text for the tokenizer")
        texts: dict[int, list[str]] = {}
        counts = [0, 0]
        for number, (chosen, found) in work_through(choose, self._numbers, self.workers):
            texts[number] = chosen
            counts = [a + b for a, b in zip(counts, found, strict=True)]
            share.add(self.parts[number].size)
        self.check_splits(*counts)
        return [text for number in self._numbers for text in texts[number]]

    def tokenise(self, tokenizer: Tokenizer, files: PartFiles) -> None:
        """Write all parts that are not done.

        Raises:
            DataError: the source cannot be used, or a worker was killed.
        """
        encoder = Encoder(tokenizer, _token_type(tokenizer))
        writer = PartWriter(self.reader, encoder, files, self.config.validation_percent)
        share = self._share("tokenising")
        missing = [number for number in self._numbers if not files.is_done(number)]
        share.add(self._size(self._numbers) - self._size(missing))
        for number, _ in work_through(
            lambda number: writer.write(self.parts[number]), missing, self.workers
        ):
            share.add(self.parts[number].size)

    def merge(self, tokenizer: Tokenizer, files: PartFiles, folder: Path) -> None:
        """Put the parts together in a folder that holds the tokenizer, and write the manifest.

        Raises:
            DataError: a split is empty.
        """
        share = Share("putting the parts together", 2 * len(self.parts), self.report)
        repeated = None
        if self.config.unique:
            repeated = find_duplicates(files, [len(files.rows(n)) for n in self._numbers])
        dtype = _token_type(tokenizer)
        merger = Merger(files, len(self.parts), dtype, repeated, lambda: share.add(1))
        train, validation = (merger.write_split(split, folder) for split in range(len(SPLITS)))
        self.check_splits(train.documents, validation.documents)
        used = self._write_files(merger, folder / FILES_FILE)
        leftovers = self._leftovers(files)
        manifest = Manifest(
            format=FORMAT,
            name=self.corpus.name,
            kind=self.corpus.kind,
            source=str(self.source.root),
            source_sha256=self.source.digest(self.scans),
            files=len(self.source.files),
            skipped_files=len(self.source.files) - used,
            empty_documents=leftovers.empty,
            broken_documents=leftovers.broken,
            repeated_documents=sum(int(mask.sum()) for mask in repeated or ()),
            examples=tuple(leftovers.examples),
            pieces=tokenizer.vocabulary,
            eod=tokenizer.eod,
            dtype="uint16" if dtype is np.uint16 else "int32",
            tokenizer_sha256=sha256_of(folder / TOKENIZER_FILE),
            train=train,
            validation=validation,
        )
        (folder / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=2) + "\n")

    def check_splits(self, train: int, validation: int) -> None:
        """Refuse a corpus without documents for training, or for validation."""
        if not (train and validation):
            raise DataError(
                f"{self.source.root} has {train} documents for training and {validation} for "
                f"validation, at data.validation_percent={self.config.validation_percent}; both "
                "need some\n  do: add text, or raise data.validation_percent"
            )

    @property
    def _numbers(self) -> range:
        return range(len(self.parts))

    def _size(self, numbers: Iterable[int]) -> int:
        return sum(self.parts[number].size for number in numbers)

    def _share(self, what: str) -> "Share":
        return Share(what, self._size(self._numbers), self.report)

    def _leftovers(self, files: PartFiles) -> Leftovers:
        """Gather what was no document, files without any text first."""
        leftovers = Leftovers()
        for file, scan in zip(self.source.files, self.scans, strict=True):
            if not scan.cuts:
                leftovers.add(Leftovers(examples=[f"{file.name}: {scan.problem}"]))
        for number in self._numbers:
            leftovers.add(files.leftovers(number))
        return leftovers

    def _write_files(self, merger: Merger, path: Path) -> int:
        """Write a line a file, in the order of the documents; return how many have documents."""
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
class Share:
    """How much of a stage is done; tells it at most a hundred times."""

    what: str
    whole: int
    report: Progress
    done: int = 0
    told: int = -1

    def add(self, amount: int) -> None:
        """Count a part of `whole` as done."""
        self.done += amount
        percent = 100 * self.done // max(self.whole, 1)
        if percent > self.told:
            self.told = percent
            self.report(self.what, min(percent, 100) / 100)


def _token_type(tokenizer: Tokenizer) -> type[np.uint16] | type[np.int32]:
    found: type[np.uint16] | type[np.int32] = DType.optimal_dtype(tokenizer.vocabulary)
    return found
