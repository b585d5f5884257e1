"""Owns the limits of one step: sequences, tokens, and the tokens and seconds for prompts."""

from __future__ import annotations

NO_LIMIT = float("inf")


class TokenBudget:
    """What is left of a step's limits while its plan is built. Each entry that is added to the plan reduces it."""

    __slots__ = ("prefill_seconds", "prefill_tokens", "seconds", "sequences", "tokens")

    def __init__(self, tokens: int, prefill_tokens: int, sequences: int) -> None:
        self.tokens = tokens
        self.prefill_tokens = prefill_tokens
        self.prefill_seconds = NO_LIMIT
        """Seconds left for prompts. Negative if the first prompt of a step took more than were left. Then no other prompt
        is added."""
        self.sequences = sequences
        self.seconds = NO_LIMIT
        """Predicted seconds that the whole step may take. Only steps of idle work have less than ADAPTIVE's time target."""

    @property
    def for_prefill(self) -> int:
        """Tokens that the next prompt may take."""
        return min(self.tokens, self.prefill_tokens) if self.sequences and self.prefill_seconds >= 0 else 0

    def take_decodes(self, count: int) -> None:
        self.tokens -= count
        self.sequences -= count

    def take_prefill(self, tokens: int, seconds: float = 0.0) -> None:
        self.tokens -= tokens
        self.prefill_tokens -= tokens
        self.prefill_seconds -= seconds
        self.sequences -= 1

    def give_back_decode(self) -> None:
        """Undoes `take_decodes` for one sequence that was removed from the plan."""
        self.tokens += 1
        self.sequences += 1
