"""Streams of a real model, audited by its own plain forward and by transformers' module: in float32 not one token is
decided otherwise."""

import pytest
from planted import with_token
from stack import in_process_stack

import outrider
from outrider.audit.certificate import certify
from outrider.audit.findings import Verdict
from outrider.audit.frame import text_ids
from outrider.audit.record import StreamRecord
from outrider.audit.target import load_target
from outrider.settings import TargetWorkerSettings

MODEL = "smollm2-135m"
SETTINGS = TargetWorkerSettings(model=MODEL, dtype="float32")
PROMPT = "The history of the steam engine begins"
STREAMS = [
    ("token", "model", 1.0),
    ("block", "model", 0.8),
    ("coupled", "model", 1.0),
    ("block", "tree", 1.0),
    ("block", "model", 0.0),
]
"""Rule, drafter, temperature."""


async def recorded() -> list[StreamRecord]:
    records: list[StreamRecord] = []
    stack = in_process_stack(
        MODEL, MODEL, worker={"dtype": "float32"}, coordinator={"record_streams": 8, "draft_breaker_share": 1.0},
        draft_worker={"weight_dtype": "int4", "drafters": ("model", "tree")},
    )  # fmt: skip
    async with stack as services, outrider.Client(services.address) as client:
        for seed, (rule, drafter, temperature) in enumerate(STREAMS):
            answer = await client.complete(
                PROMPT, seed=seed, acceptance=rule, drafter=drafter, temperature=temperature, max_tokens=12,
                num_speculative_tokens=3,
            )  # fmt: skip
            records += await client.records(answer.started.request_id)
    return records


@pytest.mark.slow
async def test_no_token_is_decided_otherwise() -> None:
    records = await recorded()
    assert len(records) == len(STREAMS)
    for independent in (False, True):
        target = load_target(SETTINGS, max(len(text_ids(record)) for record in records), independent=independent)
        for record in records:
            certificate = certify(record, target)
            assert certificate.verdict is Verdict.AUDITED, certificate
            assert certificate.findings.num_tokens == 12
            assert certificate.findings.num_flipped == 0
            assert certify(with_token(record, 5, record.output_ids[5] + 1), target).verdict is Verdict.BREACH
