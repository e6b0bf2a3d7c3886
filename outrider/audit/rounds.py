"""Recorded rounds of TOKEN and BLOCK decided once more: every draft drawn again from its q, every coin thrown again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from outrider.audit.findings import Findings
from outrider.audit.law import Law, Text, law, processed
from outrider.audit.record import RoundRecord, StreamRecord
from outrider.audit.rows import Rows
from outrider.audit.rules import Decision, Round
from outrider.drafting.proposal import EMPTY, Proposal, ProposalFault, SparseQ, check
from outrider.drafting.tree import PREFIX
from outrider.lm.tree import path_to
from outrider.sampling.noise import Noise, Role, extend_hash
from outrider.sampling.params import AcceptanceRule, Origin, SamplingParams, StoppingParams


class RatioRounds:
    """Of one stream. The text is at the round's prefix before and after each call."""

    def __init__(
        self,
        record: StreamRecord,
        rows: Rows,
        text: Text,
        tolerance: float,
        vocab_size: int,
        findings: Findings,
    ) -> None:
        self._params, self._stopping = record.sampling, record.stopping
        self._max_draft_tokens, self._vocab_size = record.max_draft_tokens, vocab_size
        self._rows, self._text, self._tolerance, self._findings = rows, text, tolerance, findings
        self._noise = Noise(record.sampling.seed, record.sampling.choice)

    def decide(self, one: RoundRecord, prefix_hash: int) -> None:
        """One round, whose prefix has this hash."""
        proposal = self._checked_proposal(one)
        if proposal is None:
            return
        hashes = {PREFIX: prefix_hash}
        for node, token_id in enumerate(proposal.token_ids):
            hashes[node] = extend_hash(hashes[proposal.shape[node]], token_id)
        self._redraw(proposal, hashes)

        def uniform(node: int, role: Role, try_index: int) -> float:
            return self._noise.uniform(hashes[node], role, try_index)

        laws = Laws(self._rows, self._text, one.committed_ids, proposal, self._params, self._stopping, self._tolerance)
        round_ = Round(self._params.acceptance, proposal, self._stopping.stop_token_ids, laws, uniform)
        free = round_.decide()
        num_accepted = one.origins.count(Origin.ACCEPTED)
        if _token_ids(free, proposal) == one.committed_ids and num_accepted == len(free.path):
            self._findings.count(free.comparisons)
            return
        led = [round_.against(*way) for way in _ways(one, num_accepted, proposal, self._stopping)]
        if not led:
            self._tell(one, _token_ids(free, proposal), "none of its drafts leads to what it decided")
            return
        best = max(led, key=_worst)
        if _worst(best) >= 0.0:
            self._findings.count(best.comparisons)
            return
        worst = min(best.comparisons, key=lambda comparison: comparison.margin + comparison.error)
        self._tell(one, _token_ids(free, proposal), worst.what, -_worst(best))

    def _tell(self, one: RoundRecord, expected: Sequence[int], what: str, by: float = 0.0) -> None:
        """Of the first token that should have been another."""
        place = 0
        while place < min(len(expected), len(one.committed_ids)) and expected[place] == one.committed_ids[place]:
            place += 1
        if place == len(expected) == len(one.committed_ids):
            place, what = 0, f"the tokens of its round are right, what it tells of their origins is not ({what})"
        self._findings.breach(
            len(self._text.output_ids) + place,
            one.committed_ids[place] if place < len(one.committed_ids) else None,
            expected[place] if place < len(expected) else None,
            what,
            by,
        )

    def _checked_proposal(self, one: RoundRecord) -> Proposal | None:
        """What the target had to decide about; None where that cannot be said."""
        index, fault = len(self._text.output_ids), one.unreadable
        if one.drafts_untold:
            self._findings.reasons.append("the record is incomplete: drafts of a target's own came without their q")
            return None
        try:
            check(one.proposal, vocab_size=self._vocab_size, max_draft_tokens=self._max_draft_tokens)
        except ProposalFault as found:
            fault = fault or str(found)
        if one.proposal_fault and one.proposal and not fault:
            self._findings.breach(index, None, None, f"sound drafts were dropped ({one.proposal_fault[:80]})")
            return None
        if fault and not one.proposal_fault:
            self._findings.breach(index, None, None, f"impossible drafts were taken: {fault}")
            return None
        proposal = EMPTY if one.proposal_fault else self._shortened(one.proposal)
        if len(proposal) != one.num_draft_tokens:
            what = f"{one.num_draft_tokens} drafts were checked where there are {len(proposal)} to check"
            self._findings.breach(index, None, None, what)
            return None
        return proposal

    def _shortened(self, proposal: Proposal) -> Proposal:
        """No draft for the stream's last token, none below a stop token."""
        room = max(0, self._stopping.max_tokens - len(self._text.output_ids) - 1)
        stops, kept = self._stopping.stop_token_ids, list[int]()
        for node, parent in enumerate(proposal.shape):
            follows = parent == PREFIX or (parent in kept and proposal.token_ids[parent] not in stops)
            if follows and len(kept) < room:
                kept.append(node)
        return proposal.kept(kept)

    def _redraw(self, proposal: Proposal, hashes: Mapping[int, int]) -> None:
        """Every sampled draft is the one that the seed draws from its q."""
        num_tries: dict[int, int] = {}
        for node, token_id in enumerate(proposal.token_ids):
            q, parent = proposal.q_at(node), proposal.shape[node]
            if q is None:
                continue
            try_index = num_tries.get(parent, 0)
            num_tries[parent] = try_index + 1
            expected = _drawn(q, self._noise.integer16(hashes[parent], Role.DRAFT, try_index))
            self._findings.num_draws += 1
            if expected != token_id:
                what = f"draft {node} of its round is {token_id}, and the seed draws {expected} from its q"
                self._findings.breach(len(self._text.output_ids), None, None, what)


class Laws(Mapping[int, Law]):
    """p after the nodes of one round, computed when it is asked for; a row that cannot be read is not there.

    Rows of the text itself come from the pass over the whole text, all others from one pass for each path that leads
    away from it.
    """

    def __init__(
        self,
        rows: Rows,
        text: Text,
        committed_ids: Sequence[int],
        proposal: Proposal,
        params: SamplingParams,
        stopping: StoppingParams,
        tolerance: float,
    ) -> None:
        self._rows, self._text, self._committed_ids, self._proposal = rows, text, committed_ids, proposal
        self._shape = proposal.shape
        self._params, self._stopping, self._tolerance = params, stopping, tolerance
        self._known: dict[int, Law | None] = {}
        self._found: dict[int, np.ndarray] = {}

    def __getitem__(self, node: int) -> Law:
        if node not in self._known:
            self._known[node] = self._law(node)
        if (found := self._known[node]) is None:
            raise KeyError(node)
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(range(PREFIX, len(self._proposal)))

    def __len__(self) -> int:
        return len(self._proposal) + 1

    def _law(self, node: int) -> Law | None:
        if node not in self._found:
            path = path_to(self._shape, self._furthest(node))
            self._found.update(zip([PREFIX, *path], self._rows_along(self._ids(path)), strict=True))
        path_ids = self._ids(path_to(self._shape, node))
        for token_id in path_ids:
            self._text.push(token_id)
        row = processed(self._found[node], self._params, self._stopping, self._text)
        self._text.pop(len(path_ids))
        return None if row is None else law(row, self._params, self._tolerance)

    def _rows_along(self, path_ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Behind the prefix, and behind each of these drafts."""
        num_same = 0
        for token_id, committed_id in zip(path_ids, self._committed_ids, strict=False):
            if token_id != committed_id:
                break
            num_same += 1
        for count in range(num_same + 1):
            yield self._rows.after(self._text.length + count)
        if num_same < len(path_ids):
            yield from self._rows.aside(self._text.length + num_same, path_ids[num_same:])

    def _furthest(self, node: int) -> int:
        """The deepest node below it whose row will be wanted: BLOCK wants all that have drafts after them, TOKEN none
        before it is accepted."""
        if self._params.acceptance is AcceptanceRule.TOKEN:
            return node
        furthest = node
        for other in sorted(set(self._shape) - {PREFIX}):
            path = path_to(self._shape, other)
            if (node == PREFIX or node in path) and len(path) > len(path_to(self._shape, furthest)):
                furthest = other
        return furthest

    def _ids(self, path: Sequence[int]) -> list[int]:
        return [self._proposal.token_ids[node] for node in path]


def _worst(decision: Decision) -> float:
    """How far the comparison that speaks most against it is within the tolerance; negative: beyond it."""
    return min((comparison.margin + comparison.error for comparison in decision.comparisons), default=0.0)


def _drawn(q: SparseQ, integer: int) -> int:
    """The id whose count of integers in [0, 65,536) holds this one."""
    for token_id, count in zip(q.ids, q.counts, strict=True):
        if integer < count:
            return int(token_id)
        integer -= int(count)
    raise ValueError("the counts of a q that was checked sum to 65,536")


def _token_ids(decision: Decision, proposal: Proposal) -> tuple[int, ...]:
    accepted = tuple(proposal.token_ids[node] for node in decision.path)
    return accepted if decision.token_id is None else (*accepted, decision.token_id)


def _ways(
    one: RoundRecord, num_accepted: int, proposal: Proposal, stopping: StoppingParams
) -> list[tuple[int, int | None]]:
    """(last accepted node, token after it): all that lead to what the record says the round decided."""
    found: list[tuple[int, int | None]] = []
    shape = proposal.shape
    for node in range(PREFIX, len(proposal)):
        ids = tuple(proposal.token_ids[above] for above in path_to(shape, node))
        if len(ids) != num_accepted or ids != one.committed_ids[:num_accepted]:
            continue
        ends_text = bool(ids) and ids[-1] in stopping.stop_token_ids
        if len(one.committed_ids) == num_accepted + (not ends_text):
            found.append((node, None if ends_text else one.committed_ids[-1]))
    return found
