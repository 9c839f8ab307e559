"""megatron's schedules as one call: micro-batches through this rank's pieces of the model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from frontier_llm.config.run import RunConfig
from frontier_llm.data.batch import Batch
from frontier_llm.model.build import Model
from frontier_llm.model.gpt import Gpt

Output = tuple[torch.Tensor, Callable[..., Any]]


class Pipeline:
    """No pipeline, 1F1B or interleaved 1F1B: megatron chooses by the grid."""

    def __init__(self, model: Model, config: RunConfig) -> None:
        self._model = model
        self._sequence_length = config.data.sequence_length
        self._run = get_forward_backward_func()

    def losses(self, batches: Sequence[Batch], *, train: bool) -> list[torch.Tensor]:
        """Run all micro-batches, with backward passes when training.

        Collective over the tensor and pipeline groups.

        Args:
            batches: one a micro-batch, on the device.
            train: whether to make gradients.

        Returns:
            On the last stage the mean loss of each micro-batch, [] fp32; elsewhere nothing.
        """
        return self._call(_loss_step, batches, self._sequence_length, forward_only=not train)

    def logits(self, batch: Batch, position: int) -> torch.Tensor | None:
        """Return [b, v] fp32 at one position on the last stage (this tensor rank's part of v).

        The batch may be of any size and length (a multiple of the tensor ranks where they cut
        the sequence).
        """

        def step(batches: Any, chunk: Gpt) -> Output:
            tokens = next(batches)
            out = chunk(tokens.tokens, tokens.positions, attention_mask=None)
            return out, lambda logits, **_: logits[:, position].float().clone()

        config = self._model.transformer
        repeat = config.pipeline_model_parallel_size if len(self._model.chunks) > 1 else 1
        found = self._call(
            step, [batch] * repeat, batch.tokens.shape[1], forward_only=True, collect=True
        )
        return found[0] if found else None

    def _call(
        self,
        step: Callable[[Any, Gpt], Output],
        batches: Sequence[Batch],
        sequence_length: int,
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
            seq_length=sequence_length,
            micro_batch_size=batches[0].tokens.shape[0],
            forward_only=forward_only,
            collect_non_loss_data=collect,
        )
        return found


def _loss_step(batches: Any, chunk: Gpt) -> Output:
    batch = next(batches)
    out = chunk(batch.tokens, batch.positions, attention_mask=None, labels=batch.labels)
    return out, _mean_loss


def _mean_loss(loss_bs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Average over tokens; the second value is for us (the schedule divides the first in place)."""
    loss = loss_bs.float().mean()
    return loss, loss.detach().clone()
