"""Assemble a checkpoint in the run directory from what the disks of the nodes hold.

This is for starts at which ranks cannot read their states from the disk of their own node: a node
was lost, nodes have other numbers than before, or the layout has changed. A part of a lost node is
taken from the disk of the next node (`checkpoint.partner`) or is dispensable, because other nodes
hold the same states. All files are copied to the run directory, and any layout can read them there.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.folder_commit import check_files, publish, write_manifest
from frontier_llm.checkpoint.folders import MANIFEST, partial_folder, step_folder
from frontier_llm.checkpoint.manifest import Manifest
from frontier_llm.checkpoint.node_parts import (
    NodePart,
    copy_file,
    find_parts,
    first_incomplete,
    merge,
)
from frontier_llm.checkpoint.stored_ranges import Shape
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import CheckpointError
from frontier_llm.launch.world import World
from frontier_llm.trainer.checkpoint_places import local_root, shared_folder

_LOG = logging.getLogger(__name__)
Holder = tuple[int, NodePart]
"""The first rank of a node, and a part on its disk."""


class NodeAssembly:
    """Copies parts of nodes to the run directory. All ranks call its methods together.

    Attributes:
        incomplete_steps: steps of which the disks hold parts that are not a whole checkpoint, as
            far as they were tried.
    """

    def __init__(self, config: RunConfig, world: World, shapes: Mapping[str, Shape]) -> None:
        """Initialise without reading anything.

        Args:
            config: configuration of the run.
            world: number, host and node of this rank among all ranks.
            shapes: shapes of all trained tensors of the whole model, by name.
        """
        self._config, self._world, self._shapes = config, world, shapes
        self._root, self._folder = local_root(config), shared_folder(config)
        self.incomplete_steps: list[int] = []

    def assemble(self, after: int, until: int | None = None) -> Path | None:
        """Copy the newest step that the nodes' disks hold together to the run directory.

        Args:
            after: only later steps than this are tried.
            until: only steps up to this one are tried; None = all.

        Returns:
            The folder of the checkpoint in the run directory; None if there is no such step.
        """
        if self._root is None:
            return None
        is_first = self._world.rank == self._world.node_ranks.start
        own = find_parts(self._root) if is_first else []
        own = [p for p in own if p.step > after and (until is None or p.step <= until)]
        holders = [(rank, part) for rank, parts in enumerate(_gathered(own)) for part in parts]
        keys = sorted({(part.step, part.start) for _, part in holders}, reverse=True)
        for step, start in keys:
            if self._assemble(step, [h for h in holders if h[1].start == start]):
                return self._folder / step_folder(step)
            self.incomplete_steps.append(step)
        return None

    def _assemble(self, step: int, holders: Sequence[Holder]) -> bool:
        """Assemble one step; return whether this was possible."""
        # a node's own disk comes first, and of several readers of a disk the lowest rank
        left = sorted((h for h in holders if h[1].step == step), key=lambda h: (h[1], h[0]))
        while left:
            chosen: dict[int, Holder] = {}
            for holder in left:
                chosen.setdefault(holder[1].node, holder)
            plan = self._plan(chosen)
            if plan is None:
                return False
            failed = [node for nodes in _gathered(self._copy(step, chosen, plan)) for node in nodes]
            if not failed:
                return self._commit(step, chosen)
            left = [h for h in left if h[1].node not in failed or h != chosen[h[1].node]]
        return False

    def _plan(self, chosen: Mapping[int, Holder]) -> Sequence[tuple[str, int]] | None:
        """Return (file, node) of each file to copy; None if the parts are not a whole checkpoint.

        Rank 0 keeps the manifest for `_commit`.
        """
        own = {
            node: (Path(part.folder) / MANIFEST).read_bytes()
            for node, (rank, part) in chosen.items()
            if rank == self._world.rank
        }
        manifests = _gathered_on_rank_0(own)
        plan: list[Any] = [None]
        if self._world.rank == 0:
            parts = {n: text for found in manifests for n, text in found.items()}
            try:
                merged, node_of = merge(
                    {n: Manifest.parse(text, chosen[n][1].folder) for n, text in parts.items()}
                )
                incomplete = first_incomplete(merged, self._shapes)
            except CheckpointError as error:
                _LOG.warning("%s", error)
            else:
                self._manifest = merged
                if incomplete is None:
                    plan = [sorted(node_of.items())]
                else:
                    _LOG.warning(
                        "step %d on the disks of nodes %s is not used: %s is not complete",
                        merged.step, ", ".join(map(str, sorted(chosen))), incomplete,
                    )  # fmt: skip
        dist.broadcast_object_list(plan, src=0)
        found: Sequence[tuple[str, int]] | None = plan[0]
        return found

    def _copy(
        self, step: int, chosen: Mapping[int, Holder], plan: Sequence[tuple[str, int]]
    ) -> list[int]:
        """Copy this rank's share of the files; return the nodes whose files cannot be copied."""
        node_ranks, failed = self._world.node_ranks, []
        partial = self._folder / partial_folder(step)
        for index, (name, node) in enumerate(plan):
            holder, part = chosen[node]
            if holder + index % len(node_ranks) != self._world.rank:  # the node's ranks take turns
                continue
            try:
                copy_file(Checkpoint.open(Path(part.folder)), name, partial / name)
            except CheckpointError as error:
                _LOG.warning("%s", error)
                failed.append(node)
        return failed

    def _commit(self, step: int, chosen: Mapping[int, Holder]) -> bool:
        outcome = [""]
        if self._world.rank == 0:
            partial = self._folder / partial_folder(step)
            try:
                check_files(partial, self._manifest.files)
                write_manifest(partial, self._manifest, rank=0)
                publish(self._folder, step)
            except (OSError, CheckpointError) as error:
                outcome = [str(error)]
                _LOG.warning("step %d cannot be assembled in the run directory: %s", step, error)
            else:
                copies = [
                    f"{n} (on rank {rank}'s node)" for n, (rank, p) in chosen.items() if p.is_copy
                ]
                own = [str(n) for n, (_, p) in chosen.items() if not p.is_copy]
                _LOG.warning(
                    "step %d is assembled in the run directory from the own disks of nodes %s%s",
                    step, ", ".join(own) or "-",
                    f" and from copies of nodes {', '.join(copies)}" if copies else "",
                )  # fmt: skip
        dist.broadcast_object_list(outcome, src=0)
        return not outcome[0]


def _gathered(own: Any) -> list[Any]:
    """Return the objects of all ranks, in the order of the ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def _gathered_on_rank_0(own: Any) -> list[Any]:
    """Return the objects of all ranks on rank 0, and nothing on the other ranks."""
    is_first = dist.get_rank() == 0
    gathered: list[Any] | None = [None] * dist.get_world_size() if is_first else None
    dist.gather_object(own, gathered, dst=0)
    return gathered or []
