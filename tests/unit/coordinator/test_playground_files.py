"""The playground's files, read without a browser: well formed, labelled, and with nothing from outside."""

import re
from collections import Counter
from html.parser import HTMLParser

import pytest

from coordinator.gateway.page import HEADERS, PLAYGROUND

VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
FILES = sorted(path for path in PLAYGROUND.iterdir() if path.is_file())
NAMESPACES = {"http://www.w3.org/2000/svg"}
"""Names, which nobody fetches."""


class Page(HTMLParser):
    """Elements as (tag, attributes, names of those around it); raises AssertionError where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"<{tag}> has an attribute twice: {names}"
        self.elements.append((tag, dict(attrs), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes, _ in self.elements if tag in tags]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page((PLAYGROUND / "index.html").read_text())


def test_ids_are_unique_and_what_refers_to_them_finds_them(page: Page) -> None:
    ids = Counter(given["id"] for _, given, _ in page.elements if "id" in given)
    assert ids.most_common(1)[0][1] == 1
    assert all(re.fullmatch(r"[a-z_]+", name or "") for name in ids)
    for name in ("for", "aria-labelledby", "aria-describedby", "aria-controls"):
        for _, given, _ in page.elements:
            assert set((given.get(name) or "").split()) <= set(ids)
    script = "".join(path.read_text() for path in FILES if path.suffix == ".js")
    named = set(re.findall(r"""(?:\$|getElementById)\("([a-z_]+)"\)""", script))
    assert len(named) > 10
    assert named <= set(ids)


def test_every_control_has_a_label(page: Page) -> None:
    labels = {given["for"] for given in page.all("label")}
    controls = page.all("input", "select", "textarea")
    assert len(controls) > 10
    assert {given.get("id") for given in controls} <= labels
    assert all("alt" in given for given in page.all("img"))
    assert all(given.get("type") in ("button", "submit") for given in page.all("button"))


def test_the_page_tells_its_language_and_fits_its_screen(page: Page) -> None:
    assert page.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert [tag for tag, _, _ in page.elements].count("h1") == 1
    assert any(tag == "title" for tag, _, _ in page.elements)


def test_nothing_is_written_where_the_policy_forbids_it(page: Page) -> None:
    for tag, given, around in page.elements:
        assert "style" not in given, tag
        assert not [name for name in given if name.startswith("on")], tag
        assert tag != "style", around
        assert tag != "script" or given.get("src"), around
    policy = HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy
    assert not re.search(r"unsafe|\*|https?:|data:", policy)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_names_an_address_elsewhere(path) -> None:
    found = set(re.findall(r"""(?:[a-z]+:)?//[\w.-]+\.[\w./-]+""", path.read_text()))
    assert found <= NAMESPACES
    assert "eval(" not in path.read_text()
    assert "innerHTML" not in path.read_text()


def test_what_the_page_links_is_there(page: Page) -> None:
    linked = [given.get("src") or given.get("href") for given in page.all("script", "link", "img")]
    for path in FILES:
        if path.suffix == ".js":
            linked += re.findall(r'from "\./([\w.]+)"', path.read_text())
    assert len(linked) > 6
    assert {name for name in linked if not (PLAYGROUND / str(name)).is_file()} == set()
    unused = {path.name for path in FILES} - {str(name) for name in linked} - {"index.html"}
    assert unused == set()


def test_the_token_is_kept_nowhere() -> None:
    """Only the theme is."""
    stores = {
        path.name for path in FILES if re.search(r"localStorage|sessionStorage|cookie|indexedDB", path.read_text())
    }
    assert stores == {"theme.js"}
