"""Runs the whole suite and ends in one JSON line: the counts, the seconds and the scale they were run at."""

import json
import os
import sys
import time

import pytest


class Tally:
    """Counts outcomes as pytest's own summary does: an error in set-up or tear-down is a failure."""

    def __init__(self) -> None:
        self.passed = self.failed = self.skipped = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed += 1
        elif report.skipped:
            self.skipped += 1
        elif report.when == "call":
            self.passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed += 1


def main() -> int:
    tally = Tally()
    start = time.monotonic()
    exit_code = pytest.main(sys.argv[1:], plugins=[tally])
    summary = vars(tally) | {
        "seconds": round(time.monotonic() - start, 1),
        "scale": float(os.environ.get("OUTRIDER_TEST_SCALE", "1")),
    }
    print(json.dumps(summary), flush=True)
    return int(exit_code)


if __name__ == "__main__":
    sys.exit(main())
