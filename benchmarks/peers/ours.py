"""frontier_llm as a contender of bench_sharding.py and its peers."""

from collections.abc import Sequence

import torch

from benchmarks.peers.contenders import factors_of, formats_of
from benchmarks.peers.turn import ADAMW, CLIP_NORM, MicroBatch, Peer, Turn
from benchmarks.testbed.bare_steps import CPU, prepare_cpu
from frontier_llm.cli.compose import compose
from frontier_llm.config import decode
from frontier_llm.data.batch import Batch
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.geometry.wire import Sent
from frontier_llm.parallel.groups import make_groups
from frontier_llm.trainer.states import bare_step


def make(turn: Turn, rank: int) -> "Ours":
    """Build one rank of the contender. Collective over all ranks."""
    return Ours(turn)


def overrides(turn: Turn) -> list[str]:
    """Return the configuration of a turn as overrides of train.py."""
    params, grads, optimizer = factors_of(turn.contender)
    return [
        *turn.shape.overrides(),
        f"data.micro_batch={turn.samples}",
        f"data.global_batch={turn.samples * turn.micro_batches * turn.ranks}",
        "parallel.pipeline=1",
        f"precision={turn.precision}",
        f"sharding.params={params}",
        f"sharding.grads={grads}",
        f"sharding.optimizer={optimizer}",
        *_formats(turn),
        *_links(turn),
        f"optimizer.beta1={ADAMW['betas'][0]}",
        f"optimizer.beta2={ADAMW['betas'][1]}",
        f"optimizer.epsilon={ADAMW['eps']}",
        f"optimizer.weight_decay={ADAMW['weight_decay']}",
        f"optimizer.clip_norm={CLIP_NORM}",
    ]


def _links(turn: Turn) -> list[str]:
    """Return the override that names the levels of links, if the simulated nodes have packages.

    A run needs only the numbers of ranks; the speeds are for the planner.
    """
    if turn.ranks_per_package == 1:
        return []
    levels = {"package": turn.ranks_per_package, "node": turn.ranks_per_node, "network": "null"}
    rest = "latency_us: 100, gb_per_second: 1, efficiency: 1, source: simulated"
    links = (f"{{name: {name}, ranks: {ranks}, {rest}}}" for name, ranks in levels.items())
    return [f"cluster.links=[{', '.join(links)}]"]


def _formats(turn: Turn) -> list[str]:
    """Return the overrides that choose the formats in which states are sent.

    Without a preset of `collectives`, gradients are sent in the format of the computation, as the
    other contenders do.
    """
    preset = formats_of(turn.contender)
    if preset == "plain":
        return [f"collectives.grads_format={turn.precision}"]
    return [f"collectives={preset}"]


class Ours(Peer):
    """One rank of frontier_llm."""

    def __init__(self, turn: Turn, words: Sequence[str] = ()) -> None:
        prepare_cpu()
        config = decode(compose(list(words) or overrides(turn)))
        layout = ResolvedLayout.resolve(
            config, turn.ranks, turn.ranks_per_node, precision=turn.precision
        )
        groups = make_groups(layout.grid, layout.head_stage)
        model, self._step = bare_step(config, layout, groups, CPU)
        self.parameters = sum(record.parameter.numel() for record in model.records)
        self._ranks, self._has_packages = turn.ranks, turn.ranks_per_package > 1
        self._counted_bytes = 0.0

    def step(self, batches: list[MicroBatch]) -> float:
        """Run one step; return the mean loss over all ranks."""
        return self._run([
            Batch(tokens, labels, torch.arange(tokens.shape[1]).expand_as(tokens))
            for tokens, labels in batches
        ])  # fmt: skip

    def _run(self, batches: list[Batch]) -> float:
        result = self._step.run(1, batches, ADAMW["lr"])
        sent = sum(result.sent.values(), Sent())
        within_node = sent.node if self._has_packages else 0.0
        self._counted_bytes += (sent.network + within_node) / self._ranks
        return result.loss

    def counted_bytes(self) -> float | None:
        """Return the bytes per rank sent over network interfaces since the last call.

        They are averaged over ranks. With packages, each has an interface; otherwise each node.
        """
        counted, self._counted_bytes = self._counted_bytes, 0.0
        return counted
