"""Print the kernels that a GPU starts per layer and micro-batch: `make layer-kernels`.

One row per value of the setting `kernels`, for a layer of LLaMA-7B with 4,096 tokens in bf16,
forward and backward. The numbers are found without a GPU (fake_cuda.py).
"""

from collections import Counter
from dataclasses import dataclass
from itertools import product

from rich.console import Console
from rich.table import Table

from tests.gpu_model import fake_cuda

GRADIENT_SUM = "aten.add_.Tensor"
"""The operation that adds a gradient to the sum over micro-batches."""


@dataclass(frozen=True)
class LayerKernels:
    """What one layer adds to a micro-batch."""

    kernels: Counter[str]
    """Kernels by name."""
    kernel_bytes: Counter[str]
    """Bytes that they read and write."""

    @property
    def other_bytes(self) -> int:
        """Bytes without those of matrix products, attention, and sums of gradients."""
        return sum(
            size
            for name, size in self.kernel_bytes.items()
            if name != GRADIENT_SUM and not is_product(name)
        )


def is_product(name: str) -> bool:
    """Return whether a kernel is a matrix product or attention."""
    return not {"mm", "addmm"}.isdisjoint(name.split(".")) or "_attention" in name


def count(kernels: str, *more: str) -> LayerKernels:
    """Count the kernels of a layer and micro-batch.

    They are the difference between three and two micro-batches, of the difference between two
    layers and one. So neither the embedding nor the optimizer is counted.

    Args:
        kernels: a value of the setting `kernels`.
        more: further settings.
    """
    number: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for layers, micro_batches in product((1, 2), (2, 3)):
        recorded = fake_cuda.record_step(
            ["model=llama_7b", f"model.layers={layers}", "data.sequence_length=4096",
             "data.micro_batch=1", f"data.global_batch={micro_batches}", "parallel.pipeline=1",
             *more],
            1, 0, kernels=kernels,
        )  # fmt: skip
        combine = Counter.update if (layers == 2) == (micro_batches == 3) else Counter.subtract
        combine(number, recorded.kernels)
        combine(size, recorded.kernel_bytes)
    return LayerKernels(+number, +size)


def main() -> None:
    """Print the table."""
    table = Table("kernels=", "kernels", "of these: products", "of these: sums of gradients",
                  "GB of sums of gradients", "GB of others")  # fmt: skip
    for setting in ("torch", "elementwise", "compiled"):
        found = count(setting)
        products = sum(number for name, number in found.kernels.items() if is_product(name))
        gradients = found.kernel_bytes[GRADIENT_SUM] / 1e9
        table.add_row(
            setting,
            str(found.kernels.total()),
            str(products),
            str(found.kernels[GRADIENT_SUM]),
            f"{gradients:.2f}",
            f"{found.other_bytes / 1e9:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
