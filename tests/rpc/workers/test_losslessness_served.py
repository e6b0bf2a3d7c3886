"""The meter of losslessness through the services: which streams are looked at, and what `/metrics` says of them."""

import re

import httpx
import pytest
from ports import free_port
from stack import in_process_stack

from outrider import Client

TOY = "toy:vocab=16,seed=1"


async def readings(port: int) -> dict[tuple[str, str], tuple[int, float]]:
    """Tokens and evidence by rule and drafter."""
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text

    def values(name: str) -> dict[tuple[str, str], float]:
        found = re.findall(rf'^outrider_losslessness_{name}{{drafter="(.*?)",.*?rule="(.*?)"}} (\S+)$', text, re.M)
        return {(rule, drafter): float(value) for drafter, rule, value in found}

    evidence = values("log10_e_value")
    return {key: (int(number), evidence[key]) for key, number in values("tokens_total").items()}


@pytest.mark.parametrize("rule", ["greedy", "token", "block", "coupled"])
async def test_the_worker_tells_what_it_found(rule: str) -> None:
    port = free_port()
    options = {"temperature": 0.0} if rule == "greedy" else {"acceptance": rule}
    worker = {"losslessness_every_rounds": 1, "metrics_port": port}
    async with in_process_stack(TOY, target_worker=worker) as stack, Client(stack.address) as client:
        await client.complete([1, 2, 3], seed=5, max_tokens=40, **options)
        assert await readings(port) == {}, "a client's seed may have been used before"
        answers = [
            await client.complete([1, 2, 3], max_tokens=40, num_speculative_tokens=3, drafter="model", **options)
            for _ in range(5)
        ]
        found = await readings(port)
    assert {key[0] for key in found} == {rule}
    assert sum(answer.speculation.num_draft_tokens for answer in answers) > 0, "INCONCLUSIVE"
    assert (rule, "model") in found
    assert 100 < sum(num_tokens for num_tokens, _ in found.values()) <= 200
    assert all(evidence < 3 for _, evidence in found.values())
