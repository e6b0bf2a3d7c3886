"""The engine that both workers stand on."""

import os

# Read once, when torch loads its thread pool, so it has to be set before torch is imported. By default threads that
# wait for work spin; with a draft and a target worker on the same cores they spin in each other's way, and a pass of
# 20 ms takes more than a second.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A few microseconds of spinning between two layers' regions save a wake-up each; longer would take the other's cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
