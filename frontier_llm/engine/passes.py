"""Follows the forward and backward passes of a module that was not written for this program.

Such a module may read a parameter in other ways than by calling the module that owns it, return
anything, leave layers out, and compute its loss from other tensors than its output. Therefore:

- A read of a parameter that is not gathered gathers it, while a forward or backward pass runs
  (sharding/guarded.py).
- Parameters that autograd saves for the backward pass are gathered when it asks for them.
- A backward pass begins with its first gradient and ends with the last operation of autograd.
  Reductions of gradients start in the same order on all ranks, also if ranks have used other
  parameters. A parameter without a gradient counts as zero.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from frontier_llm.engine.hooks import Hook, differentiable
from frontier_llm.errors import TrainingError
from frontier_llm.sharding.guarded import in_backward
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.sharding.unit import Unit


class _Saved(NamedTuple):
    """A parameter, or a view of one, that autograd has saved."""

    unit: Unit
    tensor: torch.Tensor


class Passes:
    """The passes of a step, followed by hooks on the module and on the modules that read units.

    Attributes:
        step: number of the current step, or of the next one.
        micro_batches: backward passes of a step, without those in `Sharded.no_sync`.
        count: backward passes of this step that have ended.
        expected: backward passes that the step has.
        in_step: whether a pass of the step has begun.
    """

    def __init__(
        self,
        module: nn.Module,
        readers: Iterable[nn.Module],
        states: ShardedStates,
        micro_batches: int,
    ) -> None:
        self._states, self.micro_batches, self._module = states, micro_batches, module
        self._writes = {unit: _writes(unit) for unit in states.all_units}
        self.step, self.count, self.expected = 1, 0, micro_batches
        self.in_step = self._in_pass = False
        self._forwards: list[tuple[nn.Module, saved_tensors_hooks | None]] = []
        units = states.all_units
        self._trained = {
            id(r.parameter) for unit in units if unit.is_trainable for r in unit.records
        }
        self._unit_of_storage = {
            unit.buffer.untyped_storage()._cdata: unit for unit in units if unit.is_sharded
        }
        states.reads.reads_together = lambda: bool(self._forwards) or in_backward()
        states.passes.before_gradient = self._before_gradient
        for reader in dict.fromkeys([module, *readers]):
            reader.register_forward_pre_hook(Hook(self._begin_forward))
            reader.register_forward_hook(Hook(self._end_forward), always_call=True)
        module.register_forward_hook(Hook(self._watch_output))

    def expect_more(self) -> None:
        """Expect one more backward pass in this step."""
        self._begin_step()
        self.expected += 1
        self._states.passes.expect_pass()

    def end_step(self) -> None:
        """End the step; TrainingError if a backward pass is missing, or one has failed."""
        if self._in_pass:
            raise TrainingError(
                "step was called after a backward pass that failed\n  do: call drop_step on all "
                "ranks, and repeat the step"
            )
        if self.count != self.expected:
            raise TrainingError(
                f"step was called after {self.count} of {self.expected} calls of backward"
            )
        self.step, self.count, self.expected = self.step + 1, 0, self.micro_batches
        self.in_step = False

    def drop_step(self) -> None:
        """Forget the passes of this step. Collective over all ranks."""
        self.count, self.expected, self._in_pass = 0, self.micro_batches, False
        if self.in_step:
            self._states.passes.drop(self.micro_batches)
            self._states.reads.end_step()
            self._states.reads.begin_step()

    def take_written(self) -> None:
        """Make what a user has written to parameters since the last call the new master weights.

        All ranks must have written the same. torch counts the writes to each parameter. Writes of
        `sharding` are to the buffers, whose count is another one. Writes through `parameter.data`
        are not counted.
        """
        for unit, before in self._writes.items():
            self._writes[unit] = after = _writes(unit)
            pairs = enumerate(zip(before, after, strict=True))
            written = {index for index, (old, new) in pairs if old != new}
            if not written:
                continue
            if not unit.buffer.untyped_storage().nbytes():
                raise TrainingError(
                    f"parameters of {unit.name} were written to in a forward or backward pass, but "
                    "they are sharded, so that the values are lost\n  do: write them in `with "
                    "states.gathered():`, or call shard with params=1"
                )
            if unit.is_sharded:
                unit.shard.copy_(unit.part(unit.buffer, unit.params_interval))
            if unit.is_trainable:
                self._states.take_parameters(unit, written)

    def digest(self) -> int:
        """Return 16 bits that differ if ranks have gathered other units in this step."""
        order = {unit: index for index, unit in enumerate(self._states.all_units)}
        uses = [(order[use.unit], use.backward) for use in self._states.reads.uses]
        return crc32(repr(uses).encode()) >> 16

    def _begin_step(self) -> None:
        if not self.in_step:
            self._check_parameters()
            self.take_written()
            self._states.begin_step(self.step, self.micro_batches)
            self.in_step = True

    def _begin_forward(self, module: nn.Module, _: Any) -> None:
        context = None
        if in_backward():  # activations are recomputed
            self._begin_pass_of_backward()
        elif torch.is_grad_enabled():
            if self._in_pass:  # it has ended by an exception
                self.drop_step()
            self._begin_step()
            if self._unit_of_storage:
                context = saved_tensors_hooks(self._save, self._saved)
                context.__enter__()
        self._forwards.append((module, context))

    def _end_forward(self, module: nn.Module, _: Any, __: Any) -> None:
        if not self._forwards or self._forwards[-1][0] is not module:
            return  # a hook that is called before `_begin_forward` has raised an exception
        _, context = self._forwards.pop()
        if context is not None:
            context.__exit__()

    def _save(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        unit = self._unit_of_storage.get(tensor.untyped_storage()._cdata)
        return tensor if unit is None else _Saved(unit, tensor)

    def _saved(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(saved, _Saved):
            self._states.reads.make_readable(saved.unit)
            return saved.tensor
        return saved

    def _watch_output(self, _: nn.Module, __: Any, output: Any) -> None:
        for tensor in differentiable(output):
            tensor.register_hook(lambda _: self._begin_pass_of_backward())

    def _begin_pass_of_backward(self) -> None:
        """Begin the pass unless autograd computes only the gradients of some tensors.

        A recomputation of layers may run a nested backward pass, in which the first gradient of a
        parameter arrives. The pass must begin before, so that it does not end with the nested one.
        """
        if torch.autograd._is_checkpoint_valid():
            self._before_gradient()

    def _before_gradient(self) -> None:
        if self._in_pass:
            return
        self._begin_step()
        if self.count == self.expected:
            raise TrainingError(
                f"backward was called {self.count + 1} times in a step of {self.expected} "
                "micro-batches: call step, use no_sync for all calls but the last, or pass another "
                "number of micro_batches to shard"
            )
        self._in_pass = True
        self._states.reads.settle()  # before reductions, which use the same process groups
        self._states.passes.begin_pass()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        self._in_pass = False
        self.count += 1
        self._states.passes.end_pass(self.expected - self.count)
        self._states.release(self._states.all_units)

    def _check_parameters(self) -> None:
        """Check that the parameters are still those that were sharded, in the same memory."""
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._trained:
                raise TrainingError(
                    f"{name} would not be trained: it was frozen in shard, or added after it\n"
                    "  do: call shard when the module is complete; set requires_grad before it"
                )
        for unit in self._states.all_units:
            for record in unit.records:
                if not unit.owns(record.parameter):
                    raise TrainingError(
                        f"the memory of {record.name} was replaced after shard, for example by "
                        "module.to or module.half\n  do: convert the module before shard"
                    )


def _writes(unit: Unit) -> list[int]:
    return [record.parameter._version for record in unit.records]
