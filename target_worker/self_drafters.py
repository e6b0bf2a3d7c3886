"""Drafters made of the target's own layers, by the settings: `skip`, `skip:LAYER;...`, or an exit adapter's folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.errors import InvalidArgument
from outrider.lm.engine import Engine
from outrider.lm.interface import LoadedModel
from target_worker import skip_drafter
from target_worker.exit_drafter import KIND as EXIT
from target_worker.exit_drafter import HeldExit
from target_worker.self_probe import try_out
from target_worker.skip_drafter import HeldSkip

log = logging.getLogger(__name__)

HeldSelf = HeldExit | HeldSkip


class SelfDrafters:
    """Those of one worker. A model leaves early after one number of layers, and leaves out one set of them."""

    def __init__(self) -> None:
        self._held: list[HeldSelf] = []

    def load(self, name: str, source: str, loaded: LoadedModel) -> HeldSelf | None:
        """None: the source names none of these. Before the engine takes the model. Raises InvalidArgument on layers or
        a folder that do not fit the model, and on a second one that would need another way through it."""
        held: HeldSelf
        if source == skip_drafter.KIND or source.startswith(f"{skip_drafter.KIND}:"):
            held = self._skip(name, source, loaded)
        else:
            from outrider.lm.exit_head import is_exit

            if not is_exit(Path(source).expanduser()):
                return None
            held = self._exit(name, source, loaded)
        self._held.append(held)
        return held

    async def try_out(self, loaded: LoadedModel, engine: Engine) -> None:
        """Measures each, before anybody is served. Raises FailedPrecondition on one that fails to draft."""
        for held in self._held:
            if isinstance(held, HeldSkip):
                held.attach(engine)
            held.told(await try_out(held, loaded, engine, _prompts(loaded)))

    def _skip(self, name: str, source: str, loaded: LoadedModel) -> HeldSkip:
        if any(isinstance(held, HeldSkip) for held in self._held):
            raise InvalidArgument("heads: layers can be left out in one way only; give one skip", field="heads")
        layers = skip_drafter.parse_layers(source.removeprefix(skip_drafter.KIND).removeprefix(":"))
        if not layers:
            if loaded.tokenizer is None:
                raise InvalidArgument(
                    f"heads: {source} on a model without a tokenizer must name its layers, such as skip:1;2",
                    field="heads",
                )
            from target_worker.skip_search import search

            best = search(loaded.model, _prompts(loaded))[0]
            log.info("heads: skip leaves out layers %s: agreement %.3f", best.layers, best.agreement)
            layers = best.layers
        return HeldSkip(name or skip_drafter.KIND, layers, loaded.model)

    def _exit(self, name: str, source: str, loaded: LoadedModel) -> HeldExit:
        from outrider.lm.exit_head import ExitTarget, load_exit

        model: Any = loaded.model
        if not (hasattr(model, "exit_after") and hasattr(model, "causal_lm")):
            raise InvalidArgument(
                f"heads: {source} goes with a whole model in this process, and a {type(model).__name__} is none",
                field="heads",
            )
        about = loaded.description
        target = ExitTarget.of(model.causal_lm, model_fingerprint=about.model_fingerprint, vocab_size=about.vocab_size)
        head = load_exit(Path(source).expanduser(), target)
        others = {held.exit_layer for held in self._held if isinstance(held, HeldExit)}
        if others - {head.exit_layer}:
            raise InvalidArgument(
                f"heads: {source} leaves after {head.exit_layer} layers, another one after {others.pop()}: give one",
                field="heads",
            )
        model.exit_after(head.exit_layer)
        return HeldExit(name or EXIT, source, head, about.vocab_size)


def _prompts(loaded: LoadedModel) -> Sequence[Sequence[int]]:
    if loaded.tokenizer is None:
        vocab_size = loaded.description.vocab_size
        return [[0], [1 % vocab_size, 2 % vocab_size], [3 % vocab_size]]
    from target_worker.head_probe import prompts_of

    return prompts_of(loaded, loaded.description.context_length // 2)
