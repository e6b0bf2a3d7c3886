"""Heads, as `outrider doctor` looks at them: whether each can be read and fits the target, and what it needs of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from outrider.cli.check import Check
from outrider.cli.console import describe_failure, err
from outrider.errors import OutriderError
from outrider.lm.toy import PREFIX as TOY
from outrider.settings import DraftWorkerSettings
from target_worker.heads import parse_entry
from target_worker.skip_drafter import KIND as SKIP


def check_heads(target: str, heads: Sequence[str]) -> Iterator[Check]:
    """A line for each entry of a target worker's `heads`. The target's layers are not read."""
    for entry in heads:
        _, source = parse_entry(entry)
        if source.startswith(TOY):
            yield _check_toy(target, source)
        elif source.partition(":")[0] == SKIP:
            yield Check("ok", f"head {source}", "layers of the target itself: tried when its worker starts")
        else:
            yield _check_trained(target, source)


def _check_toy(target: str, source: str) -> Check:
    if target.startswith(TOY):
        return Check("ok", f"head {source}", "a toy's, SIMULATED")
    return Check("fail", f"head {source}", "a toy head goes with a toy target only", "leave it out of --heads")


def _check_trained(target: str, source: str) -> Check:
    name = f"head {source}"
    if target.startswith(TOY):
        return Check("fail", name, "it reads the states of a real model, and the target is a toy", "give --heads none")
    err.print(f"[dim]loading {source}...[/]")
    try:
        return _read(target, source, name)
    except (OutriderError, ModuleNotFoundError, OSError) as error:
        fix = "give another one in --heads, or distill one for this target (`outrider distill`)"
        return Check("fail", name, describe_failure(error)[0], fix)


def _read(target: str, source: str, name: str) -> Check:
    from outrider.lm.exit_head import is_exit
    from outrider.lm.head_model import find_head
    from outrider.lm.heads import EagleHead, feature_states
    from outrider.lm.states import write_states

    if is_exit(Path(source).expanduser()):
        return Check("ok", name, "leaves the target early: read and tried when its worker starts")
    head = find_head(DraftWorkerSettings(head=source, target=target), lambda text, fraction: None).head
    detail = f"{head.kind}, {head.num_parameters / 1e6:.1f} M parameters, reads states {write_states(head.states)}"
    if not isinstance(head, EagleHead):
        return Check("ok", name, f"{detail}, beside its target only")
    if len(head.conventions) == 1:
        return Check("ok", name, detail)
    return Check(
        "warn",
        name,
        f"{detail}, or {write_states(feature_states(head))} in all: its config leaves open how it is read",
        "none beside its target, whose worker tries every way; on a draft worker set --head-states",
    )
