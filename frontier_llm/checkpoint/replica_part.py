"""Divide the saving of states between the replicas that hold them."""

from collections.abc import Iterable, Iterator

from frontier_llm.protocols import StateShard


def part_of(shards: Iterable[StateShard], number: int, count: int) -> Iterator[StateShard]:
    """Yield one of `count` equal parts of a rank's states.

    Ranks of different replicas that hold the same states share the work: each saves one part.
    Shards that are not counted on this rank (`record.counted`) are saved by another rank and left
    out.
    """
    shards = [shard for shard in shards if shard.record.counted]
    total = sum(shard.elements for shard in shards)
    # the part is elements [first, stop), counted from the beginning of the current shard
    first, stop = total * number // count, total * (number + 1) // count
    for shard in shards:
        begin, end = max(first, 0), min(stop, shard.elements)
        if begin < end:
            states = {name: state[begin:end] for name, state in shard.states.items()}
            yield StateShard(shard.record, shard.start + begin, states)
        first, stop = first - shard.elements, stop - shard.elements
