"""Chat templates of many model families against transformers: equal text, equal ids, and equal errors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from text_references import reference_tokenizer
from transformers.utils import chat_template_utils

from weft.errors import InvalidRequestError
from weft.loading.gguf import read_gguf
from weft.loading.vocabulary import Vocabulary, read_vocabulary
from weft.text.chat_template import ChatTemplate
from weft.text.gguf_tokenizer import tokenizer_of

NOW = datetime(2026, 2, 3, 4, 5, 6)
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

Messages = list[dict[str, Any]]


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = call(
    "get_weather", "123456789", city="Zürich <b>", days=2, metric=1.5, now=True, units=None, tags=[1, "a"]
)
NOTHING = call("list_files", "abcdefghi")
QUESTION = message("user", "How is the weather?")
SUNNY = message("tool", "sunny & warm", tool_call_id="123456789", name="get_weather")
FILES = message("tool", '{"files": ["a", "b"]}', tool_call_id="abcdefghi", name="list_files")

CONVERSATIONS: dict[str, Messages] = {
    "one turn": [message("user", "Hi there")],
    "system": [message("system", "Be brief."), message("user", "2+2?")],
    "several turns": [
        message("system", "  System. "),
        message("user", " a "),
        message("assistant", "b\n"),
        message("user", "日本 🎉 <b>&amp;'\""),
    ],
    "white space and unicode": [message("user", "é\u200d🎉\n\nx  \t")],
    "empty user": [message("user", "")],
    "empty assistant": [message("user", "q"), message("assistant", ""), message("user", "r")],
    "a tool call": [QUESTION, message("assistant", "", tool_calls=[NOTHING])],
    "a tool result": [QUESTION, message("assistant", "", tool_calls=[WEATHER]), SUNNY],
    "a call without content": [QUESTION, message("assistant", None, tool_calls=[WEATHER]), SUNNY],
    "two calls and on": [
        message("system", "s"),
        QUESTION,
        message("assistant", "let me see", tool_calls=[WEATHER, NOTHING]),
        SUNNY,
        FILES,
        message("assistant", "done"),
        message("user", "thanks"),
    ],
    "thoughts in the text": [
        message("user", "q"),
        message("assistant", "<think>\nhm\n</think>\n\nanswer"),
        message("user", "r"),
    ],
    "thoughts beside the text": [
        message("user", "q"),
        message("assistant", "answer", reasoning_content="because"),
        message("user", "r"),
    ],
    "ends with the assistant": [message("user", "q"), message("assistant", "final answer")],
    "roles do not alternate": [message("user", "a"), message("user", "b")],
    "a strange role": [message("narrator", "x")],
    "developer": [message("developer", "Be brief."), message("user", "2+2?")],
}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    function = {"name": name, "description": f"<{name}> & 'more' é", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    tool(
        "get_weather",
        city={"type": "string", "description": "a city"},
        days={"type": "integer", "enum": [1, 2]},
    ),
    tool("list_files"),
]

# Templates for which transformers raises an error and weft renders a usable text.
LOOPS_OVER_NO_TOOLS = (
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
)
LOOPS_OVER_NO_CONTENT = ("LFM2.5-8B-A1B",)
WRITES_A_GENERATOR = ("llama-cpp-deepseek-r1",)  # as JSON, which Python's Jinja cannot do
# Templates whose text differs: Python's Jinja escapes HTML in a string that is joined with one marked as safe.
ESCAPES_HTML = ("meetkai-functionary-medium-v3.1",)
# Templates that never mention tools. transformers ignores the tools of a request, weft rejects them.
WITHOUT_TOOLS = (
    "HuggingFaceTB-SmolLM3-3B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "google-gemma-2-2b-it",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
)


def template_names(folder: Path) -> list[str]:
    return sorted(path.stem.removeprefix("templates_") for path in folder.glob("templates_*.jinja"))


def tiny_vocabulary(source: str) -> Vocabulary:
    """The part of a vocabulary that rendering needs: the names of special tokens."""
    ids = {
        f"tokenizer.ggml.{kind}_token_id": i for i, kind in enumerate(("bos", "eos", "unknown", "padding"))
    }
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": list(NAMES.values())}
    return read_vocabulary({**tokens, **ids, "tokenizer.chat_template": source})


@pytest.fixture(autouse=True)
def fixed_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Clock:
        @staticmethod
        def now() -> datetime:
            return NOW

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    chat_template_utils._compile_jinja_template.cache_clear()
    yield
    chat_template_utils._compile_jinja_template.cache_clear()


def reference_text(source: str, messages: Messages, tools: Any, prompt: bool) -> str | None:
    """The text that transformers renders; None if it raises."""
    try:
        texts, _ = chat_template_utils.render_jinja_template(
            [messages], tools=tools, chat_template=source, add_generation_prompt=prompt, **NAMES
        )
    except Exception:
        return None
    return texts[0]


def with_json_arguments(messages: Messages) -> Messages:
    """The messages with the arguments of calls as JSON strings, as clients send them."""
    copied = json.loads(json.dumps(messages))
    for each in copied:
        for tool_call in each.get("tool_calls", ()):
            tool_call["function"]["arguments"] = json.dumps(
                tool_call["function"]["arguments"], ensure_ascii=False
            )
    return copied


def our_text(template: ChatTemplate, messages: Messages, tools: Any, prompt: bool) -> str | None:
    try:
        return template.render(messages, tools=tools, add_generation_prompt=prompt)
    except InvalidRequestError:
        return None


def test_every_template_renders_as_in_transformers(
    llama_cpp_models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {"equal": 0, "both reject": 0, "arguments as JSON": 0, "only weft renders": 0}
    for name in template_names(llama_cpp_models):
        source = (llama_cpp_models / f"templates_{name}.jinja").read_text("utf-8")
        template = ChatTemplate(tokenizer_of(tiny_vocabulary(source)), now=lambda: NOW)
        assert template.uses_tools == (name not in WITHOUT_TOOLS), name
        sets = (None, TOOLS[:1], TOOLS) if template.uses_tools else (None,)
        for (title, messages), tools, prompt in itertools.product(CONVERSATIONS.items(), sets, (True, False)):
            expected = reference_text(source, messages, tools, prompt)
            found = our_text(template, with_json_arguments(messages), tools, prompt)
            case = (name, title, len(tools or ()), prompt)
            if expected is None and found is not None:
                # A template that concatenates the arguments of a call with text needs them as a JSON string.
                as_json = reference_text(source, with_json_arguments(messages), tools, prompt)
                if as_json is not None:
                    assert found == as_json, case
                    counts["arguments as JSON"] += 1
                    continue
                assert (
                    (name in LOOPS_OVER_NO_TOOLS and tools is None)
                    or (name in LOOPS_OVER_NO_CONTENT and title == "a call without content")
                    or (name in WRITES_A_GENERATOR and tools is not None)
                ), case
                counts["only weft renders"] += 1
            elif expected != found:
                assert name in ESCAPES_HTML and tools is not None, f"{case}\n{expected!r}\n{found!r}"
            else:
                counts["equal" if found is not None else "both reject"] += 1
    with capsys.disabled():
        print(f"\nchat templates: {counts}")
    assert counts["equal"] > 4000


@pytest.mark.parametrize(
    ("vocabulary_name", "template_name"),
    [
        ("llama-bpe", "meta-llama-Llama-3.1-8B-Instruct"),
        ("llama-bpe", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"),
        ("qwen2", "Qwen-Qwen2.5-7B-Instruct"),
        ("qwen2", "Qwen-Qwen3-0.6B"),
        ("llama-spm", "mistralai-Mistral-Nemo-Instruct-2407"),
        ("phi-3", "microsoft-Phi-3.5-mini-instruct"),
        ("gemma-4", "google-gemma-4-31B-it"),
    ],
)
def test_prompt_ids_equal_transformers(
    llama_cpp_models: Path, vocabulary_name: str, template_name: str
) -> None:
    path = llama_cpp_models / f"ggml-vocab-{vocabulary_name}.gguf"
    source = (llama_cpp_models / f"templates_{template_name}.jinja").read_text("utf-8")
    vocabulary = read_vocabulary(read_gguf(path).metadata)
    reference = reference_tokenizer(vocabulary_name, path, vocabulary)
    template = ChatTemplate(
        tokenizer_of(replace(vocabulary, chat_templates={"default": source})), now=lambda: NOW
    )
    compared = 0
    sets = (None, TOOLS) if template.uses_tools else (None,)
    for messages, tools, prompt in itertools.product(CONVERSATIONS.values(), sets, (True, False)):
        try:
            expected = reference.apply_chat_template(
                messages, tools=tools, chat_template=source, add_generation_prompt=prompt, return_dict=False
            )
        except Exception:
            continue
        ours = template.encode(with_json_arguments(messages), tools=tools, add_generation_prompt=prompt)
        assert ours == list(expected), (messages, tools, prompt)
        compared += 1
    assert compared > 20


@pytest.mark.parametrize(
    "name", ["Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct", "google-gemma-2-2b-it"]
)
def test_the_last_message_is_continued_as_in_transformers(llama_cpp_models: Path, name: str) -> None:
    source = (llama_cpp_models / f"templates_{name}.jinja").read_text("utf-8")
    template = ChatTemplate(tokenizer_of(tiny_vocabulary(source)), now=lambda: NOW)
    for ending in ("Once upon", "Once upon ", "a time\n\n"):
        messages = [message("user", "q"), message("assistant", ending)]
        (expected,), _ = chat_template_utils.render_jinja_template(
            [messages], chat_template=source, continue_final_message=True, **NAMES
        )
        found = template.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert found == expected


@pytest.mark.parametrize("thinking", [True, False])
def test_options_reach_the_template(llama_cpp_models: Path, thinking: bool) -> None:
    source = (llama_cpp_models / "templates_Qwen-Qwen3-0.6B.jinja").read_text("utf-8")
    template = ChatTemplate(tokenizer_of(tiny_vocabulary(source)))
    (expected,), _ = chat_template_utils.render_jinja_template(
        [[QUESTION]], chat_template=source, add_generation_prompt=True, enable_thinking=thinking, **NAMES
    )
    assert template.render([QUESTION], options={"enable_thinking": thinking}) == expected


def test_a_file_with_named_templates_uses_the_same_one_as_transformers(llama_cpp_models: Path) -> None:
    vocabulary = read_vocabulary(read_gguf(llama_cpp_models / "ggml-vocab-command-r.gguf").metadata)
    assert set(vocabulary.chat_templates) == {"default", "tool_use", "rag"}
    bare_tools = [tool["function"] for tool in TOOLS]  # the template expects a format older than OpenAI's
    tokenizer = tokenizer_of(vocabulary)
    reference = reference_tokenizer("command-r", llama_cpp_models / "ggml-vocab-command-r.gguf", vocabulary)
    reference.chat_template = dict(vocabulary.chat_templates)
    old = [
        {**tool, "parameter_definitions": {"a": {"type": "str", "description": "d"}}} for tool in bare_tools
    ]
    for tools in (None, old):
        expected = reference.apply_chat_template(
            [QUESTION], tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert ChatTemplate(tokenizer).encode([QUESTION], tools=tools) == list(expected)
