"""Parts of tools/bench_sharding.py: sharded training compared with other libraries.

The driver (the tool itself) starts one *worker* process for each library. A *turn* is one
contender's set of ranks, forked by its worker: it warms up, times some steps and ends. Turns of
all contenders alternate, so that what else the machine does falls on all of them; ranks do not
outlive their turn, so that one contender's memory is free for the next.
"""
