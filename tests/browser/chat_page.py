"""Steps in the chat that several tests take."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Locator, Page, expect

HOSTILE = """# A *title*

<script>window.hit = 1</script> <img src=x onerror="window.hit = 1">

[click](javascript:window.hit=1) and [a page](https://example.com/a)

| a | b |
|---|--:|
| `x` | 1 |

```python
print("<b>" * 200, "a line that is longer than the window of a telephone, and of most others too")
```
"""
TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template whose model thinks."""
RULES: list[dict[str, Any]] = [
    {"contains": ["31 degrees"], "text": "It is **31 degrees** in Rome."},
    {"contains": ["How is the weather"], "calls": [["get_weather", {"city": "Rome"}]]},
    {"contains": ["hostile"], "text": HOSTILE},
    {"contains": ["think"], "text": "<think>\nThey want a *number*.\n</think>\n\nSeven."},
    {"contains": ["long"], "text": "word " * 3000, "seconds_per_token": 0.005},
    {"contains": ["second"], "text": "The second answer."},
    {"contains": ["first"], "text": "The first answer."},
]
"""For `scripted_server`."""


def message_field(page: Page) -> Locator:
    return page.get_by_label("Message", exact=True)


def ask(page: Page, text: str) -> None:
    """Asks a question, and waits until its answer began."""
    answer(page)  # Enter does nothing while an earlier answer is made
    answers = page.locator(".message.assistant")
    count = answers.count()
    message_field(page).fill(text)
    page.keyboard.press("Enter")
    expect(answers).to_have_count(count + 1)


def answer(page: Page) -> Locator:
    """The last answer, when it is over."""
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    return page.locator(".message.assistant").last


def asked(page: Page, text: str) -> Locator:
    ask(page, text)
    return answer(page)


def open_settings(page: Page) -> Locator:
    panel = page.get_by_role("complementary", name="Settings")
    # A wide window opens the panel with the chat. A click before that would close it again.
    expect(page.get_by_role("button", name="Settings", exact=True)).to_be_visible()
    if not panel.is_visible():
        page.get_by_role("button", name="Settings", exact=True).click()
    expect(panel.locator("#set-temperature")).to_be_visible()
    return panel


def set_fields(page: Page, **values: str) -> None:
    """Types into the fields of these parameters."""
    panel = open_settings(page)
    for name, value in values.items():
        control = panel.locator(f"#set-{name}")
        if not control.is_visible():
            panel.get_by_text("fields with text, lists or JSON").click()
        if control.evaluate("(one) => one.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)
