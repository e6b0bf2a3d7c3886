"""What workers tell of themselves: drafters, and what they measured, which stands until it was seen here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coordinator.gamma.costs import TOLD_WEIGHT, VERIFY_SLOPE
from coordinator.gamma.head_trees import MAX_WIDTH
from coordinator.gamma.policy import Candidate
from coordinator.gamma.shared import PairEstimates
from outrider.lm.timing import PassTiming
from outrider.server_info import TargetDrafter
from outrider.serving.worker_calls import TARGET, WorkerDescription

TREE, CHAIN = "tree", "model"
"""A draft worker's tree drafter draws the chain that its model drafter would, with more guesses beside each token."""
MAX_TREE_WIDTH = 4
MIN_CHANCE = 0.02
CATCH_UP_ROWS = 64
"""Of a pass behind a plain run."""
MIN_PASSES = 8
"""A line through fewer passes says little."""


def draft_candidates(description: WorkerDescription | None) -> tuple[Candidate, ...]:
    """Drafters of a draft worker."""
    if description is None:
        return ()
    fingerprint = description.model.model_fingerprint
    return tuple(
        Candidate(name, fingerprint, max_width=MAX_TREE_WIDTH, trunk=CHAIN)
        if name == TREE
        else Candidate(name, fingerprint, max_branches=description.max_ahead_branches if name == CHAIN else 0)
        for name in description.drafters
    )


def target_candidates(description: WorkerDescription | None) -> Iterator[Candidate]:
    """Drafters inside a target worker."""
    for drafter in description.target_drafters if description is not None else ():
        yield _inside(drafter)
        if drafter.draws_trees:
            yield _trees_of(drafter)


def tell(shared: PairEstimates, description: WorkerDescription, *, num_context_tokens: int) -> None:
    """Costs of passes over one sequence of this length, and first guesses of how often heads are right."""
    line = next((t for t in description.timings if _is_decoding(t)), None)
    if description.role != TARGET:
        prefill = next((t for t in description.timings if t.prefill and t.num_passes >= MIN_PASSES), None)
        for candidate in draft_candidates(description):
            draft = shared.costs.draft(candidate)
            if line is not None:
                draft.work.tell(0.0, line.ms(1, num_context_tokens))
            if prefill is not None:
                draft.told_catch_up_ms = prefill.ms(CATCH_UP_ROWS, num_context_tokens) / CATCH_UP_ROWS
        return
    if line is not None:
        pass_ms = line.ms(1, num_context_tokens)
        # passes of one size say nothing of rows
        ms_per_row = line.ms_per_row if line.max_rows > line.min_rows else VERIFY_SLOPE * pass_ms
        shared.costs.verify.tell(pass_ms, ms_per_row, _sizes(description, num_context_tokens))
        shared.costs.context_ms = line.ms_per_context_token * num_context_tokens
    for drafter in description.target_drafters:
        candidate = _inside(drafter)
        if drafter.first_draft_ms > 0:
            base_ms = max(0.0, drafter.first_draft_ms - drafter.next_draft_ms)
            for drawn in (candidate, _trees_of(drafter)) if drafter.draws_trees else (candidate,):
                shared.costs.draft(drawn).work.tell(base_ms, drafter.next_draft_ms)
        if drafter.agreement is not None:
            shared.expect(candidate, drafter.depth_agreement or (drafter.agreement,))
        shared.expect_siblings(candidate, _given_the_others_are_wrong(drafter.rank_agreement))


def _sizes(description: WorkerDescription, num_context_tokens: int) -> list[tuple[float, float, float]]:
    """(rows but one, ms, weight) of passes under every load that was seen, over sequences of this length."""
    return [
        (rows - 1, line.ms(rows, num_context_tokens * (line.min_sequences + line.max_sequences) / 2), TOLD_WEIGHT)
        for line in description.timings
        if not line.prefill and line.num_passes >= MIN_PASSES
        for rows in {line.min_rows, line.max_rows}
    ]


def _inside(drafter: TargetDrafter) -> Candidate:
    return Candidate(drafter.name, drafter.source, on_target=True, max_draft_tokens=drafter.max_draft_tokens)


def _trees_of(drafter: TargetDrafter) -> Candidate:
    return Candidate(
        drafter.names[-1],
        drafter.source,
        on_target=True,
        max_width=MAX_WIDTH,
        trunk=drafter.name,
        max_depth=drafter.max_draft_tokens,
    )


def _given_the_others_are_wrong(shares: Sequence[float]) -> list[float]:
    """Of shares of the first, second, ... guess: each but the first over what those before it leave, and not less than
    a probe of some hundred tokens can tell."""
    left, found = 1.0, []
    for share in shares:
        found.append(min(1.0, max(MIN_CHANCE, share / left if left > 0 else 0.0)))
        left -= share
    return found[1:]


def _is_decoding(timing: PassTiming) -> bool:
    return not timing.prefill and timing.min_sequences == 1 and timing.num_passes >= MIN_PASSES
