"""A source made into token files, once.

    <directory>/<name>-<digest12>/      the corpus (manifest.py); complete as soon as it is there
    <directory>/.<name>.lock            held while preparing
    <directory>/.<name>-<fingerprint>   a note: sources of these sizes and times gave that folder
    <directory>/.<name>-<random>.partial    the work in progress

The lock only spares work: without one, two processes would both prepare, and one would find the
other's folder in place when it renames its own.
"""

import errno
import fcntl
import glob
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType

from frontier_llm.config.data import DataConfig
from frontier_llm.data.corpus import Source, find_source, sha256_of
from frontier_llm.data.manifest import FORMAT, MANIFEST_FILE, TOKENIZER_FILE, Manifest
from frontier_llm.data.split_writer import SplitWriter
from frontier_llm.data.tokenizer import train_tokenizer
from frontier_llm.errors import ConfigError, DataError
from frontier_llm.units import MIB

Progress = Callable[[str, float], None]
"""Told what is being done and the share of it that is, from 0 to 1."""

TOKENIZER_TEXT_BYTES = 32 * MIB
STALE_SECONDS = 7 * 24 * 3600


def prepare(config: DataConfig, on_progress: Progress | None = None) -> Path:
    """Return the folder of a prepared corpus; make it if it is not there.

    Any number of processes may call this at once. Nothing is left behind by a failure, and a
    corpus whose sources have not changed is found again without reading them.

    Args:
        config: the source and what matters of its treatment.
        on_progress: told how far it is.

    Raises:
        ConfigError: `data.name` cannot be a folder's name.
        DataError: the source is unusable, or the folder cannot be written.
    """
    if Path(config.name).name != config.name:
        raise ConfigError("data.name", config.name, "a name without slashes", "set data.name=text")
    source = find_source(config)
    directory = Path(config.directory)
    note = directory / f".{config.name}-{_digest(config, source.fingerprint())[:24]}"
    if folder := _noted(note):
        return folder
    report = on_progress or (lambda what, share: None)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory / f".{config.name}.lock", report):
            if not (folder := _noted(note)):
                folder = _find_or_build(config, source, report)
                _write_note(note, folder.name)
            return folder
    except OSError as error:
        raise DataError(
            f"cannot write a corpus to {directory}: {error.strerror or error}\n"
            "  do: free space or permit writing there, or set data.directory to another folder"
        ) from error


def _digest(config: DataConfig, of_source: str) -> str:
    """Digest a source together with the settings that decide what becomes of it."""
    parts = (FORMAT, config.kind, config.text_key, config.pieces, config.validation_percent)
    return hashlib.sha256("\0".join(map(str, (*parts, of_source))).encode()).hexdigest()


def _noted(note: Path) -> Path | None:
    """Return the folder a note names, if it is still there."""
    try:
        folder = note.parent / note.read_text()
    except OSError:
        return None
    return _checked(folder) if folder.is_dir() else None


def _write_note(note: Path, text: str) -> None:
    """Write a note that nobody can read half of."""
    draft = note.with_name(f"{note.name}-{uuid.uuid4().hex[:12]}")
    draft.write_text(text)
    draft.replace(note)


def _checked(folder: Path) -> Path:
    Manifest.load(folder / MANIFEST_FILE).check_files(folder)
    return folder


@contextmanager
def _lock(path: Path, report: Progress) -> Iterator[None]:
    """Hold a file's lock; do without on a file system that has none."""
    with path.open("a") as stream:
        try:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report("waiting for another process that prepares this corpus", 0.0)
                fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        yield


def _find_or_build(config: DataConfig, source: Source, report: Progress) -> Path:
    """Read the sources, and prepare them unless the same contents were prepared before."""
    steps = _Share("reading the sources", source.size, report)
    digest = source.digest(lambda file: steps.add(file.size))
    folder = Path(config.directory, f"{config.name}-{_digest(config, digest)[:12]}")
    if folder.is_dir():
        return _checked(folder)
    _sweep(folder.parent, config.name)
    partial = folder.with_name(f".{config.name}-{uuid.uuid4().hex[:12]}.partial")
    try:
        partial.mkdir()
        _build(config, source, digest, partial, report)
        _rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return _checked(folder)


def _sweep(directory: Path, name: str) -> None:
    """Remove what killed processes left; a young one may be another node's work in progress."""
    for partial in directory.glob(f".{glob.escape(name)}-*.partial"):
        with suppress(FileNotFoundError):  # its owner may just be done
            if time.time() - partial.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(partial, ignore_errors=True)


def _rename(partial: Path, folder: Path) -> None:
    """Put a finished folder in its place, on the disk and not only in its cache."""
    for path in (*partial.iterdir(), partial):
        _flush(path)
    try:
        partial.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    _flush(folder.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _build(config: DataConfig, source: Source, digest: str, folder: Path, report: Progress) -> None:
    texts = _tokenizer_texts(config, source, report)
    report(f"training a tokenizer of {config.pieces} pieces", 0.0)
    tokenizer = train_tokenizer(texts, config.pieces, folder / TOKENIZER_FILE)
    dtype = DType.optimal_dtype(tokenizer.vocabulary)
    with (
        SplitWriter(folder / "train", tokenizer, dtype) as train,
        SplitWriter(folder / "validation", tokenizer, dtype) as validation,
    ):
        files = _write_documents(config, source, train, validation, report)
        manifest = Manifest(
            format=FORMAT,
            name=config.name,
            kind=config.kind,
            source=str(source.root),
            source_sha256=digest,
            files=len(source.files),
            skipped_files=len(source.files) - files,
            pieces=tokenizer.vocabulary,
            eod=tokenizer.eod,
            dtype="uint16" if dtype is np.uint16 else "int32",
            tokenizer_sha256=sha256_of(folder / TOKENIZER_FILE),
            train=train.finish(),
            validation=validation.finish(),
        )
    (folder / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=2) + "\n")


def _tokenizer_texts(config: DataConfig, source: Source, report: Progress) -> list[str]:
    """Choose training documents by their names, about TOKENIZER_TEXT_BYTES, evenly spread.

    Raises:
        DataError: a split would be empty.
    """
    steps = _Share("choosing text for the tokenizer", source.size, report)
    percent = 100 * TOKENIZER_TEXT_BYTES / source.size
    texts: list[str] = []
    counts = [0, 0]
    for document in source.documents():
        validation = document.is_validation(config.validation_percent)
        counts[validation] += 1
        if not validation and document.falls_in(percent, salt="tokenizer"):
            texts.append(document.text)
        steps.reach(source, document.file)
    steps.reach(source, len(source.files))
    if not all(counts):
        raise DataError(
            f"{source.root} has {counts[0]} documents for training and {counts[1]} for validation, "
            f"at data.validation_percent={config.validation_percent}; both need some\n"
            "  do: add text, or raise data.validation_percent"
        )
    return texts


def _write_documents(
    config: DataConfig,
    source: Source,
    train: SplitWriter,
    validation: SplitWriter,
    report: Progress,
) -> int:
    """Write all documents; return how many files they came from."""
    steps = _Share("tokenising", source.size, report)
    files, last = 0, -1
    for document in source.documents():
        files += document.file != last
        last = document.file
        writer = validation if document.is_validation(config.validation_percent) else train
        writer.add(document)
        steps.reach(source, last)
    steps.reach(source, len(source.files))
    return files


@dataclass
class _Share:
    """How much of a stage is done; tells it at most a hundred times."""

    what: str
    whole: int
    report: Progress
    done: int = 0
    told: int = -1
    file: int = 0

    def add(self, amount: int) -> None:
        """Count a part of `whole` as done."""
        self.done += amount
        percent = 100 * self.done // max(self.whole, 1)
        if percent > self.told:
            self.told = percent
            self.report(self.what, min(percent, 100) / 100)

    def reach(self, source: Source, file: int) -> None:
        """Count all files before this one as done."""
        self.add(sum(source.files[index].size for index in range(self.file, file)))
        self.file = file
