"""Philox4x32-10 against the known answers published with Random123, and the bits of (seed, position)."""

from __future__ import annotations

import numpy as np

from kernels.sampling import philox

# kat_vectors of Random123: counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(rows: list[str]) -> np.ndarray:
    return np.array([[int(word, 16) for word in row.split()] for row in rows], np.uint32)


def test_known_answers() -> None:
    counters, keys, outputs = (words([vector[i] for vector in KNOWN]) for i in range(3))
    assert np.array_equal(philox.philox4x32(counters, keys), outputs)


def test_seven_rounds_are_another_function() -> None:
    # The vectors also list 7 rounds; the number of rounds is not silently ignored.
    found = philox.philox4x32(np.zeros((1, 4), np.uint32), np.zeros((1, 2), np.uint32), rounds=7)
    assert np.array_equal(found, words(["5f6fb709 0d893f64 4f121f81 4f730a48"]))


def test_bits_use_all_of_seed_and_position_and_nothing_else() -> None:
    seeds = np.array([0, 1, 2**32, 0, 0, 2**64 - 1], np.uint64)
    positions = np.array([0, 0, 0, 1, 2**32, 2**64 - 1], np.uint64)
    together = philox.bits(seeds, positions)
    assert len(set(together.tolist())) == 6
    for i in range(6):
        assert philox.bits(seeds[i : i + 1], positions[i : i + 1])[0] == together[i]
    # Words 0 and 1 of the first known answer.
    assert together[0] == 0xE169C58D_6627E8D5


def test_bits_are_uniform() -> None:
    n = 200_000
    drawn = philox.bits(np.full(n, 7, np.uint64), np.arange(n, dtype=np.uint64))
    for shift in (0, 32):  # the high bits of each word
        unit = (drawn >> np.uint64(shift) & np.uint64(2**32 - 1)) / 2**32
        observed = np.bincount((unit * 100).astype(int), minlength=100)
        chi_square = ((observed - n / 100) ** 2 / (n / 100)).sum()
        assert chi_square < 160  # 99 degrees of freedom: 1 in 10,000 is above 161
        # Neighbouring positions are not related.
        assert abs(np.corrcoef(unit[:-1], unit[1:])[0, 1]) < 0.01
