"""Runs micro-batches through this rank's model chunks, by megatron's pipeline schedules."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from frontier_llm.data.batch import AnyBatch
from frontier_llm.model.build import Model
from frontier_llm.model.chunk import Chunk

Output = tuple[torch.Tensor, Callable[..., Any]]


class Pipeline:
    """Without a pipeline, with 1F1B or with interleaved 1F1B; megatron chooses by the grid."""

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
        """Return the logits at one position on the last stage; None elsewhere.

        Collective over the tensor and pipeline groups.

        Args:
            batch: of any size and length, on the device. With sequence parallelism, the length is
                divisible by the number of tensor ranks.
            position: in the sequence.

        Returns:
            [samples, vocabulary / tensor ranks] fp32: this tensor rank's part of the vocabulary.
        """

        def step(batches: Any, chunk: Chunk) -> Output:
            out = chunk(**next(batches).inputs())
            return out, lambda logits, **_: logits[:, position].float().clone()

        config = self._model.transformer
        repeat = config.pipeline_model_parallel_size if len(self._model.chunks) > 1 else 1
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
    batch = next(batches)
    return chunk(**batch.inputs(), labels=batch.labels), partial(_mean_loss, batch)


def _mean_loss(batch: AnyBatch, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean over tokens twice: the schedule divides the first tensor in place."""
    loss = batch.mean_loss(losses)
    return loss, loss.detach().clone()
