"""Finds the newest checkpoint that all ranks can use, and loads the states of this rank from it.

Checkpoints are in the run directory or, as node-local checkpoints, on a disk of each node.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from frontier_llm.checkpoint.discovery import Checkpoint, find
from frontier_llm.checkpoint.folders import committed, step_folders
from frontier_llm.checkpoint.rank_objects import gathered, of_rank_0, opened_by_rank_0, tensor_names
from frontier_llm.checkpoint.restore import check_model, check_stored, load, load_masters
from frontier_llm.checkpoint.retention import delete_later, void_later
from frontier_llm.config.run import RunConfig
from frontier_llm.data.corpus_manifest import Manifest as CorpusManifest
from frontier_llm.errors import CheckpointError, ConfigError, damaged_checkpoint
from frontier_llm.launch.slurm import started_again
from frontier_llm.launch.world import World
from frontier_llm.saving.adaptation import copies, missed_updates
from frontier_llm.saving.changes import Changes, changes, check_corpus, refuse
from frontier_llm.saving.ledger_file import BlendSegment, StoredLengths
from frontier_llm.saving.node_assembly import NodeAssembly
from frontier_llm.saving.run_directory import check_new
from frontier_llm.saving.tiers import local_root, tiers_of
from frontier_llm.sharding.sharded_states import ShardedStates

_LOG = logging.getLogger(__name__)
_Candidate = Checkpoint | Path | CheckpointError
"""On the disks of the nodes, in the run directory, or known to be damaged."""


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run has resumed from."""

    folder: Path
    """Its path differs between nodes if it is a node-local checkpoint."""
    step: int
    """Number of optimizer steps done."""
    meta: dict[str, Any]
    """What was saved in addition to the states: configuration and counters."""
    changes: Changes
    """Differences between the configuration in the checkpoint and that of this run."""
    is_local: bool
    """Whether each rank has read it from the disk of its own node."""
    is_joined: bool = False
    """Whether it was read from disks of several nodes, so that no single place holds it."""
    is_rounded: bool = False
    """Whether the moments were rounded when it was saved (`checkpoint.moments`)."""


class Restorer:
    """Loads this rank's states from a checkpoint, at the start of a run or at a rewind.

    `shapes` are those of all trained tensors of the whole model, by name.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        states: ShardedStates,
        shapes: Mapping[str, tuple[int, ...]],
        corpus: CorpusManifest,
    ) -> None:
        self._config, self._world, self._states = config, world, states
        self._shapes, self._corpus = shapes, corpus
        # copies of other nodes' parts are found by the assembly
        self._run_dir, *self._on_node = tiers_of(config, world.rank // world.ranks_per_node)
        self._assembly = NodeAssembly(config, world, shapes, self._names)

    def restore(self, before: int | None = None) -> Resumed | None:
        """Load the newest checkpoint of a step before `before` that every rank can read.

        Collective over all ranks. If one rank fails, all ranks try the next older checkpoint (with
        `checkpoint.fallback`) or raise a CheckpointError. Returns None if there is no checkpoint.
        Raises a ConfigError if the checkpoint has another model, other data or another update rule.
        """
        self._states.settle()  # no collective may still write to the states
        newest_error = None
        candidates, assembled = deque(self._candidates(before)), set[int]()
        while candidates:
            step, candidate = candidates.popleft()
            error, resumed = None, None
            try:
                resumed = self._load(candidate)
            except CheckpointError as failure:
                error = failure.reason
            errors = [text for text in gathered(error) if text]
            self._assembly.close()  # every rank has read what it needs from other nodes
            if not errors and resumed is not None:
                progress = resumed.meta["progress"]
                # the parameters follow the loaded master weights, and the counters are set
                missed = missed_updates(self._states, progress)
                self._states.adopt(progress["updates"], progress["step"], missed)
                self._void_later(resumed.step)
                return resumed
            if self._has_another(step, candidates, assembled):
                self._warn(f"{errors[0]}; trying another copy of step {step}")
                continue
            if candidates and not self._config.checkpoint.fallback:
                raise CheckpointError(
                    f"{errors[0]}\n  do: set checkpoint.fallback=true to resume from the one before"
                )
            newest_error = newest_error or errors[0]
            next_one = "trying the next older checkpoint" if candidates else "none is older"
            self._warn(f"{errors[0]}; {next_one}")
        if newest_error is not None:
            raise CheckpointError(
                f"no checkpoint can be resumed from; the newest: {newest_error}\n"
                "  do: put a copy there that can be read, or start a new run: run.dir=NEW_RUN"
            )
        if before is None and self._config.checkpoint.tiers.local.path is not None:
            of_rank_0(self._check_new)
        return None

    def load_initial_weights(self, path: str | Path, of_encoder: str | Path | None = None) -> None:
        """Load weights into a new run from another run's checkpoint or a converted model.

        Collective over all ranks. `path` is a checkpoint, or a folder that holds checkpoints. An
        encoder-decoder may begin with decoders that `check_initial_model` has accepted: both sides
        with that of `path`, or the encoder with that of `of_encoder`. Raises a CheckpointError if
        there is none, or it is damaged or of another model.
        """
        self._states.settle()
        model, verify = self._config.model, self._config.checkpoint.verify
        shards = list(self._states.shards())
        encoder, decoder = copies(shards if model.kind == "t5" else (), model)
        checkpoint, weights = self._open(
            lambda: find(Path(path)), tensor_names([*encoder, *decoder])
        )
        if model.kind == "t5" and "encoder_norm.weight" not in weights:
            shards = [*encoder, *decoder]
            if of_encoder is not None:
                own, _ = self._open(lambda: find(Path(of_encoder)), tensor_names(encoder))
                load_masters(own, encoder, verify)
                shards = decoder
        else:
            check_model(checkpoint.folder, weights, self._shapes)
        load_masters(checkpoint, shards, verify)
        self._states.adopt(updates=0, step=0)

    def _load(self, candidate: _Candidate) -> Resumed:
        if isinstance(candidate, CheckpointError):
            raise candidate
        if isinstance(candidate, Path):
            folder = candidate
            checkpoint, weights = self._open(lambda: Checkpoint.open(folder))
        else:
            checkpoint = candidate
            weights = self._assembly.weights if checkpoint.places else checkpoint.manifest.weights
        meta, config = checkpoint.manifest.meta, self._config
        check_meta(checkpoint.folder, meta)
        now = config.model_dump(mode="json")
        differences = changes(meta["config"], now)
        refuse(differences, config)
        if warning := check_corpus(differences, config, self._corpus, meta, checkpoint.folder):
            self._warn(warning)
        check_model(checkpoint.folder, weights, self._shapes)
        is_only = self._is_only_reader(meta["config"], now, checkpoint.manifest.world)
        load(checkpoint, self._states.shards(writable=True), config.checkpoint.verify, is_only)
        is_joined = bool(checkpoint.places) and checkpoint.folder.parent != self._run_dir.folder
        is_local = not isinstance(candidate, Path) and not checkpoint.places
        moments = checkpoint.manifest.moments
        if moments is not None:
            self._warn(
                f"the moments of step {checkpoint.step} were rounded to {moments} when it was "
                "saved (checkpoint.moments); the weights are exact"
            )
        is_rounded = moments is not None
        return Resumed(
            checkpoint.folder, checkpoint.step, meta, differences, is_local, is_joined, is_rounded
        )

    def _open(
        self, open_checkpoint: Callable[[], Checkpoint], others: Collection[str] = ()
    ) -> tuple[Checkpoint, Collection[str]]:
        opened = opened_by_rank_0(open_checkpoint, self._names().union(others))
        assert opened is not None
        return opened[0], opened[1].weights

    def _names(self) -> set[str]:
        return tensor_names(self._states.shards())

    def _is_only_reader(self, saved: Mapping[str, Any], now: Mapping[str, Any], world: int) -> bool:
        """Whether no two ranks read the same chunks, so that the page cache would help nobody."""
        keys, factors = ("parallel", "sharding"), self._states.factors
        same_layout = world == self._world.size and all(saved.get(k) == now[k] for k in keys)
        return same_layout and factors.optimizer == factors.data

    def _has_another(
        self, step: int, candidates: deque[tuple[int, _Candidate]], assembled: set[int]
    ) -> bool:
        """Whether the first candidate is another copy of a step that cannot be loaded.

        If there is none, one is assembled from the nodes' disks, once per step, if possible.
        """
        if candidates and candidates[0][0] == step:
            return True
        if step in assembled:
            return False
        assembled.add(step)
        folder = self._assembly.assemble(step)
        if folder is not None:
            candidates.appendleft((step, folder))
        return folder is not None

    def _candidates(self, before: int | None) -> Iterator[tuple[int, _Candidate]]:
        """Yield checkpoints that may be used with their steps, newest first, as on all ranks.

        A step of which the nodes' disks hold parts is read from them, not from the run directory.
        """
        shared = of_rank_0(self._shared_checkpoints)
        found: list[tuple[int, _Candidate]] = [*shared]
        for tier in self._on_node:
            found += [(c.step, c) for c in self._checkpoints_on_node(tier.folder)]
        if before is None:
            newest = max((step for step, _ in found), default=-1)
            rest = shared[0] if shared and shared[0][0] == newest else None
            joined = self._assembly.find(newest, rest)
            if joined is not None:
                found = [(joined.step, joined), *found]
        # what is damaged is not passed over in silence, unless its step is whole elsewhere
        damage = self._assembly.damage().items()
        found += [(step, CheckpointError(text)) for step, text in damage]
        # A step has both kinds only if it was saved again, in the run directory, after a rewind.
        # This later checkpoint knows which samples come next. It comes first, because sorting is
        # stable.
        for step, candidate in sorted(found, key=lambda entry: -entry[0]):
            if before is None or step < before:
                yield step, candidate

    def _shared_checkpoints(self) -> list[tuple[int, Path]]:
        for _, suffix, path in step_folders(self._run_dir.folder):
            if suffix == ".partial":
                self._warn(f"{path} was never completed and is ignored")
        return committed(self._run_dir.folder)

    def _checkpoints_on_node(self, folder: Path) -> list[Checkpoint]:
        """Return the checkpoints of this node whose steps all nodes have. Collective."""
        # Checkpoints of one step belong together only if they come from the same start of the run.
        # If the job now runs on other nodes, their disks may hold checkpoints of different starts.
        on_this_node = {
            (checkpoint.step, str(checkpoint.manifest.meta.get("start"))): checkpoint
            for checkpoint in self._complete_checkpoints(folder)
        }
        on_all_nodes = set.intersection(*map(set, gathered(sorted(on_this_node))))
        return [on_this_node[key] for key in on_all_nodes]

    def _complete_checkpoints(self, folder: Path) -> Iterator[Checkpoint]:
        """Yield the checkpoints of this node that hold all states of this rank.

        A checkpoint lacks some of these states if the layout has changed since it was saved, or if
        another node has taken the place of the node that saved it.
        """
        for _, suffix, path in step_folders(folder):
            if suffix:
                continue
            try:
                checkpoint = Checkpoint.open(path)
                check_stored(checkpoint, self._states.shards(writable=True))
            except CheckpointError as error:
                _LOG.info("%s is ignored: %s", path, error.reason)
            else:
                yield checkpoint

    def _check_new(self) -> None:
        run = self._config.run
        if steps := self._assembly.incomplete_steps:
            raise CheckpointError(
                f"the disks of the nodes hold no complete checkpoint, only parts of steps {steps}\n"
                "  do: start on the nodes that saved them, or set run.dir to a new directory"
            )
        try:
            check_new(Path(run.dir), run.resume, started_again=started_again(os.environ))
        except ConfigError as error:
            raise CheckpointError(str(error)) from None

    def _void_later(self, step: int) -> None:
        """Rename checkpoints of later steps to `*.void`, because the run repeats these steps.

        Copies in memory (`recovery.partner_copies`) are deleted.
        """
        world, root = self._world, local_root(self._config)
        if world.rank == 0:
            void_later(self._run_dir.folder, step)
        if root is None:
            return
        is_first = world.rank == world.node_ranks.start
        end = delete_later if self._config.recovery.partner_copies else void_later
        for tier in self._on_node if is_first else ():
            end(tier.folder, step)
        gathered(None)  # wait, because nodes may share a disk
        for folder in sorted(root.iterdir()) if is_first and root.is_dir() else ():
            with suppress(CheckpointError):  # another node is renaming the same checkpoint
                end(folder, step)

    def _warn(self, text: str) -> None:
        if self._world.rank == 0:
            _LOG.warning("%s", text)


_Count = Annotated[int, Field(ge=0, le=10**18)]
_STRICT = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Counters(BaseModel):
    model_config = _STRICT
    __pydantic_extra__: dict[str, _Count | list[float | None]]
    step: _Count
    next_sample: _Count
    updates: _Count


class _Meta(BaseModel):
    model_config = _STRICT
    progress: _Counters
    loss_scale: dict[str, Annotated[float, Field(ge=0)]]
    corpus: str
    blend: list[BlendSegment] | None = None
    lengths: Annotated[list[StoredLengths], Field(min_length=1)] | None = None
    config: dict[str, Any]


def check_meta(folder: object, meta: dict[str, Any]) -> None:
    """Raise a CheckpointError if a value that is saved besides the states is absent or wrong."""
    try:
        _Meta.model_validate(meta)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{folder} is damaged at meta.{where}: {first['msg']}"
        raise damaged_checkpoint(what) from None
