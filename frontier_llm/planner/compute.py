"""Predict seconds of computation: matrix products, attention, and kernels that only move memory.

A product of an [m, k] and a [k, n] matrix takes 2 (mnk + c (mn + nk + km)) / v seconds. Here v is
the speed of large products in FLOP/s, and c is `half_size` (config/calibration.py). The term with c
grows like the cost of tile quantisation and of reading the operands. The backward pass of a product
is two products with the same number of operations: [m, n][n, k] and [k, m][m, n].

The backward pass of flash attention computes five products, its forward pass two (Dao,
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
"""Bytes moved to update an element in fp32: the gradient, the master weight and two moments are
read; the master weight and the two moments are written."""
NORM_BYTES = 4
"""Bytes read per element of the fp32 gradient to compute the gradient norm."""
LOSS_BYTES = 26
"""Bytes moved per element of the logits by the loss: 6 for the copy from 2-byte values to fp32, 4
for the maximum, 8 for exponentials and their sum, 8 for the gradient."""


@dataclass(frozen=True)
class Engine:
    """Properties of a training program that decide its speed on any layout.

    The defaults describe this program; published figures of other systems need other values.
    """

    fused_attention: bool = True
    """Whether attention scores stay inside one kernel (flash attention) instead of in memory."""
    overlaps: bool = True
    """Whether gathers of parameters, reductions of gradients and the refresh (the gather of updated
    parameters after a step) overlap with computation."""
    message_elements: int | None = None
    """Elements per message of gathers and reductions; None = one message per sharding unit."""
    sums_bytes: int = 4
    """Bytes per element of the gradients that are summed over replicas."""
    second_copy_ranks: int | None = None
    """If set, backward passes gather parameters from a second copy that is sharded over this many
    neighbouring ranks (ZeRO++, arXiv:2306.10209)."""
    split_exchange: bool = False
    """Whether each tensor rank sends only its part of a stage's output to the next stage. The
    receiving tensor ranks then gather the parts."""


OURS = Engine()
"""The engine of this program."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of computation for one micro-batch in one model chunk."""

    forward: float
    input_gradients: float
    """Seconds of all gradients that a backward pass with split weight gradients computes at once:
    those of inputs, norms and attention. Recomputation is not included."""
    weight_gradients: float
    """Seconds of the weight gradients of linear layers, which can be computed later."""
    recomputed: float
    """Seconds of recomputation before the backward pass."""


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
        """Share of the overlappable communication time that is hidden behind computation."""
        return self._calibration.hidden_share

    def product(self, product: Product) -> float:
        """Return the seconds of one matrix product, at least those of starting a kernel."""
        m, k, n = product
        weighted_size = m * n * k + self._half_size * (m * n + n * k + k * m)
        seconds: float = 2 * weighted_size / self._flops_per_second
        return max(seconds, self._kernel_seconds)

    def attention(self, flops: float) -> float:
        """Return the seconds of a fused attention kernel that does `flops` operations."""
        seconds: float = flops / (self._flops_per_second * self._calibration.attention_share)
        return seconds

    def moved(self, moved_bytes: float, kernels: int = 1) -> float:
        """Return the seconds of element-wise kernels that read and write `moved_bytes` in total."""
        return max(moved_bytes / self._bytes_per_second, kernels * self._kernel_seconds)


def chunk_seconds(
    layout: ResolvedLayout, chunk: ModelChunk, speed: Speed, engine: Engine
) -> Seconds:
    """Return the seconds of one micro-batch in one model chunk, without communication.

    Args:
        layout: layout of the run.
        chunk: the model chunk.
        speed: speed of the device.
        engine: the training program.
    """
    forward = inputs = weights = recomputed = 0.0
    compute_bytes = layout.compute_bytes
    for block, count in chunk_blocks(layout, chunk):
        products = sum(speed.product(product) for product in block.products)
        attention, attention_backward = _attention(layout, block, speed, engine)
        elementwise = speed.moved(block.moved_elements * compute_bytes, block.kernels)
        block_forward = products + attention + elementwise
        forward += count * block_forward
        products_inputs = sum(_input_gradient(product, speed) for product in block.products)
        inputs += count * (products_inputs + attention_backward + 2 * elementwise)
        weights += count * sum(_weight_gradient(product, speed) for product in block.products)
        repeated = {"none": 0.0, "selective": attention, "full": block_forward}
        recomputed += count * repeated[layout.recompute]
    if chunk.has_embedding:
        embedded_elements = layout.micro_batch * layout.lengths.total * layout.model.hidden
        look_up = speed.moved(2.0 * embedded_elements * compute_bytes)
        forward += look_up
        inputs += look_up
    if chunk.has_head:
        head = head_product(layout)
        # two thirds of the memory traffic of the loss belong to the forward pass
        loss_third = speed.moved(float(head.rows) * head.columns * LOSS_BYTES, kernels=10) / 3
        forward += speed.product(head) + 2 * loss_third
        # the weight gradient of the head is never computed later (sharding/gradients.py)
        inputs += _input_gradient(head, speed) + _weight_gradient(head, speed) + loss_third
    return Seconds(forward, inputs, weights, recomputed)


def update_seconds(elements: int, speed: Speed, compute_bytes: int) -> float:
    """Return the seconds to compute the gradient norm of `elements` and to update them."""
    return speed.moved(float(elements) * (NORM_BYTES + UPDATE_BYTES + compute_bytes))


def accumulate_seconds(elements: int, kept: int, speed: Speed, compute_bytes: int) -> float:
    """Return the seconds to add the gradients of a micro-batch to the fp32 sums.

    If gradients are sharded, they are first copied into an fp32 send buffer. The rank then adds
    only its own shard, which arrives in fp32.

    Args:
        elements: number of gradients that the backward pass computes on this rank.
        kept: number of gradients whose sums this rank keeps (its shard).
        speed: speed of the device.
        compute_bytes: bytes per element of a new gradient.
    """
    is_sharded = kept != elements
    copied_bytes = elements * (compute_bytes + 4) if is_sharded else 0
    added_bytes = 4 if is_sharded else compute_bytes
    return speed.moved(copied_bytes + kept * (8.0 + added_bytes))


def _input_gradient(product: Product, speed: Speed) -> float:
    """Return the seconds of the product that computes the gradient of a product's input."""
    m, k, n = product
    return speed.product(Product(m, n, k))


def _weight_gradient(product: Product, speed: Speed) -> float:
    """Return the seconds of the product that computes the gradient of a product's weight."""
    m, k, n = product
    return speed.product(Product(k, m, n))


def _attention(
    layout: ResolvedLayout, block: Block, speed: Speed, engine: Engine
) -> tuple[float, float]:
    """Return the forward and the backward seconds of attention without its projections."""
    if engine.fused_attention:
        return (
            speed.attention(block.attention_flops),
            speed.attention(block.attention_flops * FLASH_BACKWARD),
        )
    # Without fusion each head has two products, which include the masked half of the scores, and
    # the scores are written to memory and read again.
    tokens, width = layout.lengths.decoder, layout.model.head_dim
    heads = block.score_elements / tokens**2  # heads on this rank, of all samples together
    head_seconds = speed.product(Product(tokens, width, tokens))
    head_seconds += speed.product(Product(tokens, tokens, width))
    score_seconds = speed.moved(
        SCORE_PASSES * block.score_elements * layout.compute_bytes, kernels=3
    )
    forward = heads * head_seconds + score_seconds
    return forward, 2 * forward
