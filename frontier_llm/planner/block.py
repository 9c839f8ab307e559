"""Count the matrix products, memory traffic and kept activations of a stage.

All counts are for one tensor rank out of t. Of a tensor that is sharded over tensor ranks, 1/t
counts. Other tensors count in full, or 1/t with sequence parallelism.

The counts follow the modules of model/layer.py one by one. They agree with Korthikanti et al.
(arXiv:2205.05198, section 4), except that attention is fused and that dropout masks count only if
the model has dropout. A norm keeps its input and output. On a CPU, torch composes RMSNorm of
several operations and keeps a third tensor, which counts in bytes but not in elements.

Activations are counted for all micro-batches in flight, which follow from the schedule's lists of
actions. If a schedule splits backward passes, the factors of the weight gradients, which are inputs
and gradients of linear layers, are kept until they are multiplied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.flops import equal_layers, score_pairs
from frontier_llm.geometry.inventory import padded_vocabulary
from frontier_llm.geometry.model_chunks import ModelChunk, chunk_stacks
from frontier_llm.geometry.pipeline_schedule import held
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.geometry.state_memory import (
    CPU_LOSS_CHUNK_BYTES,
    CPU_QUERY_BLOCK,
    LOSS_CHUNK_BYTES,
    QUERY_BLOCK,
)
from frontier_llm.planner.candidate import Candidate, StageKind
from frontier_llm.planner.timeline import shortened


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
    """Sizes of one self-attention or cross-attention of a layer."""

    queries: int
    keys: int
    causal: bool
    cross: bool = False
    """Whether keys and values come from the encoder."""
    layer: int = 0
    """Number of a layer with this attention, which decides whether it has a window."""
    encoded: int = 0
    """Those of the keys that come from the encoder, if self-attention reads them too."""


class Scores(NamedTuple):
    """Sizes of the scores of one attention on a rank."""

    heads: int
    """Heads of all samples together."""
    queries: int
    keys: int
    width: int
    """Width of a head."""

    @property
    def elements(self) -> int:
        """Number of scores."""
        return self.heads * self.queries * self.keys


@dataclass(frozen=True)
class Block:
    """Counts for the forward pass of one layer. The backward pass has twice the operations."""

    products: tuple[Product, ...]
    attention_flops: float
    """Operations of attention without its projections and without the masked half if causal."""
    scores: tuple[Scores, ...]
    """Scores of each attention, including the masked half. Fused attention does not store them."""
    moved_elements: float
    """Elements read or written by norms, activation functions, rotary embeddings and residual
    additions."""
    function_elements: float
    """Those of `moved_elements` that belong to rotary embeddings and activation functions, which
    `kernels=elementwise` compiles."""
    kernels: int
    kept_elements: float
    """Elements that the layer keeps for its backward pass if nothing is recomputed."""
    norm_elements: float
    """Elements of the outputs of the norms before or after branches."""
    input_elements: float
    """Elements of the layer's input, which alone is kept if the whole layer is recomputed."""
    factor_elements: float
    """Elements of the factors of weight gradients that are computed later: the inputs of all linear
    layers and the gradients of their outputs."""

    def kept(self, per_norm: float) -> float:
        """Return `kept_elements` if a norm keeps so many tensors, and not two."""
        return self.kept_elements + (per_norm - 2) * self.norm_elements


def layer_block(layout: ResolvedLayout, attentions: Sequence[Attention]) -> Block:
    """Count a layer with one feed-forward block, and with two attentions if it reads an encoder."""
    model, tensor = layout.model, layout.grid.tensor
    samples, tokens = layout.micro_batch, attentions[0].queries
    # elements of the layer's input on this rank, which sequence parallelism divides
    hidden = samples * tokens * model.hidden / (tensor if layout.sequence_parallel else 1)
    parts = [_attention_part(layout, attention) for attention in attentions]
    matrices = 3 if model.gated else 2
    inner = samples * tokens * model.ffn / tensor
    masks = 0.5 if model.dropout else 0.0  # a dropout mask has one byte per two-byte element
    branches = len(attentions) + 1  # each with a norm before or after it and a residual addition
    further = branches * (model.norm_placement == "both")  # norms of the outputs of branches
    up, down = _feed_forward(model, samples * tokens, tensor)
    products = [product for part in parts for product in part.products] + [up, down]
    return Block(
        products=tuple(products),
        attention_flops=sum(part.flops for part in parts),
        scores=tuple(part.scores for part in parts),
        # A norm reads and writes one tensor. A residual addition reads two tensors and writes one.
        # The activation function reads one tensor (two if gated) and writes one.
        moved_elements=(branches * 5 + further * 2) * hidden
        + matrices * inner
        + sum(part.moved for part in parts),
        function_elements=sum(part.rotated for part in parts)
        + (matrices * inner if model.gated or model.bias else 0.0),
        kernels=4 * len(parts)
        + 4 * branches
        + further
        + 2 * matrices
        + 2 * (model.qk_norm != "none"),
        # Each norm keeps its input and output (the input of the next linear layer), and one of the
        # output of a branch, whose result is only added, its input. A gated
        # activation keeps five tensors: both halves of its input, a copy of one half, the other
        # half after the activation function, and the product.
        kept_elements=(branches * (2 + masks) + further) * hidden
        + sum(part.kept for part in parts)
        + (5 if model.gated else 2) * inner,
        norm_elements=branches * hidden,
        input_elements=hidden,
        factor_elements=sum(part.factors for part in parts)
        + column_factors(layout, up)
        + row_factors(down),
    )


Blocks = list[tuple[Block, int]]


def chunk_blocks(layout: ResolvedLayout, chunk: ModelChunk) -> Blocks:
    """Return the distinct layers of a model chunk and the number of each."""
    (blocks,) = stage_blocks(layout, [chunk])
    return blocks


def stage_blocks(layout: ResolvedLayout, chunks: Sequence[ModelChunk]) -> list[Blocks]:
    """Return the distinct layers of each model chunk and the number of each."""
    model, blocks = layout.model, dict[tuple[bool, int | None], Block]()
    found: list[Blocks] = [[] for _ in chunks]
    for chunk, of_chunk in zip(chunks, found, strict=True):
        for layers in equal_layers(model, chunk.layers):
            first = layers[0]
            kind = first < model.encoder_layers, model.layer_window(first)
            if kind not in blocks:
                side = model.side(first)
                of_side = layout if side is model else replace(layout, model=side)
                blocks[kind] = layer_block(of_side, _attentions(layout, first))
            of_chunk.append((blocks[kind], len(layers)))
    return found


def _attentions(layout: ResolvedLayout, layer: int) -> list[Attention]:
    model, lengths = layout.model, layout.lengths
    if layer < model.encoder_layers:
        return [Attention(lengths.encoder, lengths.encoder, causal=False, layer=layer)]
    if model.merges_attention(layer):
        keys = lengths.decoder + lengths.encoder
        return [Attention(lengths.decoder, keys, True, layer=layer, encoded=lengths.encoder)]
    tokens = lengths.decoder // layout.grid.context  # of this rank
    attentions = [Attention(tokens, tokens, causal=True, layer=layer)]
    if model.encoder_layers:
        attentions.append(Attention(lengths.decoder, lengths.encoder, causal=False, cross=True))
    return attentions


def head_product(layout: ResolvedLayout) -> Product:
    """Return the product that computes the logits of all predicted tokens of a micro-batch."""
    tensor = layout.grid.tensor
    columns = padded_vocabulary(layout.model, tensor) // tensor
    rows = layout.micro_batch * layout.lengths.decoder // layout.grid.context
    return Product(rows, layout.model.hidden, columns)


def column_factors(layout: ResolvedLayout, product: Product) -> float:
    """Count the factors of a weight gradient whose layer splits its output features.

    With sequence parallelism, a rank keeps its part of the input tokens, and gathers the others
    when it computes the gradient (model/linear.py).
    """
    parts = layout.grid.tensor if layout.sequence_parallel else 1
    return product.rows * product.inner / parts + product.rows * product.columns


def row_factors(product: Product) -> float:
    """Count the factors of a weight gradient whose layer splits its input features."""
    return float(product.rows * product.inner + product.rows * product.columns)


class _AttentionPart(NamedTuple):
    """The share of one attention in the fields of `Block`."""

    products: tuple[Product, ...]
    flops: float
    scores: Scores
    rotated: float
    moved: float
    kept: float
    factors: float


def _attention_part(layout: ResolvedLayout, attention: Attention) -> _AttentionPart:
    """Count one attention, including its projections and the bias for relative positions."""
    model, tensor, samples = layout.model, layout.grid.tensor, layout.micro_batch
    query_width = model.heads * model.head_dim // tensor
    key_width = model.kv_heads * model.head_dim // tensor
    queries, keys = samples * attention.queries, samples * attention.keys
    inputs: tuple[Product, ...]
    if attention.cross or attention.encoded:
        inputs = (
            Product(queries, model.hidden, query_width),
            Product(keys, model.encoder.hidden, 2 * key_width),
        )
    else:
        inputs = (Product(queries, model.hidden, query_width + 2 * key_width),)
    others = attention.keys if attention.cross else attention.encoded
    read_pairs = layout.read_share * samples * attention.queries * others
    if not attention.cross:
        context, causal = layout.grid.context, attention.causal
        tokens = attention.queries * context
        pairs = score_pairs(model, attention.layer, tokens, layout.read_share, causal=causal)
        read_pairs += samples * pairs / context
        if context > 1 and not layout.exchanges_heads:  # other ranks wait for the one with most
            read_pairs *= layout.context_work.imbalance
    heads = 0 if attention.cross else queries * query_width + keys * key_width
    rotated = heads if model.positions == "rotary" else 0
    normalised = heads if model.qk_norm != "none" else 0
    # FlexAttention does not store the bias for relative positions
    relative = model.positions == "relative" and not attention.cross
    stores_bias = relative and layout.attention == "sdpa"
    bias = attention.queries * attention.keys * model.heads / tensor if stores_bias else 0.0
    # samples that are cut by their documents have angles of their own, and with merged attention
    has_own = layout.documents == "separate" and (layout.grid.context > 1 or attention.encoded)
    rows = queries if has_own else attention.queries
    angles = 4 * rows * model.rotated_width if rotated else 0
    # queries and keys before and after rotation, values, the output, and the rotation angles
    kept = queries * 2 * query_width + keys * 2 * key_width + rotated + angles
    if attention.encoded:  # the tokens of both sides, as the input of one matrix
        kept += keys * model.hidden // (tensor if layout.sequence_parallel else 1)
    # norms keep copies of queries and keys; a rotation of their results does not keep these
    kept += normalised if rotated else 2 * normalised
    output = Product(queries, query_width, model.hidden)
    heads_of_rank = samples * model.heads // tensor
    return _AttentionPart(
        products=(*inputs, output),
        flops=4.0 * read_pairs * query_width,
        scores=Scores(heads_of_rank, attention.queries, attention.keys, model.head_dim),
        rotated=2.0 * rotated,
        moved=2.0 * (rotated + normalised) + 2 * queries * query_width + 2 * bias,
        kept=kept,
        factors=sum(column_factors(layout, product) for product in inputs) + row_factors(output),
    )


def _feed_forward(model: ModelConfig, rows: int, tensor: int) -> tuple[Product, Product]:
    width = model.ffn // tensor
    first_width = 2 * width if model.gated else width
    return Product(rows, model.hidden, first_width), Product(rows, width, model.hidden)


class Activations(NamedTuple):
    """Bytes of a stage's activations, which do not depend on the sharding factors."""

    stage: int
    kept: int
    """Bytes kept for backward passes and weight gradients of all micro-batches in flight."""
    logits: int
    """Bytes of the logits, and of the part of them that the loss holds in fp32."""
    working: int
    """Bytes of the activations of a recomputed layer and of the gradients of the largest matrix
    product."""
    exchange: int
    """Bytes of the buffers for sends between stages."""
    passes: tuple[int, ...]
    """For each model chunk, the bytes kept from the forward pass of a micro-batch until its
    backward pass or its input gradients."""
    factors: tuple[int, ...]
    """For each model chunk, the bytes kept from input gradients to weight gradients."""
    per_layer: tuple[int, ...]
    """For each model chunk, the bytes that a backward pass frees with each layer, at least."""
    matrix: tuple[int, ...]
    """For each model chunk, the bytes of the gradient of the largest matrix in a layer."""


def stages_activations(candidate: Candidate) -> list[Activations]:
    """Return the activations of every stage, which differ in a kind of stages only in `kept`."""
    kinds = candidate.stages
    of_kinds = [_without_kept(candidate, kind) for kind in kinds.kinds]
    return [
        of_kind._replace(stage=stage, kept=_peak(candidate, stage, of_kind))
        for stage, of_kind in enumerate(kinds.of_stages(of_kinds))
    ]


def stage_activations(
    candidate: Candidate, stage: int, kind: StageKind, *, is_least: bool = False
) -> Activations:
    """Count the bytes of a stage's activations.

    With `is_least` the result is a lower bound, in which no weight gradients wait.
    """
    found = _without_kept(candidate, kind)
    kept = _peak(candidate, stage, found, is_least=is_least)
    return found._replace(stage=stage, kept=kept)


def _without_kept(candidate: Candidate, kind: StageKind) -> Activations:
    """Count everything but the bytes that a stage keeps of all micro-batches in flight."""
    layout, on_cpu = candidate.layout, candidate.config.cluster.device.kind == "cpu"
    differ = layout.micro_batch, layout.recompute, layout.splits_backward, on_cpu
    return candidate.stages.once(
        ("activations", kind.first, *differ), lambda: _count(layout, kind, on_cpu=on_cpu)
    )


def _count(layout: ResolvedLayout, kind: StageKind, *, on_cpu: bool) -> Activations:
    of = layout.lengths
    compute_bytes, of_chunks = layout.compute_bytes, stage_blocks(layout, kind.chunks)
    loss_chunk = CPU_LOSS_CHUNK_BYTES if on_cpu else LOSS_CHUNK_BYTES
    head = head_product(layout)
    has_head = any(chunk.has_head for chunk in kind.chunks)
    logits = head.rows * head.columns if has_head else 0
    per_norm = 3.0 if on_cpu and layout.model.norm == "rmsnorm" else 2.0
    passes, factors, per_layer, matrix = list[int](), list[int](), list[int](), list[int]()
    for chunk, blocks in zip(kind.chunks, of_chunks, strict=True):
        kept = [
            block.input_elements if layout.recompute == "full" else block.kept(per_norm)
            for block, _ in blocks
        ]
        elements = sum(count * of_layer for (_, count), of_layer in zip(blocks, kept, strict=True))
        if chunk.layers.start >= layout.model.encoder_layers:  # it keeps the encoder's output
            parts = layout.grid.tensor if layout.sequence_parallel else 1
            elements += layout.micro_batch * of.encoder * layout.model.encoder.hidden / parts
        for stack in chunk_stacks(layout.model, chunk):
            if stack.ends:  # the norm after its last layer
                rows = head.rows if stack.name == "decoder" else head.rows / of.decoder * of.encoder
                elements += per_norm * rows * layout.model.side(stack.layers.start).hidden
        split = sum(count * block.factor_elements for block, count in blocks)
        sizes = [p.inner * p.columns for block, _ in blocks for p in block.products]
        passes.append(int(elements * compute_bytes))
        factors.append(int(split * compute_bytes) if layout.splits_backward else 0)
        per_layer.append(int(min(kept, default=0) * compute_bytes))
        matrix.append(max(sizes, default=0) * compute_bytes)
    return Activations(
        stage=kind.first,
        kept=0,
        logits=logits * compute_bytes + min(4 * logits, loss_chunk),
        working=int(_working_bytes(layout, of_chunks, per_norm, on_cpu=on_cpu)),
        exchange=int(2 * layout.boundary_bytes),
        passes=tuple(passes),
        factors=tuple(factors),
        per_layer=tuple(per_layer),
        matrix=tuple(matrix),
    )


def _peak(candidate: Candidate, stage: int, sizes: Activations, *, is_least: bool = False) -> int:
    """Return the peak bytes that a stage keeps for later actions of a step.

    With `is_least`, passes are counted in their order before backward passes are split.
    """
    layout = candidate.layout
    if layout.schedule_name == "1f1b" and not layout.splits_backward:
        return sizes.passes[0] * min(layout.grid.pipeline - stage, layout.micro_batches)
    # every schedule reaches its peak within the micro-batches of its steady state
    if layout.splits_backward and not is_least:
        return held(shortened(layout).schedule, stage, sizes.passes, sizes.factors)
    passes = sizes.passes
    key = ("passes", stage, passes, layout.schedule_name, layout.micro_batches)
    return candidate.stages.once(
        key, lambda: held(shortened(layout).pass_order, stage, passes, passes)
    )


def _working_bytes(
    layout: ResolvedLayout, of_chunks: Sequence[Blocks], per_norm: float, *, on_cpu: bool
) -> float:
    """Return an upper bound on the bytes of temporary tensors inside a pass.

    Of a layer that is recomputed for input gradients, the activations are replaced by the factors
    of its weight gradients, which `Activations.kept` contains.
    """
    blocks = [block for blocks in of_chunks for block, _ in blocks]
    recomputed = 0.0
    if layout.recompute == "full":
        replaced = 1 if layout.splits_backward else 0
        recomputed = max(
            (max(0.0, block.kept(per_norm) - replaced * block.factor_elements) for block in blocks),
            default=0.0,
        )
    largest_output = max(
        (product.rows * product.columns for block in blocks for product in block.products),
        default=0,
    )
    size = layout.compute_bytes
    return recomputed * size + max(2.0 * largest_output * size, _cut_bytes(layout, on_cpu=on_cpu))


def _cut_bytes(layout: ResolvedLayout, *, on_cpu: bool) -> float:
    """Return an upper bound on the bytes that attention over context ranks needs at a time.

    The largest sample is one document. Its keys and values are received, copied in their order and
    given gradients. A block of queries has a copy with all heads, and a mask, which is computed
    from distances in int64 and added to the scores. Heads are sent, received and put in order.
    """
    model, grid, tokens = layout.model, layout.grid, layout.sequence_length
    if grid.context == 1:
        return 0.0
    queries = min(CPU_QUERY_BLOCK if on_cpu else QUERY_BLOCK, tokens // grid.context)
    heads = model.kv_heads * (layout.micro_batch + 2) + model.heads
    keys = 2 * heads * model.head_dim // grid.tensor * layout.compute_bytes
    rows = tokens * (keys + queries * (8 + 1 + layout.compute_bytes))
    traffic = layout.activation_traffic
    heads = (model.heads + 2 * max(model.kv_heads, grid.context * grid.tensor)) // grid.tensor
    of_heads = 3 * layout.micro_batch * traffic.lengths.decoder * heads * traffic.head_bytes
    return float(max(rows, of_heads))
