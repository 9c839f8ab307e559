"""Measure the perplexity of texts: `frontier-llm evaluate RUN_DIR --text FILE ...`.

A text is read in windows of the length of the run's samples. All tokens but those of the first
window are predicted from at least `window - stride` tokens before them. With the stride equal to
the window these are the windows of lm-evaluation-harness (`loglikelihood_rolling`).
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from frontier_lab.tables import table_of_numbers, tracked
from frontier_llm.cli.console import wide_console
from frontier_llm.config import RunConfig
from frontier_llm.data.batch import Batch, LossSums
from frontier_llm.data.corpus_manifest import TextCounts
from frontier_llm.data.file_formats import detect, reader_of
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.data.tokenizer_source import tokens_before_text
from frontier_llm.errors import ConfigError, DataError
from frontier_llm.model.build import Model
from frontier_llm.parallel.groups import Groups
from frontier_llm.telemetry.metrics import BITS_PER_BYTE
from frontier_llm.trainer.evaluate import TextLoss, bits_per_byte
from frontier_llm.trainer.pipeline import Pipeline

PADDED_TO = 16
"""A text that is shorter than a window is padded to a multiple of this number of tokens."""
_OTHER_FILE = "repair it, or name another file with --text"


@dataclass(frozen=True)
class TextScore:
    """The perplexity of a file."""

    file: str
    documents: int
    tokens: int
    """Number of predicted tokens."""
    bytes: int
    """Size of the documents in UTF-8."""
    words: int
    """Number of words, separated by white space."""
    nats: float
    """Sum of the negative logarithms of the probabilities of all predicted tokens."""
    bits_per_byte: float | None
    """See `bits_per_byte` in trainer/evaluate.py; it does not depend on the tokenizer."""
    bits_note: str = ""
    """See `TextCounts.bits_note`."""

    @property
    def nats_per_token(self) -> float:
        """Cross entropy."""
        return self.nats / self.tokens

    @property
    def token_perplexity(self) -> float:
        """Perplexity per token."""
        return _exp(self.nats_per_token)

    @property
    def word_perplexity(self) -> float:
        """Perplexity per word, which does not depend on the tokenizer."""
        return _exp(self.nats / self.words)


@dataclass(frozen=True)
class Window:
    """A part of the tokens of a document, of which the last ones are predicted."""

    inputs: Sequence[int]
    labels: Sequence[int]
    """The next token at each position."""
    predicted: int
    """Number of labels at the end that are predicted; the others were predicted before."""


def evaluate_texts(
    config: RunConfig,
    tokenizer: Tokenizer,
    model: Model,
    groups: Groups,
    files: Sequence[Path],
    stride: int | None = None,
    key: str = "text",
) -> list[TextScore]:
    """Return the perplexity of each file; `stride` None: the length of a window.

    The texts of a file with records are under `key`.

    Raises:
        ConfigError: the model does not predict every token, or the stride is too long.
        DataError: a file cannot be read, or holds no text.
    """
    window = config.data.sequence_length
    stride = stride or window
    if config.data.objective != "causal":
        wants = "a GPT, because only the probabilities of all tokens give a perplexity"
        todo = "leave out --text: the loss on the validation split is printed"
        raise ConfigError("--text", "a model that fills spans", wants, todo)
    if stride > window:
        raise ConfigError(
            "--stride", stride, f"1 to {window} (data.sequence_length)", "choose a smaller stride"
        )
    pipeline = Pipeline(model, groups)
    with pipeline.evaluating():
        return [_score(config, tokenizer, pipeline, file, stride, key) for file in files]


def windows_of(tokens: Sequence[int], length: int, stride: int) -> Iterator[Window]:
    """Yield the windows of a text. Each token but the first is predicted once.

    A window has `length` inputs. The last one begins as early as this allows, so that its
    predictions have as much context as possible. `stride` tokens are between the ends of two.
    """
    count, done = len(tokens) - 1, 0
    while done < count:
        end = min(done + stride if done else length, count)
        start = max(0, end - length)
        yield Window(tokens[start:end], tokens[start + 1 : end + 1], end - done)
        done = end


def show(scores: Sequence[TextScore]) -> None:
    """Print the table of scores."""
    columns = (
        "documents", "tokens", "bytes", "nats per token", "perplexity per token",
        "perplexity per word", "bits per byte",
    )  # fmt: skip
    table = table_of_numbers("file", columns)
    notes = ((f"; {score.file}" * (len(scores) > 1), score.bits_note) for score in scores)
    table.caption = BITS_PER_BYTE + "".join(file + note for file, note in notes if note)
    for score in scores:
        table.add_row(
            score.file, f"{score.documents:,}", f"{score.tokens:,}", f"{score.bytes:,}",
            f"{score.nats_per_token:.4f}", f"{score.token_perplexity:.4g}",
            f"{score.word_perplexity:.4g}",
            "-" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}",
        )  # fmt: skip
    wide_console().print(table)


def to_dict(score: TextScore) -> dict[str, Any]:
    """Return all values, for JSON."""
    names = ("nats_per_token", "token_perplexity", "word_perplexity")
    values = asdict(score) | {name: getattr(score, name) for name in names}
    del values["nats"]
    return values


def _score(
    config: RunConfig,
    tokenizer: Tokenizer,
    pipeline: Pipeline,
    file: Path,
    stride: int,
    key: str,
) -> TextScore:
    texts = [text for text in _documents(file, key) if text]
    start = tokens_before_text(config.data, tokenizer)
    encoded, counts = list[list[int]](), TextCounts(characters=sum(map(len, texts)))
    for text in texts:
        tokens, of_text = tokenizer.count(text)
        encoded.append(tokens)
        counts.add(of_text)
    documents = [[*start, *tokens] for tokens in encoded]
    windows = [
        window
        for tokens in documents
        for window in windows_of(tokens, config.data.sequence_length, stride)
    ]
    if not windows:
        raise DataError(f"{file} holds no text to predict\n  do: {_OTHER_FILE}")
    shown = tracked(windows, "evaluate", file.name)
    sums = _sums(pipeline, shown, config.data.micro_batch, tokenizer.eod)
    size = sum(len(text.encode()) for text in texts)
    return TextScore(
        file=str(file),
        documents=len(texts),
        tokens=round(sums.tokens),
        bytes=size,
        words=sum(len(re.split(r"\s+", text)) for text in texts),
        nats=sums.nats,
        bits_per_byte=bits_per_byte([TextLoss(sums, size / sum(map(len, encoded)))]),
        bits_note=counts.bits_note,
    )


def _documents(file: Path, key: str) -> Iterator[str]:
    """Yield the texts of a file; an error names the option that gives the key."""
    try:
        yield from _entries(file, key)
    except DataError as error:
        raise DataError(str(error).replace("set data.text_key to", "give as --text-key")) from None


def _entries(file: Path, key: str) -> Iterator[str]:
    try:
        detected = detect(file, key)
        if detected.problem or detected.format is None:
            problem = detected.problem or f"its content is {detected.title}"
            raise DataError(f"{file}: {problem}\n  do: {detected.advice}")
        if detected.has_no_text:
            raise DataError(
                f"{file}: it is {detected.title}\n  do: put the text under the key, or rename the "
                "file to *.txt to evaluate the raw JSON"
            )
        reader = reader_of(file, file.stat().st_size, detected, key, divided=False)
        scan = reader.scan()
        if not scan.cuts:
            raise DataError(f"{file}: {scan.problem}\n  do: {_OTHER_FILE}")
        for cut in scan.cuts:
            for entry in reader.entries(cut):
                if entry.problem is not None:
                    raise DataError(
                        f"{file}, place {entry.place}: {entry.problem}\n  do: repair it, or take "
                        f"it out; the key of the text is '{key}' (--text-key)"
                    )
                yield entry.text
    except OSError as error:
        raise DataError(
            f"{file} cannot be read: {error.strerror or error}\n  do: {_OTHER_FILE}"
        ) from error


def _sums(pipeline: Pipeline, windows: Iterable[Window], samples: int, end: int) -> LossSums:
    """Return the sums over all windows; `samples` windows of equal shapes share a batch."""
    by_shape: dict[tuple[int, int], list[Window]] = {}
    total = torch.zeros(len(LossSums._fields), dtype=torch.float64, device=pipeline.device)
    for window in windows:
        shape = (len(window.inputs), window.predicted)
        ready = by_shape.setdefault(shape, [])
        ready.append(window)
        if len(ready) == samples:
            total += pipeline.sums([_batch(by_shape.pop(shape)).to(pipeline.device)], end)[0].sum(0)
    for ready in by_shape.values():
        total += pipeline.sums([_batch(ready).to(pipeline.device)], end)[0].sum(0)
    return LossSums(*total.tolist())


def _batch(windows: Sequence[Window]) -> Batch:
    length, predicted = len(windows[0].inputs), windows[0].predicted
    padded = -(-length // PADDED_TO) * PADDED_TO  # no token attends to the padding after it
    tokens = torch.zeros(len(windows), padded, dtype=torch.int64)
    labels, mask = torch.zeros_like(tokens), torch.zeros(len(windows), padded)
    for row, window in enumerate(windows):
        tokens[row, :length] = torch.tensor(window.inputs)
        labels[row, :length] = torch.tensor(window.labels)
    mask[:, length - predicted : length] = 1
    return Batch(tokens, labels, torch.arange(padded).expand_as(tokens), mask)


def _exp(value: float) -> float:
    """Return e to a power; infinity if it is too large."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
