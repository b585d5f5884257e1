"""The answers that the scripted model gives to the agents. Each rule is for one prompt of a test, or for what follows.

The first request of a loop is answered by a call of the agent's own tool. The answer to its result is chosen by the
content of the file, which the model can only know from the result of the tool."""

from __future__ import annotations

import json
from typing import Any

WORD = "kumquat"
FILE = "hello.txt"
PERSON_FILE = "person.txt"
PERSON = "Ada, aged 36"
PERSON_OBJECT = {"name": "Ada", "age": 36}
READS_PERSON = f"cat {PERSON_FILE}"
FINAL = f"The file says {WORD}."
READ = f"cat {FILE}"
EDIT = f"{FILE}\n```\nhello {WORD}\n```\n"
NUMBERS = " ".join(f"number {value}" for value in range(2000))


def rule(prompt: str, text: str = "", calls: Any = (), **fields: Any) -> dict[str, Any]:
    """Answers a conversation that says `prompt` since its last answer."""
    return {"contains": [prompt], "text": text, "calls": calls, **fields}


def by_tool(agent: str, tool: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Rules for "AGENT, read it": a call of its tool. "AGENT, read it slowly": the same, over some seconds."""
    call, text = [[tool, arguments]], "I will read the file.\n"
    slow = rule(f"{agent}, read it slowly", text, call, seconds_per_token=0.05)
    return [slow, rule(f"{agent}, read it", text, call)]


def by_answer_tool(
    agent: str, tool: str, arguments: dict[str, Any], answer_tool: str
) -> list[dict[str, Any]]:
    """Rules for "AGENT, describe the person", for an agent whose structured answers are calls of a tool. `arguments`
    has the name of the agent: the result of the call follows it."""
    answer = {"contains": ["<tool_response>", PERSON, agent], "calls": [[answer_tool, PERSON_OBJECT]]}
    return [answer, rule(f"{agent}, describe the person", calls=[[tool, arguments]])]


QWEN_READS: Any = ["run_shell_command", {"command": READ, "is_background": False}]
QWEN_READS_PERSON: Any = [
    "run_shell_command",
    {"command": READS_PERSON, "is_background": False, "description": "qwen-code reads the file"},
]
NO_OUTPUT = "Output: (empty)"
"""On a busy machine the shell tool of qwen-code sometimes loses the output of a command. A model would call it again."""

SCRIPT: dict[str, Any] = {
    "rules": [
        {"contains": ["<tool_response>", NO_OUTPUT, READS_PERSON], "calls": [QWEN_READS_PERSON]},
        {"contains": ["<tool_response>", NO_OUTPUT], "calls": [QWEN_READS]},
        {"contains": ["<tool_response>", WORD], "text": FINAL},
        *by_answer_tool(
            "Claude Code",
            "Bash",
            {"command": READS_PERSON, "description": "Claude Code reads the file"},
            "StructuredOutput",
        ),
        *by_answer_tool("qwen-code", *QWEN_READS_PERSON, "structured_output"),
        {"contains": ["<tool_response>", PERSON], "text": json.dumps(PERSON_OBJECT)},
        rule("Codex, describe the person", calls=[["exec_command", {"cmd": READS_PERSON}]]),
        *by_tool("Claude Code", "Bash", {"command": READ, "description": "Reads the file"}),
        *by_tool("Codex", "exec_command", {"cmd": READ}),
        *by_tool("opencode", "bash", {"command": READ, "description": "Reads the file"}),
        *by_tool("qwen-code", *QWEN_READS),
        # What qwen-code says if a stream with some text broke off.
        rule("The connection dropped mid-response", calls=[QWEN_READS]),
        *by_tool("SDK", "read_file", {"path": FILE}),
        rule("aider, change it slowly", EDIT, seconds_per_token=0.2),
        rule("aider, change it", EDIT),
        rule("Count", NUMBERS, seconds_per_token=0.2),
    ]
}
