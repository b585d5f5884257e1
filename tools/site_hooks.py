"""A hook of mkdocs: the theme's script must not load anything from other hosts."""

from pathlib import Path
from typing import Any

HOSTS = ("https://unpkg.com/", "https://api.github.com/")


def on_post_build(config: Any) -> None:
    """The theme loads a polyfill for browsers without ResizeObserver, and mermaid for diagrams. The site needs neither."""
    for script in Path(config["site_dir"]).rglob("*.js"):
        text = script.read_text("utf-8")
        for host in HOSTS:
            text = text.replace(host, "/not-loaded/")
        script.write_text(text, "utf-8")
