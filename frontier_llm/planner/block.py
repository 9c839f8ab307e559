"""What one layer multiplies, moves and keeps, on one tensor rank, for one micro-batch.

b samples of s tokens, h hidden, f inner width, t tensor ranks; q and k: widths of all query and of
all key heads. What tensor ranks cut counts 1/t; the rest counts 1/t under sequence parallelism.

Products and kept activations follow the modules of model/layer_specs.py one by one; without
fused attention they are those of Korthikanti et al. (arXiv:2205.05198, section 4), whose dropout
masks count only where there is dropout. Norms are counted as
fused kernels keep them: input and output (on a CPU torch composes RMSNorm, and keeps more).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.inventory import padded_vocabulary
from frontier_llm.geometry.lengths import run_lengths
from frontier_llm.geometry.stacks import piece_stacks
from frontier_llm.geometry.stages import Piece

SCORE_PASSES = 5
"""Times that unfused attention reads or writes its scores forward: written by the first product,
scaled, masked and normalised in one kernel, dropped out, read by the second."""


class Product(NamedTuple):
    """A product of [rows, inner] and [inner, columns]."""

    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> float:
        """Operations."""
        return 2.0 * self.rows * self.inner * self.columns


class Attention(NamedTuple):
    """One attention of a layer: tokens of a sample that ask, and that are asked."""

    queries: int
    keys: int
    causal: bool
    cross: bool = False
    """Whether keys and values come from another sequence."""


@dataclass(frozen=True)
class Block:
    """One layer, forward; the backward pass multiplies twice as much."""

    products: tuple[Product, ...]
    """Of weights and activations."""
    attention_flops: float
    """Scores and weighted values, without the masked half of causal attention."""
    score_elements: float
    """Scores, the masked half included: in memory only where attention is not fused."""
    moved_elements: float
    """Read or written by norms, activations, rotations and residual additions."""
    kernels: int
    """That are started."""
    kept_elements: float
    """Of the compute format, kept for the backward pass where nothing is recomputed."""
    input_elements: float
    """Of the layer's input: all that stays where the layer is recomputed."""


def layer_block(config: RunConfig, attentions: Sequence[Attention]) -> Block:
    """Describe a layer of these attentions and one feed-forward block.

    Args:
        config: the run.
        attentions: of the layer; a decoder of an encoder-decoder has two.
    """
    model, tensor = config.model, config.parallel.tensor
    samples, tokens = config.data.micro_batch, attentions[0].queries
    whole = samples * tokens * model.hidden / _row_cut(config)
    parts = [_attention_part(config, attention) for attention in attentions]
    matrices = 3 if model.gated else 2
    inner = samples * tokens * model.ffn / tensor
    drops = 0.5 if model.dropout else 0.0  # a mask is a byte an element
    branches = len(attentions) + 1
    products = [product for part in parts for product in part.products]
    products += _feed_forward(model, samples * tokens, tensor)
    return Block(
        products=tuple(products),
        attention_flops=sum(part.flops for part in parts),
        score_elements=sum(part.scores for part in parts),
        # a norm reads and writes; a residual addition reads two and writes one; the activation
        # reads one or two and writes one
        moved_elements=branches * 5 * whole + matrices * inner + sum(part.moved for part in parts),
        kernels=4 * len(parts) + 4 * branches + 2 * matrices,
        # each norm keeps its input, each linear layer its own: the norm's output
        # of a gated activation both halves, one of them copied, what the activation made of the
        # other, and the product
        kept_elements=branches * (2 + drops) * whole
        + sum(part.kept for part in parts)
        + (5 if model.gated else 2) * inner,
        input_elements=whole,
    )


def piece_blocks(config: RunConfig, piece: Piece) -> list[tuple[Block, int]]:
    """Return the distinct layers of a piece and how many there are of each."""
    lengths, blocks = run_lengths(config), []
    for stack in piece_stacks(config.model, piece):
        if stack.name == "encoder":
            attentions = [Attention(lengths.encoder, lengths.encoder, causal=False)]
        else:
            attentions = [Attention(lengths.decoder, lengths.decoder, causal=True)]
            if config.model.encoder_layers:
                attentions.append(
                    Attention(lengths.decoder, lengths.encoder, causal=False, cross=True)
                )
        blocks.append((layer_block(config, attentions), len(stack.layers)))
    return blocks


def head_product(config: RunConfig) -> Product:
    """Return the product with the vocabulary, over the tokens that are predicted."""
    tensor = config.parallel.tensor
    columns = padded_vocabulary(config.model, tensor) // tensor
    rows = config.data.micro_batch * run_lengths(config).decoder
    return Product(rows, config.model.hidden, columns)


class _Part(NamedTuple):
    products: tuple[Product, ...]
    flops: float
    scores: float
    moved: float
    kept: float


def _attention_part(config: RunConfig, attention: Attention) -> _Part:
    """Describe one attention with its projections and, for relative positions, its bias."""
    model, tensor, samples = config.model, config.parallel.tensor, config.data.micro_batch
    query = model.heads * model.head_dim // tensor
    key = model.kv_heads * model.head_dim // tensor
    asking, asked = samples * attention.queries, samples * attention.keys
    inputs: tuple[Product, ...]
    if attention.cross:
        inputs = (Product(asking, model.hidden, query), Product(asked, model.hidden, 2 * key))
    else:
        inputs = (Product(asking, model.hidden, query + 2 * key),)
    pairs = attention.queries * attention.keys * samples
    rotated = asking * query + asked * key if model.positions == "rotary" else 0
    # queries, keys and values as they come and as they are rotated, the output and, for a kernel
    # that is fused, a sum a row
    relative = model.positions == "relative" and not attention.cross
    bias = attention.queries * attention.keys * model.heads / tensor if relative else 0.0
    angles = 4 * attention.queries * model.head_dim if rotated else 0
    kept = asking * 2 * query + asked * 2 * key + rotated + angles
    return _Part(
        products=(*inputs, Product(asking, query, model.hidden)),
        flops=4.0 * pairs * query * (0.5 if attention.causal else 1.0),
        scores=pairs * model.heads / tensor,
        moved=2.0 * rotated + 2 * asking * query + 2 * bias,
        kept=kept,
    )


def _feed_forward(model: ModelConfig, rows: int, tensor: int) -> list[Product]:
    width = model.ffn // tensor
    outer = 2 * width if model.gated else width
    return [Product(rows, model.hidden, outer), Product(rows, width, model.hidden)]


def _row_cut(config: RunConfig) -> int:
    """Return over how many ranks norms and residual additions are cut."""
    return config.parallel.tensor if config.parallel.sequence else 1
