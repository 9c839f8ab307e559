"""Seeds dropout, so that the masks of a layer do not depend on the order of passes.

The seed depends on the seed of the run, the step, the replica, the micro-batch and the layer. A
resumed run, another pipeline schedule, another number of stages, and a recomputed layer thus draw
the same masks. The tensor ranks of one stage and replica draw the same masks for activations that
they all hold, and different masks for activations that are divided between them.
"""

import struct
from functools import partial
from typing import Any

import xxhash
from torch import nn

from frontier_llm.model.build import Model, unit_readers
from frontier_llm.parallel.groups import Groups


class DropoutSeeds:
    """Seeds the random numbers before each layer, if the model has dropout.

    Attributes:
        step: number of the current step; the caller sets it.
        micro_batch: number of the current micro-batch in the step; the caller sets it.
    """

    def __init__(self, model: Model, groups: Groups, seed: int) -> None:
        """Attach a hook to every layer, and to the embedding."""
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
        """Seed the random numbers before the forward pass of a module."""
        if not module.training:
            return
        numbers = (self._seed, self.step, self._groups.coordinates.data, self.micro_batch)
        packed = struct.pack("<4q", *numbers) + unit.encode()
        self._groups.seed_dropout(xxhash.xxh64_intdigest(packed) >> 2, own_masks=self._own_masks)
