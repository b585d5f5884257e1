"""The watch over the pages, and axe, notice what they are there for."""

from __future__ import annotations

import time

import pytest
from accessibility import faults
from browser_pages import Watch
from playwright.sync_api import Browser
from server_process import Server

pytestmark = pytest.mark.long
MISTAKES = {
    "console": ("console.error('wrong')", "wrong"),
    "uncaught": ("setTimeout(() => { throw new Error('wrong') })", "uncaught: wrong"),
    "rejected": ("void Promise.reject(new Error('wrong'))", "wrong"),
    "inline style": ("document.body.setAttribute('style', 'color: red')", "Content Security Policy"),
    "parsed as HTML": ("try { document.body.innerHTML = '<b>x</b>' } catch {}", "TrustedHTML"),
    "missing file": ("fetch('page/missing.js')", "404"),
}
FOREIGN = {
    "fetch": "fetch('http://example.com/x').catch(() => {})",
    "image": "document.body.append(Object.assign(new Image(), {src: 'http://example.com/x.png'}))",
    "another port": "fetch('http://127.0.0.1:9/x').catch(() => {})",
}


def watched(browser: Browser, server: Server, script: str, **context: object) -> Watch:
    watch = Watch(f"127.0.0.1:{server.port}")
    given = browser.new_context(**context)
    watch.attach(given)
    page = given.new_page()
    page.goto(server.url)
    page.get_by_role("tab", name="Chat").wait_for()
    page.evaluate(f"() => {{ {script} }}")
    give_up_at = time.monotonic() + 30
    while not (watch.errors or watch.foreign) and time.monotonic() < give_up_at:
        page.wait_for_timeout(20)  # receives events
    given.close()
    return watch


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_page_is_noticed(browser: Browser, noop_server: Server, mistake: str) -> None:
    script, words = MISTAKES[mistake]
    with pytest.raises(AssertionError, match=words):
        watched(browser, noop_server, script).check()


@pytest.mark.parametrize("way", FOREIGN)
def test_a_request_to_another_host_is_noticed(browser: Browser, noop_server: Server, way: str) -> None:
    watch = watched(browser, noop_server, FOREIGN[way], bypass_csp=True)
    assert len(watch.foreign) == 1
    with pytest.raises(AssertionError, match="requests to other hosts"):
        watch.check()


def test_axe_notices_a_button_without_a_name_and_text_of_low_contrast(
    browser: Browser, noop_server: Server
) -> None:
    given = browser.new_context(reduced_motion="reduce")  # colours change at once
    page = given.new_page()
    page.goto(noop_server.url)
    page.get_by_role("tab", name="Chat").wait_for()
    assert not faults(page)
    page.evaluate("document.querySelector('.top').append(document.createElement('button'))")
    page.evaluate("document.getElementById('tab-chat').style.color = '#cccccc'")
    found = " ".join(faults(page))
    given.close()
    assert "button-name" in found and "color-contrast" in found
