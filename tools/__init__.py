"""Commands beside training, and the composition of the configuration (the door to hydra)."""
