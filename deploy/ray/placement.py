"""Why an actor fits nowhere, in words: Ray leaves it pending and says nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deploy.ray.config import Pool

ACCELERATOR = "accelerator_type:"
"""Before a kind of card this is a resource that its nodes have 1 of, of which Ray takes a little for each actor."""
ACCELERATOR_SHARE = 0.001


def demands(pool: Pool) -> dict[str, float]:
    """What one worker of the pool takes, under the names that Ray's nodes report."""
    wanted = {"CPU": pool.num_cpus, "GPU": pool.num_gpus, "memory": pool.memory_bytes, **pool.resources}
    if pool.accelerator_type:
        wanted[ACCELERATOR + pool.accelerator_type] = ACCELERATOR_SHARE
    return {name: amount for name, amount in wanted.items() if amount > 0}


def label_matches(expression: str, value: str | None) -> bool:
    """Ray's selector syntax, without spaces: `v`, `!v`, `in(a,b)`, `!in(a,b)`. An absent label matches negations."""
    negated, body = expression.startswith("!"), expression.removeprefix("!")
    options = body[3:-1].split(",") if body.startswith("in(") and body.endswith(")") else [body]
    return (value in options) != negated


def explain(pool: Pool, nodes: Sequence[Mapping[str, Any]], available: Mapping[str, float]) -> str:
    """The first thing that `pool` lacks.

    `nodes` as `ray.nodes()` gives them, `available` as `ray.available_resources()`: what is free in the whole cluster.
    """
    alive = [node for node in nodes if node["Alive"]]
    matching = list(alive)
    for label, expression in pool.label_selector.items():
        matching = [node for node in matching if label_matches(expression, node["Labels"].get(label))]
        if not matching:
            present = sorted({str(node["Labels"][label]) for node in alive if label in node["Labels"]})
            there = f"the cluster has {label} = {', '.join(present)}" if present else f"no node carries {label}"
            return f"no node matches the label selector {label} = {expression!r} ({there})"
    if pool.accelerator_type and not any(ACCELERATOR + pool.accelerator_type in node["Resources"] for node in matching):
        kinds = {name.removeprefix(ACCELERATOR) for node in alive for name in node["Resources"] if ACCELERATOR in name}
        there = f"the cluster has {', '.join(sorted(kinds))}" if kinds else "no node has any"
        return f"no matching node has an accelerator {pool.accelerator_type} ({there})"
    for resource, amount in demands(pool).items():
        largest = max((node["Resources"].get(resource, 0.0) for node in matching), default=0.0)
        if largest < amount:
            return f"{resource}: {amount:g} needed on one node, the largest matching node has {largest:g}"
    if not any(all(node["Resources"].get(r, 0.0) >= a for r, a in demands(pool).items()) for node in matching):
        return f"no matching node has all at once: {', '.join(f'{r} {a:g}' for r, a in demands(pool).items())}"
    lacking = {r: a for r, a in demands(pool).items() if available.get(r, 0.0) < a}
    if not lacking:
        return "the matching nodes are full or slow to answer, though the cluster as a whole has enough"
    told = ", ".join(f"{r}: {a:g} needed, {available.get(r, 0.0):g} free" for r, a in lacking.items())
    return f"the matching nodes are full ({told} in the whole cluster)"
