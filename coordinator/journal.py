"""What is told of each request when it has ended: a line in the log, whether it failed, its span where it is traced.
Counts, times and ids; never a prompt, a text, or an error's words, which may quote them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from coordinator.draining import HandedOver
from coordinator.request import ResolvedRequest
from coordinator.stream import Stream
from coordinator.stream_trace import DELIVER
from outrider.errors import OutriderError
from outrider.results import Complete
from outrider.serving.json_logs import FIELDS
from outrider.serving.request_context import CURRENT, RequestContext
from outrider.serving.tracing import UNTRACED, Part, Tracing

log = logging.getLogger(__name__)

GENERATE = "outrider.v1.GenerationService/Generate"
OK = "OK"
HANDED_OVER = "HANDED_OVER"
"""In the place of a gRPC status: the client was told to go on elsewhere, which is no failure."""
_LEVELS = {"INTERNAL": logging.WARNING, "RESOURCE_EXHAUSTED": logging.DEBUG}
"""By status; of others INFO. A flood of requests that are refused shall not be one of lines too."""


class Entry:
    """One request, as far as it is known."""

    def __init__(self) -> None:
        self.model = ""
        """As served, never as asked for; empty until it is found."""
        self.fields: dict[str, Any] = {}
        self._finish_reasons: list[str] = []
        self._streams: Sequence[Stream] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every text has its end."""
        return len(self._finish_reasons) == self.fields.get("num_choices", -1)

    def begins(self, request: ResolvedRequest) -> None:
        """It is valid."""
        self.fields |= {
            "model": request.model,
            "tenant": request.tenant,
            "num_choices": request.num_choices,
            "num_prompt_tokens": len(request.prompt_ids),
        }

    def runs(self, streams: Sequence[Stream]) -> None:
        """As these, whose tokens are counted whether or not their texts end."""
        self._streams = streams

    def told(self, event: Any) -> None:
        """What its client gets."""
        if isinstance(event, Complete):
            self._finish_reasons.append(event.finish_reason)
            if event.index == 0:
                speculation = event.speculation
                self.fields |= {
                    "time_to_first_token_ms": round(event.timings.time_to_first_token_ms, 3),
                    "draft_acceptance_rate": round(speculation.draft_acceptance_rate, 4),
                    "mean_acceptance_length": round(speculation.mean_acceptance_length, 4),
                }

    def ended(self, status: str, total_ms: float) -> dict[str, Any]:
        """All that is told of it."""
        num_tokens = sum(stream.num_committed_tokens for stream in self._streams)
        ends = {"num_completion_tokens": num_tokens, "finish_reasons": ",".join(self._finish_reasons)}
        return {"status": status, "total_ms": round(total_ms, 3), **self.fields, **ends}


class Journal:
    """Of one coordinator."""

    def __init__(self, on_failure: Callable[[str, str], object], tracing: Tracing = UNTRACED) -> None:
        """on_failure: told the model and the status of each request that does not end well."""
        self._on_failure = on_failure
        self._tracing = tracing

    @contextlib.contextmanager
    def request(self, request_id: str, arrived: float) -> Iterator[Entry]:
        """The block is one request, in the task of its call. arrived: in `time.perf_counter`."""
        received = CURRENT.get().trace
        recording = self._tracing.begin(GENERATE, received, start_ns=_epoch_ns(arrived))
        trace = received if recording is None else recording.context
        CURRENT.set(RequestContext(request_id, trace, recording))
        entry, status = Entry(), OK
        try:
            yield entry
        except BaseException as error:
            # a client may hang up as soon as it has the end of every text
            status = OK if entry.is_complete else _status_of(error)
            raise
        finally:
            if status != OK:
                self._on_failure(entry.model, status)
            fields = entry.ended(status, 1000 * (time.perf_counter() - arrived))
            log.log(
                _LEVELS.get(status, logging.INFO),
                "request %s: %s after %.0f ms, %d tokens",
                request_id,
                status,
                fields["total_ms"],
                fields["num_completion_tokens"],
                extra={FIELDS: fields},
            )
            if recording is not None:
                if recording.children_ended_ns:
                    recording.add(Part(DELIVER, recording.children_ended_ns, time.time_ns()))
                attributes = {f"outrider.{name}": value for name, value in fields.items()}
                recording.end({"outrider.request_id": request_id, **attributes}, "" if status == OK else status)


def _status_of(error: BaseException) -> str:
    """Of a request that ended with it."""
    if isinstance(error, HandedOver):
        return HANDED_OVER
    if isinstance(error, OutriderError):
        return error.status
    return "CANCELLED" if isinstance(error, asyncio.CancelledError | GeneratorExit) else "INTERNAL"


def _epoch_ns(moment: float) -> int:
    """Of a moment in `time.perf_counter`."""
    return time.time_ns() - round(1e9 * (time.perf_counter() - moment))
