"""What sessions' heads hold: never more than there is, taken from whoever was idle longest."""

import numpy as np
from conftest import scaled

from draft_worker.head_memory import HeadMemory


class Session:
    def __init__(self):
        self.held, self.closed, self.num_evicted = 0, False, 0

    def evict(self):
        self.held, self.num_evicted = 0, self.num_evicted + 1


def test_it_is_what_sessions_hold_and_never_more_than_there_is():
    for seed in range(scaled(200, at_least=30)):
        rng = np.random.default_rng(seed)
        memory, sessions, last_used = HeadMemory(100), [Session() for _ in range(6)], {}
        for clock in range(200):
            session = sessions[int(rng.integers(6))]
            what, num_bytes = rng.integers(8), int(rng.integers(0, 110))
            before = {id(s): s.num_evicted for s in sessions}
            if what == 0:
                session.closed = True
                memory.release(session)
                sessions[sessions.index(session)] = Session()
                continue
            fits = memory.claim(session, num_bytes)
            assert fits == (num_bytes <= 100)
            if not fits:
                assert memory.num_bytes == sum(s.held for s in sessions)
                continue
            session.held = num_bytes
            last_used[id(session)] = clock
            evicted = [s for s in sessions if s.num_evicted > before.get(id(s), 0)]
            kept = [s for s in sessions if s.held and s is not session]
            assert session not in evicted
            assert all(last_used[id(a)] < last_used[id(b)] for a in evicted for b in kept)
            assert memory.num_bytes == sum(s.held for s in sessions) <= 100
            if what > 4:
                session.held = int(rng.integers(0, num_bytes + 1))
                memory.settle(session, session.held)
                assert memory.num_bytes == sum(s.held for s in sessions)


def test_who_has_ended_holds_nothing_whatever_its_last_program_does():
    memory, session = HeadMemory(100), Session()
    assert memory.claim(session, 60)
    session.closed = True
    memory.release(session)
    assert memory.claim(session, 50)
    memory.settle(session, 40)
    assert memory.num_bytes == 0
