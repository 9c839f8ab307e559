"""Run the kernels of both ends of the model, forward and backward: the embedding and the loss."""

from typing import Any

import torch
from torch import Tensor

from frontier_llm.model import t5
from frontier_llm.numerics import references
from frontier_llm.numerics.references import exact
from frontier_llm.numerics.rounding import Number
from frontier_llm.numerics.subject import Pairs, Subject, gradients, paired, shape_of

COLUMNS = 64
"""Columns of the embedding that are compared."""
LOGITS_BYTES = 2**30
"""Largest memory of the compared logits in fp32."""


def embedding_rows(s: Subject, embedding: Any) -> tuple[str, Pairs]:
    """The rows of tokens and positions, and the sums of their gradients."""
    model, samples, unit = s.layout.model, s.layout.micro_batch, s.arithmetic.run
    length = s.tokens // samples
    tables = list(embedding.parameters())
    ids = s.integers(min(model.vocabulary, 997), samples, length)
    ids[0, 0] = model.vocabulary - 1
    positions = torch.arange(length, device=s.device).expand(samples, -1)
    y = embedding(ids, positions if len(tables) > 1 else None)
    grad, columns = s.random(*y.shape), s.some(model.hidden, COLUMNS)
    found = gradients(y, grad, tables)
    host = [table.detach().cpu()[:, columns] for table in tables]
    indices = [index.T.cpu() for index in (ids, positions)]
    output = exact(host[0][indices[0]])
    if len(tables) > 1:
        output = output.plus(exact(host[1][indices[1]])).round(unit)
    pairs: Pairs = {"output": (y[..., columns], output)}
    kept = exact(grad[..., columns]).value.flatten(0, 1)
    for name, table, ours, index in zip(
        ("tokens", "positions"), host, found, indices, strict=False
    ):
        sums, squares = (torch.zeros(table.shape, dtype=torch.float64) for _ in range(2))
        sums.index_add_(0, index.flatten(), kept)
        squares.index_add_(0, index.flatten(), kept.square())
        # the device may add up in the format of the run; the first gradient of a row is exact
        additions = index.flatten().bincount(minlength=len(table))[:, None].sub(1).clamp(min=0)
        squares += sums.square()
        expected = Number(sums, additions * unit**2 / 3 * squares)
        pairs[f"gradient of the {name}"] = (ours[:, columns], expected)
    return shape_of(("tokens", s.tokens), ("columns", len(columns), model.hidden)), pairs


def loss(s: Subject, chunk: Any) -> tuple[str, Pairs]:
    """Cross entropy, z-loss and the gradient of the logits."""
    model, wide = s.layout.model, s.model.records[0].parameter.shape[0]
    length, samples = s.layout.lengths.decoder, s.layout.micro_batch
    total, most = length * samples, max(16, LOGITS_BYTES // (4 * wide))
    if total > most:
        length, samples = most, 1
    labels = s.integers(model.vocabulary, samples, length)
    factors = s.random(samples, length).float().abs()
    logits = s.random(length, samples, wide, scale=3.0).requires_grad_()
    rows = s.some(length * samples, s.affordable(length * samples, 4000 * wide, 8))
    place = rows.to(s.device)
    kept = exact(logits.flatten(0, 1)[place, : model.vocabulary])
    given = logits.clone()  # as the product of the head, it is overwritten
    if model.kind == "gpt":
        losses = chunk.compute_language_model_loss(labels, given)
    else:
        losses = t5.token_losses(given, labels, chunk.vocabulary, chunk.pg_collection.tp)
    z_loss = s.config.optimizer.z_loss
    mean = losses.means(lambda x: (x * factors).sum(), z_loss).sum()
    (found,) = gradients(mean, torch.ones_like(mean), [logits])

    def of_rows(x: Tensor) -> Tensor:
        return x.T.flatten()[place].detach().cpu()

    expected = references.cross_entropy(
        s.arithmetic, kept, of_rows(labels), model.logit_softcap, of_rows(factors), z_loss
    )
    padding = exact(torch.zeros(len(rows), wide - model.vocabulary))
    of_logits = expected["gradient of the logits"]
    expected["gradient of the logits"] = references.concatenated((of_logits, padding), 1)
    ours = [*map(of_rows, losses), found.flatten(0, 1)[place]]
    return shape_of(("tokens", len(rows), total), ("logits", wide)), paired(ours, expected)
