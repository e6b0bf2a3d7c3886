"""What `up` prints for the next terminal, and what each surface says where the token is missing."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from coordinator.gateway.errors import failure_of
from outrider.cli.console import describe_failure
from outrider.cli.up_calls import calls, program
from outrider.errors import Unauthenticated
from outrider.serving.tokens import NO_TOKEN

ADDRESS, GATEWAY, TOKEN = "127.0.0.1:1", "127.0.0.1:2", "outrider_x"


@pytest.mark.parametrize("is_toy", [False, True])
def test_with_a_token_each_line_shows_it(is_toy: bool) -> None:
    lines = calls(ADDRESS, GATEWAY, TOKEN, is_toy=is_toy)
    kinds = {"generate", "grpcurl", "outrider.Client", "curl -N", "openai.OpenAI"} | ({"chat"} if not is_toy else set())
    for kind in kinds:
        assert [line for line in lines if kind in line and TOKEN in line], kind
    assert [line for line in lines if TOKEN not in line] == [line for line in lines if line.startswith("browser")]


def test_without_one_no_line_names_any() -> None:
    lines = calls(ADDRESS, GATEWAY, "", is_toy=False)
    assert not [line for line in lines if "TOKEN" in line or "token:" in line or "uthorization" in line]
    assert len(calls(ADDRESS, None, "", is_toy=False)) == len(lines) - 3


def test_all_of_them_ask_for_the_likeliest_text() -> None:
    """At a small model's own temperature the first text that anybody sees would be noise."""
    lines = calls(ADDRESS, GATEWAY, "", is_toy=False)
    for kind in ("generate --", "chat --", "grpcurl", "curl -N"):
        (line,) = [line for line in lines if kind in line]
        assert "--temperature 0" in line or '"temperature": 0' in line


def test_in_a_checkout_an_example_is_named_with_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    monkeypatch.setattr(sys, "executable", str(Path("bin/python").absolute()))
    named = f"OUTRIDER_TOKEN={TOKEN} bin/python docs/examples/stream.py"
    assert named in calls("127.0.0.1:50050", GATEWAY, TOKEN, is_toy=False)
    assert named not in calls(ADDRESS, GATEWAY, TOKEN, is_toy=False), "it calls another port"
    monkeypatch.chdir(tmp_path)
    assert named not in calls("127.0.0.1:50050", GATEWAY, TOKEN, is_toy=False)


def test_the_program_is_this_installations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = Path(sys.executable).parent.parent.resolve()  # a shell tells it without links
    own = folder / "bin" / "outrider"
    monkeypatch.setattr(sys, "executable", str(own.with_name("python")))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(folder)
    assert program() == "bin/outrider"
    monkeypatch.chdir(tmp_path)
    assert program() == shlex.quote(str(own))
    monkeypatch.setenv("PATH", str(own.parent))
    assert program() == "outrider"


def test_how_to_show_a_token_is_told_in_words_of_the_surface() -> None:
    error = Unauthenticated("no token: send metadata", reason=NO_TOKEN)
    message, code = describe_failure(error)
    assert (message.count("OUTRIDER_TOKEN"), "metadata" in message, code) == (2, False, 1)
    failure = failure_of(error)
    assert failure.status == 401
    told = failure.body["error"]["message"]
    assert "header `Authorization: Bearer TOKEN`" in told
    assert "Settings, Bearer token" in told
    assert failure_of(Unauthenticated("another", reason="BAD_TOKEN")).body["error"]["message"] == "another"
