"""Runs micro-batches through this rank's model chunks, in the order of a pipeline schedule.

A schedule is a list of actions for each stage (geometry/pipeline_schedule.py): forward passes,
backward passes, and backward passes in two parts. The first part computes the gradients of the
inputs, which the previous stage waits for; the second computes the gradients of the weights later,
where the stage would otherwise wait (Qi et al., Zero Bubble Pipeline Parallelism,
arXiv:2401.10241).
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import xxhash
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from frontier_llm.data.batch import Batch, LossMean
from frontier_llm.geometry.model_chunks import received_elements
from frontier_llm.geometry.pipeline_schedule import forward_actions
from frontier_llm.geometry.stage_messages import Launch, Message, Program, programs, received_early
from frontier_llm.model.build import Model, unit_readers
from frontier_llm.model.loss import TokenLosses
from frontier_llm.parallel.groups import Groups
from frontier_llm.parallel.stage_exchange import StageExchange
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.step_measurements import PassTimes


class DropoutSeeds:
    """Seeds dropout before each layer, so that masks do not depend on the order of passes.

    The seed depends on the seed of the run, the step, the replica, the micro-batch and the layer. A
    resumed run, another pipeline schedule, another number of stages, and a recomputed layer thus
    draw the same masks. The tensor ranks of one stage and replica draw the same masks for
    activations that they all hold, and different masks for activations that are divided.

    The caller sets `step` and `micro_batch`, the number of the current micro-batch in the step.
    """

    def __init__(self, model: Model, groups: Groups, seed: int) -> None:
        self._groups, self._seed = groups, seed
        self._own_masks = model.layout.sequence_parallel and groups.grid.tensor > 1
        self.step = self.micro_batch = 0
        config = model.layout.model
        if not (config.dropout or config.attention_dropout):
            return
        for chunk in model.chunks:
            for reader in unit_readers(chunk, config.tied):
                hook = partial(self._before, reader.units[0])
                reader.module.register_forward_pre_hook(hook)

    def _before(self, unit: str, module: nn.Module, _: Any) -> None:
        if not module.training:
            return
        numbers = (self._seed, self.step, self._groups.coordinates.data, self.micro_batch)
        packed = struct.pack("<4q", *numbers) + unit.encode()
        self._groups.seed_dropout(xxhash.xxh64_intdigest(packed) >> 2, own_masks=self._own_masks)


Result = Callable[[Batch, Any], torch.Tensor]
"""Computes losses of tokens or logits from a micro-batch and the output of the last model chunk."""


class Pipeline:
    """Runs the passes of this rank's stage.

    The methods are collective over the tensor and pipeline groups. Micro-batches lie on the device
    and have equal shapes. `times` measures the actions of a training step. With a coefficient
    `z_loss`, training adds z_loss * log(Z)^2 to the loss of a token (model/loss.py). `loss_mean` is
    what has equal weight in the loss of training (data/batch.py).
    """

    def __init__(
        self, model: Model, groups: Groups, z_loss: float = 0.0, loss_mean: LossMean = "samples"
    ) -> None:
        self._model, self._groups = model, groups
        self.device = next(model.chunks[0].parameters()).device
        self._mean: Callable[[Batch, TokenLosses], torch.Tensor] = lambda batch, losses: (
            losses.means(partial(batch.mean_loss, by=loss_mean), z_loss)
        )
        self._stage, self.times = groups.coordinates.pipeline, PassTimes(groups.grid.pipeline)
        self._programs: dict[tuple[int, bool], Program] = {}

    def train(
        self,
        batches: Sequence[Batch],
        states: ShardedStates,
        dropout: DropoutSeeds,
        loss_scale: float,
    ) -> list[torch.Tensor]:
        """Run the forward and backward passes of a step.

        `loss_scale` is the factor of the gradients of the mean loss over all micro-batches. Returns
        for each micro-batch its mean cross entropy, [1] fp32, or with z-loss both means, [2], on
        the stage with the head; an empty list elsewhere.
        """
        passes = _Passes(self._model, self._groups, batches, self.times, self._mean)
        gradient = loss_scale / len(batches)
        for item in self._program(len(batches), trains=True):
            if isinstance(item, Launch):
                passes.launch(item)
                continue
            self.times.start()
            kind, virtual_stage, micro_batch = item
            dropout.micro_batch = micro_batch  # recomputed layers draw their masks again
            if kind == "forward":
                passes.forward(virtual_stage, micro_batch)
            elif kind == "backward":
                passes.backward(virtual_stage, micro_batch, gradient)
            elif kind == "input_gradients":
                with states.passes.deferred.collecting((virtual_stage, micro_batch)):
                    passes.backward(virtual_stage, micro_batch, gradient)
            else:
                states.passes.run_deferred((virtual_stage, micro_batch))
            self.times.end()
        return passes.finish()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run without dropout and gradients; afterwards the modules train again."""
        for chunk in self._model.chunks:
            chunk.eval()
        with torch.no_grad():
            yield
        for chunk in self._model.chunks:
            chunk.train()

    def sums(self, batches: Sequence[Batch], end: int) -> list[torch.Tensor]:
        """Run forward passes; return the `loss_sums` of each micro-batch as `train` its means."""
        return self._forward(batches, lambda batch, losses: batch.loss_sums(losses[0], end))

    def logits(self, batch: Batch, position: int) -> torch.Tensor | None:
        """Return the logits at one position of the sequence; None on stages without the head.

        They are those of this tensor rank's part of the vocabulary, [samples, vocabulary / tensor
        ranks] fp32. The batch has any size and length; with sequence parallelism, the length is
        divisible by the number of tensor ranks.
        """

        def at_position(_: Batch, logits: Any) -> torch.Tensor:
            return cast(torch.Tensor, logits[:, position].float().clone())

        # compiled layers would be compiled again for every new length
        eager = (
            torch.compiler.set_stance("force_eager") if self._model.is_compiled else nullcontext()
        )
        with eager:
            found = self._forward([batch], at_position, with_labels=False)
        return found[0] if found else None

    def _forward(
        self, batches: Sequence[Batch], result: Result, *, with_labels: bool = True
    ) -> list[torch.Tensor]:
        passes = _Passes(self._model, self._groups, batches, self.times, result, with_labels)
        for item in self._program(len(batches), trains=False):
            if isinstance(item, Launch):
                passes.launch(item)
            else:
                passes.forward(item.virtual_stage, item.micro_batch)
        return passes.finish()

    def _program(self, micro_batches: int, *, trains: bool) -> Program:
        """Return what this stage does in a training step, or in forward passes alone."""
        key = micro_batches, trains
        if key not in self._programs:
            layout = replace(self._model.layout, micro_batches=micro_batches)
            placement = layout.placement
            lists = (
                layout.schedule.actions
                if trains
                else [
                    forward_actions(placement, stage, micro_batches)
                    for stage in range(placement.stages)
                ]
            )
            program = programs(placement, lists)[self._stage]
            if self.device.type == "cpu" and layout.collectives.pairwise:  # else as on a GPU
                program = received_early(program)
            self._programs[key] = program
        return self._programs[key]


class _Passes:
    """The passes of this rank's stage in one run of a schedule.

    `result` gets the losses of tokens, or without labels the logits. `times` is told when the input
    of a pass has arrived.
    """

    def __init__(
        self,
        model: Model,
        groups: Groups,
        batches: Sequence[Batch],
        times: PassTimes,
        result: Result,
        with_labels: bool = True,
    ) -> None:
        layout = model.layout
        self._chunks, self._batches = model.chunks, batches
        self._result, self._with_labels, self._times = result, with_labels, times
        self._placement, self._stage = layout.placement, groups.coordinates.pipeline
        self._inputs: dict[tuple[int, int], torch.Tensor | None] = {}
        self._outputs: dict[tuple[int, int], GradientEdge] = {}
        # results that are not yet sent, or not yet read by another chunk of this stage
        self._to_read: dict[Message, torch.Tensor] = {}
        self._results: dict[int, torch.Tensor] = {}
        self._layout = layout
        device = next(model.chunks[0].parameters()).device
        dtype = model.transformer.params_dtype
        self._exchange = StageExchange(groups, self._elements, dtype, device)

    def launch(self, one: Launch) -> None:
        self._exchange.launch(one, self._to_read.pop(one.message) if one.is_send else None)

    def forward(self, virtual_stage: int, micro_batch: int) -> None:
        module, batch = self._chunks[virtual_stage], self._batches[micro_batch]
        chunk = self._placement.chunk(self._stage, virtual_stage)
        received = None
        if chunk > 0:
            received = self._receive(Message(True, chunk, micro_batch))
            received.requires_grad_(torch.is_grad_enabled())
        module.set_input_tensor(received)
        labels = {"labels": batch.labels} if self._with_labels else {}
        output = module(**batch.inputs(), **labels)
        is_last = chunk == self._placement.chunks - 1
        if is_last:
            output = self._result(batch, output)
            self._results[micro_batch] = output.detach()
        if torch.is_grad_enabled():
            self._inputs[virtual_stage, micro_batch] = received
            # the backward pass needs only the edge, so the output is freed when it is sent
            self._outputs[virtual_stage, micro_batch] = get_gradient_edge(output)
        if not is_last:
            self._to_read[Message(True, chunk + 1, micro_batch)] = output.detach()

    def backward(self, virtual_stage: int, micro_batch: int, loss_gradient: float) -> None:
        chunk = self._placement.chunk(self._stage, virtual_stage)
        if chunk == self._placement.chunks - 1:
            gradient = torch.full_like(self._results[micro_batch], loss_gradient)
        else:
            gradient = self._receive(Message(False, chunk, micro_batch))
        torch.autograd.backward(self._outputs.pop((virtual_stage, micro_batch)), gradient)
        received = self._inputs.pop((virtual_stage, micro_batch))
        if received is not None:
            assert received.grad is not None
            self._to_read[Message(False, chunk - 1, micro_batch)] = received.grad

    def finish(self) -> list[torch.Tensor]:
        """Wait for all sends; return the results by micro-batch on the stage with the head."""
        self._exchange.finish()
        return [self._results[micro_batch] for micro_batch in sorted(self._results)]

    def _elements(self, message: Message) -> int:
        """Count the elements of a message, those of the border before or behind its chunk."""
        layout, batch = self._layout, self._batches[message.micro_batch]
        chunk = layout.model_chunks[message.chunk + (not message.forward)]
        parts = layout.grid.tensor if layout.sequence_parallel else 1
        return sum(received_elements(layout.model, chunk, batch.lengths)) * batch.samples // parts

    def _receive(self, message: Message) -> torch.Tensor:
        if message in self._to_read:
            return self._to_read.pop(message)
        received = self._exchange.receive(message)
        self._times.start()
        return received
