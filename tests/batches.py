"""Random samples, each a function of its number alone: the same however they are dealt out."""

from collections.abc import Sequence

import numpy as np
import torch

from frontier_llm.config.run import RunConfig
from frontier_llm.data.batch import Batch
from frontier_llm.data.document_rows import Row, border_table, document_batch
from frontier_llm.geometry.lengths import sample_lengths


def random_batch(config: RunConfig, samples: Sequence[int]) -> Batch:
    """Make a batch of some samples, of the kind that the model reads."""
    return _pairs(config, samples) if config.model.kind == "t5" else _texts(config, samples)


def _texts(config: RunConfig, samples: Sequence[int]) -> Batch:
    length = config.data.sequence_length
    if config.data.documents == "separate":
        return document_batch(
            [_documents(config, index) for index in samples], samples, separate=True
        )
    rows = torch.stack([_tokens(config, index, length + 1) for index in samples])
    positions = torch.arange(length).expand(len(samples), -1)
    return Batch(rows[:, :-1], rows[:, 1:], positions)


def _documents(config: RunConfig, index: int) -> Row:
    """Two to four documents, of which the last may continue, or padding in its place."""
    length = config.data.sequence_length
    borders = [0, *sorted({1 + (7 * index + k * k) % (length - 1) for k in range(1, 4)}), length]
    lengths = np.diff(borders)
    if index % 3 == 0:
        lengths = lengths[:-1]  # padding
    continues = index % 3 == 1
    return Row(_tokens(config, index, length + 1).numpy(), lengths, continues)


def _pairs(config: RunConfig, samples: Sequence[int]) -> Batch:
    """Pad the end of most samples, by lengths of their own."""
    lengths = sample_lengths(config.model, config.data)
    rows = torch.stack([_tokens(config, index, lengths.total) for index in samples])
    inputs, labels = rows.split([lengths.encoder, lengths.decoder], dim=1)
    read = torch.cat([torch.zeros(len(samples), 1, dtype=torch.int64), labels[:, :-1]], dim=1)
    kept = torch.tensor([[lengths.encoder - i % 4, lengths.decoder - i % 3] for i in samples])
    mask = torch.arange(lengths.encoder) < kept[:, :1]
    weights = (torch.arange(lengths.decoder) < kept[:, 1:]).float()
    if config.data.documents == "joined":
        return Batch(read, labels, None, weights, encoder_tokens=inputs, encoder_mask=mask)
    # two or three texts; the encoder has padding after them
    encoder = [[0, 3 + i % 2, 7 + i % 3, lengths.encoder - i % 4] for i in samples]
    decoder = [[0, 2 + i % 3, 5 + i % 2] for i in samples]
    tables = border_table(encoder, lengths.encoder), border_table(decoder, lengths.decoder)
    ends = (torch.full((len(samples), 1), side) for side in (lengths.encoder, lengths.decoder))
    borders = [torch.cat(both, dim=1).int() for both in zip(tables, ends, strict=True)]
    return Batch(
        read, labels, None, weights, borders[1],
        encoder_tokens=inputs, encoder_cumulative_lengths=borders[0],
    )  # fmt: skip


def _tokens(config: RunConfig, index: int, length: int) -> torch.Tensor:
    """Draw tokens, small ones likelier."""
    generator = torch.Generator().manual_seed(index)
    return (torch.rand(length, generator=generator) ** 3 * config.model.vocabulary).long()
