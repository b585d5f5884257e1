"""The clients of a fault run: those of `weft bench soak`, and one for each of the other APIs and for batches."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from weft.bench.serve_stream import JunkError
from weft.bench.soak_client import Ledger, Lost, SoakClient, Violation
from weft.bench.soak_plan import Behaviour

_ANSWER_SECONDS = 120.0
_ALWAYS_ALLOWED = ("slow_reader", "queue_full")
_MAX_TOKENS = 24
_LINES = 6
UNNAMED = "unnamed"
"""The code of an error of the engine in an API whose errors have no code."""


@dataclass(frozen=True)
class Failure:
    """A request that got an error, or whose connection was lost ("lost")."""

    began: float
    ended: float
    code: str


class FaultClient(SoakClient):
    """A client of the soak benchmark. Errors are only recorded here, and judged when all faults are known."""

    async def run_until(self, is_over: Callable[[], bool], failures: list[Failure]) -> None:
        while not is_over():
            conduct, began = self._behaviour.conduct(), time.monotonic()
            code = None
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    outcome = await self._run_request(conduct)
                self._ledger.outcomes[conduct, outcome] += 1
                code = outcome[len("error ") :] if outcome.startswith("error ") else None
            except TimeoutError:
                self._add_violation(conduct, f"no end after {_ANSWER_SECONDS:g} s")
            except (Lost, OSError):
                self._drop()
                self._ledger.outcomes[conduct, "lost"] += 1
                code = "lost"
            except (Violation, JunkError, LookupError, TypeError, ValueError) as error:
                self._add_violation(conduct, f"{type(error).__name__}: {error}")
            if code is not None:
                failures.append(Failure(began, time.monotonic(), code))
                await asyncio.sleep(0.1 + self._behaviour.up_to(0.3))
        self._drop()

    def _check_error(self, error: dict[str, Any], began: float) -> str:
        code = str(error["code"])
        return code if code in _ALWAYS_ALLOWED else f"error {code}"

    async def _run_wrong_request(self, number: int) -> str:
        outcome = await super()._run_wrong_request(number)
        return outcome if outcome == "refused" else f"error {outcome}"


class Refused(Exception):
    """An error of the server. The message is its code."""


@dataclass
class ApiClient:
    """Sends requests of one API in turn: whole answers and streams. Each answer must be complete, and equal to the first
    one where equal requests have equal answers."""

    url: str
    ledger: Ledger
    behaviour: Behaviour
    counts: dict[str, int]
    """Requests that ended, by the name of the API."""
    known: dict[str, str] = field(default_factory=dict)
    """Texts that were seen once, by prompt."""
    is_exact = False

    async def run_until(self, is_over: Callable[[], bool], failures: list[Failure]) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=_ANSWER_SECONDS) as self.http:
            while not is_over():
                began, name = time.monotonic(), type(self).__name__
                try:
                    await self._run_one()
                    self.counts[name] = self.counts.get(name, 0) + 1
                except (Refused, httpx.TransportError) as error:
                    code = str(error) if isinstance(error, Refused) else "lost"
                    failures.append(Failure(began, time.monotonic(), code))
                    await asyncio.sleep(0.1 + self.behaviour.up_to(0.3))
                except (Violation, LookupError, TypeError, ValueError) as error:
                    self.ledger.violations.append(f"{name}: {type(error).__name__}: {error}")
                await asyncio.sleep(self.behaviour.up_to(0.1))

    async def _run_one(self) -> None:
        prompt = f"Question {self.behaviour.pick(12)}: what does the river say?"
        is_streamed = self.behaviour.chance(0.5)
        text, num_tokens = await (self._stream if is_streamed else self._whole)(prompt)
        if not 0 < num_tokens <= _MAX_TOKENS:
            raise Violation(f"usage reports {num_tokens} tokens; expected 1 to {_MAX_TOKENS}")
        if self.is_exact and self.known.setdefault(prompt, text) != text:
            raise Violation(f"wrong text: {text!r:.200}; expected {self.known[prompt]!r:.200}")

    async def _whole(self, prompt: str) -> tuple[str, int]:
        raise NotImplementedError

    async def _stream(self, prompt: str) -> tuple[str, int]:
        raise NotImplementedError

    async def send(self, method: str, path: str, **options: Any) -> Any:
        """The JSON of a response."""
        response = await self.http.request(method, path, **options)
        if response.status_code != 200:
            raise _refused(response.status_code, response.content)
        return response.json()

    async def lines(self, path: str, fields: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream, of server-sent events or of JSON lines."""
        async with self.http.stream("POST", path, json=fields) as response:
            if response.status_code != 200:
                raise _refused(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                content = line.removeprefix("data: ")
                if content.startswith("{"):
                    event = json.loads(content)
                    if event.get("error") or event.get("type") in ("error", "response.failed"):
                        raise _refused(503, content.encode())
                    yield event


def _refused(status: int, content: bytes) -> Exception:
    document = json.loads(content)
    error = document.get("error") or document.get("response", {}).get("error") or document
    code = error.get("code") if isinstance(error, dict) else None
    code = None if code == "server_error" else code
    if code is None and status not in (500, 503, 529):
        return Violation(f"status {status}: {content[:200]!r}")
    return Refused(code or UNNAMED)


class Responses(ApiClient):
    """Half of the responses are stored. A stored response that was received must be found."""

    def _fields(self, prompt: str, **more: Any) -> dict[str, Any]:
        stores = self.behaviour.chance(0.5)
        return {"input": prompt, "max_output_tokens": _MAX_TOKENS, "temperature": 0, "store": stores, **more}

    async def _whole(self, prompt: str) -> tuple[str, int]:
        fields = self._fields(prompt)
        return await self._checked(fields, await self.send("POST", "/v1/responses", json=fields))

    async def _stream(self, prompt: str) -> tuple[str, int]:
        fields, text, ended = self._fields(prompt, stream=True), "", None
        async for event in self.lines("/v1/responses", fields):
            if ended is not None:
                raise Violation(f"an event after the end: {event!r:.200}")
            if event["type"] == "response.output_text.delta":
                text += event["delta"]
            elif event["type"] in ("response.completed", "response.incomplete"):
                ended = event["response"]
        if ended is None:
            raise Violation("a stream without an end")
        if _text_of(ended) != text:
            raise Violation("the events of a response are not its text")
        return await self._checked(fields, ended)

    async def _checked(self, fields: dict[str, Any], response: dict[str, Any]) -> tuple[str, int]:
        text = _text_of(response)
        if fields["store"]:
            found = await self.send("GET", f"/v1/responses/{response['id']}")
            if _text_of(found) != text:
                raise Violation("a stored response has another text")
        return text, response["usage"]["output_tokens"]


def _text_of(response: dict[str, Any]) -> str:
    return "".join(
        part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
    )


class Messages(ApiClient):
    def _fields(self, prompt: str, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {"messages": messages, "max_tokens": _MAX_TOKENS, "temperature": 0, **more}

    async def _whole(self, prompt: str) -> tuple[str, int]:
        answer = await self.send("POST", "/v1/messages", json=self._fields(prompt))
        text = "".join(part["text"] for part in answer["content"] if part["type"] == "text")
        return text, answer["usage"]["output_tokens"]

    async def _stream(self, prompt: str) -> tuple[str, int]:
        text, num_tokens, has_ended = "", 0, False
        async for event in self.lines("/v1/messages", self._fields(prompt, stream=True)):
            if event["type"] == "content_block_delta":
                text += event["delta"].get("text", "")
            elif event["type"] == "message_delta":
                num_tokens = event["usage"]["output_tokens"]
            has_ended = event["type"] == "message_stop"
        if not has_ended:
            raise Violation("a stream without an end")
        return text, num_tokens


class Ollama(ApiClient):
    is_exact = True

    def _fields(self, prompt: str, stream: bool) -> dict[str, Any]:
        options = {"num_predict": _MAX_TOKENS, "temperature": 0, "seed": 7}
        return {"messages": [{"role": "user", "content": prompt}], "options": options, "stream": stream}

    async def _whole(self, prompt: str) -> tuple[str, int]:
        answer = await self.send("POST", "/api/chat", json=self._fields(prompt, False))
        return answer["message"]["content"], answer["eval_count"]

    async def _stream(self, prompt: str) -> tuple[str, int]:
        text, last = "", {}
        async for last in self.lines("/api/chat", self._fields(prompt, True)):
            text += last["message"]["content"]
        if not last.get("done"):
            raise Violation("a stream without an end")
        return text, last["eval_count"]


class Batches(ApiClient):
    """Runs one batch after the other. Each of its lines must be answered once, whatever happens to the engine."""

    async def _run_one(self) -> None:
        lines = [
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": f"line {number}", "max_tokens": 1 + number, "seed": 1, "ignore_eos": True},
            }
            for number in range(_LINES)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        file = await self.send(
            "POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", content)}
        )
        fields = {
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        batch = await self.send("POST", "/v1/batches", json=fields)
        give_up_at = time.monotonic() + _ANSWER_SECONDS
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            if time.monotonic() > give_up_at:
                raise Violation(f"a batch without an end: {batch!r:.300}")
            await asyncio.sleep(0.2)
            batch = await self.send("GET", f"/v1/batches/{batch['id']}")
        if batch["status"] != "completed":
            raise Refused(f"batch {batch['status']}")
        answered: list[str] = []
        for name in ("output_file_id", "error_file_id"):
            if batch[name] is None:
                continue
            response = await self.http.get(f"/v1/files/{batch[name]}/content")
            if response.status_code != 200:
                raise _refused(response.status_code, response.content)
            for line in map(json.loads, response.text.splitlines()):
                answered.append(line["custom_id"])
                body = (line["response"] or {}).get("body") or {}
                error = line["error"] or body.get("error")
                if error:
                    raise Refused(error["code"])
                if body["usage"]["completion_tokens"] != 1 + int(line["custom_id"]):
                    raise Violation(f"a line has a wrong answer: {line!r:.300}")
        if sorted(answered) != [str(number) for number in range(_LINES)]:
            raise Violation(f"the lines {answered} of a batch were answered")


OTHER_CLIENTS = (Responses, Messages, Ollama, Batches)
