"""The simulation notices planted mistakes: a suite that lets one through is not a proof of anything."""

from __future__ import annotations

import pytest
from mutations import MUTATIONS, TIER_MUTATIONS, Mutation, planted

from weft.simulation.check import SimulationFailed, check

MOST_SCENARIOS = 10_000


@pytest.mark.parametrize("mutation", MUTATIONS + TIER_MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_simulation_notices(mutation: Mutation) -> None:
    with planted(mutation), pytest.raises(SimulationFailed):
        check(MOST_SCENARIOS, mutation.first_seed)


def test_a_mutation_whose_text_is_gone_fails_loudly() -> None:
    gone = Mutation("gone", "weft.scheduling.cache.block_pool:root_key", "no such text", "")
    with pytest.raises(LookupError, match="no longer"), planted(gone):
        pass
