"""Run the kernels of a model, forward and backward, as a step does: its layers and both ends."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from torch import Tensor, nn

from frontier_lab.numerics import references
from frontier_lab.numerics.masked_attention import cross_attention, queries_and_keys, self_attention
from frontier_lab.numerics.references import Number, exact
from frontier_lab.numerics.subject import (
    Check,
    Pairs,
    PassThrough,
    Subject,
    check,
    gradients,
    paired,
    shape_of,
)
from frontier_llm.geometry.model_chunks import Stack
from frontier_llm.model.attention_kernels import attention_kernels
from frontier_llm.protocols import set_product_sink
from frontier_llm.sharding import unit_gradients

ROWS, FEATURES = 256, 1024
"""Rows and columns of a matrix product that are compared with the product of the same rows and
columns in fp64."""
NORMS = ("attention_norms", "cross_attention_norms", "mlp_norms")
COLUMNS = 64
LOGITS_BYTES = 2**30
"""Largest memory of the compared logits in fp32."""


def model_checks(s: Subject) -> Iterator[Check]:
    """Yield the checks of all kernels of the model, in the order of a step."""
    chunk: Any = s.model.chunks[0]
    s.fill(chunk)
    kernels = iter(attention_kernels(s.layout, s.device).items())
    if chunk.encoder_embedding is not None:
        run = partial(embedding_rows, s.side(0), chunk.encoder_embedding)
        yield check(s, "embedding of the encoder", "torch", run)
    yield check(s, "embedding", "torch", partial(embedding_rows, s, chunk.embedding))
    for stack in chunk.stacks:
        module, side = getattr(chunk, stack.name), s.side(stack.layers.start)
        for number, layer in enumerate(module.layers):
            if number == 0:
                yield from _before_attention(side, stack, layer, module)
            kind, kernel = next(kernels)
            of_model = stack.layers[number]
            attend = partial(self_attention, side, layer.self_attention, module, of_model)
            yield check(side, f"attention ({kind})", kernel, attend)
            if number == 0:
                yield from _after_attention(side, stack.name, layer, kernels)
    yield check(s, "norm (final)", s.kernels.source, partial(_norm, s, module.final_layernorm))
    yield _product(s, chunk, "output_layer", "head")
    yield check(s, "loss", "chunks in fp32", partial(loss, s, chunk))


def _before_attention(s: Subject, part: Stack, layer: Any, module: Any) -> Iterator[Check]:
    stack = part.name
    for name in NORMS:
        for place, norm in enumerate(getattr(layer, name, ())):
            words = name.removesuffix("_norms").replace("_", " ") + " output" * place
            yield check(s, f"norm ({stack}, {words})", s.kernels.source, partial(_norm, s, norm))
    attention = layer.self_attention
    if s.layout.model.merges_attention(part.layers[0]):  # norms and rotation are the encoder's
        yield _product(s, attention, "linear_q", stack)
        yield _product(s, attention, "linear_kv", stack)
        return
    yield _product(s, attention, "linear_qkv", stack)
    run = partial(queries_and_keys, s, attention, module, part.layers[0])
    if attention.norms is not None:
        unrotated = partial(run, turns=False)
        yield check(s, f"norms of queries and keys ({stack})", s.kernels.source, unrotated)
    yield check(s, f"queries and keys ({stack})", s.elementwise, run)


def _after_attention(s: Subject, stack: str, layer: Any, kernels: Any) -> Iterator[Check]:
    yield _product(s, layer.self_attention, "linear_proj", stack)
    cross: Any = getattr(layer, "cross_attention", None)
    if cross is not None:
        yield _product(s, cross, "linear_q", "cross")
        yield _product(s, cross, "linear_kv", "cross")
        kind, kernel = next(kernels)
        run = partial(cross_attention, s, cross.core_attention)
        yield check(s, f"attention ({kind})", kernel, run)
        yield _product(s, cross, "linear_proj", "cross")
    yield _product(s, layer.mlp, "linear_fc1", stack)
    label = f"activation ({stack}, {s.layout.model.activation})"
    yield check(s, label, s.elementwise, partial(_activation, s, layer.mlp))
    yield _product(s, layer.mlp, "linear_fc2", stack)
    yield check(s, f"residual ({stack})", "torch", partial(_residual, s, layer))


def _norm(s: Subject, module: Any) -> tuple[str, Pairs]:
    """A norm of rows, some of whose mean squares are as small as epsilon."""
    model = s.layout.model
    count = s.affordable(s.tokens, 200 * model.hidden, 64)
    x = s.rows_near(model.norm_epsilon, count, 1, model.hidden).requires_grad_()
    grad = s.random(*x.shape)
    y = module(x)
    found = gradients(y, grad, [x, *module.parameters()])
    weights = references.norm_factor(model, module.weight), module.bias
    expected = references.norm(
        s.arithmetic, exact(x[:, 0]), weights, model.norm_epsilon, exact(grad[:, 0])
    )
    ours = [y[:, 0], found[0][:, 0], *found[1:]]
    return shape_of(("rows", count, s.tokens), ("wide", model.hidden)), paired(ours, expected)


class _Sum:
    """The sink of a weight's gradient: fp32 sums over micro-batches, as sharding keeps them."""

    is_deferring = False

    def __init__(self, weight: Tensor) -> None:
        self.total = torch.full(weight.shape, torch.nan, device=weight.device)
        self._has_sum = False

    def __call__(self, grad_outputs: Tensor, inputs: Tensor, gather: Any = None) -> None:
        unit_gradients.accumulate_product(self.total, grad_outputs.t(), inputs, add=self._has_sum)
        self._has_sum = True

    def add(self, gradient: Tensor) -> None:
        """Add a gradient that autograd has computed."""
        self.total = gradient.float() + (self.total if self._has_sum else 0.0)
        self._has_sum = True


def _product(s: Subject, owner: nn.Module, name: str, stack: str) -> Check:
    fused = s.config.sharding.fused_gradients and (
        name == "output_layer" or not s.kernels.compiles_layers
    )
    label = f"linear product ({stack}, {name.removeprefix('linear_')})"
    run = partial(_linear, s, owner, getattr(owner, name), fused=fused)
    return check(s, label, "fused gradient" if fused else "torch", run)


def _linear(s: Subject, owner: Any, module: Any, *, fused: bool) -> tuple[str, Pairs]:
    """Two micro-batches of a linear layer, whose weight gradients are added."""
    a, is_tied = s.arithmetic, module.weight is None
    weight = owner.embedding.word_embeddings.weight if is_tied else module.weight
    options = {"weight": weight} if is_tied else {}
    (wide, inputs), factor = weight.shape, getattr(module, "input_factor", 1.0)
    count = s.affordable(s.tokens, 12 * weight.numel(), 16, on_device=True)
    rows, outs, ins = s.some(count, ROWS), s.some(wide, FEATURES), s.some(inputs, FEATURES)
    total = _Sum(weight)
    if fused and not is_tied:
        set_product_sink(weight, total)
    expected = exact(torch.zeros(len(outs), len(ins)))
    for _ in range(2):
        x, grad = s.random(count, 1, inputs).requires_grad_(), s.random(count, 1, wide)
        y, later = module(x, **options)
        has_bias = module.bias is not None and later is None
        found = gradients(y, grad, [x, weight, *([module.bias] if has_bias else [])])
        if is_tied or not fused:
            total.add(found[1])
        scaled = exact(x[:, 0]).times(factor).round(a.run if factor != 1.0 else 0.0)
        part = exact(grad[:, 0, outs].T).product(scaled.view(lambda t: t[:, ins]), a)
        expected = expected.plus(part.round(a.run)).round()
    pairs: Pairs = {"gradient of the weight": (total.total[outs][:, ins], expected)}
    bias = module.bias[outs] if has_bias else None
    grads = exact(grad[rows, 0])
    forward = references.linear(a, scaled.view(lambda t: t[rows]), weight[outs], bias)
    back = grads.product(exact(weight[:, ins]), a).round(a.run).times(factor).round(a.run)
    pairs["output"] = (y[rows, 0][:, outs], forward)
    pairs["gradient of the input"] = (found[0][rows, 0][:, ins], back)
    if has_bias:
        pairs["gradient of the bias"] = (found[2], references.over_rows(exact(grad[:, 0]), a))
    return shape_of(("tokens", count, s.tokens), ("in", inputs), ("out", wide)), pairs


def _activation(s: Subject, mlp: Any) -> tuple[str, Pairs]:
    """The activation of a feed-forward block, without the two products."""
    model = s.layout.model
    wide = model.ffn * (2 if model.gated else 1)
    count = s.affordable(s.tokens, 4000 * wide, 16)
    x, grad = s.random(count, 1, wide, scale=1.5).requires_grad_(), s.random(count, 1, model.ffn)
    first, second = mlp.linear_fc1, mlp.linear_fc2
    bias = None if s.device.type == "cpu" else first.bias  # a CPU adds it in the product
    mlp.linear_fc1, mlp.linear_fc2 = PassThrough(bias), PassThrough()
    try:
        y, _ = mlp(x)
        (found,) = gradients(y, grad.clone(), [x])
    finally:
        mlp.linear_fc1, mlp.linear_fc2 = first, second
    inputs = exact(x[:, 0])
    if bias is not None:
        inputs = inputs.plus(exact(bias)).round(s.arithmetic.run)
    expected = references.activation(s.arithmetic, model.activation, inputs, exact(grad[:, 0]))
    return shape_of(("tokens", count, s.tokens), ("wide", wide)), paired(
        [y[:, 0], found[:, 0]], expected
    )


def _residual(s: Subject, layer: Any) -> tuple[str, Pairs]:
    """The sum of a block's output, its bias and the residual stream."""
    hidden, run = s.layout.model.hidden, s.arithmetic.run
    count = s.affordable(s.tokens, 4000 * hidden, 16)
    x, residual = (s.random(count, 1, hidden).requires_grad_() for _ in range(2))
    grad = s.random(count, 1, hidden)
    bias = None if s.device.type == "cpu" else layer.mlp.linear_fc2.bias
    add = get_bias_dropout_add(layer.training, layer.config.bias_dropout_fusion)
    y = add((x, bias), residual, 0.0)
    found = gradients(y, grad, [x, residual])
    block = exact(x) if bias is None else exact(x).plus(exact(bias)).round(run)
    expected = {
        "output": block.plus(exact(residual)).round(run),
        "gradient of the block": exact(grad),
        "gradient of the residual stream": exact(grad),
    }
    return shape_of(("tokens", count, s.tokens), ("wide", hidden)), paired([y, *found], expected)


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
    losses = chunk.losses(given, labels)
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
