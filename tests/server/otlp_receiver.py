"""A collector of OpenTelemetry for tests: receives traces over OTLP (HTTP, protobuf) and decodes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from server_process import wait_for


@dataclass
class ReceivedSpan:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    kind: int
    began: int
    ended: int
    attributes: dict[str, Any]
    is_error: bool
    resource: dict[str, Any]
    children: list[ReceivedSpan] = field(default_factory=list)

    def named(self, name: str) -> list[ReceivedSpan]:
        return [one for one in self.children if one.name == name]


class Receiver:
    """Owns what was received. `status` is the answer to exports; while `is_open` is not set, none is answered."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.is_open = threading.Event()
        self.is_open.set()
        self.num_waiting = 0
        """Exports that are not answered yet."""
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []

    def spans(self) -> list[ReceivedSpan]:
        """All spans, with their children in the order of their beginning."""
        found = [span for body in list(self.bodies) for span in _spans(body)]
        by_id = {(span.trace_id, span.span_id): span for span in found}
        for span in sorted(found, key=lambda one: one.began):
            parent = by_id.get((span.trace_id, span.parent_id))
            if parent is not None:
                parent.children.append(span)
        return found

    def request(self, request_id: str) -> ReceivedSpan:
        """Waits for the span of a request."""
        found: list[ReceivedSpan] = []

        def is_there() -> bool:
            found[:] = [one for one in self.spans() if one.attributes.get("weft.request_id") == request_id]
            return bool(found)

        wait_for(is_there)
        [span] = found
        return span


def _spans(body: bytes) -> Iterator[ReceivedSpan]:
    for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = {one.key: _value(one.value) for one in of_resource.resource.attributes}
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield ReceivedSpan(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.trace_state,
                    span.kind,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    {one.key: _value(one.value) for one in span.attributes},
                    span.status.code == Status.STATUS_CODE_ERROR,
                    resource,
                )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, str(kind))


@contextmanager
def running_receiver() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.num_waiting += 1
            receiver.is_open.wait(60)
            receiver.num_waiting -= 1
            if receiver.status == 200 and self.path == "/v1/traces":
                receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
                receiver.bodies.append(body)
            content = ExportTraceServiceResponse().SerializeToString()
            self.send_response(receiver.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            receiver.is_open.set()
            server.shutdown()
            thread.join()
