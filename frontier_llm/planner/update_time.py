"""Predict the seconds of the gradient norm and of the optimizer's update."""

from collections.abc import Iterator

from frontier_llm.geometry.inventory import chunk_parameters
from frontier_llm.geometry.model_chunks import ModelChunk
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.planner.block import Product
from frontier_llm.planner.compute import Speed

NORM_BYTES = 4
"""Bytes read per element of the fp32 gradient to compute the gradient norm."""
UPDATE_BYTES = {"adamw": 28, "adamw_8bit": 64, "muon": 44, "adafactor": 40}
"""Bytes moved to update an element in fp32. AdamW reads the gradient, the master weight and two
moments, and writes the master weight and the moments. Muon reads and writes in three kernels: the
momentum, the matrix that is orthogonalised, and the master weight. Adafactor reads the gradient to
add up its squares, divides it in place, adds up the squares of the result and of the weights, and
scales and adds it. Moments in 8 bits are decoded to fp32 before the update and encoded after it."""
ITERATIONS = 5
"""Iterations of Newton and Schulz in Muon."""


def update_seconds(
    layout: ResolvedLayout, chunks: tuple[ModelChunk, ...], elements: int, speed: Speed
) -> float:
    """Return the seconds to compute the gradient norm and to update a rank's states.

    Args:
        layout: layout of the run.
        chunks: the model chunks of the rank's stage.
        elements: elements of all units of the stage on a tensor rank, padding included.
        speed: speed of the device.
    """
    optimizer, share = layout.optimizer.name, layout.factors.optimizer
    moved = NORM_BYTES + UPDATE_BYTES[optimizer] + layout.compute_bytes
    seconds = speed.moved(float(elements // share) * moved)
    if optimizer == "muon":
        seconds += orthogonal_seconds(layout, chunks, speed) / share
    return seconds


def orthogonal_seconds(
    layout: ResolvedLayout, chunks: tuple[ModelChunk, ...], speed: Speed
) -> float:
    """Return the seconds to orthogonalise all matrices of a stage, whole, on one device.

    An iteration multiplies a matrix [m, n], m <= n, by its transpose, the result by itself, and the
    matrix by the sum.
    """
    seconds = 0.0
    for shape in _matrices(layout, chunks):
        m, n = sorted(shape)
        products = Product(m, n, m), Product(m, m, m), Product(m, m, n)
        seconds += ITERATIONS * sum(speed.product(product) for product in products)
    return seconds


def _matrices(layout: ResolvedLayout, chunks: tuple[ModelChunk, ...]) -> Iterator[tuple[int, int]]:
    """Yield the shapes of the matrices of layers; query, key and value are separate."""
    model = layout.model
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    fused = {"attention.qkv": (query, key, key), "cross_attention.key_value": (key, key)}
    for chunk in chunks:
        for shape in chunk_parameters(model, chunk, layout.sequence_length):
            if not shape.is_matrix_of_layer:
                continue
            for rows in fused.get(shape.module, (shape.shape[0],)):
                yield rows, shape.shape[1]
