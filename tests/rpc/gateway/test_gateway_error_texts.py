"""What errors tell: the request's id, what a misspelt field may have meant, and no worker's address."""

import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from gateway_stack import TARGET, Front, error_of, front
from waiting import until

from coordinator.gateway.errors import failure_of
from outrider.errors import InvalidArgument, Unavailable

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": TARGET, "prompt": "abc", "max_tokens": 4}
CHATTED: dict[str, Any] = {"model": TARGET, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served() -> AsyncIterator[Front]:
    async with front(draft=None) as running:
        yield running


in_module = pytest.mark.asyncio(loop_scope="module")


@in_module
@pytest.mark.parametrize(
    ("path", "asked", "says"),
    [
        (COMPLETIONS, {"temprature": 1}, "temprature is not supported here: did you mean temperature?"),
        (COMPLETIONS, {"max_new_tokens": 1}, "did you mean max_tokens?"),
        (COMPLETIONS, {"stream": True, "stream_options": {"include_usge": True}},
         "did you mean stream_options.include_usage?"),
        (COMPLETIONS, {"structured_outputs": {"regexp": "a"}}, "did you mean structured_outputs.regex?"),
        (CHAT, {"messages": [{"rol": "user", "content": "a"}]}, "did you mean messages[0].role?"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"shema": {}, "schema": {}}}},
         "did you mean response_format.json_schema.schema?"),
        (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs is not supported here: leave it out"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools is not supported here: leave it out"),
    ],
)  # fmt: skip
async def test_a_misspelt_field_is_told_what_it_may_have_meant(
    served: Front, path: str, asked: dict[str, Any], says: str
) -> None:
    answer = await served.http.post(path, json={**(CHATTED if path == CHAT else ASKED), **asked})
    assert answer.status_code == 400
    assert error_of(answer)["message"].endswith(says)


@in_module
async def test_errors_tell_the_requests_id(served: Front) -> None:
    """The body's before the header's, and one of ours where neither has any."""
    ours = await served.http.post(COMPLETIONS, json={**ASKED, "n": 17})
    assert re.fullmatch("[0-9a-f]{32}", ours.headers["x-request-id"])
    headers = {"x-request-id": "of-the-header"}
    for asked, told in (
        ({"n": 17}, "of-the-header"),
        ({"temprature": 1, "request_id": "unread"}, "of-the-header"),
        ({"n": 17, "request_id": "of-the-body"}, "of-the-body"),
        ({"model": "nobody", "stream": True}, "of-the-header"),
    ):
        answer = await served.http.post(COMPLETIONS, json={**ASKED, **asked}, headers=headers)
        assert (answer.is_error, answer.headers["x-request-id"]) == (True, told)
    for path in ("/v1/models/nobody", "/v1/embeddings"):
        answer = await served.http.get(path, headers=headers)
        assert (answer.status_code, answer.headers["x-request-id"]) == (404, "of-the-header")
    bad = await served.http.post(COMPLETIONS, json={**ASKED, "request_id": "no\ngood"})
    assert (bad.status_code, error_of(bad)["code"]) == (400, "bad_request_id")
    assert "x-request-id" not in bad.headers
    with pytest.raises(openai.BadRequestError) as refused:
        await served.openai.completions.create(**{**ASKED, "n": 17}, extra_headers=headers)
    assert refused.value.request_id == "of-the-header"


async def test_workers_addresses_are_for_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with front(draft=None) as served:
        address = served.stack.target[0].address
        await served.stack.target[0].close()

        async def is_refused() -> bool:
            return (await served.http.post(COMPLETIONS, json=ASKED)).status_code == 503

        await until(is_refused)
        answer = await served.http.post(COMPLETIONS, json=ASKED)
        error = error_of(answer)
        assert (answer.status_code, error["type"], error["code"]) == (503, "server_error", "no_target_worker")
        assert "[address]" in error["message"]
        assert address not in error["message"]
        (told,) = (line for line in caplog.text.splitlines() if answer.headers["x-request-id"] in line)
        assert address in told


@pytest.mark.parametrize(
    ("message", "public"),
    [
        ("worker 10.0.0.1:50052: gone; last error: UNKNOWN: ipv4:10.0.0.1:50052: Connection refused (111)",
         "worker [address]: gone; last error: UNKNOWN: [address]: Connection refused (111)"),
        ("(target-0.targets.svc:50052: full; [::1]:50052: lost; ipv6:%5B::1%5D:50052: lost)",
         "([address]: full; [address]: lost; [address]: lost)"),
        ("model 'org/qwen:7' of 'fast:7', step 3: 5 s", "model 'org/qwen:7' of 'fast:7', step 3: 5 s"),
    ],
)  # fmt: skip
def test_addresses_are_known_by_their_form(message: str, public: str) -> None:
    failure = failure_of(Unavailable(message, reason="WORKER_LOST"))
    assert failure.body["error"]["message"] == public
    assert failure.cause == (f"WORKER_LOST: {message}" if message != public else "")
    assert failure_of(InvalidArgument(message)).body["error"]["message"] == message
