"""The contenders of bench_sharding.py by name; the other modules of this package build them.

A contender is one way to train the same model on the same ranks: a library with its settings.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

from frontier_llm.cli.compose import groups
from frontier_llm.errors import ConfigError

BuilderModule = Literal["ours", "cut_peer", "torch_peers", "deepspeed_peer"]
"""Module of benchmarks/peers that builds a contender. It is imported before the ranks are
forked."""


@dataclass(frozen=True)
class SpeedPeer:
    """A library and its settings, as a way to train."""

    name: str
    """Name on the command line and in tables."""
    builder: BuilderModule
    ranks_multiple: int = 1
    """The number of ranks must be a multiple of this."""

    def fits(self, ranks: int) -> bool:
        """Return whether the contender can run on this number of ranks."""
        return ranks % self.ranks_multiple == 0


OUR_FACTORS: dict[str, tuple[str, str, str]] = {
    "ours-replicated": ("1", "1", "1"),
    "ours-zero1": ("1", "1", "all"),
    "ours-zero2": ("1", "all", "all"),
    "ours-zero3": ("all", "all", "all"),
    "ours-mics": ("2", "2", "2"),
    "ours-1-2-4": ("1", "2", "4"),
    "ours-zeropp": ("node", "all", "all"),
    "ours-levels": ("package", "node", "all"),
}
"""Values of sharding.params, sharding.grads and sharding.optimizer: the numbers of ranks over which
each state is sharded. The name `ours-P-G-O` stands for any other values P, G and O. A preset of
`collectives=` may follow a name: `ours-zero3+zeropp`, `ours-levels+levels`."""
PRESETS = tuple(groups()["collectives"])
"""Presets of `collectives=`: the formats in which states are sent."""
PEERS = tuple(SpeedPeer(name, "torch_peers") for name in ("ddp", "fsdp", "fsdp-keep"))
"""DistributedDataParallel (bf16: autocast), and FSDP2, whose parameters are resharded after the
forward pass or not."""
CUTS = tuple(
    SpeedPeer(f"context-{cut}", "cut_peer", 2) for cut in ("documents", "zigzag", "gather", "heads")
)
"""Context ranks that cut samples of --sequence tokens per rank (see cut_peer.py)."""
DEEPSPEED = tuple(SpeedPeer(f"deepspeed-zero{stage}", "deepspeed_peer") for stage in (1, 2, 3))
BY_DEFAULT = (
    *(name for name in OUR_FACTORS if name not in ("ours-zeropp", "ours-levels")),
    *(peer.name for peer in PEERS),
)


def find(name: str) -> SpeedPeer:
    """Return the contender with this name.

    Raises:
        ConfigError: there is no such contender.
    """
    for contender in (*PEERS, *DEEPSPEED, *CUTS):
        if contender.name == name:
            return contender
    sizes = [int(factor) for factor in factors_of(name) if factor.isdigit()]
    # ours-mics needs 4 ranks: on 2 ranks it would be the same as zero3
    multiple = 4 if name == "ours-mics" else math.lcm(1, *sizes)
    return SpeedPeer(name, "ours", multiple)


def formats_of(name: str) -> str:
    """Return the preset of `collectives=` in the name of a contender; `plain` if there is none."""
    return name.partition("+")[2] or "plain"


def factors_of(name: str) -> tuple[str, str, str]:
    """Return sharding.params, .grads and .optimizer of a contender of this project.

    Raises:
        ConfigError: the name is not that of such a contender.
    """
    base, plus, preset = name.partition("+")
    has_valid_preset = not plus or preset in PRESETS
    if base in OUR_FACTORS and has_valid_preset:
        return OUR_FACTORS[base]
    factor = r"([1-9]\d*|package|node|all)"
    match = re.fullmatch(f"ours-{factor}-{factor}-{factor}", base) if has_valid_preset else None
    if match is None:
        others = (peer.name for peer in (*PEERS, *DEEPSPEED, *CUTS))
        known = ", ".join([*OUR_FACTORS, "ours-P-G-O", "ours-...+PRESET", *others])
        raise ConfigError("--contenders", name, f"one of {known}", "choose one of these")
    return match[1], match[2], match[3]
