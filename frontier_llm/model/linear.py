"""Define the linear layers of the model, on the basis of megatron's.

They differ from megatron's layers in the backward pass: they pass the gradient of the weight to the
weight's `ProductSink` (protocols.py) as the two operands of a matrix product, and autograd makes no
tensor for it. The sink computes the product in a buffer, with one kernel if the device has it
(device/accumulate.py). megatron does the same with a kernel of apex
(`gradient_accumulation_fusion`).

megatron's own backward pass remains if a weight has no sink, if another module reads the weight too
(an embedding that is also the head), and in compiled layers, because torch.compile cannot call a
sink.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from frontier_llm.protocols import ProductSink, product_sink


class ColumnLinear(ColumnParallelLinear):
    """megatron's linear layer whose output features are split over tensor-parallel ranks.

    Without tensor parallelism on a CPU, the call that multiplies the matrices also adds the bias.
    megatron instead returns the bias, so that a fused kernel of the next operation adds it. A CPU
    has no such kernels, and adding the bias separately would be another pass over the output.
    """

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return [..., out / tensor-parallel ranks], and the bias if the caller must add it."""
        if fuses_bias(self, input_):
            used = self.weight if weight is None else weight
            return _local_product(self, input_, used), None
        return super().forward(input_, weight, runtime_gather_output)

    def _forward_impl(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return _product(self, super()._forward_impl, input, weight, options)


class ScaledHead(ColumnLinear):
    """An output layer that multiplies its inputs by `input_factor`.

    With muP the logits are thus those of the layer times base width / width (Tensor Programs V,
    arXiv:2203.03466, table 8). The inputs are scaled because they are smaller than the logits.
    """

    input_factor: float

    def forward(self, input_: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Scale the input and multiply it by the weight, as `ColumnLinear.forward` does."""
        return super().forward(input_ * self.input_factor, *others, **options)


class RowLinear(RowParallelLinear):
    """megatron's linear layer whose input features are split over tensor-parallel ranks.

    The bias is added as in `ColumnLinear`.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return [..., out], and the bias if the caller must add it."""
        if fuses_bias(self, input_):
            return _local_product(self, input_, self.weight), None
        return super().forward(input_)

    def _forward_impl(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        # megatron passes no group here, and then rank 0 warns, which would split a compiled layer
        options["tp_group"] = self.tp_group
        return _product(self, super()._forward_impl, input, weight, options)


def fuses_bias(layer: ColumnParallelLinear | RowParallelLinear, input_: Tensor) -> bool:
    """Return whether the layer itself adds its bias: on a CPU, without tensor parallelism."""
    return input_.is_cpu and layer.tp_group.size() == 1


def _local_product(
    layer: ColumnParallelLinear | RowParallelLinear, inputs: Tensor, weight: Tensor
) -> Tensor:
    """Multiply by a weight that is not split, and add the bias."""
    sink = _sink(layer, weight)
    if sink is None:
        return F.linear(inputs, weight, layer.bias)
    output: Tensor = _Linear.apply(inputs, weight, layer.bias, sink, None, False, False)
    return output


def _product(
    layer: ColumnParallelLinear | RowParallelLinear,
    megatron_forward: Any,
    inputs: Tensor,
    weight: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Multiply [..., in] by this rank's part of a weight, as megatron does if it has no sink."""
    sink = _sink(layer, weight)
    output: Tensor
    if sink is None:
        output = megatron_forward(inputs, weight, **options)
    else:
        bias, group = options["bias"], options["tp_group"]
        gathers_tokens, sums_inputs = options["sequence_parallel"], options["allreduce_dgrad"]
        output = _Linear.apply(inputs, weight, bias, sink, group, gathers_tokens, sums_inputs)
    return output


def _sink(layer: ColumnParallelLinear | RowParallelLinear, weight: Tensor) -> ProductSink | None:
    """Return the sink of the weight's gradient, or None if autograd computes the gradient."""
    if torch.compiler.is_compiling() or weight is not layer.weight or not weight.requires_grad:
        return None
    return product_sink(weight)


class _Linear(torch.autograd.Function):
    """Multiplies inputs by a weight, and passes the gradient of the weight to a sink.

    The collectives over tensor-parallel ranks are those of megatron's layer. In the backward pass
    they are started before a product that does not need their result, and overlap with it. (On a
    GPU the order of kernels in one queue ensures this: `CUDA_DEVICE_MAX_CONNECTIONS=1`.)
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sink: ProductSink,
        group: dist.ProcessGroup | None,
        gathers_tokens: bool,
        sums_inputs: bool,
    ) -> Tensor:
        """Compute the outputs, [..., out].

        With `gathers_tokens` (sequence parallelism) every rank has a part of the tokens, and the
        outputs are those of all tokens, [s, ..., out]. With `sums_inputs` the gradients of the
        inputs are summed over the ranks.
        """
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias, ctx.sink, ctx.group = bias is not None, sink, group
        ctx.gathers_tokens, ctx.sums_inputs = gathers_tokens, sums_inputs
        if gathers_tokens and group is not None:
            inputs, gather = _gather(inputs, group)
            gather.wait()
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of inputs and bias; pass the operands of the weight's to the sink.

        The gradient of the inputs does not depend on the call of the sink, so a sink may also keep
        the operands and compute the product later. It then gathers the tokens later, too.
        """
        inputs, weight = ctx.saved_tensors
        (grad,) = grads
        gather = reduction = None
        gathers_later = ctx.gathers_tokens and ctx.sink.is_deferring
        if ctx.gathers_tokens and not gathers_later:
            inputs, gather = _gather(inputs, ctx.group)
        grad_inputs = grad.matmul(weight)
        if gather is not None:
            gather.wait()
        if ctx.gathers_tokens:
            grad_inputs, reduction = _reduce_scatter(grad_inputs, ctx.group)
        elif ctx.sums_inputs:
            reduction = dist.all_reduce(grad_inputs, group=ctx.group, async_op=True)
        grad_rows, input_rows = grad.flatten(0, -2), inputs.flatten(0, -2)
        gather_later = partial(_gather, group=ctx.group) if gathers_later else None
        ctx.sink(grad_rows, input_rows, gather_later)
        grad_bias = grad_rows.sum(0) if ctx.has_bias else None
        if reduction is not None:
            reduction.wait()
        return grad_inputs, None, grad_bias, None, None, None, None


def _gather(part: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """Start to gather [s / ranks, ...] of all ranks; return [s, ...] and the handle to wait for."""
    whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, part.contiguous(), group=group, async_op=True)


def _reduce_scatter(whole: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """Start to sum over ranks; return this rank's tokens of the sum and the handle to wait for."""
    part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    return part, dist.reduce_scatter_tensor(part, whole, group=group, async_op=True)
