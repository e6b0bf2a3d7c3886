"""Faults to be found by an audit."""

from __future__ import annotations

import dataclasses

from outrider.audit.record import StreamRecord


def with_token(record: StreamRecord, index: int, token_id: int) -> StreamRecord:
    """Another one at this place, delivered and in the round that decided it."""
    output = list(record.output_ids)
    output[index] = token_id
    rounds, start = [], 0
    for one in record.rounds:
        end = start + len(one.committed_ids)
        rounds.append(dataclasses.replace(one, committed_ids=tuple(output[start:end])))
        start = end
    return dataclasses.replace(record, output_ids=tuple(output), rounds=tuple(rounds))
