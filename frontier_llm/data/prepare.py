"""A source made into token files, once.

    <directory>/<name>-<digest12>/      the corpus (manifest.py); complete as soon as it is there
    <directory>/.<name>.lock            held while preparing
    <directory>/.<name>-<fingerprint>   a note: sources of these sizes and times gave that folder
    <directory>/.<name>-<digest12>.partial    the work in progress: parts.py, and tokenizer.model

Work that was killed goes on from its finished parts, which the lock keeps to one process at a
time. Where the file system has no locks, each process works in a folder of its own
(`.<name>-<digest12>-<process>.partial`): the first to be done gives the corpus its folder, and work
that was killed starts over.
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
from frontier_llm.data.build import Build, Progress, scan_files
from frontier_llm.data.corpus import Source, find_source
from frontier_llm.data.formats import sha256_of
from frontier_llm.data.manifest import FORMAT, MANIFEST_FILE, TOKENIZER_FILE, Manifest
from frontier_llm.data.parts import PartFiles
from frontier_llm.data.tokenizer import Tokenizer, train_tokenizer
from frontier_llm.data.workers import WorkerDiedError, available
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
    """Return the folder of a prepared corpus; make it if it is not there.

    Any number of processes may call this at once. Only being killed leaves something behind, which
    the next call goes on from; a corpus whose sources have not changed is found again without
    reading them. What is made does not depend on the number of workers.

    Args:
        config: the source and what matters of its treatment.
        on_progress: told how far it is.
        workers: processes; None = as many as there are cores.
        corpus: which of a blend's; None = the only one.

    Raises:
        ConfigError: the corpus's name cannot be a folder's name.
        DataError: the source is unusable, or the folder cannot be written.
    """
    if corpus is None:
        (corpus,) = config.sources
    if Path(corpus.name).name != corpus.name:
        raise ConfigError("data.name", corpus.name, "a name without slashes", "set data.name=text")
    report = on_progress or (lambda what, share: None)
    return _Preparation(corpus, config, report, workers or available()).run()


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
        """Digest a source together with the settings that decide what becomes of it."""
        config = self._config
        vocabulary = config.pieces if config.tokenizer is None else _digest_tokenizer(config)
        parts = (
            FORMAT, self._corpus.kind, config.text_key, vocabulary, config.validation_percent,
            config.broken, config.unique, of_source,
        )  # fmt: skip
        return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()

    def _find_or_build(self, source: Source, locked: bool) -> Path:
        """Read the sources, and prepare them unless the same contents were prepared before."""
        scans = scan_files(source, self._workers, self._report)
        digest = self._digest(source.digest(scans))[:12]
        folder = self._directory / f"{self._corpus.name}-{digest}"
        if folder.is_dir():
            return _checked(folder)
        own = "" if locked else f"-{uuid.uuid4().hex[:12]}"
        partial = self._directory / f".{folder.name}{own}.partial"
        _sweep(self._directory, self._corpus.name)
        build = Build(self._corpus, self._config, source, scans, self._workers, self._report)
        try:
            self._build(build, partial, folder)
        except WorkerDiedError:
            raise
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(partial, ignore_errors=True)
        return _checked(folder)

    def _build(self, build: Build, partial: Path, folder: Path) -> None:
        partial.mkdir(exist_ok=True)
        path = partial / TOKENIZER_FILE
        if not path.exists():
            self._make_tokenizer(build, path)
        tokenizer = Tokenizer(path)
        files = PartFiles(partial)
        build.tokenise(tokenizer, files)
        whole = partial / f"whole-{uuid.uuid4().hex[:12]}"
        whole.mkdir()
        shutil.copyfile(path, whole / TOKENIZER_FILE)
        build.merge(tokenizer, files, whole)
        _rename(whole, folder)

    def _make_tokenizer(self, build: Build, path: Path) -> None:
        """Copy the tokenizer that is asked for, or train one."""
        draft = path.with_name(f"{path.name}-{uuid.uuid4().hex[:12]}")
        if self._config.tokenizer is not None:
            shutil.copyfile(self._config.tokenizer, draft)
        else:
            texts = build.choose_texts(TOKENIZER_TEXT_BYTES)
            self._report(f"training a tokenizer of {self._config.pieces} pieces", 0.0)
            train_tokenizer(texts, self._config.pieces, draft)
        draft.replace(path)


def _digest_tokenizer(config: DataConfig) -> str:
    """Digest the tokenizer that is asked for, and refuse one that ends no documents."""
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
            "a model with a piece that ends a sentence: it will end documents",
            "train it with an eos_id, or set data.tokenizer=null to have one trained here",
        )
    return digest


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
def _lock(path: Path, report: Progress) -> Iterator[bool]:
    """Hold a file's lock and yield True; yield False on a file system that has none."""
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
            locked = False
        else:
            locked = True
        yield locked


def _sweep(directory: Path, name: str) -> None:
    """Remove what killed processes left long ago; what is younger can be gone on from."""
    for partial in directory.glob(f".{glob.escape(name)}-*.partial"):
        with suppress(FileNotFoundError):  # its owner may just be done
            if time.time() - partial.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(partial, ignore_errors=True)


def _rename(whole: Path, folder: Path) -> None:
    """Put a finished folder in its place, on the disk and not only in its cache."""
    for path in (*whole.iterdir(), whole):
        _flush(path)
    try:
        whole.rename(folder)
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
