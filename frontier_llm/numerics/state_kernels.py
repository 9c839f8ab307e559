"""Run the kernels of the model states: sums of gradients, the optimizer, casts and quantisers."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from frontier_llm.collectives.blockwise import BlockKernels
from frontier_llm.collectives.slots import Slots
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.device import accumulate
from frontier_llm.geometry.formats import Format
from frontier_llm.numerics.references import exact
from frontier_llm.numerics.rounding import FP32, SIGMAS, Number
from frontier_llm.numerics.subject import Check, Pairs, Subject, check
from frontier_llm.numerics.updates import RATE, covered, expected_update, in_8_bits
from frontier_llm.protocols import ParameterRecord, product_sink
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.states import shard

UPDATES, SEEDS = 2, 64
DIVISOR = 2.0
"""Divisor of the gradients, as clipping and the loss scale give one."""


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
