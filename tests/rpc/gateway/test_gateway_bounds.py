"""What strangers may cost the gateway: nothing is made room for before a coordinator knows them, and no input is an
internal error."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from gateway_stack import TARGET, Front, error_of, front

from coordinator.gateway import answer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": TARGET, "prompt": "abc", "max_tokens": 4}
JSON = {"content-type": "application/json"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served() -> AsyncIterator[Front]:
    async with front(draft=None, gateway={"allowed_hosts": "models.example"}) as running:
        yield running


in_module = pytest.mark.asyncio(loop_scope="module")


@in_module
@pytest.mark.parametrize("asked", [{"n": 800_000}, {"n": 0}, {"n": -1}, {"n": 2**70}, {"model": "nobody", "n": 16}])
async def test_no_choice_is_made_room_for_that_will_not_come(
    served: Front, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a choice was made room for")

    monkeypatch.setattr(answer, "_Choice", refuse)
    refused = await served.http.post(COMPLETIONS, json={**ASKED, **asked})
    assert (refused.status_code, error_of(refused)["param"]) in ((400, "n"), (404, "model"))
    assert (await served.http.post(COMPLETIONS, json=ASKED)).status_code == 500, "the patch bites"


@in_module
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, r'{"prompt": "\ud800!"}'),
        (COMPLETIONS, r'{"prompt": "!", "\udfff": 1}'),
        (COMPLETIONS, r'{"prompt": "!", "structured_outputs": {"\uD800": 1}}'),
        (
            COMPLETIONS,
            r'{"prompt": "!", "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "\ud800": 1}}}',
        ),
        (CHAT, r'{"messages": [{"role": "user", "content": "\ud800"}]}'),
        (CHAT, r'{"messages": [{"role": "user", "content": "!", "\udc00": 1}]}'),
        (CHAT, r'{"messages": [{"role": "user", "content": "\ude00\ud83d"}]}'),
        (COMPLETIONS, b'{"prompt": "\xed\xa0\x80"}'),
    ],
)
async def test_half_a_surrogate_pair_is_no_text(served: Front, path: str, body: str | bytes) -> None:
    refused = await served.http.post(path, content=body, headers=JSON)
    error = error_of(refused)
    assert (refused.status_code, error["code"]) == (400, "bad_json")
    assert "surrogate" in error["message"] or isinstance(body, bytes)


@in_module
async def test_a_whole_surrogate_pair_is_a_character(served: Front) -> None:
    pair = r'{"messages": [{"role": "user", "content": "a", "\ud83d\ude00\\ud800": 1}]}'
    told = error_of(await served.http.post(CHAT, content=pair, headers=JSON))
    assert told["param"] == "messages[0].\U0001f600\\ud800"


@in_module
@pytest.mark.parametrize("digits", [11, 21, 4301])
async def test_an_id_of_many_digits_is_none(served: Front, digits: int) -> None:
    refused = await served.http.post(COMPLETIONS, json={**ASKED, "logit_bias": {"9" * digits: 1}})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "logit_bias")


@in_module
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/models"])
async def test_headers_that_no_coordinator_would_take_are_refused_as_such(served: Front, path: str) -> None:
    async def ask(*headers: tuple[str, str]) -> tuple[int, str | None, str | None]:
        asked = {"json": ASKED} if path == COMPLETIONS else {}
        method = "POST" if asked else "GET"
        answer = await served.http.request(method, path, headers=list(headers), **asked)
        if answer.status_code == 200:
            return 200, None, None
        return answer.status_code, (error := error_of(answer))["code"], error["param"]

    long = "Bearer " + "a" * 9000
    assert await ask(("authorization", long)) == (431, "headers_too_large", "authorization")
    assert await ask(("tracestate", long), ("authorization", "a")) == (431, "headers_too_large", "tracestate")
    assert await ask(("authorization", long[:6000])) == (200, None, None)
    twice = (("authorization", "Bearer a"), ("authorization", "Bearer b"))
    assert await ask(*twice) == (401, "invalid_api_key", None)
    tenants = (("x-outrider-tenant", "a"), ("x-outrider-tenant", "a"))
    assert await ask(*tenants) == (400, "bad_header", "x-outrider-tenant")
    assert await ask(("tracestate", "a=1"), ("tracestate", "b=2")) == (200, None, None)


@in_module
@pytest.mark.parametrize(("num_chars", "num_prompts"), [(127, 2), (126, 11)])
async def test_an_id_has_room_for_the_index_of_a_prompt(served: Front, num_chars: int, num_prompts: int) -> None:
    asked = {**ASKED, "prompt": ["abc"] * num_prompts}
    refused = await served.http.post(COMPLETIONS, json={**asked, "request_id": "a" * num_chars})
    assert (refused.status_code, error_of(refused)["code"]) == (400, "bad_request_id")
    assert f"request_id has {num_chars} characters, at most {num_chars - 1}" in error_of(refused)["message"]
    taken = await served.http.post(COMPLETIONS, json={**asked, "request_id": "a" * (num_chars - 1)})
    assert taken.status_code == 200


@in_module
@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("evil.example:8080", "http://evil.example:8080", 403),
        ("localhost.evil.example", "http://localhost.evil.example", 403),
        ("127.0.0.1.evil.example", "null", 403),
        ("", "http://evil.example", 403),
        ("evil.example", None, 200),
        ("LOCALHOST:8080", "http://localhost:8080", 200),
        ("toy.localhost", "http://toy.localhost", 200),
        ("127.0.0.1:8080", "https://tunnel.example", 200),
        ("[::1]:8080", "http://[::1]:8080", 200),
        ("models.example", "https://models.example", 200),
    ],
)
async def test_a_page_under_a_name_that_is_not_this_machines_is_refused(
    served: Front, host: str, origin: str | None, status: int
) -> None:
    """Of a browser that was told that the page's own name means loopback."""
    headers = {"host": host} | ({"origin": origin} if origin else {})
    answer = await served.http.post(COMPLETIONS, json=ASKED, headers=headers)
    assert answer.status_code == status
    if status == 403:
        assert error_of(answer)["code"] == "foreign_host"


@in_module
@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/v1/models", "evil.example:8080", 403),
        ("/metrics", "evil.example", 403),
        ("/version", "127.0.0.1.evil.example", 403),
        ("/", "evil.example", 403),
        ("/live", "evil.example", 200),
        ("/health", "outrider-0.outrider.default.svc.cluster.local:8080", 200),
        ("/v1/models", "10.1.2.3:8080", 200),
        ("/v1/models", "[::1]:8080", 200),
        ("/v1/models", "outrider-0:8080", 200),
        ("/v1/models", "host.docker.internal:8080", 200),
        ("/metrics", "models.example", 200),
        ("/metrics", "", 200),
    ],
)
async def test_what_a_rebound_page_only_reads_is_refused_though_it_has_no_origin(
    served: Front, path: str, host: str, status: int
) -> None:
    """Browsers send none with what they take for their own site."""
    answers = [await served.http.request(method, path, headers={"host": host}) for method in ("GET", "HEAD")]
    assert [answer.status_code for answer in answers] == [status] * 2
    if status == 403:
        assert error_of(answers[0])["code"] == "foreign_host"
