"""The simulation detects every mutation of the scheduler."""

from __future__ import annotations

import pytest
from mutations import MUTATIONS, TIER_MUTATIONS, Mutation, applied

from weft.simulation.check import SimulationFailed, check

MAX_SCENARIOS = 10_000


@pytest.mark.parametrize("mutation", MUTATIONS + TIER_MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_simulation_detects(mutation: Mutation) -> None:
    with applied(mutation), pytest.raises(SimulationFailed):
        check(MAX_SCENARIOS, mutation.first_seed)


def test_a_mutation_whose_text_is_gone_fails_loudly() -> None:
    gone = Mutation("gone", "weft.scheduling.cache.block_pool:root_hash", "no such text", "")
    with pytest.raises(LookupError, match="no longer"), applied(gone):
        pass
