"""Parts of benchmarks/bench_library.py: training loops with frontier_llm.library and with FSDP2.

llama.py builds the model, loops.py has the contenders, savers.py their checkpoints, turns.py what a
rank measures, and library_results.py the tables.
"""
