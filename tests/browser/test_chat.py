"""The chat: a person asks, reads, stops, edits, and comes back."""

from __future__ import annotations

import json
import re

import pytest
from browser_pages import OpenPage, ScriptedServer
from chat_page import RULES, TEMPLATE, answer, ask, asked, message_field, open_settings, set_fields
from playwright.sync_api import Page, expect
from server_process import Server


@pytest.fixture(scope="module")
def scripted(scripted_server: ScriptedServer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    return scripted_server(RULES, chat_template=str(template))


def questions(page: Page) -> list[str]:
    return page.locator(".message.user .bubble").all_inner_texts()


# --- asking ---


def test_the_default_model_streams_an_answer_that_stops_on_click(
    open_page: OpenPage, real_server: Server
) -> None:
    page = open_page(real_server)
    set_fields(page, temperature="0", ignore_eos="true")
    ask(page, "Count from one to a thousand.")
    prose = page.locator(".message.assistant .prose").last
    expect(prose).to_have_text(re.compile(r"\w"))
    first = prose.inner_text()
    page.wait_for_function(
        "(first) => [...document.querySelectorAll('.message.assistant > .prose')].at(-1).innerText.length > first",
        arg=len(first),
    )
    page.get_by_role("button", name="Stop", exact=True).click()
    stopped = answer(page)
    expect(stopped).to_contain_text("Stopped before its end.")
    expect(stopped.locator(".figures")).to_have_text(
        re.compile(r"^\d[\d.]* tokens/s · \d+\.\d\d s to first token · about \d+ tokens$")
    )
    assert stopped.locator(".prose").last.inner_text().startswith(first[:20])
    real_server.wait_until_free()


@pytest.mark.long
def test_an_answer_has_tokens_per_second_and_the_time_to_its_first_token(
    open_page: OpenPage, real_server: Server
) -> None:
    page = open_page(real_server)
    set_fields(page, temperature="0", max_tokens="12")
    last = asked(page, "What is the capital of Japan?")
    expect(last).to_contain_text("Tokyo")
    expect(last.locator(".figures")).to_have_text(
        re.compile(
            r"^\d[\d.]* tokens/s · \d+\.\d\d s to first token · \d+ tokens · prompt \d+( \(\d+ cached\))?$"
        )
    )


def test_a_question_can_be_edited_and_asked_again_and_both_versions_stay(
    open_page: OpenPage, scripted: Server
) -> None:
    page = open_page(scripted)
    expect(asked(page, "the first question").locator(".prose").last).to_have_text("The first answer.")
    page.get_by_role("button", name="Edit and ask again").click()
    field = page.get_by_label("The question", exact=True)
    expect(field).to_have_value("the first question")
    field.fill("the second question")
    field.press("Enter")
    expect(page.locator(".message.assistant .prose").last).to_have_text("The second answer.")
    assert questions(page) == ["the second question"]
    expect(page.locator(".message.user .versions")).to_contain_text("2 / 2")
    page.get_by_role("button", name="Earlier version").first.click()
    expect(page.locator(".message.assistant .prose").last).to_have_text("The first answer.")
    assert questions(page) == ["the first question"]


@pytest.mark.long
def test_an_answer_can_be_made_again_and_a_request_can_have_several(
    open_page: OpenPage, noop_server: Server
) -> None:
    page = open_page(noop_server)
    set_fields(page, max_tokens="3", n="2")
    last = asked(page, "Anything")
    expect(last.locator(".versions")).to_contain_text("1 / 2")
    expect(last).to_contain_text("to first token")
    expect(last).not_to_contain_text("6 tokens")  # both answers together
    last.get_by_role("button", name="Make the answer again").click()
    expect(answer(page).locator(".versions")).to_contain_text("3 / 4")
    assert len(questions(page)) == 1


def test_thoughts_are_folded_away(open_page: OpenPage, scripted: Server) -> None:
    page = open_page(scripted)
    last = asked(page, "Please think")
    expect(last.locator("> .prose")).to_have_text("Seven.")
    thoughts = last.locator("details.thoughts")
    expect(thoughts.locator(".prose")).to_be_hidden()
    thoughts.locator("summary").click()
    expect(thoughts.locator("em")).to_have_text("number")


def test_hostile_markdown_of_a_model_stays_text(open_page: OpenPage, scripted: Server) -> None:
    page = open_page(scripted)
    last = asked(page, "Something hostile")
    expect(last.locator("pre")).to_contain_text("print(")
    assert last.locator("script, img, iframe").count() == 0
    assert page.evaluate("window.hit ?? null") is None
    assert [link.get_attribute("href") for link in last.locator("a").all()] == ["https://example.com/a"]
    expect(last).to_contain_text("<script>window.hit = 1</script>")
    expect(last).to_contain_text("[click](javascript:window.hit=1)")


def test_code_and_requests_can_be_copied(open_page: OpenPage, scripted: Server) -> None:
    page = open_page(scripted, permissions=["clipboard-read", "clipboard-write"])
    page.get_by_label("System prompt").is_visible()
    open_settings(page).get_by_label("System prompt").fill("Be brief.")
    set_fields(page, temperature="0.5")
    last = asked(page, "Something hostile")

    def copied(name: str) -> str:
        last.get_by_role("button", name=name).click()
        return str(page.evaluate("navigator.clipboard.readText()"))

    assert copied("Copy the code").startswith('print("<b>"')
    assert copied("Copy the answer").startswith("# A *title*")
    curl = copied("Copy the request as curl")
    assert curl.startswith(f"curl '{scripted.url}/v1/chat/completions'")
    sent = json.loads(curl.partition("-d '")[2].rstrip().removesuffix("'"))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Something hostile"}]
    assert sent == {"messages": messages, "temperature": 0.5}
    assert "temperature=0.5" in copied("Copy the request as Python")


# --- settings ---


@pytest.mark.long
def test_a_value_out_of_range_is_said_and_not_sent(open_page: OpenPage, noop_server: Server) -> None:
    page = open_page(noop_server)
    set_fields(page, temperature="200", max_tokens="2")
    message_field(page).fill("Hello")
    page.keyboard.press("Enter")
    problem = page.get_by_role("complementary", name="Settings").get_by_role("alert")
    expect(problem).to_have_text("temperature is 200; allowed: a number, 0 to 100.")
    expect(page.locator("#set-temperature")).to_be_focused()
    expect(page.locator(".message")).to_have_count(0)
    expect(message_field(page)).to_have_value("Hello")
    set_fields(page, temperature="1")
    asked(page, "Hello")
    expect(problem).to_be_hidden()


def test_an_answer_follows_a_typed_json_schema(open_page: OpenPage, real_server: Server) -> None:
    page = open_page(real_server)
    panel = open_settings(page)
    panel.get_by_label("Form of answers").select_option("JSON with a schema")
    panel.get_by_label("Schema of answers").fill(
        '{"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}'
    )
    set_fields(page, temperature="0", max_tokens="60")
    prose = asked(page, "Name the capital of Italy.").locator("> .prose")
    assert prose.locator("*").count() == 0  # not Markdown
    found = json.loads(prose.inner_text())
    assert list(found) == ["city"] and len(found["city"]) <= 20


def test_a_tool_call_goes_on_with_the_result_that_is_typed(open_page: OpenPage, scripted: Server) -> None:
    page = open_page(scripted)
    open_settings(page).get_by_role("button", name="Insert an example").click()
    called = asked(page, "How is the weather in Rome?")
    expect(called.locator(".call h3")).to_have_text("get_weather")
    assert json.loads(called.locator(".call pre").inner_text()) == {"city": "Rome"}
    result = page.get_by_label("Result of get_weather")
    expect(result).to_be_focused()
    message_field(page).fill("And now?")
    page.keyboard.press("Enter")
    expect(page.locator(".toast")).to_contain_text("waits for the result")
    result.fill("31 degrees")
    page.get_by_role("button", name="Send the result").click()
    last = page.locator(".message.assistant").nth(1)
    expect(last.locator("strong")).to_have_text("31 degrees")
    expect(page.locator(".message.tool")).to_contain_text("31 degrees")
    page.reload()
    expect(page.locator(".message.assistant").nth(1).locator("strong")).to_have_text("31 degrees")
    page.get_by_role("button", name="Edit the results and go on").click()
    expect(result).to_have_value("31 degrees")
    result.fill("the second result")
    page.get_by_role("button", name="Send the result").click()
    expect(last.locator("> .prose")).to_have_text("The second answer.")
    expect(page.locator(".message.tool .versions")).to_contain_text("2 / 2")


def test_a_token_shows_its_probability_and_its_alternatives(open_page: OpenPage, real_server: Server) -> None:
    page = open_page(real_server)
    set_fields(page, temperature="0", max_tokens="6", logprobs="true", top_logprobs="3")
    last = asked(page, "What is the capital of Japan?")
    tip = page.locator(".token-tip")
    expect(tip).to_be_hidden()
    last.locator(".token", has_text="capital").hover()
    expect(tip).to_contain_text("capital")
    expect(tip.locator("tr")).to_have_count(3)
    expect(tip.locator("tr").first).to_contain_text(re.compile(r"\d+\.\d %"))
    last.locator(".tokens").focus()
    page.keyboard.press("End")
    expect(last.locator(".token").last).to_have_class(re.compile("is-chosen"))
    expect(page.get_by_role("status").first).to_contain_text("%")
    last.get_by_role("button", name="Tokens").click()
    expect(last.locator("> .prose")).to_be_visible()
    expect(last.locator(".tokens")).to_be_hidden()


# --- conversations ---


def test_conversations_survive_a_reload_and_can_be_renamed_and_deleted(
    open_page: OpenPage, scripted: Server
) -> None:
    page = open_page(scripted)
    set_fields(page, temperature="0.25")
    asked(page, "the first question")
    conversations = page.get_by_role("navigation", name="Conversations")
    conversations.get_by_role("button", name="New chat").click()
    asked(page, "the second question")
    titles = conversations.locator(".title")
    expect(titles).to_have_text(["the second question", "the first question"])
    page.reload()
    expect(page.locator(".message.assistant .prose").last).to_have_text("The second answer.")
    expect(titles).to_have_text(["the second question", "the first question"])
    titles.last.click()
    expect(page.locator(".message.assistant .prose").last).to_have_text("The first answer.")
    expect(open_settings(page).locator("#set-temperature")).to_have_value("0.25")
    titles.last.hover()
    conversations.get_by_role("button", name="Rename the first question").click()
    page.keyboard.type("Another name")
    page.keyboard.press("Enter")
    expect(titles.last).to_have_text("Another name")
    expect(titles.last).to_be_focused()
    page.reload()
    expect(titles.last).to_have_text("Another name")
    titles.last.hover()
    conversations.get_by_role("button", name="Delete Another name").click()
    expect(titles).to_have_text(["the second question"])
    page.get_by_role("button", name="Undo").click()
    expect(titles).to_have_text(["the second question", "Another name"])
    expect(page.locator(".message.assistant .prose").last).to_have_text("The first answer.")


@pytest.mark.long
def test_an_answer_goes_on_while_another_conversation_is_open(open_page: OpenPage, scripted: Server) -> None:
    page = open_page(scripted)
    ask(page, "a long answer")
    titles = page.get_by_role("navigation", name="Conversations").locator(".title")
    expect(titles).to_have_count(1)
    page.get_by_role("button", name="New chat").first.click()
    expect(asked(page, "the first question").locator(".prose").last).to_have_text("The first answer.")
    expect(titles.last).to_contain_text("a long answer")
    expect(titles.last).to_contain_text("(an answer arrives)")
    titles.last.click()
    prose = page.locator(".message.assistant > .prose").last
    length = len(prose.inner_text())
    page.wait_for_function(
        "(least) => document.querySelector('.message.assistant > .prose').innerText.length > least",
        arg=length,
    )
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(answer(page)).to_contain_text("Stopped before its end.")


def test_a_reload_in_the_middle_keeps_what_had_arrived(open_page: OpenPage, scripted: Server) -> None:
    page = open_page(scripted)
    ask(page, "a long answer")
    prose = page.locator(".message.assistant > .prose")
    expect(prose).to_contain_text("word word word")
    page.reload()
    expect(prose).to_contain_text("word word word")
    expect(page.locator(".message.assistant")).to_contain_text("Stopped before its end.")
    scripted.wait_until_free()


# --- the keyboard ---


def focus(page: Page, name: str, key: str = "Tab", limit: int = 60) -> None:
    """Moves the focus with the keyboard until an element with this name has it."""
    script = "() => { const one = document.activeElement; return one.getAttribute('aria-label') || one.labels?.[0]?.textContent || one.textContent; }"
    for _ in range(limit):
        if page.evaluate(script).strip() == name:
            return
        page.keyboard.press(key)
    raise AssertionError(f"no element with the name {name!r} got the focus within {limit} presses of {key}")


def test_the_keyboard_alone_is_enough(open_page: OpenPage, scripted: Server) -> None:
    page = open_page(scripted)
    expect(message_field(page)).to_be_focused()
    page.keyboard.type("the first")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("question")
    page.keyboard.press("Enter")
    expect(answer(page).locator(".prose").last).to_have_text("The first answer.")
    assert questions(page) == ["the first\nquestion"]
    focus(page, "Edit and ask again", "Shift+Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Control+A")
    page.keyboard.type("a long answer")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant > .prose")).to_contain_text("word word")
    expect(message_field(page)).to_be_focused()
    page.keyboard.press("Escape")
    expect(answer(page)).to_contain_text("Stopped before its end.")
    focus(page, "Settings", "Shift+Tab")
    page.keyboard.press("Enter")
    focus(page, "System prompt")
    focus(page, "New chat", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".message")).to_have_count(0)
    expect(message_field(page)).to_be_focused()
    focus(page, "Delete the first", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".conversations .title")).to_have_count(0)


def test_at_360_pixels_the_panes_cover_the_chat_and_close_with_escape(
    open_page: OpenPage, scripted: Server
) -> None:
    page = open_page(scripted, width=360)
    asked(page, "Something hostile")
    for name in ("Conversations", "Settings"):
        opener = page.get_by_role("button", name=name, exact=True)
        opener.click()
        pane = page.get_by_role("complementary", name=name)
        expect(pane).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        page.keyboard.press("Escape")
        expect(pane).to_be_hidden()
        expect(opener).to_be_focused()
