"""Build the loader of a run from its configuration.

A loader reads micro-batches. It needs the windows of the run, which are the ranges of tokens that
its samples read, and a function that builds a micro-batch from windows.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from frontier_llm.config.run import RunConfig
from frontier_llm.data.batch import LossMean
from frontier_llm.data.corpora import (
    BlendedSamples,
    Corpora,
    CorpusSamples,
    ValidationWindows,
    initial_schedule,
    open_all,
    prepare_all,
)
from frontier_llm.data.corpus_build import Progress
from frontier_llm.data.denoising import Denoising
from frontier_llm.data.document_rows import DocumentSamples, document_batch
from frontier_llm.data.loader import CPU, BatchLoader, MakeBatch, Reading, Windows, causal_batch
from frontier_llm.data.packed_samples import PackedSamples
from frontier_llm.data.packing import describe_padding, packing_of
from frontier_llm.data.permutation import make_key
from frontier_llm.data.prepared_corpus import Corpus, Samples
from frontier_llm.data.sample_counts import check_size, check_step, window_tokens
from frontier_llm.data.tokenizer_source import check_given_tokenizer, check_vocabulary, mode_tokens
from frontier_llm.units import counted


def make_loader(
    config: RunConfig,
    corpora: Corpora,
    data_rank: int,
    data_size: int,
    *,
    train: bool,
    windows: Windows | None = None,
    device: torch.device = CPU,
) -> BatchLoader:
    """Build the loader of one data rank of a number of them.

    In training the samples are shuffled; otherwise validation samples are read in order, each of
    them once. `windows` are those of `make_windows`; None: they are made, and read. Raises a
    ConfigError if the tokenizer has more tokens than the model's embedding has rows, and the errors
    of `make_windows`.
    """
    data = config.data
    if windows is None:
        windows = make_windows(config, corpora, train=train)
    make_batch = make_batch_maker(config, corpora)
    context = config.parallel.context_ranks
    replica, context_rank = divmod(data_rank, context)
    reading = Reading(device, data.workers, data.prefetch)
    if context > 1:
        # an evaluation counts samples and tokens apart (`Batch.loss_sums`)
        by: LossMean = data.loss_mean if train else "samples"
        reading = replace(reading, part=lambda batch: batch.part(context, context_rank, by))
    replicas = data_size // context
    return BatchLoader(
        windows, data.global_batch, data.micro_batch, replica, replicas, make_batch, reading,
        ends=not train,
    )  # fmt: skip


def make_windows(
    config: RunConfig, corpora: Corpora, *, train: bool, reads: bool = True
) -> CorpusSamples | BlendedSamples | ValidationWindows:
    """Return the windows of a run, in training or in an evaluation during training.

    Pipeline stages between the first and the last need no tokens, only the borders of documents. If
    all stages read tokens, each sample would be read once per stage, in small random reads from a
    shared file system. Without `reads` windows have the same shapes and consist of zeros. Raises a
    DataError if the training has fewer samples than a step reads, or the validation has none.
    """
    samples = [
        window_corpus(config, corpus, train=train, reads=reads) for corpus in corpora.corpora
    ]
    if not train:
        wanted = config.trainer.evaluate_batches * config.data.global_batch
        return ValidationWindows(samples, [corpora.weights[name] for name in corpora.names], wanted)
    data, count = config.data, sum(map(len, samples))
    check_step(data, count)
    if data.kind != "blend":
        return samples[0]
    by_name = dict(zip(corpora.names, samples, strict=True))
    return BlendedSamples(by_name, initial_schedule(corpora, config.trainer.seed))


def window_corpus(
    config: RunConfig, corpus: Corpus, *, train: bool, reads: bool = True
) -> CorpusSamples:
    """Return the samples of a run that reads only this corpus, shuffled in training."""
    # a GPT's window has one more token, the last label
    length, overlap = window_tokens(config.data), int(config.data.objective != "spans")
    separate = config.data.documents == "separate"
    stream = corpus.train if train else corpus.validation
    order = config.trainer.seed, corpus.manifest.digest
    if config.data.packing == "best_fit":
        return PackedSamples(
            stream, packing_of(stream, config.data), *order, shuffle=train, separate=separate,
            reads=reads,
        )  # fmt: skip
    if separate:
        return DocumentSamples(stream, length, *order, shuffle=train, separate=True, reads=reads)
    return Samples(stream, length, *order, shuffle=train, overlap=overlap, reads=reads)


def describe_samples(config: RunConfig, corpora: Corpora) -> str:
    """Return the number of training samples per epoch, and their share of padding, if any."""
    data = config.data
    samples = [window_corpus(config, corpus, train=True) for corpus in corpora.corpora]
    count, left_out = sum(map(len, samples)), sum(windows.left_out for windows in samples)
    text = f"{counted(count, 'sample', ',')} per epoch"
    if data.packing == "best_fit":
        packings = [windows.packing for windows in samples if isinstance(windows, PackedSamples)]
        text += f" of whole documents, {describe_padding(packings, data)}"
    if left_out:
        text += f"; {left_out:,} left out, which predict nothing"
    return text


def make_batch_maker(config: RunConfig, corpora: Corpora) -> MakeBatch:
    """Return the function that builds micro-batches from windows."""
    tokenizer = corpora.tokenizer
    check_vocabulary(config, tokenizer)
    data = config.data
    if {"causal": True, "spans": False}[data.objective]:
        is_separate = {"joined": False, "separate": True}[data.documents]
        if is_separate or {"stream": False, "best_fit": True}[data.packing]:
            return partial(document_batch, separate=is_separate)
        return causal_batch
    denoising = Denoising(
        data.denoisers,
        window_tokens(data),
        data.sequence_length,
        tokenizer.sentinels(data.sentinels),
        mode_tokens(config),
        tokenizer.eod,
        make_key("spans", corpora.manifest.digest, config.trainer.seed),
        data.decoder_tokens,
    )
    return partial(denoising.batch, start=config.model.start_token)


def prepare_for_model(
    config: RunConfig, on_progress: Progress | None = None, ranks: int = 1
) -> tuple[Path, ...]:
    """Prepare all corpora of a run on a number of ranks, and return their folders.

    A given tokenizer that is too large for the model is refused first, and corpora that are too
    small for a step or an evaluation before any rank starts.
    """
    check_given_tokenizer(config)
    folders = prepare_all(config.data, on_progress)
    corpora = open_all(config.data, folders)
    check_vocabulary(config, corpora.tokenizer)
    check_size(config, ranks, lambda config, train: make_windows(config, corpora, train=train))
    return folders
