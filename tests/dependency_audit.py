"""Asks a vulnerability database about the pinned dependencies, with pip-audit.

Fails where one is known to be vulnerable. Where nobody can be asked it says so by name, and does not fail.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

PINS = Path(__file__).parents[1] / "constraints.txt"
TIMEOUT_S = 120


def main() -> int:
    if importlib.util.find_spec("pip_audit") is None:
        return skipped("pip-audit is not installed here: pip install pip-audit")
    # the pins are whole: nothing has to be resolved, so that nothing is fetched but what is known of them
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(PINS), "--no-deps", "--disable-pip"]
    try:
        done = subprocess.run(
            [*command, "--format", "json", "--progress-spinner", "off"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return skipped(f"the vulnerability database did not answer in {TIMEOUT_S} s")
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return skipped(f"pip-audit had no answer: {last[:300]}")
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    if len(unknown) == len(packages):
        return skipped(
            f"the database that pip-audit asked knows none of {len(packages)} packages: it is not reached here"
        )
    faults = [(package, fault) for package in packages for fault in package.get("vulns", ())]
    for package, fault in faults:
        mended = ", ".join(fault["fix_versions"]) or "no release yet"
        print(f"{package['name']} {package['version']}: {fault['id']}, mended by {mended}")
    if unknown:
        print(f"dependency audit: not known to the database, not audited: {', '.join(unknown)}")
    print(f"dependency audit: {len(packages) - len(unknown)} pinned packages, {len(faults)} known vulnerabilities")
    return bool(faults)


def skipped(why: str) -> int:
    print(f"dependency audit SKIPPED: {why}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
