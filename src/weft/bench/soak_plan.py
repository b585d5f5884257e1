"""The requests of a soak test, drawn from a seed, with their expected answers; and how clients behave."""

from __future__ import annotations

import enum
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.backends.noop_model import generate_alone
from weft.plan import BackendInfo
from weft.request import SamplingParams, child_seed
from weft.text.tokenizer import Tokenizer

_WORDS = (
    *("river", "stone", "winter", "letter", "machine", "garden", "bread", "window", "paper", "silver"),
    *("music", "forest", "engine", "harbour", "candle", "mountain", "bridge", "summer", "kitchen", "island"),
    *("copper", "morning", "shadow", "wheel", "thread", "feather", "village", "mirror", "storm", "journey"),
)
_SHARED = (
    "The following notes were written by a careful engineer who likes short sentences and plain words. " * 3
)
"""A prefix of several KV blocks, so that requests share them."""


class Conduct(enum.Enum):
    """What a client does with one request."""

    READ = "stream read to its end"
    WHOLE = "answer in one piece"
    SLOW = "stream read slowly"
    LEAVE = "left in the middle of a stream"
    VANISH = "left before the answer"
    HALF = "left in the middle of the request"
    WRONG = "refused"


_WEIGHTS = {
    Conduct.READ: 50,
    Conduct.WHOLE: 12,
    Conduct.SLOW: 6,
    Conduct.LEAVE: 12,
    Conduct.VANISH: 6,
    Conduct.HALF: 4,
    Conduct.WRONG: 10,
}


@dataclass(frozen=True)
class Sizes:
    """Number and lengths of the requests, chosen so that each is answered in a few seconds."""

    questions: int
    longest_answer: int
    longest_slow_answer: int


NOOP = Sizes(questions=600, longest_answer=256, longest_slow_answer=512)
REAL = Sizes(questions=48, longest_answer=32, longest_slow_answer=48)


@dataclass(frozen=True)
class Question:
    """A request and its expected answer."""

    path: str
    fields: dict[str, Any]
    texts: tuple[str, ...] = ()
    """The expected text of each choice; empty until known."""
    num_tokens: int | None = None
    """Expected tokens of all choices together; None if unknown."""

    @property
    def num_choices(self) -> int:
        count: int = self.fields.get("n", 1)
        return count

    @property
    def is_chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    def body(self, stream: bool) -> bytes:
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return json.dumps({**self.fields, **more}).encode()


@dataclass(frozen=True)
class WrongQuestion:
    """An invalid request, and the status that the server must answer with."""

    method: str
    path: str
    body: bytes
    status: int


def draw_questions(seed: int, sizes: Sizes, *, slow: bool = False) -> list[Question]:
    """Draws requests: completions and chats, some with a common prefix, with one answer or two."""
    source = random.Random(f"{seed} {slow}")
    longest = sizes.longest_slow_answer if slow else sizes.longest_answer
    questions = []
    for number in range(max(4, sizes.questions // 20) if slow else sizes.questions):
        words = " ".join(source.choices(_WORDS, k=source.randint(2, 40)))
        text = f"{_SHARED if source.random() < 0.3 else ''}Note {number}: {words}"
        fields: dict[str, Any] = {
            "max_tokens": longest if slow else source.randint(max(1, longest // 8), longest),
            "temperature": 0,
            "seed": source.getrandbits(40),
            "ignore_eos": True,
        }
        if source.random() < 0.1:
            fields["n"] = 2
        if source.random() < 0.3:
            messages = [{"role": "user", "content": text}]
            if slow:
                fields |= {"logprobs": True, "top_logprobs": 2}
            questions.append(Question("/v1/chat/completions", {"messages": messages, **fields}))
        else:
            if slow:
                fields["logprobs"] = 2
            questions.append(Question("/v1/completions", {"prompt": text, **fields}))
    return questions


def wrong_questions(max_context: int) -> list[WrongQuestion]:
    path = "/v1/completions"
    wrong = [
        ({"prompt": "x", "max_tokens": 0}, 400),
        ({"prompt": "x", "model": "no such model"}, 404),
        ({"prompt": [10**9]}, 400),
        ({"prompt": [1] * (max_context + 1)}, 400),
        ({"prompt": "x", "temperature": -1, "stream": True}, 400),
        ({"messages": []}, 400),
    ]
    return [
        *(WrongQuestion("POST", path, json.dumps(fields).encode(), status) for fields, status in wrong),
        WrongQuestion("POST", "/v1/chat/completions", b'{"messages": [', 400),
        WrongQuestion("GET", path, b"", 405),
        WrongQuestion("POST", "/v1/nowhere", b"{}", 404),
    ]


def noop_texts(
    question: Question, prompt: Sequence[int], info: BackendInfo, tokenizer: Tokenizer
) -> tuple[str, ...]:
    """The answers of the noop backend, computed without an engine."""
    fields = question.fields
    params = SamplingParams(max_tokens=fields["max_tokens"], seed=fields["seed"], ignore_eos=True)
    limit = len(prompt) + fields["max_tokens"]
    seeds = (child_seed(fields["seed"], index) for index in range(question.num_choices))
    return tuple(tokenizer.decode(generate_alone(prompt, seed, params, limit, info)) for seed in seeds)


class Behaviour:
    """The random decisions of one client: the same for the same seed and number."""

    def __init__(self, seed: int, number: int) -> None:
        self._random = random.Random(f"{seed} client {number}")

    def conduct(self) -> Conduct:
        return self._random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]

    def pick(self, count: int) -> int:
        return self._random.randrange(count)

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def up_to(self, most: float) -> float:
        return self._random.uniform(0, most)


def kill_times(seed: int, kills: int, seconds: float) -> list[float]:
    """One time in each of `kills` equal parts of the interval from 5% to 55% of the run.

    The last engine must run long enough to show whether its memory grows.
    """
    source = random.Random(f"{seed} kills")
    part = 0.5 * seconds / max(1, kills)
    return [0.05 * seconds + part * (index + source.uniform(0.1, 0.9)) for index in range(kills)]
