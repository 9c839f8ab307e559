"""Join the parts of a checkpoint that the disks of the nodes hold.

This is for starts at which ranks cannot read their states from the disk of their own node: a node
was lost, nodes have other numbers than before, or the layout has changed. A part of a lost node is
taken from the disk of the next node (`checkpoint.partner`) or is dispensable, because other nodes
hold the same states. Each rank reads files on the disk of its own node itself, and other files over
the network from a rank that sees them. If this fails, all undamaged files are copied to the run
directory, and any layout can read them there.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.folders import MANIFEST, partial_folder, step_folder
from frontier_llm.checkpoint.manifest import Manifest, SplitManifest
from frontier_llm.checkpoint.node_parts import (
    NodePart,
    copy_file,
    find_parts,
    first_incomplete,
    merge,
)
from frontier_llm.checkpoint.partner import own_address
from frontier_llm.checkpoint.peer_files import PeerServer
from frontier_llm.checkpoint.rank_objects import gathered, of_rank_0
from frontier_llm.checkpoint.save import check_files, publish, write_manifest
from frontier_llm.checkpoint.stored_ranges import Shape
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import CheckpointError
from frontier_llm.launch.world import World
from frontier_llm.saving.tiers import local_root, shared_folder

_LOG = logging.getLogger(__name__)
_SHARED = 2**31
"""Number of the run directory among the nodes: it comes last."""
Holder = tuple[int, NodePart]
"""The first rank of a node, and a part on its disk."""


class NodeAssembly:
    """Finds parts of nodes that together are a checkpoint. All ranks call its methods together.

    `incomplete_steps` are steps of which the disks hold parts that are not a whole checkpoint, as
    far as they were tried. `weights` are those of the checkpoint that was found last, by name.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        shapes: Mapping[str, Shape],
        names: Callable[[], Iterable[str]],
    ) -> None:
        self._world, self._shapes = world, shapes
        self._names = names  # tensors that this rank reads
        self.weights: Collection[str] = ()
        self._root, self._folder = local_root(config), shared_folder(config)
        self.incomplete_steps: list[int] = []
        self._server: PeerServer | None = None

    def find(self, after: int, shared: tuple[int, Path] | None = None) -> Checkpoint | None:
        """Return the newest step that the nodes' disks hold together, to be read where it lies.

        Only steps later than `after` are tried. `shared` is the step and folder of a checkpoint in
        the run directory: if the nodes hold no later step, but parts of this one, only the rest is
        read from there. The caller calls `close` when every rank has read the step.
        """
        for step, holders in self._steps(shared[0] - 1 if shared else after):
            chosen = _first_choice(holders)
            folder = shared[1] if shared and step == shared[0] else None
            plan = self._plan(chosen, folder)
            if plan is not None:
                return self._open(step, chosen, plan, folder)
            if step > after:
                self.incomplete_steps.append(step)
        return None

    def close(self) -> None:
        """Stop to serve files to the ranks of other nodes."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def assemble(self, step: int) -> Path | None:
        """Copy a step that the nodes' disks hold together to the run directory.

        Returns the new folder; None if no undamaged parts are a whole checkpoint.
        """
        for _, holders in self._steps(step - 1, step):
            if holders[0][1].moments:
                continue  # rounded moments are not copied to the run directory
            if self._assemble(step, holders):
                return self._folder / step_folder(step)
        return None

    def damage(self) -> dict[int, str]:
        """Return by step what is wrong with committed parts on the disks of all nodes."""
        return {step: text for found in gathered(self._look()[1]) for step, text in found.items()}

    def _look(self) -> tuple[list[NodePart], dict[int, str]]:
        """Return what is on this node's disk, on its first rank only."""
        is_first = self._world.rank == self._world.node_ranks.start
        return find_parts(self._root) if is_first and self._root else ([], {})

    def _steps(
        self, after: int, until: int | None = None
    ) -> Iterator[tuple[int, Sequence[Holder]]]:
        """Yield steps of which parts exist, the newest first, with all parts of the same start."""
        parts, _ = self._look()
        own = [p for p in parts if p.step > after and (until is None or p.step <= until)]
        holders = [(rank, part) for rank, parts in enumerate(gathered(own)) for part in parts]
        keys = sorted({(p.step, p.start, p.moments) for _, p in holders}, reverse=True)
        for key in keys:
            yield key[0], [h for h in holders if (h[1].step, h[1].start, h[1].moments) == key]

    def _open(
        self,
        step: int,
        chosen: Mapping[int, Holder],
        plan: Sequence[tuple[str, int]],
        shared: Path | None,
    ) -> Checkpoint:
        """Serve the files on this rank's disk, and return all files with their places."""
        plan = [(name, node) for name, node in plan if node != _SHARED]
        world = self._world
        split = of_rank_0(lambda: SplitManifest.of(self._manifest))
        self.weights, manifest = split.weights, split.part(self._names())
        folders = {name: Path(chosen[node][1].folder) for name, node in plan}
        served = {
            name: folders[name] / name for name, node in plan if chosen[node][0] == world.rank
        }
        self.close()
        if served and world.size > len(world.node_ranks):
            host = own_address(world.master_address)
            self._server = PeerServer(served.__getitem__, host)
        peers = gathered(self._server.peer if self._server else None)
        places = {
            name: folders[name] if chosen[node][0] in world.node_ranks else peers[chosen[node][0]]
            for name, node in plan
        }
        if world.rank == 0:
            rest = f"; the rest is in {shared}" if shared is not None else ""
            _LOG.warning("step %d is read %s%s", step, _describe(chosen), rest)
        return Checkpoint(shared or self._root or self._folder, manifest, places)

    def _assemble(self, step: int, holders: Sequence[Holder]) -> bool:
        left = list(holders)
        while left:
            chosen = _first_choice(left)
            plan = self._plan(chosen)
            if plan is None:
                return False
            failed = [node for nodes in gathered(self._copy(step, chosen, plan)) for node in nodes]
            if not failed:
                return of_rank_0(partial(self._publish, step, chosen))
            left = [h for h in left if h[1].node not in failed or h != chosen[h[1].node]]
        return False

    def _plan(
        self, chosen: Mapping[int, Holder], shared: Path | None = None
    ) -> Sequence[tuple[str, int]] | None:
        """Return (file, node) of each file; None if the parts are not a whole checkpoint.

        What the nodes do not hold comes from `shared`, the folder of the same step in the run
        directory.
        """
        own = {
            node: (Path(part.folder) / MANIFEST).read_bytes()
            for node, (rank, part) in chosen.items()
            if rank == self._world.rank
        }
        manifests = _gathered_on_rank_0(own)
        return of_rank_0(lambda: self._merge(manifests, chosen, shared))

    def _merge(
        self,
        manifests: Sequence[Mapping[int, bytes]],
        chosen: Mapping[int, Holder],
        shared: Path | None,
    ) -> Sequence[tuple[str, int]] | None:
        """Return the result of `_plan`, and keep the manifest for `_publish` and `_open`."""
        parts = {node: text for found in manifests for node, text in found.items()}
        try:
            read = {n: Manifest.parse(text, chosen[n][1].folder) for n, text in parts.items()}
            if shared is not None:
                read |= _rest_in(shared, chosen)
            self._manifest, node_of = merge(read)
            incomplete = first_incomplete(self._manifest, self._shapes)
        except CheckpointError as error:
            _LOG.warning("%s", error.reason)
            return None
        if incomplete is None:
            return sorted(node_of.items())
        _LOG.warning(
            "step %d on the disks of nodes %s is not used: %s is not complete",
            self._manifest.step, ", ".join(map(str, sorted(chosen))), incomplete,
        )  # fmt: skip
        return None

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
                _LOG.warning("%s", error.reason)
                failed.append(node)
        return failed

    def _publish(self, step: int, chosen: Mapping[int, Holder]) -> bool:
        partial = self._folder / partial_folder(step)
        try:
            check_files(partial, self._manifest.files)
            write_manifest(partial, self._manifest, rank=0)
            publish(self._folder, step)
        except (OSError, CheckpointError) as error:
            _LOG.warning("step %d cannot be assembled in the run directory: %s", step, error)
            return False
        _LOG.warning("step %d is assembled in the run directory %s", step, _describe(chosen))
        return True


def _rest_in(shared: Path, chosen: Mapping[int, Holder]) -> dict[int, Manifest]:
    """Return the manifest in the run directory, as that of a last node, or raise if unusable."""
    manifest = Checkpoint.open(shared).manifest
    start = manifest.meta.get("start")
    if any(part.start != str(start) or part.moments for _, part in chosen.values()):
        raise CheckpointError(f"the disks of the nodes hold another step than {shared}")
    return {_SHARED: manifest}


def _first_choice(holders: Sequence[Holder]) -> dict[int, Holder]:
    """Return a holder for each node: its own disk first, and of several readers the lowest rank."""
    chosen: dict[int, Holder] = {}
    for holder in sorted(holders, key=lambda h: (h[1], h[0])):
        chosen.setdefault(holder[1].node, holder)
    return chosen


def _describe(chosen: Mapping[int, Holder]) -> str:
    copies = [f"{n} (on rank {rank}'s node)" for n, (rank, p) in chosen.items() if p.is_copy]
    own = [str(n) for n, (_, p) in chosen.items() if not p.is_copy]
    text = f"from the own disks of nodes {', '.join(own) or '-'}"
    return text + (f" and from copies of nodes {', '.join(copies)}" if copies else "")


def _gathered_on_rank_0(own: Any) -> list[Any]:
    is_first = dist.get_rank() == 0
    gathered: list[Any] | None = [None] * dist.get_world_size() if is_first else None
    dist.gather_object(own, gathered, dst=0)
    return gathered or []
