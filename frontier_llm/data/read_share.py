"""Measure which share of the pairs of tokens of a sample attention reads (`data.read_share`)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from frontier_llm.config.reading import corpus_shares
from frontier_llm.config.run import RunConfig
from frontier_llm.data.corpus_manifest import IDX_HEADER, MANIFEST_FILE, Manifest
from frontier_llm.data.packing import Packing, open_packing
from frontier_llm.data.pair_packing import Pairs


def read_share(lengths: npt.NDArray[np.integer], sequence_length: int, packing: str) -> float:
    """Return the mean of the sum of n^2 / s^2 over the samples of an epoch.

    A sample has s tokens, and n of each of its documents. The documents of the split have these
    lengths, in their order. With `best_fit`, the padding of samples is not counted.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    if packing == "best_fit":  # each document is cut by itself
        whole, rest = np.divmod(lengths.astype(np.int64), sequence_length)
        squares = whole.sum() * float(sequence_length) ** 2 + np.square(rest, dtype=float).sum()
        samples = -(-int(ends[-1]) // sequence_length)
    else:
        samples = max(1, (int(ends[-1]) - 1) // sequence_length)
        cuts = np.arange(samples + 1) * sequence_length
        borders = np.union1d(cuts, ends[ends < cuts[-1]])
        squares = np.square(np.diff(borders), dtype=float).sum()
    return min(1.0, float(squares) / samples / sequence_length**2)


def pair_share(packing: Packing, pairs: Pairs) -> float:
    """Return the same for the samples of an encoder-decoder, of which `packing` has the texts.

    The scores within each side and between both are counted together.
    """
    assert packing.pairs is not None
    limits = np.array([[pairs.inputs, pairs.targets]])
    read, whole = (
        (np.square(sizes).sum() + sizes.prod(axis=1).sum())
        for sizes in (packing.pairs[:, 1:].astype(float), limits.astype(float))
    )
    return float(read / len(packing) / whole)


def with_read_share(config: RunConfig, folders: Sequence[Path]) -> RunConfig:
    """Fill in the share of prepared corpora, whose folders are given, if it is needed.

    Each corpus counts as often as it is read.
    """
    data = config.data
    if data.documents != "separate" or data.read_share is not None:
        return config
    names = [corpus.name for corpus in data.sources]
    shares, tokens = dict[str, float](), dict[str, int]()
    for name, folder in zip(names, folders, strict=True):
        split = Manifest.load(folder / MANIFEST_FILE).train
        lengths = np.fromfile(
            folder / "train.idx", np.int32, split.documents, offset=IDX_HEADER.size
        )
        if (pairs := Pairs.of(data)) is None:
            shares[name] = read_share(lengths, data.sequence_length, data.packing)
        else:
            packing = open_packing(folder / "train", lengths, data.sequence_length, pairs)
            shares[name] = pair_share(packing, pairs)
        tokens[name] = split.tokens
    share = shares[names[0]]
    if data.kind == "blend":
        weights = corpus_shares(tokens, {c.name: c.weight for c in data.sources}, data.blend_alpha)
        share = sum(weights[name] * share for name, share in shares.items())
    return config.changed("data", read_share=share)
