"""Traces for `python -m benchmarks learned`: requests whose answers resemble earlier ones, and unrelated requests.

A trace is a function of the number of a request and of the earlier requests and answers of its stream. So edits build on
the file that the model wrote, and an agent has its own earlier answers in its history. No request of a trace occurs twice.
Nothing has to be downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]
Earlier = Sequence[tuple[int, str]]
"""The requests of a stream so far: their numbers, and the model's answers."""

EDITS_OF_A_FILE = 6
"""After this many edits a stream begins again with the first version of the file."""
LONGEST_FILE = 1200
"""Maximum characters of a file. A stream whose file is longer begins again with the first version."""
TURNS_OF_AN_AGENT = 4

_NAMES = ("Anna", "Ben", "Carla", "David", "Elena", "Frank", "Gina", "Hans", "Iris", "Jack", "Kim")
_GOODS = ("lamp", "chair", "kettle", "bicycle", "backpack", "clock", "radio", "blanket", "teapot", "camera")
_COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown")
_PLACES = ("river", "mountain", "harbour", "train", "garden", "winter", "market", "doctor", "island")
_TOPICS = ("the history of", "a poem about", "a riddle about", "an argument against", "a dream about")
_VERBS = ("print", "count", "reset", "export", "check", "lock", "merge", "audit")
_NOUNS = (
    *("balance", "history", "owner", "limit", "interest", "fees", "currency", "statement", "transfers"),
    *("deposits", "withdrawals", "address", "rating", "branch", "cards", "alerts", "taxes", "notes"),
    *("contacts", "budget", "goals", "loans", "rewards", "tokens", "access"),
)
_MODULES = (
    "parser",
    "cache",
    "router",
    "search",
    "billing",
    "login",
    "export",
    "mailer",
    "report",
    "upload",
    "queue",
)
_ERRORS = ("KeyError", "TypeError", "ValueError", "IndexError", "TimeoutError", "AttributeError", "OSError")
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
_CODE = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Trace:
    name: str
    request: Callable[[int, Earlier], Messages]
    temperature: float = 0.0
    is_related: bool = True


def _edit(number: int, earlier: Earlier) -> Messages:
    """Asks for an edit of a file: the one that the model printed last."""
    verb, noun = _pick(_VERBS, number), _pick(_NOUNS, number // len(_VERBS))
    edit = f"Add a method {verb}_{noun}. Print the whole new file."
    return _asked(f"Here is the file account.py:\n```python\n{_newest_file(earlier)}```\n{edit}")


def _newest_file(earlier: Earlier) -> str:
    if len(earlier) % EDITS_OF_A_FILE == 0:
        return _FILE
    found = _CODE.search(earlier[-1][1])
    return found[1] if found is not None and 0 < len(found[1]) <= LONGEST_FILE else _FILE


def _letter(number: int, earlier: Earlier) -> Messages:
    """Asks for a letter of a shop. All requests ask for the same form of letter."""
    good, name, colour = _pick(_GOODS, number), _pick(_NAMES, number), _pick(_COLOURS, number)
    form = "greeting, thanks, order details, delivery time of 3 days, return policy of 30 days, closing"
    return _asked(
        f"Write a short email that confirms the order {4000 + number} of a {colour} {good} to {name}. Use the form: {form}."
    )


def _agent(number: int, earlier: Earlier) -> Messages:
    """A request of an agent that repairs modules. Up to TURNS_OF_AN_AGENT - 1 earlier requests, with the answers, are its
    history."""
    num_turns = len(earlier) % TURNS_OF_AN_AGENT
    messages: Messages = [
        {
            "role": "system",
            "content": "You are an agent that repairs Python modules. Say what you think, then give one shell command.",
        }
    ]
    for turn, (earlier_number, answer) in enumerate(earlier[len(earlier) - num_turns :]):
        messages += _asked(_observation(earlier_number, turn))
        messages.append({"role": "assistant", "content": answer})
    return messages + _asked(_observation(number, num_turns))


def _observation(number: int, turn: int) -> str:
    module, error = _pick(_MODULES, number), _pick(_ERRORS, number)
    if turn == 0:
        return f"The tests of {module}.py fail. Find out why. Ticket {number}."
    return f"The command ended with exit code 1:\n  File {module}.py, line {10 + number}\n{error}\nWhat do you do next?"


def _unrelated(number: int, earlier: Earlier) -> Messages:
    topic, place, good = _pick(_TOPICS, number), _pick(_PLACES, number), _pick(_GOODS, number // 5)
    return _asked(f"Write {topic} a {place} and a {good}, number {number}.")


def _pick(values: tuple[str, ...], number: int) -> str:
    return values[number % len(values)]


def _asked(text: str) -> Messages:
    return [{"role": "user", "content": text}]


TRACES = (
    Trace("edits of one file", _edit),
    Trace("templated answers", _letter),
    Trace("turns of an agent", _agent),
    Trace("unrelated", _unrelated, temperature=0.8, is_related=False),
)
