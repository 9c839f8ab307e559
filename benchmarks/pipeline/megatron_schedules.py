"""Run megatron-core's own pipeline schedules on the model chunks of frontier_llm.

The training program runs its passes by itself (trainer/pipeline.py). For comparison, this module
calls 1F1B and interleaved 1F1B of megatron-core 0.16.1 with the same modules, states and messages
over gloo.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules

from frontier_llm.data.batch import Batch
from frontier_llm.model.build import Chunk, Model
from frontier_llm.model.loss import TokenLosses
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.pipeline import DropoutSeeds

LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Computes the mean loss of a micro-batch from the output of the last model chunk; returns it, and
a copy to report."""


class _TorchOnCpu:
    """The torch module for megatron's schedules, in which `device="cuda"` means the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, **options: Any) -> torch.Tensor:
        """Call `torch.zeros` on the CPU; the schedules count tokens in such a tensor."""
        return torch.zeros(*size, **{**options, "device": "cpu"})


class MegatronPipeline:
    """Replaces `trainer.pipeline.Pipeline` in training steps on CPU ranks.

    The schedule is interleaved if the stage has several model chunks, and else 1F1B. The chunks are
    in loop placement and have no dropout; megatron's options are set on the model's configuration.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._is_interleaved = is_interleaved = len(model.chunks) > 1
        stages, config = model.layout.grid.pipeline, model.transformer
        config.pipeline_model_parallel_size = stages
        config.pipeline_dtype = config.params_dtype
        if is_interleaved:
            config.virtual_pipeline_model_parallel_size = len(model.chunks)
            config.microbatch_group_size_per_vp_stage = stages
        # Two stages are each other's previous and next neighbour. With interleaving, a batched
        # exchange would confuse activations and gradients.
        config.overlap_p2p_comm = is_interleaved
        config.batch_p2p_comm = config.batch_p2p_sync = False
        # gloo may still be sending an output when the schedule wants to free it
        config.deallocate_pipeline_outputs = False
        for chunk in model.chunks:  # the schedules expect the interface of megatron's own models
            chunk.model_type = ModelType.encoder_or_decoder
            chunk.set_input_tensor = partial(_receive, chunk.set_input_tensor)  # type: ignore[method-assign]
        schedules.torch = _TorchOnCpu()

    def train(
        self,
        batches: Sequence[Batch],
        states: ShardedStates,
        dropout: DropoutSeeds,
        loss_scale: float,
    ) -> list[torch.Tensor]:
        """Run the forward and backward passes of a step, as `Pipeline.train`."""
        model = self._model
        chunks, iterators = model.chunks, [iter(batches) for _ in model.chunks]
        model.transformer.grad_scale_func = partial(torch.mul, other=loss_scale)
        if self._is_interleaved:
            run = schedules.forward_backward_pipelining_with_interleaving
        else:
            run = schedules.forward_backward_pipelining_without_interleaving
        losses: list[torch.Tensor] = run(
            forward_step_func=_forward,
            data_iterator=iterators,
            model=chunks,
            num_microbatches=len(batches),
            seq_length=batches[0].lengths.decoder,
            micro_batch_size=batches[0].samples,
        )
        return losses


def _receive(receive: Callable[[torch.Tensor | None], None], tensors: Any) -> None:
    """Give a chunk its input, which megatron may pass in a list."""
    tensor = tensors[0] if isinstance(tensors, list) else tensors
    receive(None if tensor is None else tensor.flatten())


def _forward(batches: Iterator[Batch], chunk: Chunk) -> tuple[torch.Tensor, LossFunction]:
    """Run the forward pass of the next micro-batch through a model chunk."""
    batch = next(batches)
    output = chunk(**batch.inputs(), labels=batch.labels)
    if isinstance(output, TokenLosses):
        return output.cross_entropy, partial(_mean_loss, batch)
    # megatron sends activations in their shape
    return output.view(batch.lengths.decoder, batch.samples, -1), partial(_mean_loss, batch)


def _mean_loss(batch: Batch, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = batch.mean_loss(losses)
    return loss, loss.detach().view(1).clone()  # the schedule divides the first tensor in place
