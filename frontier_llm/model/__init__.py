"""Models out of megatron-core's parts: what they are made of, how they start, what they hold."""
