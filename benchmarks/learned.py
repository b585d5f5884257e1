"""`python -m benchmarks learned`: how much faster a stream becomes with draft tokens from finished answers.

Two engines run the same model, one of them keeps no answers. They answer every request of a trace in turn, since the
speed of a shared machine changes from minute to minute. Only the time after the first token counts. Both engines must
give the same answers, token for token. The traces are generated: nothing has to be downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.bench.report import Check, machine, print_checks, print_json, print_line, print_table
from weft.llm import LLM
from weft.request import GenerationResult, SamplingParams

Messages = list[dict[str, Any]]

MAX_TOKENS = 160
PARTS = 4
RELATED_BAR, UNRELATED_BAR = 1.6, 0.98

_NAMES = ("Anna", "Ben", "Carla", "David", "Elena", "Frank", "Gina", "Hans", "Iris", "Jack", "Kim")
_GOODS = ("lamp", "chair", "kettle", "bicycle", "backpack", "clock", "radio", "blanket", "teapot", "camera")
_PLACES = ("river", "mountain", "harbour", "train", "garden", "winter", "market", "doctor", "island")
_FILE = """\
class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance
"""
_EDITS = (
    *(
        "Add a docstring to each method.",
        "Rename owner to holder.",
        "Add type hints.",
        "Add a method transfer.",
    ),
    *("Add a currency field.", "Log each deposit.", "Refuse negative amounts.", "Add __repr__."),
)
_COMMANDS = ("ls", "pwd", "cat notes.txt", "git status", "make test", "df -h", "whoami", "date")


def _pick(values: tuple[str, ...], number: int, step: int) -> str:
    return values[number * step % len(values)]


def _templated(number: int) -> Messages:
    """A request for a letter. All requests name the same form of letter."""
    good, name = _pick(_GOODS, number, 1), _pick(_NAMES, number, 7)
    form = "greeting, thanks, order details, delivery time of 3 days, return policy of 30 days, closing"
    return _asked(f"Write a short email that confirms the order of a {good} to {name}. Use the form: {form}.")


def _editing(number: int) -> Messages:
    """A request to edit a file. All requests edit the same file."""
    edit = f"{_pick(_EDITS, number, 3)} Version {number // len(_EDITS)}."
    return _asked(f"Here is a file:\n```python\n{_FILE}```\n{edit} Print the whole new file.")


def _agent(number: int) -> Messages:
    """Turns of an agent that explains one command after another, with its history."""
    messages: Messages = [{"role": "system", "content": "You are an agent that works in a shell."}]
    for turn in range(number % 3):
        command = _pick(_COMMANDS, number + turn, 5)
        messages += [
            {"role": "user", "content": f"Explain the command `{command}` and what to do next."},
            {"role": "assistant", "content": f"I ran `{command}`. It ended with exit code 0."},
        ]
    command = _pick(_COMMANDS, number, 3)
    return [*messages, {"role": "user", "content": f"Explain the command `{command}` and what to do next."}]


def _unrelated(number: int) -> Messages:
    place, good = _pick(_PLACES, number, 2), _pick(_GOODS, number, 3)
    return _asked(f"Tell me fact number {number} about a {place} and a {good}.")


def _asked(text: str) -> Messages:
    return [{"role": "user", "content": text}]


TRACES: dict[str, tuple[Callable[[int], Messages], float]] = {
    "templated answers": (_templated, 0.0),
    "edits of one file": (_editing, 0.0),
    "turns of an agent": (_agent, 0.0),
    "unrelated, temperature 0.8": (_unrelated, 0.8),
}
"""Requests by number, and the temperature."""


@dataclass(frozen=True)
class Part:
    """The figures of one quarter of a trace."""

    trace: str
    first: int
    tokens: int
    seconds_without: float
    seconds_with: float
    learned_drafts: int
    learned_drafts_accepted: int
    is_same: bool

    @property
    def ratio(self) -> float:
        return self.seconds_without / self.seconds_with


def main(model: str = "default", requests: int = 200, json: bool = False) -> bool:
    """Measures and prints. False if an answer differs."""
    parts = [part for trace in TRACES for part in measure(model, trace, requests)]
    is_same = all(part.is_same for part in parts)
    checks = [Check("answers", "the same" if is_same else "some differ", "token for token", is_same)]
    for part in parts[PARTS - 1 :: PARTS]:
        bar = UNRELATED_BAR if part.trace.startswith("unrelated") else RELATED_BAR
        measured = f"{part.ratio:.2f} times"
        checks.append(Check(f"last quarter: {part.trace}", measured, f"{bar} times", part.ratio >= bar))
    if json:
        print_json({"machine": machine(), "parts": parts, "checks": checks})
        return is_same
    print_table(
        f"One stream without and with drafts from finished answers, tokens/s after the first ({requests} requests)",
        ("trace", "from request", "tokens", "without", "with", "ratio", "learned drafts", "accepted"),
        [_row(part) for part in parts],
    )
    print_checks(checks)
    print_line(machine())
    return is_same


def measure(model: str, trace: str, requests: int) -> list[Part]:
    make, temperature = TRACES[trace]
    parts = []
    with LLM(model) as with_answers, LLM(model, max_learned_bytes=0) as without:
        stats = with_answers.engine.scheduler.stats
        for first in range(0, requests, -(-requests // PARTS)):
            seconds, tokens, is_same = {with_answers: 0.0, without: 0.0}, 0, True
            drafts, accepted = stats.learned_drafts, stats.learned_drafts_accepted
            for number in range(first, min(requests, first + -(-requests // PARTS))):
                answers: dict[LLM, GenerationResult] = {}
                params = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=number)
                for llm in (with_answers, without) if number % 2 else (without, with_answers):
                    answers[llm] = llm.chat(make(number), params)
                    seconds[llm] += answers[llm].decode_time
                tokens += answers[with_answers].decode_steps
                is_same = is_same and answers[with_answers].tokens == answers[without].tokens
            parts.append(
                Part(
                    trace,
                    first,
                    tokens,
                    seconds[without],
                    seconds[with_answers],
                    stats.learned_drafts - drafts,
                    stats.learned_drafts_accepted - accepted,
                    is_same,
                )
            )
    return parts


def _row(part: Part) -> tuple[str, ...]:
    return (
        part.trace,
        str(part.first),
        f"{part.tokens:,}",
        f"{part.tokens / part.seconds_without:.0f}",
        f"{part.tokens / part.seconds_with:.0f}",
        f"{part.ratio:.2f}",
        f"{part.learned_drafts:,}",
        f"{part.learned_drafts_accepted / max(1, part.learned_drafts):.0%}",
    )
