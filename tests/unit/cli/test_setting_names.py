"""A setting has one name in errors of the command line, `--flag (OUTRIDER_NAME)`, wherever the error comes from; and a
file that is no good is named with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.tenants import Tenants
from outrider.cli.connect import connect
from outrider.cli.console import describe_failure
from outrider.cli.flags import refuse_unknown_variables
from outrider.errors import InvalidArgument, OutriderError, ResourceExhausted
from outrider.serving.access import refuse_to_be_open
from outrider.serving.tls import fleet_dialer, server_credentials
from outrider.serving.tokens import FleetTokens, TenantTokens
from outrider.settings import ClientSettings, CoordinatorSettings


def told(action: Callable[[], object]) -> str:
    """What a command with the settings of a coordinator prints of the failure."""
    with pytest.raises(OutriderError) as caught:
        action()
    message, code = describe_failure(caught.value, CoordinatorSettings)
    assert code == 2
    return message


def credentials(**settings: str) -> Callable[[], object]:
    return lambda: server_credentials(CoordinatorSettings(**settings), lambda: None)  # type: ignore[arg-type]


def test_errors_of_settings_begin_with_flag_and_variable() -> None:
    assert told(credentials(tls_cert="x")).startswith("--tls-key (OUTRIDER_TLS_KEY) is empty: ")
    needs = told(credentials(tls_client_ca="x"))
    assert needs == "--tls-client-ca (OUTRIDER_TLS_CLIENT_CA) needs --tls-cert and --tls-key: give them too"
    settings = CoordinatorSettings(host="0.0.0.0")
    is_open = told(lambda: refuse_to_be_open(settings, is_guarded=False, remedy="Set tls_cert"))
    assert is_open.startswith("--host (OUTRIDER_HOST) is '0.0.0.0': ")
    assert "Set --tls-cert;" in is_open
    assert describe_failure(InvalidArgument("top_k is 2", field="top_k"), CoordinatorSettings)[0] == "top_k is 2"


def test_files_are_named_with_their_settings(tmp_path: Path) -> None:
    none, bad = str(tmp_path / "none"), tmp_path / "bad"
    bad.write_text("rubbish")
    cannot = f"{none} cannot be read: No such file or directory"
    ca = CoordinatorSettings(tls_ca=none)
    assert told(credentials(tls_cert=none, tls_key=none)) == f"--tls-cert (OUTRIDER_TLS_CERT): {cannot}"
    assert told(lambda: fleet_dialer(ca)) == f"--tls-ca (OUTRIDER_TLS_CA): {cannot}"
    assert told(lambda: TenantTokens(none)) == f"--tokens-file (OUTRIDER_TOKENS_FILE): {cannot}"
    for action, name in (
        (lambda: TenantTokens(str(bad)), "--tokens-file (OUTRIDER_TOKENS_FILE): line 1 of"),
        (lambda: FleetTokens(str(bad)), "--fleet-token-file (OUTRIDER_FLEET_TOKEN_FILE): secret 1"),
        (
            lambda: Tenants(CoordinatorSettings(tenant_limits_file=str(bad))),
            "--tenant-limits-file (OUTRIDER_TENANT_LIMITS_FILE): ",
        ),
        (credentials(tls_cert=str(bad), tls_key=str(bad)), "--tls-cert (OUTRIDER_TLS_CERT): "),
    ):
        message = told(action)
        assert message.startswith(name)
        assert str(bad) in message
        assert "rubbish" not in message


async def test_settings_of_clients_are_called_by_their_variables(tmp_path: Path) -> None:
    none = str(tmp_path / "none")
    for values, message in (
        ({"tls_ca": none}, f"OUTRIDER_TLS_CA: {none} cannot be read"),
        ({"token_file": none}, f"OUTRIDER_TOKEN_FILE: {none} cannot be read"),
        ({"token": "a", "token_file": "b"}, "OUTRIDER_TOKEN and OUTRIDER_TOKEN_FILE are both set"),
        ({"tls_cert": "x"}, "OUTRIDER_TLS_KEY is empty"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            connect("here:1", ClientSettings(**values))  # type: ignore[arg-type]
        assert describe_failure(caught.value)[0].startswith(message)


def test_a_variable_that_nothing_reads_is_told_with_the_likely_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OUTRIDER_TOKENFILE", "OUTRIDER_XYZZY"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(InvalidArgument) as caught:
        refuse_unknown_variables()
    assert "OUTRIDER_TOKENFILE (did you mean OUTRIDER_TOKEN_FILE?), OUTRIDER_XYZZY: unset" in caught.value.message


def test_a_wait_is_told_once() -> None:
    error = ResourceExhausted("a call a minute; try again in 3.52 s", retry_delay_s=3.51621)
    assert describe_failure(error)[0] == "a call a minute; try again in 3.52 s"
    assert describe_failure(ResourceExhausted("full", retry_delay_s=3.51621))[0] == "full (try again in 3.52 s)"
