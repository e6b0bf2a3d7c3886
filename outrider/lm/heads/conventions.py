"""What a checkpoint leaves open, as candidates in the order in which they are likely: calibration picks one.

Two readers give the same key another meaning: layers are counted by their inputs or by their outputs, a missing flag is
true to one and false to the other. A head read in the wrong way still drafts, and is hardly ever right.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import InvalidArgument
from outrider.lm.heads.checkpoint import fault
from outrider.lm.interface import LAST_HIDDEN

STATES_FIELD = "head_states"
"""The setting that says which states a head reads where its config does not."""


@dataclass(frozen=True, slots=True)
class Convention:
    """One way to read a head.

    states: the target's states that are its feature, in its order (m: input of layer m; LAST_HIDDEN). norm_residual:
    the residual is the normed state. feeds_normed: a guess goes on from the state after the final norm.
    """

    states: tuple[int, ...]
    norm_residual: bool = False
    feeds_normed: bool = False

    def __str__(self) -> str:
        words = [f"states {','.join(map(str, self.states))}"]
        words += ["norm before residual"] if self.norm_residual else []
        words += ["normed output fed back"] if self.feeds_normed else []
        return ", ".join(words)


LAST_STATE_ONLY = (Convention((LAST_HIDDEN,)),)
"""Of Medusa and EAGLE-1: there is nothing to choose."""


def eagle3_conventions(
    config: Mapping[str, Any], layout: str, num_states: int, num_layers: int, states: Sequence[int] | None
) -> tuple[Convention, ...]:
    """The ways to read an EAGLE-3 head of `num_states` states for a target of `num_layers` layers, likeliest first.

    states: given by the user, as inputs of layers; then only these. Raises InvalidArgument where none is possible.
    """
    candidates = _state_candidates(config, layout, num_states, num_layers, states)
    residuals = _flags(flag(config, "norm_before_residual"), layout == "speculators", first=True)
    # In this family's own words norm_output is "feed the normed state back". SpecForge writes the same key, true by
    # default, for the norm before the output head, which every head has.
    normed = flag(config, "norm_output")
    feeds = (False, True) if normed and layout != "speculators" else (bool(normed),)
    return tuple(Convention(*choice) for choice in itertools.product(candidates, residuals, feeds))


def flag(config: Mapping[str, Any], *names: str) -> bool | None:
    """A flag under any of its names, at the top or under `eagle_config`. None: not stated."""
    for part in (config, config.get("eagle_config") or {}):
        for name in names:
            if part.get(name) is not None:
                return bool(part[name])
    return None


def layer_ids(config: Mapping[str, Any]) -> list[int] | None:
    """What the config lists, in its own way of counting; None where it lists nothing."""
    for part in (config, config.get("eagle_config") or {}):
        for name in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
            ids = part.get(name)
            if ids is None:
                continue
            if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
                raise fault(f"config.json: {name} is {ids!r}, not a list of layers")
            return ids
    return None


def _flags(stated: bool | None, is_open: bool, *, first: bool) -> tuple[bool, ...]:
    """Where nothing is stated and readers differ, both."""
    if stated is not None:
        return (stated,)
    return (first, not first) if is_open else (False,)


def _state_candidates(
    config: Mapping[str, Any], layout: str, num_states: int, num_layers: int, states: Sequence[int] | None
) -> list[tuple[int, ...]]:
    own = (config.get("outrider") or {}).get("state_layers")
    ids = layer_ids(config)
    if states is not None:
        wanted = [tuple(states)]
    elif own is not None:
        wanted = [tuple(own)]
    elif ids is None:
        if num_layers < 6 or num_states != 3:
            raise fault(
                f"config.json names no layers (eagle_aux_hidden_state_layer_ids), and the usual three are not there: "
                f"the head reads {num_states} states, the target has {num_layers} layers"
            )
        wanted = [(2, num_layers // 2, num_layers - 3)]
    else:
        by_input, by_output = tuple(ids), tuple(i + 1 for i in ids)
        # speculators and vLLM count inputs; SGLang and SpecForge outputs, unless the list begins as the other's does.
        inputs_first = layout == "speculators" or ids[:1] == [2]
        wanted = [by_input, by_output] if inputs_first else [by_output, by_input]
    possible = [c for c in wanted if len(c) == num_states and all(0 <= i < num_layers for i in c)]
    if not possible and states is not None:
        raise InvalidArgument(
            f"{STATES_FIELD} is {','.join(map(str, states))}, but the head reads {num_states} states of the target, "
            f"which has inputs of layers 0 to {num_layers - 1}: name as many of these",
            field=STATES_FIELD,
            reason="BAD_HEAD",
        )
    if not possible:
        raise fault(
            f"the head reads {num_states} states of the target and names layers {list(wanted[0])}: the target has "
            f"inputs of layers 0 to {num_layers - 1}"
        )
    return possible
