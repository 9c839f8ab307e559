"""Initial weights as a pure function of (seed, global name): the same model for every layout.

Each global tensor is drawn in blocks of rows, each block from its own seed, so that a rank draws
only the blocks it holds a part of and never a whole matrix.

Norms start at 1, biases at 0. A GPT's matrices are normal with the configured deviation; the two
that end a residual branch are divided by sqrt(2 layers) (GPT-2; Radford et al., 2019, section 2.3).
A T5's have the deviation 1 / sqrt(inputs of the product), queries that and 1 / sqrt(head width),
for their scores are not scaled, and the embedding 1 (as in T5's own code for its version 1.1).
"""

import hashlib
import math
from collections.abc import Iterable

import torch

from frontier_llm.config.model import ModelConfig
from frontier_llm.protocols import ParameterRecord, Placement

BLOCK_ELEMENTS = 1 << 20
_BRANCH_ENDS = (".attention.output.weight", ".ffn.down.weight")


def initialise(records: Iterable[ParameterRecord], model: ModelConfig, seed: int) -> None:
    """Set every parameter; what only pads is zero."""
    for record in records:
        local = record.parameter.data
        if local.is_meta:  # built for its shapes alone (trainer/dry_run.py)
            continue
        local.zero_()
        for placement in record.placements:
            _fill(local, placement, model, seed)


def _fill(local: torch.Tensor, placement: Placement, model: ModelConfig, seed: int) -> None:
    if placement.name.endswith(".bias"):
        return
    view = placement.local_view(local)
    if "norm." in placement.name:
        view.fill_(1.0)
        return
    deviation = _t5_deviation if model.kind == "t5" else _gpt_deviation
    _fill_normal(view, placement, model.init_std * deviation(placement.name, model), seed)
    if model.kind == "t5" and placement.name.endswith(".attention.qkv.weight"):
        _shrink_queries(view, placement, model)


def _gpt_deviation(name: str, model: ModelConfig) -> float:
    return 1 / math.sqrt(2 * model.layers) if name.endswith(_BRANCH_ENDS) else 1.0


def _t5_deviation(name: str, model: ModelConfig) -> float:
    if name.startswith("embedding."):
        return 1.0
    if name.endswith(".ffn.down.weight"):
        return 1 / math.sqrt(model.ffn)
    if name.endswith("attention.output.weight"):
        return 1 / math.sqrt(model.heads * model.head_dim)
    narrow = model.head_dim if name.endswith(".query.weight") else 1
    return 1 / math.sqrt(model.hidden * narrow)


def _shrink_queries(view: torch.Tensor, placement: Placement, model: ModelConfig) -> None:
    """Scale the queries' rows of a fused matrix: of each head [query; key; value]."""
    row, head = placement.global_start[0], model.head_dim
    rows = torch.arange(row, row + placement.shape[0], device=view.device)
    view[rows % (3 * head) < head] /= math.sqrt(head)


def _fill_normal(view: torch.Tensor, placement: Placement, deviation: float, seed: int) -> None:
    rows, columns = placement.global_shape
    (row, column), (height, width) = placement.global_start, placement.shape
    if not height or not width:
        return  # this rank holds nothing but padding
    block_rows = max(1, BLOCK_ELEMENTS // columns)
    for block in range(row // block_rows, -(-(row + height) // block_rows)):
        first = block * block_rows
        last = min(first + block_rows, rows)
        generator = torch.Generator(view.device).manual_seed(_seed(seed, placement.name, block))
        drawn = torch.empty(last - first, columns, device=view.device)
        drawn.normal_(0.0, deviation, generator=generator)
        begin, end = max(first, row), min(last, row + height)
        view[begin - row : end - row].copy_(
            drawn[begin - first : end - first, column : column + width]
        )


def _seed(seed: int, name: str, block: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
