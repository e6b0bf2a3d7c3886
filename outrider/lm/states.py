"""Names of a model's states, free of torch: they are indices among transformers' `hidden_states`.

State m is the input of layer m, state 0 the embedded tokens; what the output head reads is LAST_HIDDEN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from outrider.errors import InvalidArgument
from outrider.lm.interface import LAST_HIDDEN, FeatureModel, LanguageModel


def check_states(states: Sequence[int], num_layers: int, field: str = "heads") -> tuple[int, ...]:
    """Each once, ascending. Raises InvalidArgument, naming what there is, on one that the model has not."""
    wrong = sorted({state for state in states if not (state == LAST_HIDDEN or 0 <= state < num_layers)})
    if wrong:
        raise InvalidArgument(
            f"the target has states 0 to {num_layers - 1} (inputs of its {num_layers} layers) and {LAST_HIDDEN} (what "
            f"its output head reads), but no {', '.join(map(str, wrong))}",
            field=field,
        )
    return tuple(sorted(set(states)))


def read_states(text: str, field: str) -> tuple[int, ...]:
    """Of a comma list such as "2,15,27" or "-1", in its order. Raises InvalidArgument naming `field`."""
    try:
        states = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgument(
            f"{field} is {text[:80]!r}, which is no comma list of states: N is the input of layer N, {LAST_HIDDEN} "
            "what the output head reads",
            field=field,
        ) from None
    if len(set(states)) != len(states):
        raise InvalidArgument(f"{field} names a state twice: {text[:80]!r}", field=field)
    return states


def write_states(states: Sequence[int]) -> str:
    """As `read_states` reads them."""
    return ",".join(map(str, states))


def feature_model(model: LanguageModel, field: str = "heads") -> FeatureModel:
    """The model. Raises InvalidArgument, naming its kind, when it keeps no states."""
    if not hasattr(model, "keep_features"):
        raise InvalidArgument(
            f"a {type(model).__name__} keeps no states for drafters that read them: choose another target or drafter",
            field=field,
        )
    return cast(FeatureModel, model)
