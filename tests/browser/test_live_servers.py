"""The live view in a browser: requests that share a sequence, and a server that starts again."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path

from browser_pages import OpenPage
from live_page import Answer, answers, live, row
from playwright.sync_api import expect
from server_process import MESSAGES, SLOW, Server, running_server


def test_requests_that_share_a_sequence_are_opened_and_cancelled_one_by_one(
    open_page: OpenPage, default_model_path: Path
) -> None:
    with running_server(default_model_path, backend_options=SLOW, show_prompts=True) as server:
        page = live(open_page(server, "/#live"))
        panel = page.get_by_role("complementary")
        cancel = panel.get_by_role("button", name="Cancel this request")

        def open_other(answer: Answer) -> None:
            panel.get_by_role("button", name=answer.id[:8]).click()
            expect(panel.locator(".facts")).to_contain_text(answer.id)
            expect(row(page, first.id)).to_have_class(re.compile("is-chosen"))

        with answers(server, 3, seed=1) as running:
            first, second, third = running
            shared = row(page, first.id)
            expect(shared).to_contain_text("×3")
            expect(row(page, second.id)).to_have_count(0)
            shared.click()
            expect(panel).to_contain_text("2 identical requests read this sequence")
            open_other(second)
            panel.get_by_role("button", name="Show its text").click()
            expect(panel.locator(".texts")).to_contain_text(MESSAGES[0]["content"])
            cancel.click()
            assert second.has_ended.wait(60)
            expect(panel).to_contain_text("identical requests go on with its sequence")
            expect(cancel).to_be_hidden()
            expect(shared).to_contain_text("×2")
            open_other(first)
            cancel.click()
            assert first.has_ended.wait(60)
            expect(panel).to_contain_text("1 identical request reads this sequence")
            expect(cancel).to_be_hidden()
            expect(shared).to_have_attribute("data-state", "decoding")
            assert not third.has_ended.is_set()
            open_other(third)
            expect(cancel).to_be_visible()
            cancel.click()
            assert third.has_ended.wait(60)
            expect(panel).to_contain_text("finished: cancelled")
            expect(shared).to_have_attribute("data-state", "ended")
        page.close()  # before its stream breaks


def test_a_server_that_starts_again_with_another_cache_is_drawn_with_its_sizes(
    open_page: OpenPage, default_model_path: Path
) -> None:
    def started(port: int, num_blocks: int, rows: int) -> AbstractContextManager[Server]:
        engine = {"cache": {"num_blocks": num_blocks}, "scheduler": {"max_running": rows}}
        return running_server(default_model_path, backend_options=SLOW, engine=engine, port=port)

    with started(0, 64, 2) as server:
        page = live(open_page(server, "/#live", expected=["ERR_"]))
        expect(page.locator(".kv")).to_contain_text("64 blocks of")
        expect(page.locator(".batch")).to_contain_text("of 2 rows")
    expect(page.locator(".chip")).to_have_text("Not connected")
    with started(server.port, 230, 5) as again:
        live(page)
        expect(page.locator(".kv")).to_contain_text("230 blocks of")
        expect(page.locator(".batch")).to_contain_text("of 5 rows")
        expect(page.locator(".live")).to_have_count(1)
        with answers(again) as [answer]:
            expect(row(page, answer.id)).to_have_attribute("data-state", "decoding")
