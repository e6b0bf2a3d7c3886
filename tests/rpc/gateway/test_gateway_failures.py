"""What the gateway refuses, in OpenAI's shape; streams that break, that nobody reads, and that outlive the gateway."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from gateway_stack import TARGET, Front, error_of, front, gateway_before, metric, small_send_buffers
from ports import free_port
from waiting import until

from outrider.serving.channel import CLIENT_OPTIONS

SLOW = f"{TARGET},pass_ms=20"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": TARGET, "prompt": "abc", "max_tokens": 4}
CHATTED: dict[str, Any] = {"model": TARGET, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
LONG: dict[str, Any] = {"model": SLOW, "prompt": "abc", "max_tokens": 4000, "temperature": 0}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served() -> AsyncIterator[Front]:
    async with front(gateway={"max_body_bytes": 20_000}) as running:
        yield running


in_module = pytest.mark.asyncio(loop_scope="module")


@in_module
@pytest.mark.parametrize(
    ("path", "asked", "param", "code"),
    [
        (COMPLETIONS, {"temperature": -1}, "temperature", "out_of_range"),
        (COMPLETIONS, {"temperature": "hot"}, "temperature", "invalid_type"),
        (COMPLETIONS, {"n": 17}, "n", "out_of_range"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "out_of_range"),
        (COMPLETIONS, {"max_tokens": 5000}, "max_tokens", "context_length_exceeded"),
        (COMPLETIONS, {"max_tokens": True}, "max_tokens", "invalid_type"),
        (COMPLETIONS, {"max_tokens": 2**70}, "max_tokens", "invalid_value"),
        (COMPLETIONS, {"prompt": [1] * 5000}, "prompt", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": [999]}, "prompt", "token_id_out_of_range"),
        (COMPLETIONS, {"prompt": "a b"}, "prompt", "text_not_in_vocabulary"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "invalid_value"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "invalid_value"),
        (COMPLETIONS, {"prompt": ["a"] * 65}, "prompt", "invalid_value"),
        (COMPLETIONS, {"prompt": None}, "prompt", "invalid_value"),
        (COMPLETIONS, {"stop": [""]}, "stop[0]", "out_of_range"),
        (COMPLETIONS, {"stop": ["a", 1]}, "stop[1]", "invalid_type"),
        (COMPLETIONS, {"seed": -1}, "seed", "invalid_type"),
        (COMPLETIONS, {"logprobs": 21}, "top_logprobs", "out_of_range"),
        (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
        (COMPLETIONS, {"logit_bias": {"5": 101}}, "logit_bias[5]", "out_of_range"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo", "unsupported_parameter"),
        (COMPLETIONS, {"echo": True, "prompt": [999]}, "prompt", "token_id_out_of_range"),
        (COMPLETIONS, {"echo": "yes"}, "echo", "invalid_type"),
        (CHAT, {"echo": True}, "echo", "unsupported_parameter"),
        (CHAT, {"store": True}, "store", "unsupported_parameter"),
        (CHAT, {"metadata": {"a": "b"}}, "metadata", "unsupported_parameter"),
        (CHAT, {"verbosity": "high"}, "verbosity", "unsupported_parameter"),
        (COMPLETIONS, {"suffix": "x"}, "suffix", "unsupported_parameter"),
        (COMPLETIONS, {"best_of": 3}, "best_of", "unsupported_parameter"),
        (COMPLETIONS, {"best_of": 1, "n": 2}, "best_of", "unsupported_parameter"),
        (COMPLETIONS, {"prompt_logprobs": 1}, "prompt_logprobs", "unsupported_parameter"),
        (COMPLETIONS, {"lora": "x"}, "lora", "unsupported_parameter"),
        (COMPLETIONS, {"drafter": "nobody"}, "drafter", None),
        (COMPLETIONS, {"acceptance": "typical"}, "acceptance", "invalid_value"),
        (COMPLETIONS, {"num_speculative_tokens": -1}, "num_speculative_tokens", None),
        (COMPLETIONS, {"stream": True, "stream_options": {"more": 1}}, "stream_options.more", "unsupported_parameter"),
        (COMPLETIONS, {"structured_outputs": {"regex": "("}}, "structured_outputs", "bad_grammar"),
        (COMPLETIONS, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag",
         "unsupported_parameter"),
        (COMPLETIONS, {"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "invalid_value"),
        (CHAT, {"messages": []}, "messages", "invalid_value"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role", "invalid_value"),
        (CHAT, {"messages": [{"role": "usr", "content": "a"}]}, "messages[0].role", "invalid_value"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name",
         "unsupported_parameter"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type", "unsupported_parameter"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
        (CHAT, {"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
        (CHAT, {"user": 5}, "user", "invalid_value"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        (CHAT, {"max_completion_tokens": 5}, "max_completion_tokens", "invalid_value"),
        (CHAT, {"chat_template_kwargs": {"unknown": 1}}, "chat_template_kwargs", "chat_template_unknown_name"),
        (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message",
         "invalid_value"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "invalid_value"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
         "response_format", "bad_grammar"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_field_is_refused_by_its_name(
    served: Front, path: str, asked: dict[str, Any], param: str, code: str | None, stream: bool
) -> None:
    answer = await served.http.post(path, json={**(CHATTED if path == CHAT else ASKED), "stream": stream, **asked})
    if answer.status_code == 200:
        pytest.fail(answer.text)
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert code is None or error["code"] == code
    assert not any(section in error["message"] for section in ("sampling.", "stopping.", "output.", "speculation."))


@in_module
async def test_stream_options_are_of_streams(served: Front) -> None:
    answer = await served.http.post(COMPLETIONS, json={**ASKED, "stream_options": {"include_usage": True}})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "stream_options")


@in_module
async def test_fields_that_ask_for_nothing_are_taken(served: Front) -> None:
    """As clients send them, and an earlier answer with all that it came with."""
    earlier = {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None, "annotations": []}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    neutral = {"tools": None, "tool_choice": "none", "user": "u", "store": False, "modalities": ["text"], "stop": None,
               "service_tier": "auto", "top_k": -1, "logit_bias": {}, "stream_options": None, "metadata": {},
               "verbosity": "medium", "prompt_logprobs": None}  # fmt: skip
    answer = await served.http.post(CHAT, json={**CHATTED, **neutral, "messages": [parts, earlier]})
    assert answer.status_code == 200, answer.text
    for more in ({"best_of": 1}, {"best_of": 2, "n": 2}, {"suffix": None}, {"suffix": ""}, {"echo": False}):
        answer = await served.http.post(COMPLETIONS, json={**ASKED, **more})
        assert answer.status_code == 200, answer.text


@in_module
@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{", {}, 400, "bad_json"),
        (b"[]", {}, 400, "bad_json"),
        (b'{"seed": NaN}', {}, 400, "bad_json"),
        (b'{"seed": 1, "seed": 2}', {}, 400, "bad_json"),
        (b"[" * 10_000, {}, 400, "bad_json"),
        (b"{}", {"content-type": "text/plain"}, 415, "invalid_value"),
        (b'{"prompt": "' + b"a" * 20_000 + b'"}', {}, 413, "too_large"),
        (json.dumps(ASKED).encode(), {"x-request-id": "no good"}, 400, "bad_request_id"),
        (json.dumps({**ASKED, "model": "nobody"}).encode(), {}, 404, "model_not_found"),
    ],
)
async def test_a_bad_body_is_refused(
    served: Front, body: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    kind = {"content-type": "application/json"}
    answer = await served.http.post(COMPLETIONS, content=body, headers=kind | headers)
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


@in_module
async def test_other_paths_and_methods_answer_in_the_same_shape(served: Front) -> None:
    for method, path, status in (("GET", "/v1/embeddings", 404), ("GET", COMPLETIONS, 405)):
        answer = await served.http.request(method, path)
        assert (answer.status_code, error_of(answer)["type"]) == (status, "invalid_request_error")


@in_module
async def test_requests_are_counted_by_path_and_status(served: Front) -> None:
    async def counts() -> tuple[float, float, float]:
        name = "outrider_gateway_requests_total"
        good = await metric(served.http, name, path=COMPLETIONS, status="200")
        bad = await metric(served.http, name, path=COMPLETIONS, status="404")
        seconds = await metric(served.http, "outrider_gateway_request_seconds_count", path=COMPLETIONS)
        return good, bad, seconds

    before = await counts()
    await served.http.post(COMPLETIONS, json=ASKED)
    await served.http.post(COMPLETIONS, json={**ASKED, "model": "nobody"})
    after = await counts()
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1, 2]
    assert await metric(served.http, "outrider_gateway_requests_running") == 0


@in_module
async def test_a_token_is_passed_on_as_it_came(served: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    from outrider.client import Client

    generate = Client.generate

    def spy(self: Client, *args: Any, **options: Any) -> Any:
        seen.append(dict(self._metadata))
        return generate(self, *args, **options)

    monkeypatch.setattr(Client, "generate", spy)
    judged = {"authorization": "Bearer secret", "x-outrider-tenant": "somebody-else", "traceparent": "00-1-2-01"}
    headers = {**judged, "x-forwarded-for": "10.0.0.1", "cookie": "a=b"}
    assert (await served.http.post(COMPLETIONS, json=ASKED, headers=headers)).status_code == 200
    assert seen == [judged]
    answer = await served.http.post(COMPLETIONS, json=ASKED, headers={"authorization": "Bearer \u00e9".encode()})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "authorization")


async def test_a_full_queue_is_a_429_that_says_when_to_come_back() -> None:
    settings = {"max_running_requests": 1, "max_waiting_requests": 0}
    async with front(SLOW, None, coordinator=settings) as served:
        first = await served.openai.completions.create(**LONG, stream=True)
        await anext(first)
        with pytest.raises(openai.RateLimitError) as full:
            await served.openai.completions.create(**LONG)
        assert int(full.value.response.headers["retry-after"]) >= 1
        assert int(full.value.response.headers["retry-after-ms"]) >= 1
        assert isinstance(full.value.body, dict)
        assert full.value.body["type"] == "rate_limit_error"
        await first.close()


async def test_the_gateway_itself_takes_so_many_requests() -> None:
    async with front(SLOW, None, gateway={"max_concurrent_requests": 1}) as served:
        first = await served.openai.completions.create(**LONG, stream=True)
        await anext(first)
        with pytest.raises(openai.RateLimitError, match="as many as it takes at once"):
            await served.openai.completions.create(**LONG)
        await first.close()


async def test_without_a_coordinator_it_lives_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with gateway_before(f"127.0.0.1:{nobody.getsockname()[1]}") as server:
            async with httpx.AsyncClient(base_url=f"http://{server.address}", timeout=60) as http:
                answer = await http.post(COMPLETIONS, json=ASKED)
                error = error_of(answer)
                assert (answer.status_code, error["type"]) == (503, "server_error")
                assert error["message"] == "no coordinator can be reached"
                assert f"request {answer.headers['x-request-id']} failed: " in caplog.text
                assert f":{nobody.getsockname()[1]}" in caplog.text
                assert (await http.get("/live")).status_code == 200
                assert (await http.get("/health")).status_code == 503


async def test_health_follows_the_target_worker() -> None:
    async with front(draft=None) as served:
        assert (await served.http.get("/health")).status_code == 200
        await served.stack.target[0].close()

        async def is_unwell() -> bool:
            return (await served.http.get("/health")).status_code == 503

        await until(is_unwell)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_frees_its_stream(stream: bool) -> None:
    async with front(SLOW, None) as served:

        async def num_running() -> int:
            return (await served.client.server_info()).num_requests_running

        async def is_running() -> bool:
            return await num_running() == 2

        async def is_free() -> bool:
            return await num_running() == 0

        asked = asyncio.create_task(served.openai.completions.create(**{**LONG, "n": 2}, stream=stream))
        await until(is_running)
        if stream:
            await (await asked).close()
        else:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        await until(is_free)

        async def is_counted() -> bool:
            return await metric(served.http, "outrider_gateway_requests_total", path=COMPLETIONS, status="499") == 1

        await until(is_counted)
        assert await metric(served.http, "outrider_gateway_requests_running") == 0


async def test_a_stream_that_nobody_reads_is_held_back_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With small buffers on the way, or it would take long to fill them."""
    monkeypatch.setattr("outrider.client.CLIENT_OPTIONS", (*CLIENT_OPTIONS, ("grpc.http2.bdp_probe", 0)))
    small_send_buffers(monkeypatch)
    metrics_port = free_port()
    settings = {"emit_buffer_chunks": 2, "metrics_port": metrics_port}
    async with front(TARGET, None, coordinator=settings) as served:
        shown = {"report_steps": True, "logprobs": 20, "ignore_eos": True}
        asked = json.dumps({"model": TARGET, "prompt": "abc", "max_tokens": 4000, "stream": True, **shown})
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            host, _, port = served.server.address.partition(":")
            loop = asyncio.get_running_loop()
            await loop.sock_connect(deaf, (host, int(port)))
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            await loop.sock_sendall(deaf, f"{head}content-length: {len(asked)}\r\n\r\n{asked}".encode())

            async def is_held_back() -> bool:
                told = await served.http.get(f"http://127.0.0.1:{metrics_port}/metrics")
                line = next(one for one in told.text.splitlines() if one.startswith("outrider_num_requests_paused"))
                return float(line.rpartition(" ")[2]) == 1

            await until(is_held_back)

        async def is_free() -> bool:
            return (await served.client.server_info()).num_requests_running == 0

        await until(is_free)


async def test_a_stream_that_breaks_ends_in_an_error_and_not_in_done() -> None:
    async with front(f"{TARGET},pass_ms=50", None, coordinator={"max_request_s": 1.5}) as served:
        asked = {**LONG, "model": f"{TARGET},pass_ms=50", "stream": True}
        stream = await served.openai.completions.create(**asked)
        texts = []
        with pytest.raises(openai.APIError, match="time is up") as broken:
            async for piece in stream:
                texts.append(piece.choices[0].text)
        assert texts
        assert broken.value.code == "deadline_exceeded"
        raw = (await served.http.post(COMPLETIONS, json=asked)).text
        assert "[DONE]" not in raw
        last = raw.strip().split("\n\n")[-1]
        assert last.startswith("event: error\ndata: ")
        whole = await served.http.post(COMPLETIONS, json={**asked, "stream": False})
        assert (whole.status_code, error_of(whole)["code"]) == (504, "deadline_exceeded")
        assert await metric(served.http, "outrider_gateway_requests_total", path=COMPLETIONS, status="504") == 3


@pytest.mark.parametrize("grace_s", [0.0, 60.0])
async def test_a_gateway_that_ends_lets_streams_end_or_tells_them(grace_s: float) -> None:
    async with front(f"{TARGET},pass_ms=5", None, gateway={"drain_grace_s": grace_s}) as served:
        asked = {**LONG, "model": f"{TARGET},pass_ms=5", "max_tokens": 100 if grace_s else 4000}
        stream = await served.openai.completions.create(**asked, stream=True)
        await anext(stream)
        served.server.stop.set()
        if grace_s:
            pieces = [piece async for piece in stream]
            assert pieces[-1].choices[0].finish_reason == "length"
        else:
            with pytest.raises(openai.APIError) as cut:
                async for _ in stream:
                    pass
            assert cut.value.code == "draining"
        await asyncio.wait_for(served.server.task, 60)
        with pytest.raises(openai.APIConnectionError):
            await served.openai.completions.create(**asked)


async def test_health_tells_balancers_before_anything_is_refused() -> None:
    async with front(draft=None, gateway={"drain_delay_s": 5.0}) as served:
        served.server.stop.set()

        async def is_unwell() -> bool:
            return (await served.http.get("/health")).status_code == 503

        await until(is_unwell)
        assert (await served.http.post(COMPLETIONS, json=ASKED)).status_code == 200
