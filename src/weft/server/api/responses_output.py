"""Owns the output items of one response while they arrive, and writes the events of its stream.

    text, thoughts and calls -> OutputItems -> events of the stream, with sequence numbers
                                           `-> the finished items, for the response object

The same pieces give the same items for a stream and for a body; a body has no events. One item is open at a time. It
closes when a piece of another kind arrives, or at the end.

| item | events between `output_item.added` and `output_item.done` |
|---|---|
| message | `content_part.added`, `output_text.delta` ..., `output_text.done`, `content_part.done` |
| reasoning | the same with `reasoning_text`; or with `reasoning_summary_part` and `reasoning_summary_text` if the client asked for a summary |
| function_call | `function_call_arguments.delta` ..., `.done` |
| file_search_call | `file_search_call.in_progress`, `.searching`, `.completed` |
| custom_tool_call | `custom_tool_call_input.delta`, `.done`: one delta, since the input is a string inside of JSON |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from weft.server.api.answer_format import around_text
from weft.server.api.file_search import FileSearch
from weft.server.api.responses_items import sealed
from weft.server.api.responses_tools import ShownTool
from weft.server.stream.choices import Piece
from weft.text.answer_parts import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from weft.text.custom_calls import custom_input

_encode = msgspec.json.Encoder().encode
_MAX_LOGPROB_BYTES = 4 << 20
"""The logprobs of a message are repeated in its last events. Beyond this size, only the deltas have them."""


@dataclass
class _Item:
    kind: str
    id: str
    index: int
    fields: Mapping[str, Any]
    """Fields of the item that are the same in all of its events."""
    texts: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    """JSON of the entries, without brackets."""
    around_delta: tuple[bytes, bytes] = b"", b""
    """The constant bytes of an event with new text: before the text, and between the text and the sequence number."""

    @property
    def text(self) -> str:
        return "".join(self.texts)


class OutputItems:
    """The output items of one response, and the events of its stream. `tools`: the tools by the name that the model sees."""

    def __init__(
        self,
        request_id: str,
        tools: Mapping[str, ShownTool],
        *,
        is_streamed: bool,
        wants_summary: bool,
        wants_sealed: bool,
        wants_logprobs: bool,
        search: FileSearch | None = None,
        wants_results: bool = False,
    ) -> None:
        self._request_id = request_id
        self._tools = tools
        self._is_streamed = is_streamed
        self._wants_summary = wants_summary
        self._wants_sealed = wants_sealed
        self._wants_logprobs = wants_logprobs
        self.search = search
        """The call of `file_search`, if there is one. It is the first item."""
        self._has_search_ended = search is None
        self._wants_results = wants_results
        self._open: _Item | None = None
        self._done: list[bytes] = []
        self._events: list[bytes] = []
        self._sequence_number = 0
        self._num_logprob_bytes = 0

    @property
    def num_items(self) -> int:
        return len(self._done)

    def as_json(self) -> bytes:
        """The items that are done, as a JSON list."""
        return b"[" + b",".join(self._done) + b"]"

    def event(self, kind: str, **fields: Any) -> None:
        """Adds an event. A field may be JSON, as `msgspec.Raw`."""
        if self._is_streamed:
            content = {"type": kind, **fields, "sequence_number": self._sequence_number}
            self._events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(content)))
            self._sequence_number += 1

    def take_events(self) -> bytes:
        """The events since the last call."""
        events, self._events = self._events, []
        return events[0] if len(events) == 1 else b"".join(events)

    def add(self, piece: Piece, logprobs: bytes) -> None:
        """Adds a piece. `logprobs`: the logprobs of its text, as JSON without brackets."""
        self.end_search()
        if piece.deltas is None:
            if piece.text or logprobs:
                self._add_text("message", piece.text, logprobs)
            return
        for delta in piece.deltas:
            self._add_delta(delta, logprobs)
            # The first content of a piece gets the logprobs of all its content.
            if isinstance(delta, Content):
                logprobs = b""

    def begin_search(self) -> None:
        """Adds the events before a search."""
        if self.search is not None:
            begun = self.search.call(self._search_id, "in_progress", with_results=False)
            self.event("response.output_item.added", output_index=0, item=begun)
            for step in ("in_progress", "searching"):
                self.event(f"response.file_search_call.{step}", output_index=0, item_id=self._search_id)

    def end_search(self) -> None:
        """Adds the call and the events after a search, once, when its result is known."""
        if self._has_search_ended or self.search is None or self.search.is_pending:
            return
        self._has_search_ended = True
        done = _encode(self.search.call(self._search_id, "completed", with_results=self._wants_results))
        self._done.append(done)
        self.event("response.file_search_call.completed", output_index=0, item_id=self._search_id)
        self.event("response.output_item.done", output_index=0, item=msgspec.Raw(done))

    @property
    def _search_id(self) -> str:
        return f"fs_{self._request_id}_0"

    def close(self, *, is_complete: bool) -> None:
        """Closes the open item. A response without an item besides its search gets a message without text."""
        self.end_search()
        if self._open is None and len(self._done) == (self.search is not None):
            self._add_text("message", "", b"")
        self._close_item(is_complete)

    # ------------------------------------------------------------------ items

    def _add_delta(self, delta: Delta, logprobs: bytes) -> None:
        if isinstance(delta, Content):
            self._add_text("message", delta.text, logprobs)
        elif isinstance(delta, Reasoning):
            self._add_text("reasoning", delta.text, b"")
        elif isinstance(delta, ToolCallStart):
            self._open_call(delta)
        else:
            assert isinstance(delta, ToolCallArguments) and self._open is not None, (
                "arguments follow their call"
            )
            self._open.texts.append(delta.text)
            if self._open.kind == "function_call":
                self._delta(self._open, delta.text)

    def _add_text(self, kind: str, text: str, logprobs: bytes) -> None:
        item = self._open
        if item is None or item.kind != kind:
            self._close_item(is_complete=True)
            item = self._open_text(kind)
        item.texts.append(text)
        if logprobs and self._num_logprob_bytes <= _MAX_LOGPROB_BYTES:
            item.logprobs.append(logprobs)
            self._num_logprob_bytes += len(logprobs)
        if logprobs and self._is_streamed:
            listed = msgspec.Raw(b"[" + logprobs + b"]")
            self.event(
                "response.output_text.delta",
                **self._place(item),
                content_index=0,
                delta=text,
                logprobs=listed,
            )
        elif text:
            self._delta(item, text)

    def _open_text(self, kind: str) -> _Item:
        if kind == "message":
            item = self._opened("message", "msg", {"role": "assistant"})
            self._begin_deltas(item, "response.output_text.delta", content_index=0, logprobs=[])
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        elif self._wants_summary:
            item = self._opened("reasoning", "rs", {})
            self._begin_deltas(item, "response.reasoning_summary_text.delta", summary_index=0)
            part = {"type": "summary_text", "text": ""}
            self.event(
                "response.reasoning_summary_part.added", **self._place(item), summary_index=0, part=part
            )
            return item
        else:
            item = self._opened("reasoning", "rs", {})
            self._begin_deltas(item, "response.reasoning_text.delta", content_index=0)
            part = {"type": "reasoning_text", "text": ""}
        self.event("response.content_part.added", **self._place(item), content_index=0, part=part)
        return item

    def _open_call(self, call: ToolCallStart) -> None:
        self._close_item(is_complete=True)
        tool = self._tools.get(call.name, ShownTool(call.name))
        fields: dict[str, Any] = {"call_id": call.id, "name": tool.name}
        if tool.namespace is not None:
            fields["namespace"] = tool.namespace
        if tool.is_custom:
            self._opened("custom_tool_call", "ctc", fields)
        else:
            item = self._opened("function_call", "fc", fields)
            self._begin_deltas(item, "response.function_call_arguments.delta")

    def _opened(self, kind: str, prefix: str, fields: Mapping[str, Any]) -> _Item:
        index = len(self._done)
        item = self._open = _Item(kind, f"{prefix}_{self._request_id}_{index}", index, fields)
        content = self._item_json(item, "", "in_progress", is_new=True)
        self.event("response.output_item.added", output_index=index, item=msgspec.Raw(content))
        return item

    def _close_item(self, is_complete: bool) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        text = item.text
        place = self._place(item)
        if item.kind == "message":
            part = self._text_part(item, text)
            for number, annotation in enumerate(part["annotations"]):
                self.event(
                    "response.output_text.annotation.added",
                    **place,
                    content_index=0,
                    annotation_index=number,
                    annotation=annotation,
                )
            self.event(
                "response.output_text.done",
                **place,
                content_index=0,
                text=text,
                logprobs=part["logprobs"],
            )
            self.event("response.content_part.done", **place, content_index=0, part=part)
        elif item.kind == "reasoning" and self._wants_summary:
            part = {"type": "summary_text", "text": text}
            self.event("response.reasoning_summary_text.done", **place, summary_index=0, text=text)
            self.event("response.reasoning_summary_part.done", **place, summary_index=0, part=part)
        elif item.kind == "reasoning":
            part = {"type": "reasoning_text", "text": text}
            self.event("response.reasoning_text.done", **place, content_index=0, text=text)
            self.event("response.content_part.done", **place, content_index=0, part=part)
        elif item.kind == "function_call":
            self.event("response.function_call_arguments.done", **place, arguments=text)
        else:
            text = custom_input(text)
            self.event("response.custom_tool_call_input.delta", **place, delta=text)
            self.event("response.custom_tool_call_input.done", **place, input=text)
        done = self._item_json(item, text, "completed" if is_complete else "incomplete")
        self._done.append(done)
        self.event("response.output_item.done", output_index=item.index, item=msgspec.Raw(done))

    def _item_json(self, item: _Item, text: str, status: str, *, is_new: bool = False) -> bytes:
        content: dict[str, Any] = {"id": item.id, "type": item.kind, "status": status, **item.fields}
        if item.kind == "message":
            content["content"] = [] if is_new else [self._text_part(item, text)]
        elif item.kind == "function_call":
            content["arguments"] = text
        elif item.kind == "custom_tool_call":
            content["input"] = text
        else:
            kind = "summary" if self._wants_summary else "content"
            content["summary"] = []
            if not is_new:
                part = {"type": "summary_text" if self._wants_summary else "reasoning_text", "text": text}
                content[kind] = [part]
            content["encrypted_content"] = sealed(text) if self._wants_sealed and not is_new else None
        return _encode(content)

    def _text_part(self, item: _Item, text: str) -> dict[str, Any]:
        logprobs = msgspec.Raw(b"[" + b",".join(item.logprobs) + b"]")
        annotations = [] if self.search is None else self.search.annotations(text)
        return {"type": "output_text", "text": text, "annotations": annotations, "logprobs": logprobs}

    # ------------------------------------------------------------------ events

    def _place(self, item: _Item) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": item.index}

    def _begin_deltas(self, item: _Item, kind: str, **fields: Any) -> None:
        """Encodes what all events with new text of this item have in common."""
        if self._is_streamed:
            content = _encode({"type": kind, **self._place(item), **fields, "delta": ""})
            before, _ = around_text(content)
            item.around_delta = b"event: %b\ndata: %b" % (kind.encode(), before), b',"sequence_number":'

    def _delta(self, item: _Item, text: str) -> None:
        """Adds the event for new text. Called for every token."""
        if self._is_streamed:
            before, after = item.around_delta
            self._events.append(b"%b%b%b%d}\n\n" % (before, _encode(text), after, self._sequence_number))
            self._sequence_number += 1


def logprob_entries(entries: Sequence[Any]) -> bytes:
    """Entries as JSON without brackets."""
    return _encode(entries)[1:-1] if entries else b""
