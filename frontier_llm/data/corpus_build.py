"""Run the stages of preparing a corpus, each on several worker processes.

The stages are: scan the source files, choose text for the tokenizer, tokenise the parts of the
source, and merge the parts. data/prepare.py calls them in this order.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from frontier_llm.config.data import CorpusConfig, DataConfig
from frontier_llm.data.corpus_manifest import (
    BROKEN,
    FILES_FILE,
    FORMAT,
    MANIFEST_FILE,
    Account,
    Manifest,
    Tally,
    TextCounts,
    printable,
    write_digests,
)
from frontier_llm.data.corpus_parts import (
    SPLITS,
    Merger,
    PartFiles,
    PartReader,
    PartWriter,
    SkippedTexts,
    find_duplicates,
    plan_parts,
)
from frontier_llm.data.source import Source
from frontier_llm.data.source_choice import CONTENT_DECIDES, check_left_out, files_without_text
from frontier_llm.data.source_format import Scan, sha256_of
from frontier_llm.data.tokenizer import Encoder, Tokenizer
from frontier_llm.data.tokenizer_source import digest_tokenizer
from frontier_llm.data.worker_pool import run_jobs
from frontier_llm.errors import DataError
from frontier_llm.units import counted

MISSING_SHARE = 0.05
"""Largest share of the characters that may be lost or unknown. A tokenizer without bytes misses a
few rare signs of a text in its own language, and most of a text in another script."""
MERGING = "merging the parts"
Progress = Callable[[str, float], None]
"""A function that is called with the name of a stage and its finished fraction, from 0 to 1."""


def scan_files(source: Source, config: DataConfig, workers: int, report: Progress) -> list[Scan]:
    """Read all files once; return the digest of each and the cuts, where it can be divided.

    Raises a DataError if files changed, or are damaged and data.broken does not skip them.
    """

    def scan_one(index: int) -> Scan | str:
        try:
            return source.scan(index)
        except DataError as error:
            return str(error)

    progress = _StageProgress("reading the sources", source.size, report)
    scans: dict[int, Scan] = {}
    problems: dict[int, str] = {}
    for index, scan in run_jobs(scan_one, range(len(source.files)), workers):
        if isinstance(scan, str):
            problems[index] = scan
            digest = ""
            with suppress(OSError):
                digest = sha256_of(source.files[index].path)
            scan = Scan(digest, (), scan.partition("\n")[0])
        scans[index] = scan
        progress.add(source.files[index].size)
    refuses = source.single or config.broken == "refuse"
    source.refuse_changed(index for index, scan in scans.items() if refuses or scan.cuts)
    if problems and refuses:
        if len(problems) == 1:
            raise DataError(*problems.values())
        source.refuse([problems[index] for index in sorted(problems)], "repair them")
    return [scans[index] for index in range(len(source.files))]


@dataclass
class CorpusBuild:
    """Runs the stages that prepare one corpus."""

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
        """
        percent = 100 * text_bytes / self.source.size
        validation_percent = self.config.validation_percent

        def choose(number: int) -> tuple[list[str], list[int], SkippedTexts]:
            """Return the chosen texts of a part, its documents per split, and what it skips."""
            texts, counts, skipped = [], [0, 0], SkippedTexts()
            for _, _, document in self.reader.documents(self.parts[number], skipped):
                validation = document.is_validation(validation_percent)
                counts[validation] += 1
                if not validation and document.falls_in(percent, salt="tokenizer"):
                    texts.append(document.text)
            return texts, counts, skipped

        progress = self._progress("choosing text for the tokenizer")
        texts: dict[int, list[str]] = {}
        counts, all_skipped = [0, 0], SkippedTexts()
        found = run_jobs(choose, self._part_numbers, self.workers)
        for number, (chosen, part_counts, skipped) in found:
            texts[number] = chosen
            all_skipped.add(skipped)
            counts = [sum(pair) for pair in zip(counts, part_counts, strict=True)]
            progress.add(self.parts[number].size)
        self.check_splits(counts[0], counts[1], all_skipped)
        return [text for number in self._part_numbers for text in texts[number]]

    def tokenise(self, tokenizer: Tokenizer, files: PartFiles) -> None:
        """Tokenise and write all parts that are not done."""
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
        """Merge the parts into a folder that holds the tokenizer, and write the manifest."""
        # counted in files: each part has one token file per split
        total = len(SPLITS) * len(self.parts)
        progress = _StageProgress(MERGING, total, self.report)
        repeated = None
        if self.config.unique:
            repeated = find_duplicates(files, [len(files.rows(n)) for n in self._part_numbers])
        dtype = _token_type(tokenizer)
        merger = Merger(files, len(self.parts), dtype, repeated, lambda: progress.add(1))
        train, validation = (merger.write_split(split, folder) for split in range(len(SPLITS)))
        self.check_splits(train.documents, validation.documents, self._skipped(files))
        self._write_file_list(merger, folder / FILES_FILE)
        copies = sum(int(mask.sum()) for mask in repeated or ())
        self.source.refuse_changed(index for index, scan in enumerate(self.scans) if scan.cuts)
        account = self._account(files, train.documents + validation.documents, copies)
        manifest = Manifest(
            format=FORMAT,
            name=self.corpus.name,
            kind=self.corpus.kind,
            source=printable(str(self.source.root)),
            source_sha256=self.source.digest(self.scans),
            account=account,
            pieces=tokenizer.vocabulary,
            eod=tokenizer.eod,
            dtype="uint16" if dtype is np.uint16 else "int32",
            tokenizer_sha256=digest_tokenizer(folder),
            train=train,
            validation=validation,
        )
        write_digests(folder)
        (folder / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=2) + "\n")

    def check_splits(self, train: int, validation: int, skipped: SkippedTexts) -> None:
        """Raise a DataError if there are no documents for training or none for validation."""
        percent = self.config.validation_percent
        if not (train or validation) and skipped.broken:
            raise DataError(
                f"there is no text in {self.source.root}: {counted(skipped.broken, 'document')} "
                f"left out, such as {skipped.examples[0]}\n"
                "  do: repair them, or set data.text_key to the field that holds the text"
            )
        if not (train and validation):
            other, without = self._dividing_percent(), ""
            if skipped.broken:
                without = (
                    f". {counted(skipped.broken, 'document')} left out, such as "
                    f"{skipped.examples[0]}: repair them, or set data.text_key to that of the text"
                )
            raise DataError(
                f"{self.source.root} has {counted(train, 'document')} for training and "
                f"{validation} for validation, at data.validation_percent={percent}; both need "
                "some. A hash of its name decides for each document, so few documents may all "
                "fall on one side\n"
                f"  do: add text, to about {max(100, round(500 / percent)):,} documents"
                + (f", or set data.validation_percent={other:g}" if other is not None else "")
                + without
            )

    def _dividing_percent(self) -> float | None:
        """Return a value of data.validation_percent that leaves no split empty, if there is one."""
        first: dict[str, float] = {}  # of equal texts, the first is kept
        for part in self.parts:
            for _, _, document in self.reader.documents(part, SkippedTexts()):
                key = document.text if self.config.unique else document.name
                first.setdefault(key, document.validation_from())
        percent = (math.floor(10 * min(first.values(), default=50)) + 1) / 10
        return percent if percent <= min(49.9, max(first.values(), default=0)) else None

    @property
    def _part_numbers(self) -> range:
        return range(len(self.parts))

    def _size(self, numbers: Iterable[int]) -> int:
        return sum(self.parts[number].size for number in numbers)

    def _progress(self, stage: str) -> "_StageProgress":
        return _StageProgress(stage, self._size(self._part_numbers), self.report)

    def check_files(self) -> None:
        """Refuse damaged files and a large part in another format, unless they are skipped."""
        if self.config.broken == "skip":
            return
        unread = files_without_text(self.source.files, self.scans, self.config.format)
        problems = [f"{file.path}: {problem}" for file, why, problem in unread if why == BROKEN]
        self.source.refuse(
            problems,
            "convert them to UTF-8: iconv -f ENCODING -t utf-8 FILE > NEW_FILE, and read the "
            "result, because a wrong ENCODING (cp1252 and cp1251 are common) gives other letters "
            "without an error; or remove them",
        )
        if self.config.format in CONTENT_DECIDES:
            left_out, read = self._files_left_out()
            check_left_out(self.source.root, left_out, read.bytes)

    def _files_left_out(self) -> tuple[dict[str, Tally], Tally]:
        """Return the files that are left out, by reason, and the files that are read."""
        left_out = {r: tally.model_copy(deep=True) for r, tally in self.source.left_out.items()}
        unread = set[str]()
        for file, reason, problem in files_without_text(
            self.source.files, self.scans, self.config.format
        ):
            unread.add(file.name)
            left_out.setdefault(reason, Tally()).add(f"{file.name} ({problem})", file.size)
        read = Tally()
        for file in self.source.files:
            if file.name not in unread:
                read.add(file.name, file.size)
        return left_out, read

    def _skipped(self, files: PartFiles) -> SkippedTexts:
        skipped = SkippedTexts()
        for number in self._part_numbers:
            skipped.add(files.skipped(number))
        return skipped

    def _account(self, files: PartFiles, kept: int, repeated: int) -> Account:
        """Return the account of the source, after a check of the characters."""
        skipped = self._skipped(files)
        if self.config.broken == "refuse":
            _check_characters(skipped.text, self.source.root, self.config.tokenizer)
        left_out, read = self._files_left_out()
        found = Tally()
        for tally in (read, *left_out.values()):
            found.add_all(tally)
        account = Account(
            found=found,
            read=read,
            left_out=left_out,
            marked_files=sum(file.detected.is_marked for file in self.source.files),
            documents=kept + repeated + skipped.empty + skipped.broken,
            empty_documents=skipped.empty,
            broken_documents=skipped.broken,
            repeated_documents=repeated,
            examples=skipped.examples,
            text=skipped.text,
        )
        account.check(kept)
        return account

    def _write_file_list(self, merger: Merger, path: Path) -> None:
        """Write one line per source file, in order."""
        count = len(self.source.files)
        train, validation = (merger.count_by_file(split, count) for split in range(len(SPLITS)))
        with path.open("w") as stream:
            for index, (file, scan) in enumerate(zip(self.source.files, self.scans, strict=True)):
                line = {
                    "name": file.name,
                    "bytes": file.size,
                    "sha256": scan.sha256,
                    "format": file.detected.format,
                    "train": int(train[0, index]),
                    "validation": int(validation[0, index]),
                    "text_bytes": int(train[1, index] + validation[1, index]),
                }
                stream.write(json.dumps(line) + "\n")


@dataclass
class _StageProgress:
    """Counts the progress of one stage and reports it once per percent."""

    stage: str
    total: int
    report: Progress
    done: int = 0
    reported_percent: int = -1

    def __post_init__(self) -> None:
        self.add(0)  # shows the stage before its first file or part is done

    def add(self, amount: int) -> None:
        """Count a further `amount` of `total` as done."""
        self.done += amount
        percent = 100 * self.done // max(self.total, 1)
        if percent > self.reported_percent:
            self.reported_percent = percent
            self.report(self.stage, min(percent, 100) / 100)


def _check_characters(text: TextCounts, root: Path, tokenizer: str | None) -> None:
    """Refuse a text that the tokenizer cannot represent."""
    missing = text.lost + text.unknown
    if missing > MISSING_SHARE * text.characters:
        raise DataError(
            f"the tokenizer {tokenizer} cannot represent {missing / text.characters:.1%} of the "
            f"{text.characters:,} characters in {root}: {text.lost:,} have no token and "
            f"{text.unknown:,} are in {text.unknown_tokens:,} unknown tokens\n"
            "  do: set data.tokenizer to a tokenizer for this text that falls back to bytes, or to "
            "null to train one; data.broken=skip goes on without these characters"
        )


def _token_type(tokenizer: Tokenizer) -> type[np.uint16] | type[np.int32]:
    """Return the smallest type of Megatron's format that can store every token id."""
    from megatron.core.datasets.indexed_dataset import DType  # imports torch

    found: type[np.uint16] | type[np.int32] = DType.optimal_dtype(tokenizer.vocabulary)
    return found
