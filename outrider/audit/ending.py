"""That a text ends where it has to, and for the reason that is told. A stop string is looked for in the text as a
whole, where the service looks for it in one piece after another.

Ids at the end may write part of a code point, which stands as U+FFFD until more come: a string that hangs on such a
place is blamed on nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from outrider.audit.findings import Findings
from outrider.audit.record import StreamRecord
from outrider.sampling.params import Finish


class Decode(Protocol):
    """The tokenizer's."""

    def __call__(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids; skip_special_tokens: special ones write nothing."""


_UNFINISHED = "\ufffd"


def look_at_end(record: StreamRecord, findings: Findings, decode: Decode) -> None:
    """Adds what is found. The record's ids are the model's."""
    output = (*record.resumed_ids, *record.output_ids)
    place, last = len(output), output[-1] if output else None
    by_ids = Finish.STOP if last in record.stopping.stop_token_ids else Finish.NONE
    if not by_ids and len(output) >= record.stopping.max_tokens:
        by_ids = Finish.LENGTH
    matched = record.matched_stop_string
    if matched and record.finish is not Finish.STOP:
        findings.breach(place, None, None, f"a stop string is told, and that the text ended by {record.finish}")
    if not matched and record.finish and not by_ids:
        findings.breach(place, None, None, "the text ends though neither a stop nor max_tokens was reached")
    elif not matched and record.finish and by_ids is not record.finish:
        findings.breach(place, None, None, f"the text is told to end by {record.finish}, and ends by {by_ids}")
    _look_for_stop_strings(record, output, findings, decode)


def _look_for_stop_strings(record: StreamRecord, output: Sequence[int], findings: Findings, decode: Decode) -> None:
    told, matched, place = record.text, record.matched_stop_string, len(output)
    if told is not None and matched and matched not in told.stop_strings:
        findings.breach(place, None, None, f"it ends by the stop string {matched!r}, which was not asked for")
    elif told is not None:
        fault = _fault(record, output, told.stop_strings, partial(decode, skip_special_tokens=told.skip_special_tokens))
        if fault:
            findings.breach(place, None, None, fault)
    elif matched:
        ways = [
            _fault(record, output, (matched,), partial(decode, skip_special_tokens=skips)) for skips in (True, False)
        ]
        if all(ways):
            findings.breach(place, None, None, ways[0])
        findings.reasons.append(
            f"the record is of a version that does not tell which stop strings were asked for: {matched!r} ends it"
        )


def _fault(
    record: StreamRecord, output: Sequence[int], stops: Sequence[str], text_of: Callable[[Sequence[int]], str]
) -> str:
    """What is wrong with where the text ends, if it is read so; empty: nothing."""
    matched, num_masked = record.matched_stop_string, record.stopping.min_tokens
    masked, whole = text_of(output[:num_masked]), text_of(output)
    at_most, at_least = len(masked), len(masked.rstrip(_UNFINISHED))
    before = first_match(text_of(output[:-1]).rstrip(_UNFINISHED), stops, at_most)
    if before:
        return f"the text goes on behind the stop string {before!r}"
    possible = {found for behind in (at_least, at_most) if (found := first_match(whole, stops, behind))}
    if not matched:
        ends = record.finish and first_match(whole, stops, at_most)
        return f"the stop string {ends!r} ends the text, and that is not told" if ends else ""
    if len(output) <= num_masked or not possible:
        return f"the text does not reach the stop string {matched!r}, which is told to end it"
    if matched not in possible:
        return f"the stop string {matched!r} is told to end the text, and {min(possible)!r} does"
    return ""


def first_match(text: str, stops: Sequence[str], behind: int) -> str:
    """Of these strings the one that is complete first, of several the longest; those that are complete within the first
    `behind` code points do not count. Empty: none."""
    found = []
    for stop in stops:
        start = text.find(stop, max(0, behind - len(stop) + 1))
        if start >= 0:
            found.append((start + len(stop), -len(stop), stop))
    return min(found)[2] if found else ""
