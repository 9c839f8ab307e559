"""A module whose states are sharded, for a training loop that someone else has written."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from frontier_llm.collectives.traffic import Traffic
from frontier_llm.device.transfer import send
from frontier_llm.engine.hooks import Hook
from frontier_llm.engine.passes import Passes
from frontier_llm.engine.shard_settings import AdamW, number_of
from frontier_llm.engine.update import Update, choose_update
from frontier_llm.errors import ConfigError, TrainingError
from frontier_llm.geometry.wire import Sent
from frontier_llm.protocols import ParameterRecord
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.sharding.update_groups import Settings


class Sharded:
    """A module whose states are sharded; `shard` makes it.

    Attributes:
        module: the module, which is called as before.
        states: the sharded states, for `Checkpoints`.
        missed: number of updates that left a parameter out because no rank had a gradient of it,
            by its name.
    """

    def __init__(
        self,
        module: nn.Module,
        states: ShardedStates,
        passes: Passes,
        traffic: Traffic,
        update: AdamW,
        dtype: torch.dtype,
    ) -> None:
        self.module, self.states, self._passes = module, states, passes
        self._traffic, self._rule = traffic, update
        self._dtype = dtype  # of the parameters before `Precision` has converted them
        self._converts = dtype != states.all_units[0].buffer.dtype
        self._updates = 0
        self.missed: dict[str, int] = {}
        self._before_update: list[Callable[[], None]] = []
        self._update = Update(states, self.fence)
        module.register_load_state_dict_pre_hook(Hook(self._before_load))
        module.register_load_state_dict_post_hook(Hook(lambda *_: passes.take_written()))

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a micro-batch, as `loss.backward()` does.

        The loss, [], is the mean over this rank's samples. Gradients are averaged over ranks, and
        over the `micro_batches` of `shard`. If the pass raises an exception, the step is dropped.
        """
        try:
            loss.backward()
        except BaseException:
            self.drop_step()
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let a backward pass in this context be one more pass of the step, before its last ones.

        As with DistributedDataParallel, the caller divides the losses by the number of passes.
        Gradients that are not sharded are reduced after the context only.
        """
        self._passes.expect_more()
        yield

    def step(self, learning_rate: float, *, saved: bool = False) -> float:
        """Clip the gradients and update the parameters; nothing changes if one is not finite.

        Return the norm of the gradient before it was clipped. Collective over all ranks. A
        parameter that has no gradient on any rank is left as it is. `saved` tells that the states
        are saved after this step (`Checkpoints.is_due`), so that a run that continues from them
        repeats this run to the last digit. Raises a ConfigError if the learning rate is no number
        from 0 on, and a TrainingError if a backward pass is missing, or the ranks have gathered
        different layers.
        """
        learning_rate = number_of(learning_rate)
        scale = float(dist.get_world_size() * self._passes.micro_batches)
        self._passes.end_step()
        self.states.finish_backward()
        counts = self.states.passes.counts()
        numbers = self._sums(counts)
        choice = choose_update(numbers[0], scale, self._rule.clip_norm)
        left_out = set()
        if any(count == 0 for _, count in counts):  # otherwise every parameter has a gradient
            used = numbers[-len(counts) :].tolist()
            left_out = {record for (record, _), n in zip(counts, used, strict=True) if not n}
        skipped, values = self._update.run(choice, numbers, learning_rate, left_out)
        self._check_equal_uses(values[1 : len(values) - len(counts)])
        self._update.end(skipped=skipped, saved=saved)
        self._updates += not skipped
        for record in () if skipped else left_out:
            self.missed[record.name] = self.missed.get(record.name, 0) + 1
        return float(values[0] ** 0.5 / scale)

    def drop_step(self) -> None:
        """Discard the gradients of a step that failed, so that it can be repeated.

        Collective over all ranks, unless no reduction of gradients has begun.
        """
        self._passes.drop_step()

    def settle(self) -> None:
        """Wait until all parameters that are not sharded have the values of the last update.

        Collective over all ranks.
        """
        self.states.settle()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold all parameters in memory, between two steps: to evaluate, save, copy or write them.

        Collective over all ranks. If parameters are written, all ranks must write the same.
        """
        units = self.states.all_units
        self.fence()
        self.states.settle()
        self.states.acquire(units)
        try:
            yield
            self._passes.take_written()
        finally:
            self.states.settle()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all parameters and persistent buffers on the host, under the module's names.

        Collective over all ranks.
        """
        with self.gathered():
            found = {
                name: value.detach().to("cpu", copy=True)
                for name, value in self.module.state_dict().items()
            }
        if self._converts:
            exact = {
                id(r.parameter): value.cpu() for r, value in self.states.parameters(self._dtype)
            }
            named = self.module.named_parameters(remove_duplicate=False)
            found.update((name, exact[id(parameter)]) for name, parameter in named)
        return found

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Write parameters and buffers, as `module.load_state_dict`; moments stay as they are.

        Collective over all ranks, which must load the same values. Those of FSDP2 (DTensors) are
        gathered.
        """
        whole = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in state.items()
        }
        with self.gathered():
            self.module.load_state_dict(whole, strict=strict)
        if self._converts:
            for part in self.states.shards(writable=True):
                if part.record.name in whole:
                    values = whole[part.record.name].flatten()
                    part.master.copy_(values[part.start : part.start + part.elements])
            self.states.adopt(self._updates, self._passes.step - 1, self.missed)

    def sent_bytes(self) -> dict[str, Sent]:
        """Return the bytes that this rank has sent since the last call, by collective and level."""
        return self._traffic.take()

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank keeps between steps, by category."""
        return self.states.memory_bytes()

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the full value of every parameter, gathered without quantisation.

        Collective over all ranks: all must exhaust the iterator.
        """
        for record, parameter in self.states.parameters(self._dtype):
            yield record.name, parameter

    def before_update(self, call: Callable[[], None]) -> None:
        """Call a function before states are written, such as `Checkpoints`' wait for its copies."""
        self._before_update.append(call)

    def fence(self) -> None:
        """Call the functions of `before_update`; then the states may be written."""
        for call in self._before_update:
            call()

    def continue_from(
        self, step: int, updates: int, missed: Mapping[str, int] | None = None
    ) -> None:
        """Continue from states that the caller has overwritten; `Checkpoints.restore` calls this.

        They were saved after `step`, with `updates` updates and the attribute `missed`.
        """
        self._passes.step, self._updates, self.missed = step + 1, updates, dict(missed or {})
        self.states.adopt(updates, step, self.missed)

    def rate_factors(self) -> Iterator[tuple[float, nn.Parameter]]:
        """Yield the factor of the learning rate of each parameter that is trained, and itself."""
        for record in (record for unit in self.states.all_units for record in unit.records):
            if record.parameter.requires_grad:
                yield Settings.of(record, self._rule).rate_factor, record.parameter

    @property
    def next_step(self) -> int:
        """Number of the step that the next call of `step` ends, counted from 1."""
        return self._passes.step

    @property
    def updates(self) -> int:
        """Number of updates so far. Steps whose gradients were not finite made none."""
        return self._updates

    def _sums(self, counts: list[tuple[ParameterRecord, int]]) -> torch.Tensor:
        """Sum over all ranks what they agree on before an update.

        This is [1 + 2 groups + parameters] fp64: the squared norm; for each group of ranks that
        share parameters, two numbers that show whether they have gathered the same units; the
        number of gradients of each parameter.
        """
        squared, shared = self.states.squared_norm(), self.states.factors.params
        digests = [0.0] * (2 * dist.get_world_size() // shared if shared > 1 else 0)
        if digests:
            group, digest = dist.get_rank() // shared, float(self._passes.digest())
            digests[2 * group : 2 * group + 2] = digest, digest**2
        own = [0.0, *digests, *(float(count) for _, count in counts)]
        numbers = send(own, squared.device)
        numbers[0].copy_(squared)
        dist.all_reduce(numbers)
        return numbers

    def _check_equal_uses(self, digests: Sequence[float]) -> None:
        """Check that ranks which share parameters have gathered the same units in the same order.

        Otherwise some have computed with wrong parameters. `digests` has, per group of ranks, the
        sum of their digests and of the squares.
        """
        shared = self.states.factors.params
        for total, squares in zip(digests[::2], digests[1::2], strict=True):
            if squares * shared != total**2:
                raise TrainingError(
                    "the ranks have used different layers in this step, but share their "
                    "parameters\n"
                    "  do: use the same layers on all ranks, or call shard with params=1"
                )

    def _before_load(self, *_: Any) -> None:
        self.fence()
        if self.states.factors.params > 1 and not self.states.reads.is_gathered:
            raise ConfigError(
                "module.load_state_dict",
                "a module whose parameters are sharded",
                "the whole parameters in memory",
                "call load_state_dict of the result of shard, on all ranks",
            )
