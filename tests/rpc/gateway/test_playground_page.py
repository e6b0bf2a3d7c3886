"""The playground in a real browser, before a gateway and a stack of toys. SCREENSHOTS=DIR keeps what it looked like;
times are printed, and fail nothing."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from browser import Browser, BrowserError, chromium
from conftest import require_tool, scaled
from gateway_stack import Front, chatty, front

from outrider.serving.tokens import line_for, new_token

pytestmark = [pytest.mark.outside, pytest.mark.asyncio(loop_scope="module")]

TARGET, DRAFT = "toy:vocab=128,seed=1,pass_ms=1", "toy:vocab=128,seed=1,agreement=0.8"
WIDE, NARROW = (1280, 900), (390, 844)
DEFAULTS = {"temperature": "0", "top_p": "", "max_tokens": "24", "seed": "7", "num_speculative_tokens": "4",
            "drafter": "model", "acceptance": "", "token": ""}  # fmt: skip
CONTRAST = """(selector) => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map((part) => part / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let element = document.querySelector(selector);
  const ink = light(getComputedStyle(element).color);
  while (getComputedStyle(element).backgroundColor === 'rgba(0, 0, 0, 0)') element = element.parentElement;
  const ground = light(getComputedStyle(element).backgroundColor);
  return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
}"""
WATCH_FRAMES = """(() => {
  let last = performance.now();
  window.longestFrameMs = 0;
  const next = (now) => {
    window.longestFrameMs = Math.max(window.longestFrameMs, now - last);
    last = now;
    requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
})()"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served() -> AsyncIterator[Front]:
    require_tool("chromium")
    async with front(chatty(TARGET), DRAFT) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def tab(served: Front, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    async with chromium(require_tool("chromium"), tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def page(served: Front, tab: Browser) -> AsyncIterator[Browser]:
    """Freshly loaded, with γ = 4; afterwards nothing went elsewhere, and nothing was wrong."""
    tab.errors.clear()
    tab.requests.clear()
    await tab.view(*WIDE)
    await tab.go(f"{served.url}/playground/")
    await tab.until("document.getElementById('model').options.length")
    await choose(tab, **DEFAULTS)
    yield tab
    assert [url for url in tab.requests if not url.startswith(f"{served.url}/")] == []
    assert tab.errors == []


async def choose(page: Browser, **values: str | bool) -> None:
    for name, value in values.items():
        field = f"document.getElementById('{name}')"
        if isinstance(value, bool):
            await page.run(f"{field}.checked = {str(value).lower()}")
        else:
            assert await page.run(f"({field}.value = {value!r}, {field}.value)") == value


async def run(page: Browser) -> None:
    await page.click("#run")
    await page.until("!document.body.classList.contains('running')")


async def text_of(page: Browser, selector: str) -> str:
    return await page.run(f"document.querySelector({selector!r}).textContent")


async def keep(page: Browser, name: str) -> None:
    if folder := os.environ.get("SCREENSHOTS"):
        await page.screenshot(Path(folder, f"{name}.png"))


async def panes(page: Browser) -> list[dict[str, Any]]:
    return await page.run(
        "[...document.querySelectorAll('.pane')].map((pane) => ({"
        " state: pane.dataset.state, firstMs: pane.dataset.firstTokenMs,"
        " text: pane.querySelector('.text').textContent,"
        " tokens: Number(pane.querySelector('[data-figure=tokens]').textContent),"
        " legend: Object.fromEntries([...pane.querySelectorAll('.legend li')]"
        "   .map((item) => [item.dataset.origin, Number(item.querySelector('b').textContent)])),"
        " spans: [...pane.querySelectorAll('.text .token')].map((span) => span.className.replace('token ', '')),"
        " titles: [...pane.querySelectorAll('.text .token')].map((span) => span.title),"
        " positions: [...pane.querySelectorAll('.positions .of')].map((cell) => cell.textContent),"
        " rounds: pane.querySelectorAll('.round').length }))"
    )


async def test_drafts_of_a_tree_are_told_by_their_depth(page: Browser) -> None:
    """Of fifteen in one round two were accepted, in the next none: the places that nobody reaches are one row."""
    rows = await page.run(
        """import('./pane.js').then(async ({ Pane }) => {
          const pane = new Pane('tree', { isPlain: false, onPaint: () => {} });
          const token = (origin) => ({ id: 1, bytes: [97], origin });
          const [taken, none] = [['accepted', 'accepted', 'bonus'], ['correction']];
          const steps = [taken, none].map((origins) => ({ num_draft_tokens: 15, tokens: origins.map(token) }));
          pane.begin(0);
          pane.add('aaaa', steps, 1);
          while (!pane.element.querySelector('.positions .of')) await new Promise(requestAnimationFrame);
          return [...pane.element.querySelectorAll('.positions li')].map((row) =>
            ['position', 'share', 'of'].map((name) => row.querySelector('.' + name).textContent));
        })"""
    )
    assert rows == [["1", "50%", "1 of 2"], ["2", "50%", "1 of 2"], ["3–15", "0%", "0 of 26"]]


async def test_tokens_are_coloured_and_counted_and_plain_is_equal(served: Front, page: Browser) -> None:
    num_tokens = scaled(500, 150)
    await choose(page, compare=True, max_tokens=str(num_tokens))
    await page.run(WATCH_FRAMES)
    await run(page)
    speculative, plain = await panes(page)
    assert speculative["state"] == plain["state"] == "done"
    assert speculative["tokens"] == plain["tokens"] == sum(speculative["legend"].values()) == num_tokens
    assert plain["legend"] == {"plain": num_tokens}
    # A toy's tokens are a character each.
    for origin, count in speculative["legend"].items():
        assert speculative["spans"].count(origin) == count
    assert list(speculative["legend"]) == ["accepted", "correction", "bonus", "plain"]
    assert speculative["legend"]["accepted"] > 0
    assert speculative["text"] == plain["text"]
    asked = {"messages": [{"role": "user", "content": "!!"}], "temperature": 0, "max_tokens": num_tokens}
    answer = await served.http.post("/v1/chat/completions", json={**asked, "num_speculative_tokens": 0})
    assert answer.json()["choices"][0]["message"]["content"] == speculative["text"]
    assert speculative["titles"][-1].startswith(("accepted draft, round ", "correction, ", "bonus, ", "plain, "))
    accepted = [int(of.split(" of ")[0]) for of in speculative["positions"]]
    assert len(accepted) == 4
    assert sum(accepted) == speculative["legend"]["accepted"]
    assert accepted == sorted(accepted, reverse=True)
    assert 10 < speculative["rounds"] <= 64
    assert await page.run("document.getElementById('verdict').dataset.kind") == "equal"
    verdict = await text_of(page, "#verdict")
    assert f"The texts are equal: {num_tokens} tokens" in verdict
    assert " finished first: " in verdict
    await keep(page, "compared-1280-light")
    frame_ms = await page.run("window.longestFrameMs")
    print(f"\n{num_tokens} tokens beside as many plain ones: first token {speculative['firstMs']} ms after the click,")
    print(f"plain {plain['firstMs']} ms, longest time between two frames {frame_ms:.0f} ms; {verdict}")


@pytest.mark.parametrize(
    ("tokens", "texts", "cut"),
    [
        (["Hi", " th", "ere"], ["Hi ther", "e"], [["Hi", 0], [" th", 1], ["er", 2], ["e", 2]]),
        (["a", b"\xf0\x9f", b"\x98\x80", "b"], ["a", "😀b"], [["a", 0], ["😀", 1], ["b", 3]]),
        (["<|special|>", "x"], ["x"], [["x", 1]]),
        ([b"\xff", "z"], ["\ufffdz"], [["\ufffdz", 1]]),
    ],
    ids=["held back", "parts of a code point", "left out", "no code point"],
)
async def test_text_is_cut_at_the_tokens_that_wrote_it(
    page: Browser, tokens: list[str | bytes], texts: list[str], cut: list[list[Any]]
) -> None:
    written = [token.encode() if isinstance(token, str) else token for token in tokens]
    given = [{"id": index, "bytes": list(one)} for index, one in enumerate(written)]
    told = await page.run(
        "import('./pieces.js').then(({Pieces}) => { const pieces = new Pieces();"
        f" pieces.push({json.dumps(given)}); return {json.dumps(texts)}"
        ".flatMap((text) => pieces.take(text)).map(({text, token}) => [text, token.id]); })"
    )
    assert told == cut


async def test_one_seed_gives_one_text_under_coupled_only(page: Browser) -> None:
    await choose(page, compare=True, temperature="1", acceptance="coupled")
    await run(page)
    assert await page.run("document.getElementById('verdict').dataset.kind") == "equal"
    await choose(page, acceptance="token")
    await run(page)
    assert await page.run("document.getElementById('verdict').dataset.kind") == "inconclusive"
    assert "Choose coupled for one text" in await text_of(page, "#verdict")
    # Where nothing is drafted, equality shows nothing.
    await choose(page, acceptance="coupled", num_speculative_tokens="0")
    await run(page)
    assert "nothing was drafted" in await text_of(page, "#verdict")


async def test_the_page_lives_while_it_streams_and_escape_stops(served: Front, page: Browser) -> None:
    await choose(page, max_tokens="4000", compare=True)
    await page.run("document.getElementById('prompt').focus()")
    await page.press("Enter", code=13, ctrl=True)
    await page.until("document.querySelectorAll('.text .token').length > 20")
    assert "Equal so far" in await text_of(page, "#verdict")
    await page.send("Input.insertText", text="more")
    assert (await page.run("document.getElementById('prompt').value")).endswith("more")
    assert (await served.client.server_info()).num_requests_running == 2
    assert await page.run("document.getElementById('run').getAttribute('aria-disabled')") == "true"
    await keep(page, "streaming-1280-light")
    await page.press("Escape", code=27)
    await page.until("!document.body.classList.contains('running')")
    assert [pane["state"] for pane in await panes(page)] == ["stopped", "stopped"]
    assert (await text_of(page, "#status")).startswith("Stopped: ")
    assert "Not compared to the end" in await text_of(page, "#verdict")
    while (await served.client.server_info()).num_requests_running:  # the service learns of it
        await asyncio.sleep(0.02)
    await choose(page, max_tokens="5", prompt="!!")
    await run(page)
    assert [pane["state"] for pane in await panes(page)] == ["done", "done"]


async def test_errors_are_told_as_the_server_says_them(served: Front, page: Browser) -> None:
    await choose(page, temperature="-1")
    await run(page)
    asked = {"prompt": "!!", "temperature": -1}
    error = (await served.http.post("/v1/completions", json=asked)).json()["error"]
    told = await text_of(page, "#error")
    assert told == f"{error['message']} (HTTP 400, {error['code']}, field temperature)"
    assert await page.run("document.getElementById('temperature').getAttribute('aria-invalid')") == "true"
    await keep(page, "refused-1280-light")
    page.errors.clear()  # the browser logs every answer that is not 200
    await choose(page, temperature="0")
    await run(page)
    assert await page.run("document.getElementById('error').hidden")


async def test_a_token_opens_the_service(page: Browser, tmp_path: Path) -> None:
    token = new_token()
    (tmp_path / "tokens").write_text(line_for(token, "reader") + "\n")
    async with front(chatty(TARGET), None, coordinator={"tokens_file": str(tmp_path / "tokens")}) as closed:
        await page.go(f"{closed.url}/playground/")
        await page.until("!document.getElementById('error').hidden")
        error = (await closed.http.get("/v1/models")).json()["error"]
        assert (await text_of(page, "#error")).startswith(f"{error['message']} (HTTP 401, ")
        assert await page.run("document.activeElement.id") == "token"
        page.errors.clear()  # the browser logs every answer that is not 200
        await page.send("Input.insertText", text=token)
        await page.press("Tab", code=9)
        await page.until("document.getElementById('model').options.length")
        await choose(page, max_tokens="5")
        await run(page)
        assert (await panes(page))[0]["state"] == "done"
        assert await page.run("Object.keys(localStorage).concat(document.cookie || []).length") == 0
        assert [url for url in page.requests if token in url] == []
        page.requests[:] = [url for url in page.requests if not url.startswith(closed.url)]


async def test_nothing_else_can_run_in_the_page_or_be_reached_from_it(served: Front, page: Browser) -> None:
    with pytest.raises(BrowserError, match="TrustedHTML"):
        await page.run("document.body.innerHTML = '<b>x</b>'")
    with pytest.raises(BrowserError, match="EvalError"):
        await page.run("eval('1')")
    add = "(() => { const script = document.createElement('script'); script.append('window.injected = 1');"
    assert await page.run(f"{add} document.head.append(script); return window.injected === undefined; }})()")
    with pytest.raises(BrowserError, match="Failed to fetch"):
        await page.run("fetch('http://127.0.0.1:9/').then(() => 1)")
    assert "content-security-policy" in (await served.http.get("/playground/app.js")).headers
    page.errors.clear()
    page.requests[:] = [url for url in page.requests if not url.endswith(":9/")]


async def test_keys_reach_everything_and_show_where_they_are(page: Browser) -> None:
    await page.run("document.activeElement.blur()")
    expected = ["theme", "prompt", "run", "stop", "compare", "SUMMARY", "model", "kind", "temperature", "top_p",
                "max_tokens", "seed", "num_speculative_tokens", "drafter", "acceptance", "token", "text"]  # fmt: skip
    for name in expected:
        await page.press("Tab", code=9)
        at = "document.activeElement"
        assert await page.run(f"{at}.id || ({at}.className || {at}.tagName)") == name
        assert await page.run(f"getComputedStyle({at}).outlineStyle") == "solid", name
    await page.press("Tab", code=9, shift=True)
    assert await page.run("document.activeElement.id") == "token"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
async def test_it_fits_and_can_be_read(served: Front, page: Browser, size: tuple[int, int], scheme: str) -> None:
    await page.view(*size, scheme=scheme, reduced_motion=True)
    await page.go(f"{served.url}/playground/")
    await page.until("document.getElementById('model')?.options.length")
    await keep(page, f"idle-{size[0]}-{scheme}")
    await choose(page, **DEFAULTS, compare=True)
    await run(page)
    assert await page.run("document.documentElement.scrollWidth") <= size[0]
    assert await page.run("[...document.querySelectorAll('main *')].every((e) =>"
                          f" e.getBoundingClientRect().right <= {size[0]})")  # fmt: skip
    assert await page.run("getComputedStyle(document.querySelector('.fill')).transitionDuration") == "0s"
    for selector in (".token.accepted", ".token.correction", ".token.bonus", ".token.plain", ".state", ".about",
                     ".verdict", "#run", ".hint"):  # fmt: skip
        assert await page.run(f"({CONTRAST})({selector!r})") >= 4.5, selector
    lines = "['accepted', 'correction', 'bonus', 'plain'].map((origin) => document.querySelector(`.legend .${origin}`))"
    style = "`${getComputedStyle(e).textDecorationLine} ${getComputedStyle(e).textDecorationStyle}`"
    assert len(set(await page.run(f"{lines}.map((e) => {style})"))) == 4
    await keep(page, f"compared-{size[0]}-{scheme}")


async def test_the_theme_goes_round_and_stays(page: Browser) -> None:
    seen = []
    for _ in range(3):
        await page.click("#theme")
        seen.append(await text_of(page, "#theme"))
    assert seen == ["Theme: light", "Theme: dark", "Theme: system"]
    await page.click("#theme")
    await page.click("#theme")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = await page.run(ground)
    await page.send("Page.reload")
    await page.until("document.getElementById('model')?.options.length")
    assert await page.run(ground) == dark
    await page.run("localStorage.clear()")
