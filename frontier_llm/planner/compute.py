"""Seconds of computation: products by shape, attention, and what only moves memory.

A product of [m, k] and [k, n] takes 2 (mnk + c (mn + nk + km)) / v, with the speed v of large
products and the rows c that each face costs (config/calibration.py): the form of tile quantisation
and of operands' traffic, with two constants to a format. The backward pass of a product is two of
the same size, [m, n][n, k] and [k, m][m, n].

Flash attention's backward pass does five products where the forward pass does two (Dao,
arXiv:2307.08691, section 3.1.2).
"""

from dataclasses import dataclass

from frontier_llm.config.cluster import DeviceConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.lengths import run_lengths
from frontier_llm.geometry.stages import Piece
from frontier_llm.planner.block import (
    SCORE_PASSES,
    Block,
    Product,
    head_product,
    piece_blocks,
)
from frontier_llm.planner.engine import Engine

FLASH_BACKWARD = 2.5
"""Operations of fused attention's backward pass, over its forward pass."""
UPDATE_BYTES = 28
"""Moved to update an element: gradient, master and two moments read, the last three written."""
NORM_BYTES = 4
"""Read of an element for the norm of the gradient."""
LOSS_BYTES = 26
"""Moved for an entry of the logits: copied to fp32 (6), maximum (4), exponential and sum (8), and
its gradient (8)."""


@dataclass(frozen=True)
class Seconds:
    """Of one micro-batch through one piece of the model."""

    forward: float
    backward: float
    """Without what is recomputed."""
    again: float
    """What is recomputed in the backward pass."""


class Speed:
    """How fast a device computes in one format."""

    def __init__(self, device: DeviceConfig, precision: str) -> None:
        """Read the calibration.

        Raises:
            ConfigError: it says nothing about this format.
        """
        self._calibration = device.calibration
        curve = device.calibration.products.get(precision)  # type: ignore[call-overload]
        if curve is None:
            raise ConfigError(
                "precision",
                precision,
                f"a format whose speed {device.name} has in its cluster file: "
                + ", ".join(device.calibration.products),
                "set precision, or measure it: python tools/calibrate.py",
            )
        self._flops_per_second = curve.tflops * 1e12
        self._half_size = curve.half_size
        self._kernel_seconds = device.calibration.kernel_us * 1e-6
        self._bytes_per_second = device.memory_gb_per_second * 1e9 * device.calibration.memory_share

    @property
    def hidden_share(self) -> float:
        """Share of communication that costs no time beside computation."""
        return self._calibration.hidden_share

    def product(self, product: Product) -> float:
        """Return the seconds of one product."""
        m, k, n = product
        work = m * n * k + self._half_size * (m * n + n * k + k * m)
        seconds: float = 2 * work / self._flops_per_second
        return max(seconds, self._kernel_seconds)

    def attention(self, flops: float) -> float:
        """Return the seconds of a fused kernel of so many operations."""
        seconds: float = flops / (self._flops_per_second * self._calibration.attention_share)
        return seconds

    def moved(self, moved_bytes: float, kernels: int = 1) -> float:
        """Return the seconds of element-wise kernels that read and write so many bytes."""
        return max(moved_bytes / self._bytes_per_second, kernels * self._kernel_seconds)


def piece_seconds(
    config: RunConfig, piece: Piece, speed: Speed, engine: Engine, compute_bytes: int
) -> Seconds:
    """Return the seconds of one micro-batch through one piece, without communication."""
    forward = backward = again = 0.0
    for block, count in piece_blocks(config, piece):
        products = sum(speed.product(product) for product in block.products)
        twice = sum(_backward(product, speed) for product in block.products)
        core, core_backward = _attention(config, block, speed, engine, compute_bytes)
        moved = speed.moved(block.moved_elements * compute_bytes, block.kernels)
        once = products + core + moved
        forward += count * once
        backward += count * (twice + core_backward + 2 * moved)
        again += count * {"none": 0.0, "selective": core, "full": once}[config.recompute]
    if piece.has_embedding:
        embedded = config.data.micro_batch * run_lengths(config).total * config.model.hidden
        looked_up = speed.moved(2.0 * embedded * compute_bytes)
        forward += looked_up
        backward += looked_up
    if piece.has_head:
        head = head_product(config)
        loss = speed.moved(float(head.rows) * head.columns * LOSS_BYTES, kernels=10) / 3
        forward += speed.product(head) + 2 * loss
        backward += _backward(head, speed) + loss
    return Seconds(forward, backward, again)


def update_seconds(elements: int, speed: Speed, compute_bytes: int) -> float:
    """Return the seconds to take the norm of and update so many elements."""
    return speed.moved(float(elements) * (NORM_BYTES + UPDATE_BYTES + compute_bytes))


def accumulate_seconds(elements: int, kept: int, speed: Speed, compute_bytes: int) -> float:
    """Return the seconds to add a micro-batch's gradients to the fp32 sums.

    Args:
        elements: whose gradients the backward pass made.
        kept: of which the sums are kept on this rank.
        speed: of the device.
        compute_bytes: of an element of a gradient.
    """
    packed = 0 if kept == elements else elements * (compute_bytes + 4)
    return speed.moved(packed + kept * (8.0 + (compute_bytes if kept == elements else 4)))


def _backward(product: Product, speed: Speed) -> float:
    m, k, n = product
    return speed.product(Product(m, n, k)) + speed.product(Product(k, m, n))


def _attention(
    config: RunConfig, block: Block, speed: Speed, engine: Engine, compute_bytes: int
) -> tuple[float, float]:
    """Return the seconds of scores and weighted values, forward and backward."""
    if engine.fused_attention:
        return (
            speed.attention(block.attention_flops),
            speed.attention(block.attention_flops * FLASH_BACKWARD),
        )
    # a product of each head by itself, the masked half included, and its scores in memory
    rows, width = run_lengths(config).decoder, config.model.head_dim
    pairs = block.score_elements / rows**2
    one = speed.product(Product(rows, width, rows)) + speed.product(Product(rows, rows, width))
    scores = speed.moved(SCORE_PASSES * block.score_elements * compute_bytes, kernels=3)
    return pairs * one + scores, 2 * pairs * one + 2 * scores
