"""The server predicts the lengths of answers, and sends its predictions to the engine with the requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from server_process import Server, api_key, running_server


def ask(server: Server, system: str, key: str = "one", **fields: Any) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Go on."}]
    body = {"messages": messages, "max_tokens": 200, "seed": 1, "ignore_eos": True, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    answer = server.client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


def expected_in(path: Path) -> list[dict[str, float]]:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        one["request"]["expected"] for event in events if event["event"] == "add" for one in event["requests"]
    ]


def test_the_engine_gets_lengths_that_follow_from_the_answers_to_earlier_requests_of_the_same_kind(
    default_model_path: Path, tmp_path: Path
) -> None:
    path, keys = tmp_path / "engine.log", [api_key("one"), api_key("two")]
    with running_server(default_model_path, engine={"log_path": str(path)}, api_keys=keys) as server:
        ask(server, "Answer in one word.")
        for number in range(12):
            # A stop string ends these answers after a few tokens, so they are short ones that were not cut.
            ask(server, "Answer in one word.", user=str(number), ignore_eos=False, stop=["a", "e", "i", "o"])
            ask(server, "Write a book.", user=str(number))
        ask(server, "Answer in one word.")
        ask(server, "Write a book.")
        ask(server, "Answer in one word.", "two")
    found = expected_in(path)
    first, (short, long, of_other_key) = found[0], found[-3:]
    assert all(1 <= one["p50"] <= one["p90"] <= 200 for one in found)
    assert short["p50"] < 10 < 100 < long["p50"], "the answers to the second kind were all cut at 200"
    assert short["mean"] < first["mean"] < long["mean"]
    assert of_other_key["mean"] > 2 * short["mean"], (
        "the key learns nothing from the same words of another key"
    )
