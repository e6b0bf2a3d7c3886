"""Which OpenMP runtime torch gets, and how its idle threads wait. Each case needs a process of its own."""

import json
import os
import subprocess
import sys

import pytest

CASE = """
import json, os, sys
{before}
from outrider.lm import threads
import torch
bound = None
if threads.RUNTIME == threads.INTEL:
    import ctypes
    runtime = ctypes.CDLL(str(threads._intel_runtime()))
    bound = []
    for count in (1, 2):
        torch.set_num_threads(count)
        bound.append(runtime.omp_get_max_threads())
names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
print(json.dumps([threads.RUNTIME, bound, [os.environ.get(name) for name in names]]))
"""
WITHOUT_PACKAGE = """
from importlib import metadata
def files(name):
    raise metadata.PackageNotFoundError(name)
metadata.files = files
"""
NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def run(before="", **environment):
    base = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", CASE.format(before=before)],
        env={**base, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def is_installed():
    from outrider.lm import threads

    return threads._intel_runtime() is not None


def test_intels_runtime_serves_torch_where_it_is_installed(is_installed) -> None:
    if not is_installed:
        pytest.skip("intel-openmp is not installed: outrider[cpu] on x86-64 Linux")
    # torch's own setting arrives in this runtime, so torch calls it
    assert run() == ["Intel OpenMP", [1, 2], [None, None, "200us"]]
    assert run(KMP_BLOCKTIME="3") == ["Intel OpenMP", [1, 2], [None, None, "3"]]
    assert run(OMP_WAIT_POLICY="PASSIVE") == ["Intel OpenMP", [1, 2], ["PASSIVE", None, None]]


def test_without_it_gnus_threads_sleep_soon() -> None:
    assert run(WITHOUT_PACKAGE) == ["GNU OpenMP", None, ["PASSIVE", "1000", None]]
    assert run(WITHOUT_PACKAGE, OMP_WAIT_POLICY="ACTIVE") == ["GNU OpenMP", None, ["ACTIVE", None, None]]


def test_a_runtime_that_torch_has_loaded_is_left_alone() -> None:
    assert run("import torch") == ["GNU OpenMP", None, [None, None, None]]
