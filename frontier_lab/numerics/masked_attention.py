"""Run the kernels of attention, forward and backward: norms and rotation of heads, and masks."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frontier_lab.numerics import references
from frontier_lab.numerics.references import Number, exact
from frontier_lab.numerics.subject import Pairs, PassThrough, Subject, gradients, shape_of
from frontier_llm.config.model import ModelConfig
from frontier_llm.model.reads import Documents, Reads

SCORES = 2.0
"""Standard deviation of the scores, unless they have a bound of more than four times as much. With
smaller ones all keys would count about the same."""


def queries_and_keys(
    s: Subject, attention: Any, module: Any, number: int, *, turns: bool = True
) -> tuple[str, Pairs]:
    """Queries, keys and values as parts of one product, normalised and, if it `turns`, rotated."""
    model, length = s.layout.model, s.tokens // s.layout.micro_batch
    heads, groups, d = model.heads, model.kv_heads, model.head_dim
    wide, samples = (heads + 2 * groups) * d, min(s.layout.micro_batch, 2)
    rotates = turns and model.positions == "rotary"
    rows = s.some(length, s.affordable(length, 800 * wide * samples, 64))
    small = 1.0 if attention.norms is None else model.norm_epsilon
    mixed = s.rows_near(small, length, samples, wide).requires_grad_()
    product, attention.linear_qkv = attention.linear_qkv, PassThrough()
    try:
        first = partial(module.angles, Reads(), length, model.layer_window(number))
        results = attention.heads(mixed, first() if rotates else None)
    finally:
        attention.linear_qkv = product
    grads = [torch.zeros_like(x) for x in results]
    for grad in grads:
        grad[rows] = s.random(*grad[rows].shape)
    weights = [] if attention.norms is None else list(attention.norms.parameters())
    joined, joined_grads = (torch.cat([x.flatten() for x in xs]) for xs in (results, grads))
    found, *of_weights = gradients(joined, joined_grads, [mixed, *weights])
    inputs, ours = (_split(x[rows].detach(), groups, d) for x in (mixed, found))
    turned = None
    if rotates:
        turned = [
            t.view(lambda v: v[rows]) for t in references.rotation(model, length, s.arithmetic)
        ]
    pairs: Pairs = {}
    for number, name in enumerate(("queries", "keys", "values")):
        used = turned if number < 2 else None
        weight = weights[number] if number < len(weights) else None
        expected = _of_heads(s, exact(inputs[number]), exact(grads[number][rows]), used, weight)
        pairs[name] = (results[number][rows], expected[0])
        pairs[f"gradient of the {name}"] = (ours[number], expected[1])
        if weight is not None:
            pairs[f"gradient of the weight for {name}"] = (of_weights[number], expected[2])
    tokens = ("tokens", len(rows) * samples, s.tokens)
    return shape_of(tokens, *_heads_of(model)), pairs


def _heads_of(model: ModelConfig) -> list[tuple[str, int]]:
    return [("heads", model.heads), ("of keys", model.kv_heads), ("wide", model.head_dim)]


def _split(mixed: Tensor, groups: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split [.., wide] into query heads, key and value of each head of keys, in this order."""
    parts = mixed.unflatten(2, (groups, -1, d))
    return parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]


def _of_heads(
    s: Subject, x: Number, grad: Number, turned: Any, weight: Tensor | None
) -> list[Number]:
    """Return heads [s, b, h, d] after norm and rotation, and the gradients of heads and weight."""
    a, model, shape = s.arithmetic, s.layout.model, x.value.shape
    if turned is not None:
        cosines, sines = turned
        grad = references.rotate(grad, cosines, Number(-sines.value, sines.variance), a)
    results = [x, grad]
    if weight is not None:
        width = len(weight)
        flat, flat_grad = (t.view(lambda v: v.reshape(-1, width)) for t in (x, grad))
        factor = references.norm_factor(model, weight)
        normed = references.norm(a, flat, (factor, None), model.norm_epsilon, flat_grad)
        output, of_input, of_weight = normed.values()
        results = [t.view(lambda v: v.view(shape)) for t in (output, of_input)] + [of_weight]
    if turned is not None:
        results[0] = references.rotate(results[0], cosines, sines, a)
    return results


class _Mask(NamedTuple):
    """What a kernel of attention reads, and what its reference reads."""

    is_read: Tensor
    """[b, s, t] bool, on the host."""
    reads: Reads
    bias: Tensor | None = None
    """The argument `bias`."""
    table: Tensor | None = None
    """[buckets, heads], the relative positions."""
    buckets: Tensor | None = None
    """[s, t] int64, the row of the table of each score."""


def self_attention(s: Subject, attention: Any, module: Any, number: int) -> tuple[str, Pairs]:
    """The self attention of a layer with its window, documents, padding or relative positions."""
    model, causal = s.layout.model, number >= s.layout.model.encoder_layers
    lengths, samples = s.layout.lengths, min(s.layout.micro_batch, 2)
    length = lengths.decoder if causal else lengths.encoder
    (window, after), at = model.layer_bounds(number), torch.arange(length)
    distance = at[:, None] - at[None, :]
    is_read = distance < (window or length)
    is_read = is_read & (distance > -(after or length))
    is_read, documents = is_read.expand(samples, -1, -1), Reads()
    if not causal:
        padding = _padding(s, samples, length)
        documents = Reads(keys=Documents.padded(padding))
        is_read = is_read & padding.cpu()[:, None, :]
    if s.layout.documents == "separate":
        separate, document = _documents(s, samples, length)
        documents = Reads(queries=separate, keys=separate)
        is_read = is_read & (document[:, :, None] == document[:, None, :])
    if model.merges_attention(number):
        padding = _padding(s, samples, lengths.encoder)
        encoded, is_encoded = Documents.padded(padding), padding.cpu()[:, None, :]
        if documents.queries is not None:
            encoded, of_keys = _documents(s, samples, lengths.encoder)
            is_encoded = document[:, :, None] == of_keys[:, None, :]
        documents = replace(documents, context=lengths.encoder, context_keys=encoded)
        is_read = torch.cat([is_encoded.expand(-1, length, -1), is_read], dim=2)
    table = bias = buckets = None
    if module.positions is not None:
        table, bias = module.positions.weight, module.positions()
        buckets = _buckets(model, -distance, causal)
    reads = module.reads_by_window(documents, length, s.device, bias)[window]
    return _attend(s, attention.core_attention, _Mask(is_read, reads, bias, table, buckets))


def cross_attention(s: Subject, core: Any) -> tuple[str, Pairs]:
    """The attention of decoder tokens to encoder tokens, some of which are padding."""
    samples, lengths = min(s.layout.micro_batch, 2), s.layout.lengths
    padding = _padding(s, samples, lengths.encoder)
    is_read = padding.cpu()[:, None, :].expand(-1, lengths.decoder, -1)
    return _attend(s, core, _Mask(is_read, Reads(keys=Documents.padded(padding))))


def _documents(s: Subject, samples: int, length: int) -> tuple[Documents, Tensor]:
    """Return three documents in each sample, and the document of each token, on the host."""
    ends = [[0, length // 3 + n, length - length // 4, length] for n in range(samples)]
    borders, at = torch.tensor(ends), torch.arange(length)
    document = torch.stack([torch.bucketize(at, row, right=True) for row in borders])
    return Documents(borders.to(s.device, torch.int32), length), document


def _padding(s: Subject, samples: int, length: int) -> Tensor:
    """Return [samples, length] bool, true at tokens; each sample ends with padding."""
    ends = torch.tensor([[max(1, length - 1 - 5 * n)] for n in range(samples)], device=s.device)
    return torch.arange(length, device=s.device) < ends


def _attend(s: Subject, core: Any, mask: _Mask) -> tuple[str, Pairs]:
    """Attention whose gradients come from some of the queries."""
    model, (samples, queries, keys) = s.layout.model, mask.is_read.shape
    heads, groups, d = model.heads, model.kv_heads, model.head_dim
    size = max(SCORES, (model.attention_softcap or 0.0) / 4)
    spread = (size / (references.score_scale(model) * d**0.5)) ** 0.5
    q, k, v = (
        s.random(tokens, samples, count, d, scale=scale).requires_grad_()
        for tokens, count, scale in (
            (queries, heads, spread), (keys, groups, spread), (keys, groups, 1.0)
        )
    )  # fmt: skip
    rows = s.some(queries, s.affordable(queries, 60 * d * keys * samples * heads, 16))
    grad = torch.zeros_like(q)
    grad[rows] = s.random(len(rows), samples, heads, d)
    output = core(q, k, v, mask.reads, mask.bias)
    leaves = [q, k, v] + ([] if mask.table is None else [mask.table])
    found = gradients(output, grad.flatten(2), leaves)
    results = [output.unflatten(2, (heads, d))[rows], found[0][rows], found[1], found[2]]
    parts: list[references.Results] = []
    tensors = [x.detach().cpu() for x in (q[rows], k, v, grad[rows])]
    for sample in range(samples):
        for group in range(groups):
            parts.append(_group_reference(s, tensors, mask, rows, (sample, group)))
    pairs: Pairs = {}
    for name, ours in zip(list(parts[0])[:4], results, strict=True):
        ordered = _by_group(ours.detach(), groups)
        pairs[name] = (ordered, references.concatenated([part[name] for part in parts], 0))
    if mask.table is not None and mask.buckets is not None:
        of_scores = [part["gradient of the scores"] for part in parts]
        expected = _table_gradient(s, mask.table, mask.buckets[rows], of_scores)
        pairs["gradient of the relative positions"] = (found[3], expected)
    sizes = ("samples", samples, s.layout.micro_batch), ("queries", len(rows), queries)
    return shape_of(*sizes, ("keys", keys), *_heads_of(model)), pairs


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Order [n, b, h, d] by sample, head of keys, query head and token: [b * h * n, d]."""
    return x.unflatten(2, (groups, -1)).permute(1, 2, 3, 0, 4).flatten(0, 3)


def _group_reference(
    s: Subject, tensors: list[Tensor], mask: _Mask, rows: Tensor, at: tuple[int, int]
) -> references.Results:
    """Return the reference of one sample and head of keys."""
    model, (sample, group) = s.layout.model, at
    ratio = model.heads // model.kv_heads
    own = slice(group * ratio, (group + 1) * ratio)
    q, grad = (x[:, sample, own].transpose(0, 1).flatten(0, 1) for x in (tensors[0], tensors[3]))
    bias = None
    if mask.table is not None and mask.buckets is not None:
        table = exact(mask.table[:, own]).value
        bias = table[mask.buckets[rows]].permute(2, 0, 1).flatten(0, 1)
    k, v = (x[:, sample, group] for x in tensors[1:3])
    is_read = mask.is_read[sample, rows].repeat(ratio, 1)
    queries = mask.is_read.shape[1]
    blocks = -(-queries // (256 if queries >= 768 else 32))
    return references.attention(s.arithmetic, model, (q, k, v, grad), is_read, bias, blocks)


def _buckets(model: ModelConfig, distance: Tensor, causal: bool) -> Tensor:
    """Return the bucket of each distance key - query (T5, arXiv:1910.10683, section 2.1).

    A distance n of at least m, half of the buckets of a side, is in bucket m + j with the largest j
    for which log(n / m) / log(D / m) * m >= j, where D is the largest distance.
    """
    buckets = model.relative_buckets
    first, n = torch.zeros_like(distance), (-distance).clamp(min=0)
    if not causal:
        buckets //= 2
        first, n = (distance > 0) * buckets, distance.abs()
    m = buckets // 2
    largest = torch.tensor(model.relative_distance / m, dtype=torch.float64).log()
    # 1e-9, because a quotient that is a whole number may be rounded down
    wide = m + ((n.clamp(min=1) / m).double().log() / largest * (buckets - m) + 1e-9).long()
    return first + torch.where(n < m, n, wide.clamp(max=buckets - 1))


def _table_gradient(s: Subject, table: Tensor, buckets: Tensor, of_scores: list[Number]) -> Number:
    """Sum the gradients of scores by bucket and head, in the format of the run.

    The table is [buckets, heads], the buckets are [n, t] int64, and the gradients, per sample and
    head of keys, [query heads * n, t].
    """
    model = s.layout.model
    flat, ratio = buckets.flatten(), model.heads // model.kv_heads
    sums = torch.zeros(3, *table.shape, dtype=torch.float64)
    for number, part in enumerate(of_scores):
        first = number % model.kv_heads * ratio
        kinds = part.value, part.variance, part.value.square()
        for kind, values in zip(sums, kinds, strict=True):
            for head, of_head in enumerate(values.chunk(ratio)):
                kind[:, first + head].index_add_(0, flat, of_head.flatten())
    additions = flat.bincount(minlength=len(table))[:, None] * s.layout.micro_batch
    run = s.arithmetic.run
    squares = sums[2] + sums[0].square()
    return Number(sums[0], sums[1] + additions * run**2 / 3 * squares).round(run, 3)
