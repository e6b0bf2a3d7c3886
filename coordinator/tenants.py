"""Whose calls these are, and what each tenant may ask for: requests a minute, streams at once, tokens of a request.

The tenant comes with the caller's token; where no tokens are asked for, a trusted proxy names it in metadata.
"""

from __future__ import annotations

import contextlib
import difflib
import time
import tomllib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.request import ResolvedRequest
from outrider.errors import InvalidArgument, PermissionDenied, ResourceExhausted
from outrider.serving.access import BY_TOKEN_ALONE, CALLER, CALLERS_UNKNOWN
from outrider.serving.tokens import TENANT, TENANT_RULE, TenantTokens, bearer_token
from outrider.serving.watched import Watched
from outrider.settings import CoordinatorSettings

DEFAULT_TENANT = "default"
GENERATES = "Generate"
"""The method that a rate is of. Small questions are not counted: clients and the gateway ask some beside a request, of
logprobs as many as they name tokens."""
BURST_SHARE = 1 / 6
"""Of a minute's requests, those that may come at one moment."""
MAX_REMEMBERED = 4096
STREAMS_RETRY_S = 1.0
M = TypeVar("M", bound=BaseModel)


class Limits(BaseModel):
    """Of one tenant; None: none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    requests_per_minute: int | None = Field(None, ge=1, description="Of Generate; a sixth of them may come at once.")
    max_streams: int | None = Field(None, ge=1, description="Running and waiting at once, each choice one.")
    max_prompt_tokens: int | None = Field(None, ge=1, description="Of one request.")
    max_output_tokens: int | None = Field(None, ge=1, description="max_tokens of one request, and its default.")


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    default: dict[str, Any] = Field(default_factory=dict)
    tenants: dict[str, dict[str, Any]] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a limits file says."""

    default: Limits
    tenants: dict[str, Limits]

    def of(self, tenant: str) -> Limits:
        return self.tenants.get(tenant, self.default)


NO_LIMITS = TenantLimits(Limits(), {})


def parse_limits(contents: bytes) -> TenantLimits:
    """TOML: a table `default` and tables `tenants.NAME`, which leave what they do not say to `default`. Raises
    InvalidArgument naming the key, and for a file that is empty: it is about to be written, and means nothing yet."""
    if not contents.strip():
        raise _bad_file("is empty: for no limits give no file, or one with [default] alone")
    try:
        file = _read(_File, tomllib.loads(contents.decode()), "")
        for name in file.tenants:
            if not TENANT.fullmatch(name):
                raise _bad_file(f"tenants.{name!r} can be no tenant's: a name is {TENANT_RULE}")
        default = _read(Limits, file.default, "default.")
        own = {
            name: _read(Limits, {**file.default, **table}, f"tenants.{name}.") for name, table in file.tenants.items()
        }
        return TenantLimits(default, own)
    except RecursionError:
        what = "tables or arrays are nested too deeply"
    except ValueError as error:  # of bytes that are no text, or no TOML, or of a number of too many digits
        what = str(error)
    raise _bad_file(what)


def _read(kind: type[M], table: dict[str, Any], where: str) -> M:
    """where: what stands before its keys."""
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] != "extra_forbidden":
        raise _bad_file(f"{where}{key}: {first['msg']}")
    known = list(kind.model_fields)
    near = difflib.get_close_matches(key, known, 1)
    fix = f"did you mean {where}{near[0]}?" if near else f"there are {', '.join(known)}"
    raise _bad_file(f"{where}{key:.80} is unknown: {fix}")


def _bad_file(what: str) -> InvalidArgument:
    return InvalidArgument(f"tenant_limits_file: {what}", field="tenant_limits_file", reason="BAD_LIMITS_FILE")


class Tenants:
    """The guard of `GenerationService`. Raises InvalidArgument for files that are no good."""

    def __init__(self, settings: CoordinatorSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._header = settings.trusted_tenant_header
        self._tokens = TenantTokens(settings.tokens_file) if settings.tokens_file else None
        path = settings.tenant_limits_file
        self._limits = Watched([path], parse_limits, ["tenant_limits_file"]) if path else None
        self._clock = clock
        self._due: OrderedDict[str, float] = OrderedDict()
        """By tenant, when its calls so far would have come if they had come evenly (generic cell rate algorithm)."""
        self._streams: Counter[str] = Counter()

    def check(self, method: str, context: Any) -> None:
        """Tells the call at hand its tenant (`CALLER`). Raises Unauthenticated without a valid token, PermissionDenied
        where the call names another tenant than its token's or nobody can tell whose it is, InvalidArgument for a name
        that is none, and ResourceExhausted for a request above the tenant's rate."""
        named = self._named(context)
        if self._tokens is None:
            _refuse_strangers(context)
            tenant = named or DEFAULT_TENANT
        else:
            tenant = self._tokens.tenant(bearer_token(context))
            if named not in (None, tenant):
                raise PermissionDenied(
                    f"metadata {self._header} names another tenant than the token's: leave it out",
                    reason="TENANT_MISMATCH",
                )
        CALLER.set(tenant)
        if method == GENERATES:
            self._charge(tenant)

    def of(self, tenant: str) -> Limits:
        """As of now."""
        return self._limits.current().of(tenant) if self._limits is not None else NO_LIMITS.default

    def settings_for(self, tenant: str, settings: CoordinatorSettings) -> CoordinatorSettings:
        """With a default of max_tokens that the tenant may have."""
        most = self.of(tenant).max_output_tokens
        if most is None or most >= settings.default_max_tokens:
            return settings
        return settings.model_copy(update={"default_max_tokens": most})

    @contextlib.contextmanager
    def streams(self, request: ResolvedRequest, prompt_field: str) -> Iterator[None]:
        """While a request runs or waits. prompt_field: what its prompt came in. Raises InvalidArgument for one that its
        tenant may never ask for, ResourceExhausted while too many of its streams are there."""
        tenant, num_streams = request.tenant, request.num_choices
        limits = self.of(tenant)
        _check(prompt_field, len(request.prompt_ids), "tokens", limits.max_prompt_tokens)
        _check("stopping.max_tokens", request.stopping.max_tokens, "", limits.max_output_tokens)
        _check("output.n", num_streams, "", limits.max_streams)
        if limits.max_streams is not None and self._streams[tenant] + num_streams > limits.max_streams:
            raise ResourceExhausted(
                f"tenant {tenant} has {self._streams[tenant]} streams, at most {limits.max_streams} may run and wait",
                reason="TENANT_STREAMS",
                retry_delay_s=STREAMS_RETRY_S,
            )
        self._streams[tenant] += num_streams
        try:
            yield
        finally:
            self._streams[tenant] -= num_streams
            if not self._streams[tenant]:
                del self._streams[tenant]

    def _named(self, context: Any) -> str | None:
        for key, value in context.invocation_metadata() or ():
            if key == self._header:
                if not isinstance(value, str) or not TENANT.fullmatch(value):
                    raise InvalidArgument(
                        f"metadata {self._header} must be {TENANT_RULE}", field=self._header, reason="BAD_TENANT"
                    )
                return value
        return None

    def _charge(self, tenant: str) -> None:
        per_minute = self.of(tenant).requests_per_minute
        if per_minute is None:
            return
        now, interval_s = self._clock(), 60 / per_minute
        due = max(now, self._due.get(tenant, now))
        wait_s = due - now - max(0.0, per_minute * BURST_SHARE - 1) * interval_s
        if wait_s > 1e-9:
            raise ResourceExhausted(
                f"tenant {tenant} may make {per_minute} requests a minute; try again in {wait_s:.2f} s",
                reason="TENANT_RATE",
                retry_delay_s=wait_s,
            )
        self._due[tenant] = due + interval_s
        self._due.move_to_end(tenant)
        if len(self._due) > MAX_REMEMBERED:
            self._due.popitem(last=False)


def _refuse_strangers(context: Any) -> None:
    """Of a gateway that anyone can reach, where there are no tokens to know them by."""
    if BY_TOKEN_ALONE in (context.invocation_metadata() or ()):
        raise PermissionDenied(
            "the gateway is open to anyone and this coordinator knows nobody by a token: set --tokens-file of the "
            "coordinator, or --insecure of the gateway where its network keeps others out",
            reason=CALLERS_UNKNOWN,
        )


def _check(field: str, value: int, unit: str, most: int | None) -> None:
    if most is not None and value > most:
        shown = f"{value} {unit}".strip()
        raise InvalidArgument(
            f"{field} is {shown}, this tenant may have at most {most}", field=field, reason="TENANT_LIMIT"
        )
