"""TLS of every hop, from PEM files that are read again when they change.

A server shows its certificate, and with `tls_client_ca` asks callers for theirs. Within a fleet certificates name roles
(`coordinator`, `draft-worker`, `target-worker`) among their DNS names, and these are what is checked: addresses come
and go. Clients check the name that they dial.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from outrider.errors import InvalidArgument
from outrider.serving.channel import CLIENT_OPTIONS
from outrider.serving.dns_names import dns_names
from outrider.serving.naming import split_names
from outrider.serving.tokens import FleetTokens
from outrider.serving.watched import UNREADABLE_FILE, Watched
from outrider.settings import GatewaySettings, ServerSettings

COORDINATOR_NAME = "coordinator"
WORKER_NAMES = {"draft": "draft-worker", "target": "target-worker"}
"""By role, what a certificate must name."""
T = TypeVar("T")
_CERTIFICATE = "x509_pem_cert"
"""Of gRPC's authentication context."""


@dataclass(frozen=True, slots=True)
class TLS:
    """Of a caller. The defaults trust the authorities that gRPC brings along."""

    ca: str = ""
    """PEM file of the authorities that servers' certificates must come from."""
    cert: str = ""
    """PEM file of the caller's own certificate chain, where servers ask for one (mTLS)."""
    key: str = ""
    """PEM file of its key."""
    server_name: str = ""
    """What the server's certificate must name; empty: the host that is dialled."""


class Dialer:
    """Opens channels: in plaintext without `tls`. tokens: shown with calls to other members of the fleet. Raises
    InvalidArgument for files that are no good."""

    def __init__(
        self, tls: TLS | None = None, options: Any = CLIENT_OPTIONS, tokens: FleetTokens | None = None
    ) -> None:
        self._tls = tls
        self._tokens = tokens
        self._options = tuple(options)
        self._files: Watched[dict[str, bytes | None]] | None = None
        if tls is not None:
            _check_pair(tls.cert, tls.key, "tls.")
            self._files = _watched({"tls.ca": tls.ca, "tls.cert": tls.cert, "tls.key": tls.key}, self._parse)

    @property
    def version(self) -> int:
        """Another one: the files have changed, and channels opened before show what they held then."""
        if self._files is None:
            return 0
        self._files.current()
        return self._files.version

    @property
    def server_name(self) -> str:
        """That certificates must name whoever is dialled; empty: that follows from who is."""
        return self._tls.server_name if self._tls is not None else ""

    def open(self, address: str, server_name: str = "") -> grpc.aio.Channel:
        """To `host:port`. server_name: what the server's certificate must name, where `tls` says nothing. Must be
        called on a running event loop; the caller closes it."""
        if self._tls is None or self._files is None:
            return grpc.aio.insecure_channel(address, options=self._options)
        name = self._tls.server_name or server_name
        override = (("grpc.ssl_target_name_override", name),) if name else ()
        credentials = grpc.ssl_channel_credentials(**self._files.current())  # type: ignore[arg-type]
        return grpc.aio.secure_channel(address, credentials, options=(*self._options, *override))

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For a call on such a channel."""
        return self._tokens.metadata() if self._tokens is not None else ()

    def _parse(self, *contents: bytes) -> dict[str, bytes | None]:
        assert self._tls is not None
        given = iter(contents)
        ca = next(given) if self._tls.ca else None
        certificate, key = (next(given), next(given)) if self._tls.cert else (None, None)
        if ca is not None:
            _check_authorities(ca, self._tls.ca, "tls.ca")
        if certificate is not None:
            _check_chain(self._tls.cert, self._tls.key, "tls.cert")
        return {"root_certificates": ca, "private_key": key, "certificate_chain": certificate}


def open_named(dialer: Dialer, addresses: Sequence[str]) -> Callable[[str], grpc.aio.Channel]:
    """Opens channels of a client: behind a name `dns:///HOST:PORT` certificates must name HOST, not an address. Raises
    InvalidArgument where several names are given and `tls` says nothing."""
    fixed, names = split_names(addresses, "address")
    hosts = sorted({name.rpartition(":")[0] for name in names})
    if len(hosts) > 1 and not dialer.server_name:
        raise InvalidArgument(
            f"{' and '.join(hosts)}: tls.server_name must say what their certificates name", field="tls.server_name"
        )
    return lambda address: dialer.open(address, "" if address in fixed or not hosts else hosts[0])


def fleet_dialer(settings: ServerSettings) -> Dialer:
    """For the calls of coordinators and workers to one another: by TLS where `tls_ca` is set."""
    tls = TLS(settings.tls_ca, settings.tls_cert, settings.tls_key) if settings.tls_ca else None
    tokens = FleetTokens(settings.fleet_token_file) if settings.fleet_token_file else None
    return Dialer(tls, tokens=tokens)


def server_credentials(settings: ServerSettings, on_handshake: Callable[[], None]) -> grpc.ServerCredentials | None:
    """None: plaintext. on_handshake: called from threads of gRPC's whenever somebody connects. Raises InvalidArgument
    for settings or files that are no good."""
    _check_pair(settings.tls_cert, settings.tls_key, "tls_")
    if not settings.tls_cert:
        if settings.tls_client_ca:
            raise InvalidArgument("tls_client_ca needs tls_cert and tls_key: give them too", field="tls_client_ca")
        return None

    def parse(certificate: bytes, key: bytes, client_ca: bytes | None = None) -> Any:
        _check_chain(settings.tls_cert, settings.tls_key, "tls_cert")
        if client_ca is not None:
            _check_authorities(client_ca, settings.tls_client_ca, "tls_client_ca")
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=client_ca)

    files = _watched({name: getattr(settings, name) for name in ("tls_cert", "tls_key", "tls_client_ca")}, parse)
    shown = files.version

    def fetch() -> Any:
        nonlocal shown
        on_handshake()
        configuration = files.current()
        if files.version == shown:
            return None
        shown = files.version
        return configuration

    return grpc.dynamic_ssl_server_credentials(
        files.current(), fetch, require_client_authentication=bool(settings.tls_client_ca)
    )


def https_context(settings: GatewaySettings) -> ssl.SSLContext | None:
    """With which each handshake shows what the files hold by then; None: plaintext. A key may be in the certificate's
    file. Raises InvalidArgument for settings or files that are no good."""
    if not settings.tls_cert:
        if settings.tls_key:
            raise InvalidArgument("tls_key is of no use without tls_cert: give both", field="tls_cert")
        return None

    def parse(*_: bytes) -> ssl.SSLContext:
        return _check_chain(settings.tls_cert, settings.tls_key, "tls_cert")

    files = _watched({name: getattr(settings, name) for name in ("tls_cert", "tls_key")}, parse)

    def show(connection: ssl.SSLObject, name: str, context: ssl.SSLContext) -> None:
        """Called in each handshake, whether a name was asked for or not."""
        connection.context = files.current()

    first = files.current()
    first.sni_callback = show
    return first


def certificate_names(context: Any) -> frozenset[str]:
    """Of the caller of an RPC: the DNS names among its certificate's subject alternative names, and no other kind of
    name. Empty where it showed none."""
    shown = list(context.auth_context().get(_CERTIFICATE, ()))
    return dns_names(shown[0]) if len(shown) == 1 else frozenset()


def _watched(path_of: Mapping[str, str], parse: Callable[..., T]) -> Watched[T]:
    """Of the files that are given, by the setting that names each."""
    given = {field: path for field, path in path_of.items() if path}
    return Watched(list(given.values()), parse, list(given))


def _check_pair(certificate: str, key: str, prefix: str) -> None:
    if bool(certificate) != bool(key):
        missing = f"{prefix}key" if certificate else f"{prefix}cert"
        raise InvalidArgument(f"{missing} is empty: a certificate and its key go together", field=missing)


def _check_chain(certificate: str, key: str, field: str) -> ssl.SSLContext:
    """Of a server that shows it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key or None, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise InvalidArgument(
            f"{certificate} and {key or certificate} are no PEM certificate and its key: {_why(error)}",
            field=field,
            reason="BAD_CERTIFICATE",
        ) from None
    except OSError as error:
        raise InvalidArgument(f"{certificate}, {key}: {error.strerror}", field=field, reason=UNREADABLE_FILE) from None
    return context


def _check_authorities(contents: bytes, path: str, field: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=contents.decode())
    except (ssl.SSLError, ValueError) as error:
        raise InvalidArgument(
            f"{path} holds no PEM certificate: {_why(error)}", field=field, reason="BAD_CERTIFICATE"
        ) from None


def _no_password() -> str:
    raise ValueError("the key is encrypted: give one that is not")


def _why(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
