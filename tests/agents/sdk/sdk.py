"""One task by one client from the Python package index: python sdk.py CLIENT TASK URL KEY PROMPT. Writes one line of
JSON.

Tasks: "loop" (a streamed conversation with a tool that reads a file), "talk" (a streamed answer), "person" (a structured
answer). Each client is imported by its own function: they share no environment but this one.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pydantic

faulthandler.dump_traceback_later(150, exit=True)  # says where a client hangs
CLIENT, TASK, URL, KEY, PROMPT = sys.argv[1:]
MODEL = "default"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
LIMITS: dict[str, Any] = {"max_tokens": 200, "temperature": 0}
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}
FUNCTION: Any = {
    "type": "function",
    "function": {"name": "read_file", "description": "Reads a file.", "parameters": PARAMETERS},
}


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


def read_file(path: str) -> str:
    """Reads a file.

    Args:
        path: The path of the file.
    """
    while Path("WAIT").exists():  # the test holds the call
        time.sleep(0.05)
    return Path(path).read_text()


def patient(create: Callable[[], Any]) -> Any:
    """Yields the parts of a stream. Asks again if the server has answered 429, for packages that do not."""
    while True:
        try:
            yield from create()
            return
        except Exception as error:
            if getattr(error, "status_code", None) != 429:
                raise
            time.sleep(1)


def chat_loop(create: Callable[..., Any]) -> dict[str, Any]:
    """A loop over chat completions. `create` returns the chunks of a stream, in OpenAI's form."""
    history, tools, pieces, steps = [*MESSAGES], [FUNCTION] if TASK == "loop" else None, 0, 0
    while True:
        text, calls, steps = "", {}, steps + 1
        more = {} if tools is None else {"tools": tools}
        for chunk in create(model=MODEL, messages=history, stream=True, **LIMITS, **more):
            for choice in chunk.choices:
                pieces += bool(choice.delta.content)
                text += choice.delta.content or ""
                for part in choice.delta.tool_calls or ():
                    call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                    call["id"] += part.id or ""
                    call["name"] += part.function.name or ""
                    call["arguments"] += part.function.arguments or ""
        if not calls:
            return {"text": text, "pieces": pieces, "steps": steps}
        functions = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in calls.values()
        ]
        history.append({"role": "assistant", "content": text, "tool_calls": functions})
        for call in calls.values():
            result = read_file(**json.loads(call["arguments"]))
            history.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def openai_chat() -> dict[str, Any]:
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
    if TASK == "person":
        answer = client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Person, **LIMITS
        )
        return {"person": answer.choices[0].message.parsed.model_dump()}
    return chat_loop(client.chat.completions.create)


def openai_responses() -> dict[str, Any]:
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
    fields: dict[str, Any] = {"model": MODEL, "max_output_tokens": LIMITS["max_tokens"], "temperature": 0}
    if TASK == "person":
        answer = client.responses.parse(input=PROMPT, text_format=Person, **fields)
        return {"person": answer.output_parsed.model_dump()}
    if TASK == "loop":
        fields["tools"] = [{"type": "function", "strict": True, **FUNCTION["function"]}]
    items, pieces, steps = [*MESSAGES], 0, 0
    while True:
        steps += 1
        with client.responses.stream(input=items, **fields) as stream:
            for event in stream:
                pieces += event.type == "response.output_text.delta"
            response = stream.get_final_response()
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return {"text": response.output_text, "pieces": pieces, "steps": steps}
        items += [item.to_dict() for item in response.output]
        for call in calls:
            output = read_file(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


def anthropic_messages() -> dict[str, Any]:
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key=KEY)
    # The package has no parameter for the temperature.
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": LIMITS["max_tokens"]}
    fields["extra_body"] = {"temperature": 0}
    if TASK == "person":
        answer = client.messages.parse(messages=MESSAGES, output_format=Person, **fields)
        return {"person": answer.parsed_output.model_dump()}
    history, pieces, steps = [*MESSAGES], 0, 0
    if TASK == "loop":
        function = FUNCTION["function"]
        fields["tools"] = [
            {"name": function["name"], "description": function["description"], "input_schema": PARAMETERS}
        ]
    while True:
        steps += 1
        with client.messages.stream(messages=history, **fields) as stream:
            pieces += sum(1 for _ in stream.text_stream)
            message = stream.get_final_message()
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            text = "".join(block.text for block in message.content if block.type == "text")
            return {"text": text, "pieces": pieces, "steps": steps}
        history.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": read_file(**call.input)}
            for call in calls
        ]
        history.append({"role": "user", "content": results})


def ollama_chat() -> dict[str, Any]:
    import ollama

    client = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"})
    fields: dict[str, Any] = {
        "model": MODEL,
        "options": {"num_predict": LIMITS["max_tokens"], "temperature": 0},
    }
    if TASK == "person":
        answer = client.chat(messages=MESSAGES, format=Person.model_json_schema(), **fields)
        return {"person": Person.model_validate_json(answer.message.content).model_dump()}
    history, pieces, steps = [*MESSAGES], 0, 0
    if TASK == "loop":
        fields["tools"] = [read_file]
    while True:
        text, calls, steps = "", [], steps + 1
        for part in patient(partial(client.chat, messages=history, stream=True, **fields)):
            pieces += bool(part.message.content)
            text += part.message.content or ""
            calls += part.message.tool_calls or ()
        if not calls:
            return {"text": text, "pieces": pieces, "steps": steps}
        history.append({"role": "assistant", "content": text, "tool_calls": calls})
        for call in calls:
            content = read_file(**call.function.arguments)
            history.append({"role": "tool", "tool_name": call.function.name, "content": content})


def langchain(**more: Any) -> dict[str, Any]:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, **LIMITS, **more)
    if TASK == "person":
        return {"person": chat.with_structured_output(Person).invoke(PROMPT).model_dump()}
    reader = tool(read_file)
    if TASK == "loop":
        chat = chat.bind_tools([reader])
    history: list[Any] = [HumanMessage(PROMPT)]
    pieces = steps = 0
    while True:
        message: Any = None
        steps += 1
        for chunk in chat.stream(history):
            pieces += bool(chunk.text)
            message = chunk if message is None else message + chunk
        if not message.tool_calls:
            return {"text": str(message.text), "pieces": pieces, "steps": steps}
        history.append(message)
        for call in message.tool_calls:
            history.append(ToolMessage(reader.invoke(call["args"]), tool_call_id=call["id"]))


def litellm(model: str, base: str) -> dict[str, Any]:
    import litellm

    def create(**fields: Any) -> Any:
        return litellm.completion(**{**fields, "model": model}, api_base=base, api_key=KEY)

    if TASK == "person":
        answer = create(messages=MESSAGES, response_format=Person, **LIMITS)
        return {"person": Person.model_validate_json(answer.choices[0].message.content).model_dump()}
    return chat_loop(lambda **fields: patient(partial(create, **fields)))


def llm() -> dict[str, Any]:
    folder = Path("llm")
    folder.mkdir()
    lines = ("- model_id: weft", f"  model_name: {MODEL}", f"  api_base: {URL}/v1", "  api_key_name: weft")
    supports = ("  supports_schema: true", "  supports_tools: true")
    (folder / "extra-openai-models.yaml").write_text("\n".join((*lines, *supports)) + "\n")
    (folder / "keys.json").write_text(json.dumps({"weft": KEY}))
    command = [sys.executable, "-m", "llm", "-m", "weft", PROMPT, "-o", "temperature", "0"]
    command += ["-o", "max_tokens", str(LIMITS["max_tokens"])]
    if TASK == "person":
        command += ["--schema", json.dumps(Person.model_json_schema())]
    if TASK == "loop":
        Path("functions.py").write_text(
            "import time\nfrom pathlib import Path\n\ndef read_file(path: str) -> str:\n"
            '    "Reads a file."\n    while Path("WAIT").exists():\n        time.sleep(0.05)\n'
            "    return Path(path).read_text()\n"
        )
        command += ["--functions", "functions.py"]
    environment = {**os.environ, "LLM_USER_PATH": str(folder.absolute())}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    if TASK == "person":
        return {"person": Person.model_validate_json(done.stdout).model_dump()}
    return {"text": done.stdout, "pieces": 2}  # the command does not say how many pieces it wrote


CLIENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "openai-chat": openai_chat,
    "openai-responses": openai_responses,
    "anthropic": anthropic_messages,
    "ollama": ollama_chat,
    "langchain": langchain,
    "langchain-responses": lambda: langchain(use_responses_api=True),
    "litellm": lambda: litellm(f"openai/{MODEL}", f"{URL}/v1"),
    "litellm-anthropic": lambda: litellm(f"anthropic/{MODEL}", URL),
    "litellm-ollama": lambda: litellm(f"ollama_chat/{MODEL}", URL),
    "llm": llm,
}
print(json.dumps(CLIENTS[CLIENT]()))
