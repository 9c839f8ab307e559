"""What the ranks of benchmarks/bench_pipeline.py run and measure."""
