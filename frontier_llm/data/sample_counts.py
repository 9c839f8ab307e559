"""Count the samples of prepared corpora, and refuse corpora that are too small for a run."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path

from frontier_llm.config.data import DataConfig
from frontier_llm.config.denoisers import sample_parts
from frontier_llm.config.rules import data_size
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


def check_size(config: RunConfig, ranks: int, check: Callable[[RunConfig, bool], object]) -> None:
    """Refuse corpora that are too small for a run on a number of ranks.

    The error names all problems, and a batch and a length that each solve all of them. `check`
    raises a DataError if the training (True) or an evaluation (False) cannot read the corpora.
    """

    def problems(**changes: int) -> dict[str, None]:
        found, other = dict[str, None](), config.changed("data", **changes)
        for train in (True, False):
            try:
                check(other, train)
            except DataError as error:
                found[str(error).partition("\n")[0]] = None
        return found

    if not (found := problems()):
        return
    data, parallel = config.data, config.parallel
    multiple = max(1, data_size(config, ranks)) * data.micro_batch
    multiple *= parallel.pipeline if parallel.chunks > 1 else 1
    batches = range(multiple, data.global_batch + 1, multiple)
    fitting = bisect_left(batches, 1, key=lambda batch: bool(problems(global_batch=batch)))
    todo = f", or set data.global_batch={batches[fitting - 1]}" if fitting else ""
    # packing of whole documents would be written for each length
    power = (data.sequence_length - 1).bit_length() if data.packing == "stream" else 0
    while (power := power - 1) > 2:
        if not problems(sequence_length=1 << power):
            todo += f", or set data.sequence_length={1 << power}"
            break
    more = "add text (for validation: or raise data.validation_percent)"
    raise DataError("\n".join([*found, f"  do: {more}{todo}"]))


def check_prepared(config: RunConfig, ranks: int, folders: Sequence[Path]) -> None:
    """Refuse corpora whose numbers of tokens show that they are too small for a run.

    Samples of whole documents are not counted, because the lengths of documents are not read.
    """
    manifests = [Manifest.load(folder / MANIFEST_FILE) for folder in folders]

    def check(config: RunConfig, train: bool) -> None:
        length, overlap = window_tokens(config.data), int(config.data.objective != "spans")
        name, samples = "train" if train else "validation", 0
        for folder, manifest in zip(folders, manifests, strict=True):
            tokens = getattr(manifest, name).tokens
            if tokens < length + overlap:
                raise too_short(folder / name, tokens, length, overlap)
            samples += (tokens - overlap) // length
        if train:
            check_step(config.data, samples)

    if {"stream": True, "best_fit": False}[config.data.packing]:
        check_size(config, ranks, check)
