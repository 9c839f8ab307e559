"""Process groups of the grid, and the functions that let megatron-core run on a CPU."""
