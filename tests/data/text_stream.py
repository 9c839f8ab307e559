"""The documents of a split in memory, and samples of them."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from frontier_llm.data.document_rows import DocumentSamples, document_batch
from frontier_llm.data.loader import causal_batch
from frontier_llm.data.packed_samples import PackedSamples
from frontier_llm.data.packing import pack
from frontier_llm.data.prepared_corpus import Samples


class TextStream:
    """Tokens whose values are their places, in documents of some lengths."""

    prefix = Path("memory")

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = np.array(lengths, np.int32)
        self._starts = np.cumsum(lengths) - lengths

    def __len__(self) -> int:
        return int(self._lengths.sum())

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        assert 0 <= start <= len(self) - count
        return np.arange(start, start + count)

    def documents_within(self, start: int, count: int) -> npt.NDArray[np.int64]:
        return self._starts[(self._starts >= start) & (self._starts < start + count)]

    def document_starts(self) -> npt.NDArray[np.int64]:
        return self._starts

    def document_lengths(self) -> npt.NDArray[np.int32]:
        return self._lengths


def samples_of(
    documents: Sequence[int], length: int, mode: str, packing: str, *, shuffle: bool = True
) -> Any:
    """Return the samples of a run, as `window_corpus` does."""
    stream: Any = TextStream(documents)
    separate = mode == "separate"
    if packing == "best_fit":
        packed = pack(stream.document_lengths(), length)
        return PackedSamples(stream, packed, 1, "x", shuffle=shuffle, separate=separate)
    kind = DocumentSamples if separate else Samples
    return kind(stream, length, 1, "x", shuffle=shuffle, separate=separate)


def predicted(samples: Any, indices: Sequence[int], mode: str) -> list[Counter[int]]:
    """Return the places of the tokens that each sample predicts."""
    found = []
    for index in indices:
        row = samples[index]
        is_plain = isinstance(row, np.ndarray)
        make = causal_batch if is_plain else partial(document_batch, separate=mode == "separate")
        batch = make([row], [index])
        mask = batch.loss_mask
        labels = batch.labels[0]
        found.append(Counter((labels if mask is None else labels[mask[0] > 0]).tolist()))
    return found


def restore(
    inputs: Sequence[int], targets: Sequence[int], sentinels: Sequence[int], eos: int
) -> list[int]:
    """Return the original text: the inputs with the span of each sentinel put back in its place."""
    spans: dict[int, list[int]] = {}
    span: list[int] = []
    marks = set(sentinels)
    for token in targets[:-1]:
        if token in marks:
            span = spans[token] = []
        else:
            span.append(token)
    assert inputs[-1] == targets[-1] == eos, "inputs and targets end with eos"
    text: list[int] = []
    for token in inputs[:-1]:
        text += spans.get(token, [token])
    return text
