"""Where a text may end, as an audit sees it, beside the code that ends it: of texts that were cut, and of no other."""

import dataclasses

from conftest import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from coordinator.text.output import OutputText
from coordinator.text.tokenizer import TokenizerCodec
from outrider.audit.ending import look_at_end
from outrider.audit.findings import Findings
from outrider.audit.record import StreamRecord, TextOptions
from outrider.sampling.params import Finish, SamplingParams, StoppingParams

WORDS = ["<end>", "a", "b", "ab", "ba", "aab", "<0xE2>", "<0x82>", "<0xAC>"]
"""The last three make a euro sign."""
SPECIAL, STOP_ID = 0, 1
IDS = st.lists(st.integers(0, len(WORDS) - 1), max_size=14)
STOPS = st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=3, unique=True)


def codec() -> TokenizerCodec:
    vocab = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return TokenizerCodec(tokenizer.to_str().encode())


CODEC = codec()


def served(ids: list[int], stops: list[str], stopping: StoppingParams, *, skips: bool) -> StreamRecord:
    """What the coordinator delivers of these ids, and why it ends."""
    text = OutputText(
        CODEC, skip_special_tokens=skips, stop_strings=stops, include_stop=False, min_tokens=stopping.min_tokens
    )
    finish, output = Finish.NONE, list[int]()
    for token_id in ids:
        output.append(token_id)
        text.push(token_id)
        if text.matched_stop is None and token_id in stopping.stop_token_ids:
            finish = Finish.STOP
        elif text.matched_stop is None and len(output) == stopping.max_tokens:
            finish = Finish.LENGTH
        if text.matched_stop is None and finish:
            text.flush()
        if text.matched_stop is not None:
            finish = Finish.STOP
        if finish:
            break
    return StreamRecord(
        request_id="r", model="m", model_fingerprint="f", prompt_ids=(3,), output_ids=tuple(output),
        sampling=SamplingParams(), stopping=stopping, finish=finish, matched_stop_string=text.matched_stop or "",
        text=TextOptions(stop_strings=tuple(stops), skip_special_tokens=skips),
    )  # fmt: skip


def blamed(record: StreamRecord, **changes: object) -> list[str]:
    findings = Findings()
    look_at_end(dataclasses.replace(record, **changes), findings, CODEC.decode)  # type: ignore[arg-type]
    return [breach.what for breach in findings.breaches]


@settings(max_examples=scaled(4000), deadline=None)
@given(IDS, STOPS, st.integers(0, 4), st.booleans(), st.booleans())
def test_what_the_coordinator_delivers_is_blamed_for_nothing_and_what_was_cut_is(
    ids: list[int], stops: list[str], min_tokens: int, skips: bool, stops_by_id: bool
) -> None:
    stopping = StoppingParams(12, min_tokens, frozenset({STOP_ID} if stops_by_id else ()))
    record = served(ids, stops, stopping, skips=skips)
    assert not blamed(record)
    assert not blamed(record, text=None)
    output = record.output_ids
    if record.finish is not Finish.NONE:
        if output[-2:-1] != (STOP_ID,) or not stops_by_id:
            assert blamed(record, output_ids=output[:-1]), "a token less"
        other = Finish.LENGTH if record.finish is Finish.STOP else Finish.STOP
        assert blamed(record, finish=other)
        assert blamed(record, matched_stop_string="never")
    if matched := record.matched_stop_string:
        told = dataclasses.replace(record.text or TextOptions(), stop_strings=())
        assert blamed(record, text=told), "nobody asked for it"
        assert blamed(record, output_ids=(*output, *(4, 5) * 2)), "it goes on"
        assert blamed(record, finish=Finish.NONE)
        if len(output) < stopping.max_tokens and output[-1] not in stopping.stop_token_ids:
            assert blamed(record, matched_stop_string="")
        assert matched in stops


def test_the_cases_above_hold_every_kind() -> None:
    plain = StoppingParams(12, 0, frozenset({STOP_ID}))
    assert served([2, 1], ["€"], plain, skips=True).finish is Finish.STOP
    assert served([2, 4] * 9, ["€"], plain, skips=True).finish is Finish.LENGTH
    for skips, matched in ((True, "€"), (False, "")):
        record = served([2, 6, 7, SPECIAL, 8, 2], ["€"], plain, skips=skips)
        assert record.matched_stop_string == matched
        assert len(record.output_ids) == (5 if matched else 6)
        assert not blamed(record)
    late = served([3, 3, 3], ["ab"], StoppingParams(12, 2), skips=True)
    assert (late.matched_stop_string, late.output_ids) == ("ab", (3, 3, 3))
    assert blamed(late, stopping=StoppingParams(12, 0)), "it is there twice before"
