"""The published formulas of the optimizers, in fp64."""

import math

import torch
from torch import Tensor

from frontier_llm.numerics.rounding import FP32, SIGMAS, Number, unit_roundoff
from frontier_llm.numerics.subject import Subject
from frontier_llm.protocols import ParameterRecord

RATE = 1e-2
exact = Number.exact


def expected_update(
    s: Subject,
    record: ParameterRecord,
    old: dict[str, Tensor],
    gradient: Tensor,
    number: int,
    factored: dict[str, Tensor],
) -> dict[str, Number]:
    """Return the states of a parameter after an update.

    Args:
        factored: Adafactor's sums over `rows` and `columns` before the update; empty for vectors.
    """
    rule = s.config.optimizer
    rate = RATE * getattr(rule.rate_factors, record.group) * record.rate_factor
    decay = rule.weight_decay / record.rate_factor if record.group in rule.decayed else 0.0
    kept = exact(old["master"]).times(1 - rate * decay).round(times=2)
    if rule.name == "muon" and record.is_matrix_of_layer:
        return _muon(s, record, old, gradient, kept, rate)
    if rule.name == "adafactor":
        return _adafactor(s, record, old, gradient, number, kept, rate, factored)
    return _adamw(s, old, gradient, number, kept, rate)


def covered(record: ParameterRecord) -> Tensor:
    """Return a bool in the shape of a parameter, false at the padding of the vocabulary."""
    mask = torch.zeros(record.parameter.shape, dtype=torch.bool)
    for placement in record.placements:
        placement.local_view(mask).fill_(True)
    return mask


def _adamw(
    s: Subject, old: dict[str, Tensor], gradient: Tensor, number: int, kept: Number, rate: float
) -> dict[str, Number]:
    """AdamW (arXiv:1711.05101, algorithm 2).

    w - rate (decay w + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + e)), where `kept` is w less the
    weight decay.
    """
    rule, g = s.config.optimizer, exact(gradient).round()
    moments = []
    for name, beta, term in (
        ("exp_avg", rule.beta1, g),
        ("exp_avg_sq", rule.beta2, Number(g.value.square(), 4 * g.value.square() * g.variance)),
    ):
        share = exact(1 - beta).round(times=2).plus(exact(beta).round().minus(beta))
        moment = exact(old[name]).times(exact(beta).round()).round()
        moments.append(moment.plus(term.times(share).round(times=2)).round())
    first, second = moments
    bias1, bias2 = (
        exact(beta**number).round(times=number + 1).times(-1.0).plus(1.0).round()
        for beta in (rule.beta1, rule.beta2)
    )
    root = second.apply(lambda v: (v + 1e-300).sqrt()).round()
    divisor = (
        root.times(bias2.apply(lambda b: b**-0.5)).round(times=3).plus(rule.epsilon).round(times=2)
    )
    step = first.times(bias1.apply(lambda b: 1 / b)).times(divisor.apply(lambda d: 1 / d))
    step = step.round(times=5).times(rate)
    results = {"master": kept.minus(step.round()).round(), "exp_avg": first, "exp_avg_sq": second}
    return results


def in_8_bits(moment: Number, largest: float, *, signed: bool) -> Number:
    """Return a moment whose bound includes its rounding to a table of 256 numbers.

    Between 10^(-z-1) and 10^-z of the largest magnitude of a block of 256 elements lie 2^(7-z)
    numbers at equal distances, or 2^(6-z) with a sign (arXiv:2110.02861, section 2.2). Two of them
    are apart by at most 9 / 2^(7-z) of the smaller one. The bound is half of that and 1 / 128 of
    the moment, by which the nearest number is found, and never less than the smallest number.

    Args:
        largest: the largest magnitude of all moments, which is at least that of each block.
    """
    bits, size = 6 if signed else 7, moment.value.abs()
    decade = (-torch.log10(size / largest + 1e-30)).floor().clamp(0, bits)
    error = size * (4.5 / 2 ** (bits - decade) + 1 / 128)
    error = error.clamp(min=1.01 * largest * 10.0**-bits)
    return Number(moment.value, moment.variance + (error / SIGMAS).square())


def _muon(
    s: Subject,
    record: ParameterRecord,
    old: dict[str, Tensor],
    gradient: Tensor,
    kept: Number,
    rate: float,
) -> dict[str, Number]:
    """Muon: five iterations x <- a x + (b x x^T + c (x x^T)^2) x of each matrix.

    Sources: https://kellerjordan.github.io/posts/muon; arXiv:2502.16982, section 2.2. An error of
    an iteration grows in later ones by at most the largest slope of the polynomial at the singular
    values, or by its largest ratio p(x) / x. Each iteration rounds its products and sums.
    """
    rule = s.config.optimizer
    momentum = 0.95 if rule.momentum is None else rule.momentum
    new = exact(old["exp_avg"]).times(momentum).plus(exact(gradient).round()).round(times=3)
    update = (gradient + momentum * new.value).view(record.parameter.shape)
    fused = record.fused or (len(update),)
    groups = update.view(-1, sum(fused), update.shape[1])
    unit = FP32 if s.dtype == torch.float32 else unit_roundoff(torch.bfloat16)
    directions, errors = [], []
    for part in groups.split(fused, dim=1):
        matrix = part.reshape(-1, update.shape[1])
        x, variance = _orthogonal(matrix, unit)
        scale = 0.2 * math.sqrt(max(matrix.shape))
        directions.append((x * scale).view(part.shape))
        errors.append(torch.full_like(part, variance * scale**2))
    parts = (torch.cat(parts, 1).flatten() for parts in (directions, errors))
    step = Number(*parts).round(times=3).times(rate)
    return {"master": kept.minus(step).round(times=2), "exp_avg": new}


def _orthogonal(matrix: Tensor, unit: float) -> tuple[Tensor, float]:
    """Return the result of the iterations, and the variance of an element's error."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (torch.linalg.vector_norm(x) + 1e-7)
    error = unit * torch.linalg.vector_norm(x).item()
    values = torch.linalg.svdvals(x)
    for _ in range(5):
        growth = float((a + 3 * b * values**2 + 5 * c * values**4).abs().max())
        growth = max(growth, float((a + b * values**2 + c * values**4).abs().max()))
        # norms of the terms, each rounded at most three times
        terms = a * values.norm() + 3 * abs(b) * (values**3).norm() + 5 * c * (values**5).norm()
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
        values = a * values + b * values**3 + c * values**5
        error = math.hypot(error * growth, unit * float(terms))
    result = x.T if matrix.shape[0] > matrix.shape[1] else x
    return result, error**2 / 3 / matrix.numel()


def _adafactor(
    s: Subject,
    record: ParameterRecord,
    old: dict[str, Tensor],
    gradient: Tensor,
    number: int,
    kept: Number,
    rate: float,
    factored: dict[str, Tensor],
) -> dict[str, Number]:
    """Adafactor (arXiv:1804.04235, algorithms 4 to 6), with the decay min(1 - t^-0.8, beta2)."""
    rule = s.config.optimizer
    decay = min(1 - number**-0.8, rule.beta2)
    squares, results = gradient.square() + 1e-30, {}
    if factored:
        shape = record.parameter.shape
        fused = record.fused or (shape[0],)
        member = (
            torch.arange(len(fused))
            .repeat_interleave(torch.tensor(fused))
            .repeat(shape[0] // sum(fused))
        )
        rows = squares.view(shape).sum(1)
        columns = torch.zeros(len(fused), shape[1], dtype=torch.float64).index_add_(
            0, member, squares.view(shape)
        )
        rows = decay * factored["rows"].double() + (1 - decay) * rows
        columns = decay * factored["columns"].double().view(columns.shape) + (1 - decay) * columns
        totals = columns.sum(1)
        second = (rows[:, None] / totals[member][:, None] * columns[member]).flatten()
        index = member.repeat_interleave(shape[1])
    else:
        second = decay * old["exp_avg_sq"].double() + (1 - decay) * squares
        results["exp_avg_sq"] = Number(second, 8 * (FP32 * second).square())
        index = torch.zeros(len(gradient), dtype=torch.int64)
    update = gradient / second.sqrt()
    counts = index.bincount(weights=covered(record).flatten().double())

    def rms(values: Tensor) -> Tensor:
        return (
            torch.zeros_like(counts).index_add_(0, index, values.double().square()) / counts
        ).sqrt()

    step = rate * rms(old["master"]).clamp(min=1e-3) / rms(update).clamp(min=1.0)
    step = step[index] * update
    # the relative errors of sums of positive numbers are at most the root of their number
    relative = FP32**2 / 3 * (16 + 6 * len(gradient))
    moved = Number(step, step.square() * relative)
    if rule.beta1:
        moved = (
            exact(old["exp_avg"]).times(rule.beta1).plus(moved.times(1 - rule.beta1)).round(times=4)
        )
        results["exp_avg"] = moved
    return results | {"master": kept.minus(moved).round(times=2)}
