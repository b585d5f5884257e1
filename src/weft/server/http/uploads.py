"""Reads an uploaded file (multipart/form-data) while it arrives, and passes it on in pieces."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from weft.server.errors import ApiError, refusal

UPLOADS = frozenset({"/v1/files"})
"""Routes whose POST body is a file. The file is never in memory as a whole. So it has its own size limit, and may take
longer to arrive than other bodies."""
FORM_BYTES = 64 << 10
"""Maximum bytes of the other parts of the form and of its boundaries."""
_PIECE_BYTES = 1 << 20
_MAX_PARTS = 16
_MAX_FIELD_BYTES = 1024
_MAX_HEADER_BYTES = 4096
_MAX_NAME = 255
_HINT = "send multipart/form-data with the parts purpose and file, as `curl -F purpose=batch -F file=@lines.jsonl` does"

# This package logs a warning for each invalid body. A client must not be able to fill the log.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


@dataclass
class UploadForm:
    """The form without the content of its file."""

    file_name: str | None = None
    """The name of the file in the form. None: the form has no file."""
    fields: dict[str, str] = field(default_factory=dict)


async def read_upload(
    content_type: str, body: AsyncIterator[bytes], write: Callable[[bytearray], Awaitable[None]]
) -> UploadForm:
    """Passes the file of a form to `write`, in pieces. Raises ApiError for a body that is not such a form."""
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise _invalid(f"the Content-Type is {content_type!r:.80}")
    parts = _Parts()
    try:
        parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": parts.begin,
                "on_header_field": parts.add_header_name,
                "on_header_value": parts.add_header_value,
                "on_header_end": parts.end_header,
                "on_headers_finished": parts.end_headers,
                "on_part_data": parts.add,
                "on_part_end": parts.end,
                "on_end": parts.finish,
            },
        )
        async for received in body:
            parser.write(received)
            if len(parts.unwritten) >= _PIECE_BYTES:
                await write(parts.take())
    except FormParserError as error:
        raise _invalid(f"the body is not a valid form: {error}") from None
    if not parts.is_finished:
        raise _invalid("the body ends before the last part of the form does")
    await write(parts.take())
    return parts.form


class _Parts:
    """Collects the parts that the parser has found. The methods are callbacks of the parser."""

    def __init__(self) -> None:
        self.form = UploadForm()
        self.unwritten = bytearray()
        """Content of the file that is not written yet."""
        self.is_finished = False
        self._num_parts = 0
        self._header_name = self._header_value = self._disposition = b""
        self._name = ""
        self._value = bytearray()

    def take(self) -> bytearray:
        taken, self.unwritten = self.unwritten, bytearray()
        return taken

    def begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise _invalid(f"the form has more than {_MAX_PARTS} parts")
        self._disposition = b""
        self._value = bytearray()

    def add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]
        self._check_header()

    def add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._header_name) + len(self._header_value) > _MAX_HEADER_BYTES:
            raise _invalid(f"a part has a header of more than {_MAX_HEADER_BYTES} bytes")

    def end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def end_headers(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._disposition.decode("latin-1"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name != "file":
            return
        if self.form.file_name is not None:
            raise _invalid("the form has two files")
        name = options.get(b"filename", b"").decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
        self.form.file_name = "".join(filter(str.isprintable, name))[:_MAX_NAME] or "file"

    def add(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self.unwritten += memoryview(data)[start:end]
        elif len(self._value) + end - start > _MAX_FIELD_BYTES:
            raise _invalid(
                f"the part {self._name!r:.80} has more than {_MAX_FIELD_BYTES} bytes; only file may have more"
            )
        else:
            self._value += data[start:end]

    def end(self) -> None:
        if self._name != "file":
            self.form.fields[self._name] = self._value.decode("utf-8", "replace")

    def finish(self) -> None:
        self.is_finished = True


def _invalid(reason: str) -> ApiError:
    return refusal(f"{reason}; {_HINT}", "file", "invalid_upload")
