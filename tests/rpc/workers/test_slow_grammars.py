"""Forms that take long to read keep nobody waiting but the sessions that want them: not heartbeats, not probes."""

import asyncio
import threading

import pytest
from session_clients import ask, draft_opening, open_request, read, running_draft, running_target, target_opening

from outrider.sampling.grammar import GrammarVocabulary
from outrider.sampling.params import Grammar, GrammarKind, SamplingParams, StoppingParams

TOY, STOP = "toy:vocab=128,seed=1", 127
FORM = {
    "sampling": SamplingParams(temperature=0.0, grammar=Grammar(GrammarKind.REGEX, "[ab]+")),
    "stopping": StoppingParams(max_tokens=8, stop_token_ids=frozenset({STOP})),
}
MANY = 40
"""More than any pool of threads has."""


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_a_worker_lives_and_answers_while_forms_are_read(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    may_read, real = threading.Event(), GrammarVocabulary.state

    def slow(vocabulary: GrammarVocabulary, grammar: Grammar) -> object:
        assert may_read.wait(60)
        return real(vocabulary, grammar)

    monkeypatch.setattr(GrammarVocabulary, "state", slow)
    running, opening = (running_target, target_opening) if role == "target" else (running_draft, draft_opening)
    async with running(TOY, heartbeat_ms=20) as worker:
        stub = worker.target if role == "target" else worker.draft
        calls = [stub.Session() for _ in range(MANY)]
        try:
            for call in calls:
                await call.write(open_request(opening(**FORM)))
            first = await asyncio.wait_for(calls[0].read(), 30)
            assert first.WhichOneof("message") == "heartbeat"
            assert (await worker.describe()).capacity.num_sessions == MANY
            other = stub.Session()
            answer = await asyncio.wait_for(ask(other, open_request(opening())), 30)
            assert answer.WhichOneof("message") in ("verdict", "opened")
            other.cancel()
        finally:
            may_read.set()
        assert (await asyncio.wait_for(read(calls[0]), 30)).WhichOneof("message") in ("verdict", "opened")
        for call in calls:
            call.cancel()
        await worker.wait_idle()
