"""Streams of running services, recorded and decided once more: honest ones pass, planted faults do not."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import scaled
from planted import with_token
from stack import Stack, in_process_stack
from typer.testing import CliRunner

import outrider
from outrider.audit.certificate import Certificate, certify
from outrider.audit.findings import Verdict
from outrider.audit.frame import decided_ids, text_ids
from outrider.audit.record import RoundRecord, StreamRecord, TextOptions
from outrider.audit.target import load_target
from outrider.cli.app import app
from outrider.drafting.proposal import SparseQ
from outrider.errors import FailedPrecondition, InvalidArgument, NotFound
from outrider.sampling.params import AcceptanceRule, Finish
from outrider.serving.records import add_rounds, kept_to_pb, read_records, write_records
from outrider.settings import TargetWorkerSettings
from outrider.toy_text import toy_char

TARGET = "toy:vocab=48,seed=3,order=1,scale=3"
"""Its texts repeat themselves, so that there is something to look up."""
DRAFT = f"{TARGET},agreement=0.8"
PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
COORDINATOR = {"record_streams": 64, "draft_breaker_share": 1.0}


def audited(record: StreamRecord, model: str = TARGET) -> Certificate:
    settings = TargetWorkerSettings(model=model)
    return certify(record, load_target(settings, len(text_ids(record)) + 64, independent=False))


@asynccontextmanager
async def services(target: str = TARGET, **settings) -> AsyncIterator[tuple[Stack, outrider.Client]]:
    coordinator = {**COORDINATOR, **settings.pop("coordinator", {})}
    async with in_process_stack(target, DRAFT, coordinator=coordinator, **settings) as stack:
        async with outrider.Client(stack.address) as client:
            yield stack, client


async def recorded(client: outrider.Client, **options) -> StreamRecord:
    answer = await client.complete(PROMPT, **options)
    (record,) = await client.records(answer.started.request_id)
    assert record.output_ids == answer.token_ids
    return record


@pytest.mark.parametrize("rule", ["token", "block", "coupled", "greedy"])
@pytest.mark.parametrize("drafter", ["model", "tree", "suffix", "lookup", "own", "skip"])
async def test_honest_streams_are_audited(rule: str, drafter: str) -> None:
    sampling = {"temperature": 0.0} if rule == "greedy" else {"temperature": 0.9, "acceptance": rule}
    heads = {"heads": ("own=toy:agreement=0.8", "skip:1")}
    # its second sequence opens while the text goes on: not behind one that takes no time
    target = f"{TARGET},pass_ms=1" if drafter == "skip" else TARGET
    num_drafted = num_accepted = num_draws = 0
    async with services(target, draft_worker={"drafters": ("model", "tree")}, target_worker=heads) as (_, client):
        for seed in range(2 + scaled(20)):
            gamma = (1, 4, None)[seed % 3]
            record = await recorded(
                client, seed=seed, max_tokens=24, drafter=drafter, num_speculative_tokens=gamma,
                top_p=(1.0, 0.9)[seed % 2], repetition_penalty=(1.0, 1.2)[seed // 2 % 2], **sampling,
            )  # fmt: skip
            certificate = audited(record, target)
            assert not certificate.findings.breaches, certificate
            assert certificate.findings.num_flipped == 0
            assert certificate.findings.num_tokens == 24
            num_drafted += certificate.findings.num_drafted
            num_accepted += certificate.findings.num_accepted
            num_draws += certificate.findings.num_draws
    assert num_drafted > 0, "nothing was drafted: nothing was shown"
    assert num_accepted > 0 or drafter in ("suffix", "lookup"), "few guesses are right where tokens are sampled"
    is_sampled = rule in ("token", "block") and drafter not in ("suffix", "lookup")
    assert (num_draws > 0) == is_sampled


@pytest.fixture(scope="module")
def sampled() -> dict[str, StreamRecord]:
    """An honest stream of each rule in which drafts were accepted and others were not."""

    async def run() -> dict[str, StreamRecord]:
        async with services() as (_, client):
            records = {}
            for rule in ("token", "block", "coupled", "greedy"):
                options = {"temperature": 0.0} if rule == "greedy" else {"acceptance": rule}
                records[rule] = await recorded(
                    client, seed=11, max_tokens=32, drafter="model", num_speculative_tokens=4, **options
                )
            return records

    return asyncio.run(run())


RULES = ("token", "block", "coupled", "greedy")


@pytest.mark.parametrize("rule", RULES)
def test_every_planted_token_is_found(sampled: dict[str, StreamRecord], rule: str) -> None:
    """At each place another token, delivered and in the round that decided it: the breach is there and not before."""
    record = sampled[rule]
    assert audited(record).verdict is Verdict.AUDITED
    for index in range(len(record.output_ids)):
        certificate = audited(with_token(record, index, (record.output_ids[index] + 1) % 48))
        assert certificate.verdict is Verdict.BREACH, index
        first = min(breach.index for breach in certificate.findings.breaches)
        assert first <= index
        if rule in ("coupled", "greedy"):
            assert first == index
            told = min(certificate.findings.breaches, key=lambda breach: breach.index)
            assert told.expected == record.output_ids[index]
            assert told.by > 0.0


@pytest.mark.parametrize("rule", RULES)
def test_another_seed_or_rule_or_temperature_is_found(sampled: dict[str, StreamRecord], rule: str) -> None:
    record = sampled[rule]

    def verdict(**changes) -> Verdict:
        return audited(dataclasses.replace(record, sampling=dataclasses.replace(record.sampling, **changes))).verdict

    if rule != "greedy":  # which has no coins
        assert verdict(seed=record.sampling.seed + 1) is Verdict.BREACH
        assert verdict(choice=1) is Verdict.BREACH
        assert verdict(temperature=0.0) is Verdict.BREACH
    assert verdict(temperature=3.0, acceptance=AcceptanceRule.COUPLED) is Verdict.BREACH
    if rule in ("token", "block"):
        assert verdict(acceptance=AcceptanceRule.COUPLED) is Verdict.BREACH


def test_a_verdict_by_another_rule_is_found(sampled: dict[str, StreamRecord]) -> None:
    for rule, other in (("token", AcceptanceRule.BLOCK), ("block", AcceptanceRule.TOKEN)):
        record = sampled[rule]
        certificate = audited(
            dataclasses.replace(record, sampling=dataclasses.replace(record.sampling, acceptance=other))
        )
        assert certificate.verdict is Verdict.BREACH, rule


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_changed_q_is_found(sampled: dict[str, StreamRecord], rule: str) -> None:
    """Mass moved from a draft to another id, in one q of one round at a time: most changes show in a coin or a draw."""
    record = sampled[rule]
    num_changed = num_found = 0
    for number, one in enumerate(record.rounds):
        for node in range(len(one.proposal)):
            q = one.proposal.q_at(node)
            if q is None or len(q.ids) < 2:
                continue
            changed = with_q(one, node, moved(q, one.proposal.token_ids[node]))
            rounds = (*record.rounds[:number], changed, *record.rounds[number + 1 :])
            num_changed += 1
            num_found += audited(dataclasses.replace(record, rounds=rounds)).verdict is Verdict.BREACH
    assert num_changed > 10
    assert num_found > num_changed / 2


def moved(q: SparseQ, token_id: int) -> SparseQ:
    counts = q.counts.copy()
    here = int(np.flatnonzero(q.ids == token_id)[0])
    there = (here + 1) % len(counts)
    amount = int(counts[here]) - 1
    counts[here] -= amount
    counts[there] += amount
    return SparseQ(q.ids, counts)


def with_q(one: RoundRecord, node: int, q: SparseQ) -> RoundRecord:
    entries = list(one.proposal.q)
    entries[node] = q
    return dataclasses.replace(one, proposal=dataclasses.replace(one.proposal, q=tuple(entries)))


def test_dropped_drafts_origins_and_ends_are_found(sampled: dict[str, StreamRecord]) -> None:
    record = sampled["block"]
    number = next(i for i, one in enumerate(record.rounds) if one.proposal and len(one.committed_ids) > 1)
    one = record.rounds[number]

    def with_round(**changes) -> StreamRecord:
        changed = dataclasses.replace(one, **changes)
        return dataclasses.replace(record, rounds=(*record.rounds[:number], changed, *record.rounds[number + 1 :]))

    faults = {
        "sound drafts were dropped": with_round(proposal_fault="late", num_draft_tokens=0),
        "drafts were checked where there are": with_round(num_draft_tokens=one.num_draft_tokens - 1),
        "origins": with_round(origins=(one.origins[-1],) * len(one.origins)),
        "impossible drafts": with_round(proposal=dataclasses.replace(one.proposal, q=one.proposal.q[1:])),
        "not delivered": dataclasses.replace(record, output_ids=record.output_ids[:-1]),
        "another token was delivered": dataclasses.replace(
            record, output_ids=(*record.output_ids[:-1], (record.output_ids[-1] + 1) % 48)
        ),
        "neither a stop": dataclasses.replace(
            record, stopping=dataclasses.replace(record.stopping, max_tokens=33, stop_token_ids=frozenset())
        ),
        "max_tokens is": dataclasses.replace(record, stopping=dataclasses.replace(record.stopping, max_tokens=31)),
        "follows a stop": dataclasses.replace(
            record, stopping=dataclasses.replace(record.stopping, stop_token_ids=frozenset(record.output_ids[:1]))
        ),
    }  # fmt: skip
    for what, planted in faults.items():
        found = audited(planted).findings
        assert found.verdict is Verdict.BREACH, what
        assert any(what in breach.what for breach in found.breaches), (what, found.breaches)


def texts_of(stop: str, *stops: str) -> dict[str, Any]:
    """How a text is told to have ended by `stop`."""
    return {"matched_stop_string": stop, "finish": Finish.STOP, "text": TextOptions(stop_strings=stops)}


def test_texts_that_were_cut_are_found(sampled: dict[str, StreamRecord]) -> None:
    """Whatever is told of why: nobody asked for the string, the text does not reach it, or it goes on behind it."""
    record = sampled["block"]
    assert record.text == TextOptions()
    half = record.rounds[: len(record.rounds) // 2]
    ids = tuple(token_id for one in half for token_id in one.committed_ids)
    cut = dataclasses.replace(record, rounds=half, output_ids=ids)
    text = "".join(map(toy_char, ids))
    whole = "".join(map(toy_char, record.output_ids))
    for what, planted in {
        "neither a stop": cut,
        "not asked for": dataclasses.replace(cut, **texts_of("~~")),
        "does not reach": dataclasses.replace(cut, **texts_of("~~", "~~")),
        "more rounds were decided": dataclasses.replace(record, output_ids=(), **texts_of("~~", "~~")),
        "goes on behind": dataclasses.replace(cut, **texts_of(text[:-1], text[:-1])),
        "is told to end the text": dataclasses.replace(cut, **texts_of(text[1:], text[1:], text)),
        "that the text ended by length": dataclasses.replace(cut, **{**texts_of(text, text), "finish": Finish.LENGTH}),
        "told to end by stop, and ends by length": dataclasses.replace(record, finish=Finish.STOP),
        "and that is not told": dataclasses.replace(record, text=TextOptions(stop_strings=(whole,))),
    }.items():
        findings = audited(planted).findings
        assert findings.verdict is Verdict.BREACH, what
        assert any(what in breach.what for breach in findings.breaches), (what, findings.breaches)


def test_a_record_that_does_not_tell_stop_strings_blames_nobody_for_one(sampled: dict[str, StreamRecord]) -> None:
    record = dataclasses.replace(sampled["block"], text=None)
    assert audited(record).verdict is Verdict.AUDITED
    text = "".join(map(toy_char, record.output_ids))
    for stop, verdict in ((text, Verdict.INCONCLUSIVE), ("~~", Verdict.BREACH)):
        findings = audited(dataclasses.replace(record, **{**texts_of(stop), "text": None})).findings
        assert findings.verdict is verdict, findings.breaches
        assert "does not tell which stop strings" in findings.reasons[0]


def test_what_cannot_be_looked_at_is_inconclusive(sampled: dict[str, StreamRecord]) -> None:
    record = sampled["token"]
    cut = dataclasses.replace(record, rounds=record.rounds[:-1], num_rounds_left_out=1)
    assert audited(cut).verdict is Verdict.INCONCLUSIVE
    assert "1 rounds were not kept" in audited(cut).findings.reasons[0]
    holed = dataclasses.replace(record, rounds=record.rounds[:2] + record.rounds[3:], num_rounds_left_out=1)
    assert audited(holed).verdict is not Verdict.AUDITED
    number = next(i for i, one in enumerate(record.rounds) if one.proposal)
    untold = dataclasses.replace(record.rounds[number], drafts_untold=True)
    rounds = (*record.rounds[:number], untold, *record.rounds[number + 1 :])
    assert audited(dataclasses.replace(record, rounds=rounds)).verdict is Verdict.INCONCLUSIVE
    with pytest.raises(InvalidArgument, match="below 48"):
        audited(dataclasses.replace(record, output_ids=(99,)))
    with pytest.raises(FailedPrecondition, match="fingerprint"):
        audited(record, TARGET.replace("seed=3", "seed=4"))


async def test_plain_resumed_stopped_and_several_texts() -> None:
    async with services() as (_, client):
        plain = audited(await recorded(client, seed=1, max_tokens=12, num_speculative_tokens=0))
        assert plain.verdict is Verdict.INCONCLUSIVE
        assert plain.findings.num_tokens == 12
        assert not plain.findings.breaches

        whole = await client.complete(PROMPT, seed=2, acceptance="block", max_tokens=24, num_speculative_tokens=3)
        started = whole.started
        await client.complete(
            PROMPT, seed=2, acceptance="block", max_tokens=24, num_speculative_tokens=3, request_id=started.request_id,
            resume_token_ids=whole.token_ids[:10], prompt_hash=started.prompt_hash,
        )  # fmt: skip
        first, second = await client.records(started.request_id)
        assert (len(first.resumed_ids), len(second.resumed_ids)) == (0, 10)
        for record in (first, second):
            assert audited(record).verdict is Verdict.AUDITED
        assert audited(second).findings.num_tokens == 14

        stop = await client.detokenize(whole.token_ids[5:8])
        stopped = await recorded(client, seed=2, acceptance="block", max_tokens=24, num_speculative_tokens=3, stop=stop)
        assert stopped.matched_stop_string == stop
        assert audited(stopped).verdict is Verdict.AUDITED
        assert audited(stopped).stop_strings == (stop,)

        events = [e async for e in client.generate(PROMPT, n=3, seed=4, max_tokens=16, num_speculative_tokens=2)]
        request_id = events[0].request_id
        texts = await client.records(request_id)
        assert [record.index for record in texts] == [0, 1, 2]
        assert [audited(record).verdict for record in texts] == [Verdict.AUDITED] * 3
        assert len({audited(record).text_sha256 for record in texts}) == 3


@pytest.mark.parametrize("rule", ["block", "coupled"])
async def test_a_stream_that_lost_its_target_is_audited(rule: str) -> None:
    """The lost worker's rounds and those of the one that took over, in one record."""
    slow = f"{TARGET},pass_ms=10"
    async with services(slow, num_targets=2, worker={"drain_grace_s": 0.0}) as (stack, client):
        num_chunks = 0
        async for event in client.generate(
            PROMPT, seed=5, acceptance=rule, max_tokens=300, num_speculative_tokens=3, request_id="lost"
        ):
            if isinstance(event, outrider.Chunk):
                num_chunks += 1
                if num_chunks == 3:
                    info = await client.server_info()
                    busy = next(w for w in info.workers if w.role == "target" and w.num_sessions)
                    lost = next(server for server in stack.target if server.address == busy.address)
                    await lost.close()
        (record,) = await client.records("lost")
    assert max(one.epoch for one in record.rounds) > 1, "the target was not lost in time"
    certificate = audited(record, slow)
    assert certificate.verdict is Verdict.AUDITED, certificate
    assert certificate.findings.num_tokens == 300


async def test_a_record_is_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are copied on a thread, and the stream goes on meanwhile: it must not seem to have kept back tokens."""
    held = []

    def begun(kept):
        held.append(kept)
        return kept_to_pb(kept)

    def late(message, rounds):
        (kept,) = held
        kept.rounds.append(kept.rounds[-1])
        add_rounds(message, rounds)

    monkeypatch.setattr("coordinator.server.kept_to_pb", begun)
    monkeypatch.setattr("coordinator.server.add_rounds", late)
    async with services() as (_, client):
        record = await recorded(client, seed=1, max_tokens=12)
    assert len(held[0].rounds) == len(record.rounds) + 1, "the stream did not go on"
    assert decided_ids(record) == record.output_ids


async def test_who_records_what_and_who_sees_it() -> None:
    async with services(coordinator={"record_streams": 0}) as (_, client):
        answer = await client.complete(PROMPT, max_tokens=4)
        with pytest.raises(NotFound, match="record_streams"):
            await client.records(answer.started.request_id)
        with pytest.raises(FailedPrecondition, match="keeps records of 0 streams"):
            await client.complete(PROMPT, max_tokens=4, record=True)
    async with services(coordinator={"record_streams": 2}) as (stack, client):
        for name in ("one", "two", "three"):
            await client.complete(PROMPT, max_tokens=4, request_id=name)
        with pytest.raises(NotFound, match="the last 2 streams are"):
            await client.records("one")
        assert (await client.records("three"))[0].prompt_ids == tuple(PROMPT)
        await client.complete(PROMPT, max_tokens=4, request_id="never", record=False)
        with pytest.raises(NotFound):
            await client.records("never")
        with pytest.raises(FailedPrecondition, match="has 3"):
            [_ async for _ in client.generate(PROMPT, max_tokens=4, n=3, record=True)]
        async with outrider.Client(stack.address, metadata={"x-outrider-tenant": "other"}) as stranger:
            with pytest.raises(NotFound, match="no such request"):
                await stranger.records("three")


async def test_the_command_certifies(tmp_path: Path) -> None:
    async with services() as (stack, client):
        saved = tmp_path / "stream.jsonl"
        options = {"seed": 1, "acceptance": "block", "num_speculative_tokens": 3, "drafter": "model"}
        await client.complete(PROMPT, max_tokens=24, request_id="one", stop="[/b]", **options)

        def run(*arguments: str) -> tuple[int, str]:
            result = CliRunner().invoke(app, [*arguments])
            return result.exit_code, result.output

        code, shown = await asyncio.to_thread(run, "audit", "one", "--save", str(saved), "--address", stack.address)
        assert code == 0, shown
        assert "AUDITED" in shown
        assert "by length; stop strings asked for: ['[/b]']" in shown
        (record,) = read_records(saved)
        assert record.sha256 in shown
        code, told = await asyncio.to_thread(run, "audit", str(saved), "--json")
        certificate = json.loads(told.strip().splitlines()[-1])
        assert (code, certificate["verdict"], certificate["num_tokens"]) == (0, "AUDITED", 24)
        assert certificate["record_sha256"] == record.sha256
        assert certificate["seed"] == "1"

        text = json.loads(saved.read_text())
        text["output_ids"][3] = (text["output_ids"][3] + 1) % 48
        saved.write_text(json.dumps(text))
        code, told = await asyncio.to_thread(run, "audit", str(saved))
        assert code == 1
        assert "BREACH" in told
        assert "at token 3" in told
        saved.write_text("no record")
        code, told = await asyncio.to_thread(run, "audit", str(saved))
        assert code == 2
        assert "holds no records" in told

        code, told = await asyncio.to_thread(
            run, "generate", "HELLO", "--raw", "--max-tokens", "8", "--record", str(saved), "--address", stack.address
        )
        assert code == 0, told
        (record,) = read_records(saved)
        assert len(record.output_ids) == 8


def test_files_hold_what_was_told(sampled: dict[str, StreamRecord], tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    write_records(file, sampled.values())
    again = read_records(file)
    assert [record.wire for record in again] == [record.wire for record in sampled.values()]
    assert [record.sha256 for record in again] == [record.sha256 for record in sampled.values()]
