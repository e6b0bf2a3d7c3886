"""Prompts, texts and tokens are in no log, at the level that tells most, and in no metric."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port

from outrider import Client, OutriderError
from outrider.cli.stack import local_stack
from outrider.serving.tokens import line_for, new_token

pytestmark = pytest.mark.slow

MARKER = "MARKER-4711"
"""Of characters that a toy has ids for."""
TOY = "toy:vocab=94,seed=1"
REQUEST: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True, "num_speculative_tokens": 3, "temperature": 0}
WITH_MARKER: tuple[dict[str, Any], ...] = (
    {},
    {"num_speculative_tokens": 0, "logprobs": True},
    {"stop": [MARKER]},
    {"bad_words": [MARKER]},
    {"regex": f"{MARKER}.*"},
    {"regex": f"{MARKER}("},
    {"grammar": f'start: "{MARKER}" unknown_rule'},
    {"json_schema": f'{{"type": "{MARKER}"}}'},
    {"max_tokens": 10**6},
    {"n": 2, "seed": 3, "temperature": 1.0},
    {"timeout_s": 0.001},
)
"""Good and bad ones."""
JSON = {"content-type": "application/json"}
OVER_HTTP: tuple[dict[str, Any], ...] = (
    {"prompt": f"{MARKER}!!", "max_tokens": 48, "logprobs": 2},
    {"prompt": f"{MARKER}!!", "max_tokens": 48, "stream": True, "report_steps": True},
    {"prompt": f"{MARKER}!!", "response_format": {"type": MARKER}},
    {"prompt": f"{MARKER}!!", MARKER: MARKER},
    {"prompt": f"{MARKER}!!", "stop": [MARKER, 1]},
    {"prompt": f"{MARKER}!!", "model": MARKER},
    {"prompt": f"{MARKER} has spaces"},
    {"messages": [{"role": "user", "content": MARKER}]},
)
"""Of each kind too; the last one is no request of the path that it goes to."""


async def scraped(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return text


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_prompts_texts_and_tokens_are_in_no_log_and_no_metric(
    log_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, told, texts = new_token(), list[str](), list[str]()
    (tmp_path / "tokens").write_text(line_for(token, "team-a"))
    (tmp_path / "token").write_text(token)
    monkeypatch.setenv("OUTRIDER_TOKEN_FILE", str(tmp_path / "token"))
    ports = [free_port() for _ in range(3)]
    async with local_stack(
        TOY, f"{TOY},agreement=0.8", shared={"log_level": "debug", "log_format": log_format},
        coordinator={"tokens_file": str(tmp_path / "tokens"), "metrics_port": ports[0]},
        target_worker={"metrics_port": ports[1]}, draft_worker={"metrics_port": ports[2]},
        gateway={}, on_line=lambda role, line: told.append(line),
    ) as stack:  # fmt: skip
        async with Client(stack.address, token=token, resume=None) as client:
            num_refused = 0
            for more in WITH_MARKER:
                try:
                    answer: list[Any] = [e async for e in client.generate(f"{MARKER}!!", **{**REQUEST, **more})]
                    texts.append("".join(getattr(event, "text", "") for event in answer))
                except OutriderError:
                    num_refused += 1
            assert await client.tokenize(MARKER)
            assert await client.detokenize(await client.tokenize(MARKER)) == MARKER
        async with Client(stack.address, token=MARKER, resume=None) as client:
            with pytest.raises(OutriderError):
                await client.server_info()
        url = f"http://{stack.processes['gateway'].address}"
        async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=60) as http:
            answers = [await http.post("/v1/completions", json=asked) for asked in OVER_HTTP]
            assert [one.status_code for one in answers] == [200, 200, 400, 400, 400, 404, 400, 400]
            texts.append(answers[0].json()["choices"][0]["text"])
            torn = await http.post(f"/v1/completions?{MARKER}", content=f'{{"prompt": "{MARKER}', headers=JSON)
            stranger = await http.post("/v1/completions", json=OVER_HTTP[0], headers={"authorization": MARKER})
            assert (torn.status_code, stranger.status_code) == (400, 401)
            assert (await http.get(f"/v1/{MARKER}")).status_code == 404
            told.append((await http.get("/metrics")).text)
        for port in ports:
            told.append(await scraped(port))
    assert num_refused >= 4, "inconclusive: too few went wrong"
    long = [text for text in texts if len(text) >= 40]
    assert long, "inconclusive: no text was written"
    everything = "\n".join(told)
    assert any("outrider_generation_tokens_total" in line for line in told)
    assert len(told) > 10, f"inconclusive: {everything}"
    for secret in (MARKER, token, token.removeprefix("outrider_")):
        assert secret not in everything, [line for line in told if secret in line]
    for text in long:
        assert not any(text[start : start + 12] in everything for start in range(len(text) - 12))
    assert not [name for name in os.listdir(tmp_path) if name not in ("tokens", "token")]
