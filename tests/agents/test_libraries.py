"""The client libraries complete a streamed loop with a tool against the scripted model. With the default model they hold
a streamed conversation and get a structured answer."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_script import FINAL
from command_line_agents import CHAT, MESSAGES, RESPONSES
from scripted_server import ScriptedServer, wait_for

from conftest import HERE, INSTALLED, LIMITED, NODE, PYTHON, Place, end_of, interrupt

OLLAMA = "/api/chat"
OF_NPM = {
    "ai-openai-compatible": CHAT,
    "ai-openai-chat": CHAT,
    "ai-openai": RESPONSES,
    "ai-anthropic": MESSAGES,
    "openai-chat": CHAT,
    "openai-responses": RESPONSES,
    "anthropic": MESSAGES,
    "ollama": OLLAMA,
}
OF_PYTHON = {
    "openai-chat": CHAT,
    "openai-responses": RESPONSES,
    "anthropic": MESSAGES,
    "ollama": OLLAMA,
}
OF_TEST_CLIENTS = {
    "langchain": CHAT,
    "langchain-responses": RESPONSES,
    "litellm": CHAT,
    "litellm-anthropic": MESSAGES,
    "litellm-ollama": OLLAMA,
    "llm": CHAT,
}
"""These are in the environment of `make test-clients`, in which the tests run as well."""
SOURCES = {"npm": OF_NPM, "python": OF_PYTHON, "clients": OF_TEST_CLIENTS}
CLIENTS = [(source, client) for source, clients in SOURCES.items() for client in clients]
every_client = pytest.mark.parametrize(("source", "client"), CLIENTS, ids=["-".join(one) for one in CLIENTS])


@pytest.fixture(scope="session")
def npm_script() -> Path:
    """A copy beside node_modules, where node finds the packages."""
    return Path(shutil.copy(HERE / "sdk" / "sdk.mjs", INSTALLED / "sdk.mjs"))


@pytest.fixture(scope="session")
def programs(npm_script: Path) -> dict[str, list[object]]:
    script = HERE / "sdk" / "sdk.py"
    return {"npm": [NODE, npm_script], "python": [PYTHON, script], "clients": [sys.executable, script]}


def outcome(run: Any) -> Any:
    assert run.code == 0, str(run)
    return json.loads(run.out.strip().splitlines()[-1])


@every_client
def test_a_whole_loop_is_streamed(
    served: ScriptedServer, place: Place, programs: Any, source: str, client: str
) -> None:
    since = len(served.requests())
    run = place.run([*programs[source], client, "loop", served.url, "agent-key", "SDK, read it"], {})
    answer = outcome(run)
    assert answer["text"].strip().endswith(FINAL) and answer["pieces"] > 1, answer
    route = SOURCES[source][client]
    # The tool runner of the npm package first asks for a thread, which no server but its vendor's has.
    refused = [400] if (source, client) == ("npm", "anthropic") else []
    entries = wait_for(lambda: served.requests(since, route, at_least=2 + len(refused)))
    assert [entry["status"] for entry in entries] == [*refused, 200, 200], entries
    assert entries[-2]["stream"] and entries[-1]["stream"], entries


@every_client
def test_the_default_model_streams_an_answer(
    real: ScriptedServer, place: Place, programs: Any, source: str, client: str
) -> None:
    prompt = "Name the capital of France."
    answer = outcome(place.run([*programs[source], client, "talk", real.url, "none", prompt], {}))
    assert "Paris" in answer["text"] and answer["pieces"] > 1, answer


@every_client
def test_the_default_model_gives_a_structured_answer(
    real: ScriptedServer, place: Place, programs: Any, source: str, client: str
) -> None:
    prompt = "Tell me about a person called Ada, aged 36."
    person = outcome(place.run([*programs[source], client, "person", real.url, "none", prompt], {}))["person"]
    assert set(person) == {"name", "age"} and isinstance(person["age"], int), person


@every_client
def test_ctrl_c_ends_the_request_in_the_server(
    served: ScriptedServer, place: Place, programs: Any, source: str, client: str
) -> None:
    since = len(served.requests())
    prompt = "Count to two thousand"
    process = place.start([*programs[source], client, "loop", served.url, "agent-key", prompt], {})
    wait_for(lambda: served.num_running() == 1)
    interrupt(process)
    wait_for(lambda: served.num_running() == 0, 20)
    end_of(process)
    entry = wait_for(lambda: served.requests(since, SOURCES[source][client]))[-1]
    assert entry["client_gone"], entry


@every_client
def test_a_429_is_tried_again(
    served: ScriptedServer, place: Place, programs: Any, source: str, client: str
) -> None:
    since = len(served.requests())
    served.use_up(LIMITED, lambda: served.refused(since, "/v1/completions"))
    process = place.start([*programs[source], client, "loop", served.url, LIMITED, "SDK, read it"], {})
    served.use_up(LIMITED, lambda: served.refused(since, SOURCES[source][client]))
    assert outcome(end_of(process))["text"].strip().endswith(FINAL)


@every_client
def test_the_loop_goes_on_after_a_restart(
    served: ScriptedServer, place: Place, programs: Any, source: str, client: str
) -> None:
    """Between the two turns: no SDK asks again for a stream that broke off."""
    since = len(served.requests())
    (place.work / "WAIT").touch()
    process = place.start([*programs[source], client, "loop", served.url, "agent-key", "SDK, read it"], {})
    route = SOURCES[source][client]
    wait_for(lambda: [entry for entry in served.requests(since, route) if entry["status"] == 200])
    served.kill()
    served.start()
    (place.work / "WAIT").unlink()
    assert outcome(end_of(process))["text"].strip().endswith(FINAL)
