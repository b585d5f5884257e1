"""The files of the page at `/`, as a browser gets them. `make test-browser` runs the page itself."""

from __future__ import annotations

import re

import pytest
from server_process import Server

from weft.live import BLOCK_STATES, LiveEvent, LiveRequest, LiveStep
from weft.server.page.routes import FOLDER, MEDIA_TYPES

FILES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES)
MODULES = [name for name in FILES if name.endswith(".js")]


def test_the_page_has_no_key_no_inline_code_and_a_policy_that_allows_only_its_own_files(
    server: Server,
) -> None:
    response = server.client.get("/")
    assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert "unsafe" not in policy and "http" not in policy
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=\"", response.text)


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_its_type_and_is_sent_again_only_after_a_change(server: Server, name: str) -> None:
    response = server.client.get(f"/page/{name}")
    suffix = name[name.rindex(".") :]
    assert response.status_code == 200
    assert response.headers["content-type"].partition(";")[0] == MEDIA_TYPES[suffix]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.content == (FOLDER / name).read_bytes()
    known = {"If-None-Match": f'"another", {response.headers["etag"]}'}
    again = server.client.get(f"/page/{name}", headers=known)
    assert again.status_code == 304 and not again.content
    assert server.client.get(f"/page/{name}", headers={"If-None-Match": '"another"'}).status_code == 200


@pytest.mark.parametrize(
    "name", ["routes.py", "__init__.py", "%2e%2e%2fapp.py", "app.js%00", "app.js/", "nothing.js", ""]
)
def test_nothing_but_these_files_is_served(server: Server, name: str) -> None:
    assert server.client.get(f"/page/{name}").status_code == 404


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_modules_and_names_that_exist(name: str) -> None:
    text = (FOLDER / name).read_text("utf-8")
    for statement in re.finditer(r'^import\s+(?:\{([^}]*)\}\s+from\s+)?"([^"]+)";', text, re.M):
        names, target = statement.groups()
        assert target.startswith("./") and target[2:] in MODULES, statement.group()
        exported = set(
            re.findall(
                r"^export\s+(?:async\s+)?(?:function\*?|class|const|let)\s+(\w+)",
                (FOLDER / target[2:]).read_text("utf-8"),
                re.M,
            )
        )
        wanted = {one.split(" as ")[0].strip() for one in (names or "").split(",") if one.strip()}
        assert wanted <= exported, f"{target} does not export {wanted - exported}"


@pytest.mark.parametrize("name", FILES)
def test_no_file_parses_text_as_html_or_names_another_host(name: str) -> None:
    text = (FOLDER / name).read_text("utf-8")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
    )
    hosts = set(re.findall(r"https?://([^\s\"'`)]+)", text)) - {"www.w3.org/2000/svg"}
    assert not hosts, hosts
    assert not re.search(r"@import|\burl\(", text)
    assert len(text.splitlines()) <= 500


def test_every_file_is_used() -> None:
    texts = {name: (FOLDER / name).read_text("utf-8") for name in FILES}
    for name in FILES:
        if name != "index.html":
            assert any(name in text for other, text in texts.items() if other != name), name


@pytest.mark.parametrize(
    ("name", "shape"), [("REQUEST", LiveRequest), ("STEP", LiveStep), ("EVENT", LiveEvent)]
)
def test_the_live_view_reads_the_fields_of_a_frame_in_their_order(name: str, shape: type) -> None:
    text = (FOLDER / "live_numbers.js").read_text("utf-8")
    found = re.search(rf"const {name}_FIELDS = \[([^\]]*)\]", text)
    assert found and tuple(re.findall(r'"(\w+)"', found[1])) == getattr(shape, "_fields")  # noqa: B009


def test_the_live_view_draws_every_state_of_a_block() -> None:
    states = re.search(r"const STATES = \[([^\]]*)\]", (FOLDER / "live_cells.js").read_text("utf-8"))
    kinds = re.findall(
        r'^  \["(\w)", "[^"]+", "[\w-]+", [.\d]+\],$', (FOLDER / "live_blocks.js").read_text("utf-8"), re.M
    )
    assert states and set(kinds) == set(BLOCK_STATES)
    assert set(re.findall(r'"(\w)"', states[1])) == {
        one for state in BLOCK_STATES for one in (state, state.upper())
    }
