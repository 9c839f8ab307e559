"""Turn a source into a prepared corpus, once.

    <directory>/<name>-<digest12>/            the corpus (corpus_manifest.py); never incomplete
    <directory>/.<name>.lock                  lock that is held while preparing
    <directory>/.<name>-<fingerprint>         note: the folder prepared from files of these sizes
                                              and times
    <directory>/.<name>-<digest12>.partial    work in progress: corpus_parts.py, tokenizer.model

After a kill the next call continues from the finished parts; the lock ensures that one process at a
time uses them. If the file system has no locks, each process works in a separate folder
(`.<name>-<digest12>-<process>.partial`): the first process to finish renames its folder to the
corpus, and after a kill the work starts from the beginning.
"""

import errno
import fcntl
import glob
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from frontier_llm.config.data import CorpusConfig, DataConfig
from frontier_llm.data.corpus_build import CorpusBuild, Progress, scan_files
from frontier_llm.data.corpus_manifest import FORMAT, MANIFEST_FILE, TOKENIZER_FILE, Manifest
from frontier_llm.data.corpus_parts import PartFiles
from frontier_llm.data.source import Source, find_source
from frontier_llm.data.source_format import sha256_of
from frontier_llm.data.tokenizer import Tokenizer, train_tokenizer
from frontier_llm.data.worker_pool import WorkerDiedError, available_cores
from frontier_llm.errors import ConfigError, DataError
from frontier_llm.units import MIB

TOKENIZER_TEXT_BYTES = 32 * MIB
STALE_SECONDS = 7 * 24 * 3600


def prepare(
    config: DataConfig,
    on_progress: Progress | None = None,
    workers: int | None = None,
    corpus: CorpusConfig | None = None,
) -> Path:
    """Return the folder of a prepared corpus; prepare the corpus if the folder does not exist.

    Any number of processes may call this at once. A corpus whose sources have not changed is found
    without reading them. Only a kill leaves unfinished work, from which the next call continues.
    The result does not depend on the number of workers.

    Args:
        config: configuration of the source and of its preparation.
        on_progress: called with the progress of each stage.
        workers: number of processes; None: one per core.
        corpus: corpus of a blend to prepare; None: the only corpus.

    Raises:
        ConfigError: the corpus's name cannot be the name of a folder.
        DataError: the source is unusable, or the folder cannot be written.
    """
    if corpus is None:
        (corpus,) = config.sources
    if Path(corpus.name).name != corpus.name:
        raise ConfigError("data.name", corpus.name, "a name without slashes", "set data.name=text")
    report = on_progress or (lambda stage, fraction: None)
    return _Preparation(corpus, config, report, workers or available_cores()).run()


class _Preparation:
    """One call of `prepare`."""

    def __init__(
        self, corpus: CorpusConfig, config: DataConfig, report: Progress, workers: int
    ) -> None:
        self._corpus, self._config = corpus, config
        self._report, self._workers = report, workers
        self._directory = Path(config.directory)

    def run(self) -> Path:
        source = find_source(self._corpus, self._config)
        name = self._corpus.name
        note = self._directory / f".{name}-{self._digest(source.fingerprint())[:24]}"
        if folder := _noted(note):
            return folder
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with _lock(self._directory / f".{name}.lock", self._report) as locked:
                if not (folder := _noted(note)):
                    folder = self._find_or_build(source, locked)
                    _write_note(note, folder.name)
                return folder
        except OSError as error:
            raise DataError(
                f"cannot write a corpus to {self._directory}: {error.strerror or error}\n"
                "  do: free space or permit writing there, or set data.directory to another folder"
            ) from error

    def _digest(self, of_source: str) -> str:
        """Return a digest of a source's digest and of all settings that change the result."""
        config = self._config
        vocabulary = config.vocabulary if config.tokenizer is None else _digest_tokenizer(config)
        parts = (
            FORMAT, self._corpus.kind, config.text_key, vocabulary, config.validation_percent,
            config.broken, config.unique, of_source,
        )  # fmt: skip
        return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()

    def _find_or_build(self, source: Source, locked: bool) -> Path:
        """Scan the source and prepare it, unless the same content was prepared before."""
        scans = scan_files(source, self._workers, self._report)
        digest = self._digest(source.digest(scans))[:12]
        folder = self._directory / f"{self._corpus.name}-{digest}"
        if folder.is_dir():
            return _checked(folder)
        process = "" if locked else f"-{uuid.uuid4().hex[:12]}"
        partial = self._directory / f".{folder.name}{process}.partial"
        _sweep(self._directory, self._corpus.name)
        build = CorpusBuild(self._corpus, self._config, source, scans, self._workers, self._report)
        try:
            self._build(build, partial, folder)
        except WorkerDiedError:
            raise
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(partial, ignore_errors=True)
        return _checked(folder)

    def _build(self, build: CorpusBuild, partial: Path, folder: Path) -> None:
        partial.mkdir(exist_ok=True)
        path = partial / TOKENIZER_FILE
        if not path.exists():
            self._make_tokenizer(build, path)
        tokenizer = Tokenizer(path)
        files = PartFiles(partial)
        build.tokenise(tokenizer, files)
        merged = partial / f"merged-{uuid.uuid4().hex[:12]}"
        merged.mkdir()
        shutil.copyfile(path, merged / TOKENIZER_FILE)
        build.merge(tokenizer, files, merged)
        _rename(merged, folder)

    def _make_tokenizer(self, build: CorpusBuild, path: Path) -> None:
        """Copy the configured tokenizer, or train one."""
        draft = path.with_name(f"{path.name}-{uuid.uuid4().hex[:12]}")
        if self._config.tokenizer is not None:
            shutil.copyfile(self._config.tokenizer, draft)
        else:
            texts = build.choose_texts(TOKENIZER_TEXT_BYTES)
            self._report(f"training a tokenizer of {self._config.vocabulary} tokens", 0.0)
            train_tokenizer(texts, self._config.vocabulary, draft)
        draft.replace(path)


def _digest_tokenizer(config: DataConfig) -> str:
    """Return the digest of the configured tokenizer, which must have an end-of-sentence token."""
    assert config.tokenizer is not None
    path = Path(config.tokenizer)
    try:
        digest = sha256_of(path)
        eod = Tokenizer(path).eod
    except (OSError, DataError) as error:
        raise ConfigError(
            "data.tokenizer", path, f"a sentencepiece model: {error}", "set data.tokenizer=FILE"
        ) from error
    if eod < 0:
        raise ConfigError(
            "data.tokenizer",
            path,
            "a model with an end-of-sentence token, which will end documents",
            "train it with an eos_id, or set data.tokenizer=null to train one on the corpus",
        )
    return digest


def _noted(note: Path) -> Path | None:
    """Return the folder that a note names, if it still exists."""
    try:
        folder = note.parent / note.read_text()
    except OSError:
        return None
    return _checked(folder) if folder.is_dir() else None


def _write_note(note: Path, text: str) -> None:
    """Write a note atomically."""
    draft = note.with_name(f"{note.name}-{uuid.uuid4().hex[:12]}")
    draft.write_text(text)
    draft.replace(note)


def _checked(folder: Path) -> Path:
    Manifest.load(folder / MANIFEST_FILE).check_files(folder)
    return folder


@contextmanager
def _lock(path: Path, report: Progress) -> Iterator[bool]:
    """Hold a file's lock and yield True; yield False on a file system without locks."""
    with path.open("a") as stream:
        try:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report("waiting for another process that is preparing this corpus", 0.0)
                fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            locked = False
        else:
            locked = True
        yield locked


def _sweep(directory: Path, name: str) -> None:
    """Remove the work of processes killed long ago; younger work may still be continued."""
    for partial in directory.glob(f".{glob.escape(name)}-*.partial"):
        with suppress(FileNotFoundError):  # its process may have just finished
            if time.time() - partial.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(partial, ignore_errors=True)


def _rename(merged: Path, folder: Path) -> None:
    """Rename a finished folder, after its content is on disk, and sync the new name."""
    for path in (*merged.iterdir(), merged):
        _sync(path)
    try:
        merged.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    _sync(folder.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
