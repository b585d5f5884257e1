"""Swaps of the CPU backend: the order of copies, failed swaps, and that each swap is reported once."""

from __future__ import annotations

import numpy as np
import pytest

from weft.backends.cpu.swap import HostSwap
from weft.plan import IterationPlan, SwapTask
from weft.request import RequestId


def task(
    swap_id: int, blocks: tuple[int, ...], slots: tuple[int, ...], step: int = 0, after: tuple[int, ...] = ()
) -> SwapTask:
    return SwapTask(swap_id, RequestId("1"), blocks, slots, step, after)


def plan(out: tuple[SwapTask, ...] = (), back: tuple[SwapTask, ...] = ()) -> IterationPlan:
    return IterationPlan(1, 0, (), (), (), (), (), swap_out=out, swap_in=back)


@pytest.fixture
def cache() -> np.ndarray:
    return np.arange(4 * 6, dtype=np.float32).reshape(4, 1, 2, 1, 1, 3)


def test_blocks_are_swapped_in_unchanged_to_other_blocks(cache: np.ndarray) -> None:
    original = cache.copy()
    space = HostSwap(cache, 3)
    space.accept(plan(out=(task(0, (3, 1), (2, 0)),)))
    space.run_ready(0)
    cache[:] = -1
    space.accept(plan(back=(task(1, (0, 2), (2, 0), after=(0,)),)))
    space.run_ready(0)
    np.testing.assert_array_equal(cache[[0, 2]], original[[3, 1]])
    assert space.take_reports() == ((0, 1), {})
    assert space.take_reports() == ((), {})


def test_blocks_of_both_tiers_are_swapped_in_from_the_slots_of_their_tier(cache: np.ndarray) -> None:
    """Blocks 4 to 6 and slots 2 and 3 belong to the store."""
    store = np.arange(3 * 5, dtype=np.uint8).reshape(3, 5)
    original, original_store = cache.copy(), store.copy()
    space = HostSwap(cache, 2, store, 2)
    space.accept(plan(out=(task(0, (6, 3, 4), (2, 1, 3)),)))
    space.run_ready(0)
    cache[:], store[:] = -1, 99
    space.accept(plan(back=(task(1, (5, 0, 6), (2, 1, 3), after=(0,)),)))
    space.run_ready(0)
    np.testing.assert_array_equal(cache[0], original[3])
    np.testing.assert_array_equal(store[[1, 2]], original_store[[2, 0]])
    assert (cache[1:] == -1).all() and (store[0] == 99).all()
    assert space.take_reports() == ((0, 1), {})


def test_a_block_and_a_slot_of_different_tiers_fail_and_copy_nothing(cache: np.ndarray) -> None:
    space = HostSwap(cache, 2, np.zeros((3, 5), np.uint8), 2)
    space.accept(plan(out=(task(0, (1, 4), (2, 3)),)))
    space.run_ready(0)
    assert space.take_reports() == ((), {0: "a block and its slot are of different tiers"})


def test_a_swap_waits_for_the_step_and_the_swaps_it_depends_on(cache: np.ndarray) -> None:
    space = HostSwap(cache, 2)
    # Accepted in the wrong order: swap 5 reads the slot that swap 4 writes, and swap 4 waits for step 7.
    space.accept(plan(back=(task(5, (2,), (0,), step=0, after=(4,)),)))
    space.accept(plan(out=(task(4, (1,), (0,), step=7),)))
    space.run_ready(6)
    assert space.take_reports() == ((), {})
    with pytest.raises(RuntimeError, match="some of them wait for a later step"):
        space.check_ended((4,))
    cache[1] = 99
    space.run_ready(7)
    assert space.take_reports() == ((4, 5), {})
    space.check_ended((4, 5))
    assert (cache[2] == 99).all()


def test_a_swap_that_depends_on_a_failed_or_unknown_swap_fails_and_copies_nothing(cache: np.ndarray) -> None:
    original = cache.copy()
    space = HostSwap(cache, 2)
    space.accept(
        plan(
            out=(task(0, (1,), (9,)),),
            back=(task(1, (2,), (0,), after=(0,)), task(2, (3,), (1,), after=(77,))),
        )
    )
    space.run_ready(0)
    finished, failed = space.take_reports()
    assert finished == () and set(failed) == {0, 1, 2}
    assert "IndexError" in failed[0] and "swap 0" in failed[1] and "swap 77" in failed[2]
    np.testing.assert_array_equal(cache, original)
