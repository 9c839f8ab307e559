"""Computes the validation loss: the loss on text with which the model is not trained."""

import torch
import torch.distributed as dist

from frontier_llm.config.run import RunConfig
from frontier_llm.data.loader import BatchLoader
from frontier_llm.model.build import Model
from frontier_llm.parallel.groups import Groups
from frontier_llm.trainer.pipeline import Pipeline


class Evaluation:
    """Averages the loss over the first validation samples, which are the same each time."""

    def __init__(
        self, model: Model, groups: Groups, config: RunConfig, loader: BatchLoader
    ) -> None:
        self._model, self._groups, self._loader = model, groups, loader
        self._pipeline = Pipeline(model, groups)
        self._batches = config.trainer.evaluate_batches
        self._global_batch = config.data.global_batch
        self._device = next(model.chunks[0].parameters()).device

    def run(self) -> float:
        """Return the mean validation loss in nats per token, the same on all ranks.

        Collective over all ranks.
        """
        for chunk in self._model.chunks:
            chunk.eval()
        # (sum of the mean losses of the batches, number of batches)
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        counts = self._groups.counts_samples
        with torch.no_grad():
            for index in range(self._batches):
                first = index * self._global_batch
                batches = self._loader.micro_batches(first)
                losses = self._pipeline.losses(batches)
                if counts:
                    total += torch.stack([torch.stack(losses).double().mean(), total.new_ones(())])
        for chunk in self._model.chunks:
            chunk.train()
        dist.all_reduce(total)
        loss_sum, batches_seen = total.tolist()
        return loss_sum / batches_seen
