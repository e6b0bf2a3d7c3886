"""One stream, sans-IO: log, text, usage, logprobs and statistics end at the same token; resuming at every cut."""

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest
from accounting import num_accounted

from coordinator.admission import Admission
from coordinator.log import Log
from coordinator.outbox import Outbox
from coordinator.request import ResolvedRequest
from coordinator.stream import Stream
from coordinator.text.tokenizer import ToyCodec
from outrider.errors import InvalidArgument, ResourceExhausted
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import Finish, Origin, SamplingParams, StoppingParams
from outrider.serving.events import SealedChunk
from outrider.serving.messages import Header, Verdict
from outrider.serving.token_logprobs import TokenLogprobs
from outrider.toy_text import toy_id

A, C, B, P = Origin.ACCEPTED, Origin.CORRECTION, Origin.BONUS, Origin.PLAIN
REQUEST = ResolvedRequest(
    request_id="r",
    model="toy",
    prompt_ids=(1, 2),
    prompt_hash=hash_ids((1, 2)),
    sampling=SamplingParams(),
    stopping=StoppingParams(20),
)
CODEC = ToyCodec(94)


def make(**changes: object) -> Stream:
    return Stream(dataclasses.replace(REQUEST, **changes), 0, CODEC)


def verdict(stream: Stream, text: str, origins: Sequence[Origin], **fields: object) -> Verdict:
    ids = tuple(map(toy_id, text))
    alternatives = [i for token_id in ids for i in (token_id, 0)]
    logprobs = TokenLogprobs.pack([-float(i) for i in range(len(ids))], 2, alternatives, [-1.0, -2.0] * len(ids))
    num_accepted = list(origins).count(A)
    return Verdict(
        header=stream.log.header(1),
        committed_ids=ids,
        origins=tuple(origins),
        num_accepted=num_accepted,
        logprobs=logprobs,
        **fields,  # type: ignore[arg-type]
    )


def test_the_log_knows_its_prefixes() -> None:
    log = Log((5, 6))
    log.append((7, 8, 9))
    assert log.header(3) == Header(3, 5, hash_ids((5, 6, 7, 8, 9)))
    assert log.header(0, 3) == Header(0, 3, hash_ids((5, 6, 7)))
    assert log.since(3) == (8, 9)
    assert log.holds(Header(9, 4, hash_ids((5, 6, 7, 8))))
    assert not log.holds(Header(9, 4, hash_ids((5, 6, 7, 9))))
    assert not log.holds(Header(9, 1, hash_ids((5,))))
    assert not log.holds(Header(9, 6, 0))


def test_everything_ends_with_the_token_that_completes_a_stop_string() -> None:
    stream = make(stop_strings=("YZ",), logprobs=True, top_logprobs=2)
    first = stream.commit(verdict(stream, "A", [P]))
    second = stream.commit(verdict(stream, "BCY", [A, A, C], num_draft_tokens=4))
    assert (first.text, second.text) == ("A", "BC"), "Y may still become the stop string"
    last = stream.commit(verdict(stream, "ZDE", [A, A, B], num_draft_tokens=2))
    assert (last.text, last.token_ids, last.origins) == ("", (toy_id("Z"),), (A,))
    assert last.logprobs is not None
    told = last.logprobs.unpacked()
    assert len(told.token_logprobs) == len(told.top_ids) / 2 == len(told.top_logprobs) / 2 == 1
    complete = stream.complete(1.0)
    assert (complete.finish_reason, complete.matched_stop) == ("stop", "YZ")
    assert complete.usage.completion_tokens == 5 == len(stream.log.output_ids)
    spec = complete.speculation
    assert (spec.num_spec_steps, spec.num_draft_tokens, spec.num_accepted_draft_tokens) == (2, 6, 3)
    assert (spec.num_tokens, spec.num_steps) == (5, 3)
    assert spec.tokens_per_step == 5 / 3
    assert spec.acceptance_histogram == (0, 1, 1)
    assert spec.gamma_histogram == (1, 0, 1, 0, 1)
    assert spec.num_draft_tokens_per_pos == (2, 2, 1, 1)
    assert spec.num_accepted_tokens_per_pos == (2, 1, 0, 0)
    assert spec.mean_acceptance_length == 1 + 3 / 2
    assert spec.draft_acceptance_rate == 3 / 6
    assert num_accounted(spec) == complete.usage.completion_tokens


@pytest.mark.parametrize("include", [False, True])
def test_included_stop_strings_stay_in_the_text(include: bool) -> None:
    stream = make(stop_strings=("BC",), include_stop=include)
    text = stream.commit(verdict(stream, "ABCD", [A, A, A, B])).text
    assert text == ("ABC" if include else "A")


def test_the_end_by_length_releases_what_was_held_back() -> None:
    stream = make(stop_strings=("YZ",))
    chunk = stream.commit(verdict(stream, "AY", [A, C], finish=Finish.LENGTH))
    assert chunk.text == "AY"
    assert stream.complete(1.0).finish_reason == "length"


def test_a_stop_token_is_reported_and_counted() -> None:
    stream = make()
    stream.commit(verdict(stream, "AB", [A, C], finish=Finish.STOP, matched_stop_token_id=toy_id("B")))
    complete = stream.complete(1.0)
    assert (complete.finish_reason, complete.matched_stop, complete.usage.completion_tokens) == ("stop", toy_id("B"), 2)


def test_a_stream_resumed_at_any_cut_gives_the_rest_of_the_text() -> None:
    rounds = ["A", "BY", "YZA", "CYZ"]  # "YYZ" spans rounds, "YZ" is not a stop string
    texts, whole = [], make(stop_strings=("CYZ",))
    for text in rounds:
        for char in text:
            texts.append((char, whole.commit(verdict(whole, char, [P])).text))
    assert whole.matched_stop == "CYZ"
    ids = tuple(toy_id(char) for char, _ in texts)
    for cut in range(len(ids)):
        stream = make(stop_strings=("CYZ",), resume_token_ids=ids[:cut])
        assert stream.log.output_ids == list(ids[:cut])
        rest = "".join(stream.commit(verdict(stream, char, [P])).text for char, _ in texts[cut:])
        assert rest == "".join(text for _, text in texts[cut:])
        complete = stream.complete(0.0)
        assert (complete.matched_stop, complete.usage.completion_tokens) == ("CYZ", len(ids))
        assert complete.speculation.num_plain_tokens == len(ids) - cut
    done = make(stop_strings=("CYZ",), resume_token_ids=ids)
    assert done.finished
    assert done.complete(0.0).usage.completion_tokens == len(ids)
    with pytest.raises(InvalidArgument, match=rf"{len(ids) + 1} ids, but the text ends with the first {len(ids)}"):
        make(stop_strings=("CYZ",), resume_token_ids=(*ids, 3))


def test_resumed_ids_that_end_the_text_complete_at_once() -> None:
    by_length = make(stopping=StoppingParams(3), resume_token_ids=(4, 5, 6))
    assert by_length.finish is Finish.LENGTH
    by_id = make(stopping=StoppingParams(9, 0, frozenset({6})), resume_token_ids=(4, 5, 6))
    assert (by_id.finish, by_id.matched_stop) == (Finish.STOP, 6)
    early = make(stopping=StoppingParams(9, 3, frozenset({6})), resume_token_ids=(4, 5, 6))
    assert not early.finished, "a stop id within min_tokens ends nothing"
    with pytest.raises(InvalidArgument, match="ends with the first 1"):
        make(stopping=StoppingParams(9, 0, frozenset({4})), resume_token_ids=(4, 5))


async def test_a_slow_client_pauses_its_own_stream_only() -> None:
    outbox = Outbox(2)
    outbox.join(0)
    outbox.join(1)
    for _ in range(2):
        outbox.put(SealedChunk(0, (1,), "x"))
    waiting = asyncio.create_task(outbox.room(0))
    assert await outbox.room(1) == 2
    await asyncio.sleep(0)
    assert not waiting.done()
    events = outbox.events()
    await anext(events)
    await asyncio.sleep(0)
    assert not waiting.done(), "the client still has the first chunk in its hands"
    await anext(events)
    assert await waiting == 1
    outbox.leave()
    outbox.leave()
    assert [event async for event in events] == []


async def test_admission_is_bounded_ordered_and_leaves_no_trace() -> None:
    admission = Admission(max_running=3, max_waiting=3)
    first = admission.enter(3, 0)
    assert first.admitted.done()
    late, urgent = admission.enter(2, 5), admission.enter(1, 1)
    assert not late.admitted.done()
    assert (admission.num_running, admission.num_waiting) == (3, 3)
    with pytest.raises(ResourceExhausted, match="3 streams run and 3 wait, at most 3 and 3") as full:
        admission.enter(1, 0)
    assert full.value.retry_delay_s
    with pytest.raises(InvalidArgument, match="at most 3"):
        admission.enter(4, 0)
    admission.leave(first)
    assert urgent.admitted.done(), "lower priority runs first"
    assert late.admitted.done()
    gone = admission.enter(1, 0)
    admission.leave(gone)
    admission.leave(gone)
    for ticket in (late, urgent):
        admission.leave(ticket)
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_a_cancelled_waiter_leaves_the_queue() -> None:
    admission = Admission(max_running=1, max_waiting=2)
    running, waiting = admission.enter(1, 0), admission.enter(1, 0)
    waiter = asyncio.ensure_future(waiting.admitted)
    waiter.cancel()
    admission.leave(waiting)
    assert admission.num_waiting == 0
    admission.leave(running)
    assert admission.num_running == 0
    assert admission.enter(1, 0).admitted.done()
