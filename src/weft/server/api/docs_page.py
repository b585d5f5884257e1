"""The page at /docs: one file that shows the OpenAPI document and sends requests. It loads nothing from other hosts."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import Response

_PAGE = Path(__file__).with_name("docs_page.html")


@cache
def _content() -> tuple[str, str]:
    """The page, and a Content-Security-Policy that allows only its own script and style, by their hashes."""
    page = _PAGE.read_text("utf-8")
    rules = ["default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'"]
    rules += ["frame-ancestors 'none'", "img-src data:"]
    for element in ("script", "style"):
        [inline] = re.findall(rf"<{element}>(.*?)</{element}>", page, re.S)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        rules.append(f"{element}-src 'sha256-{digest}'")
    return page, "; ".join(rules)


def response() -> Response:
    page, policy = _content()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return Response(page, headers=headers, media_type="text/html")
