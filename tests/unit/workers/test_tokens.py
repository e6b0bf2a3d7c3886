"""Tokens files, fleets' secrets, and what is read again."""

from __future__ import annotations

import hmac
import os
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidArgument, Unauthenticated
from outrider.serving.tokens import (
    FleetTokens,
    TenantTokens,
    bearer_metadata,
    bearer_token,
    line_for,
    new_token,
    parse_tokens,
    token_from_file,
)
from outrider.serving.watched import Watched

HASH = "sha256:" + "0" * 64
SOON = datetime.now(UTC) + timedelta(days=1)
PAST = datetime.now(UTC) - timedelta(days=1)


def written(path: Path, text: str) -> str:
    """From one moment to the next, as everybody should write such files."""
    fresh = path.with_suffix(".fresh")
    fresh.write_text(text)
    fresh.rename(path)
    return str(path)


def test_a_token_is_its_tenants_and_its_hash_gives_nothing_away(tmp_path: Path) -> None:
    one, other = new_token(), new_token()
    assert one != other
    assert len(one) > 40
    line = line_for(one, "team-a")
    assert one not in line
    tokens = TenantTokens(written(tmp_path / "tokens", f"# ours\n\n{line}  # of a\n{line_for(other, 'b', SOON)}\n"))
    assert (tokens.tenant(one), tokens.tenant(other)) == ("team-a", "b")
    for wrong in (one[:-1], one + "x", "", "€", line.split()[0]):
        with pytest.raises(Unauthenticated, match="not known"):
            tokens.tenant(wrong)


def test_a_check_takes_as_many_comparisons_whichever_token_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them of constant time: the first, the last and a wrong one are told apart by no clock."""
    shown = [new_token() for _ in range(4)]
    tenants = TenantTokens(written(tmp_path / "tokens", "\n".join(line_for(token, "a") for token in shown)))
    fleet = FleetTokens(written(tmp_path / "fleet", "\n".join(shown)))
    compared: list[object] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return hmac.compare_digest(one, other)

    monkeypatch.setattr("outrider.serving.tokens.hmac", SimpleNamespace(compare_digest=compare))
    for check in (tenants.tenant, fleet.check):
        for token in (shown[0], shown[-1], new_token()):
            compared.clear()
            with nullcontext() if token in shown else pytest.raises(Unauthenticated):
                check(token)
            assert len(compared) == len(shown)


def test_tokens_are_exchanged_one_after_the_other(tmp_path: Path) -> None:
    path, old, new = tmp_path / "tokens", new_token(), new_token()
    tokens = TenantTokens(written(path, line_for(old, "a")))
    written(path, f"{line_for(old, 'a')}\n{line_for(new, 'a')}\n")
    assert tokens.tenant(old) == tokens.tenant(new) == "a"
    written(path, line_for(new, "a"))
    assert tokens.tenant(new) == "a"
    with pytest.raises(Unauthenticated):
        tokens.tenant(old)


def test_a_token_ends_when_its_line_says(tmp_path: Path) -> None:
    token = new_token()
    tokens = TenantTokens(written(tmp_path / "tokens", line_for(token, "a", PAST)))
    with pytest.raises(Unauthenticated, match="valid until") as refusal:
        tokens.tenant(token)
    assert refusal.value.reason == "TOKEN_EXPIRED"


@pytest.mark.parametrize(
    "line",
    ["a", HASH, f"{HASH} a b", f"{HASH} two words here", f"{HASH} a until=soon", f"{HASH[:-1]} a", f"a {HASH}",
     f"{HASH} a until=2030-01-01 x"],
)  # fmt: skip
def test_a_bad_line_is_told_by_its_number_and_not_quoted(line: str) -> None:
    secret = new_token()
    with pytest.raises(InvalidArgument, match="line 2 of the tokens file") as refusal:
        parse_tokens(f"{line_for(new_token(), 'x')}\n{line}\n".encode())
    with pytest.raises(InvalidArgument) as also:
        parse_tokens(f"{secret} a".encode())
    assert secret not in also.value.message
    assert HASH not in refusal.value.message


def test_a_token_twice_is_refused() -> None:
    line = line_for(new_token(), "a")
    with pytest.raises(InvalidArgument, match="earlier line"):
        parse_tokens(f"{line}\n{line}\n".encode())


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(contents: bytes) -> None:
    try:
        entries = parse_tokens(contents)
    except InvalidArgument:
        return
    assert all(len(entry.digest) == 32 for entry in entries)


def test_a_file_that_goes_bad_changes_nothing(tmp_path: Path) -> None:
    path, token = tmp_path / "tokens", new_token()
    tokens = TenantTokens(written(path, line_for(token, "a")))
    written(path, "rubbish")
    assert tokens.tenant(token) == "a"
    path.unlink()
    assert tokens.tenant(token) == "a"
    for empty in ("", "\n \n"):
        written(path, empty)
        assert tokens.tenant(token) == "a", "it is about to be written"
        with pytest.raises(InvalidArgument, match="tokens file is empty"):
            TenantTokens(str(path))
    written(path, "# nobody\n")
    with pytest.raises(Unauthenticated):
        tokens.tenant(token)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        TenantTokens(str(tmp_path / "none"))


def test_the_first_secret_of_a_fleet_is_shown_and_each_is_taken(tmp_path: Path) -> None:
    one, other = new_token(), new_token()
    tokens = FleetTokens(written(tmp_path / "fleet", f"# by hand\n{one}\n{other}\n"))
    assert tokens.metadata() == (("authorization", f"Bearer {one}"),)
    tokens.check(one)
    tokens.check(other)
    for wrong in ("", one[:-1], "# by hand"):
        with pytest.raises(Unauthenticated):
            tokens.check(wrong)
    for bad, match in (("", "no secret"), ("short", "32 or more"), ("x" * 30 + " " + "y" * 30, "32 or more")):
        with pytest.raises(InvalidArgument, match=match):
            FleetTokens(written(tmp_path / "bad", bad))


def call(*metadata: tuple[str, Any]) -> Any:
    return SimpleNamespace(invocation_metadata=lambda: metadata)


def test_the_token_of_a_call() -> None:
    assert bearer_token(call(("x", "y"), ("authorization", "Bearer  abc "))) == "abc"
    assert bearer_token(call(("authorization", "bearer abc"))) == "abc"
    for metadata, reason in (
        ((), "NO_TOKEN"),
        ((("authorization", "abc"),), "BAD_TOKEN"),
        ((("authorization", "Basic abc"),), "BAD_TOKEN"),
        ((("authorization", "Bearer "),), "BAD_TOKEN"),
        ((("authorization", "Bearer a"), ("authorization", "Bearer b")), "BAD_TOKEN"),
    ):
        with pytest.raises(Unauthenticated) as refusal:
            bearer_token(call(*metadata))
        assert refusal.value.reason == reason


def test_what_no_header_can_hold_is_refused_unquoted(tmp_path: Path) -> None:
    for bad in ("", "two words", "new\nline", "smörgås"):
        with pytest.raises(InvalidArgument, match="printable ASCII") as refusal:
            bearer_metadata(bad)
        assert not bad or bad not in refusal.value.message
    source = token_from_file(written(tmp_path / "token", "abc\nnot this\n"))
    assert source() == "abc"
    written(tmp_path / "token", "def")
    assert source() == "def"


def test_watched_files_are_parsed_once_for_each_change(tmp_path: Path) -> None:
    paths = [written(tmp_path / name, name) for name in ("a", "b")]
    parsed: list[bytes] = []
    watched = Watched(paths, lambda a, b: parsed.append(a + b) or a + b)
    assert [watched.current() for _ in range(3)] == [b"ab"] * 3
    written(tmp_path / "b", "c")
    assert (watched.current(), watched.version) == (b"ac", 1)
    os.utime(paths[0], (1, 1))
    assert (watched.current(), watched.version) == (b"ac", 2)
    assert parsed == [b"ab", b"ac", b"ac"]


def test_a_file_on_which_its_parser_fails_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def parse(contents: bytes) -> bytes:
        if contents == b"secret":
            raise RecursionError(contents)
        return contents

    watched = Watched([written(tmp_path / "file", "good")], parse)
    written(tmp_path / "file", "secret")
    assert [watched.current() for _ in range(2)] == [b"good"] * 2
    assert "stays in force: RecursionError" in caplog.text
    assert "secret" not in caplog.text
    written(tmp_path / "file", "better")
    assert (watched.current(), watched.version) == (b"better", 1)
