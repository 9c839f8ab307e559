"""Set the initial weights so that they are the same for every parallel layout.

A weight depends only on the seed and on the global name of its tensor, which is the name in the
whole model. Each tensor is drawn in blocks of rows, and each block has its own seed. A rank draws
only the blocks that overlap with its part of the tensor, so it never holds a full matrix.

Norms start at 1, biases at 0. Matrices are normally distributed with the standard deviation
`model.init_std` times a factor:

- GPT: 1 / sqrt(2 * layers) for the two matrices that end a residual branch, and 1 for all others
  (GPT-2; Radford et al., 2019, section 2.3). With muP the factor of the matrices of layers is also
  multiplied by sqrt(base width / width) (Tensor Programs V, arXiv:2203.03466, table 8).
- T5: 1 for the embedding, and 1 / sqrt(number of inputs) for other matrices. The factor of queries
  is also divided by sqrt(head width), since T5 does not scale attention scores (as in the code of
  T5 1.1).
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
"""Suffixes of the names of the matrices that end a residual branch of a GPT."""


def initialise(records: Iterable[ParameterRecord], model: ModelConfig, seed: int) -> None:
    """Set the initial value of every parameter of this rank. Padding is set to zero."""
    for record in records:
        local = record.parameter.data
        if local.is_meta:  # trainer/dry_run.py builds the model only for its shapes
            continue
        local.zero_()
        for placement in record.placements:
            _fill(local, placement, model, seed)


def _fill(local: torch.Tensor, placement: Placement, model: ModelConfig, seed: int) -> None:
    """Initialise the part of a local parameter that a placement describes.

    A `Placement` tells which part of which global tensor lies where in the local parameter.
    """
    if placement.name.endswith(".bias"):
        return
    view = placement.local_view(local)
    if "norm." in placement.name:
        view.fill_(1.0)
        return
    factor = _t5_factor if model.kind == "t5" else _gpt_factor
    deviation = model.init_std * factor(placement.name, model)
    _fill_normal(view, placement, deviation, seed)
    if model.kind == "t5" and placement.name.endswith(".attention.qkv.weight"):
        _shrink_queries(view, placement, model)


def _gpt_factor(name: str, model: ModelConfig) -> float:
    """Return the standard deviation of a GPT's matrix divided by `init_std`."""
    factor = math.sqrt(model.width_factor) if name.startswith("layers.") else 1.0
    return factor / math.sqrt(2 * model.layers) if name.endswith(_BRANCH_ENDS) else factor


def _t5_factor(name: str, model: ModelConfig) -> float:
    """Return the standard deviation of a T5's matrix divided by `init_std`."""
    if name.startswith("embedding."):
        return 1.0
    if name.endswith(".ffn.down.weight"):
        return 1 / math.sqrt(model.ffn)
    if name.endswith("attention.output.weight"):
        return 1 / math.sqrt(model.heads * model.head_dim)
    query_factor = model.head_dim if name.endswith(".query.weight") else 1
    return 1 / math.sqrt(model.hidden * query_factor)


def _shrink_queries(view: torch.Tensor, placement: Placement, model: ModelConfig) -> None:
    """Divide the query rows of a fused matrix by sqrt(head width).

    The rows of the matrix are ordered by head: the query, key and value rows of the first head,
    then those of the next head.
    """
    first_row, width = placement.global_start[0], model.head_dim
    rows = torch.arange(first_row, first_row + placement.shape[0], device=view.device)
    view[rows % (3 * width) < width] /= math.sqrt(width)


def _fill_normal(view: torch.Tensor, placement: Placement, deviation: float, seed: int) -> None:
    """Draw the blocks of rows that overlap with a placement, and copy the overlaps."""
    global_rows, global_columns = placement.global_shape
    (row, column), (height, width) = placement.global_start, placement.shape
    if not height or not width:
        return  # this rank has only padding
    block_rows = max(1, BLOCK_ELEMENTS // global_columns)
    for block in range(row // block_rows, -(-(row + height) // block_rows)):
        block_start = block * block_rows
        block_end = min(block_start + block_rows, global_rows)
        generator = torch.Generator(view.device)
        generator.manual_seed(_block_seed(seed, placement.name, block))
        drawn = torch.empty(block_end - block_start, global_columns, device=view.device)
        drawn.normal_(0.0, deviation, generator=generator)
        start, end = max(block_start, row), min(block_end, row + height)
        view[start - row : end - row].copy_(
            drawn[start - block_start : end - block_start, column : column + width]
        )


def _block_seed(seed: int, name: str, block: int) -> int:
    """Return the seed of a block of rows of a global matrix: 63 bits."""
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
