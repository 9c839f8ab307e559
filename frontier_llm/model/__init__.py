"""Models made of megatron-core's modules: structure, initial weights and parameter records."""
