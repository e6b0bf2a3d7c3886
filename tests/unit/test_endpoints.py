"""Which coordinator a client's next call goes to. No network: channels, names and the clock are the test's."""

import asyncio
import random
from collections import Counter

import pytest

from outrider.errors import InvalidArgument, Unavailable
from outrider.serving.endpoints import LOOKUP_INTERVAL_S, Endpoints


class Channel:
    def __init__(self, address):
        self.address = address
        self.is_closed = False

    async def close(self):
        self.is_closed = True


class World:
    """Names and a clock."""

    def __init__(self):
        self.now = 0.0
        self.names = {}
        self.num_lookups = 0

    async def resolve(self, name):
        self.num_lookups += 1
        await asyncio.sleep(0)
        if name not in self.names:
            raise OSError(f"{name} is nowhere")
        return self.names[name]

    def endpoints(self, *addresses):
        return Endpoints(addresses, Channel, resolve=self.resolve, clock=lambda: self.now, rng=random.Random(3))


async def called(endpoints, tried=frozenset()):
    """The address of a call that ends at once."""
    async with endpoints.connection(tried) as connection:
        return connection.address


async def failing(endpoints, tried=frozenset()):
    """The same, of one that finds nobody."""
    async with endpoints.connection(tried) as connection:
        endpoints.failed(connection)
        return connection


async def test_calls_that_run_at_once_are_spread_evenly():
    endpoints = World().endpoints("a:1", "b:1", "c:1")
    held = [endpoints.connection() for _ in range(9)]
    connections = [await one.__aenter__() for one in held]
    assert Counter(c.address for c in connections) == {"a:1": 3, "b:1": 3, "c:1": 3}
    assert len(set(connections)) == 3, "calls to one address share its connection"
    for one in held:
        await one.__aexit__(None, None, None)


async def test_the_first_one_is_not_the_same_for_all_clients():
    world = World()
    firsts = {
        await called(Endpoints(["a:1", "b:1"], Channel, resolve=world.resolve, rng=random.Random(i))) for i in range(20)
    }
    assert firsts == {"a:1", "b:1"}


async def test_an_address_that_failed_is_left_alone_while_there_is_another():
    world = World()
    endpoints = world.endpoints("a:1", "b:1")
    lost = await failing(endpoints)
    assert {await called(endpoints) for _ in range(20)} == {"a:1", "b:1"} - {lost.address}
    assert endpoints.ready_in_s() == 0.0
    world.now += 1.0
    assert {await called(endpoints) for _ in range(40)} == {"a:1", "b:1"}


async def test_one_that_fails_again_is_left_alone_for_longer_until_it_answers():
    world = World()
    endpoints = world.endpoints("a:1")
    for number in range(12):
        await failing(endpoints)
        whole = min(2.0, 0.05 * 2**number)
        assert whole / 2 <= endpoints.ready_in_s() <= whole
        world.now += whole
    async with endpoints.connection() as fresh:
        endpoints.answered(fresh)
    await failing(endpoints)
    assert endpoints.ready_in_s() <= 0.05


async def test_with_nobody_ready_the_one_that_is_ready_first_is_asked():
    world = World()
    endpoints = world.endpoints("a:1", "b:1")
    first, second = await failing(endpoints), await failing(endpoints)
    assert {first.address, second.address} == {"a:1", "b:1"}
    assert 0 < endpoints.ready_in_s() <= 0.05
    await failing(endpoints, tried={second.address})
    assert await called(endpoints) == second.address


async def test_a_connection_that_failed_carries_no_further_call_and_is_closed_with_its_last():
    endpoints = World().endpoints("a:1")
    async with endpoints.connection() as running:
        assert (await failing(endpoints)) is running
        endpoints.failed(running)
        async with endpoints.connection() as fresh:
            assert fresh is not running
            assert not running.channel.is_closed
        assert not running.channel.is_closed
        assert not fresh.channel.is_closed
    assert running.channel.is_closed
    await endpoints.close()
    assert fresh.channel.is_closed


async def test_what_a_left_connection_still_says_brings_no_call_back_to_its_address():
    endpoints = World().endpoints("a:1", "b:2")
    async with endpoints.connection() as running:
        endpoints.answered(running)
        endpoints.failed(running)
        endpoints.answered(running)
        assert {await called(endpoints) for _ in range(4)} == {"a:1", "b:2"} - {running.address}


async def test_many_calls_lost_with_one_connection_count_as_one_failure():
    world = World()
    endpoints = world.endpoints("a:1")
    held = [endpoints.connection() for _ in range(32)]
    connections = [await one.__aenter__() for one in held]
    for connection in connections:
        endpoints.failed(connection)
    assert endpoints.ready_in_s() <= 0.05
    for one in held:
        await one.__aexit__(None, None, None)


async def test_a_name_stands_for_all_behind_it_and_is_looked_up_again():
    world = World()
    world.names["there:1"] = ["10.0.0.1:1", "10.0.0.2:1"]
    endpoints = world.endpoints("dns:///there:1", "b:1")
    assert {await called(endpoints) for _ in range(60)} == {"10.0.0.1:1", "10.0.0.2:1", "b:1"}
    assert (world.num_lookups, len(endpoints)) == (1, 3)
    async with endpoints.connection({"10.0.0.2:1", "b:1"}) as leaving:
        assert leaving.address == "10.0.0.1:1"
        world.names["there:1"] = ["10.0.0.2:1", "10.0.0.3:1"]
        world.now += LOOKUP_INTERVAL_S
        assert {await called(endpoints) for _ in range(60)} == {"10.0.0.2:1", "10.0.0.3:1", "b:1"}
        assert not leaving.channel.is_closed, "its call goes on"
    assert leaving.channel.is_closed
    assert world.num_lookups == 2
    await failing(endpoints)
    await called(endpoints)
    assert world.num_lookups == 3, "after a failure at once"


async def test_a_name_that_is_lost_keeps_its_addresses_and_one_that_never_was_is_told():
    world = World()
    endpoints = world.endpoints("dns:///there:1")
    with pytest.raises(Unavailable, match=r"no coordinator by that name.*there:1 is nowhere"):
        await called(endpoints)
    world.names["there:1"] = ["10.0.0.1:1"]
    assert await called(endpoints) == "10.0.0.1:1"
    del world.names["there:1"]
    world.now += LOOKUP_INTERVAL_S
    assert await called(endpoints) == "10.0.0.1:1"


async def test_callers_at_once_look_a_name_up_once():
    world = World()
    world.names["there:1"] = ["10.0.0.1:1"]
    endpoints = world.endpoints("dns:///there:1")
    await asyncio.gather(*(called(endpoints) for _ in range(8)))
    assert world.num_lookups == 1


@pytest.mark.parametrize("address", ["", "a", "dns:///a", "dns:///:1", "http://a:1"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(InvalidArgument) as refused:
        Endpoints(["a:1", address], Channel)
    assert refused.value.field == "address"
