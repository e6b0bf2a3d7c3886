"""What mTLS costs a round: the same streams over plaintext and over mTLS on every hop.

Passes cost nothing (see `side_by_side.py`), so that a round is all overhead: with a model's passes in it the share is
smaller still. Variables: PAIRS, TOKENS, STREAMS, TOY. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from certificates import Authority, Pair
from side_by_side import Size, compare, quartiles

from outrider import TLS
from outrider.cli.console import print_json, reporting_errors
from outrider.cli.stack import local_stack
from outrider.client import Client
from outrider.settings import PREFIX

AIM_PERCENT = 5.0


async def measure(size: Size, folder: Path) -> dict[str, Any]:
    authority = Authority(folder)

    def settings(pair: Pair) -> dict[str, Any]:
        own = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_ca": authority.ca, "tls_client_ca": authority.ca}
        return {"log_level": "warning", **own}

    roles = {role: settings(authority.certify(role)) for role in ("coordinator", "draft-worker", "target-worker")}
    caller = authority.certify("client")
    async with AsyncExitStack() as cleanup:
        plain = await cleanup.enter_async_context(local_stack(size.toy, size.draft, shared={"log_level": "warning"}))
        # for the client that waits until the second stack is there
        os.environ |= {
            f"{PREFIX}TLS_{name}": path
            for name, path in (("CA", authority.ca), ("CERT", caller.cert), ("KEY", caller.key))
        }
        secured = await cleanup.enter_async_context(
            local_stack(
                size.toy, size.draft, coordinator=roles["coordinator"], target_worker=roles["target-worker"],
                draft_worker=roles["draft-worker"],
            )
        )  # fmt: skip
        tls = TLS(authority.ca, caller.cert, caller.key)
        clients = (
            await cleanup.enter_async_context(Client(plain.address)),
            await cleanup.enter_async_context(Client(secured.address, tls=tls)),
        )
        found = await compare(size, (plain, secured), clients)
    low, middle, high = quartiles(1 / ratio for ratio in found.ratios)
    return {
        "num_pairs": size.num_pairs,
        "num_streams": size.num_streams,
        "tokens_per_s_plaintext": found.medians[0],
        "tokens_per_s_mtls": found.medians[1],
        "round_overhead_percent": 100 * (middle - 1),
        "round_overhead_percent_quartiles": [100 * (low - 1), 100 * (high - 1)],
        "cpu_overhead_percent": found.cpu_overhead_percent,
        "aim_percent": AIM_PERCENT,
    }


def main() -> None:
    with reporting_errors(), tempfile.TemporaryDirectory() as folder:
        size = Size.read()
        found = asyncio.run(measure(size, Path(folder) / "certificates"))
        low, high = found["round_overhead_percent_quartiles"]
        print(size)
        print(f"  plaintext  {found['tokens_per_s_plaintext']:8.0f} tokens/s")
        print(f"  mTLS       {found['tokens_per_s_mtls']:8.0f} tokens/s")
        print(
            f"  a round takes {found['round_overhead_percent']:.1f}% longer (quartiles {low:.1f} to {high:.1f}), "
            f"aim <= {AIM_PERCENT:g}%; processor time {found['cpu_overhead_percent']:.1f}% more"
        )
        print_json(found)


if __name__ == "__main__":
    main()
