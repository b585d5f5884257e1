"""What the load generator reads from the events of each API, and the requests that it sends to each."""

import json
from typing import Any

import pytest

from weft.bench.serve_api import APIS, Api, Dialect
from weft.bench.serve_load import Item
from weft.bench.serve_stream import Answer, JunkError, LineReader

STREAMS: dict[Api, list[dict[str, Any]]] = {
    "completions": [
        {"choices": [{"index": 0, "text": "a", "finish_reason": None}]},
        {"choices": [{"index": 0, "text": "b", "finish_reason": None}]},
        {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}},
    ],
    "chat": [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"reasoning_content": "a"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}},
    ],
    "responses": [
        {"type": "response.created", "response": {"error": None}},
        {"type": "response.output_item.added", "item": {}},
        {"type": "response.reasoning_text.delta", "delta": "a"},
        {"type": "response.output_text.delta", "delta": "b"},
        {"type": "response.output_text.done", "text": "b"},
        {
            "type": "response.incomplete",
            "response": {"usage": {"input_tokens": 7, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}},
        },
    ],
    "messages": [
        {
            "type": "message_start",
            "message": {"usage": {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 0}},
        },
        {"type": "ping"},
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "a"}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "b"}},
        {"type": "content_block_stop"},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ],
    "ollama": [
        {"message": {"role": "assistant", "content": ""}, "done": False},
        {"message": {"role": "assistant", "content": "", "thinking": "a"}, "done": False},
        {"message": {"role": "assistant", "content": "b"}, "done": False},
        {
            "message": {"role": "assistant", "content": ""},
            "done": True,
            "done_reason": "length",
            "prompt_eval_count": 7,
            "eval_count": 2,
        },
    ],
}  # fmt: skip
REASONS = {"responses": "incomplete", "messages": "max_tokens"}
ERRORS: dict[Api, dict[str, Any]] = {
    "completions": {"error": {"message": "went wrong"}},
    "chat": {"error": {"message": "went wrong"}},
    "responses": {"type": "response.failed", "response": {"error": {"message": "went wrong"}}},
    "messages": {"type": "error", "error": {"type": "api_error", "message": "went wrong"}},
    "ollama": {"error": "went wrong"},
}


@pytest.mark.parametrize("api", APIS)
def test_tokens_usage_reason_and_end_are_read_from_every_api(api: Api) -> None:
    answer = Answer(0.0)
    for second, event in enumerate(STREAMS[api]):
        answer.take(json.dumps(event).encode(), float(second))
    if api in ("completions", "chat"):
        assert not answer.is_done
        answer.take(b"[DONE]", 9.0)
    assert answer.is_done and answer.failure is None
    assert len(answer.chunk_times) == 2
    assert (answer.prompt_tokens, answer.completion_tokens) == (7, 2)
    assert answer.cached_tokens == (None if api == "ollama" else 4)
    assert answer.finish_reason == REASONS.get(api, "length")


@pytest.mark.parametrize("api", APIS)
def test_an_error_event_of_every_api_fails_the_answer(api: Api) -> None:
    answer = Answer(0.0)
    answer.take(json.dumps(ERRORS[api]).encode(), 1.0)
    assert answer.failure is not None and answer.failure.kind == "error event"
    assert answer.failure.detail == "went wrong"


@pytest.mark.parametrize("event", [{"choices": 5}, {"choices": [5]}, {"choices": "ab"}])
def test_a_chunk_with_a_wrong_type_is_junk(event: dict[str, Any]) -> None:
    with pytest.raises(JunkError, match="choice"):
        Answer(0.0).take(json.dumps(event).encode(), 1.0)


def test_json_lines_are_split_at_any_byte() -> None:
    stream = b'{"a": 1}\n\n{"b": "\xc3\xa9"}\n'
    for cut in range(len(stream) + 1):
        reader = LineReader()
        assert reader.feed(stream[:cut]) + reader.feed(stream[cut:]) == [b'{"a": 1}', b'{"b": "\xc3\xa9"}']


@pytest.mark.parametrize("api", APIS)
def test_each_api_gets_the_length_in_its_own_field(api: Api) -> None:
    dialect = Dialect("m", api, takes_ids=False, takes_exact_length=False)
    fields = json.loads(dialect.body(Item("Hello", 7), lambda _: ""))
    assert fields["model"] == "m" and fields["stream"] is True
    lengths = (
        fields.get("max_tokens"),
        fields.get("max_output_tokens"),
        fields.get("options", {}).get("num_predict"),
    )
    assert [one for one in lengths if one is not None] == [7]
    prompts = (fields.get("prompt"), fields.get("input"), fields.get("messages", [{}])[0].get("content"))
    assert [one for one in prompts if one is not None] == ["Hello"]
    assert ("stream_options" in fields) == (api in ("completions", "chat"))
