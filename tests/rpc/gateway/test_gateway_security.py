"""Tokens and TLS through the gateway: the coordinator judges, the gateway says it as OpenAI does."""

import json
import ssl
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from certificates import Authority
from gateway_stack import TARGET, chatty, front, gateway_before, metric
from stack import in_process_stack, start

from coordinator import server as coordinator_server
from outrider.errors import InvalidArgument, NotFound
from outrider.serving.tokens import line_for, new_token
from outrider.settings import CoordinatorSettings

ASKED: dict[str, Any] = {"model": TARGET, "prompt": "abc", "max_tokens": 4, "seed": 1}


async def test_without_a_valid_key_nothing_is_served(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    key = new_token()
    tokens.write_text(f"{line_for(key, 'red')}\n")
    async with front(draft=None, coordinator={"tokens_file": str(tokens)}) as served:
        good = served.openai.with_options(api_key=key)
        answer = await good.completions.create(**ASKED)
        assert answer.choices[0].text
        assert [model.id async for model in await good.models.list()] == [TARGET]
        for call in (served.openai.completions.create(**ASKED), served.openai.models.retrieve(TARGET)):
            with pytest.raises(openai.AuthenticationError) as refused:
                await call
            assert (refused.value.status_code, refused.value.code) == (401, "invalid_api_key")
            assert refused.value.response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            await served.openai.completions.create(**ASKED, stream=True)
        assert (await served.http.post("/v1/completions", json=ASKED)).status_code == 401
        assert await metric(served.http, "outrider_gateway_requests_total", path="/v1/completions", status="401") == 3
        assert (await served.http.get("/health")).status_code == 200


async def test_a_rate_is_of_requests_and_not_of_the_tokens_that_logprobs_name(tmp_path: Path) -> None:
    """Each new one is asked for in the tenant's name."""
    tokens, limits = tmp_path / "tokens", tmp_path / "limits"
    key = new_token()
    tokens.write_text(f"{line_for(key, 'red')}\n")
    limits.write_text("[tenants.red]\nrequests_per_minute = 1\n")
    files = {"tokens_file": str(tokens), "tenant_limits_file": str(limits)}
    async with front(draft=None, coordinator=files) as served:
        asked: dict[str, Any] = {**ASKED, "max_tokens": 60, "logprobs": 3, "temperature": 5.0}
        good = served.openai.with_options(api_key=key)
        logprobs = (await good.completions.create(**asked)).choices[0].logprobs
        assert logprobs is not None
        assert len(set(logprobs.tokens or ())) > 10, "INCONCLUSIVE: hardly a token was new"
        with pytest.raises(openai.RateLimitError) as refused:
            await good.completions.create(**ASKED)
        assert refused.value.code == "tenant_rate"


async def test_the_tenant_that_a_proxy_names_is_the_coordinators_to_believe(tmp_path: Path) -> None:
    async with front(
        draft=None, coordinator={"trusted_tenant_header": "x-team"}, gateway={"trusted_tenant_header": "x-team"}
    ) as served:
        named = {"x-team": "acme", "x-request-id": "of-acme"}
        assert (await served.http.post("/v1/completions", json=ASKED, headers=named)).status_code == 200
        with pytest.raises(NotFound):
            await served.client.trace("of-acme")
        assert await served.client.with_metadata({"x-team": "acme"}).trace("of-acme")
        bad = await served.http.post("/v1/completions", json=ASKED, headers={"x-team": "two words"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "x-team")
    tokens = tmp_path / "tokens"
    key = new_token()
    tokens.write_text(f"{line_for(key, 'red')}\n")
    async with front(draft=None, coordinator={"tokens_file": str(tokens)}) as served:
        for tenant, status in (("red", 200), ("blue", 403)):
            headers = {"authorization": f"Bearer {key}", "x-outrider-tenant": tenant}
            assert (await served.http.get("/v1/models", headers=headers)).status_code == status
            answer = await served.http.post("/v1/completions", json=ASKED, headers=headers)
            assert answer.status_code == status
        assert answer.json()["error"]["code"] == "tenant_mismatch"


async def test_https_before_coordinators_that_speak_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, own = authority.certify("coordinator"), authority.certify("gateway")
    behind = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": authority.ca}
    before = {"tls_cert": own.cert, "tls_key": own.key, "tls_ca": authority.ca}
    async with front(draft=None) as plain:
        expected = (await plain.openai.completions.create(**ASKED)).choices[0].text
        target = plain.stack.target[0].address
        common = {"port": 0, "log_level": "warning", "target_workers": (target,), "drain_grace_s": 0.0}
        secured = await start(coordinator_server.serve, CoordinatorSettings(**common, **behind))
        try:
            async with gateway_before(f"localhost:{secured.port}", **before) as gateway:
                trust = ssl.create_default_context(cafile=authority.ca)
                url = f"https://{gateway.address}/v1"
                async with (
                    httpx.AsyncClient(verify=trust) as http,
                    openai.AsyncOpenAI(base_url=url, api_key="any", http_client=http, max_retries=0) as client,
                ):
                    pieces = await client.completions.create(**ASKED, stream=True)
                    assert "".join([piece.choices[0].text async for piece in pieces]) == expected
                async with httpx.AsyncClient(verify=trust) as http:
                    with pytest.raises(httpx.RemoteProtocolError):
                        await http.post(f"http://{gateway.address}/v1/completions", content=json.dumps(ASKED))
        finally:
            await secured.close()


async def test_a_tenant_that_a_stranger_names_is_believed_nowhere(tmp_path: Path) -> None:
    """Before a coordinator that knows the gateway's certificate, and no token of its callers."""
    authority = Authority(tmp_path)
    pair = authority.certify("coordinator", "gateway")
    own = {"tls_cert": pair.cert, "tls_key": pair.key}
    tokens, key = tmp_path / "tokens", new_token()
    tokens.write_text(f"{line_for(key, 'victim')}\n")
    strangers = ({"x-outrider-tenant": "victim"}, {"authorization": f"Bearer {key}"}, {})

    async def statuses(url: str, *headers: dict[str, str]) -> list[int]:
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=authority.ca), base_url=url) as http:
            answers = [await http.post("/v1/completions", json=ASKED, headers=each) for each in headers]
            told.append((await http.get("/health")).json())
        return [answer.status_code for answer in answers]

    async with in_process_stack(chatty(), None, coordinator={**own, "tls_client_ca": authority.ca}) as stack:
        to_coordinator = {**own, "tls_ca": authority.ca, "host": "0.0.0.0"}
        for change, expected in (({}, [403] * 3), ({"insecure": True}, [200] * 3), ({"host": "127.0.0.1"}, [200] * 3)):
            told: list[dict[str, str]] = []
            async with gateway_before(stack.address, **{**to_coordinator, **change}) as gateway:
                assert await statuses(f"https://localhost:{gateway.port}", *strangers) == expected, change
            assert ("set --tokens-file" in told[0].get("detail", "")) == (expected[0] == 403)
    async with in_process_stack(chatty(), None, coordinator={**own, "tokens_file": str(tokens)}) as stack:
        async with gateway_before(stack.address, **to_coordinator) as gateway:
            assert await statuses(f"https://localhost:{gateway.port}", *strangers) == [401, 200, 401]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"host": "0.0.0.0"}, "host"),
        ({"tls_key": "key.pem"}, "tls_cert"),
        ({"tls_cert": "nothing.pem", "tls_key": "nothing.key"}, "tls_cert"),
        ({"coordinators": ()}, "coordinators"),
        ({"coordinators": ("no address",)}, "address"),
    ],
)
async def test_settings_that_would_leave_it_open_or_useless_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        async with gateway_before("127.0.0.1:50050", **settings):
            pytest.fail("it serves")
    assert refused.value.field == field


async def test_a_network_may_be_said_to_keep_others_out() -> None:
    async with gateway_before("127.0.0.1:1", host="0.0.0.0", insecure=True) as gateway, httpx.AsyncClient() as http:
        assert (await http.get(f"http://127.0.0.1:{gateway.port}/live")).status_code == 200
