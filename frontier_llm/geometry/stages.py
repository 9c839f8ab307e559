"""Which layers lie on which stage and chunk of the pipeline.

With C chunks a stage, the model is cut into S x C pieces; piece i lies on stage i mod S as its
chunk i div S (interleaved 1F1B, Narayanan et al., SC'21, section 2.2).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """The part of the model that one (stage, chunk) computes."""

    stage: int
    chunk: int
    layers: range
    has_embedding: bool
    has_head: bool


def split_layers(layers: int, pieces: int) -> tuple[int, ...]:
    """Cut a number of layers into pieces as evenly as they can be.

    Where it does not divide, the pieces with one layer less are the last and the first: they
    also hold the head and the embedding.

    >>> split_layers(10, 4)
    (2, 3, 3, 2)
    """
    base, extra = divmod(layers, pieces)
    sizes = [base] * pieces
    # the last piece gives up its extra layer first (the head costs most), then the first piece
    order = [*range(1, pieces - 1), 0, pieces - 1] if pieces > 1 else [0]
    for piece in order[:extra]:
        sizes[piece] += 1
    return tuple(sizes)


def make_pieces(
    layers: int, stages: int, chunks: int = 1, layers_per_stage: tuple[int, ...] | None = None
) -> tuple[Piece, ...]:
    """Lay out a model over a pipeline.

    Args:
        layers: transformer layers in all.
        stages: pipeline ranks.
        chunks: pieces a stage.
        layers_per_stage: layers of each of the `stages * chunks` pieces in the model's order;
            absent = even.

    Returns:
        The pieces in the model's order.
    """
    sizes = layers_per_stage or split_layers(layers, stages * chunks)
    pieces, first = [], 0
    for index, size in enumerate(sizes):
        chunk, stage = divmod(index, stages)
        pieces.append(
            Piece(stage, chunk, range(first, first + size), index == 0, index == len(sizes) - 1)
        )
        first += size
    return tuple(pieces)


def pieces_of_stage(pieces: tuple[Piece, ...], stage: int) -> tuple[Piece, ...]:
    """Return the pieces of one stage, by chunk."""
    return tuple(piece for piece in pieces if piece.stage == stage)
