"""Compute pseudo-random permutations and numbers from a key.

No table is stored, any element can be computed alone, and all ranks get the same values. The order
of samples, the blend of corpora and the choice of spans are computed in this way.

A permutation is a Feistel network. It halves the bits of a number and is a bijection for any round
function, so it permutes a range whose length is a power of four. For another length, the network
for the next power of four is used. It is applied again and again until the result lies in the range
(cycle walking), which takes at most four applications on average.

Paper: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, methods 2 and 3.
"""

import hashlib

import numpy as np
import numpy.typing as npt

ROUNDS = 6
_WORD = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Increment and multipliers of splitmix64 (Steele et al., OOPSLA 2014)."""


def make_key(*parts: object) -> int:
    """Return a 64-bit key that depends on all parts and on their order."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def permute(index: int, length: int, key: int) -> int:
    """Return the image of an index under the permutation of range(length) that a key selects."""
    assert 0 <= index < length, f"index {index} outside range({length})"
    half_bits = ((length - 1).bit_length() + 1) // 2
    image = _feistel(index, half_bits, key)
    while image >= length:
        image = _feistel(image, half_bits, key)
    return image


def random_uint64(count: int, key: int) -> npt.NDArray[np.uint64]:
    """Return pseudo-random numbers that depend only on the key: [count] uint64.

    They are computed by integer operations alone, not by NumPy's generators, so that they are the
    same in every version of NumPy.
    """
    value = np.arange(count, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key & _WORD)
    value = (value ^ value >> np.uint64(30)) * np.uint64(_FIRST)
    value = (value ^ value >> np.uint64(27)) * np.uint64(_SECOND)
    return value ^ value >> np.uint64(31)


def _feistel(value: int, half_bits: int, key: int) -> int:
    """Permute the numbers of 2 * half_bits bits by a Feistel network."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_number in range(ROUNDS):
        left, right = right, left ^ (_mix(key + (round_number << 58) ^ _mix(right)) & mask)
    return left << half_bits | right


def _mix(value: int) -> int:
    """Hash 64 bits to 64 bits by the finaliser of splitmix64."""
    value = (value + _GOLDEN) & _WORD
    value = (value ^ value >> 30) * _FIRST & _WORD
    value = (value ^ value >> 27) * _SECOND & _WORD
    return value ^ value >> 31
