"""Writes small PDF files."""

from __future__ import annotations

import zlib


def small_pdf(pages: list[str]) -> bytes:
    """A PDF with one line on each page."""
    return _pdf([(b"", b"BT /F1 12 Tf 72 720 Td (%b) Tj ET" % text.encode()) for text in pages])


def flate_bomb(num_bytes: int) -> bytes:
    """A PDF with one page of so many zero bytes, which are a thousandth of it when they are compressed."""
    block = 1 << 20
    packer = zlib.compressobj()
    head, piece = (packer.compress(bytes(block)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    count = num_bytes // block
    end = zlib.compressobj(wbits=-15).flush()
    # Each zero byte adds one to the upper half of the checksum.
    checksum = ((count * block) % 65521 << 16 | 1).to_bytes(4, "big")
    return _pdf([(b"/Filter/FlateDecode", head + (count - 1) * piece + end + checksum)])


def _pdf(streams: list[tuple[bytes, bytes]]) -> bytes:
    """A page for each stream: further entries of its dictionary, and its bytes."""
    objects = [b"<</Type/Catalog/Pages 2 0 R>>"]
    kids = b" ".join(b"%d 0 R" % (4 + 2 * index) for index in range(len(streams)))
    objects.append(b"<</Type/Pages/Kids[%b]/Count %d>>" % (kids, len(streams)))
    objects.append(b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>")
    for index, (entries, stream) in enumerate(streams):
        objects.append(
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Resources<</Font<</F1 3 0 R>>>>/Contents %d 0 R>>"
            % (5 + 2 * index)
        )
        objects.append(b"<</Length %d%b>>stream\n%b\nendstream" % (len(stream), entries, stream))
    content, offsets = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        offsets.append(len(content))
        content += b"%d 0 obj%b\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    tail = b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, len(content))
    return content + head + table + tail
