"""What a soak does, as pure functions of its seed: the requests, and the faults that they meet.

Faults are keyed by tokens delivered to clients, never by the time of day: a slow machine meets the same faults at the
same places of its work. Where nothing is delivered any more, since the fault itself is in the way, a limit in seconds
ends it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NUM_COORDINATORS, NUM_TARGETS, NUM_DRAFTS = 2, 2, 2
COORDINATORS = tuple(f"coordinator-{i}" for i in range(NUM_COORDINATORS))
TARGETS = tuple(f"target-{i}" for i in range(NUM_TARGETS))
DRAFTS = tuple(f"draft-{i}" for i in range(NUM_DRAFTS))
SERVICES = (*TARGETS, *DRAFTS, *COORDINATORS)
CLIENTS = "clients"

VOCAB = 24
MAX_TOKENS = 160
SHARED_REQUEST_IDS = tuple(f"shared-{i}" for i in range(3))
STORM_SIZE = 20


@dataclass(frozen=True, slots=True)
class Request:
    """One request and how its client behaves."""

    name: str
    """Of the request in the plan: two of one seed and name are equal."""
    prompt: tuple[int, ...]
    options: Mapping[str, Any]
    """Of `outrider.Client.generate`."""
    coordinator: int
    """Where a client that resumes by hand goes first."""
    resumes_by_hand: bool = False
    """Its client speaks the contract itself; others leave it to `outrider.Client`."""
    cancel_after: int | None = None
    """Its client hangs up once it has so many tokens; 0: once the request has started."""
    pause_s: float = 0.0
    """Its client takes so long over each chunk."""
    stall: tuple[int, float] = (0, 0.0)
    """With so many tokens its client stops reading for so many seconds."""

    @property
    def is_slow(self) -> bool:
        return bool(self.pause_s or self.stall[1])


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, or several at once."""

    index: int
    kind: str
    victims: tuple[str, ...] = ()
    """Services that are killed, frozen or drained."""
    links: tuple[tuple[str, str], ...] = ()
    """(who calls, who is called)."""
    after_tokens: int = 0
    """It comes so many delivered tokens after the fault before it was over."""
    lasts_tokens: int = 0
    """It is over (killed services start again) after so many tokens more,"""
    limit_s: float = 0.0
    """or so many seconds, whichever comes first."""
    delay_s: float = 0.0
    """How slow a slow link is."""
    requests: tuple[Request, ...] = field(default=(), repr=False)
    """Of a cancel storm."""


KILL, FLAP, FREEZE, FREEZE_LONG, DRAIN, ROLL = "kill", "flap", "freeze", "freeze-long", "drain", "roll"
CUT, HOLD, SLOW, SILENT = "cut", "hold", "slow", "silent"
HALF_OPEN_COORDINATOR, CANCEL_STORM = "half-open-coordinator", "cancel-storm"

SHORT_DECK: tuple[tuple[str, str], ...] = (
    (KILL, "target"),
    (FREEZE_LONG, "target"),
    (KILL, "coordinator"),
    (KILL, "draft"),
    (HOLD, "link"),
    (DRAIN, "target"),
    (HALF_OPEN_COORDINATOR, ""),
    (CANCEL_STORM, ""),
    (FREEZE, "draft"),
    (CUT, "link"),
)
"""(kind, of what). A deck is shuffled and gone through, then shuffled anew: every kind comes, and in every order."""
LONG_DECK: tuple[tuple[str, str], ...] = (
    *SHORT_DECK,
    (KILL, "target"),
    (KILL, "target"),
    (KILL, "draft"),
    (KILL, "coordinator"),
    (KILL, "target+draft"),
    (KILL, "draft+draft"),
    (KILL, "draft+draft+coordinator"),
    (KILL, "target+target"),
    (FLAP, "target"),
    (FLAP, "draft"),
    (ROLL, ""),
    (FREEZE, "target"),
    (FREEZE, "coordinator"),
    (FREEZE_LONG, "draft"),
    (FREEZE_LONG, "target+draft"),
    (FREEZE_LONG, "target+target"),
    (DRAIN, "draft"),
    (DRAIN, "coordinator"),
    (SLOW, "link"),
    (SILENT, "link"),
    (CUT, "client"),
    (HOLD, "client"),
    (SILENT, "client"),
)


def fault(seed: int, index: int, deck: tuple[tuple[str, str], ...]) -> Fault:
    """The fault number `index`, from 0 on."""
    number, place = divmod(index, len(deck))
    kind, whom = random.Random(f"{seed}/deck/{number}").sample(deck, len(deck))[place]
    rng = random.Random(f"{seed}/fault/{index}")
    when: dict[str, Any] = {
        "after_tokens": rng.randrange(30, 200),
        "lasts_tokens": rng.randrange(1, 150),
        "limit_s": rng.uniform(0.2, 1.5),
    }
    if kind in (CUT, HOLD, SLOW, SILENT):
        caller = CLIENTS if whom == "client" else rng.choice(COORDINATORS)
        called = rng.choice(COORDINATORS if whom == "client" else (*TARGETS, *DRAFTS))
        if kind == HOLD:
            when["limit_s"] = rng.choice((0.3, 3.0))
        return Fault(index, kind, links=((caller, called),), delay_s=rng.choice((0.005, 0.05)), **when)
    if kind == CANCEL_STORM:
        storm = tuple(_cancelled(request(seed, f"storm-{index}-{i}"), rng) for i in range(STORM_SIZE))
        return Fault(index, kind, requests=storm, **when)
    if kind == HALF_OPEN_COORDINATOR:
        victim = rng.choice(COORDINATORS)
        return Fault(index, kind, (victim,), tuple((victim, worker) for worker in (*TARGETS, *DRAFTS)), **when)
    if kind == FREEZE_LONG:
        when |= {"lasts_tokens": MAX_TOKENS * 1000, "limit_s": rng.uniform(3.0, 4.5)}
    if kind == ROLL:
        return Fault(index, kind, tuple(rng.sample(SERVICES, len(SERVICES))), **when)
    return Fault(index, kind, _victims(whom, rng), **when)


def request(seed: int, name: str) -> Request:
    """The request of that name."""
    rng = random.Random(f"{seed}/request/{name}")
    options: dict[str, Any] = {"max_tokens": rng.randrange(20, MAX_TOKENS + 1), "priority": rng.randrange(3)}
    options |= _sampling(rng) | _stopping(rng, options["max_tokens"]) | _speculation(rng)
    if rng.random() < 0.15:
        options["logprobs"] = True
    if rng.random() < 0.2:
        options["request_id"] = rng.choice(SHARED_REQUEST_IDS)
    behaviour: dict[str, Any] = {"resumes_by_hand": rng.random() < 0.4}
    if not behaviour["resumes_by_hand"] and rng.random() < 0.15:
        options["n"] = rng.choice((2, 3))
    match rng.randrange(12):
        case 0:
            behaviour["pause_s"] = rng.uniform(0.005, 0.04)
        case 1:
            behaviour["stall"] = (rng.randrange(1, 15), rng.uniform(0.5, 2.0))
        case 2 if "n" not in options:
            behaviour["cancel_after"] = rng.randrange(0, options["max_tokens"])
    prompt = (*rng.choice(_beginnings(seed)), *(rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 5, 40)))))
    return Request(name, prompt, options, rng.randrange(NUM_COORDINATORS), **behaviour)


def _beginnings(seed: int) -> list[tuple[int, ...]]:
    """Prompts begin alike, so that caches of targets and drafts are shared."""
    rng = random.Random(f"{seed}/beginnings")
    return [(), (), *(tuple(rng.randrange(VOCAB) for _ in range(length)) for length in (50, 120))]


def _sampling(rng: random.Random) -> dict[str, Any]:
    """Greedy, COUPLED, or by the p/q rules; half of these with a seed of the client's."""
    kind = rng.choices(("greedy", "coupled", "token", "block"), (3, 4, 1, 2))[0]
    options: dict[str, Any] = {"temperature": 0.0 if kind == "greedy" else rng.choice((0.7, 1.0, 1.3))}
    if kind == "coupled":
        options["seed"] = rng.getrandbits(64)
    elif kind != "greedy":
        options["acceptance"] = kind
        if rng.random() < 0.5:
            options["seed"] = rng.getrandbits(64)
    extras: tuple[tuple[str, Any], ...] = (
        ("top_k", rng.randrange(3, 9)),
        ("top_p", 0.9),
        ("min_p", 0.02),
        ("repetition_penalty", 1.2),
        ("presence_penalty", 0.4),
        ("frequency_penalty", 0.3),
        ("logit_bias", {rng.randrange(VOCAB): 1.5}),
    )
    return options | {name: value for name, value in extras if rng.random() < 0.15}


def _stopping(rng: random.Random, max_tokens: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.2:
        options["stop_token_ids"] = [rng.randrange(VOCAB)]
        options["min_tokens"] = rng.randrange(0, max_tokens)
    if rng.random() < 0.2:
        first = ord("!")
        options["stop"] = ["".join(chr(first + rng.randrange(VOCAB)) for _ in range(2))]
        options["include_stop_str_in_output"] = rng.random() < 0.5
    return options


def _speculation(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"drafter": rng.choice(("auto", "auto", "model", "model", "lookup", "suffix", "head"))}
    match rng.randrange(6):
        case 0:
            options["num_speculative_tokens"] = 0
        case 1 | 2 | 3:
            options["num_speculative_tokens"] = rng.choice((1, 3, 6))
        case 4:
            options["max_speculative_tokens"] = 4
    return options


def _cancelled(one: Request, rng: random.Random) -> Request:
    options = {name: value for name, value in one.options.items() if name != "n"}
    return dataclasses.replace(
        one, options=options, cancel_after=rng.choice((0, 0, 1, 5, 30)), pause_s=0.0, stall=(0, 0.0)
    )


def _victims(whom: str, rng: random.Random) -> tuple[str, ...]:
    """`target+draft`: one of each; `target+target`: two of them."""
    pools = {"target": list(TARGETS), "draft": list(DRAFTS), "coordinator": list(COORDINATORS)}
    for pool in pools.values():
        rng.shuffle(pool)
    return tuple(pools[role].pop() for role in whom.split("+"))
