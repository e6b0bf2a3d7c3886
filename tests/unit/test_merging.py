"""Several streams as one: nothing lost, each in its order, held by its reader, and ended all together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from outrider.merging import merged


class Source:
    """Numbers (`name`, 0), (`name`, 1), ...: `length` of them, then an error where there is one, or never an end."""

    def __init__(self, name: str, length: int, error: Exception | None = None, *, is_endless: bool = False) -> None:
        self.name = name
        self.length = length
        self.error = error
        self.is_endless = is_endless
        self.num_made = 0
        self.is_closed = False

    async def stream(self) -> AsyncGenerator[tuple[str, int], None]:
        try:
            for number in range(self.length):
                await asyncio.sleep(0)
                self.num_made += 1
                yield self.name, number
            if self.error is not None:
                raise self.error
            if self.is_endless:
                await asyncio.Event().wait()
        finally:
            self.is_closed = True


async def test_everything_comes_and_each_in_its_order() -> None:
    sources = [Source("a", 7), Source("b", 0), Source("c", 3)]
    found = [item async for item in merged(source.stream() for source in sources)]
    for source in sources:
        assert [item for item in found if item[0] == source.name] == [(source.name, i) for i in range(source.length)]
    assert len(found) == 10
    assert found != sorted(found), "side by side"
    assert [item async for item in merged(())] == []  # type: ignore[misc]


async def test_a_slow_reader_holds_all() -> None:
    sources = [Source("a", 100), Source("b", 100)]
    async with aclosing(merged(source.stream() for source in sources)) as items:
        for num_taken in range(1, 11):
            await anext(items)
            for _ in range(50):
                await asyncio.sleep(0)
            # one in the queue, and one in the hand of each
            assert sum(source.num_made for source in sources) <= num_taken + 3
    assert all(source.is_closed for source in sources)


async def test_the_first_failure_ends_the_others() -> None:
    sources = [Source("a", 5, is_endless=True), Source("b", 2, ValueError("broken"))]
    with pytest.raises(ValueError, match="broken"):
        async for _ in merged(source.stream() for source in sources):
            pass
    assert all(source.is_closed for source in sources)
