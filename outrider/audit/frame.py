"""What can be said of a record without the model: that it is whole, and that what was delivered is what was decided."""

from __future__ import annotations

from outrider.audit.findings import Findings
from outrider.audit.record import StreamRecord
from outrider.errors import InvalidArgument


def decided_ids(record: StreamRecord) -> tuple[int, ...]:
    """What the rounds came to, the rest of a stop string included."""
    return tuple(token_id for one in record.rounds for token_id in one.committed_ids)


def text_ids(record: StreamRecord) -> tuple[int, ...]:
    """Prompt, what was resumed, and all that was decided."""
    return (*record.prompt_ids, *record.resumed_ids, *decided_ids(record))


def check_ids(record: StreamRecord, vocab_size: int) -> None:
    """Raises InvalidArgument where an id of the record is not the model's, or its prompt is empty."""
    if not record.prompt_ids:
        raise InvalidArgument("record.prompt_ids is empty: this is no record of a stream", field="record.prompt_ids")
    largest = max((*text_ids(record), *record.output_ids))
    if largest >= vocab_size:
        raise InvalidArgument(f"the record has id {largest}, ids of the model are below {vocab_size}", field="record")


def look_at_frame(record: StreamRecord, findings: Findings) -> None:
    """Adds what is found."""
    _look_at_delivery(record, findings)
    _look_behind_the_end(record, findings)


def _look_at_delivery(record: StreamRecord, findings: Findings) -> None:
    delivered, decided, num_resumed = record.output_ids, decided_ids(record), len(record.resumed_ids)
    num_last = len(record.rounds[-1].committed_ids) if record.rounds else 0
    for index, (token_id, expected) in enumerate(zip(delivered, decided, strict=False), num_resumed):
        if token_id != expected:
            findings.breach(index, token_id, expected, "another token was delivered than was decided")
    if record.num_rounds_left_out:
        findings.reasons.append(f"the record is incomplete: {record.num_rounds_left_out} rounds were not kept")
    elif len(delivered) > len(decided):
        findings.reasons.append(
            f"the record is incomplete: it has {len(decided)} decided tokens, and {len(delivered)} were delivered"
        )
    elif len(delivered) < len(decided) and not record.matched_stop_string:
        index, expected = num_resumed + len(delivered), decided[len(delivered)]
        findings.breach(index, None, expected, "it was decided and not delivered, and no stop string ended the text")
    elif len(decided) - len(delivered) >= max(1, num_last):
        index, expected = num_resumed + len(delivered), decided[len(delivered)]
        findings.breach(index, None, expected, "it was not delivered, and more rounds were decided")


def _look_behind_the_end(record: StreamRecord, findings: Findings) -> None:
    known = record.output_ids if record.num_rounds_left_out else decided_ids(record)
    output, stopping = (*record.resumed_ids, *known), record.stopping
    for index in range(len(record.resumed_ids), len(output) - 1):
        if output[index] in stopping.stop_token_ids:
            findings.breach(index + 1, output[index + 1], None, "it follows a stop token, which ends the text")
            break
    if len(output) > stopping.max_tokens:
        index = stopping.max_tokens
        findings.breach(index, output[index], None, f"max_tokens is {index}")
