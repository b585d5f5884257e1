"""What the chat computes before it draws: fields of the API, values, figures, copied programs, versions of messages.
The functions run in the browser."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from browser_pages import USER
from playwright.sync_api import Browser, Page
from server_process import MODEL, Server

from weft.request import PARAMETERS


@pytest.fixture(scope="module")
def page(browser: Browser, noop_server: Server) -> Iterator[Page]:
    page = browser.new_page(base_url=noop_server.url)
    page.goto("/")
    yield page
    page.close()


def call(page: Page, module: str, name: str, *arguments: Any) -> Any:
    script = "async ([module, name, given]) => (await import(`/page/${module}.js`))[name](...given)"
    return page.evaluate(script, [module, name, list(arguments)])


@pytest.fixture(scope="module")
def fields(page: Page, noop_server: Server) -> dict[str, Any]:
    document = noop_server.client.get("/openapi.json").json()
    return {one["name"]: one for one in call(page, "chat_fields", "fieldsOf", document)}


# --- fields and values ---


def test_every_field_of_a_chat_request_is_offered_with_the_words_of_the_schema(
    fields: dict[str, Any], noop_server: Server
) -> None:
    document = noop_server.client.get("/openapi.json").json()
    properties = document["components"]["schemas"]["ChatRequest"]["properties"]
    own = {"messages", "stream", "stream_options", "tools", "response_format"}
    assert set(fields) == set(properties) - own
    assert set(PARAMETERS) < set(fields)
    for name, field in fields.items():
        assert field["description"] == properties[name]["description"]
        assert field["minimum"] == pytest.approx(properties[name].get("minimum"))
        assert field["above"] == properties[name].get("exclusiveMinimum")
        assert field["maximum"] == pytest.approx(properties[name].get("maximum"))
    for name in PARAMETERS:
        assert fields[name]["kind"] == "number"


KINDS = {
    "temperature": "number",
    "top_k": "number",
    "seed": "number",
    "ignore_eos": "boolean",
    "logprobs": "boolean",
    "session_id": "text",
    "priority": "number-or-text",
    "stop": "lines",
    "stop_token_ids": "numbers",
    "logit_bias": "json",
    "tool_choice": "json",
    "chat_template_kwargs": "json",
}


def test_the_control_of_a_field_follows_from_its_type(fields: dict[str, Any]) -> None:
    assert {name: fields[name]["kind"] for name in KINDS} == KINDS


RANGES = {
    "temperature": "0 to 100",
    "top_p": "above 0, up to 1",
    "top_k": "from -1",
    "presence_penalty": "-2 to 2",
    "seed": "",
    "session_id": "",
}
VALUES = (
    ("temperature", "0.5", 0.5),
    ("temperature", " ", None),
    ("temperature", "101", "temperature is 101; allowed: a number, 0 to 100."),
    ("temperature", "warm", "temperature is warm; allowed: a number, 0 to 100."),
    ("temperature", "NaN", "temperature is NaN; allowed: a number, 0 to 100."),
    ("top_p", "0", "top_p is 0; allowed: a number, above 0, up to 1."),
    ("top_k", "2.5", "top_k is 2.5; allowed: a whole number, from -1."),
    ("seed", "-7", -7),
    ("seed", "9007199254740993", "seed is 9007199254740993; allowed: a whole number up to 9007199254740991 in this page."),
    ("priority", "high", "high"),
    ("priority", "3", 3),
    ("priority", "7", "priority is 7; allowed: a whole number, 0 to 3."),
    ("ignore_eos", "true", True),
    ("session_id", "a b", "a b"),
    ("stop", "a\n b", ["a", " b"]),
    ("stop", '["\\n\\n", "b"]', ["\n\n", "b"]),
    ("stop_token_ids", "1, 2 3", [1, 2, 3]),
    ("stop_token_ids", "[4]", [4]),
    ("stop_token_ids", "x", "stop_token_ids is x; allowed: whole numbers, with commas or spaces between them."),
    ("logit_bias", '{"5": -100}', {"5": -100}),
    ("logit_bias", "{", "logit_bias is not JSON: "),
    ("tool_choice", "required", "required"),
    ("tool_choice", '{"type": "function"}', {"type": "function"}),
)  # fmt: skip


def test_typed_values_become_json_or_a_sentence_that_says_what_is_wrong(
    page: Page, fields: dict[str, Any]
) -> None:
    for name, expected in RANGES.items():
        assert call(page, "chat_fields", "rangeOf", fields[name]) == expected
    for name, typed, expected in VALUES:
        found = call(page, "chat_fields", "valueOf", fields[name], typed)
        if "error" in found:
            assert isinstance(expected, str) and found["error"].startswith(expected), found
        else:
            assert found.get("value") == expected, (name, typed)


def test_tools_and_forms_of_answers_become_their_fields(page: Page) -> None:
    bare = {"name": "f", "parameters": {"type": "object"}}
    whole = {"type": "function", "function": bare}
    for typed, expected in (
        ('{"name": "f", "parameters": {"type": "object"}}', {"value": [whole]}),
        (
            '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]',
            {"value": [whole]},
        ),
        ("", {"value": None}),
        ("[]", {"value": None}),
        ("[1]", {"error": "A tool is a JSON object with a name."}),
    ):
        assert call(page, "chat_fields", "toolsOf", typed) in (expected, {})
    assert "not JSON" in call(page, "chat_fields", "toolsOf", "[")["error"]
    assert call(page, "chat_fields", "formatOf", "json_schema", '{"type": "object"}') == {
        "value": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
        }
    }
    assert call(page, "chat_fields", "formatOf", "other", '{"type": "regex"}') == {"value": {"type": "regex"}}
    assert "schema is not JSON" in call(page, "chat_fields", "formatOf", "json_schema", "{")["error"]


# --- streams and figures ---

CHUNKS = """
async ([request, ...chunks]) => {
  const { applyChunk, figuresOf } = await import("/page/chat_stream.js");
  const { newAnswer } = await import("/page/chat_tree.js");
  const answers = [];
  let error = null;
  try {
    chunks.forEach((chunk, index) => applyChunk(chunk, answers, (at) => (answers[at] ??= newAnswer(request, "")), 1000 * (index + 1)));
  } catch (found) { error = [found.message, found.code]; }
  for (const answer of answers) answer.times.sent = 500;
  return { answers, error, figures: answers.map(figuresOf) };
}
"""


def chunk(index: int = 0, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}],
    }


def test_a_stream_becomes_text_thoughts_calls_and_figures(page: Page) -> None:
    usage = {"completion_tokens": 5, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    named = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    found = page.evaluate(
        CHUNKS,
        [
            {},
            chunk(role="assistant", content=""),
            chunk(reasoning_content="Hm"),
            chunk(content="He"),
            chunk(content="llo"),
            chunk(tool_calls=[named]),
            chunk(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}]),
            chunk(finish="tool_calls"),
            {"choices": [], "usage": usage},
        ],
    )
    (answer,) = found["answers"]
    assert (answer["text"], answer["thoughts"], answer["finish"]) == ("Hello", "Hm", "tool_calls")
    assert answer["calls"] == [{"id": "c1", "type": "function", "name": "f", "text": "{}"}]
    # The first chunk has nothing; the first token came at 2 s and the last at 6 s.
    figures = found["figures"][0]
    assert (figures["firstSeconds"], figures["rate"], figures["tokens"]) == (1.5, 1.0, 5)
    assert (figures["promptTokens"], figures["cachedTokens"]) == (9, 4)


def test_an_error_inside_a_stream_keeps_what_came_before(page: Page) -> None:
    failure = {"error": {"message": "the engine died", "code": "engine_died"}}
    found = page.evaluate(CHUNKS, [{}, chunk(content="Hel"), failure, chunk(content="lo")])
    assert found["answers"][0]["text"] == "Hel"
    assert found["error"] == ["the engine died", "engine_died"]


@pytest.mark.parametrize("has_own_numbers", [True, False])
def test_each_of_several_answers_has_its_own_number_of_tokens_or_none(
    page: Page, has_own_numbers: bool
) -> None:
    ends = [chunk(index, "length", content=" world") for index in (0, 1)]
    if has_own_numbers:
        for number, end in enumerate(ends):
            end["choices"][0]["timings"] = {"completion_tokens": 3 + number}
    usage = {"choices": [], "usage": {"completion_tokens": 7, "prompt_tokens": 9}}
    starts = [chunk(index, content="Hello") for index in (0, 1)]
    found = page.evaluate(CHUNKS, [{"n": 2}, *starts, *ends, usage])
    tokens, rates = ([figures[name] for figures in found["figures"]] for name in ("tokens", "rate"))
    assert [figures["promptTokens"] for figures in found["figures"]] == [9, 9]
    if has_own_numbers:
        assert tokens == [3, 4] and rates == [1.0, 1.5]
    else:
        assert tokens == rates == [None, None]


ERRORS = (
    ({"status": 429, "retryAfter": 7}, "queue is full", "Queue is full.", "Ask again in 7 seconds."),
    ({"status": 429, "retryAfter": 0.2}, "slow down!", "Slow down!", "Ask again in 1 second."),
    ({"status": 503, "code": "engine_not_ready", "retryAfter": 3}, "the engine is starting", "The engine is starting.", "Ask again in 3 seconds."),
    ({"status": 400, "code": "context_length_exceeded"}, "too long", "Too long.", "The conversation is too long for the model."),
    ({"status": 500}, "internal server error", "Internal server error.", ""),
)  # fmt: skip


def test_errors_are_sentences_with_what_to_do(page: Page) -> None:
    script = """async ([fields, message]) => {
      const { ApiError } = await import("/page/api.js");
      return (await import("/page/chat_stream.js")).explained(new ApiError(message, fields));
    }"""
    for given, message, text, hint in ERRORS:
        found = page.evaluate(script, [given, message])
        assert found["text"] == text
        assert found["hint"].startswith(hint) and bool(found["hint"]) == bool(hint)


# --- conversations ---

TREE = """
async () => {
  const tree = await import("/page/chat_tree.js");
  const one = tree.newConversation();
  const ask = (parent, text) => tree.addNode(one, parent, { role: "user", text });
  const answer = (parent, fields) => tree.addNode(one, parent, { ...tree.newAnswer({ seed: 1 }, "Be brief."), state: "done", ...fields });
  const first = ask(null, "  a\\nb");
  const called = answer(first.id, { text: "", thoughts: "t", calls: [{ id: "c", type: "function", name: "f", text: "{}" }] });
  const result = tree.addNode(one, called.id, { role: "tool", results: [{ id: "c", text: "5" }] });
  const stopped = answer(result.id, { text: "five", state: "stopped", calls: [{ id: "d", type: "function", name: "f", text: "{" }] });
  const next = ask(stopped.id, "more");
  const last = answer(next.id, { text: "x" });
  const body = tree.bodyOf(one, last);
  const edited = ask(null, "c");
  const shownAfterEdit = tree.path(one).map(({ id }) => id);
  tree.choose(one, first);
  return { body, title: one.title, shownAfterEdit, edited: edited.id, all: tree.path(one).map(({ id }) => id),
    versions: tree.versions(one, edited).length };
}
"""


def test_an_edited_question_is_another_version_and_the_old_one_keeps_its_answers(page: Page) -> None:
    found = page.evaluate(TREE)
    assert found["shownAfterEdit"] == [found["edited"]]
    assert found["all"] == [1, 2, 3, 4, 5, 6]
    assert found["versions"] == 2
    assert found["title"] == "a"


def test_the_request_has_the_messages_above_the_answer_without_calls_that_were_cut(page: Page) -> None:
    body = page.evaluate(TREE)["body"]
    call_of_f = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert body == {
        "seed": 1,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "  a\nb"},
            {"role": "assistant", "content": None, "reasoning_content": "t", "tool_calls": [call_of_f]},
            {"role": "tool", "tool_call_id": "c", "content": "5"},
            {"role": "assistant", "content": "five"},
            {"role": "user", "content": "more"},
        ],
    }


def test_the_oldest_conversations_are_deleted_when_there_is_no_more_room(page: Page) -> None:
    found = page.evaluate(
        """async () => {
          const { ConversationStore } = await import("/page/chat_store.js");
          const deleted = [];
          const limits = { conversations: 3, characters: 2000 };
          const store = new ConversationStore({ onChange() {}, onDelete: (title) => deleted.push(title), limits });
          const write = (id, updated, nodes = {}) => store.write({ id, title: id, updated, nodes });
          for (const [index, id] of ["a", "b", "c", "d"].entries()) await write(id, index);
          const counted = (await store.list()).map(({ id }) => id);
          await write("e", 9, { text: "x".repeat(1990) });
          const left = (await store.list()).map(({ id }) => id);
          const again = new ConversationStore({ onChange() {}, onDelete() {} });
          const read = (await again.read("e")).nodes.text.length;
          for (const { id } of await again.list()) await again.delete(id);
          return { deleted, counted, left, read, isLasting: await store.isLasting(), end: await again.list() };
        }"""
    )
    assert found["isLasting"] is True
    assert found["counted"] == ["d", "c", "b"]
    assert found["left"] == ["e"]
    assert found["deleted"][0] == "a" and sorted(found["deleted"]) == ["a", "b", "c", "d"]
    assert (found["read"], found["end"]) == (1990, [])


# --- copied programs ---

BODY: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "It's \"brief\" \\ $HOME `x` \n\t\u2028 ü 😀 '''"},
        {"role": "user", "content": "Hello"},
    ],
    "temperature": 0,
    "max_tokens": 3,
    "top_k": 5,
    "ignore_eos": True,
    "logit_bias": {"5": -1.5},
    "response_format": {"type": "text"},
    "stop": ["never in this answer"],
}


def key_environment(secret: str) -> dict[str, str]:
    return {**os.environ, "WEFT_API_KEY": secret, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def test_the_copied_curl_command_and_python_program_get_an_answer(page: Page, keyed_server: Server) -> None:
    curl = call(page, "chat_copy", "asCurl", keyed_server.url + "/", BODY, True)
    python = call(page, "chat_copy", "asPython", keyed_server.url + "/", BODY, True, MODEL)
    assert USER not in curl + python
    environment = key_environment(USER)
    done = subprocess.run(["sh", "-c", curl], env=environment, capture_output=True, text=True, timeout=120)
    assert '"completion_tokens":3' in done.stdout, (curl, done)
    done = subprocess.run(
        [sys.executable, "-c", python], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.strip(), (python, done.stderr)
    refused = subprocess.run(
        ["sh", "-c", curl], env=key_environment("wrong"), capture_output=True, text=True, timeout=120
    )
    assert "invalid_api_key" in refused.stdout


def test_the_copied_programs_send_what_the_page_sent(page: Page, tmp_path: Any) -> None:
    """Without a server: the arguments of curl, and the call of the package."""
    curl = call(page, "chat_copy", "asCurl", "http://127.0.0.1:1/", BODY, False)
    assert "WEFT_API_KEY" not in curl
    arguments = subprocess.run(
        ["sh", "-c", 'curl() { printf "%s" "$5"; }\n' + curl],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert page.evaluate("JSON.parse", arguments) == BODY
    (tmp_path / "openai.py").write_text(
        "import json\n"
        "class OpenAI:\n"
        "    def __init__(self, **given): self.chat = self.completions = self\n"
        "    def create(self, extra_body, **given): print(json.dumps({**given, **extra_body})); return []\n"
    )
    python = call(page, "chat_copy", "asPython", "http://127.0.0.1:1/", BODY, False, MODEL)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", python], env=environment, capture_output=True, text=True, timeout=60
    )
    sent = page.evaluate("JSON.parse", done.stdout)
    assert sent == {**BODY, "model": MODEL, "stream": True}
