"""Turn a source of text into a prepared corpus, unless this was done before.

These files are used, where `<directory>` is data.directory and `<name>` the name of the corpus:

    <directory>/<name>-<digest>/            the complete corpus (corpus_manifest.py)
    <directory>/.<name>-<fingerprint>       note: the name of the folder that was prepared from
                                            source files of these names, sizes and times
    <directory>/.<name>-<digest>.lock       file lock that a process holds while it prepares; that
                                            of a fingerprint is held while the source is read
    <directory>/.<name>-<digest>.partial    unfinished work: the folder tokenizer, and the
                                            finished parts of the corpus (corpus_parts.py)

If a process is killed, the next call continues from the finished parts. The lock ensures that only
one process at a time uses them. On a file system without locks, each process works in a folder of
its own (`.<name>-<digest>-<process>.partial`). The first process that finishes renames its folder
to the corpus, and the work of a killed process is repeated from the beginning.
"""

import errno
import fcntl
import glob
import hashlib
import shutil
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from frontier_llm.atomic_files import publish_folder, replace_text
from frontier_llm.config.data import CorpusConfig, DataConfig
from frontier_llm.data.corpus_build import CorpusBuild, Progress, scan_files
from frontier_llm.data.corpus_manifest import FORMAT, MANIFEST_FILE, Manifest
from frontier_llm.data.corpus_parts import PartFiles
from frontier_llm.data.sentencepiece_tokenizer import check_size, train_tokenizer
from frontier_llm.data.source import Source, find_source
from frontier_llm.data.source_choice import choose_files
from frontier_llm.data.tokenizer_source import (
    MODEL_FILE,
    copy_tokenizer,
    digest_tokenizer,
    open_tokenizer,
)
from frontier_llm.data.worker_pool import WorkerDiedError
from frontier_llm.errors import ConfigError, DataError
from frontier_llm.launch import cores
from frontier_llm.units import MIB

TOKENIZER_TEXT_BYTES = 32 * MIB
_DIGEST_FORMAT = 2
"""Format in which the first corpora of the present content were written. It stays part of the name
of a corpus, so that they are found."""
STALE_SECONDS = 7 * 24 * 3600


class UnwritableError(DataError):
    """No corpus can be written to `data.directory`."""


def prepare(
    config: DataConfig,
    on_progress: Progress | None = None,
    workers: int | None = None,
    corpus: CorpusConfig | None = None,
) -> Path:
    """Return the folder of a prepared corpus; prepare the corpus if the folder does not exist.

    Any number of processes may call this function at once. If the sources have not changed, the
    corpus is found without reading them. A call that is killed leaves unfinished work, from which
    the next call continues. The result does not depend on the number of workers (None: one per
    core). The corpus must be given if the configuration has several. Raises a ConfigError if the
    configured tokenizer cannot be used, and a DataError if the source is unusable, or the folder
    cannot be written.
    """
    if corpus is None:
        (corpus,) = config.sources
    report = on_progress or (lambda stage, fraction: None)
    return _Preparation(corpus, config, report, workers or cores.available()).run()


def find_prepared(config: DataConfig) -> list[tuple[Source, Path | None]]:
    """Return the source of each corpus and its folder, None if it is not prepared yet.

    No text is read. A corpus whose files have new times counts as not prepared, because `prepare`
    has to read it. Raises a ConfigError if the configured tokenizer cannot be used, and a DataError
    if a source is unusable, or a prepared corpus is damaged.
    """
    sources = [find_source(corpus, config) for corpus in config.sources]
    if config.kind == "blend":
        path = Path(config.known_tokenizer or shared_tokenizer(config, sources))
        if not path.exists():
            return [(source, None) for source in sources]
        config = config.model_copy(update={"tokenizer": str(path)})
    return [
        (source, _Preparation(corpus, config).find(source))
        for corpus, source in zip(config.sources, sources, strict=True)
    ]


def check_text(config: DataConfig) -> None:
    """Read a user's text that is not prepared yet; refuse what `prepare` would refuse."""
    for corpus, (source, folder) in zip(config.sources, find_prepared(config), strict=True):
        if folder is None and corpus.kind == "text":
            build = _Preparation(corpus, config).scan(source)
            build.check_files()
            build.choose_texts(0.0)


def shared_tokenizer(config: DataConfig, sources: Sequence[Source]) -> Path:
    """Return the path of the tokenizer that is trained on all sources of a blend."""
    check_size(config.vocabulary)
    settings: tuple[object, ...] = (
        FORMAT,
        config.format,
        config.text_key,
        config.vocabulary,
        config.blend_alpha,
        config.validation_percent,
    )
    own = [(corpus.format, corpus.text_key) for corpus in config.sources]
    if any(any(pair) for pair in own):
        settings += tuple(own)
    inputs = "\0".join(map(str, (*settings, *(source.fingerprint() for source in sources))))
    digest = hashlib.sha256(inputs.encode()).hexdigest()[:12]
    return Path(config.directory, f"{config.name}-{digest}.model")


class _Preparation:
    """One call of `prepare`."""

    def __init__(
        self,
        corpus: CorpusConfig,
        config: DataConfig,
        report: Progress = lambda stage, fraction: None,
        workers: int = 1,
    ) -> None:
        self._corpus, self._config = corpus, config.of(corpus)
        self._report, self._workers = report, workers
        self._directory = Path(config.directory)
        self._tokenizer = None if config.tokenizer is None else Path(config.tokenizer)
        # taken once: the name of the corpus, and the tokenizer in it, must agree
        self._tokenizer_digest = self._tokenizer and digest_tokenizer(self._tokenizer)

    def run(self) -> Path:
        source = find_source(self._corpus, self._config)
        if folder := self.find(source):
            source.refuse_broken()
            return folder
        note = self.note(source)
        if self._tokenizer is not None:  # what cannot be used is refused before a file is read
            open_tokenizer(self._tokenizer, self._config.end_of_document)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with _lock(note, self._report):
                # another process may have prepared the corpus while this one waited for the lock
                if not (folder := _read_note(note)):
                    folder = self._find_or_build(source)
                    replace_text(note, folder.name, f"-{uuid.uuid4().hex[:12]}")
                return folder
        except OSError as error:
            raise UnwritableError(
                f"cannot write a corpus to {self._directory}: {error.strerror or error}\n"
                "  do: free space or permit writing there, or set data.directory to another folder"
            ) from error

    def find(self, source: Source) -> Path | None:
        """Return the folder of the prepared corpus; None if there is none yet."""
        if not source.is_prepared:
            if self._tokenizer is None:
                check_size(self._config.vocabulary)
            return _read_note(self.note(source))
        folder = _checked(source.root)
        manifest = Manifest.load(folder / MANIFEST_FILE)
        if self._tokenizer_digest not in (None, manifest.tokenizer_sha256):
            raise ConfigError(
                "data.tokenizer",
                self._tokenizer,
                f"the tokenizer of the prepared corpus {folder}, whose tokens it wrote",
                f"leave data.tokenizer out, or set the path to its text, {manifest.source}",
            )
        return folder

    def note(self, source: Source) -> Path:
        """Return the note of a source in its present state."""
        digest = self._digest(f"{FORMAT}{source.fingerprint()}")
        return self._directory / f".{self._corpus.name}-{digest[:24]}"

    def _digest(self, source_digest: str) -> str:
        """Return a digest of the source and of all settings that change the prepared corpus."""
        config = self._config
        tokenizer = self._tokenizer_digest or config.vocabulary
        inputs: tuple[object, ...] = (
            _DIGEST_FORMAT, self._corpus.kind, config.text_key, tokenizer,
            config.validation_percent, config.broken, config.unique, source_digest,
        )  # fmt: skip
        if config.end_of_document is not None:
            inputs += (config.end_of_document,)
        if config.format != "auto":
            inputs += ("format", config.format)
        return hashlib.sha256("\0".join(map(str, inputs)).encode()).hexdigest()

    def _find_or_build(self, source: Source) -> Path:
        """Scan the source and prepare it, unless the same content was prepared before."""
        build = self.scan(source)
        digest = self._digest(build.source.digest(build.scans))[:12]
        folder = self._directory / f"{self._corpus.name}-{digest}"
        # the same text with other times has another note, and the same folder
        with _lock(self._directory / f".{folder.name}", self._report) as locked:
            if not folder.is_dir():
                build.check_files()
                self._build_in_parts(build, folder, locked)
            return _checked(folder)

    def scan(self, source: Source) -> CorpusBuild:
        """Read all files of a source; refuse what cannot be prepared."""
        source = choose_files(source, self._corpus, self._config, self._workers)
        scans = scan_files(source, self._config, self._workers, self._report)
        return CorpusBuild(self._corpus, self._config, source, scans, self._workers, self._report)

    def _build_in_parts(self, build: CorpusBuild, folder: Path, locked: bool) -> None:
        """Build a corpus, and remove its unfinished work unless a worker process died."""
        process_suffix = "" if locked else f"-{uuid.uuid4().hex[:12]}"
        partial = self._directory / f".{folder.name}{process_suffix}.partial"
        _remove_stale(self._directory, self._corpus.name)
        try:
            self._build(build, partial, folder)
        except WorkerDiedError:
            raise  # the finished parts are kept for the next call
        except KeyboardInterrupt as stop:
            number, *_ = stop.args or (signal.SIGINT,)
            kept = "the same command goes on with the parts of the corpus that are missing"
            raise KeyboardInterrupt(number, kept) from None
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(partial, ignore_errors=True)

    def _build(self, build: CorpusBuild, partial: Path, folder: Path) -> None:
        """Run all stages in the folder `partial`, and rename the result to `folder`."""
        partial.mkdir(exist_ok=True)
        tokenizer_folder = partial / "tokenizer"
        if not tokenizer_folder.exists():
            self._make_tokenizer(build, tokenizer_folder)
        tokenizer = open_tokenizer(tokenizer_folder, self._config.end_of_document)
        files = PartFiles(partial)
        build.tokenise(tokenizer, files)
        merged = partial / f"merged-{uuid.uuid4().hex[:12]}"
        merged.mkdir()
        copy_tokenizer(tokenizer_folder, merged)
        build.merge(tokenizer, files, merged)
        publish_folder(merged, folder)

    def _make_tokenizer(self, build: CorpusBuild, folder: Path) -> None:
        """Write the tokenizer to a folder: a copy of the configured one, or a new one."""
        draft = folder.with_name(f"{folder.name}-{uuid.uuid4().hex[:12]}")
        draft.mkdir()
        if self._tokenizer is not None:
            copy_tokenizer(self._tokenizer, draft)
            if digest_tokenizer(draft) != self._tokenizer_digest:
                raise ConfigError(
                    "data.tokenizer", self._tokenizer, "files that nothing writes to meanwhile",
                    "start again when they are complete",
                )  # fmt: skip
        else:
            texts = build.choose_texts(TOKENIZER_TEXT_BYTES)
            self._report(f"training a tokenizer of {self._config.vocabulary} tokens", 0.0)
            train_tokenizer(texts, self._config.vocabulary, draft / MODEL_FILE)
        draft.rename(folder)


def _read_note(note: Path) -> Path | None:
    """Return the folder that a note names, if it still exists."""
    try:
        folder = note.parent / note.read_text()
    except OSError:
        return None
    return _checked(folder) if folder.is_dir() else None


def _checked(folder: Path) -> Path:
    """Return the folder of a corpus after a check that its files are complete."""
    Manifest.load(folder / MANIFEST_FILE).check_files(folder)
    return folder


@contextmanager
def _lock(path: Path, report: Progress) -> Iterator[bool]:
    """Yield True while holding the lock of a path, or False on a file system without locks.

    The lock is that of an empty file beside the path, which stays.
    """
    with path.with_name(f"{path.name}.lock").open("a") as stream:
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


def _remove_stale(directory: Path, name: str) -> None:
    """Remove unfinished work that is older than STALE_SECONDS."""
    for partial in directory.glob(f".{glob.escape(name)}-*.partial"):
        with suppress(FileNotFoundError):  # a process may have just finished and removed it
            if time.time() - partial.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(partial, ignore_errors=True)
