"""The real command-line agents complete their loop: prompt, call, local run, result, final answer; also when they are
interrupted, refused for a while, or cut off by a restart."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from agent_script import FILE, FINAL, PERSON_OBJECT, WORD
from command_line_agents import AGENTS, EDITOR, LOCAL, Agent, aider, claude_code, codex, qwen_code
from scripted_server import ScriptedServer, wait_for

from conftest import LIMITED, Place, Run, end_of, interrupt

PLAIN = [*(agent for agent in AGENTS if "default prompt" not in agent.name), EDITOR]
QUESTION = "Name the capital of France."


def named(agents: Any) -> Any:
    return pytest.mark.parametrize("agent", agents, ids=lambda agent: agent.name.replace(" ", "_"))


def is_done(agent: Agent, place: Place, run: Run) -> bool:
    if agent is EDITOR:
        return (place.work / FILE).read_text() == f"hello {WORD}\n"
    return run.code == 0 and FINAL in run.out


@named(AGENTS)
def test_a_whole_loop_is_streamed(served: ScriptedServer, place: Place, agent: Agent) -> None:
    since = len(served.requests())
    command, environment = agent.prepare(place, served.url, "agent-key")
    run = place.run([*command, agent.prompt], environment)
    assert run.code == 0 and FINAL in run.out, str(run)
    first, second, *_ = wait_for(lambda: served.requests(since, agent.route, at_least=2))
    assert first["status"] == second["status"] == 200 and first["stream"] and second["stream"]
    assert not [entry for entry in served.requests(since) if entry["status"] >= 400]
    assert second["cached_tokens"] >= 0.95 * first["prompt_tokens"], (first, second)


def test_codex_finds_the_model_of_a_local_server_without_keys(
    without_keys: ScriptedServer, place: Place
) -> None:
    command, environment = LOCAL.prepare(place, without_keys.url, "")
    run = place.run([*command, LOCAL.prompt], environment)
    assert run.code == 0 and FINAL in run.out, str(run)
    entries = wait_for(lambda: without_keys.requests(at_least=4))
    assert {entry["route"] for entry in entries} >= {"/api/version", "/api/tags", LOCAL.route}, entries
    assert all(entry["status"] == 200 for entry in entries), entries


@named([agent for agent in AGENTS if agent.resume])
def test_from_its_second_request_on_an_agent_finds_its_prompt_in_the_cache(
    served: ScriptedServer, place: Place, agent: Agent
) -> None:
    """Also those of a conversation that a second process continues."""
    since = len(served.requests())
    command, environment = agent.prepare(place, served.url, "agent-key")
    for more in ((), agent.resume):
        run = place.run([*command, *more, agent.prompt], environment)
        assert run.code == 0 and FINAL in run.out, str(run)
    entries = wait_for(lambda: served.requests(since, agent.route, at_least=4))
    pairs = [(before["prompt_tokens"], after["cached_tokens"]) for before, after in pairwise(entries)]
    assert all(cached >= 0.95 * prompt for prompt, cached in pairs), pairs


@named(PLAIN)
def test_ctrl_c_ends_the_request_in_the_server(served: ScriptedServer, place: Place, agent: Agent) -> None:
    since = len(served.requests())
    command, environment = agent.prepare(place, served.url, "agent-key")
    process = place.start([*command, "Count to two thousand"], environment)
    wait_for(lambda: served.num_running() == 1)
    interrupt(process)
    wait_for(lambda: served.num_running() == 0, 20)
    end_of(process)
    (entry,) = wait_for(lambda: served.requests(since, agent.route))
    assert entry["client_gone"], entry


@named(PLAIN)
def test_a_429_is_tried_again(served: ScriptedServer, place: Place, agent: Agent) -> None:
    since = len(served.requests())
    served.use_up(LIMITED, lambda: served.refused(since, "/v1/completions"))
    command, environment = agent.prepare(place, served.url, LIMITED)
    process = place.start([*command, agent.prompt], environment)
    served.use_up(LIMITED, lambda: served.refused(since, agent.route))
    run = end_of(process)
    assert is_done(agent, place, run), str(run)


@named(PLAIN)
def test_the_loop_goes_on_after_a_restart(served: ScriptedServer, place: Place, agent: Agent) -> None:
    command, environment = agent.prepare(place, served.url, "agent-key")
    process = place.start([*command, f"{agent.prompt} slowly"], environment)
    wait_for(lambda: served.num_running() == 1)
    served.kill()
    served.start()
    run = end_of(process)
    assert is_done(agent, place, run), str(run)


def test_aider_edits_a_file_by_a_streamed_answer(served: ScriptedServer, place: Place) -> None:
    since = len(served.requests())
    command, environment = aider(place, served.url, "agent-key")
    run = place.run([*command, "aider, change it"], environment)
    assert is_done(EDITOR, place, run), str(run)
    (entry,) = wait_for(lambda: served.requests(since))
    assert entry["status"] == 200 and entry["stream"]


@named([agent for agent in AGENTS if agent.prepare_talk])
def test_the_default_model_streams_an_answer(real: ScriptedServer, place: Place, agent: Agent) -> None:
    since = len(real.requests())
    assert agent.prepare_talk is not None
    command, environment = agent.prepare_talk(place, real.url, "none")
    run = place.run([*command, QUESTION], environment)
    assert run.code == 0 and run.out.strip(), str(run)
    entries = wait_for(lambda: real.requests(since, agent.route))
    assert all(entry["stream"] and entry["completion_tokens"] for entry in entries), entries


def test_the_default_model_answers_aider(real: ScriptedServer, place: Place) -> None:
    since = len(real.requests())
    command, environment = aider(place, real.url, "none")
    run = place.run([*command, f"/ask {QUESTION}"], environment)
    (entry,) = wait_for(lambda: real.requests(since))
    assert run.code == 0 and entry["stream"] and entry["completion_tokens"], str(run)


PERSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# Not from the default model: it does not call the tool with the answer, and never stops calling the tools of Codex.


def test_codex_gets_a_structured_answer_after_a_call(served: ScriptedServer, place: Place) -> None:
    place.write("schema.json", json.dumps(PERSON_SCHEMA))
    answer = place.home / "answer.json"
    command, environment = codex(place, served.url, "agent-key")
    command += ["--output-schema", place.home / "schema.json", "--output-last-message", answer]
    run = place.run([*command, "Codex, describe the person"], environment)
    assert run.code == 0 and json.loads(answer.read_text()) == PERSON_OBJECT, str(run)


def test_claude_code_gets_a_structured_answer_after_a_call(served: ScriptedServer, place: Place) -> None:
    command, environment = claude_code(place, served.url, "agent-key")
    command += ["--output-format", "json", "--json-schema", json.dumps(PERSON_SCHEMA)]
    run = place.run([*command, "Claude Code, describe the person"], environment)
    assert run.code == 0 and json.loads(run.out.splitlines()[-1])["structured_output"] == PERSON_OBJECT, str(
        run
    )


def test_qwen_code_gets_a_structured_answer_after_a_call(served: ScriptedServer, place: Place) -> None:
    command, environment = qwen_code(place, served.url, "agent-key")
    command += ["--json-schema", json.dumps(PERSON_SCHEMA)]
    run = place.run([*command, "qwen-code, describe the person"], environment)
    assert run.code == 0 and json.loads(run.out.splitlines()[-1]) == PERSON_OBJECT, str(run)
