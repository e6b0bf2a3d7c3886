"""Records of streams on the wire and in files. A file holds `StreamRecord`s as protobuf's JSON, one a line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from outrider.audit.record import RoundRecord, StreamRecord, TextOptions
from outrider.drafting.proposal import EMPTY, ProposalFault
from outrider.errors import InvalidArgument
from outrider.sampling.params import Finish, Origin
from outrider.serving.convert import (
    proposal_from_pb,
    sampling_from_pb,
    sampling_to_pb,
    stopping_from_pb,
    stopping_to_pb,
)
from outrider.serving.same_names import read, write
from outrider.v1 import record_pb2

VERSION = 1


def kept_to_pb(kept: Any) -> record_pb2.StreamRecord:
    """As it stands, from what a coordinator keeps: `coordinator.records.KeptStream`. Its rounds are `add_rounds`'s."""
    request, output_ids = kept.request, tuple(kept.log.output_ids)
    num_resumed = len(request.resume_token_ids)
    return record_pb2.StreamRecord(
        version=VERSION,
        request_id=request.request_id,
        model=request.model,
        model_fingerprint=request.model_fingerprint,
        numerics_fingerprints=kept.numerics_fingerprints,
        index=kept.index,
        prompt_ids=request.prompt_ids,
        resumed_ids=output_ids[:num_resumed],
        output_ids=output_ids[num_resumed:],
        sampling=sampling_to_pb(kept.sampling),
        stopping=stopping_to_pb(request.stopping),
        finish_reason=int(kept.finish),  # type: ignore[arg-type]
        matched_stop_string=kept.matched_stop_string,
        num_rounds_left_out=kept.num_rounds_left_out,
        max_draft_tokens=request.max_draft_tokens,
        text=record_pb2.TextOptions(stop_strings=request.stop_strings, skip_special_tokens=request.skip_special_tokens),
    )


def add_rounds(message: record_pb2.StreamRecord, rounds: Iterable[Any]) -> None:
    """rounds: `coordinator.records.KeptRound`s. Megabytes of drafts may be copied: not for an event loop."""
    for one in rounds:
        proposal = one.proposal.message if one.proposal is not None else None
        message.rounds.append(write(record_pb2.RoundRecord, one, proposal=proposal))


def record_from_pb(message: record_pb2.StreamRecord) -> StreamRecord:
    """Raises InvalidArgument on a record of another version, or with values that this one does not know."""
    if message.version != VERSION:
        raise InvalidArgument(
            f"the record has version {message.version}, this command reads version {VERSION}", field="record"
        )
    try:
        return read(
            StreamRecord,
            message,
            sampling=sampling_from_pb(message.sampling, "record.sampling"),
            stopping=stopping_from_pb(message.stopping),
            finish=Finish(message.finish_reason),
            rounds=tuple(map(_round_from_pb, message.rounds)),
            text=read(TextOptions, message.text) if message.HasField("text") else None,
            wire=message.SerializeToString(deterministic=True),
        )
    except ValueError as error:
        raise InvalidArgument(f"the record cannot be read: {error}", field="record") from error


def _round_from_pb(message: record_pb2.RoundRecord) -> RoundRecord:
    unreadable, proposal = "", EMPTY
    try:
        proposal = proposal_from_pb(message.proposal)
    except ProposalFault as fault:
        unreadable = str(fault)
    origins = tuple(map(Origin, message.origins))
    return read(RoundRecord, message, origins=origins, proposal=proposal, unreadable=unreadable)


def write_records(path: Path, records: Iterable[StreamRecord]) -> None:
    """One a line."""
    messages = (record_pb2.StreamRecord.FromString(record.wire) for record in records)
    lines = [json_format.MessageToJson(message, preserving_proto_field_name=True, indent=None) for message in messages]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def read_records(path: Path) -> tuple[StreamRecord, ...]:
    """Raises InvalidArgument where the file holds something else; OSError where it cannot be read."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        messages = [json_format.Parse(line, record_pb2.StreamRecord()) for line in lines]
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} holds no records: {str(error)[:200]}", field="record") from None
    if not messages:
        raise InvalidArgument(f"{path} is empty: it holds no records", field="record")
    return tuple(map(record_from_pb, messages))
