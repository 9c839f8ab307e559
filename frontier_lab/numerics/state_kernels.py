"""Run the kernels of the model states: sums of gradients, the optimizer, casts and quantisers.

The references of the optimizers are their published formulas, in fp64.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from frontier_lab.numerics.references import FP32, SIGMAS, Number, exact, unit_roundoff
from frontier_lab.numerics.subject import Check, Pairs, Subject, check
from frontier_llm.collectives.blockwise import BlockKernels
from frontier_llm.collectives.slots import Slots
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.device import accumulate
from frontier_llm.geometry.formats import Format
from frontier_llm.protocols import ParameterRecord, product_sink
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.states import shard

RATE = 1e-2
UPDATES, SEEDS = 2, 64
DIVISOR = 2.0
"""Divisor of the gradients, as clipping and the loss scale give one."""


def expected_update(
    s: Subject,
    record: ParameterRecord,
    old: dict[str, Tensor],
    gradient: Tensor,
    number: int,
    factored: dict[str, Tensor],
) -> dict[str, Number]:
    """Return the states of a parameter after an update.

    Adafactor's sums over `rows` and `columns` before the update are `factored`.
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


def state_checks(s: Subject) -> Iterator[Check]:
    """Yield the checks of the kernels of model states; `s` has small dimensions."""
    yield check(s, "sum of products", _accumulation(s), partial(_accumulated, s))
    states = shard(s.config, s.model, s.groups, Traffic(s.groups.grid, 0))
    try:
        yield check(s, "sums of gradients", "fp32", partial(_sums, s, states))
        name = s.config.optimizer.name
        for number in range(1, UPDATES + 1):
            label = f"optimizer ({name}, update {number})"
            yield check(s, label, name, partial(_update, s, states, number))
        yield check(s, "cast of master weights", "torch", partial(_cast, s, states))
    finally:
        states.close()
    formats = s.layout.formats
    of_params = (formats.params, formats.params_backward, formats.refresh)
    for fmt in dict.fromkeys((*of_params, *formats.grads, *formats.sums)):
        if fmt.is_quantised:
            rounding = "stochastic" if fmt.is_stochastic else "nearest"
            label = f"quantiser ({fmt.name}, {'rotated, ' * (fmt.rotation_elements > 0)}{rounding})"
            yield check(s, label, states.kernels.name, partial(_quantiser, s, states.kernels, fmt))


def _accumulation(s: Subject) -> str:
    fused = s.dtype != torch.float32 and accumulate.accumulates_in_fp32(s.device.type, s.dtype)
    return "addmm to fp32" if fused or s.dtype == torch.float32 else "rounded product, then added"


def _accumulated(s: Subject) -> tuple[str, Pairs]:
    """Add a product to an fp32 sum that is 256 times as large, so that its rounding is seen."""
    tokens, rows, columns = 512, 96, 160
    left, right = s.random(tokens, rows), s.random(tokens, columns)
    total = torch.randn(rows, columns, generator=s.generator, device=s.device) * 256 * tokens**0.5
    product = exact(left.T).product(exact(right), s.arithmetic).round(s.arithmetic.run)
    expected = exact(total).plus(product).round(times=2)
    accumulate.accumulate_product(total, left.t(), right, add=True)
    return f"{tokens} tokens x {rows} x {columns}", {"sum": (total, expected)}


def _sums(s: Subject, states: ShardedStates) -> tuple[str, Pairs]:
    """Gradients of two micro-batches in the fp32 buffers, by autograd or as products."""
    records = [record for record, _, _ in states.gradients()]
    units = states.units({record.unit for record in records})
    states.begin_step(1, 2)
    sums = {record: exact(torch.zeros(record.parameter.shape)) for record in records}
    for _ in range(2):
        states.acquire(units, backward=True)
        for record in records:
            for _ in range(record.passes):
                sums[record] = sums[record].plus(_give_gradient(s, record)).round()
    states.finish_backward()
    pairs: Pairs = {}
    for record, start, ours in states.gradients():
        expected = sums[record].view(torch.flatten).columns(start, None)
        pairs[record.placements[0].name] = (ours, expected)
    return f"{len(records)} parameters", pairs


def _give_gradient(s: Subject, record: ParameterRecord) -> Number:
    """Give a parameter a gradient, as two operands if a linear layer does so; return it."""
    parameter, sink = record.parameter, product_sink(record.parameter)
    if sink is None or parameter.dim() != 2 or record.group not in ("matrices", "head"):
        gradient = s.random(*parameter.shape)
        parameter.backward(gradient)
        return exact(gradient)
    grads, inputs = (s.random(64, count) for count in parameter.shape)
    sink(grads, inputs)
    return exact(grads.T).product(exact(inputs), s.arithmetic).round(s.arithmetic.run)


def _update(s: Subject, states: ShardedStates, number: int) -> tuple[str, Pairs]:
    """One update, from the states before it and from gradients as small as epsilon and larger."""
    gradients = {}
    for record, _, gradient in states.gradients():
        wide = torch.randn(len(gradient), generator=s.generator, device=s.device)
        if not (s.config.optimizer.name == "muon" and record.is_matrix_of_layer):
            powers = torch.rand(len(gradient), generator=s.generator, device=s.device)
            wide *= 10 ** (-10 * powers)
        gradient.copy_(wide * covered(record).flatten().to(s.device))
        gradients[record] = gradient.detach().cpu().double() / DIVISOR
    before = _read(states)
    states.update(RATE, torch.tensor(DIVISOR, device=s.device))
    states.refresh()
    after = {id(record): held for record, held in _read(states)}
    pairs: Pairs = {}
    for record, old in before:
        if record not in gradients:
            continue
        name = record.placements[0].name
        factored = {
            other.placements[0].name.removeprefix(f"{name}.second_moment_"): held["exp_avg_sq"]
            for other, held in before
            if other.placements[0].name.startswith(f"{name}.second_moment_")
        }
        expected = expected_update(s, record, old, gradients[record], number, factored)
        for state, reference in expected.items():
            pairs[f"{state} of {name}"] = (after[id(record)][state], reference)
    if s.config.optimizer.name == "adamw_8bit":
        for kind in ("exp_avg", "exp_avg_sq"):
            of_kind = {name: pair for name, pair in pairs.items() if name.startswith(f"{kind} ")}
            largest = max(float(pair[1].value.abs().max()) for pair in of_kind.values())
            for name, (ours, reference) in of_kind.items():
                signed = kind == "exp_avg"
                pairs[name] = ours, in_8_bits(reference, largest, signed=signed)
    return f"{len(pairs)} states", pairs


def _read(states: ShardedStates) -> list[tuple[ParameterRecord, dict[str, Tensor]]]:
    """Return copies of all states, decoded."""
    return [
        (
            part.record,
            {
                name: (x if isinstance(x, Tensor) else x.decode()).detach().cpu().clone()
                for name, x in part.states.items()
            },
        )
        for part in states.shards()
    ]


def _cast(s: Subject, states: ShardedStates) -> tuple[str, Pairs]:
    """The parameters after an update are the master weights, rounded to nearest, ties to even."""
    for shard_ in states.shards():
        master = shard_.states.get("master")
        if isinstance(master, Tensor):
            numbers = torch.randn(len(master), generator=s.generator, device=s.device)
            bits = numbers.view(torch.int32)
            ties = {torch.bfloat16: 16, torch.float16: 13}.get(s.dtype, 0)
            if ties:  # every other number lies in the middle of two numbers of the format
                bits[::2] = (bits[::2] >> ties << ties) | (1 << (ties - 1))
            master.copy_(numbers)
    states._optimizer.write_parameters()
    pairs: Pairs = {}
    for record, start, _ in states.gradients():
        ours = record.parameter.detach().flatten()
        master = next(p.master for p in states.shards() if p.record is record)
        pairs[record.placements[0].name] = (
            ours[start : start + len(master)],
            exact(_to_even(master.cpu(), s.dtype)),
        )
    return f"{len(pairs)} parameters", pairs


def _to_even(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return fp32 numbers rounded to a format's significand, to nearest, ties to even, in fp64."""
    digits = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}[dtype]
    exponents = torch.frexp(x.double()).exponent
    if dtype == torch.float16:
        exponents = exponents.clamp(min=-13)  # smaller numbers have fewer digits
    unit = torch.exp2((exponents - digits).double())
    return (x.double() / unit).round() * unit


def _quantiser(s: Subject, kernels: BlockKernels, fmt: Format) -> tuple[str, Pairs]:
    """A message of two parts: decoded values, their mean over seeds, ties, and sums of messages.

    In the rotated basis a block has the step q = its largest magnitude / Q. A value is decoded to a
    multiple of q that is at most q / 2 away, or stochastically less than q. Rotations, ratios and
    products round to fp32.
    """
    block, rows = fmt.block_elements, 16
    x = torch.randn(2 * rows, block, generator=s.generator, device=s.device)
    sizes = torch.rand(2 * rows, 1, generator=s.generator, device=s.device).exp2()
    x = (x * sizes).view(2, -1).to(s.dtype)
    slots = _slots(kernels, fmt, x)
    original, received = (_rotated(t, fmt) for t in (x, _decoded(kernels, slots)))
    # scales in bf16 are rounded up, by at most 1 / 128
    steps = original.abs().amax(-1, keepdim=True) / fmt.largest * (1 + (fmt.scale_bytes == 2) / 128)
    operations = 4 + math.log2(fmt.rotation_elements or 1)
    errors = 2 * operations * FP32 * (original.abs() + 2 * fmt.largest * steps)
    most = steps * (1.0 if fmt.is_stochastic else 0.5) + errors
    pairs: Pairs = {"decoded values": (received, Number(original, (most / SIGMAS).square()))}
    if fmt.is_stochastic:
        messages = [_slots(kernels, fmt, x, seed) for seed in range(SEEDS)]
        mean = torch.stack([_decoded(kernels, one).double() for one in messages]).mean(0)
        spread = (steps / 2).square() / SEEDS + (errors / SIGMAS).square()
        pairs["mean over seeds"] = (_rotated(mean, fmt), Number(original, spread))
        shares = (_rotated(mean, fmt) - original) / steps
        chance = torch.tensor(0.25 / (SEEDS * shares.numel()), dtype=torch.float64)
        pairs["mean over elements"] = (shares.mean(), Number(torch.zeros_like(chance), chance))
    elif not fmt.rotation_elements:
        ties = torch.arange(block, device=s.device) % (2 * fmt.largest) - fmt.largest + 0.5
        ties[0] = fmt.largest  # the step is 1, so that halves are rounded to even
        received = _decoded(kernels, _slots(kernels, fmt, ties[None]))
        pairs["ties"] = (received, exact(ties[None].double().round()))
    total = torch.randn(x.shape[1], generator=s.generator, device=s.device)
    summands = exact(_decoded(kernels, slots))
    expected = exact(total).plus(summands.value.sum(0))
    largest = float(summands.value.abs().max()) + 4
    variance = torch.full_like(expected.value, operations * (4 * FP32 * largest) ** 2)
    for part in range(2):
        one = Slots(slots.data[part : part + 1], fmt, x.shape[1], x.shape[1], torch.bfloat16)
        kernels.add_up(one, total)
    pairs["sum of messages"] = (total, Number(expected.value, variance))
    return f"2 parts x {rows} blocks of {block}", pairs


def _slots(kernels: BlockKernels, fmt: Format, x: Tensor, seed: int = 7) -> Slots:
    parts, elements = x.shape
    size = fmt.slot_bytes(elements, parts, parts * elements)
    data = torch.zeros(parts, size, dtype=torch.uint8, device=x.device)
    slots = Slots(data, fmt, elements, parts * elements, torch.bfloat16)
    kernels.quantise(x, slots, seed=seed)
    return slots


def _decoded(kernels: BlockKernels, slots: Slots) -> Tensor:
    out = torch.full((len(slots.data), slots.elements), torch.nan, device=slots.data.device)
    kernels.dequantise(slots, out)
    return out


def _rotated(x: Tensor, fmt: Format) -> Tensor:
    """Return [blocks, elements] in fp64, multiplied by an orthogonal Walsh-Hadamard matrix."""
    rows = x.detach().cpu().double().view(-1, fmt.block_elements)
    run = fmt.rotation_elements
    if not run:
        return rows
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < run:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (rows.view(len(rows), -1, run) @ matrix / math.sqrt(run)).flatten(1)
