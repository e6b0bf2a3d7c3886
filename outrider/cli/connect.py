"""The client of every command that calls a coordinator: token and TLS come from `OUTRIDER_` variables.

OUTRIDER_TOKEN_FILE=token OUTRIDER_TLS_CA=ca.crt outrider chat --address coordinator.example:50050
"""

from __future__ import annotations

from typing import Any

from outrider.cli.setting_names import naming_variables
from outrider.client import Client
from outrider.errors import InvalidArgument
from outrider.serving.tls import TLS
from outrider.serving.tokens import TokenSource, token_from_file
from outrider.settings import ClientSettings


def connect(address: str, settings: ClientSettings | None = None, **options: Any) -> Client:
    """options: of `Client`. Raises InvalidArgument for settings or files that are no good."""
    settings = settings or ClientSettings()
    try:
        return Client(address, tls=tls_of(settings), token=token_of(settings), **options)
    except InvalidArgument as error:
        if (told := naming_variables(error)) is None:
            raise
        raise InvalidArgument(told, reason=error.reason) from None


def tls_of(settings: ClientSettings) -> TLS | None:
    """None: plaintext, where nothing is said of TLS."""
    tls = TLS(settings.tls_ca, settings.tls_cert, settings.tls_key, settings.tls_server_name)
    return tls if settings.tls or tls != TLS() else None


def token_of(settings: ClientSettings) -> str | TokenSource | None:
    """None: no token. Raises InvalidArgument where two are given."""
    if settings.token and settings.token_file:
        raise InvalidArgument("token and token_file are both set: give one", field="token")
    return token_from_file(settings.token_file) if settings.token_file else settings.token or None
