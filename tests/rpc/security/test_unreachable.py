"""Callers who reach nobody: each mistake about TLS is told from a machine on which nobody listens, with its mending."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from certificates import Authority
from ports import free_port
from stack import in_process_stack
from typer.testing import CliRunner

from outrider import TLS, Client
from outrider.cli.app import app
from outrider.errors import Unavailable


async def refusal(address: str, tls: TLS | None) -> str:
    async with Client(address, tls=tls, timeout_s=60) as client:
        with pytest.raises(Unavailable) as caught:
            await client.server_info()
        with pytest.raises(Unavailable) as of_a_text:
            await client.complete("!!")
    assert of_a_text.value.message == caught.value.message
    return caught.value.message


async def test_each_mistake_about_tls_is_told_by_its_name(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path, "ours"), Authority(tmp_path, "stranger")
    pair, strange = authority.certify("coordinator"), stranger.certify("caller")
    served = {"tls_cert": pair.cert, "tls_key": pair.key}
    async with in_process_stack(coordinator=served) as stack:
        assert "OUTRIDER_TLS_CA" in await refusal(stack.address, None)
        assert "may be served by TLS" in await refusal(stack.address, None)
        for untrusted in (TLS(stranger.ca), TLS()):
            told = await refusal(stack.address, untrusted)
            assert "is not trusted (unable to get local issuer certificate)" in told
            assert "OUTRIDER_TLS_CA" in told
        told = await refusal(stack.address, TLS(authority.ca, server_name="elsewhere.example"))
        assert "does not name the host" in told
        assert "OUTRIDER_TLS_SERVER_NAME" in told
        command = ["generate", "!!", f"--address={stack.address}"]
        done = await asyncio.to_thread(CliRunner().invoke, app, command, env={"OUTRIDER_TLS_CA": stranger.ca})
        assert (done.exit_code, "OUTRIDER_TLS_CA" in done.stderr) == (1, True), done.output
    async with in_process_stack(coordinator={**served, "tls_client_ca": authority.ca}) as stack:
        for shown in (TLS(authority.ca), TLS(authority.ca, strange.cert, strange.key)):
            told = await refusal(stack.address, shown)
            assert "may ask callers for a certificate" in told
            assert "OUTRIDER_TLS_CERT" in told
    async with in_process_stack() as stack:
        assert "speaks no TLS" in await refusal(stack.address, TLS(authority.ca))


@pytest.mark.parametrize("tls", [None, TLS()])
async def test_where_nobody_listens_nothing_is_said_of_tls(tls: TLS | None) -> None:
    told = await refusal(f"127.0.0.1:{free_port()}", tls)
    assert told.endswith("is a coordinator running there? (`outrider up`)")
    assert "TLS" not in told


async def test_another_protocol_is_told() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert "not by gRPC" in await refusal(address, None)
