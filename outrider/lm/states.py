"""Names of a model's states, free of torch: they are indices among transformers' `hidden_states`.

State m is the input of layer m, state 0 the embedded tokens; what the output head reads is LAST_HIDDEN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from outrider.errors import InvalidArgument
from outrider.lm.interface import LAST_HIDDEN, FeatureModel, LanguageModel


def check_states(states: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Each once, ascending. Raises InvalidArgument, naming what there is, on one that the model has not."""
    wrong = sorted({state for state in states if not (state == LAST_HIDDEN or 0 <= state < num_layers)})
    if wrong:
        raise InvalidArgument(
            f"the target has states 0 to {num_layers - 1} (inputs of its {num_layers} layers) and {LAST_HIDDEN} (what "
            f"its output head reads), but no {', '.join(map(str, wrong))}",
            field="heads",
        )
    return tuple(sorted(set(states)))


def feature_model(model: LanguageModel) -> FeatureModel:
    """The model. Raises InvalidArgument, naming its kind, when it keeps no states."""
    if not hasattr(model, "keep_features"):
        raise InvalidArgument(
            f"a {type(model).__name__} keeps no states for drafters that read them: choose another target or drafter",
            field="heads",
        )
    return cast(FeatureModel, model)
