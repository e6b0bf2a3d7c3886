"""Drafting ahead of the verdict, simulated: when the branches of a stream's round are there.

A build is a pass over the chain and one a draft, over the branches of one stream; it begins once the draft worker knows
which text it follows, and is dropped when the verdict says something else. Simulated builds share passes with drafts
that streams wait for; a real draft worker puts them off, so that under load real hits are fewer and drafts sooner.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.simulator.engine import Clock, Engine, Work


@dataclass(slots=True)
class Build:
    """Branches of `num_drafts` drafts, at the draft worker. `ended`: when they were whole there, ms; infinite: not yet.
    `then`: what is to happen at that moment."""

    engine: Engine
    num_drafts: int
    work: Work
    begun: float
    ended: float = math.inf
    then: Callable[[], None] | None = None

    @property
    def is_whole(self) -> bool:
        return self.ended < math.inf

    @property
    def ms(self) -> float:
        """That it took."""
        return self.ended - self.begun

    def drop(self) -> None:
        if not self.is_whole:
            self.engine.drop(self.work)

    def narrow(self) -> None:
        """From the next pass on one branch alone is grown, since somebody waits for it; the build is not whole yet."""
        if self.work.num_rows == 1:
            return
        done, begun = self.work.done, self.work.end_pass
        num_left = self.engine.drop(self.work)
        if begun and not num_left:
            self.work.done = done  # its last pass is under way
            return
        self.work = Work(1, num_left, self.work.num_context_tokens, done)
        self.engine.submit(self.work)


def begin_build(clock: Clock, engine: Engine, num_branches: int, num_drafts: int, num_context_tokens: int) -> Build:
    """On this draft worker, now: every branch whole."""

    def done(_: Work) -> None:
        build.ended = clock.now
        if build.then is not None:
            build.then()

    build = Build(engine, num_drafts, Work(num_branches, 1 + num_drafts, num_context_tokens, done), clock.now)
    engine.submit(build.work)
    return build
