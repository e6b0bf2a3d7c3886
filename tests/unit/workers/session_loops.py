"""Worker sessions driven by hand: table models, a cache that is a plain list, and the round loop of a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draft_worker.session import DraftSession
from outrider.drafting.proposal import EMPTY, Proposal
from outrider.drafting.tree import path
from outrider.lm.interface import Forward, ForwardResult, run_program
from outrider.lm.toy import ToyModel, parse_toy
from outrider.sampling.params import AcceptanceRule, Finish, SamplingParams, StoppingParams
from outrider.serving.messages import DraftOpening, Header, TargetOpening, Verdict
from outrider.serving.session_log import SessionCounters
from target_worker.losslessness import NO_METER, LosslessnessMeter
from target_worker.session import TargetSession

PROMPT = (3, 1, 2)
GREEDY = SamplingParams(temperature=0.0)
RULES = {
    "greedy": GREEDY,
    "token": SamplingParams(acceptance=AcceptanceRule.TOKEN, seed=7),
    "block": SamplingParams(acceptance=AcceptanceRule.BLOCK, seed=7),
    "coupled": SamplingParams(acceptance=AcceptanceRule.COUPLED, seed=7),
}
BUSY = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.2, "logit_bias": {4: 1.5, 5: -3.0}}


def toy(text: str = "vocab=16,seed=1") -> ToyModel:
    return ToyModel(parse_toy(f"toy:{text}"))


class ListSequence:
    """A cache that holds ids and nothing else, and refuses what the engine's refuses."""

    def __init__(self, max_length: int) -> None:
        self.token_ids: list[int] = []
        self.parents: tuple[int, ...] = ()
        self.max_length = max_length
        self.num_truncated = 0

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self.token_ids)
        self.num_truncated += len(self.token_ids) - length
        self.parents = self.parents[: max(0, length - (len(self.token_ids) - len(self.parents)))]
        del self.token_ids[length:]

    def keep_path(self, indices: Sequence[int]) -> None:
        start = len(self.token_ids) - len(self.parents)
        assert list(indices) == list(path(self.parents, indices[-1] if indices else -1)), "no path from a root"
        self.token_ids[start:] = [self.token_ids[start + index] for index in indices]
        self.parents = ()


@dataclass
class HandDriver:
    """Answers a program's forwards from what the cache holds then: `rows(ids)` is the row after the prefix `ids`."""

    rows: Callable[[Sequence[int]], np.ndarray]
    num_forwards: int = 0
    num_rows: int = 0

    def run(self, program: Any) -> Any:
        return run_program(program, self.forward)

    def forward(self, request: Forward) -> ForwardResult:
        sequence: Any = request.sequence
        assert len(request.token_ids) >= max(1, request.num_logits)
        sequence.token_ids.extend(request.token_ids)
        if hasattr(sequence, "parents"):
            assert request.parents or not sequence.parents, "a tree was left in the cache"
            sequence.parents = (*sequence.parents, *request.parents)
        assert len(sequence.token_ids) <= sequence.max_length, "the session outgrew its reservation"
        self.num_forwards += 1
        self.num_rows += len(request.token_ids)
        total = len(sequence.token_ids)
        wanted = range(total - request.num_logits + 1, total + 1)
        contexts = [self._context(sequence, n) for n in wanted]
        logits = np.stack([self.rows(ids) for ids in contexts]) if wanted else np.empty((0, 1))
        return ForwardResult(logits, queue_us=1, compute_us=2, num_batch_rows=len(request.token_ids))

    def _context(self, sequence: Any, length: int) -> list[int]:
        """What the row of the token before `length` sees: of a tree its ancestors only."""
        ids, start = sequence.token_ids, len(sequence.token_ids) - len(sequence.parents)
        if length <= start:
            return ids[:length]
        return [*ids[:start], *(ids[start + node] for node in path(sequence.parents, length - start - 1))]


def target_session(
    model: Any,
    sampling: SamplingParams = GREEDY,
    stopping: StoppingParams | None = None,
    *,
    context_length: int = 4096,
    cap: int = 64,
    counters: SessionCounters | None = None,
    meter: LosslessnessMeter = NO_METER,
    **fields: Any,
) -> TargetSession:
    values: dict[str, Any] = {"epoch": 1, "prompt_ids": PROMPT, "max_draft_tokens": 64, **fields}
    opening = TargetOpening(sampling=sampling, stopping=stopping or StoppingParams(max_tokens=40), **values)
    session = TargetSession(
        opening,
        vocab_size=model.vocab_size,
        context_length=context_length,
        max_draft_tokens=cap,
        counters=counters,
        meter=meter,
    )
    session.sequence = ListSequence(session.reserved_length)
    return session


def draft_session(
    model: Any,
    sampling: SamplingParams = GREEDY,
    stopping: StoppingParams | None = None,
    *,
    context_length: int = 4096,
    cap: int = 64,
    drafters: Sequence[str] = ("model", "tree"),
    width: int = 2,
    **fields: Any,
) -> DraftSession:
    opening = DraftOpening(
        **{"epoch": 1, "prompt_ids": PROMPT, **fields},
        sampling=sampling,
        stopping=stopping or StoppingParams(max_tokens=40),
    )
    session = DraftSession(
        opening,
        vocab_size=model.vocab_size,
        context_length=context_length,
        drafters=drafters,
        max_draft_tokens=cap,
        width=width,
    )
    if session.needs_sequence("model"):
        session.sequence = ListSequence(session.reserved_length)
    return session


@dataclass
class Rounds:
    """Runs a stream to its end: one draft, one verify a round, exactly as many drafts as asked for."""

    target: TargetSession
    draft: DraftSession | None
    target_driver: HandDriver
    draft_driver: HandDriver
    num_draft_tokens: Callable[[int], int]
    drafter: str = "model"
    mangle: Callable[[Proposal], Proposal] = lambda proposal: proposal
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        return [token_id for verdict in self.verdicts for token_id in verdict.committed_ids]

    @property
    def num_drafted(self) -> int:
        return sum(verdict.num_draft_tokens for verdict in self.verdicts)

    @property
    def num_accepted(self) -> int:
        return sum(verdict.num_accepted for verdict in self.verdicts)

    def run(self) -> list[int]:
        self._take(self.target_driver.run(self.target.open()))
        while self.target.finish is Finish.NONE:
            header, new_ids = self.target.log.header, self.verdicts[-1].committed_ids
            proposal = EMPTY
            if self.draft is not None:
                wanted = self.num_draft_tokens(len(self.verdicts))
                program = self.draft.advance(header, new_ids, wanted, self.drafter)
                proposal = self.mangle(self.draft_driver.run(program) or EMPTY)
            self._take(self.target_driver.run(self.target.verify(header, (), proposal)))
        return self.text

    def _take(self, verdict: Verdict) -> None:
        assert len(verdict.committed_ids) == len(verdict.origins) >= 1
        assert list(self.target.sequence.token_ids) == self.target.log.ids[:-1]
        self.verdicts.append(verdict)


def rounds(
    target: ToyModel,
    draft: ToyModel | None,
    sampling: SamplingParams,
    gamma: int | Callable[[int], int],
    stopping: StoppingParams | None = None,
    **fields: Any,
) -> Rounds:
    return Rounds(
        target_session(target, sampling, stopping),
        draft_session(draft, sampling, stopping) if draft is not None else None,
        HandDriver(target.logits_for),
        HandDriver((draft or target).logits_for),
        gamma if callable(gamma) else lambda _: gamma,
        **fields,
    )


def plain_text(target: ToyModel, sampling: SamplingParams, stopping: StoppingParams | None = None) -> list[int]:
    return rounds(target, None, sampling, 0, stopping).run()


def header_after(session: Any, committed_ids: Sequence[int]) -> Header:
    """The header once `committed_ids` are appended to the session's log."""
    from outrider.sampling.noise import hash_ids

    log = session.log
    return Header(log.epoch, len(log.ids) + len(committed_ids), hash_ids(committed_ids, log.prefix_hash))
