"""What an audit hands out: the verdict on one stream, and all that somebody else with the same weights needs to come to
it again."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.audit.findings import Findings, Verdict
from outrider.audit.frame import text_ids
from outrider.audit.record import StreamRecord
from outrider.audit.replay import replay
from outrider.audit.target import Target
from outrider.errors import FailedPrecondition, InvalidArgument


@dataclass(frozen=True, slots=True)
class Certificate:
    """prompt_sha256, text_sha256: of the ids as little-endian uint32, the text's being those that were delivered,
    resumed ones included. record_sha256: of the record's message. served_numerics: of the workers that decided;
    audited_numerics: of the rows here. stop_strings: those that were asked for as the record has it, and who asked
    knows; None: it does not tell. tolerance: logits, see law.py."""

    verdict: Verdict
    request_id: str
    index: int
    model: str
    model_fingerprint: str
    served_numerics: tuple[str, ...]
    audited_numerics: str
    is_independent: bool
    rule: str
    seed: int
    choice: int
    temperature: float
    finish: str
    matched_stop_string: str
    stop_strings: tuple[str, ...] | None
    tolerance: float
    prompt_sha256: str
    text_sha256: str
    record_sha256: str
    findings: Findings

    def as_json(self) -> dict[str, Any]:
        """Flat but for breaches and reasons. The seed is text: not every reader of JSON holds 64 bits."""
        values = dataclasses.asdict(self)
        return {**values, **values.pop("findings"), "seed": str(self.seed), "verdict": str(self.verdict)}


def certify(record: StreamRecord, target: Target, tolerance: float | None = None) -> Certificate:
    """tolerance: None for that of the target's number type.

    Raises FailedPrecondition where the record is of other weights, InvalidArgument where it is no record of them.
    """
    about = target.description
    if record.model_fingerprint != about.model_fingerprint:
        raise FailedPrecondition(
            f"the record is of model {record.model!r} with fingerprint {record.model_fingerprint[:16]}..., and "
            f"{about.model!r} in {about.dtype} has {about.model_fingerprint[:16]}...: give model and dtype as served",
            field="model",
        )
    try:
        grammar = target.grammar(record.sampling.grammar)
    except ValueError as error:
        raise InvalidArgument(f"record.sampling.grammar: {error}", field="record.sampling.grammar") from None
    tolerance = target.tolerance(record.numerics_fingerprints) if tolerance is None else tolerance
    findings = replay(record, target.rows(text_ids(record)), tolerance, about.vocab_size, target.decode, grammar)
    return Certificate(
        verdict=findings.verdict,
        request_id=record.request_id,
        index=record.index,
        model=record.model,
        model_fingerprint=record.model_fingerprint,
        served_numerics=record.numerics_fingerprints,
        audited_numerics=about.numerics_fingerprint,
        is_independent=target.is_independent,
        rule="greedy" if record.sampling.greedy else str(record.sampling.acceptance),
        seed=record.sampling.seed,
        choice=record.sampling.choice,
        temperature=record.sampling.temperature,
        finish=str(record.finish),
        matched_stop_string=record.matched_stop_string,
        stop_strings=record.text.stop_strings if record.text is not None else None,
        tolerance=tolerance,
        prompt_sha256=ids_sha256(record.prompt_ids),
        text_sha256=ids_sha256((*record.resumed_ids, *record.output_ids)),
        record_sha256=record.sha256,
        findings=findings,
    )


def ids_sha256(ids: Sequence[int]) -> str:
    """Of the ids as little-endian uint32, hexadecimal."""
    return hashlib.sha256(np.asarray(ids, dtype="<u4").tobytes()).hexdigest()
