"""How a check says that something does not hold."""


class InvariantError(AssertionError):
    """Something that must always hold does not."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)
