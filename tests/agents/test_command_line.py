"""The real command-line agents complete their loop: prompt, call, local run, result, final answer; also when they are
interrupted, refused for a while, or cut off by a restart."""

from __future__ import annotations

from typing import Any

import pytest
from agent_script import FILE, FINAL, WORD
from command_line_agents import AGENTS, Agent, aider
from scripted_server import ScriptedServer, wait_for

from conftest import LIMITED, PER_MINUTE, Place, end_of, interrupt

PLAIN = [agent for agent in AGENTS if agent.name in ("Claude Code", "Codex", "opencode")]


def named(agents: Any) -> Any:
    return pytest.mark.parametrize("agent", agents, ids=lambda agent: agent.name.replace(" ", "_"))


def of_model(server: ScriptedServer, agent: Agent, since: int) -> list[dict[str, Any]]:
    """The requests for answers."""
    return [entry for entry in server.requests(since) if entry["route"] == agent.route]


@named(AGENTS)
def test_a_whole_loop_is_streamed(served: ScriptedServer, place: Place, agent: Agent) -> None:
    since = len(served.requests())
    command, environment = agent.prepare(place, served.url, "agent-key")
    run = place.run([*command, agent.prompt], environment)
    assert run.code == 0 and FINAL in run.out, str(run)
    first, second, *_ = of_model(served, agent, since)
    assert first["status"] == second["status"] == 200 and first["stream"] and second["stream"]
    assert not [entry for entry in served.requests(since) if entry["status"] >= 400]
    assert second["cached_tokens"] >= 0.95 * first["prompt_tokens"], (first, second)


@named(PLAIN)
def test_ctrl_c_ends_the_request_in_the_server(served: ScriptedServer, place: Place, agent: Agent) -> None:
    since = len(served.requests())
    command, environment = agent.prepare(place, served.url, "agent-key")
    process = place.start([*command, "Count to two thousand"], environment)
    wait_for(lambda: served.num_running() == 1)
    interrupt(process)
    wait_for(lambda: served.num_running() == 0, 20)
    end_of(process)
    (entry,) = of_model(served, agent, since)
    assert entry["client_gone"], entry


@named(PLAIN)
def test_a_429_is_tried_again_after_the_time_that_the_server_names(
    served: ScriptedServer, place: Place, agent: Agent
) -> None:
    served.use_up(LIMITED, PER_MINUTE)
    since = len(served.requests())
    command, environment = agent.prepare(place, served.url, LIMITED)
    run = place.run([*command, agent.prompt], environment)
    assert run.code == 0 and FINAL in run.out, str(run)
    statuses = [entry["status"] for entry in of_model(served, agent, since)]
    assert 429 in statuses and statuses.count(200) >= 2, statuses


@named(PLAIN)
def test_a_loop_goes_on_after_a_restart_of_the_server(
    served: ScriptedServer, place: Place, agent: Agent
) -> None:
    command, environment = agent.prepare(place, served.url, "agent-key")
    process = place.start([*command, f"{agent.prompt} slowly"], environment)
    wait_for(lambda: served.num_running() == 1)
    served.kill()
    served.start()
    run = end_of(process)
    assert run.code == 0 and FINAL in run.out, str(run)


def test_aider_edits_a_file_by_a_streamed_answer(served: ScriptedServer, place: Place) -> None:
    since = len(served.requests())
    command, environment = aider(place, served.url, "agent-key")
    run = place.run([*command, "aider, change it"], environment)
    assert (place.work / FILE).read_text() == f"hello {WORD}\n", str(run)
    (entry,) = served.requests(since)
    assert entry["status"] == 200 and entry["stream"]
