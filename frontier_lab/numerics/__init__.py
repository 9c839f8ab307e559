"""Compare every kernel of a run with references in fp64 (frontier-llm doctor --numerics)."""
