"""Bytes that each collective of a step sends, inside nodes and between nodes.

Ring algorithms (Patarasuk and Yuan, 2009): on w ranks, each rank sends 2n(w-1)/w bytes for an
all-reduce of n bytes, and n(w-1)/w for a reduce-scatter or an all-gather of n bytes in all.
Messages between all pairs are as many bytes, but more of them leave the node.

Tensor parallel volumes follow Megatron-LM (arXiv:1909.08053, section 3) and, with sequence
parallelism, Korthikanti et al. (arXiv:2205.05198, section 4.2.2); a test compares them with the
calls that megatron-core makes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.lengths import SampleLengths
from frontier_llm.geometry.model_chunks import ModelChunk

LOSS_BYTES = 4
"""Bytes per element of the cross entropy's sums: fp32."""


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sends, by link."""

    intra: float = 0.0
    """To ranks of its own node."""
    inter: float = 0.0
    """To ranks of other nodes."""

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.intra + other.intra, self.inter + other.inter)


def all_reduce_bytes(total_bytes: float, ranks: int) -> float:
    """Return the bytes a rank sends in an all-reduce of `total_bytes` over `ranks`."""
    return 2 * total_bytes * (ranks - 1) / ranks


def gather_bytes(total_bytes: float, ranks: int) -> float:
    """Return the bytes a rank sends in an all-gather or reduce-scatter of `total_bytes` in all."""
    return total_bytes * (ranks - 1) / ranks


def to_peer(grid: Grid, rank: int, peer: int, sent_bytes: float) -> Sent:
    """Attribute bytes sent from one rank to another to their link."""
    return Sent(intra=sent_bytes) if grid.same_node(rank, peer) else Sent(inter=sent_bytes)


def ring_sent(grid: Grid, rank: int, group: Sequence[int], sent_bytes: float) -> Sent:
    """Attribute bytes that a rank sends around a ring: all go to its right neighbour."""
    right = group[(list(group).index(rank) + 1) % len(group)]
    return to_peer(grid, rank, right, sent_bytes)


def pairs_sent(grid: Grid, rank: int, group: Sequence[int], sent_bytes: float) -> Sent:
    """Attribute bytes that a rank sends in equal messages to every other rank of a group."""
    near, far = _near_and_far(grid, rank, tuple(group))
    each = sent_bytes / max(1, near + far)
    return Sent(intra=near * each, inter=far * each)


@lru_cache(maxsize=1024)
def _near_and_far(grid: Grid, rank: int, group: tuple[int, ...]) -> tuple[int, int]:
    """Count the other ranks on this rank's node and on other nodes.

    Cached because it is called for every message that is counted.
    """
    others = [peer for peer in group if peer != rank]
    near = sum(grid.same_node(rank, peer) for peer in others)
    return near, len(others) - near


@dataclass(frozen=True)
class ActivationTraffic:
    """Bytes that ranks send of activations and their gradients for one micro-batch."""

    model: ModelConfig
    lengths: SampleLengths
    micro_batch: int
    """Samples per micro-batch."""
    tensor: int
    """Ranks over which matrices are cut."""
    sequence_parallel: bool
    """Whether norms and dropout are also cut over the tensor ranks."""
    recompute: str
    """`none`, `selective` or `full`."""
    element_bytes: int
    """Bytes per element of an activation."""

    def tensor_bytes(self, chunk: ModelChunk) -> float:
        """Return the bytes a tensor rank sends for a model chunk, forward and backward."""
        if self.tensor == 1:
            return 0.0
        token_bytes = self.micro_batch * self.model.hidden * self.element_bytes
        encoder, decoder, both = (
            all_reduce_bytes(tokens * token_bytes, self.tensor)
            for tokens in (self.lengths.encoder, self.lengths.decoder, self.lengths.total)
        )
        layers = sum(self._layer_bytes(layer, encoder, decoder) for layer in chunk.layers)
        if self.sequence_parallel:
            learned = self.model.positions == "learned"
            embedding = (both if learned else both / 2) + both / 2
            head = 3 / 2 * decoder
        else:
            embedding, head = both, decoder
        predictions = self.micro_batch * self.lengths.decoder
        # all-reduces of the maximum, the target's logit and the sum
        loss = 3 * all_reduce_bytes(predictions * LOSS_BYTES, self.tensor)
        return layers + chunk.has_embedding * embedding + chunk.has_head * (head + loss)

    def boundary_bytes(self) -> float:
        """Return the bytes of one activation (or its gradient) sent from stage to stage.

        In an encoder-decoder the activations of both sides are sent together between all stages.
        """
        tokens = self.micro_batch * self.lengths.total
        cut = self.tensor if self.sequence_parallel else 1
        return tokens * self.model.hidden * self.element_bytes / cut

    def pipeline_sent(self, grid: Grid, rank: int, chunks: Sequence[ModelChunk]) -> Sent:
        """Return what a rank sends to its pipeline neighbours, forward and backward.

        Args:
            grid: all ranks.
            rank: the sender.
            chunks: model chunks of the whole pipeline, in the model's order.
        """
        group, stage = grid.pipeline_group(rank), grid.coordinates(rank).pipeline
        one, sent = self.boundary_bytes(), Sent()
        for index, chunk in enumerate(chunks):
            if chunk.stage != stage:
                continue
            if not chunk.has_head:  # the activation, to the next chunk
                sent += to_peer(grid, rank, group[chunks[index + 1].stage], one)
            if not chunk.has_embedding:  # the gradient, to the previous chunk
                sent += to_peer(grid, rank, group[chunks[index - 1].stage], one)
        return sent

    def _layer_bytes(self, layer: int, encoder: float, decoder: float) -> float:
        """Return a layer's bytes, given those of an all-reduce of each side's activations."""
        forwards = 2 if self.recompute == "full" else 1  # forward passes per backward pass
        if self.sequence_parallel:
            # A gather or a reduce-scatter is half an all-reduce. A block (attention or feed-
            # forward) has one of each forward, one of each backward, and one more gather of the
            # input for the weight gradients. The encoder's output that a decoder layer reads has
            # a gather forward, a reduce-scatter backward, and one more gather.
            block, read = (2 * forwards + 3) / 2, (forwards + 2) / 2
        else:
            block, read = forwards + 1, 1
        own = encoder if layer < self.model.encoder_layers else decoder
        if not self.model.reads_encoder(layer):
            return 2 * block * own
        return 3 * block * own + read * encoder
