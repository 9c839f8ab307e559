"""All that a run reads: one corpus, or the corpora of a blend, with one tokenizer."""

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from frontier_llm.config.data import DataConfig
from frontier_llm.data.blend import Schedule, weigh
from frontier_llm.data.build import Build, Progress, scan_files
from frontier_llm.data.corpus import find_source
from frontier_llm.data.datasets import Corpus, Samples, open_corpus
from frontier_llm.data.manifest import Manifest, Split
from frontier_llm.data.permutation import make_key
from frontier_llm.data.prepare import TOKENIZER_TEXT_BYTES, prepare
from frontier_llm.data.tokenizer import Tokenizer, train_tokenizer
from frontier_llm.data.workers import available
from frontier_llm.errors import DataError


@dataclass(frozen=True)
class Corpora:
    """What is read."""

    config: DataConfig
    corpora: tuple[Corpus, ...]
    """In the configuration's order."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Of all corpora."""
        return self.corpora[0].tokenizer

    @property
    def names(self) -> tuple[str, ...]:
        """Of the corpora."""
        return tuple(corpus.name for corpus in self.config.sources)

    @cached_property
    def weights(self) -> dict[str, float]:
        """The share of each corpus in the samples."""
        tokens = {
            name: corpus.manifest.train.tokens
            for name, corpus in zip(self.names, self.corpora, strict=True)
        }
        given = {corpus.name: corpus.weight for corpus in self.config.sources}
        return weigh(tokens, given, self.config.blend_alpha)

    @property
    def manifest(self) -> Manifest:
        """Of the one corpus; of a blend what its manifests amount to."""
        first = self.corpora[0].manifest
        if len(self.corpora) == 1:
            return first
        manifests = [corpus.manifest for corpus in self.corpora]
        return first.model_copy(
            update={
                "name": self.config.name,
                "kind": self.config.kind,
                "train": _add([manifest.train for manifest in manifests]),
                "validation": _add([manifest.validation for manifest in manifests]),
            }
        )

    @property
    def validation_bytes_per_token(self) -> float:
        """Of the text that validation reads: by it a loss a token becomes one a byte."""
        return sum(
            self.weights[name]
            * corpus.manifest.validation.text_bytes
            / corpus.manifest.validation.tokens
            for name, corpus in zip(self.names, self.corpora, strict=True)
        )


def prepare_all(
    config: DataConfig, on_progress: Progress | None = None, workers: int | None = None
) -> tuple[Path, ...]:
    """Return the folders of all corpora that a configuration names; make those that are not there.

    The corpora of a blend get one tokenizer: the one that is asked for, or one that is trained on
    all of them, more on larger ones by `data.blend_alpha`.

    Args:
        config: the sources and what matters of their treatment.
        on_progress: told how far it is.
        workers: processes; None = as many as there are cores.

    Raises:
        ConfigError: a name is no folder's name.
        DataError: a source is unusable, or a folder cannot be written.
    """
    if config.kind != "blend":
        return (prepare(config, on_progress, workers),)
    if config.tokenizer is None:
        path = _shared_tokenizer(config, on_progress or (lambda what, share: None), workers)
        config = config.model_copy(update={"tokenizer": str(path)})
    return tuple(prepare(config, on_progress, workers, corpus=corpus) for corpus in config.sources)


def open_all(config: DataConfig, folders: Sequence[Path]) -> Corpora:
    """Open what `prepare_all` made.

    Raises:
        DataError: something is damaged, or the tokenizers differ.
    """
    corpora = tuple(open_corpus(folder) for folder in folders)
    for folder, corpus in zip(folders, corpora, strict=True):
        if corpus.manifest.tokenizer_sha256 != corpora[0].manifest.tokenizer_sha256:
            raise DataError(
                f"{folder} was prepared with another tokenizer than {folders[0]}\n"
                "  do: set data.tokenizer to one model for all, or to null"
            )
    return Corpora(config, corpora)


def open_data(config: DataConfig) -> Corpora:
    """Prepare, where that was not done, and open.

    Raises:
        ConfigError: a name is no folder's name.
        DataError: a source is unusable, or something is damaged.
    """
    return open_all(config, prepare_all(config))


class BlendedSamples:
    """The samples of a run that reads several corpora; each is read in its own order."""

    def __init__(self, samples: Sequence[Samples], schedule: Schedule) -> None:
        """Mix.

        Args:
            samples: of each corpus, in the order of the schedule's names.
            schedule: which corpus each sample is of.
        """
        assert len(samples) == len(schedule.names), "one a corpus"
        self._samples, self.schedule = tuple(samples), schedule

    def go_on(self, history: Sequence[Mapping[str, Any]], next_sample: int) -> None:
        """Go on with this run's weights where an earlier part of it has stopped.

        Args:
            history: of the weights so far (`Schedule.to_meta`).
            next_sample: the first that is drawn by this run's.

        Raises:
            ConfigError: the corpora are others.
        """
        weights = self.schedule.segments[-1].weights
        self.schedule = self.schedule.with_history(history).changed(next_sample, weights)

    def __len__(self) -> int:
        """Samples an epoch of the corpora together."""
        return sum(map(len, self._samples))

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Return the tokens of sample `index`."""
        corpus, own = self.schedule.locate(index)
        return self._samples[corpus][own]


def schedule_of(corpora: Corpora, seed: int) -> Schedule:
    """Return the schedule that a run of a blend begins with."""
    return Schedule.starting(corpora.weights, make_key("blend", seed))


def _add(splits: Sequence[Split]) -> Split:
    digests = "".join(split.bin_sha256 for split in splits)
    return Split(
        documents=sum(split.documents for split in splits),
        tokens=sum(split.tokens for split in splits),
        text_bytes=sum(split.text_bytes for split in splits),
        bin_sha256=hashlib.sha256(digests.encode()).hexdigest(),
    )


def _shared_tokenizer(config: DataConfig, report: Progress, workers: int | None) -> Path:
    """Train a tokenizer on all corpora, unless that was done before."""
    sources = [find_source(corpus, config) for corpus in config.sources]
    prints = (config.text_key, config.pieces, config.blend_alpha, config.validation_percent)
    parts = "\0".join(map(str, (*prints, *(source.fingerprint() for source in sources))))
    digest = hashlib.sha256(parts.encode()).hexdigest()[:12]
    path = Path(config.directory, f"{config.name}-{digest}.model")
    if path.exists():
        return path
    pairs = list(zip(config.sources, sources, strict=True))
    sizes = {corpus.name: source.size for corpus, source in pairs}
    shares = weigh(sizes, dict.fromkeys(sizes), config.blend_alpha)
    texts: list[str] = []
    for corpus, source in pairs:
        scans = scan_files(source, workers or available(), report)
        build = Build(corpus, config, source, scans, workers or available(), report)
        texts += build.choose_texts(shares[corpus.name] * TOKENIZER_TEXT_BYTES)
    report(f"training a tokenizer of {config.pieces} pieces", 0.0)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{uuid.uuid4().hex[:12]}")
    train_tokenizer(texts, config.pieces, draft)
    draft.replace(path)
    return path
