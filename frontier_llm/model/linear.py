"""Linear layers whose bias is added inside the product, on a CPU that holds the whole weight.

megatron hands the bias of most layers on, to be added by a kernel that fuses it with what comes
next. A CPU has no such kernels: there it would be a pass of its own over the output.
"""

import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor


class ColumnLinear(ColumnParallelLinear):
    """megatron's layer, whose output features are divided among tensor ranks."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Multiply.

        Args:
            input_: [..., in].
            weight: instead of the layer's own.
            runtime_gather_output: whether every rank gets all output features.

        Returns:
            ([..., out / tensor ranks], the bias that is still to be added).
        """
        if is_plain(self, input_):
            return F.linear(input_, self.weight if weight is None else weight, self.bias), None
        return super().forward(input_, weight, runtime_gather_output)


class RowLinear(RowParallelLinear):
    """megatron's layer, whose input features are divided among tensor ranks."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply.

        Args:
            input_: [..., in / tensor ranks].

        Returns:
            ([..., out], the bias that is still to be added).
        """
        if is_plain(self, input_):
            return F.linear(input_, self.weight, self.bias), None
        return super().forward(input_)


def is_plain(layer: ColumnParallelLinear | RowParallelLinear, input_: Tensor) -> bool:
    """Tell whether the layer is one product here: on a CPU, of a weight that is not divided."""
    return input_.is_cpu and layer.tp_group.size() == 1
