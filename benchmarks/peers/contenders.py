"""The contenders of bench_sharding.py by name; workers build them."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from frontier_llm.errors import ConfigError

Worker = Literal["ours", "torch_peers", "deepspeed_peer"]
"""Module of benchmarks/peers that builds a contender; a worker imports it and forks the ranks."""


@dataclass(frozen=True)
class Contender:
    """One way to train the same model on the same ranks."""

    name: str
    """Name on the command line and in tables."""
    description: str
    worker: Worker
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
}
"""Values of sharding.params, .grads and .optimizer. The name `ours-P-G-O` gives any other values. A
preset of `collectives=` may follow a name: `ours-zero3+zeropp`, `ours-zeropp+zeropp`."""
PRESETS = ("plain", "zeropp", "zeropp_feedback")
PEERS = (
    Contender("ddp", "torch DistributedDataParallel (bf16: autocast)", "torch_peers"),
    Contender("fsdp", "torch FSDP2, parameters resharded after the forward pass", "torch_peers"),
    Contender("fsdp-keep", "torch FSDP2, reshard_after_forward=False", "torch_peers"),
)
DEEPSPEED = tuple(
    Contender(f"deepspeed-zero{stage}", f"DeepSpeed ZeRO-{stage}", "deepspeed_peer")
    for stage in (1, 2, 3)
)
BY_DEFAULT = (
    *(name for name in OUR_FACTORS if name != "ours-zeropp"),
    *(peer.name for peer in PEERS),
)


def find(name: str) -> Contender:
    """Return the contender with this name.

    Raises:
        ConfigError: there is no such contender.
    """
    for contender in (*PEERS, *DEEPSPEED):
        if contender.name == name:
            return contender
    factors, formats = factors_of(name), formats_of(name)
    sizes = [int(factor) for factor in factors if factor.isdigit()]
    # on 2 ranks factors of 2 equal zero3
    multiple = 4 if name == "ours-mics" else math.lcm(1, *sizes)
    description = f"ours, states sharded over {' / '.join(factors)} ranks, collectives={formats}"
    return Contender(name, description, "ours", multiple)


def formats_of(name: str) -> str:
    """Return the preset of `collectives=` in the name of a contender; `plain` if there is none."""
    return name.partition("+")[2] or "plain"


def factors_of(name: str) -> tuple[str, str, str]:
    """Return sharding.params, .grads and .optimizer of a contender of this project.

    Raises:
        ConfigError: the name is not that of such a contender.
    """
    factors, plus, preset = name.partition("+")
    known_preset = not plus or preset in PRESETS
    if factors in OUR_FACTORS and known_preset:
        return OUR_FACTORS[factors]
    factor = r"([1-9]\d*|node|all)"
    match = re.fullmatch(f"ours-{factor}-{factor}-{factor}", factors) if known_preset else None
    if match is None:
        known = [
            *OUR_FACTORS,
            "ours-P-G-O",
            "ours-...+PRESET",
            *(peer.name for peer in (*PEERS, *DEEPSPEED)),
        ]
        raise ConfigError("--contenders", name, "one of " + ", ".join(known), "choose one of these")
    return match[1], match[2], match[3]
