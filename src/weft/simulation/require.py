"""`require`: the assertion of the invariant checks."""


class InvariantError(AssertionError):
    """An invariant is violated."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)
