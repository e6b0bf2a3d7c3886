"""Records of the last streams, for whoever wants every decision made again: prompts and texts as ids, drafts as they
were sent. Nothing is kept unless the operator wants it (`record_streams`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from coordinator.log import Log
from coordinator.request import ResolvedRequest
from coordinator.stream import Stream
from outrider.errors import FailedPrecondition, NotFound
from outrider.sampling.params import Finish, Origin, SamplingParams
from outrider.serving.messages import Verdict
from outrider.serving.session_calls import SealedProposal

MAX_STREAM_BYTES = 8 << 20
"""Of one stream's rounds; later rounds of it are only counted."""
ROUND_BYTES, ID_BYTES = 400, 16
"""About what a round and an id take here."""

Key = tuple[str, str]
"""Tenant and request id."""


@dataclass(frozen=True, slots=True)
class KeptRound:
    """proposal: None where there was none, or where it decides nothing."""

    base_length: int
    committed_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    proposal: SealedProposal | None
    num_draft_tokens: int
    proposal_fault: str
    epoch: int
    numerics_index: int
    drafts_untold: bool


@dataclass(slots=True)
class KeptStream:
    """What a record is made of. `log` grows while the stream runs."""

    request: ResolvedRequest
    sampling: SamplingParams
    index: int
    log: Log
    rounds: list[KeptRound] = field(default_factory=list)
    numerics_fingerprints: list[str] = field(default_factory=list)
    num_rounds_left_out: int = 0
    finish: Finish = Finish.NONE
    matched_stop_string: str = ""
    num_bytes: int = 0

    def add(self, verdict: Verdict, proposal: SealedProposal, numerics_fingerprint: str) -> int:
        """One more round; the bytes that it takes. numerics_fingerprint: of the target that decided it."""
        if self.num_bytes >= MAX_STREAM_BYTES:
            self.num_rounds_left_out += 1
            return 0
        if numerics_fingerprint not in self.numerics_fingerprints:
            self.numerics_fingerprints.append(numerics_fingerprint)
        # a greedy or COUPLED choice owes nothing to drafts
        keeps = proposal.message is not None and not self.sampling.decides_by_match
        self.rounds.append(
            KeptRound(
                verdict.header.base_length,
                verdict.committed_ids,
                verdict.origins,
                proposal if keeps else None,
                verdict.num_draft_tokens,
                verdict.proposal_fault,
                verdict.header.epoch,
                self.numerics_fingerprints.index(numerics_fingerprint),
                drafts_untold=keeps and bool(verdict.drafted_ids) and verdict.drafted_q is None,
            )
        )
        drafts_bytes = proposal.message.ByteSize() if keeps else 0
        num_bytes = ROUND_BYTES + drafts_bytes + ID_BYTES * len(verdict.committed_ids)
        self.num_bytes += num_bytes
        return num_bytes

    def ended(self, finish: Finish, matched_stop: int | str | None) -> None:
        """How the stream did; NONE where it was given up."""
        self.finish = finish
        self.matched_stop_string = matched_stop if isinstance(matched_stop, str) else ""


class Records:
    """Of one coordinator. The oldest requests go first, once there are more streams or bytes than it may keep."""

    def __init__(self, max_streams: int, max_bytes: int) -> None:
        self._max_streams = max_streams
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._num_streams = 0
        self._requests: OrderedDict[Key, list[KeptStream]] = OrderedDict()

    def begin(self, request: ResolvedRequest, streams: list[Stream]) -> None:
        """Of a request that begins: from now on its streams have a `recorder`, if it is to be recorded. What there is
        of the tenant's last one of the same name is kept where the text goes on, and forgotten where it begins anew.

        Raises FailedPrecondition where a record is wanted and none can be kept.
        """
        if request.record and len(streams) > self._max_streams:
            raise FailedPrecondition(
                f"output.record: this coordinator keeps records of {self._max_streams} streams (--record-streams), and "
                f"the request has {len(streams)}; leave the field unset, or ask its operator for more",
                field="output.record",
                reason="NO_RECORDS",
            )
        key = (request.tenant, request.request_id)
        if not request.resume_token_ids:
            self._forget(key)
        if not self._max_streams or request.record is False:
            return
        held = self._requests.setdefault(key, [])
        self._requests.move_to_end(key)
        for stream in streams:
            one = KeptStream(request, stream.sampling, stream.choice, stream.log)
            one.num_bytes = ID_BYTES * (len(request.prompt_ids) + len(request.resume_token_ids))
            held.append(one)
            self._num_bytes += one.num_bytes
            self._num_streams += 1
            stream.recorder = Recorder(self, key, one)
        self._make_room()

    def of(self, tenant: str, request_id: str) -> tuple[KeptStream, ...]:
        """At least one, in the order in which they began. Raises NotFound, for another tenant's as well."""
        streams = self._requests.get((tenant, request_id))
        if not streams:
            kept = f"the last {self._max_streams} streams are" if self._max_streams else "none is (record_streams is 0)"
            fix = "start the coordinator with --record-streams N" + (", N above that" if self._max_streams else "")
            raise NotFound(
                f"request_id {request_id[:128]!r}: no such request is recorded here; {kept}: {fix}",
                field="request_id",
            )
        return tuple(streams)

    def holds(self, key: Key, stream: KeptStream) -> bool:
        """Whether it has not been forgotten meanwhile."""
        return any(one is stream for one in self._requests.get(key, ()))

    def grown(self, num_bytes: int) -> None:
        """A stream that is held has."""
        self._num_bytes += num_bytes
        self._make_room()

    def _make_room(self) -> None:
        while self._requests and (self._num_bytes > self._max_bytes or self._num_streams > self._max_streams):
            self._forget(next(iter(self._requests)))

    def _forget(self, key: Key) -> None:
        streams = self._requests.pop(key, [])
        self._num_streams -= len(streams)
        self._num_bytes -= sum(stream.num_bytes for stream in streams)


class Recorder:
    """What a stream tells of itself."""

    def __init__(self, records: Records, key: Key, kept: KeptStream) -> None:
        self._records = records
        self._key = key
        self._kept = kept

    def add(self, verdict: Verdict, proposal: SealedProposal, numerics_fingerprint: str) -> None:
        """See `KeptStream.add`."""
        if self._records.holds(self._key, self._kept):
            self._records.grown(self._kept.add(verdict, proposal, numerics_fingerprint))

    def ended(self, finish: Finish, matched_stop: int | str | None) -> None:
        """See `KeptStream.ended`."""
        self._kept.ended(finish, matched_stop)
