"""The byte budget of answers: the bytes of a request are released exactly once."""

from __future__ import annotations

import pytest

from weft.server.errors import ApiError
from weft.server.http.byte_budget import ByteBudget, RequestBytes, answer_budget_error

KIB = 1 << 10


def test_bytes_that_arrive_after_the_end_of_a_request_are_not_counted() -> None:
    budget = ByteBudget(1 << 20, 2 << 20, answer_budget_error)
    for _ in range(100):
        request_bytes = RequestBytes(budget)
        request_bytes.add(200 * KIB)
        request_bytes.release()
        assert request_bytes.try_add(300 * KIB) is None, "late outputs of a cancelled answer are not an error"
    assert budget.num_bytes == 0


def test_one_request_and_all_together_have_a_limit() -> None:
    budget = ByteBudget(1 << 20, 2 << 20, answer_budget_error)
    requests = [RequestBytes(budget) for _ in range(3)]
    with pytest.raises(ApiError):
        requests[0].add((1 << 20) + 1)
    for request_bytes in requests[:2]:
        request_bytes.add(1 << 20)
    with pytest.raises(ApiError):
        requests[2].add(1 << 20)
    requests[0].release()
    requests[2].add(1 << 20)
