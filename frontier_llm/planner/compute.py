"""Seconds of computation: matrix products, attention, and kernels that only move memory.

A product of [m, k] and [k, n] takes 2 (mnk + c (mn + nk + km)) / v seconds, with the speed v of
large products and `half_size` c (config/calibration.py). The term in c has the form of the cost of
tile quantisation and of reading operands. The backward pass of a product is two products of the
same size, [m, n][n, k] and [k, m][m, n].

Flash attention's backward pass does five products where the forward pass does two (Dao,
arXiv:2307.08691, section 3.1.2).
"""

from dataclasses import dataclass

from frontier_llm.config.cluster import DeviceConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.model_chunks import ModelChunk
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.planner.block import SCORE_PASSES, Block, Product, chunk_blocks, head_product

FLASH_BACKWARD = 2.5
"""Operations of fused attention's backward pass, relative to its forward pass."""
UPDATE_BYTES = 28
"""Bytes moved to update an element: gradient, master weight and two moments are read, the last
three are written."""
NORM_BYTES = 4
"""Bytes read per element for the norm of the gradient."""
LOSS_BYTES = 26
"""Bytes moved per element of the logits: copied to fp32 (6), maximum (4), exponential and sum (8),
gradient (8)."""


@dataclass(frozen=True)
class Engine:
    """Properties of a training program that decide its speed on any layout.

    The defaults describe this program; published figures of other systems need other values.
    """

    fused_attention: bool = True
    """Whether attention scores stay inside one kernel (flash attention) instead of in memory."""
    overlaps: bool = True
    """Whether gathers, reductions and the refresh overlap with computation."""
    message_elements: int | None = None
    """Elements per message of gathers and reductions; None = one message per unit."""
    sums_bytes: int = 4
    """Bytes per element of the gradients that replicas add up."""
    second_copy_ranks: int | None = None
    """If set, backward passes gather parameters from a second copy that is cut over this many
    neighbours (ZeRO++, arXiv:2306.10209)."""
    split_exchange: bool = False
    """Whether each tensor rank sends a part of a stage's output, which the receivers gather."""


OURS = Engine()
"""This program."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of one micro-batch in one model chunk."""

    forward: float
    backward: float
    """Without recomputation."""
    recomputed: float
    """Recomputation in the backward pass."""


class Speed:
    """The speed of a device in one compute format."""

    def __init__(self, device: DeviceConfig, precision: str) -> None:
        """Read the device's calibration.

        Raises:
            ConfigError: the calibration has no speed for this format.
        """
        self._calibration = device.calibration
        curve = device.calibration.products.get(precision)  # type: ignore[call-overload]
        if curve is None:
            raise ConfigError(
                "precision",
                precision,
                f"a format whose speed {device.name} has in its cluster file: "
                + ", ".join(device.calibration.products),
                "set precision, or measure it: frontier-llm calibrate",
            )
        self._flops_per_second = curve.tflops * 1e12
        self._half_size = curve.half_size
        self._kernel_seconds = device.calibration.kernel_us * 1e-6
        self._bytes_per_second = device.memory_gb_per_second * 1e9 * device.calibration.memory_share

    @property
    def hidden_share(self) -> float:
        """Share of overlapped communication that costs no time."""
        return self._calibration.hidden_share

    def product(self, product: Product) -> float:
        """Return the seconds of one product."""
        m, k, n = product
        work = m * n * k + self._half_size * (m * n + n * k + k * m)
        seconds: float = 2 * work / self._flops_per_second
        return max(seconds, self._kernel_seconds)

    def attention(self, flops: float) -> float:
        """Return the seconds of a fused attention kernel with this many operations."""
        seconds: float = flops / (self._flops_per_second * self._calibration.attention_share)
        return seconds

    def moved(self, moved_bytes: float, kernels: int = 1) -> float:
        """Return the seconds of element-wise kernels that read and write this many bytes."""
        return max(moved_bytes / self._bytes_per_second, kernels * self._kernel_seconds)


def chunk_seconds(
    layout: ResolvedLayout, chunk: ModelChunk, speed: Speed, engine: Engine
) -> Seconds:
    """Return the seconds of one micro-batch in one model chunk, without communication."""
    forward = backward = recomputed = 0.0
    compute_bytes = layout.compute_bytes
    for block, count in chunk_blocks(layout, chunk):
        products = sum(speed.product(product) for product in block.products)
        products_backward = sum(_backward(product, speed) for product in block.products)
        core, core_backward = _attention(layout, block, speed, engine)
        moved = speed.moved(block.moved_elements * compute_bytes, block.kernels)
        block_forward = products + core + moved
        forward += count * block_forward
        backward += count * (products_backward + core_backward + 2 * moved)
        recomputed += (
            count * {"none": 0.0, "selective": core, "full": block_forward}[layout.recompute]
        )
    if chunk.has_embedding:
        embedded = layout.micro_batch * layout.lengths.total * layout.model.hidden
        looked_up = speed.moved(2.0 * embedded * compute_bytes)
        forward += looked_up
        backward += looked_up
    if chunk.has_head:
        head = head_product(layout)
        # of the memory traffic of the loss, two thirds are in the forward pass
        loss_third = speed.moved(float(head.rows) * head.columns * LOSS_BYTES, kernels=10) / 3
        forward += speed.product(head) + 2 * loss_third
        backward += _backward(head, speed) + loss_third
    return Seconds(forward, backward, recomputed)


def update_seconds(elements: int, speed: Speed, compute_bytes: int) -> float:
    """Return the seconds to take the gradient norm of this many elements and to update them."""
    return speed.moved(float(elements) * (NORM_BYTES + UPDATE_BYTES + compute_bytes))


def accumulate_seconds(elements: int, kept: int, speed: Speed, compute_bytes: int) -> float:
    """Return the seconds to add a micro-batch's gradients to the fp32 sums.

    Args:
        elements: whose gradients the backward pass computes.
        kept: elements whose sums are kept on this rank.
        speed: of the device.
        compute_bytes: bytes per element of a gradient.
    """
    packed = 0 if kept == elements else elements * (compute_bytes + 4)
    return speed.moved(packed + kept * (8.0 + (compute_bytes if kept == elements else 4)))


def _backward(product: Product, speed: Speed) -> float:
    m, k, n = product
    return speed.product(Product(m, n, k)) + speed.product(Product(k, m, n))


def _attention(
    layout: ResolvedLayout, block: Block, speed: Speed, engine: Engine
) -> tuple[float, float]:
    """Return the seconds of scores and weighted values, forward and backward."""
    if engine.fused_attention:
        return (
            speed.attention(block.attention_flops),
            speed.attention(block.attention_flops * FLASH_BACKWARD),
        )
    # one product per head, including the masked half, and the scores in memory
    rows, width = layout.lengths.decoder, layout.model.head_dim
    pairs = block.score_elements / rows**2
    one = speed.product(Product(rows, width, rows)) + speed.product(Product(rows, rows, width))
    scores = speed.moved(SCORE_PASSES * block.score_elements * layout.compute_bytes, kernels=3)
    return pairs * one + scores, 2 * pairs * one + 2 * scores
