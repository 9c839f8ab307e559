"""Runs micro-batches through this rank's model chunks with megatron's pipeline schedules."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from frontier_llm.data.batch import AnyBatch
from frontier_llm.model.build import Model
from frontier_llm.model.chunk import Chunk

Output = tuple[torch.Tensor, Callable[..., Any]]
"""Result of one forward pass for megatron's schedules: the output of the chunk, and a function that
the last stage calls with this output to get the loss or the logits."""


class Pipeline:
    """Calls the schedule of megatron that fits the layout.

    With one pipeline stage there is no pipeline schedule. With several stages the schedule is 1F1B
    (one forward, one backward), and interleaved 1F1B if each stage has several model chunks.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._run = get_forward_backward_func()

    def losses(self, batches: Sequence[AnyBatch], *, train: bool) -> list[torch.Tensor]:
        """Run all micro-batches, with backward passes when training.

        Collective over the tensor and pipeline groups.

        Args:
            batches: the micro-batches, on the device.
            train: whether to run backward passes.

        Returns:
            The mean loss of each micro-batch, [] fp32, on the last stage; an empty list elsewhere.
        """
        return self._call(_loss_step, batches, forward_only=not train)

    def logits(self, batch: AnyBatch, position: int) -> torch.Tensor | None:
        """Return the logits at one position of the sequence on the last stage; None elsewhere.

        Collective over the tensor and pipeline groups.

        Args:
            batch: a batch of any size and length, on the device. With sequence parallelism, the
                length is divisible by the number of tensor ranks.
            position: index of the token in the sequence.

        Returns:
            [samples, vocabulary / tensor ranks] fp32: the logits of this tensor rank's part of the
            vocabulary.
        """

        def step(batches: Any, chunk: Chunk) -> Output:
            out = chunk(**next(batches).inputs())
            return out, lambda logits, **_: logits[:, position].float().clone()

        # the interleaved schedule needs as many micro-batches as there are pipeline stages
        config = self._model.transformer
        repeat = config.pipeline_model_parallel_size if len(self._model.chunks) > 1 else 1
        # compiled layers would be compiled again for every new length
        eager = (
            torch.compiler.set_stance("force_eager") if self._model.is_compiled else nullcontext()
        )
        with eager:
            found = self._call(step, [batch] * repeat, forward_only=True, collect=True)
        return found[0] if found else None

    def _call(
        self,
        step: Callable[[Any, Chunk], Output],
        batches: Sequence[AnyBatch],
        *,
        forward_only: bool,
        collect: bool = False,
    ) -> list[torch.Tensor]:
        """Run the schedule and return the results of the last stage; an empty list elsewhere.

        Args:
            step: runs the forward pass of one model chunk; gets an iterator over the micro-batches.
            batches: the micro-batches.
            forward_only: whether to skip the backward passes.
            collect: whether the results are other values than losses.
        """
        chunks = self._model.chunks
        iterators = [iter(batches) for _ in chunks]
        found: list[torch.Tensor] = self._run(
            forward_step_func=step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=batches[0].length,
            micro_batch_size=batches[0].samples,
            forward_only=forward_only,
            collect_non_loss_data=collect,
        )
        return found


def _loss_step(batches: Any, chunk: Chunk) -> Output:
    """Run the forward pass of the next micro-batch through a model chunk."""
    batch = next(batches)
    return chunk(**batch.inputs(), labels=batch.labels), partial(_mean_loss, batch)


def _mean_loss(batch: AnyBatch, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss over tokens, and a copy of it to report.

    The schedule divides the first tensor in place, by the number of micro-batches.
    """
    loss = batch.mean_loss(losses)
    return loss, loss.detach().clone()
