"""Markdown of answers. The functions run in the browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from server_process import Server

SETUP = """
async () => {
  const { MarkdownView } = await import("/page/chat_markdown.js");
  const kept = new Set(["href", "start", "class"]);
  function shape(node) {
    if (node.nodeType === Node.TEXT_NODE) return node.data;
    if (node.classList.contains("code-bar")) return "";
    const inside = [...node.childNodes].map(shape).join("");
    const tag = node.localName;
    if (tag === "div") return inside;
    const names = [...node.attributes].filter(({ name }) => kept.has(name)).map(({ name, value }) => ` ${name}=${value}`);
    return tag === "br" || tag === "hr" ? `<${tag}>` : `<${tag}${names.join("")}>${inside}</${tag}>`;
  }
  /** The shape of a text that arrives in these parts. */
  window.shown = (parts) => {
    const root = document.createElement("div");
    const view = new MarkdownView(root);
    for (const part of parts) view.add(part);
    view.end();
    return [...root.childNodes].map(shape).join("");
  };
  window.MarkdownView = MarkdownView;
}
"""


@pytest.fixture(scope="module")
def page(browser: Browser, noop_server: Server) -> Iterator[Page]:
    page = browser.new_page(base_url=noop_server.url)
    page.goto("/")
    page.evaluate(SETUP)
    yield page
    page.close()


def shown(page: Page, *parts: str) -> Any:
    return page.evaluate("(parts) => shown(parts)", list(parts))


FENCE = "```"
CASES = {
    "a paragraph": ("Hello\nworld", "<p>Hello<br>world</p>"),
    "two paragraphs": ("a\n\n\nb", "<p>a</p><p>b</p>"),
    "Windows line ends": ("a\r\nb\r\n\r\nc\r\n", "<p>a<br>b</p><p>c</p>"),
    "headings": (
        "# One\n## Two ##\n####### no",
        "<h3 class=level-1>One</h3><h4 class=level-2>Two</h4><p>####### no</p>",
    ),
    "a heading needs a space": ("#tag", "<p>#tag</p>"),
    "a rule": ("a\n---\nb\n\n* * *", "<p>a</p><hr><p>b</p><hr>"),
    "emphasis": (
        "*a* **b** ***c*** _d_ __e__ ~~f~~",
        "<p><em>a</em> <strong>b</strong> <em><strong>c</strong></em> <em>d</em> <strong>e</strong> <del>f</del></p>",
    ),
    "no emphasis": ("2 * 3 * 4 snake_case_name ** a ~5 ~6", "<p>2 * 3 * 4 snake_case_name ** a ~5 ~6</p>"),
    "nested emphasis": ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
    "emphasis that is not closed": ("**a *b*", "<p>**a <em>b</em></p>"),
    "emphasis that crosses": ("*a **b* c**", "<p><em>a <em><em>b</em> c</em></em></p>"),
    "code": ("`a*b*` `` x ` y `` `open", "<p><code>a*b*</code> <code>x ` y</code> `open</p>"),
    "escapes": (r"\*a\* \[b\](c) \\ \q", r"<p>*a* [b](c) \ \q</p>"),
    "breaks": ("a<br>b<br/>c", "<p>a<br>b<br>c</p>"),
    "a link": (
        "[the *site*](https://example.com/a_b 'Title')",
        "<p><a href=https://example.com/a_b>the <em>site</em></a></p>",
    ),
    "a link with brackets": ("[a](https://e.org/x_(y))", "<p><a href=https://e.org/x_(y)>a</a></p>"),
    "bare links": (
        "See https://example.com/a?b=1. (http://e.org/x_(y))",
        "<p>See <a href=https://example.com/a?b=1>https://example.com/a?b=1</a>. "
        "(<a href=http://e.org/x_(y)>http://e.org/x_(y)</a>)</p>",
    ),
    "a link in angle brackets": ("<https://e.org/>", "<p><a href=https://e.org/>https://e.org/</a></p>"),
    "no links inside links": (
        "[a https://e.org ![i](https://e.org/i.png)](https://e.com/)",
        "<p><a href=https://e.com/>a https://e.org <span>i</span></a></p>",
    ),
    "an image is a link": ("![cat](https://e.org/cat.png)", "<p><a href=https://e.org/cat.png>cat</a></p>"),
    "code blocks": (
        f"{FENCE}python\nif a:\n\n    b\n{FENCE}\nend",
        "<pre><code>if a:\n\n    b</code></pre><p>end</p>",
    ),
    "a code block that is open": (f"{FENCE}\n<b>\n``", "<pre><code><b>\n``</code></pre>"),
    "a longer fence": (f"~~~~\n{FENCE}\n~~~\n~~~~\na", f"<pre><code>{FENCE}\n~~~</code></pre><p>a</p>"),
    "an empty code block": (f"{FENCE}\n{FENCE}\na", "<pre><code></code></pre><p>a</p>"),
    "a list": (
        "- a\n- b\n\n  c\n* d\n\ne",
        "<ul><li><p>a</p></li><li><p>b</p><p>c</p></li><li><p>d</p></li></ul><p>e</p>",
    ),
    "an ordered list": ("3. a\n4. b", "<ol start=3><li><p>a</p></li><li><p>b</p></li></ol>"),
    "a nested list": (
        "1. a\n   - b\n   - c\n2. d",
        "<ol><li><p>a</p><ul><li><p>b</p></li><li><p>c</p></li></ul></li><li><p>d</p></li></ol>",
    ),
    "a nested list with two spaces": (
        "1. a\n  - b\n  - c\n2. d",
        "<ol><li><p>a</p><ul><li><p>b</p></li><li><p>c</p></li></ul></li><li><p>d</p></li></ol>",
    ),
    "a code block in a list": (
        f"1. a\n   {FENCE}\n   x\n     y\n   {FENCE}\n2. b",
        "<ol><li><p>a</p><pre><code>x\n  y</code></pre></li><li><p>b</p></li></ol>",
    ),
    "a line after a list": ("- a\nb\n\nc", "<ul><li><p>a<br>b</p></li></ul><p>c</p>"),
    "no list": ("1986. A year\n-a\n+1", "<ol start=1986><li><p>A year<br>-a<br>+1</p></li></ol>"),
    "a number inside a paragraph": ("In\n1986. A year", "<p>In<br>1986. A year</p>"),
    "tasks": ("- [ ] a\n- [x] b", "<ul><li><p>☐ a</p></li><li><p>☑ b</p></li></ul>"),
    "a quote": (
        "> a\nb\n> - c\n\nd",
        "<blockquote><p>a<br>b</p><ul><li><p>c</p></li></ul></blockquote><p>d</p>",
    ),
    "a table": (
        "Text\n| a | b |\n|:-:|--:|\n| 1 \\| 2 | `x` |\n| 3 |\n\nend",
        "<p>Text</p><table><thead><tr><th class=to-center>a</th><th class=to-right>b</th></tr></thead><tbody><tr>"
        "<td class=to-center>1 | 2</td><td class=to-right><code>x</code></td></tr>"
        "<tr><td class=to-center>3</td><td class=to-right></td></tr></tbody></table><p>end</p>",
    ),
    "no table": ("a | b\n|---|", "<p>a | b<br>|---|</p>"),
    "tabs": (f"-\ta\n\n{FENCE}\n\tb\n{FENCE}", "<ul><li><p>a</p></li></ul><pre><code>\tb</code></pre>"),
}
HOSTILE = {
    "a script": "<script>window.hit = 1</script>",
    "an event": '<img src=x onerror="window.hit = 1">',
    "an event in a link": '[a](https://e.org/"onmouseover="window.hit=1)',
    "a frame": "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "a javascript: link": "[click](javascript:window.hit=1)",
    "a javascript: link in other letters": "[click](JaVa\tScRiPt:window.hit=1) [b](&#106;avascript:window.hit=1)",
    "a javascript: link in brackets": "<javascript:window.hit=1> [c](<javascript:window.hit=1>)",
    "a data: link": "[click](data:text/html,<script>parent.hit=1</script>) ![x](data:image/svg+xml,<svg/onload=hit=1>)",
    "a relative link": "[a](/admin/requests) [b](//evil.example/x) [c](#live)",
    "a style": '<p style="position:fixed">x</p> <style>*{display:none}</style>',
    "in code": "```<img onerror=hit=1>\n<script>window.hit = 1</script>\n```",
    "in a table": "| <script>hit=1</script> | b |\n|---|---|\n| <img src=x onerror=hit=1> | [c](javascript:hit=1) |",
}


@pytest.mark.parametrize("case", CASES)
def test_markdown_becomes_these_elements(page: Page, case: str) -> None:
    source, expected = CASES[case]
    assert shown(page, source) == expected


@pytest.mark.parametrize("case", [*CASES, *HOSTILE])
def test_the_result_does_not_depend_on_how_the_text_was_split(page: Page, case: str) -> None:
    source = CASES[case][0] if case in CASES else HOSTILE[case]
    source = f"{source}\n\nmore\n{source}"
    whole = shown(page, source)
    assert shown(page, *source) == whole
    for size in (2, 3, 7):
        assert shown(page, *(source[at : at + size] for at in range(0, len(source), size))) == whole


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_markdown_stays_text(page: Page, case: str) -> None:
    source = HOSTILE[case]
    found = page.evaluate(
        """async (source) => {
          const root = document.createElement("div");
          document.body.append(root);
          const view = new MarkdownView(root);
          for (const char of source) view.add(char);
          view.end();
          for (const one of root.querySelectorAll("a")) one.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
          await new Promise((resolve) => setTimeout(resolve));
          const elements = [...root.querySelectorAll("*")];
          const names = elements.flatMap((one) => [...one.attributes].map(({ name }) => name));
          const links = elements.filter((one) => one.localName === "a").map((one) => one.protocol);
          const text = root.textContent;
          root.remove();
          return { tags: elements.map((one) => one.localName), names, links, text, hit: window.hit ?? null };
        }""",
        source,
    )
    assert found["hit"] is None
    assert not {"script", "img", "iframe", "style", "object", "svg:svg"} & set(found["tags"])
    assert not [
        name for name in found["names"] if name.startswith("on") or name in ("style", "src", "srcdoc")
    ]
    assert set(found["links"]) <= {"http:", "https:"}
    if case in ("a script", "an event", "a frame", "a javascript: link"):
        assert found["text"] == source


def test_only_the_growing_end_of_an_answer_is_made_again(page: Page) -> None:
    """The elements of earlier lines stay the same ones, and a code block keeps its text node."""
    found = page.evaluate(
        """() => {
          const root = document.createElement("div");
          const view = new MarkdownView(root);
          view.add("# Title\\n\\n- one\\n- two\\n\\nText\\n\\n| a |\\n|---|\\n| 1 |\\n\\n");
          const before = [...root.querySelectorAll("*")];
          let changes = 0;
          const observer = new MutationObserver((records) => { changes += records.length; });
          observer.observe(root, { childList: true, subtree: true, characterData: true });
          view.add("```\\n");
          const code = root.querySelector("code").firstChild;
          for (let line = 0; line < 500; line += 1) view.add(`line ${line}\\n`);
          changes += observer.takeRecords().length;
          return {
            isKept: before.every((one) => root.contains(one)),
            isSameText: root.querySelector("code").firstChild === code,
            lines: code.data.split("\\n").length, changes,
          };
        }"""
    )
    assert found["isKept"] and found["isSameText"]
    assert found["lines"] == 500
    assert found["changes"] <= 2 * 500 + 10


def test_very_long_and_very_deep_texts_are_shown(page: Page) -> None:
    assert shown(page, "*word* " * 20_000).count("word") == 20_000
    assert shown(page, ">" * 5_000 + " deep").count("<blockquote>") <= 12
    assert shown(page, "- " * 5_000 + "deep").count("<ul>") <= 12
    for marks in ("[", "](", "*a", "a*", "`", "_", "~~", "<", ")", "|", "#", "\\(", "!["):
        text = "x" + marks * (30_000 // len(marks)) + "end"
        assert "end" in shown(page, text)
        assert "end" in shown(page, f"https://{text}", f" {text}")
