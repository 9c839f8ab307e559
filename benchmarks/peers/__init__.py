"""Parts of benchmarks/bench_sharding.py: sharded training compared with other libraries.

A *contender* is a library with its settings. bench_sharding.py starts one *worker* process for each
library. In a *turn* a worker forks the ranks of one contender, which warm up, time some steps and
end. Ranks end with their turn, so that their memory is free for the next contender.

preprocess_peers.py belongs to bench_preprocess.py, plain_gpt.py also to bench_step.py.
"""
