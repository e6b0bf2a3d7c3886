"""A toy head beside a toy target: a second table that agrees with the target's as far as wanted. Simulated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from outrider.drafting.chain import drafting
from outrider.drafting.grown_tree import GrownTree, grow
from outrider.drafting.proposal import MAX_Q_ENTRIES, Proposal
from outrider.errors import Internal, InvalidArgument
from outrider.lm.interface import LanguageModel, Program, SequenceHandle
from outrider.lm.toy import PREFIX, ToyModel, parse_toy
from outrider.server_info import TargetDrafter
from outrider.serving.session_log import SessionLog

KIND = "toy"


class HeldToy:
    """`toy:key=value;...`: the target's own spec with these keys changed. Raises InvalidArgument for other targets."""

    def __init__(self, name: str, source: str, target: LanguageModel) -> None:
        if not isinstance(target, ToyModel):
            raise InvalidArgument(f"heads: {source} goes with a toy target only", field="heads")
        given = parse_toy(source.replace(";", ","))
        keys = [part.partition("=")[0].strip() for part in source.removeprefix(PREFIX).split(";") if part.strip()]
        self._model = ToyModel(dataclasses.replace(target.spec, **{key: getattr(given, key) for key in keys}))
        self.description = TargetDrafter(name, KIND, source=source, draws_trees=True)

    def for_session(self, log: SessionLog, sequence: SequenceHandle) -> ToyDrafter:
        return ToyDrafter(self.description.name, self._model, log)


class ToyDrafter:
    """Reads its own table after the committed ids and the drafts so far."""

    def __init__(self, name: str, model: ToyModel, log: SessionLog) -> None:
        self.name = name
        self._model = model
        self._log = log

    def propose(self, num_draft_tokens: int) -> Program[Proposal]:
        """Ends after a drafted stop token, and before a row that cannot be read; raises Internal where that is the
        first one."""
        log = self._log
        with drafting(log) as chain:
            while len(chain.token_ids) < num_draft_tokens and not chain.ends_text:
                try:
                    chain.draw(self._model.logits_for([*log.ids, *chain.token_ids]))
                except Internal:
                    if not chain.token_ids:
                        raise
                    break
            return chain.proposal(self.name)
        yield  # a program: it needs no pass

    def propose_tree(self, shape: Sequence[int]) -> Program[Proposal]:
        """As a head's."""
        grown = GrownTree(self._log, MAX_Q_ENTRIES)

        def rows(nodes: Sequence[int]) -> list[np.ndarray]:
            return [self._model.logits_for([*self._log.ids, *grown.path_ids(node)]) for node in nodes]

        return grown.proposal(grow(grown, shape, self._model.logits_for(self._log.ids), rows), self.name)
        yield

    def ingest(self) -> Program[None]:
        """Nothing to prepare."""
        return
        yield
