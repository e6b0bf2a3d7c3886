"""Which workers there are, in what state, which models they serve, and which of them takes the next stream.

Workers are known for as long as somebody holds them: see `coordinator.fleet.sources`. Which of them suit one another is
judged in `coordinator.fleet.pairing`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Container, Iterable, Mapping
from types import MappingProxyType

from coordinator.fleet.deaths import Deaths
from coordinator.fleet.limits import Limits, together
from coordinator.fleet.pairing import Pairing, sends, target_drafters
from coordinator.fleet.picking import Draft, Target, best_draft, best_target
from coordinator.fleet.standing import Standing, Standings
from coordinator.fleet.trials import Trials
from coordinator.fleet.worker import PROBE_TIMEOUT_S, WorkerRecord
from coordinator.model import ServedModel
from coordinator.names import read_aliases, read_pairs
from outrider.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from outrider.serving.tls import fleet_dialer
from outrider.serving.worker_calls import DRAFT, TARGET
from outrider.settings import CoordinatorSettings

RETRY_DELAY_S = 1.0
SWEEP_INTERVAL_S = 0.5
LIMITS_AGE_S = 0.1
NOTHING_CACHED: Mapping[str, int] = MappingProxyType({})


class WorkerDirectory:
    """Must be used on one event loop. `on_change` is called when the health of any worker may have changed.

    Raises InvalidArgument on settings that name models in a way that cannot be read.
    """

    def __init__(self, settings: CoordinatorSettings, on_change: Callable[[], None] = lambda: None) -> None:
        self._settings = settings
        self._dialer = fleet_dialer(settings)
        self._tell_change = on_change
        self._next_change = asyncio.Event()
        self._aliases = read_aliases(settings.model_aliases)
        self._workers: dict[str, WorkerRecord] = {}
        self._pairing = Pairing(self._workers, read_pairs(settings.draft_models, "draft_models"))
        self._limits: dict[str, tuple[float, Limits | None]] = {}
        """By model, and when they were found."""
        self._leaving: list[WorkerRecord] = []
        self._standings = Standings(settings)
        self.deaths, self.trials = Deaths(), Trials()
        """Of targets."""
        self.draft_deaths = Deaths()
        self._sweeper: asyncio.Task[None] | None = None
        self._probe_timeout_s = max(PROBE_TIMEOUT_S, settings.peer_timeout_s)

    async def start(self) -> None:
        """Asks every worker that is held by now once, so that what is up can serve at once."""
        self._sweeper = asyncio.create_task(self._sweep())
        probes = [asyncio.create_task(worker.first_probe.wait()) for worker in self._workers.values()]
        if probes:
            _, late = await asyncio.wait(probes, timeout=2 * self._probe_timeout_s)
            for probe in late:
                probe.cancel()

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        await asyncio.gather(*(worker.close() for worker in (*self._workers.values(), *self._leaving)))

    def next_change(self) -> asyncio.Event:
        """Set once the health of any worker may have changed."""
        return self._next_change

    def workers(self) -> Iterable[WorkerRecord]:
        return self._workers.values()

    def health(self, worker: WorkerRecord) -> tuple[bool, str]:
        """Whether new streams may go there, and why not."""
        detail = worker.fault() or self._pairing.mismatch(worker)
        if worker.role == DRAFT and not detail:
            detail = self.standing(worker).quarantine.reason
        return not detail, detail

    def standing(self, worker: WorkerRecord) -> Standing:
        """What streams have had of a draft worker: of the process that answers there now."""
        standing = self._standings.of(worker.address)
        if worker.description is not None:
            standing.quarantine.meet(worker.description.incarnation)
        return standing

    def model_names(self) -> list[str]:
        return list(dict.fromkeys(w.told.model.model for w in self._pairing.of_role(TARGET)))

    def model_aliases(self) -> dict[str, str]:
        """Served model by alias. Of a served model and an alias of one name, the model is meant."""
        names = self.model_names()
        return {alias: name for alias, name in self._aliases.items() if name in names and alias not in names}

    def model(self, name: str) -> ServedModel:
        """By name or alias. Raises NotFound, InvalidArgument (no name, several models), Unavailable (no target yet)."""
        names, aliases = self.model_names(), self.model_aliases()
        if not names:
            raise self._no_target(f"no target worker has answered yet ({self._target_faults()})")
        known = ", ".join([*names, *(f"{alias} (= {model})" for alias, model in aliases.items())])
        if not name and len(names) > 1:
            raise InvalidArgument(f"model is empty, name one of {known}", field="model")
        name = aliases.get(name, name)
        if name and name not in names:
            raise NotFound(f"model {name[:80]!r} is not served; there is {known}", field="model")
        return self._served(name or names[0])

    def pick_target(
        self,
        model: str,
        fingerprint: str,
        avoid: frozenset[str] = frozenset(),
        drafter: str = "",
        *,
        cached: Mapping[str, int] = NOTHING_CACHED,
        numerics: str = "",
        standby: str = "",
        others_at: Container[str] = (),
        num_cached_tokens: int = 0,
        max_draft_tokens: int = 0,
    ) -> WorkerRecord:
        """The healthy worker of these weights for the next stream, see `best_target`. Raises Unavailable.

        cached: tokens of the prompt that workers have probably computed, by address. numerics: fingerprint of the
        worker that had the stream before; empty: none had. standby: address of one that has its text computed.
        others_at: addresses of those that have other choices of the request, which it joins where there is room.
        num_cached_tokens, max_draft_tokens: of the stream at most. Where some worker that is known has room for them,
        those that have not are left out; where none has, the one that is asked says what is too much.
        """
        serving = self._pairing.serving(model)
        known = [w for w in serving if w.told.model.model_fingerprint == fingerprint]
        known = [w for w in known if w.has_room_for(num_cached_tokens, max_draft_tokens)] or known
        healthy = [w for w in known if w.address not in avoid and self.health(w)[0]]
        best = best_target(
            Target(
                w,
                w.load,
                cached.get(w.address, 0),
                has_drafter=drafter in ("", *target_drafters(w)),
                same_numerics=numerics in ("", w.told.model.numerics_fingerprint),
                is_standby=w.address == standby,
                has_others=w.address in others_at and w.takes_now(num_cached_tokens),
            )
            for w in healthy
        )
        if best is None:
            details = "; ".join(
                f"{w.address}: {self.health(w)[1] or ('just failed' if w in known else 'too small for it')}"
                for w in serving
            )
            raise self._no_target(f"no target worker of model {model!r} can take a stream now ({details})")
        return best

    def pick_draft(self, model: str, drafter: str = "", avoid: frozenset[str] = frozenset()) -> WorkerRecord | None:
        """The healthy paired worker not in `avoid` that offers `drafter` for the next stream, see `best_draft`; None
        when there is none. One whose circuit is open, or that a stream is trying, takes none."""
        now = time.monotonic()
        free = [
            w
            for w in self._pairing.paired(model)
            if w.address not in avoid
            and self.health(w)[0]
            and self.standing(w).takes_streams(now)
            and any(drafter in ("", name) for name in self._pairing.usable(w, model))
        ]
        return best_draft(Draft(w, w.load, w.network.value(), w.proposal_ms.value()) for w in free)

    def wanted_features(
        self, model: str, target: WorkerRecord, drafter: str = "", read_states: str | None = None
    ) -> str:
        """States that a target is to send, if it offers them; empty: none. `read_states`: those that the stream's draft
        worker reads; None: it has none yet, and those count that `drafter` (empty: any) of some other reads."""
        if read_states is not None:
            return read_states if sends(target, read_states) else ""
        for worker in self._pairing.paired(model):
            if not self.health(worker)[0]:
                continue
            for name, features in worker.told.drafter_features.items():
                if drafter in ("", name) and sends(target, features):
                    return features
        return ""

    def healthy(self, model: str) -> list[WorkerRecord]:
        """Workers of both kinds that new streams of the model may go to."""
        return [w for w in (*self._pairing.serving(model), *self._pairing.paired(model)) if self.health(w)[0]]

    def target_only_drafters(self, model: str) -> tuple[str, ...]:
        """Names that target workers of the model offer and no draft worker does."""
        elsewhere = {name for w in self._pairing.paired(model) for name in self._pairing.usable(w, model)}
        return tuple(name for name in self._pairing.inside_targets(model) if name not in elsewhere)

    def limits(self, model: str) -> Limits | None:
        """What its healthy targets can take of our streams; None: there is none now, and nothing is known. As of
        LIMITS_AGE_S ago at most: every request asks, and every end of one."""
        found, now = self._limits.get(model), time.monotonic()
        if found is None or now - found[0] > LIMITS_AGE_S:
            told = (worker.limits() for worker in self._pairing.serving(model) if self.health(worker)[0])
            found = self._limits[model] = (now, together(told))
        return found[1]

    def has_healthy_target(self) -> bool:
        return any(self.health(w)[0] for w in self._pairing.of_role(TARGET))

    def hold(self, address: str, role: str, holder: str, lease_s: float = math.inf) -> WorkerRecord:
        """`holder` knows of a worker there, for `lease_s` from now on. Repeat it to renew.

        Raises FailedPrecondition when somebody else holds the address as a worker of the other role.
        """
        worker = self._workers.get(address)
        if worker is not None and worker.role != role:
            now = time.monotonic()
            others = [name for name, until in worker.held_until.items() if name != holder and until > now]
            if others:
                raise FailedPrecondition(
                    f"address {address} is listed as a {worker.role} worker in {others[0]}, it cannot be a {role} "
                    "worker too",
                    field="role",
                    reason="ROLE_MISMATCH",
                )
            self._remove(worker)
            worker = None
        if worker is None:
            worker = self._workers[address] = WorkerRecord(
                address,
                role,
                self._on_change,
                self._probe_timeout_s,
                self._dialer,
                self._settings.max_request_s,
                self.deaths if role == TARGET else self.draft_deaths,
            )
        worker.held_until[holder] = time.monotonic() + lease_s
        return worker

    async def answers_as(self, address: str, incarnation: str, timeout_s: float) -> bool:
        """Whether that process still answers at the address, as far as a worker is known there."""
        leaving = {worker.address: worker for worker in self._leaving}
        worker = self._workers.get(address) or leaving.get(address)
        return worker is not None and await worker.answers_as(incarnation, timeout_s)

    def held(self, address: str, holder: str) -> WorkerRecord | None:
        """The worker there if `holder` holds it still."""
        worker = self._workers.get(address)
        return worker if worker is not None and holder in worker.held_until else None

    def drain(self, worker: WorkerRecord) -> None:
        """No new streams to this worker."""
        worker.draining = True
        self._on_change()

    def _served(self, name: str) -> ServedModel:
        reference, drafts = self._pairing.reference(name), self._pairing.paired(name)
        assert reference.text is not None
        targets = [w for w in self._pairing.serving(name) if self.health(w)[0]] or [reference]
        trusted = [w for w in drafts if not self.standing(w).quarantine.reason]
        offered = {
            "draft workers": tuple(dict.fromkeys(n for w in drafts for n in self._pairing.usable(w, name))),
            "target workers": self._pairing.inside_targets(name),
            "coordinator": tuple(self._settings.local_drafters),
        }
        return ServedModel(
            description=reference.told.model,
            codec=reference.text.codec,
            chat_template=reference.text.chat_template,
            max_draft_tokens=min(w.told.capacity.max_draft_tokens for w in (*targets, *trusted)),
            drafters=tuple(dict.fromkeys(n for names in offered.values() for n in names)),
            offered={who: names for who, names in offered.items() if names},
            may_offer_more=any(worker.description is None for worker in self._workers.values()),
            draft_model=drafts[0].told.model.model if drafts else "",
        )

    def _target_faults(self) -> str:
        targets = [worker for worker in self._workers.values() if worker.role == TARGET]
        return "; ".join(f"{w.address}: {w.fault()}" for w in targets) or "none is listed and none has registered"

    def _no_target(self, text: str) -> Unavailable:
        return Unavailable(text, reason="NO_TARGET_WORKER", retry_delay_s=RETRY_DELAY_S)

    def _on_change(self) -> None:
        self._next_change.set()
        self._next_change = asyncio.Event()
        self._tell_change()

    def _remove(self, worker: WorkerRecord) -> None:
        self._workers.pop(worker.address, None)
        self._leaving.append(worker)
        self._on_change()

    async def _sweep(self) -> None:
        """Forgets workers that nobody holds any more, and closes those that nobody uses either. A lease that could not
        be renewed because this process stood still is longer by that."""
        while True:
            slept_at = time.perf_counter()
            await asyncio.sleep(SWEEP_INTERVAL_S)
            stood_still_s = max(0.0, time.perf_counter() - slept_at - 2 * SWEEP_INTERVAL_S)
            now = time.monotonic()
            for worker in list(self._workers.values()):
                held_until = {holder: until + stood_still_s for holder, until in worker.held_until.items()}
                worker.held_until = {holder: until for holder, until in held_until.items() if until > now}
                if not worker.held_until:
                    self._remove(worker)
            for worker in [w for w in self._leaving if not w.num_sessions]:
                self._leaving.remove(worker)
                await worker.close()
