"""Prepare and open all corpora of a run: one corpus, or the several corpora of a blend.

A blend is a mixture of corpora (data/blend.py). trainer/assemble.py calls this module, and so do
the commands that read or prepare data.
"""

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from frontier_llm.config.data import DataConfig
from frontier_llm.config.reading import corpus_shares
from frontier_llm.data.blend import Schedule
from frontier_llm.data.corpus_build import CorpusBuild, Progress, scan_files
from frontier_llm.data.corpus_manifest import (
    VALIDATION_FILES,
    Manifest,
    Split,
    TextCounts,
    find_damage,
    is_verified,
)
from frontier_llm.data.document_rows import Row, Tokens
from frontier_llm.data.packed_samples import PackedSamples
from frontier_llm.data.packing import packing_of
from frontier_llm.data.permutation import make_key
from frontier_llm.data.prepare import TOKENIZER_TEXT_BYTES, find_prepared, prepare, shared_tokenizer
from frontier_llm.data.prepared_corpus import Corpus, Samples, open_corpus, streams
from frontier_llm.data.sample_order import LengthSegment
from frontier_llm.data.sentencepiece_tokenizer import train_tokenizer
from frontier_llm.data.source import find_source
from frontier_llm.data.source_choice import choose_files
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.errors import DataError
from frontier_llm.launch import cores
from frontier_llm.units import counted

CorpusSamples = Samples | PackedSamples


@dataclass(frozen=True)
class Corpora:
    """All corpora of a run, which share one tokenizer."""

    config: DataConfig
    corpora: tuple[Corpus, ...]

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of all corpora."""
        return self.corpora[0].tokenizer

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the corpora."""
        return tuple(corpus.name for corpus in self.config.sources)

    @cached_property
    def weights(self) -> dict[str, float]:
        """Share of each corpus in the samples, by name."""
        tokens = {
            name: corpus.manifest.train.tokens
            for name, corpus in zip(self.names, self.corpora, strict=True)
        }
        configured = {corpus.name: corpus.weight for corpus in self.config.sources}
        return corpus_shares(tokens, configured, self.config.blend_alpha)

    @property
    def manifest(self) -> Manifest:
        """Manifest of the only corpus, or the sum of the manifests of a blend."""
        first = self.corpora[0].manifest
        if len(self.corpora) == 1:
            return first
        manifests = [corpus.manifest for corpus in self.corpora]
        return first.model_copy(
            update={
                "name": self.config.name,
                "kind": self.config.kind,
                "account": None,
                "train": _sum_splits([manifest.train for manifest in manifests]),
                "validation": _sum_splits([manifest.validation for manifest in manifests]),
            }
        )

    @property
    def left_out(self) -> str:
        """What was left out of the corpora, in one line."""
        accounts = zip(self.names, (c.manifest.account for c in self.corpora), strict=True)
        lines = {name: account.summary() for name, account in accounts if account is not None}
        if len(lines) == 1:
            return next(iter(lines.values()))
        return ", ".join(f"{name}: {line}" for name, line in lines.items())

    @property
    def bits_note(self) -> str:
        """See `TextCounts.bits_note`."""
        text = TextCounts()
        for corpus in self.corpora:
            text.add(corpus.manifest.account.text if corpus.manifest.account else TextCounts())
        return text.bits_note

    def check_validation(self) -> None:
        """Raise a DataError if bytes of a validation split have changed since it was prepared."""
        for corpus in self.corpora:
            folder = corpus.validation.prefix.parent
            if not is_verified(folder, VALIDATION_FILES):
                if damage := find_damage(folder, files=VALIDATION_FILES):
                    raise DataError(str(damage))

    @property
    def warnings(self) -> list[tuple[str, str]]:
        """The name of each corpus that lacks tokens or is divided badly, and what to do."""
        percent = self.config.validation_percent
        return [
            (name, text)
            for name, corpus in zip(self.names, self.corpora, strict=True)
            for text in corpus.manifest.warnings(percent)
        ]


def prepare_all(
    config: DataConfig, on_progress: Progress | None = None, workers: int | None = None
) -> tuple[Path, ...]:
    """Prepare all corpora of a configuration that are not prepared yet, and return their folders.

    The corpora of a blend share one tokenizer. If none is configured, one is trained on text of all
    corpora, in the shares that `data.blend_alpha` gives.
    """
    report = on_progress or (lambda stage, fraction: None)
    if config.kind != "blend":
        folders: tuple[Path, ...] = (prepare(config, on_progress, workers),)
    else:
        if (path := config.known_tokenizer) is None:
            path = str(_shared_tokenizer(config, report, workers))
        else:  # what a later corpus lacks is refused before the first one is prepared
            for corpus, (source, folder) in zip(config.sources, find_prepared(config), strict=True):
                if folder is None:
                    choose_files(source, corpus, config, workers or cores.available())
        config = config.model_copy(update={"tokenizer": path})
        folders = tuple(prepare(config, on_progress, workers, corpus=c) for c in config.sources)
    if config.packing == "best_fit":
        for folder in folders:
            for stream in streams(folder):
                show = partial(report, f"packing documents ({stream.prefix.name}) into samples")
                show(0.0)
                packing_of(stream, config, show)
    return folders


def open_all(config: DataConfig, folders: Sequence[Path]) -> Corpora:
    """Open the folders that `prepare_all` returned."""
    corpora = tuple(open_corpus(folder) for folder in folders)
    tokens = [(corpus.manifest.tokenizer_sha256, corpus.manifest.eod) for corpus in corpora]
    for folder, token_ids in zip(folders, tokens, strict=True):
        if token_ids != tokens[0]:
            raise DataError(
                f"{folder} was prepared with another tokenizer than {folders[0]}\n"
                "  do: set data.tokenizer to one tokenizer for all corpora, or to null"
            )
    return Corpora(config, corpora)


def open_data(config: DataConfig) -> Corpora:
    """Prepare all corpora that are not prepared yet, and open them."""
    return open_all(config, prepare_all(config))


class BlendedSamples:
    """The samples of a run that reads several corpora. Each corpus is read in its own order."""

    def __init__(self, samples: Mapping[str, CorpusSamples], schedule: Schedule) -> None:
        assert set(samples) >= set(schedule.names), "every corpus needs samples"
        self._samples, self.schedule = samples, schedule

    def resume(self, history: Sequence[Mapping[str, Any]], next_sample: int) -> None:
        """Restore the samples that earlier starts of the run have read (`Schedule.to_meta`).

        The weights of this start are used from `next_sample` on.
        """
        weights = self.schedule.segments[-1].weights
        self.schedule = self.schedule.with_history(history).changed(next_sample, weights)

    def set_lengths(self, segments: Sequence[LengthSegment]) -> None:
        """Set the lengths of the samples over the run, after `resume`."""
        set_lengths(self._samples, self.schedule, segments)

    def __len__(self) -> int:
        return sum(map(len, self._samples.values()))

    def __getitem__(self, index: int) -> Tokens | Row:
        """Return sample `index` of the run: its tokens, int64, or its documents."""
        corpus, index_in_corpus = self.schedule.locate(index)
        # the order of corpora in the configuration may have changed at a resume
        sample: Tokens | Row = self._samples[self.schedule.names[corpus]][index_in_corpus]
        return sample


def set_lengths(
    samples: Mapping[str, CorpusSamples], schedule: Schedule, segments: Sequence[LengthSegment]
) -> None:
    """Set the lengths of the samples of each corpus over a run of a blend."""
    before = [schedule.supplied(segment.first_sample) for segment in segments]
    for name in set(schedule.names) & set(samples):
        samples[name].set_lengths(
            [replace(s, first_sample=n[name]) for s, n in zip(segments, before, strict=True)]
        )


def initial_schedule(corpora: Corpora, seed: int) -> Schedule:
    """Return the schedule of a new run of a blend."""
    return Schedule.starting(corpora.weights, make_key("blend", seed))


def _sum_splits(splits: Sequence[Split]) -> Split:
    digests = "".join(split.bin_sha256 for split in splits)
    return Split(
        documents=sum(split.documents for split in splits),
        tokens=sum(split.tokens for split in splits),
        text_bytes=sum(split.text_bytes for split in splits),
        bin_sha256=hashlib.sha256(digests.encode()).hexdigest(),
    )


def _shared_tokenizer(config: DataConfig, report: Progress, workers: int | None) -> Path:
    """Return the path of a tokenizer trained on all corpora; train it if it does not exist."""
    processes = workers or cores.available()
    sources = [find_source(corpus, config) for corpus in config.sources]
    path = shared_tokenizer(config, sources)
    if path.exists():
        return path
    corpora_and_sources = [
        (corpus, choose_files(source, corpus, config, processes))
        for corpus, source in zip(config.sources, sources, strict=True)
    ]
    sizes = {corpus.name: source.size for corpus, source in corpora_and_sources}
    shares = corpus_shares(sizes, dict.fromkeys(sizes), config.blend_alpha)
    texts: list[str] = []
    for corpus, source in corpora_and_sources:
        own = config.of(corpus)
        scans = scan_files(source, own, processes, report)
        build = CorpusBuild(corpus, own, source, scans, processes, report)
        build.check_files()
        texts += build.choose_texts(shares[corpus.name] * TOKENIZER_TEXT_BYTES)
    report(f"training a tokenizer of {config.vocabulary} tokens", 0.0)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{uuid.uuid4().hex[:12]}")
    train_tokenizer(texts, config.vocabulary, draft)
    draft.replace(path)
    return path


class ValidationWindows:
    """The samples of one corpus after those of another. They have nothing beyond their end.

    Each corpus contributes its share of the `wanted` samples: at least one, and at most all that it
    has.
    """

    def __init__(self, samples: Sequence[Any], shares: Sequence[float], wanted: int) -> None:
        counts = [
            min(len(windows), max(1, round(share * wanted)))
            for windows, share in zip(samples, shares, strict=True)
        ]
        self._samples, self._available = samples, sum(map(len, samples))
        self._places = [(corpus, k) for corpus, count in enumerate(counts) for k in range(count)]

    def __len__(self) -> int:
        return len(self._places)

    def __str__(self) -> str:
        """Say how many samples are read, and why not all of them."""
        if len(self) == self._available:
            return f"all {counted(len(self), 'sample')}"
        return f"{len(self)} of {self._available} samples, by trainer.evaluate_batches"

    def corpus(self, index: int) -> int:
        """Return the number of the corpus of a sample; 0 beyond the end."""
        return self._places[index][0] if index < len(self) else 0

    def __getitem__(self, index: int) -> Any:
        corpus, number = self._places[index]
        return self._samples[corpus][number]
