"""Parts of benchmarks/bench_library.py: training loops with frontier_llm.library and FSDP2."""
