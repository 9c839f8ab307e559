"""The products, memory traffic and kept activations of one layer for one micro-batch.

Counts are those of one tensor rank. Tensors that are cut over t tensor ranks count 1/t; the others
count in full, or 1/t under sequence parallelism.

Products and kept activations follow the modules of model/layer_specs.py one by one; without fused
attention they are those of Korthikanti et al. (arXiv:2205.05198, section 4), with dropout masks
only if the model has dropout. A norm keeps its input and output, as fused kernels do (on a CPU,
torch composes RMSNorm of several operations and keeps more).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.inventory import padded_vocabulary
from frontier_llm.geometry.model_chunks import ModelChunk, chunk_stacks
from frontier_llm.geometry.resolved import ResolvedLayout

SCORE_PASSES = 5
"""How often the forward pass of unfused attention reads or writes its scores: written by the first
product; read and written by the kernel that scales, masks and normalises them; read for dropout;
read by the second product."""


class Product(NamedTuple):
    """A matrix product of [rows, inner] and [inner, columns]."""

    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.rows * self.inner * self.columns


class Attention(NamedTuple):
    """One attention of a layer: tokens per sample of its queries and of its keys."""

    queries: int
    keys: int
    causal: bool
    cross: bool = False
    """Whether keys and values come from another sequence."""


@dataclass(frozen=True)
class Block:
    """The forward pass of one layer; the backward pass has twice the operations."""

    products: tuple[Product, ...]
    """Products of weights and activations."""
    attention_flops: float
    """Operations for scores and weighted values, without the masked half of causal attention."""
    score_elements: float
    """Elements of the scores with the masked half. Fused attention does not store them."""
    moved_elements: float
    """Elements read or written by norms, activation functions, rotations and residual additions."""
    kernels: int
    """Number of kernels that read or write `moved_elements`."""
    kept_elements: float
    """Elements of the compute format kept for the backward pass without recomputation."""
    input_elements: float
    """Elements of the layer's input: all that is kept if the layer is recomputed."""


def layer_block(layout: ResolvedLayout, attentions: Sequence[Attention]) -> Block:
    """Describe a layer with these attentions and one feed-forward block.

    Args:
        layout: of the run.
        attentions: of the layer; a decoder layer of an encoder-decoder has two.
    """
    model, tensor = layout.model, layout.grid.tensor
    samples, tokens = layout.micro_batch, attentions[0].queries
    # elements of the layer's input on this rank; sequence parallelism cuts it
    hidden = samples * tokens * model.hidden / (tensor if layout.sequence_parallel else 1)
    parts = [_attention_part(layout, attention) for attention in attentions]
    matrices = 3 if model.gated else 2
    inner = samples * tokens * model.ffn / tensor
    masks = 0.5 if model.dropout else 0.0  # one byte per element
    branches = len(attentions) + 1
    products = [product for part in parts for product in part.products]
    products += _feed_forward(model, samples * tokens, tensor)
    return Block(
        products=tuple(products),
        attention_flops=sum(part.flops for part in parts),
        score_elements=sum(part.scores for part in parts),
        # a norm reads and writes; a residual addition reads two and writes one; the activation
        # reads one or two and writes one
        moved_elements=branches * 5 * hidden + matrices * inner + sum(part.moved for part in parts),
        kernels=4 * len(parts) + 4 * branches + 2 * matrices,
        # each norm keeps its input, and each linear layer its input, the norm's output. A gated
        # activation keeps both halves, a copy of one, the activated other, and their product
        kept_elements=branches * (2 + masks) * hidden
        + sum(part.kept for part in parts)
        + (5 if model.gated else 2) * inner,
        input_elements=hidden,
    )


def chunk_blocks(layout: ResolvedLayout, chunk: ModelChunk) -> list[tuple[Block, int]]:
    """Return the distinct layers of a model chunk and the number of each."""
    lengths, blocks = layout.lengths, []
    for stack in chunk_stacks(layout.model, chunk):
        if stack.name == "encoder":
            attentions = [Attention(lengths.encoder, lengths.encoder, causal=False)]
        else:
            attentions = [Attention(lengths.decoder, lengths.decoder, causal=True)]
            if layout.model.encoder_layers:
                attentions.append(
                    Attention(lengths.decoder, lengths.encoder, causal=False, cross=True)
                )
        blocks.append((layer_block(layout, attentions), len(stack.layers)))
    return blocks


def head_product(layout: ResolvedLayout) -> Product:
    """Return the product with the vocabulary for all predicted tokens of a micro-batch."""
    tensor = layout.grid.tensor
    columns = padded_vocabulary(layout.model, tensor) // tensor
    return Product(layout.micro_batch * layout.lengths.decoder, layout.model.hidden, columns)


class _AttentionPart(NamedTuple):
    products: tuple[Product, ...]
    flops: float
    scores: float
    moved: float
    kept: float


def _attention_part(layout: ResolvedLayout, attention: Attention) -> _AttentionPart:
    """Describe one attention with its projections and, for relative positions, its bias."""
    model, tensor, samples = layout.model, layout.grid.tensor, layout.micro_batch
    query_width = model.heads * model.head_dim // tensor
    key_width = model.kv_heads * model.head_dim // tensor
    queries, keys = samples * attention.queries, samples * attention.keys
    inputs: tuple[Product, ...]
    if attention.cross:
        inputs = (
            Product(queries, model.hidden, query_width),
            Product(keys, model.hidden, 2 * key_width),
        )
    else:
        inputs = (Product(queries, model.hidden, query_width + 2 * key_width),)
    pairs = attention.queries * attention.keys * samples
    rotated = queries * query_width + keys * key_width if model.positions == "rotary" else 0
    relative = model.positions == "relative" and not attention.cross
    bias = attention.queries * attention.keys * model.heads / tensor if relative else 0.0
    angles = 4 * attention.queries * model.head_dim if rotated else 0
    # queries, keys and values before and after rotation, and the output
    kept = queries * 2 * query_width + keys * 2 * key_width + rotated + angles
    return _AttentionPart(
        products=(*inputs, Product(queries, query_width, model.hidden)),
        flops=4.0 * pairs * query_width * (0.5 if attention.causal else 1.0),
        scores=pairs * model.heads / tensor,
        moved=2.0 * rotated + 2 * queries * query_width + 2 * bias,
        kept=kept,
    )


def _feed_forward(model: ModelConfig, rows: int, tensor: int) -> list[Product]:
    width = model.ffn // tensor
    outer = 2 * width if model.gated else width
    return [Product(rows, model.hidden, outer), Product(rows, width, model.hidden)]
