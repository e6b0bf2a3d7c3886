"""Which workers there are, which serve which model, which may draft for which, and which takes the next stream.

Workers are known for as long as somebody holds them: see `coordinator.fleet.sources`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from coordinator.fleet.deaths import Deaths
from coordinator.fleet.limits import Limits, together
from coordinator.fleet.picking import Draft, Target, best_draft, best_target
from coordinator.fleet.standing import Standing, Standings
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
        self._draft_models = read_pairs(settings.draft_models, "draft_models")
        self._workers: dict[str, WorkerRecord] = {}
        self._limits: dict[str, tuple[float, Limits | None]] = {}
        """By model, and when they were found."""
        self._leaving: list[WorkerRecord] = []
        self._standings = Standings(settings)
        self.deaths = Deaths()
        """Of targets."""
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
        detail = worker.fault() or self._mismatch(worker)
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
        return list(
            dict.fromkeys(w.description.model.model for w in self._of_role(TARGET) if w.description is not None)
        )

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
        num_cached_tokens: int = 0,
        max_draft_tokens: int = 0,
    ) -> WorkerRecord:
        """The healthy worker of these weights for the next stream, see `best_target`. Raises Unavailable.

        cached: tokens of the prompt that workers have probably computed, by address. numerics: fingerprint of the
        worker that had the stream before; empty: none had. standby: address of one that has its text computed.
        num_cached_tokens, max_draft_tokens: of the stream at most. Where some worker that is known has room for them,
        those that have not are left out; where none has, the one that is asked says what is too much.
        """
        serving = self._serving(model)
        known = [w for w in serving if _fingerprint_of(w) == fingerprint]
        known = [w for w in known if w.has_room_for(num_cached_tokens, max_draft_tokens)] or known
        healthy = [w for w in known if w.address not in avoid and self.health(w)[0]]
        best = best_target(
            Target(
                w,
                w.load,
                cached.get(w.address, 0),
                has_drafter=drafter in ("", *_target_drafters(w)),
                same_numerics=numerics in ("", _numerics_of(w)),
                is_standby=w.address == standby,
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
            for w in self._paired(model)
            if w.address not in avoid
            and self.health(w)[0]
            and self.standing(w).takes_streams(now)
            and (drafter in self._usable(w, model) if drafter else self._usable(w, model))
        ]
        return best_draft(Draft(w, w.load, w.network.value(), w.proposal_ms.value()) for w in free)

    def wanted_features(
        self, model: str, target: WorkerRecord, drafter: str = "", read_states: str | None = None
    ) -> str:
        """States that a target is to send, if it offers them; empty: none. `read_states`: those that the stream's draft
        worker reads; None: it has none yet, and those count that `drafter` (empty: any) of some other reads."""
        if read_states is not None:
            return read_states if _offers(target, read_states) else ""
        for worker in self._paired(model):
            if worker.description is None or not self.health(worker)[0]:
                continue
            for name, features in worker.description.drafter_features.items():
                if drafter in ("", name) and _offers(target, features):
                    return features
        return ""

    def healthy(self, model: str) -> list[WorkerRecord]:
        """Workers of both kinds that new streams of the model may go to."""
        return [w for w in (*self._serving(model), *self._paired(model)) if self.health(w)[0]]

    def target_only_drafters(self, model: str) -> tuple[str, ...]:
        """Names that target workers of the model offer and no draft worker does."""
        elsewhere = {name for w in self._paired(model) for name in self._usable(w, model)}
        inside = dict.fromkeys(name for w in self._serving(model) for name in _target_drafters(w))
        return tuple(name for name in inside if name not in elsewhere)

    def limits(self, model: str) -> Limits | None:
        """What its healthy targets can take of our streams; None: there is none now, and nothing is known. As of
        LIMITS_AGE_S ago at most: every request asks, and every end of one."""
        found, now = self._limits.get(model), time.monotonic()
        if found is None or now - found[0] > LIMITS_AGE_S:
            told = (worker.limits() for worker in self._serving(model) if self.health(worker)[0])
            found = self._limits[model] = (now, together(limits for limits in told if limits is not None))
        return found[1]

    def has_healthy_target(self) -> bool:
        return any(self.health(w)[0] for w in self._of_role(TARGET))

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
                self.deaths if role == TARGET else None,
            )
        worker.held_until[holder] = time.monotonic() + lease_s
        return worker

    def held(self, address: str, holder: str) -> WorkerRecord | None:
        """The worker there if `holder` holds it still."""
        worker = self._workers.get(address)
        return worker if worker is not None and holder in worker.held_until else None

    def drain(self, worker: WorkerRecord) -> None:
        """No new streams to this worker."""
        worker.draining = True
        self._on_change()

    def _of_role(self, role: str) -> list[WorkerRecord]:
        return [w for w in self._workers.values() if w.description is not None and w.description.role == role == w.role]

    def _serving(self, model: str) -> list[WorkerRecord]:
        return [w for w in self._of_role(TARGET) if w.description is not None and w.description.model.model == model]

    def _paired(self, model: str) -> list[WorkerRecord]:
        if not self._serving(model):
            return []
        reference = self._reference(model).description
        assert reference is not None
        tokenizer = reference.model.tokenizer_fingerprint
        fingerprint = reference.model.model_fingerprint
        drafts = (w for w in self._of_role(DRAFT) if _tokenizer_of(w) == tokenizer and _reads_states_of(w, fingerprint))
        return [w for w in drafts if self._may_draft_for(w, model)]

    def _may_draft_for(self, draft: WorkerRecord, model: str) -> bool:
        """As far as the settings say; the tokenizer is another matter."""
        wanted = self._draft_models.get(model)
        return wanted is None or (draft.description is not None and draft.description.model.model == wanted)

    def _usable(self, draft: WorkerRecord, model: str) -> tuple[str, ...]:
        """Drafters of a draft worker: those that read states of the target only where some target sends them."""
        if draft.description is None:
            return ()
        reads, serving = draft.description.drafter_features, self._serving(model)
        return tuple(
            name
            for name in draft.description.drafters
            if not reads.get(name) or any(_offers(target, reads[name]) for target in serving)
        )

    def _reference(self, model: str) -> WorkerRecord:
        """The worker whose description stands for the model: a healthy one, if any, else the first. Of those with the
        same weights the one that takes the longest texts."""
        serving = self._serving(model)
        first = next((w for w in serving if not w.fault()), serving[0])
        alike = (w for w in serving if not w.fault() and _fingerprint_of(w) == _fingerprint_of(first))
        return max(alike, key=_context_of, default=first)

    def _served(self, name: str) -> ServedModel:
        reference, drafts = self._reference(name), self._paired(name)
        assert reference.description is not None
        assert reference.text is not None
        targets = [w for w in self._serving(name) if self.health(w)[0]] or [reference]
        inside = [n for w in self._serving(name) for n in _target_drafters(w)]
        offered = {
            "draft workers": tuple(dict.fromkeys(n for w in drafts for n in self._usable(w, name))),
            "target workers": tuple(dict.fromkeys(inside)),
            "coordinator": tuple(self._settings.local_drafters),
        }
        return ServedModel(
            description=reference.description.model,
            codec=reference.text.codec,
            chat_template=reference.text.chat_template,
            max_draft_tokens=min(w.description.capacity.max_draft_tokens for w in (*targets, *drafts) if w.description),
            drafters=tuple(dict.fromkeys(n for names in offered.values() for n in names)),
            offered={who: names for who, names in offered.items() if names},
            may_offer_more=any(worker.description is None for worker in self._workers.values()),
            draft_model=drafts[0].description.model.model if drafts and drafts[0].description else "",
        )

    def _mismatch(self, worker: WorkerRecord) -> str:
        """Why a worker that answers cannot work with the others."""
        if worker.description is None:
            return "not described yet"
        own = worker.description.model
        targets = self._of_role(TARGET)
        if worker.role == TARGET:
            reference = self._reference(own.model).description
            if reference is not None and reference.model.model_fingerprint != own.model_fingerprint:
                return (
                    f"FAILED_PRECONDITION MODEL_MISMATCH: other weights than the other workers of model {own.model!r}"
                )
            return ""
        meant = [t for t in targets if t.description and self._may_draft_for(worker, t.description.model.model)]
        if targets and not meant:
            return f"FAILED_PRECONDITION NOT_PAIRED: draft_models gives every target another draft than {own.model!r}"
        if targets and all(_tokenizer_of(target) != own.tokenizer_fingerprint for target in meant):
            return (
                f"FAILED_PRECONDITION VOCAB_MISMATCH: draft model {own.model!r} has {own.vocab_size} ids and another "
                "tokenizer than every target; give it a model of the target's family"
            )
        return self._unsent(worker, meant)

    def _unsent(self, worker: WorkerRecord, targets: list[WorkerRecord]) -> str:
        """Why a draft worker cannot have the states that its drafters read."""
        assert worker.description is not None
        own = [t for t in targets if t.description and _reads_states_of(worker, t.description.model.model_fingerprint)]
        if targets and not own:
            return "FAILED_PRECONDITION WRONG_TARGET: its head was made for other weights than those of every target"
        if targets and not any(self._usable(worker, t.description.model.model) for t in own if t.description):
            states = next(iter(worker.description.drafter_features.values()), "")
            return (
                "FAILED_PRECONDITION NO_FEATURES: it reads states that no target worker sends: start one with "
                f"--features={states}"
            )
        return ""

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
        loop = asyncio.get_running_loop()
        while True:
            slept_at = loop.time()
            await asyncio.sleep(SWEEP_INTERVAL_S)
            stood_still_s = loop.time() - slept_at - 2 * SWEEP_INTERVAL_S
            now = time.monotonic()
            for worker in list(self._workers.values()):
                if stood_still_s > 0:
                    worker.held_until = {holder: until + stood_still_s for holder, until in worker.held_until.items()}
                worker.held_until = {holder: until for holder, until in worker.held_until.items() if until > now}
                if not worker.held_until:
                    self._remove(worker)
            for worker in [w for w in self._leaving if not w.num_sessions]:
                self._leaving.remove(worker)
                await worker.close()


def _target_drafters(worker: WorkerRecord) -> tuple[str, ...]:
    described = worker.description.target_drafters if worker.description is not None else ()
    return tuple(name for drafter in described for name in drafter.names)


def _offers(target: WorkerRecord, features: str) -> bool:
    """Whether a target worker sends these states."""
    offered = target.description.features if target.description is not None else ""
    return set(features.split(",")) <= set(offered.split(","))


def _reads_states_of(draft: WorkerRecord, fingerprint: str) -> bool:
    """Whether drafters of this worker may draft for a target of these weights; those that read no states always may."""
    wanted = draft.description.target_fingerprints if draft.description is not None else ()
    return not wanted or fingerprint in wanted


def _numerics_of(worker: WorkerRecord) -> str:
    return worker.description.model.numerics_fingerprint if worker.description is not None else ""


def _fingerprint_of(worker: WorkerRecord) -> str:
    return worker.description.model.model_fingerprint if worker.description is not None else ""


def _context_of(worker: WorkerRecord) -> int:
    return worker.description.model.context_length if worker.description is not None else 0


def _tokenizer_of(worker: WorkerRecord) -> str:
    return worker.description.model.tokenizer_fingerprint if worker.description is not None else ""
