"""Tool calls as the templates of many models render them: weft detects the format, and parses the rendered calls."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_templates import template_names, tiny_vocabulary

from weft.errors import InvalidRequestError
from weft.loading.gguf import GgufFile
from weft.loading.vocabulary import read_vocabulary
from weft.text.answer_parts import join_deltas
from weft.text.answer_reader import AnswerReader, AnswerSyntax
from weft.text.chat_template import ChatTemplate
from weft.text.gguf_tokenizer import tokenizer_of
from weft.text.model_text import ModelText
from weft.text.tool_formats import HERMES

FORMATS = {
    "Bielik-11B-v3.0-Instruct": "hermes",
    "MiMo-VL": "hermes",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral_args",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Reka-Edge": "hermes",
    "ibm-granite-granite-4.0": "hermes",
    "ibm-granite-granite-4.1": "hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral_args",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "unsloth-mistral-Devstral-Small-2507": "mistral_args",
}
THINKS = {"mistralai-Ministral-3-14B-Reasoning-2512": "[THINK]"} | dict.fromkeys(
    ("Bielik-11B-v3.0-Instruct", "Qwen-QwQ-32B", "Qwen-Qwen3-0.6B", "Reka-Edge"), "<think>"
)
QUESTION = {"role": "user", "content": "QUESTION"}
CALLS = [
    ("get_weather", {"city": 'Par"is', "days": [1, 2], "more": {"é": None}}),
    ("list_files", {}),
]


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "a city"}}}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [tool(name) for name, _ in CALLS]


def call_message(text: ModelText, calls: list[tuple[str, Any]]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": text.tool_format.new_id(),
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for name, arguments in calls
        ],
    }


def model_text(source: str) -> ModelText:
    tokenizer = tokenizer_of(tiny_vocabulary(source))
    return ModelText(tokenizer, ChatTemplate(tokenizer))


def test_the_format_of_every_template_is_detected(llama_cpp_models: Path) -> None:
    found, thinking = {}, {}
    for name in template_names(llama_cpp_models):
        text = model_text((llama_cpp_models / f"templates_{name}.jinja").read_text("utf-8"))
        template = text.require_chat_template()
        if template.uses_tools and template.tool_format is not None:
            found[name] = template.tool_format.name
            if text.reasoning is not None:
                thinking[name] = text.reasoning.opening
        else:
            # weft cannot parse calls in the format of this template, so it describes tools in the Hermes format.
            assert text.uses_weft_tool_prompt and text.tool_format is HERMES
        text.close()
    assert found == FORMATS
    assert thinking == THINKS


@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_a_template_renders_are_parsed(llama_cpp_models: Path, name: str) -> None:
    text = model_text((llama_cpp_models / f"templates_{name}.jinja").read_text("utf-8"))
    template, form = text.require_chat_template(), text.tool_format
    for calls in (CALLS[:1], CALLS[1:]) if form.is_single_call else (CALLS[:1], CALLS):
        before = template.render([QUESTION], tools=TOOLS)
        after = template.render(
            [QUESTION, call_message(text, calls)], tools=TOOLS, add_generation_prompt=False
        )
        answer = after[after.rindex("QUESTION") :]
        # The answer follows the common prefix of the two. Some templates add an empty thought there.
        start = answer.find(before[before.rindex("QUESTION") :])
        answer = answer[len(before) - before.rindex("QUESTION") :] if start == 0 else answer
        reader = AnswerReader(AnswerSyntax(tool_format=form, tool_names={name for name, _ in CALLS}))
        parts = join_deltas(reader.add(answer) + reader.finish())
        assert [(call.name, json.loads(call.arguments)) for call in parts.calls] == calls
    text.close()


@pytest.mark.parametrize("name", FORMATS)
def test_the_template_accepts_the_ids_of_calls(llama_cpp_models: Path, name: str) -> None:
    text = model_text((llama_cpp_models / f"templates_{name}.jinja").read_text("utf-8"))
    call = call_message(text, CALLS[:1])
    result = {
        "role": "tool",
        "tool_call_id": call["tool_calls"][0]["id"],
        "name": "get_weather",
        "content": "RESULT",
    }
    try:
        assert "RESULT" in text.require_chat_template().render([QUESTION, call, result], tools=TOOLS)
    except InvalidRequestError as error:
        pytest.fail(str(error))
    text.close()


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("Qwen-Qwen3-0.6B", {}, False),
        ("Qwen-Qwen3-0.6B", {"enable_thinking": False}, False),
        ("Qwen-QwQ-32B", {"enable_thinking": True}, True),
        ("Qwen3.5-4B", {}, True),
        ("Qwen3.5-4B", {"enable_thinking": False}, False),
        ("llama-cpp-deepseek-r1", {}, True),
        ("Qwen-Qwen2.5-7B-Instruct", {}, False),
    ],
)
def test_a_prompt_that_opens_a_thought_is_recognised(
    llama_cpp_models: Path,
    default_model_file: GgufFile,
    name: str,
    options: dict[str, Any],
    expected: bool,
) -> None:
    source = (llama_cpp_models / f"templates_{name}.jinja").read_text("utf-8")
    vocabulary = read_vocabulary(default_model_file.metadata)
    tokenizer = tokenizer_of(replace(vocabulary, chat_templates={"default": source}))
    text = ModelText(tokenizer, ChatTemplate(tokenizer))
    prompt = text.encode_chat([QUESTION], options=options)
    assert text.prompt_opens_reasoning(prompt) == expected
    text.close()
