"""A recorded stream decided once more, from the target's rows, the seed and the record alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from outrider.audit.ending import Decode, look_at_end
from outrider.audit.findings import Comparison, Findings
from outrider.audit.frame import check_ids, look_at_frame
from outrider.audit.law import Scores, Text, coupled_scores, greedy_scores, processed
from outrider.audit.record import RoundRecord, StreamRecord
from outrider.audit.rounds import RatioRounds
from outrider.audit.rows import Rows
from outrider.sampling.grammar import GrammarState
from outrider.sampling.noise import Noise, extend_hash, hash_ids
from outrider.sampling.params import Origin


def replay(
    record: StreamRecord,
    rows: Rows,
    tolerance: float,
    vocab_size: int,
    decode: Decode,
    grammar: GrammarState | None = None,
) -> Findings:
    """rows: over `frame.text_ids(record)`. tolerance: see law.py. grammar: before the first token of the output, where
    the stream has one. Raises InvalidArgument where the record's ids are not the model's."""
    check_ids(record, vocab_size)
    findings = Findings(num_resumed=len(record.resumed_ids))
    look_at_frame(record, findings)
    look_at_end(record, findings, decode)
    text = Text(record.prompt_ids, record.resumed_ids, grammar)
    decide: Callable[[RoundRecord, int], None]
    if record.sampling.decides_by_match:
        decide = MatchRounds(record, rows, text, tolerance, findings).decide
    else:
        decide = RatioRounds(record, rows, text, tolerance, vocab_size, findings).decide
    prefix_hash = hash_ids((*record.prompt_ids, *record.resumed_ids))
    for number, one in enumerate(record.rounds):
        if one.base_length != text.length:
            findings.reasons.append(
                f"the record is incomplete: round {number} begins at {one.base_length} ids, and {text.length} are there"
            )
            break
        decide(one, prefix_hash)
        findings.num_tokens += len(one.committed_ids)
        findings.num_drafted += one.num_draft_tokens
        findings.num_accepted += one.origins.count(Origin.ACCEPTED)
        for token_id in one.committed_ids:
            text.push(token_id)
            prefix_hash = extend_hash(prefix_hash, token_id)
    findings.judge()
    return findings


class MatchRounds:
    """Greedy and COUPLED: each token is what the target chooses by itself, whatever was drafted."""

    def __init__(self, record: StreamRecord, rows: Rows, text: Text, tolerance: float, findings: Findings) -> None:
        self._params, self._stopping = record.sampling, record.stopping
        self._rows, self._text, self._tolerance, self._findings = rows, text, tolerance, findings
        self._noise = Noise(record.sampling.seed, record.sampling.choice)

    def decide(self, one: RoundRecord, prefix_hash: int) -> None:
        """Every token of the round. The text is afterwards as before."""
        comparisons: list[Comparison] = []
        for place, token_id in enumerate(one.committed_ids):
            index, scores = len(self._text.output_ids), self._scores()
            if scores is None:
                self._findings.breach(index, token_id, None, "the row that it is chosen from cannot be read")
            elif (comparison := self._compare(index, place, token_id, scores)) is not None:
                comparisons.append(comparison)
            self._text.push(token_id)
        self._text.pop(len(one.committed_ids))
        self._findings.count(comparisons)

    def _scores(self) -> Scores | None:
        position = self._text.length
        row = processed(self._rows.after(position), self._params, self._stopping, self._text)
        if row is None:
            return None
        if self._params.greedy:
            return greedy_scores(row, self._params, self._tolerance)
        return coupled_scores(row, self._params, self._tolerance, self._noise.gumbel(position, len(row)))

    def _compare(self, index: int, place: int, token_id: int, scores: Scores) -> Comparison | None:
        """A token that may be filtered out, or not, beats no other one for certain, nor is it beaten by it. None: a
        breach was found."""
        if scores.values[token_id] == -np.inf:
            self._findings.breach(index, token_id, scores.choice, "sampling parameters leave it no chance")
            return None
        others = scores.values.copy()
        others[token_id] = -np.inf
        lead = float(scores.values[token_id] - others.max())
        certain_lead = float(scores.values[token_id] - np.where(scores.uncertain, -np.inf, others).max())
        if certain_lead < -scores.error:
            unit = "logits" if self._params.greedy else "nats of log-probability and noise"
            what = f"it is {-certain_lead:.6g} {unit} short of the choice"
            self._findings.breach(index, token_id, scores.choice, what, -certain_lead - scores.error)
            return None
        if token_id == scores.choice:
            return Comparison(place, 0.0 if scores.uncertain[token_id] else max(lead, 0.0), scores.error)
        return Comparison(place, -scores.error if lead >= 0.0 else max(lead, -scores.error), scores.error)
