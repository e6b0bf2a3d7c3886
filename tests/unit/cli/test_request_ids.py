"""Ids as users have them at hand: those of the gateway's answers lead to the request, and a path is taken for no id."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.cli.request_ids import by_id
from outrider.errors import NotFound


async def fetch(request_id: str) -> str:
    if request_id not in ("one", "cmpl-two"):
        raise NotFound(f"request_id {request_id!r}: no such request")
    return request_id


@pytest.mark.parametrize(
    ("given", "leads_to"),
    [
        ("one", "one"),
        ("chatcmpl-one", "one"),
        ("cmpl-one", "one"),
        ("cmpl-two", "cmpl-two"),
        ("cmpl-cmpl-two", "cmpl-two"),
    ],
)
async def test_ids_of_the_gateway_lead_to_the_request(given: str, leads_to: str) -> None:
    assert await by_id(fetch, given) == leads_to


@pytest.mark.parametrize("given", ["two", "cmpl-", "cmpl-three", "xcmpl-one"])
async def test_what_is_nowhere_is_told_as_it_was_given(given: str) -> None:
    with pytest.raises(NotFound, match=f"'{given}'"):
        await by_id(fetch, given)


def test_a_path_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("audit", "trace"):
        done = CliRunner().invoke(app, [command, "records/missing.pb", "--address=127.0.0.1:1"])
        assert (done.exit_code, "'records/missing.pb': no such file" in done.stderr) == (2, True), done.stderr
    done = CliRunner().invoke(app, ["audit", "missing.pb", "--address=127.0.0.1:1"])
    assert done.exit_code == 4, "1 is a BREACH"
    assert "nor is there a file missing.pb" in done.stderr
