"""`make soak SECONDS=600`: real services under a seeded plan of kills, freezes, drains, cut and half-open networks,
slow clients, cancel storms and repeated request ids, over toy models whose texts are known.

The last line of stdout is one JSON object. Exit status 1: a text differed, something leaked, a service crashed or a
request failed that should not; 3: no kill met an open stream, or nothing was drafted, so that nothing is shown.

Variables: SECONDS (faults begin for so long, 60), SEED (1: the plan's; its parity picks the kind of toys), STREAMS
(clients at once, 8), LINES (faults at once, 2), FAULTS (so many of them, whatever the time).
"""

from __future__ import annotations

import asyncio
import time

from benchmarks.options import number, text
from faults.soak.soak import Soak

from outrider.cli.console import EXIT_FAILURE, EXIT_INCONCLUSIVE, err, print_json, reporting_errors


def main() -> None:
    with reporting_errors():
        seconds, seed, num_streams = number("SECONDS", 60), number("SEED", 1), number("STREAMS", 8)
        num_faults = number("FAULTS", 1) if text("FAULTS") else None
        num_lines = number("LINES", 2)
        end = time.monotonic() + seconds
        soak = Soak(
            seed,
            num_streams=num_streams,
            num_lines=num_lines,
            goes_on=lambda done: done < num_faults if num_faults is not None else time.monotonic() < end,
        )
        report = asyncio.run(soak.run())
        for line in (*report.differences, *report.failures, *report.leaks, *report.crashes, *report.complaints):
            err.print(line, markup=False)
        print_json(report.summary())
        raise SystemExit({"SOUND": 0, "BROKEN": EXIT_FAILURE, "INCONCLUSIVE": EXIT_INCONCLUSIVE}[report.verdict])


if __name__ == "__main__":
    main()
