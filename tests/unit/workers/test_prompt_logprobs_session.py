"""Prompt logprobs in the target's session: memory bounded, a repeated opening answered as before, limits named."""

import pytest
from session_loops import GREEDY, HandDriver, target_session, toy

from outrider.errors import InvalidArgument
from target_worker.prompt_pass import MAX_PROMPT_LOGIT_ROWS

MODEL = toy("vocab=16,seed=1")


def test_logits_of_a_long_prompt_come_a_bounded_number_at_a_time() -> None:
    prompt, told, rows = [i * i % 16 for i in range(1000)], [], []
    session = target_session(MODEL, GREEDY, prompt_ids=prompt, prompt_logprobs=0)
    driver = HandDriver(MODEL.logits_for)
    program = session.open(lambda position, logprobs: told.append((position, logprobs)))

    def watched():
        result = None
        while True:
            try:
                forward = program.send(result)
            except StopIteration as stop:
                return stop.value
            rows.append(forward.num_logits)
            result = yield forward

    verdict = driver.run(watched())
    assert max(rows) <= MAX_PROMPT_LOGIT_ROWS
    assert sum(rows) == 1000
    assert [position for position, _ in told] == list(range(1, 1000, MAX_PROMPT_LOGIT_ROWS))
    assert verdict is driver.run(session.verify(verdict.header))


def test_the_worker_refuses_too_many_alternatives() -> None:
    with pytest.raises(InvalidArgument) as refusal:
        target_session(MODEL, GREEDY, prompt_logprobs=21)
    assert refusal.value.field == "open.prompt_logprobs"
