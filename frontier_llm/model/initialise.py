"""Initial weights as a pure function of (seed, global name): the same model for every layout.

Each global tensor is drawn in blocks of rows, each block from its own seed, so that a rank draws
only the blocks of which it holds a part, and never a full matrix.

Norms start at 1, biases at 0. Matrices are normally distributed. In a GPT their standard deviation
is `init_std`, divided by sqrt(2 * layers) for the two matrices that end a residual branch (GPT-2;
Radford et al., 2019, section 2.3). In a T5 the standard deviation is `init_std` times 1 for the
embedding and times 1 / sqrt(inputs) for other matrices. For queries it is also divided by
sqrt(head width), since T5 does not scale attention scores (as in the code of T5 1.1).
"""

import hashlib
import math
from collections.abc import Iterable

import torch

from frontier_llm.config.model import ModelConfig
from frontier_llm.protocols import ParameterRecord, Placement

BLOCK_ELEMENTS = 1 << 20
"""Maximum number of elements per block, unless one row has more."""
_BRANCH_ENDS = (".attention.output.weight", ".ffn.down.weight")


def initialise(records: Iterable[ParameterRecord], model: ModelConfig, seed: int) -> None:
    """Set every parameter; padding is set to zero."""
    for record in records:
        local = record.parameter.data
        if local.is_meta:  # built only for its shapes (trainer/dry_run.py)
            continue
        local.zero_()
        for placement in record.placements:
            _fill(local, placement, model, seed)


def _fill(local: torch.Tensor, placement: Placement, model: ModelConfig, seed: int) -> None:
    """Initialise the part of a local parameter that a placement describes."""
    if placement.name.endswith(".bias"):
        return
    view = placement.local_view(local)
    if "norm." in placement.name:
        view.fill_(1.0)
        return
    relative_deviation = _t5_deviation if model.kind == "t5" else _gpt_deviation
    deviation = model.init_std * relative_deviation(placement.name, model)
    _fill_normal(view, placement, deviation, seed)
    if model.kind == "t5" and placement.name.endswith(".attention.qkv.weight"):
        _shrink_queries(view, placement, model)


def _gpt_deviation(name: str, model: ModelConfig) -> float:
    """Return the standard deviation of a GPT's matrix, in units of `init_std`."""
    return 1 / math.sqrt(2 * model.layers) if name.endswith(_BRANCH_ENDS) else 1.0


def _t5_deviation(name: str, model: ModelConfig) -> float:
    """Return the standard deviation of a T5's matrix, in units of `init_std`."""
    if name.startswith("embedding."):
        return 1.0
    if name.endswith(".ffn.down.weight"):
        return 1 / math.sqrt(model.ffn)
    if name.endswith("attention.output.weight"):
        return 1 / math.sqrt(model.heads * model.head_dim)
    query_factor = model.head_dim if name.endswith(".query.weight") else 1
    return 1 / math.sqrt(model.hidden * query_factor)


def _shrink_queries(view: torch.Tensor, placement: Placement, model: ModelConfig) -> None:
    """Divide the query rows of a fused matrix, whose rows are [query; key; value] per head."""
    first_row, width = placement.global_start[0], model.head_dim
    rows = torch.arange(first_row, first_row + placement.shape[0], device=view.device)
    view[rows % (3 * width) < width] /= math.sqrt(width)


def _fill_normal(view: torch.Tensor, placement: Placement, deviation: float, seed: int) -> None:
    """Draw the blocks that overlap with a placement, and copy the overlaps into its view."""
    rows, columns = placement.global_shape
    (row, column), (height, width) = placement.global_start, placement.shape
    if not height or not width:
        return  # this rank has only padding
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
