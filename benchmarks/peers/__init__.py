"""Parts of benchmarks/bench_sharding.py: sharded training compared with other libraries.

The driver is bench_sharding.py. It starts one *worker* process for each library. In a *turn* a
worker forks the ranks of one contender, which warm up, time some steps and end. The contenders take
turns, so that other load on the machine affects all of them alike. Ranks end with their turn, so
that their memory is free for the next contender.
"""
