"""Resuming from a checkpoint: finds the newest usable one and loads it."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from frontier_llm.checkpoint.discovery import Checkpoint, committed, find, never_committed
from frontier_llm.checkpoint.folders import MANIFEST, parse_folder
from frontier_llm.checkpoint.manifest import Manifest
from frontier_llm.checkpoint.restore import check_model, check_stored, load, load_masters
from frontier_llm.checkpoint.retention import void_later
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import CheckpointError, ConfigError
from frontier_llm.launch.world import World
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.changes import Changes, changes, refuse
from frontier_llm.trainer.checkpoint_places import local_folder, shared_folder

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run has resumed from."""

    folder: Path
    """Folder of the checkpoint; in a local tier its path differs between nodes."""
    step: int
    """Optimizer steps done."""
    meta: dict[str, Any]
    """What was saved in addition to the states."""
    changes: Changes
    """Differences between the configuration of this run and the saved one."""


class Restorer:
    """Loads this rank's states from the newest checkpoint of a run."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        states: ShardedStates,
        model: Mapping[str, tuple[int, ...]],
        corpus: str,
    ) -> None:
        """Prepare.

        Args:
            config: of the resumed run.
            world: place of this rank among all ranks.
            states: the states to load.
            model: shapes of all trained tensors of the whole model.
            corpus: digest of the corpus that the run reads.
        """
        self._config, self._world, self._states = config, world, states
        self._model, self._corpus = model, corpus

    def restore(self, before: int | None = None) -> Resumed | None:
        """Load the newest checkpoint that every rank can read.

        Collective over all ranks. If one rank fails, all ranks try the next older checkpoint (with
        `checkpoint.fallback`) or raise.

        Args:
            before: only checkpoints of steps before this one are tried; None = all.

        Returns:
            The loaded checkpoint; None if there is none.

        Raises:
            CheckpointError: the newest checkpoint cannot be used; with `checkpoint.fallback`, no
                checkpoint can be used.
            ConfigError: the checkpoint has another model, other data or another update rule.
        """
        self._states.settle()
        refused = None
        for place in self._candidates(before):
            error, resumed = None, None
            try:
                resumed = self._load(place)
            except CheckpointError as failure:
                error = str(failure)
            errors = [text for text in _gathered(error) if text]
            if not errors and resumed is not None:
                done = resumed.meta["progress"]
                self._states.adopt(done["updates"], done["step"])
                self._void_later(resumed.step)
                return resumed
            if not self._config.checkpoint.fallback:
                raise CheckpointError(
                    f"{errors[0]}\n  do: set checkpoint.fallback=true to resume from the one before"
                )
            refused = refused or errors[0]
            self._warn(f"{errors[0]}; the checkpoint before it is tried")
        if refused is not None:
            raise CheckpointError(f"no checkpoint can be resumed from; the newest: {refused}")
        return None

    def load_initial_weights(self, path: Path) -> None:
        """Load the weights of another run's checkpoint or of a converted model into a new run.

        Collective over all ranks.

        Args:
            path: a checkpoint, or a folder that holds checkpoints.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it is of another model.
        """
        self._states.settle()
        checkpoint = _opened_by_rank_0(lambda: find(path))
        check_model(checkpoint, self._model)
        load_masters(checkpoint, self._states.shards(), self._config.checkpoint.verify)
        self._states.adopt(updates=0, step=0)

    def _load(self, place: Checkpoint | Path) -> Resumed:
        checkpoint = (
            _opened_by_rank_0(lambda: Checkpoint.open(place)) if isinstance(place, Path) else place
        )
        meta, config = checkpoint.manifest.meta, self._config
        now = config.model_dump(mode="json")
        differences = changes(meta["config"], now)
        refuse(differences, now, config.run.allow_changes)
        self._check_corpus(meta["corpus"])
        check_model(checkpoint, self._model)
        factors = self._states.factors
        load(
            checkpoint,
            self._states.shards(),
            config.checkpoint.verify,
            is_only_reader=factors.optimizer == factors.data,
        )
        return Resumed(checkpoint.folder, checkpoint.step, meta, differences)

    def _check_corpus(self, before: str) -> None:
        allowed = {"data", "data.path"} & set(self._config.run.allow_changes)
        if before != self._corpus and not allowed:
            raise ConfigError(
                "data.path",
                f"{self._config.data.path or self._config.data.name}, with digest {self._corpus}",
                f"the corpus that the run has read so far, with digest {before}",
                "use the same text and tokenizer, or allow it: run.allow_changes=[data.path]",
            )

    def _candidates(self, before: int | None) -> Iterator[Checkpoint | Path]:
        """Yield the checkpoints that may be used, newest first, in the same order on every rank."""
        places: list[tuple[int, Checkpoint | Path]] = [*_of_rank_0(self._listed)]
        places += [(c.step, c) for c in self._local()]
        # Sorting is stable: the run directory's checkpoint of a step precedes the local one. Both
        # exist if a rewind has saved the step again in the run directory, with later samples.
        for step, place in sorted(places, key=lambda each: -each[0]):
            if before is None or step < before:
                yield place

    def _listed(self) -> list[tuple[int, Path]]:
        """Return (step, path) of the checkpoints in the run directory, the newest first."""
        folder = shared_folder(self._config)
        for path in never_committed(folder):
            self._warn(f"{path} was never completed and is ignored")
        return committed(folder)

    def _local(self) -> list[Checkpoint]:
        """Return the checkpoints on the nodes' local disks that all ranks can read."""
        folder = local_folder(self._config, self._world.rank, self._world.ranks_per_node)
        if folder is None:
            return []
        # if nodes were exchanged, their checkpoints of a step may come from different starts
        here = {(c.step, str(c.manifest.meta.get("start"))): c for c in self._readable(folder)}
        common = set.intersection(*map(set, _gathered(sorted(here))))
        return [here[key] for key in common]

    def _readable(self, folder: Path) -> Iterator[Checkpoint]:
        """Yield the checkpoints of this node that hold all states of this rank.

        They do not if the layout has changed, or if a node has replaced another.
        """
        for path in folder.iterdir() if folder.is_dir() else ():
            parsed = parse_folder(path.name)
            if parsed is None or parsed[1] or not (path / MANIFEST).exists():
                continue
            try:
                checkpoint = Checkpoint.open(path)
                check_stored(checkpoint, self._states.shards())
            except CheckpointError as error:
                _LOG.info("%s is ignored: %s", path, error)
            else:
                yield checkpoint

    def _void_later(self, step: int) -> None:
        """Mark checkpoints of later steps as void, on all tiers: the run repeats these steps."""
        world = self._world
        if world.rank == 0:
            void_later(shared_folder(self._config), step)
        local = local_folder(self._config, world.rank, world.ranks_per_node)
        if local is not None and world.rank % world.ranks_per_node == 0:
            void_later(local, step)

    def _warn(self, text: str) -> None:
        if self._world.rank == 0:
            _LOG.warning("%s", text)


def _opened_by_rank_0(opened: Callable[[], Checkpoint]) -> Checkpoint:
    """Return on every rank the checkpoint that rank 0 opens.

    Opening a checkpoint reads the size of every file; on all of thousands of ranks, that would be
    millions of requests to a shared file system.

    Raises:
        CheckpointError: rank 0 cannot open it.
    """

    def content() -> tuple[Path, bytes]:
        checkpoint = opened()
        return checkpoint.folder, checkpoint.manifest.to_bytes()

    folder, manifest = _of_rank_0(content)
    return Checkpoint(folder, Manifest.parse(manifest, str(folder)))


def _of_rank_0(question: Callable[[], T]) -> T:
    """Return rank 0's answer on every rank, or raise its CheckpointError on every rank."""
    answers: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answers = [question()]
        except CheckpointError as error:
            answers = [error]
    dist.broadcast_object_list(answers, src=0)
    (answer,) = answers
    if isinstance(answer, CheckpointError):
        raise answer
    return cast(T, answer)


def _gathered(own: Any) -> list[Any]:
    """Return the objects of all ranks, in the order of the ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered
