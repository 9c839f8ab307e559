"""The actions of pipeline stages, and the placement of model chunks on the stages.

A model chunk is consecutive layers of the model. An action is a computation of one micro-batch in
one model chunk. The gradients of a chunk are either computed by one action, `backward`, or by two:
`input_gradients`, for which the previous stage waits, and later `weight_gradients`, for which no
stage waits (Qi et al., arXiv:2401.10241, where the actions are called F, B and W).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "input_gradients", "weight_gradients"]


class Action(NamedTuple):
    """A computation of one micro-batch in one model chunk of a stage."""

    kind: Kind
    virtual_stage: int
    """Index of the model chunk on its stage."""
    micro_batch: int


class Event(NamedTuple):
    """One action of one stage, measured or simulated."""

    stage: int
    action: Action
    start: float
    """Seconds since the start of the step."""
    end: float
    """Seconds since the start of the step."""


@dataclass(frozen=True)
class Placement:
    """On which stage each model chunk is.

    Chunks are numbered in the order of the forward pass, and so are the virtual stages of a stage.
    """

    stages: int
    virtual_stages: int = 1
    """Model chunks per stage."""
    folded: bool = False
    """False: the first stage follows the last one (Narayanan et al., SC'21, section 2.2). True: the
    chunks go forth and back (V placement, arXiv:2401.10241, section 6), so that with two virtual
    stages the first stage has the first and the last chunk."""

    @property
    def chunks(self) -> int:
        """Number of model chunks of the whole pipeline."""
        return self.stages * self.virtual_stages

    def stage(self, chunk: int) -> int:
        """Return the stage of a model chunk."""
        virtual_stage, position = divmod(chunk, self.stages)
        return self._reflected(virtual_stage, position)

    def virtual_stage(self, chunk: int) -> int:
        """Return the index of a model chunk on its stage."""
        return chunk // self.stages

    def chunk(self, stage: int, virtual_stage: int) -> int:
        """Return the model chunk that is a given virtual stage of a stage."""
        return virtual_stage * self.stages + self._reflected(virtual_stage, stage)

    def source(self, chunk: int, *, is_forward: bool) -> tuple[bool, int] | None:
        """Return the action of the same micro-batch that computes the input of an action.

        It is given by whether it is forward, and by its chunk; None = the input needs no action.
        """
        if is_forward:
            return (True, chunk - 1) if chunk > 0 else None
        return (True, chunk) if chunk == self.chunks - 1 else (False, chunk + 1)

    def _reflected(self, virtual_stage: int, position: int) -> int:
        return self.stages - 1 - position if self.folded and virtual_stage % 2 else position


ActionLists = list[list[Action]]
"""For each stage, its actions in order."""


def actions_of(kind: Kind, virtual_stages: int, micro_batches: int) -> ActionLists:
    """Return the actions of one kind: for each virtual stage, one action per micro-batch."""
    return [
        [Action(kind, virtual_stage, micro_batch) for micro_batch in range(micro_batches)]
        for virtual_stage in range(virtual_stages)
    ]


def run_stages(stages: Sequence[Iterator[int]]) -> None:
    """Run the work of all stages, each until it needs a result of another stage, until all end.

    The iterator of a stage yields the number of its actions so far whenever it needs a result that
    is not yet known.

    Raises:
        RuntimeError: the stages wait for each other.
    """
    counts: list[int | None] = []
    while stages:
        before, counts = counts, [next(stage, None) for stage in stages]
        if counts == before[::-1]:
            raise RuntimeError("the pipeline stages wait for each other")
        # Forward passes continue on the next stage and backward passes on the previous one. Hence
        # turns alternate between ascending and descending stages.
        stages = [s for s, count in zip(stages, counts, strict=True) if count is not None][::-1]
