"""Owns the limits of one step: tokens over all phases, tokens of prompts and their time, sequences."""

from __future__ import annotations

NO_LIMIT = float("inf")


class TokenBudget:
    """What is left of a step. Everything that enters the step is taken from here."""

    __slots__ = ("prefill_seconds", "prefill_tokens", "sequences", "tokens")

    def __init__(self, tokens: int, prefill_tokens: int, sequences: int) -> None:
        self.tokens = tokens
        self.prefill_tokens = prefill_tokens
        self.prefill_seconds = NO_LIMIT
        """Below zero once prompts have taken more than there was, which only the first of them may."""
        self.sequences = sequences

    @property
    def for_prefill(self) -> int:
        """Tokens that a prompt may take now."""
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
        """A decode left the step before it was final: its sequence was preempted."""
        self.tokens += 1
        self.sequences += 1
