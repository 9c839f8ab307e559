"""Seeds of stochastic rounding: another one for each encoded part of each step and rank."""

from frontier_llm.collectives.blockwise import PART_SEED_STRIDE

_STEP_STRIDE, _RANK_STRIDE = 0x9E3779B1, 0x85EBCA77
"""Odd numbers, so that the seeds of neighbouring steps and ranks lie far apart."""


class RoundingSeeds:
    """The seeds of one rank."""

    def __init__(self, seed: int) -> None:
        """Begin in step 1; `seed` must differ between ranks."""
        self._seed, self._step, self._parts = seed, 1, 0

    def begin_step(self, step: int) -> None:
        """Begin another step."""
        self._step, self._parts = step, 0

    def take(self, parts: int) -> int:
        """Return the seed of the next part, and count that many parts as encoded.

        The seeds of the parts lie PART_SEED_STRIDE apart (`BlockKernels.quantise`).
        """
        part = self._parts + 1
        self._parts += parts
        mixed = self._step * _STEP_STRIDE + self._seed * _RANK_STRIDE + part * PART_SEED_STRIDE
        return mixed & 0xFFFFFFFF
