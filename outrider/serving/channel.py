"""Channel options of everyone who calls our services: coordinator, workers, CLI and client."""

from __future__ import annotations

import ipaddress
import re

import grpc

from outrider.errors import InvalidArgument

MAX_MESSAGE_BYTES = 16 * 1024 * 1024


def ping_options(interval_ms: int, timeout_ms: int) -> dict[str, int]:
    """Of either end: a connection whose other end answers no ping for `timeout_ms` is dead.

    That goes for every ping. gRPC sends some of its own making, measures of the way, gives those a minute, and sends no
    other one while such a ping is under way.
    """
    return {
        "grpc.keepalive_time_ms": interval_ms,
        "grpc.keepalive_timeout_ms": timeout_ms,
        "grpc.http2.ping_timeout_ms": timeout_ms,
    }


CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *ping_options(20_000, 10_000).items(),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Workers are reached directly, whatever proxy the environment names for the web.
    ("grpc.enable_http_proxy", 0),
    # Else all channels of a process to one address share its connection, and with it the wait after a failed one: a
    # worker that has just come back would be refused for what another channel had met.
    ("grpc.use_local_subchannel_pool", 1),
    # A restarted worker is found again in well under a second, not after a backoff of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Not a wait but the least time that one try to connect has: a far or busy worker takes more than a moment.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]{2,64}\]|[A-Za-z0-9._-]{1,253}):(\d{1,5})", re.ASCII)
_OTHER_TARGETS = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "xds:")


def is_host_and_port(address: str) -> bool:
    """Whether it is host:port and no other kind of channel target (`unix:`, `xds:`, ...)."""
    match = _ADDRESS.fullmatch(address)
    return match is not None and 1 <= int(match[2]) <= 65535


def check_target(address: str, field: str) -> None:
    """Raises InvalidArgument for what is neither host:port nor another kind of channel target."""
    if not is_host_and_port(address) and not address.startswith(_OTHER_TARGETS):
        raise InvalidArgument(f"{field} is {address[:80]!r}, must be host:port", field=field)


def open_channel(address: str) -> grpc.aio.Channel:
    """A plaintext channel to `host:port`. Must be called on a running event loop; the caller closes it."""
    return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
