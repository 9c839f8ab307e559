"""Bytes on the wire: what each collective of a step sends, and over which links.

Ring algorithms (Patarasuk and Yuan, 2009): on w ranks, an all-reduce of n bytes makes each rank
send 2n(w-1)/w, a reduce-scatter or all-gather of n bytes in all n(w-1)/w. Messages between all
pairs are as many bytes, but more of them cross the borders of nodes.

Tensor parallel volumes follow Megatron-LM (arXiv:1909.08053, section 3) and, with sequence
parallel, Korthikanti et al. (arXiv:2205.05198, section 4.2.2); a test holds them against the
calls that megatron-core really makes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.lengths import run_lengths
from frontier_llm.geometry.stages import Piece

LOSS_BYTES = 4  # the cross entropy sums in fp32


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
    """Bytes a rank sends to add up `total_bytes` over `ranks`."""
    return 2 * total_bytes * (ranks - 1) / ranks


def gather_bytes(total_bytes: float, ranks: int) -> float:
    """Bytes a rank sends so that each gets `total_bytes`; a reduce-scatter sends as much."""
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
    """Count the other ranks on this rank's node and beyond: asked for at every message sent."""
    others = [peer for peer in group if peer != rank]
    near = sum(grid.same_node(rank, peer) for peer in others)
    return near, len(others) - near


def tensor_bytes(config: RunConfig, piece: Piece, element_bytes: int) -> float:
    """Bytes a tensor rank sends for one micro-batch through one piece, forward and backward.

    Args:
        config: the run.
        piece: which part of the model.
        element_bytes: of an activation.
    """
    ranks = config.parallel.tensor
    if ranks == 1:
        return 0.0
    lengths = run_lengths(config)
    token_bytes = config.data.micro_batch * config.model.hidden * element_bytes
    encoder, decoder, both = (
        all_reduce_bytes(tokens * token_bytes, ranks)
        for tokens in (lengths.encoder, lengths.decoder, lengths.total)
    )
    layers = sum(_layer_bytes(config, layer, encoder, decoder) for layer in piece.layers)
    if config.parallel.sequence:
        learned = config.model.positions == "learned"
        embedding = (both if learned else both / 2) + both / 2
        head = 3 / 2 * decoder
    else:
        embedding, head = both, decoder
    predictions = config.data.micro_batch * lengths.decoder
    loss = 3 * all_reduce_bytes(predictions * LOSS_BYTES, ranks)  # maximum, target's logit, sum
    return layers + piece.has_embedding * embedding + piece.has_head * (head + loss)


def _layer_bytes(config: RunConfig, layer: int, encoder: float, decoder: float) -> float:
    """Count a layer's, given what an all-reduce of each side's activations sends."""
    again = 2 if config.recompute == "full" else 1
    if config.parallel.sequence:
        # in halves of an all-reduce. A block (attention or feed-forward): gather and
        # reduce-scatter forward, the mirror of it backward, and the input gathered once more for
        # the weight gradients. The encoder's output as a decoder layer reads it: gather forward,
        # its mirror, and once more
        block, read = (2 * again + 3) / 2, (again + 2) / 2
    else:
        block, read = again + 1, 1
    own = encoder if layer < config.model.encoder_layers else decoder
    if not config.model.reads_encoder(layer):
        return 2 * block * own
    return 3 * block * own + read * encoder


def boundary_bytes(config: RunConfig, element_bytes: int) -> float:
    """Bytes of one activation (or its gradient) that crosses from one stage to the next.

    Of an encoder-decoder the activations of both sides travel together, over every border.
    """
    tokens = config.data.micro_batch * run_lengths(config).total
    cut = config.parallel.tensor if config.parallel.sequence else 1
    return tokens * config.model.hidden * element_bytes / cut


def pipeline_sent(
    config: RunConfig, grid: Grid, rank: int, pieces: Sequence[Piece], element_bytes: int
) -> Sent:
    """What a rank sends to its pipeline neighbours for one micro-batch, forward and backward."""
    group, stage = grid.pipeline_group(rank), grid.coordinates(rank).pipeline
    one, sent = boundary_bytes(config, element_bytes), Sent()
    for index, piece in enumerate(pieces):
        if piece.stage != stage:
            continue
        if not piece.has_head:  # activation on to the next piece
            sent += to_peer(grid, rank, group[pieces[index + 1].stage], one)
        if not piece.has_embedding:  # gradient back to the one before
            sent += to_peer(grid, rank, group[pieces[index - 1].stage], one)
    return sent
