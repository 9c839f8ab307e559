"""Count the bytes that collectives send inside packages, inside nodes and between nodes.

The formulas for rings are those of Patarasuk and Yuan (2009). On w ranks, each rank sends
2n(w-1)/w bytes in an all-reduce of n bytes. It sends n(w-1)/w bytes in a reduce-scatter of n bytes,
and in an all-gather whose result has n bytes. Messages between all pairs of ranks send the same
number of bytes, but more of these bytes leave the node.

The bytes of tensor parallelism follow Megatron-LM (arXiv:1909.08053, section 3) and, with sequence
parallelism, Korthikanti et al. (arXiv:2205.05198, section 4.2.2). A test compares them with the
calls that megatron-core makes.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.context_cut import HeadExchange
from frontier_llm.geometry.grid import LEVELS, Grid, Level
from frontier_llm.geometry.lengths import SampleLengths
from frontier_llm.geometry.model_chunks import ModelChunk, looked_up_elements, received_elements

SUM_BYTES = 4
"""Bytes per sum over the elements of a token, which is fp32: in the cross entropy, and in norms
over the heads of all tensor ranks."""


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sends, by the level of the links that they cross."""

    package: float = 0.0
    """Bytes sent to ranks of the same package; 0 if the cluster has no packages."""
    node: float = 0.0
    """Bytes sent to other ranks of the same node."""
    network: float = 0.0
    """Bytes sent to ranks of other nodes."""

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(
            self.package + other.package, self.node + other.node, self.network + other.network
        )

    def __mul__(self, factor: float) -> "Sent":
        return Sent(self.package * factor, self.node * factor, self.network * factor)

    @property
    def total(self) -> float:
        """Bytes sent at all levels."""
        return self.package + self.node + self.network

    def at(self, level: Level) -> float:
        """Return the bytes of a level."""
        return {"package": self.package, "node": self.node, "network": self.network}[level]


def level_labels(sent: Iterable[Sent]) -> dict[Level, str]:
    """Return a label for each level of links, nearest first, without packages if none are used."""
    if any(volume.package for volume in sent):
        return {
            "package": "inside a package",
            "node": "between packages",
            "network": "between nodes",
        }
    return {"node": "inside a node", "network": "between nodes"}


def all_reduce_bytes(total_bytes: float, ranks: int) -> float:
    """Return the bytes that a rank sends in an all-reduce of `total_bytes` over `ranks` ranks."""
    return 2 * total_bytes * (ranks - 1) / ranks


def gather_bytes(total_bytes: float, ranks: int) -> float:
    """Return the bytes that a rank sends in an all-gather or reduce-scatter over `ranks` ranks.

    `total_bytes` is the size of the gathered result, or of the buffer that is reduced.
    """
    return total_bytes * (ranks - 1) / ranks


def to_peer(grid: Grid, rank: int, peer: int, sent_bytes: float) -> Sent:
    """Return bytes that one rank sends to another, at the level of the links between them."""
    return Sent(**{grid.level(rank, peer): sent_bytes})


def ring_sent(grid: Grid, rank: int, group: Sequence[int], sent_bytes: float) -> Sent:
    """Return bytes that a rank sends around a ring, all of them to the next rank of the group."""
    next_rank = group[(list(group).index(rank) + 1) % len(group)]
    return to_peer(grid, rank, next_rank, sent_bytes)


def pairs_sent(grid: Grid, rank: int, group: Sequence[int], sent_bytes: float) -> Sent:
    """Return bytes that a rank sends in equal messages to all other ranks of a group."""
    others = _others(grid, rank, tuple(group))
    return Sent(*others) * (sent_bytes / max(1, sum(others)))


def unequal_sent(grid: Grid, rank: int, group: Sequence[int], sent_bytes: Sequence[float]) -> Sent:
    """Return bytes that a rank sends to the ranks of a group, a number for each of them."""
    total = Sent()
    for peer, to_this_peer in zip(group, sent_bytes, strict=True):
        if peer != rank:
            total += to_peer(grid, rank, peer, to_this_peer)
    return total


@lru_cache(maxsize=1024)
def _others(grid: Grid, rank: int, group: tuple[int, ...]) -> tuple[int, ...]:
    """Count the other ranks of a group by the level of their links to `rank`, for every message."""
    levels = Counter(grid.level(rank, peer) for peer in group if peer != rank)
    return tuple(levels[level] for level in LEVELS)


@dataclass(frozen=True)
class ActivationTraffic:
    """Counts the bytes of activations and their gradients that ranks send for one micro-batch."""

    model: ModelConfig
    lengths: SampleLengths
    micro_batch: int
    tensor: int
    """Number of tensor ranks over which matrices are divided."""
    sequence_parallel: bool
    """Whether norms and dropout are also divided over the tensor ranks, along the sequence."""
    recompute: str
    element_bytes: int

    def tensor_bytes(self, chunk: ModelChunk) -> float:
        """Return the bytes that a tensor rank sends for a model chunk, forward and backward."""
        if self.tensor == 1:
            return 0.0
        # bytes of an all-reduce of the activations of each side, and of looked up embeddings
        encoder, decoder, embedded = (
            all_reduce_bytes(elements * self.micro_batch * self.element_bytes, self.tensor)
            for elements in (
                self.lengths.encoder * self.model.encoder.hidden,
                self.lengths.decoder * self.model.hidden,
                looked_up_elements(self.model, chunk, self.lengths),
            )
        )
        layers = sum(self._layer_bytes(layer, encoder, decoder) for layer in chunk.layers)
        layers += self.norm_bytes(chunk)
        if self.sequence_parallel:  # a gather or a reduce-scatter is half an all-reduce
            has_positions = self.model.positions == "learned"
            embedding = (embedded if has_positions else embedded / 2) + embedded / 2
            head = 3 / 2 * decoder
        else:
            embedding, head = embedded, decoder
        predictions = self.micro_batch * self.lengths.decoder
        # the loss has three all-reduces: maximum, logit of the target, and sum of exponentials
        loss = 3 * all_reduce_bytes(predictions * SUM_BYTES, self.tensor)
        return layers + embedding + chunk.has_head * (head + loss)

    def norm_bytes(self, chunk: ModelChunk) -> float:
        """Return the part of `tensor_bytes` that norms of queries and keys send.

        Norms over the heads of all tensor ranks have `norm_messages` all-reduces, of a sum over the
        queries and one over the keys of each token.
        """
        in_encoder = sum(layer < self.model.encoder_layers for layer in chunk.layers)
        tokens = in_encoder * self.lengths.encoder
        tokens += (len(chunk.layers) - in_encoder) * self.lengths.decoder
        sums = 2 * self.micro_batch * tokens * SUM_BYTES
        return self._norm_passes * all_reduce_bytes(sums, self.tensor)

    def norm_messages(self, chunk: ModelChunk) -> int:
        """Count the all-reduces of norms of queries and keys: one in each pass of a layer."""
        return self._norm_passes * len(chunk.layers)

    @property
    def _norm_passes(self) -> int:
        is_divided = self.model.qk_norm == "width" and self.tensor > 1
        return (3 if self.recompute == "full" else 2) * is_divided

    def boundary_bytes(self, chunk: ModelChunk) -> float:
        """Return the bytes of the activations that a chunk gets from another stage."""
        elements = self.micro_batch * sum(received_elements(self.model, chunk, self.lengths))
        return elements * self.element_bytes / (self.tensor if self.sequence_parallel else 1)

    @property
    def head_bytes(self) -> int:
        """Bytes of a token in one head."""
        return self.model.head_dim * self.element_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: the keys and values of a token in a layer."""
        return 2 * self.model.kv_heads // self.tensor * self.head_bytes

    def head_exchange(self, context: int) -> HeadExchange:
        """Return the exchange of heads of `context` ranks."""
        heads, key_heads = self.model.heads // self.tensor, self.model.kv_heads // self.tensor
        return HeadExchange(context, heads, key_heads)

    def pipeline_sent(self, grid: Grid, rank: int, chunks: Sequence[ModelChunk]) -> Sent:
        """Return the bytes that a rank sends to neighbouring stages, forward and backward.

        `chunks` are those of the whole pipeline, in the order of the forward pass.
        """
        group, stage = grid.pipeline_group(rank), grid.coordinates(rank).pipeline
        sent = Sent()
        for before, after in pairwise(chunks):  # the activation goes there, its gradient back
            stages = {before.stage, after.stage}
            if stage in stages and len(stages) == 2:
                (other,) = stages - {stage}
                sent += to_peer(grid, rank, group[other], self.boundary_bytes(after))
        return sent

    def _layer_bytes(self, layer: int, encoder: float, decoder: float) -> float:
        """Return the bytes of a layer from those of an all-reduce of each side's activations."""
        forwards = 2 if self.recompute == "full" else 1  # forward passes per backward pass
        if self.sequence_parallel:
            # A gather or a reduce-scatter is half an all-reduce. An attention or feed-forward block
            # has one gather and one reduce-scatter in each forward pass and in the backward pass.
            # It has one more gather in the backward pass, of its input for the weight gradients.
            # When a decoder layer reads the output of the encoder, this output is gathered in each
            # forward pass, gathered again for the weight gradients, and its gradient is scattered.
            block, encoder_read = (2 * forwards + 3) / 2, (forwards + 2) / 2
        else:
            block, encoder_read = forwards + 1, 1
        side = encoder if layer < self.model.encoder_layers else decoder
        if not self.model.reads_encoder(layer):
            return 2 * block * side
        if self.model.merges_attention(layer):  # keys and values are those of both sides
            return 2 * block * side + encoder_read * (encoder + decoder)
        return 3 * block * side + encoder_read * encoder
