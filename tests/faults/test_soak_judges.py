"""What judges a soak can find something: texts that are wrong, laws that are bent, links that misbehave, leaks."""

import asyncio
import dataclasses
from contextlib import asynccontextmanager

import numpy as np
import pytest
from faults.soak.faults import Damage
from faults.soak.oracle import Delivered, Oracle, target_model
from faults.soak.plan import Request
from faults.soak.readings import Reading
from faults.soak.relay import Relay
from faults.soak.soak import Report

from outrider.lm.toy import ToyModel, parse_toy
from outrider.sampling import AcceptanceRule, History, SamplingParams, StoppingParams, distribution
from outrider.toy_text import toy_char

SEED = 3
MODEL = ToyModel(parse_toy(target_model(SEED)))


def a_request(name="a", **options):
    return Request(name, (1, 2), {"temperature": 1.0, "max_tokens": 40, **options}, 0)


def sampled(options, seed, *, power=1.0):
    """A text of the law of TOKEN and BLOCK; of another one where `power` is not 1."""
    rng, ids = np.random.default_rng(seed), []
    names = ("temperature", "top_k")
    params = SamplingParams(**{name: options[name] for name in names if name in options})
    for _ in range(options["max_tokens"]):
        logits = MODEL.logits_for([1, 2, *ids])
        p = distribution(logits, params, StoppingParams(options["max_tokens"]), History((1, 2), ids)) ** power
        ids.append(int(rng.choice(len(p), p=p / p.sum())))
    return ids


def delivered(ids, **changes):
    text = "".join(map(toy_char, ids))
    return dataclasses.replace(Delivered(tuple(ids), text, "length", None, (), 7, AcceptanceRule.BLOCK), **changes)


def test_an_id_that_cannot_be_there_is_found():
    request = a_request(top_k=3)
    ids = sampled(request.options, 1)
    assert Oracle(SEED).fault(request, delivered(ids)) == ""
    for wrong in (ids[:9] + ids[10:] + ids[:1], [*ids[:9], ids[8], *ids[9:-1]]):
        assert "impossible" in Oracle(SEED).fault(request, delivered(wrong)), "a token lost, a token twice"


def test_greedy_and_coupled_text_is_known_to_the_token():
    for options, changes in (({"temperature": 0.0}, {}), ({}, {"acceptance": AcceptanceRule.COUPLED})):
        request, oracle = a_request(**options), Oracle(SEED)
        ids = []
        while len(ids) < 40:
            said = oracle.fault(request, delivered([*ids, -1], finish="", **changes))
            ids.append(int(said.rpartition(" ")[2]))
        assert oracle.fault(request, delivered(ids, **changes)) == ""
        other = [*ids[:20], (ids[20] + 1) % 24, *ids[21:]]
        assert oracle.fault(request, delivered(other, **changes)).startswith("token 20 is")


@pytest.mark.parametrize(
    "changes",
    [
        {"text": ""},
        {"finish": "stop"},
        {"matched_stop": 3},
        {"token_logprobs": (0.5,)},
        {"token_ids": (), "text": ""},
    ],
)
def test_what_comes_with_the_ids_is_judged_too(changes):
    request = a_request()
    ids = sampled(request.options, 1)
    assert Oracle(SEED).fault(request, delivered(ids, **changes))


def test_ends_by_stop_strings_and_ids_are_known():
    ids = sampled({"temperature": 1.0, "max_tokens": 40}, 5)
    stop = "".join(map(toy_char, ids[10:12]))
    end = next(n for n in range(2, 41) if "".join(map(toy_char, ids[:n])).endswith(stop))
    text = "".join(map(toy_char, ids[: end - 2]))
    got = delivered(ids[:end], text=text, finish="stop", matched_stop=stop)
    assert Oracle(SEED).fault(a_request(stop=[stop]), got) == ""
    assert "after its end" in Oracle(SEED).fault(a_request(stop=[stop]), delivered(ids))
    end = ids.index(ids[6]) + 1
    got = delivered(ids[:end], finish="stop", matched_stop=ids[6])
    assert Oracle(SEED).fault(a_request(stop_token_ids=[ids[6]]), got) == ""
    assert Oracle(SEED).fault(a_request(stop_token_ids=[ids[6]], min_tokens=end), got)


def test_a_bent_law_is_found():
    right, bent = Oracle(SEED), Oracle(SEED)
    for seed in range(80):
        request = a_request(f"{seed}")
        assert right.fault(request, delivered(sampled(request.options, seed))) == ""
        assert bent.fault(request, delivered(sampled(request.options, seed, power=1.25))) == ""
    assert right.num_law_pairs == 80 * 20
    assert right.law_p_value() > 1e-4
    assert bent.law_p_value() < 1e-6


def test_the_verdict_follows_from_what_was_found():
    damage = Damage(num_kills=1, num_kills_of_streams=1)
    sound = Report(1, num_texts=3, num_equal=3, num_drafted=9, num_accepted=4, damage=damage)
    assert sound.verdict == "SOUND"
    for field in ("differences", "failures", "leaks", "crashes"):
        assert dataclasses.replace(sound, **{field: ["x"]}).verdict == "BROKEN"
    assert dataclasses.replace(sound, law_p_value=1e-9).verdict == "BROKEN"
    for nothing in ({"damage": Damage(num_kills=1)}, {"num_drafted": 0, "num_accepted": 0}, {"num_texts": 0}):
        assert dataclasses.replace(sound, **nothing).verdict == "INCONCLUSIVE"


def test_what_is_held_beyond_the_beginning_is_a_leak():
    before = Reading("target-0", {"tasks": 11, "sessions": 0})
    assert Reading("target-0", {"tasks": 11, "sessions": 0}).more_than(before) == []
    assert Reading("target-0", {"tasks": 12, "sessions": 1}).more_than(before) == [
        "target-0 holds 12 tasks, 11 before",
        "target-0 holds 1 sessions, 0 before",
    ]


@asynccontextmanager
async def a_line():
    """(relay, reader and writer of the near end, those of the far end); a word has gone over it."""
    far = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda r, w: far.set_result((r, w)), "127.0.0.1", 0)
    async with server, Relay(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as relay:
        host, _, port = relay.address.rpartition(":")
        near = await asyncio.open_connection(host, int(port))
        near[1].write(b"one")
        assert await (await far)[0].readexactly(3) == b"one"
        yield relay, *near, *far.result()
        near[1].close()
        far.result()[1].close()


async def test_a_held_link_loses_nothing():
    async with a_line() as (relay, near, near_out, far, far_out):
        relay.hold()
        near_out.write(b"two")
        far_out.write(b"back")
        late = asyncio.create_task(far.readexactly(3))
        assert not (await asyncio.wait({late}, timeout=0.05))[0]
        relay.heal()
        assert (await late, await near.readexactly(4)) == (b"two", b"back")


async def test_a_silent_link_tells_neither_end_anything():
    async with a_line() as (relay, _, near_out, far, far_out):
        relay.fall_silent()
        near_out.write(b"two")
        near_out.close()
        reading = asyncio.create_task(far.read(1))
        assert not (await asyncio.wait({reading}, timeout=0.05))[0], "not even that the other end has gone"
        relay.heal()
        assert not (await asyncio.wait({reading}, timeout=0.05))[0], "a lost byte does not come back"
        far_out.write(b"x")
        await far_out.drain()
        reading.cancel()


async def test_a_cut_link_resets_and_refuses_until_it_heals():
    async with a_line() as (relay, near, _, far, _):
        relay.cut()
        for reader in (near, far):
            with pytest.raises(ConnectionError):
                await reader.readexactly(1)
        host, _, port = relay.address.rpartition(":")
        again, _ = await asyncio.open_connection(host, int(port))
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await again.readexactly(1)
