"""Logprobs pass through the coordinator unread: what the client reads is what a reading of each number would give."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.request import ResolvedRequest
from coordinator.stream import Stream
from coordinator.text.tokenizer import ToyCodec
from outrider.errors import OutriderError
from outrider.results import Chunk
from outrider.sampling.logprobs import raw_logprobs
from outrider.sampling.params import Origin, SamplingParams, StoppingParams
from outrider.serving import convert
from outrider.serving.events import event_to_pb
from outrider.serving.messages import Header, Verdict
from outrider.serving.read_results import read_event
from outrider.serving.session_calls import read_target
from outrider.serving.token_logprobs import TokenLogprobs, fault_in
from outrider.toy_text import toy_id
from outrider.v1 import common_pb2, generation_pb2, target_pb2
from target_worker.prompt_pass import logprobs

VOCAB_SIZE, STOP = 94, "Z"
FLOATS = st.floats(width=32, allow_nan=True)
TEXTS = st.text(st.sampled_from("ABCDE" + STOP), min_size=1, max_size=24)


def streamed(text: str, sent: target_pb2.Verdict) -> tuple[Chunk, generation_pb2.GenerateChunk]:
    """What the client reads of a round, and the message of it; the text ends with the first STOP."""
    request = ResolvedRequest(
        request_id="r",
        model="toy",
        prompt_ids=(1,),
        prompt_hash=0,
        sampling=SamplingParams(),
        stopping=StoppingParams(len(text) + 1),
        stop_strings=(STOP,),
        logprobs=True,
    )
    stream = Stream(request, 0, ToyCodec(VOCAB_SIZE))
    response = target_pb2.TargetServiceSessionResponse(verdict=sent)
    verdict = read_target(type(response).FromString(response.SerializeToString()))
    assert isinstance(verdict, Verdict)
    message = event_to_pb(stream.commit(verdict))
    read = read_event(type(message).FromString(message.SerializeToString()))
    assert isinstance(read, Chunk)
    return read, message.chunk


def verdict_of(text: str, told: common_pb2.TokenLogprobs) -> target_pb2.Verdict:
    ids = tuple(map(toy_id, text))
    message = convert.verdict_to_pb(
        Verdict(header=Header(1, 1, 0), committed_ids=ids, origins=(Origin.PLAIN,) * len(ids))
    )
    message.logprobs.CopyFrom(told)
    return message


def bits(values: object) -> bytes:
    return np.array(values, np.float32).tobytes()


@settings(max_examples=scaled(1000, at_least=50), deadline=None)
@given(text=TEXTS, num_top=st.integers(0, 20), data=st.data())
def test_what_the_client_reads_is_what_each_number_would_give(text: str, num_top: int, data: st.DataObject) -> None:
    num_rows, rng = len(text), np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    values = data.draw(st.lists(FLOATS, min_size=num_rows, max_size=num_rows))
    top_values = rng.choice(data.draw(st.lists(FLOATS, min_size=1, max_size=20)), (num_rows, num_top))
    top_ids = rng.integers(0, 2**32, (num_rows, num_top))
    told = common_pb2.TokenLogprobs(
        token_logprobs=values, num_top=num_top, top_ids=top_ids.ravel(), top_logprobs=top_values.ravel()
    )

    chunk, message = streamed(text, verdict_of(text, told))

    num_kept = text.index(STOP) + 1 if STOP in text else num_rows
    assert len(chunk.token_ids) == num_kept
    assert chunk.logprobs is not None
    assert bits(chunk.logprobs.token_logprobs) == bits(values[:num_kept])
    rows = chunk.logprobs.top
    assert len(rows) == (num_kept if num_top else 0)
    assert [[token_id for token_id, _ in row] for row in rows] == (top_ids[:num_kept].tolist() if num_top else [])
    assert bits([[value for _, value in row] for row in rows]) == bits(top_values[:num_kept])
    by_hand = common_pb2.TokenLogprobs(
        token_logprobs=values[:num_kept],
        num_top=num_top,
        top_ids=top_ids[:num_kept].ravel(),
        top_logprobs=top_values[:num_kept].ravel(),
    )
    assert message.logprobs.SerializeToString() == by_hand.SerializeToString()


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_what_a_target_tells_is_what_its_logits_say(num_top: int) -> None:
    rng = np.random.default_rng(num_top)
    text = "ABC" + STOP + "DE"
    logits = rng.normal(scale=9, size=(len(text), 12)).astype(np.float32)
    logits[:, 3] = -np.inf
    token_ids = rng.integers(0, 12, len(text)).tolist()

    chunk, _ = streamed(text, verdict_of(text, logprobs(logits, token_ids, num_top).unpacked()))

    expected = [raw_logprobs(logits[i], token_ids[i], num_top) for i in range(4)]
    assert chunk.logprobs is not None
    assert bits(chunk.logprobs.token_logprobs) == bits([value for value, _, _ in expected])
    pairs = [tuple(zip(ids.tolist(), np.float32(values).tolist(), strict=True)) for _, ids, values in expected]
    assert chunk.logprobs.top == (tuple(pairs) if num_top else ())


def test_what_a_later_version_tells_beside_goes_on() -> None:
    """Field 15 of a version to come; this one cuts the rest."""
    later = b"\x78\x01"
    told = TokenLogprobs.pack([-1.0, -2.0], 1, [5, 6], [-0.5, -0.25])
    newer = TokenLogprobs(told.num_tokens, told.packed + later)
    assert TokenLogprobs.seal(newer.unpacked()) == newer
    assert newer.cut(1).packed == TokenLogprobs.pack([-1.0], 1, [5], [-0.5]).packed + later
    assert newer.cut(2) is newer


@pytest.mark.parametrize(
    "told",
    [
        common_pb2.TokenLogprobs(token_logprobs=[-1.0], num_top=1, top_ids=[3]),
        common_pb2.TokenLogprobs(token_logprobs=[-1.0], num_top=1, top_logprobs=[-1.0]),
        common_pb2.TokenLogprobs(token_logprobs=[-1.0, -2.0], num_top=1, top_ids=[3], top_logprobs=[-1.0]),
        common_pb2.TokenLogprobs(token_logprobs=[-1.0], num_top=2**32 - 1, top_ids=[3], top_logprobs=[-1.0]),
        common_pb2.TokenLogprobs(token_logprobs=[-1.0], top_ids=[3], top_logprobs=[-1.0]),
    ],
    ids=["no values", "no ids", "too few", "huge", "none told of"],
)
def test_alternatives_that_are_not_as_many_as_they_say_cannot_be_read(told: common_pb2.TokenLogprobs) -> None:
    with pytest.raises(ValueError, match="alternatives each"):
        convert.verdict_from_pb(verdict_of("A" * len(told.token_logprobs), told))


@pytest.mark.parametrize(
    "response",
    [
        None,
        generation_pb2.GenerateResponse(
            prompt_logprobs=common_pb2.PromptLogprobs(
                first_position=1, logprobs=common_pb2.TokenLogprobs(token_logprobs=[-1.0], num_top=1, top_ids=[3])
            )
        ),
        generation_pb2.GenerateResponse(
            chunk=generation_pb2.GenerateChunk(
                token_ids=[3], logprobs=common_pb2.TokenLogprobs(token_logprobs=[-1.0], num_top=1, top_logprobs=[-1.0])
            )
        ),
    ],
    ids=["no message", "prompt", "chunk"],
)
def test_what_a_client_cannot_read_is_an_error_of_ours(response: generation_pb2.GenerateResponse | None) -> None:
    with pytest.raises(OutriderError) as caught:
        read_event(response)
    assert caught.value.reason == "UNREADABLE"


def test_logprobs_of_a_prompt_that_are_not_as_many_as_they_say_cannot_be_read() -> None:
    told = common_pb2.TokenLogprobs(token_logprobs=[-1.0], num_top=2, top_ids=[3, 4], top_logprobs=[-1.0])
    message = target_pb2.TargetServiceSessionResponse(
        prompt_logprobs=common_pb2.PromptLogprobs(first_position=1, logprobs=told)
    )
    with pytest.raises(ValueError, match="alternatives each"):
        read_target(message)


@pytest.mark.parametrize(
    ("values", "top_ids", "top_values", "num_top", "vocab_size", "fault"),
    [
        ([-1.0, -np.inf], [1, 2], [-1.0, -np.inf], 1, 3, ""),
        ([0.0], [], [], 0, 0, ""),
        ([-1.0], [0, 1], [-1.0, -2.0], 5, 2, ""),
        ([-1.0], [2**32 - 1], [-1.0], 1, 0, ""),
        ([], [], [], 5, 9, ""),
        ([-1.0, np.nan], [], [], 0, 9, "NaN"),
        ([np.nan, np.inf], [], [], 0, 9, "NaN"),
        ([np.inf, -np.inf], [], [], 0, 9, "NaN"),
        ([0.5], [], [], 0, 9, "above 0"),
        ([-1.0], [1], [np.nan], 1, 9, "NaN"),
        ([-1.0], [9], [-1.0], 1, 9, "vocabulary of 9"),
        ([-1.0], [1], [-1.0], 2, 9, "1 alternatives to each token where 2"),
        ([-1.0], [1], [-1.0], 0, 9, "1 alternatives to each token where 0"),
        ([-1.0], [], [], 2, 9, "0 alternatives to each token where 2"),
    ],
)
def test_numbers_that_are_no_logprobs_are_seen(
    values: list[float], top_ids: list[int], top_values: list[float], num_top: int, vocab_size: int, fault: str
) -> None:
    told_top = len(top_ids) // max(1, len(values))
    message = common_pb2.TokenLogprobs(
        token_logprobs=values, num_top=told_top, top_ids=top_ids, top_logprobs=top_values
    )
    found = fault_in(message, num_top, vocab_size)
    assert (fault in found) if fault else not found
