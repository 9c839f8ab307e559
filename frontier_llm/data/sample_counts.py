"""Count the samples of prepared corpora, and refuse corpora that are too small for a run."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from frontier_llm.config.data import DataConfig
from frontier_llm.config.denoisers import sample_parts
from frontier_llm.config.run import RunConfig
from frontier_llm.data.corpus_manifest import MANIFEST_FILE, Manifest
from frontier_llm.errors import DataError
from frontier_llm.units import counted


def window_tokens(data: DataConfig, sequence_length: int | None = None) -> int:
    """Return the tokens of text per sample, for the configured sequence length or another one."""
    length = sequence_length or data.sequence_length
    if data.objective != "spans":
        return length
    return sample_parts(length, data.denoisers, data.decoder_length).text


def window_overlap(data: DataConfig) -> int:
    """Return how many tokens two windows share: a GPT's window also has the last label."""
    return int(data.objective != "spans")


def count_windows(tokens: int, length: int, overlap: int) -> int:
    """Return how many windows of a length a number of tokens has."""
    return max(0, (tokens - overlap) // length)


def too_short(prefix: Path, tokens: int, length: int, overlap: int) -> DataError:
    """Return the error for a stream of tokens that has no window of a length."""
    # a quarter less, because the text of spans is longer than data.sequence_length
    shorter = 1 << max(0, (3 * (tokens - overlap) // 4).bit_length() - 1)
    need = -(-(length + overlap) // max(1, tokens))
    lower = f", or set data.sequence_length={shorter}" if shorter >= 8 else ""
    return DataError(
        f"{prefix}.bin has {counted(tokens, 'token')}, fewer than one sample of "
        f"data.sequence_length={length} reads ({length + overlap})\n"
        f"  do: add text, to about {need} times as much (for validation: or raise "
        f"data.validation_percent){lower}"
    )


def check_step(data: DataConfig, samples: int) -> None:
    """Refuse a training text that has fewer samples than a step reads."""
    if samples < data.global_batch:
        raise DataError(
            f"the training text of {data.name} has {counted(samples, 'sample')} of "
            f"data.sequence_length={data.sequence_length}: a step of "
            f"data.global_batch={data.global_batch} would read some of them twice\n"
            "  do: add text, or lower data.global_batch or data.sequence_length"
        )


def check_size(config: RunConfig, check: Callable[[RunConfig, bool], object]) -> None:
    """Refuse corpora that are too small, with all problems and a length that solves all of them.

    `check` raises a DataError if the training (True) or an evaluation (False) of a run cannot read
    them.
    """
    problems = _problems(config, check)
    if not problems:
        return
    data, todo = config.data, "add text (for validation: or raise data.validation_percent)"
    length = 1 << (data.sequence_length - 1).bit_length() - 1
    # packing of whole documents would be written for each length
    while data.packing == "stream" and length >= 8:
        shorter = data.model_copy(update={"sequence_length": length})
        if not _problems(config.model_copy(update={"data": shorter}), check):
            todo += f", or set data.sequence_length={length}"
            break
        length //= 2
    lines = [problem.partition("\n")[0] for problem in problems]
    raise DataError("\n".join(dict.fromkeys(lines)) + f"\n  do: {todo}")


def _problems(config: RunConfig, check: Callable[[RunConfig, bool], object]) -> list[str]:
    problems = []
    for train in (True, False):
        try:
            check(config, train)
        except DataError as error:
            problems.append(str(error))
    return problems


def check_prepared(config: RunConfig, folders: Sequence[Path]) -> None:
    """Refuse corpora whose numbers of tokens show that they are too small for a run.

    Samples of whole documents are not counted, because the lengths of documents are not read.
    """
    if {"stream": True, "best_fit": False}[config.data.packing]:
        manifests = {folder: Manifest.load(folder / MANIFEST_FILE) for folder in folders}
        check_size(config, partial(_check_tokens, manifests))


def _check_tokens(manifests: dict[Path, Manifest], config: RunConfig, train: bool) -> None:
    length, overlap = window_tokens(config.data), window_overlap(config.data)
    samples = 0
    for folder, manifest in manifests.items():
        split = manifest.train if train else manifest.validation
        if not (count := count_windows(split.tokens, length, overlap)):
            name = "train" if train else "validation"
            raise too_short(folder / name, split.tokens, length, overlap)
        samples += count
    if train:
        check_step(config.data, samples)
