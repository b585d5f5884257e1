"""The patches of Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ops.triton.interpreter import product


@pytest.mark.parametrize("length", [1, 4, 16, 64, 256])
def test_an_element_of_a_product_has_the_same_bits_in_every_shape_position_and_layout(length: int) -> None:
    chance = np.random.default_rng(length)
    left = chance.standard_normal((33, length), np.float32)
    right = chance.standard_normal((length, 17), np.float32)
    whole = product(left, right)
    assert whole.dtype == np.float32
    np.testing.assert_allclose(whole, left.astype(np.float64) @ right, rtol=0, atol=1e-4)
    for rows, columns in [(1, 1), (1, 17), (33, 1), (16, 8), (5, 3)]:
        for row, column in [(0, 0), (33 - rows, 17 - columns), ((33 - rows) // 2, (17 - columns) // 2)]:
            some = np.s_[row : row + rows], np.s_[column : column + columns]
            part = product(np.asfortranarray(left[some[0]]), np.asfortranarray(right[:, some[1]]))
            assert np.array_equal(part, whole[some])


def test_the_summation_order_of_a_product_depends_on_its_length() -> None:
    """Otherwise tests that two kernels give the same bits would pass with tiles of different sizes."""
    chance = np.random.default_rng(0)
    left, right = chance.standard_normal((8, 64), np.float32), chance.standard_normal((64, 8), np.float32)
    halves = product(left[:, :32], right[:32]) + product(left[:, 32:], right[32:])
    assert not np.array_equal(product(left, right), halves)
