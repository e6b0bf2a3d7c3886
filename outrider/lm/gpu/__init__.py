"""The GPU path: decode steps of static shape, captured as CUDA graphs, and decisions made where the logits are.

Nothing here is needed on a CPU. Everything here runs on one, eagerly, which is how the tests run it.
"""
