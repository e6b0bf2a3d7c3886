"""Bearer tokens. Those of tenants are kept as hashes, those that a fleet shares as they are: its members show them.

A token has 256 random bits, so that a plain SHA-256 of it is as good as any slow hash. Comparisons take as long for a
wrong token as for a right one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from outrider.errors import InvalidArgument, Unauthenticated
from outrider.serving.watched import Watched

METADATA_KEY = "authorization"
SCHEME = "Bearer"
NO_TOKEN = "NO_TOKEN"
"""Reason of a call that shows none: how to show one is told by each surface in its own words."""
TokenSource = Callable[[], str]
"""Gives the token of a call, at once: it is asked on the event loop."""
TOKEN_PREFIX = "outrider_"
"""So that scanners for leaked secrets can tell one."""
MIN_SECRET_CHARS = 32
TENANT = re.compile(r"[A-Za-z0-9._:-]{1,128}")
TENANT_RULE = "1 to 128 characters of [A-Za-z0-9._:-]"
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_UNTIL = "until="


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the tokens file."""

    digest: bytes
    tenant: str
    until: datetime | None = None


def new_token() -> str:
    """A fresh one."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def line_for(token: str, tenant: str, until: datetime | None = None) -> str:
    """What the tokens file holds of it. Raises InvalidArgument for a tenant's name that is none."""
    if not TENANT.fullmatch(tenant):
        raise InvalidArgument(f"tenant must be {TENANT_RULE}", field="tenant")
    line = f"sha256:{_digest(token).hex()} {tenant}"
    return line if until is None else f"{line} {_UNTIL}{until.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def parse_tokens(contents: bytes) -> tuple[Entry, ...]:
    """Lines `sha256:HEX TENANT [until=TIME]`; empty ones and what follows a # mean nothing. Raises InvalidArgument
    naming the line, without quoting it: it may be a token that was put there by mistake."""
    entries: dict[bytes, Entry] = {}
    for number, line in enumerate(contents.decode(errors="replace").splitlines(), 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        found = _HASH.fullmatch(fields[0])
        if found is None or len(fields) not in (2, 3) or not TENANT.fullmatch(fields[1]):
            raise _bad_line(number, "must be sha256:HEX TENANT [until=TIME], as `outrider token new` prints it")
        until = _read_until(fields[2], number) if len(fields) == 3 else None
        entry = Entry(bytes.fromhex(found[1]), fields[1], until)
        if entry.digest in entries:
            raise _bad_line(number, "has the token of an earlier line")
        entries[entry.digest] = entry
    return tuple(entries.values())


class TenantTokens:
    """The tokens file: several tokens of a tenant may be valid at once, so that they can be exchanged. Raises
    InvalidArgument for a file that is no good, or empty: somebody is about to write it. One with a comment alone says
    that nobody has a token."""

    def __init__(self, path: str) -> None:
        self._entries = Watched([path], _parse_written, ["tokens_file"])

    def tenant(self, token: str) -> str:
        """Whose token it is. Raises Unauthenticated."""
        digest, found = _digest(token), None
        for entry in self._entries.current():
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        if found is None:
            raise Unauthenticated("this token is not known here", reason="BAD_TOKEN")
        if found.until is not None and datetime.now(UTC) >= found.until:
            raise Unauthenticated(
                f"this token was valid until {found.until:%Y-%m-%dT%H:%M:%SZ}: ask for another", reason="TOKEN_EXPIRED"
            )
        return found.tenant


class FleetTokens:
    """The secrets that coordinators and workers share: the first is shown, each is taken. Raises InvalidArgument for a
    file that is no good."""

    def __init__(self, path: str) -> None:
        self._secrets = Watched([path], _parse_secrets, ["fleet_token_file"])

    def check(self, token: str) -> None:
        """Raises Unauthenticated."""
        given, is_known = token.encode(), False
        for secret in self._secrets.current():
            is_known |= hmac.compare_digest(secret, given)
        if not is_known:
            raise Unauthenticated("this fleet token is not known here", reason="BAD_TOKEN")

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For a call to another member."""
        return bearer_metadata(self._secrets.current()[0].decode())


def token_from_file(path: str) -> TokenSource:
    """The first line of a file, read again when it changes. Raises InvalidArgument."""

    def parse(contents: bytes) -> str:
        token = contents.decode(errors="replace").partition("\n")[0].strip()
        try:
            bearer_metadata(token)
        except InvalidArgument:
            raise InvalidArgument(
                f"the first line of {path} must be a token and nothing else, printable ASCII without spaces, as "
                "`outrider token new --out` writes it",
                field="token_file",
            ) from None
        return token

    return Watched([path], parse, ["token_file"]).current


def bearer_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """For a call. Raises InvalidArgument for what no header can hold, without quoting it."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidArgument("token must be printable ASCII without spaces", field="token")
    return ((METADATA_KEY, f"{SCHEME} {token}"),)


def bearer_token(context: Any) -> str:
    """That came with a call. Raises Unauthenticated."""
    values = [value for key, value in context.invocation_metadata() or () if key == METADATA_KEY]
    if not values:
        raise Unauthenticated(f"no token: send metadata `{METADATA_KEY}: {SCHEME} TOKEN`", reason=NO_TOKEN)
    if len(values) > 1:
        raise Unauthenticated(f"metadata {METADATA_KEY} is there {len(values)} times: send one", reason="BAD_TOKEN")
    scheme, _, token = str(values[0]).partition(" ")
    if scheme.lower() != SCHEME.lower() or not token.strip():
        raise Unauthenticated(f"metadata {METADATA_KEY} must be `{SCHEME} TOKEN`", reason="BAD_TOKEN")
    return token.strip()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def _parse_written(contents: bytes) -> tuple[Entry, ...]:
    if not contents.strip():
        raise InvalidArgument(
            "the tokens file is empty: `outrider token new` makes its lines; to shut everybody out leave a # in it",
            field="tokens_file",
            reason="BAD_TOKENS_FILE",
        )
    return parse_tokens(contents)


def _parse_secrets(contents: bytes) -> tuple[bytes, ...]:
    found = tuple(line.strip() for line in contents.splitlines() if line.strip() and not line.startswith(b"#"))
    if not found:
        raise InvalidArgument("the fleet token file holds no secret: give one a line", field="fleet_token_file")
    for number, secret in enumerate(found, 1):
        if len(secret) < MIN_SECRET_CHARS or not secret.isascii() or b" " in secret:
            raise InvalidArgument(
                f"secret {number} of the fleet token file must be {MIN_SECRET_CHARS} or more ASCII characters without "
                "spaces, as `outrider token secret` prints one",
                field="fleet_token_file",
            )
    return found


def _read_until(text: str, number: int) -> datetime:
    try:
        if not text.startswith(_UNTIL):
            raise ValueError
        until = datetime.fromisoformat(text.removeprefix(_UNTIL))
    except ValueError:
        raise _bad_line(
            number, f"must have {_UNTIL} and a time such as 2030-12-31T00:00:00Z as its third word"
        ) from None
    return until if until.tzinfo is not None else until.replace(tzinfo=UTC)


def _bad_line(number: int, what: str) -> InvalidArgument:
    return InvalidArgument(f"line {number} of the tokens file {what}", field="tokens_file", reason="BAD_TOKENS_FILE")
