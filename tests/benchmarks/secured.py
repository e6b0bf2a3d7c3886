"""What mTLS costs a round: the same streams over plaintext and over mTLS on every hop, side by side, in turns.

Toys whose passes cost nothing, so that a round is all overhead: with a model's passes in it the share is smaller still.
Settings are variables: PAIRS, TOKENS, STREAMS, TOY. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from certificates import Authority, Pair
from observability import PAIRS, STREAMS, TOKENS, TOY, cpu_s, tokens_per_s

from outrider import TLS
from outrider.cli.stack import local_stack
from outrider.client import Client
from outrider.settings import PREFIX

AIM_PERCENT = 5.0


async def measure(folder: Path) -> dict[str, Any]:
    authority = Authority(folder)

    def settings(pair: Pair) -> dict[str, Any]:
        own = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_ca": authority.ca, "tls_client_ca": authority.ca}
        return {"log_level": "warning", **own}

    roles = {role: settings(authority.certify(role)) for role in ("coordinator", "draft-worker", "target-worker")}
    caller = authority.certify("client")
    draft = f"{TOY},agreement=0.8"
    async with AsyncExitStack() as cleanup:
        plain = await cleanup.enter_async_context(local_stack(TOY, draft, shared={"log_level": "warning"}))
        # for the client that waits until the second stack is there
        os.environ |= {
            f"{PREFIX}TLS_{name}": path
            for name, path in (("CA", authority.ca), ("CERT", caller.cert), ("KEY", caller.key))
        }
        secured = await cleanup.enter_async_context(
            local_stack(
                TOY, draft, coordinator=roles["coordinator"], target_worker=roles["target-worker"],
                draft_worker=roles["draft-worker"],
            )
        )  # fmt: skip
        tls = TLS(authority.ca, caller.cert, caller.key)
        clients = [Client(plain.address), Client(secured.address, tls=tls)]
        for client in clients:
            await cleanup.enter_async_context(client)
            await tokens_per_s(client, 10_000)
        used_s = [cpu_s(plain), cpu_s(secured)]
        speeds: list[tuple[float, float]] = []
        for pair in range(PAIRS):
            found = {}
            for which in random.Random(pair).sample((0, 1), 2):
                found[which] = await tokens_per_s(clients[which], pair)
            speeds.append((found[0], found[1]))
        used_s = [cpu_s(stack) - begun for stack, begun in zip((plain, secured), used_s, strict=True)]
    ratios = sorted(before / after for before, after in speeds)
    return {
        "num_pairs": PAIRS,
        "num_streams": STREAMS,
        "tokens_per_s_plaintext": statistics.median(before for before, _ in speeds),
        "tokens_per_s_mtls": statistics.median(after for _, after in speeds),
        "round_overhead_percent": 100 * (statistics.median(ratios) - 1),
        "round_overhead_percent_quartiles": [100 * (ratios[PAIRS // 4] - 1), 100 * (ratios[3 * PAIRS // 4] - 1)],
        "cpu_overhead_percent": 100 * (used_s[1] / used_s[0] - 1),
        "aim_percent": AIM_PERCENT,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder) / "certificates"))
    low, high = found["round_overhead_percent_quartiles"]
    print(f"{STREAMS} streams x {TOKENS} tokens, {PAIRS} pairs, passes that cost nothing")
    print(f"  plaintext  {found['tokens_per_s_plaintext']:8.0f} tokens/s")
    print(f"  mTLS       {found['tokens_per_s_mtls']:8.0f} tokens/s")
    print(
        f"  a round takes {found['round_overhead_percent']:.1f}% longer (quartiles {low:.1f} to {high:.1f}), "
        f"aim <= {AIM_PERCENT:g}%; processor time {found['cpu_overhead_percent']:.1f}% more"
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
