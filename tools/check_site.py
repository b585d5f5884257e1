"""Fails if a page of the built site loads anything from another host: fonts, scripts, styles, images."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

LOADS = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "object": ("data",),
}
LINKS_THAT_LOAD = {
    "stylesheet",
    "preload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "modulepreload",
    "icon",
    "manifest",
}
ELSEWHERE = re.compile(r"^\s*(?:https?:)?//")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        names = LOADS.get(tag, ())
        if tag == "link" and LINKS_THAT_LOAD & set(given.get("rel", "").split()):
            names = ("href",)
        if "mermaid" in given.get("class", "").split():
            self.found.append("a mermaid diagram: the theme fetches its script")
        for name in names:
            if ELSEWHERE.match(given.get(name, "")):
                self.found.append(f"<{tag} {name}={given[name]}>")


def main(folder: Path) -> int:
    found = []
    for page in sorted(folder.rglob("*.html")):
        parser = _Page()
        parser.feed(page.read_text("utf-8"))
        found += [f"{page.relative_to(folder)}: {one}" for one in parser.found]
    for style in sorted(folder.rglob("*.css")):
        text = style.read_text("utf-8")
        loads = re.findall(r"""(?:@import\s+|url\(\s*)["']?((?:https?:)?//[^"')\s]*)""", text)
        found += [f"{style.relative_to(folder)}: {one}" for one in loads]
    for script in sorted(folder.rglob("*.js")):
        # These are not loaded: an XML namespace, and the address of a repository's host, which mkdocs.yml does not
        # name.
        loads = re.findall(
            r"""["'`](https?://(?!www\.w3\.org/|\$)[^"'`\s]+)["'`]""", script.read_text("utf-8")
        )
        found += [f"{script.relative_to(folder)}: {one}" for one in loads]
    for one in found:
        print(f"loaded from another host: {one}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
