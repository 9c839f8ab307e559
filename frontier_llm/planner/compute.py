"""Predict seconds of computation: matrix products, attention, other kernels, and their start.

A GPU divides the result of a product into tiles and computes as many at a time as it has
multiprocessors (NVIDIA) or compute units (AMD). The number of rounds, called waves, is whole, so a
product whose last wave is partly empty is slower (NVIDIA, "Matrix multiplication background",
section on tile and wave quantisation). A library may also divide the inner dimension of a product
with few tiles (split-K). It chooses the fastest of its kernels; so does this module. On a CPU, a
product of an [m, k] and a [k, n] matrix takes 2 (mnk + c (mn + nk + km)) / v seconds. Here v is the
speed of large products in FLOP/s, and c is `half_size` (config/calibration.py). The backward pass
of a product is two products with the same number of operations: [m, n][n, k] and [k, m][m, n].

The CPU starts the kernels of a pass one after the other and runs ahead of the device. If they are
short, the device waits for it. The two times vary from layer to layer, so passes for which both are
about equal take a little longer than either: (device^5 + host^5)^(1/5) seconds. On a cluster
without devices one core does both, so the times add up.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from frontier_llm.config.cluster import DeviceConfig
from frontier_llm.config.engine import EngineConfig, HostTimes
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.model_chunks import ModelChunk, looked_up_elements
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.geometry.state_memory import COMPUTE_BYTES
from frontier_llm.planner.block import Block, Product, chunk_blocks, head_product

BACKWARD_FLOPS, BACKWARD_SPEED = 2.5, 0.8
"""Operations and speed of fused attention's backward pass, relative to its forward pass (Dao,
arXiv:2307.08691, sections 3.1.2 and 4.1)."""
SCORE_PASSES, SCORE_PASSES_BACKWARD = 4.5, 5.5
"""Number of times that the passes of unfused attention read or write its scores. Forward: the first
product writes them; the kernel that scales, masks and normalises reads and writes them; the second
product reads them; dropout's mask takes half a pass. Backward: the gradients are written, read and
written by the kernel, which also reads the probabilities, and are read by two products."""
ALIGNED_BYTES, MISALIGNED = 16, 10.0
"""Rows of this many bytes, or multiples, are read at full speed. With others, the batched products
of unfused attention take so many times as long."""
COMPILED_FACTOR, EAGER_FACTOR = 0.797, 1.795
"""Bytes of the element-wise kernels of this program: of all kernels if functions are compiled,
relative to `moved_elements`, and in addition if they are not, relative to `function_elements`. They
give the bytes counted in the generated code of a LLaMA-7B layer (docs/gpu.md, kernels of a layer):
1.93 GB and 4.11 GB."""
SPLITS = (1, 2, 4, 8)
"""Numbers of parts into which the inner dimension may be divided."""
PROLOGUE = 64
"""Steps along the inner dimension that a tile takes to load its first operands and to store its
result, while the matrix units wait."""
WHOLE_WAVES = 0.6
"""Weight of whole waves against fractions of waves. The tiles of one wave do not all end at the
same time, so the next wave starts before the last tile of a wave ends."""
SHARPNESS = 5
"""Exponent that joins the times of the device and of the CPU. With a larger one, the longer of the
two would count alone."""
OURS = EngineConfig().name
"""Name of the engine that describes this program."""
NO_HOST = HostTimes(layer_us=0, tensor_us=0, tensor_rank_us=0, micro_batch_us=0, step_us=0)
"""Times on a cluster without devices, where the CPU computes itself."""


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


class Speed:
    """The speed of a device in one compute format.

    Raises:
        ConfigError: the calibration has no speed for this format.
    """

    def __init__(self, device: DeviceConfig, precision: str, product_ratio: float = 1.0) -> None:
        calibration = device.calibration
        curve = calibration.products.get(precision)  # type: ignore[call-overload]
        if not calibration.products:
            raise ConfigError(
                "cluster",
                f"{device.name}, whose speed its cluster file does not give",
                "a cluster whose speed is known",
                "measure it (frontier-llm calibrate --write NAME, then cluster=NAME), or set "
                "cluster=NAME of a similar GPU",
            )
        if curve is None:
            raise ConfigError(
                "precision",
                precision,
                f"a format whose speed {device.name} has in its cluster file: "
                + ", ".join(calibration.products),
                "set precision, or measure it: frontier-llm calibrate --write NAME",
            )
        self._processors = device.processors
        self._flops_per_second: float = curve.tflops * product_ratio * 1e12
        self._half_size: float = curve.half_size
        flash = curve.tflops * calibration.attention_share
        self._attention_tflops = flash, flash * BACKWARD_SPEED
        self._elementwise_bytes_per_second: float | None = None
        self.weight_gradient_ratio: float | None = None
        measured = calibration.kernels.get(precision)  # type: ignore[call-overload]
        if measured is not None:
            self._attention_tflops = measured.attention_tflops, measured.attention_backward_tflops
            self._elementwise_bytes_per_second = measured.elementwise_gb_per_second * 1e9
            self.weight_gradient_ratio = measured.weight_gradient_ratio
        self._element_bytes = COMPUTE_BYTES[precision]
        self._bytes_per_second: float = device.memory_gb_per_second * 1e9 * calibration.memory_share
        quantise_gb = measured.quantise_gb_per_second if measured else None
        self._quantise_share = quantise_gb * 1e9 / self._bytes_per_second if quantise_gb else 1.0
        self.kernel_seconds: float = calibration.kernel_us * 1e-6
        self.has_host = device.kind != "cpu"
        self.hidden_share = calibration.hidden_share

    def product(self, product: Product, count: int = 1) -> float:
        """Return the seconds of a kernel that computes `count` products of equal shapes."""
        m, k, n = product
        if self._processors is None:
            weighted_size = m * n * k + self._half_size * (m * n + n * k + k * m)
            return max(2 * count * weighted_size / self._flops_per_second, self.kernel_seconds)
        flops = tile_flops(m, k, n, count, self._processors) * self._processors
        moved_bytes = count * self._element_bytes * (m * k + k * n + m * n)
        return self.kernel_seconds + max(
            flops / self._flops_per_second, moved_bytes / self._bytes_per_second
        )

    def attention(self, flops: float) -> tuple[float, float]:
        """Return the forward and backward seconds of fused attention, given its forward FLOPs."""
        forward, backward = self._attention_tflops
        return flops / (forward * 1e12), BACKWARD_FLOPS * flops / (backward * 1e12)

    def elementwise(self, fused_bytes: float, factor: float, kernels: int) -> float:
        """Return the seconds of the element-wise kernels of a layer.

        `fused_bytes` are those that fully fused kernels read and write. `factor` are the bytes of
        the engine's kernels, relative to these; measured speeds contain it.
        """
        if self._elementwise_bytes_per_second is None:
            return self.moved(fused_bytes * factor, kernels)
        return fused_bytes / self._elementwise_bytes_per_second + kernels * self.kernel_seconds

    def moved(self, moved_bytes: float, kernels: int = 1) -> float:
        """Return the seconds of element-wise kernels that read and write `moved_bytes` in total."""
        return moved_bytes / self._bytes_per_second + kernels * self.kernel_seconds

    def quantised(self, moved_bytes: float, kernels: int) -> float:
        """Return the seconds of kernels that quantise or dequantise messages."""
        return self.moved(moved_bytes / self._quantise_share, kernels)


def chunk_seconds(
    layout: ResolvedLayout, chunk: ModelChunk, speed: Speed, engine: EngineConfig, kernels: str
) -> Seconds:
    """Return the seconds of one micro-batch in one model chunk, without communication."""
    forward = inputs = weights = recomputed = 0.0
    compute_bytes = layout.compute_bytes
    for block, count in chunk_blocks(layout, chunk):
        products = [speed.product(product) for product in block.products]
        attention, attention_backward = _attention(layout, block, speed, engine)
        fused_bytes = block.moved_elements * compute_bytes
        elementwise = speed.elementwise(
            fused_bytes, elementwise_factor(block, engine, kernels), block.kernels
        )
        block_forward = sum(products) + attention + elementwise
        forward += count * block_forward
        products_inputs = sum(_input_gradient(product, speed) for product in block.products)
        inputs += count * (products_inputs + attention_backward + 2 * elementwise)
        weights += count * sum(_weight_gradient(product, speed) for product in block.products)
        left_out = products[-1] if engine.recompute_stops_early else 0.0
        repeated = {"none": 0.0, "selective": attention, "full": block_forward - left_out}
        recomputed += count * repeated[layout.recompute]
    if embedded := looked_up_elements(layout.model, chunk, layout.lengths):
        look_up = speed.moved(2.0 * layout.micro_batch * embedded * compute_bytes)
        forward += look_up
        inputs += look_up
    if chunk.has_head:
        head = head_product(layout)
        # two thirds of the memory traffic of the loss belong to the forward pass
        loss_third = speed.moved(float(head.rows) * head.columns * engine.loss_bytes, 10) / 3
        forward += speed.product(head) + 2 * loss_third
        # the weight gradient of the head is never computed later (sharding/gradients.py)
        inputs += _input_gradient(head, speed) + _weight_gradient(head, speed) + loss_third
    return Seconds(forward, inputs, weights, recomputed)


def elementwise_factor(block: Block, engine: EngineConfig, kernels: str) -> float:
    """Return the bytes that element-wise kernels of a layer move, relative to `moved_elements`.

    `auto` and `fastest` measure in a run which kernels they use. For them, and for programs that
    `kernels` does not describe, the fitted factor of the engine counts.
    """
    if not engine.follows_kernels or kernels in ("auto", "fastest"):
        return engine.elementwise_factor
    if kernels in ("elementwise", "compiled"):
        return COMPILED_FACTOR
    return COMPILED_FACTOR + EAGER_FACTOR * block.function_elements / block.moved_elements


def _input_gradient(product: Product, speed: Speed) -> float:
    m, k, n = product
    return speed.product(Product(m, n, k))


def _weight_gradient(product: Product, speed: Speed) -> float:
    """A measured ratio contains the addition to the sums."""
    if speed.weight_gradient_ratio is not None:
        return speed.product(product) * speed.weight_gradient_ratio
    m, k, n = product
    return speed.product(Product(k, m, n))


def _attention(
    layout: ResolvedLayout, block: Block, speed: Speed, engine: EngineConfig
) -> tuple[float, float]:
    """Return the forward and the backward seconds of attention without its projections."""
    if engine.fused_attention:
        return speed.attention(block.attention_flops)
    # Without fusion each head has two products, which include the masked half of the scores, and
    # the scores are written to memory and read again.
    forward = backward = 0.0
    for scores in block.scores:
        heads, queries, keys, width = scores
        slower = 1.0 if width * layout.compute_bytes % ALIGNED_BYTES == 0 else MISALIGNED
        products = slower * speed.product(Product(queries, width, keys), heads)
        products += slower * speed.product(Product(queries, keys, width), heads)
        score_bytes = scores.elements * layout.compute_bytes
        forward += products + speed.moved(SCORE_PASSES * score_bytes, 3)
        backward += 2 * products + speed.moved(SCORE_PASSES_BACKWARD * score_bytes, 3)
    return forward, backward


class Tile(NamedTuple):
    """A tile of the result that one multiprocessor computes at a time."""

    rows: int
    columns: int
    speed: float
    """Speed relative to the largest tile, which reuses its operands most."""


TILES = (Tile(256, 128, 1.0), Tile(128, 256, 1.0), Tile(128, 128, 0.92), Tile(64, 64, 0.6))
"""Tiles of cuBLAS's kernels for tensor cores."""


@lru_cache(maxsize=65536)
def tile_flops(rows: int, inner: int, columns: int, count: int, processors: int) -> float:
    """Return the operations that each processor has time for during `count` equal products.

    They are those at full speed, waiting included. The products of [rows, inner] and [inner,
    columns] are independent, in one kernel on `processors` multiprocessors or compute units.
    """
    least = math.inf
    for tile in TILES:
        tiles = count * -(-rows // tile.rows) * -(-columns // tile.columns)
        tile_cost = 2 * tile.rows * tile.columns / tile.speed
        for split in SPLITS:
            filled = tiles * split / processors
            waves = WHOLE_WAVES * math.ceil(filled) + (1 - WHOLE_WAVES) * max(filled, 1.0)
            least = min(least, waves * tile_cost * (inner / split + PROLOGUE))
    return least


def host_times(device: DeviceConfig, engine: EngineConfig, precision: str) -> HostTimes:
    """Return the times of the CPU: those of the engine, or those that were measured on the machine.

    Measured times are those of this program, so they do not hold for another engine.
    """
    measured = device.calibration.host.get(precision)  # type: ignore[call-overload]
    if measured is not None and engine.name == OURS:
        times: HostTimes = measured
        return times
    return NO_HOST if device.kind == "cpu" else engine.host


class Host:
    """Seconds of a rank's CPU."""

    def __init__(self, times: HostTimes, tensor: int) -> None:
        collectives_us = times.tensor_us + times.tensor_rank_us * (tensor - 1) if tensor > 1 else 0
        self.tensor_wait_seconds = 1e-6 * times.tensor_wait_us * (tensor - 1)
        self.layer_seconds = 1e-6 * (times.layer_us + collectives_us)
        self.backward_seconds = self.layer_seconds * times.backward_share
        self.micro_batch_seconds = 1e-6 * times.micro_batch_us
        self.step_seconds = 1e-6 * times.step_us


def with_host(device_seconds: float, host_seconds: float) -> float:
    """Return the seconds of a pass that takes some time on the device and some on the CPU."""
    longer = max(device_seconds, host_seconds)
    if longer == 0:
        return 0.0
    shorter = min(device_seconds, host_seconds) / longer
    seconds: float = longer * (1 + shorter**SHARPNESS) ** (1 / SHARPNESS)
    return seconds
