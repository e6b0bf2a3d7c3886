"""The target that an audit runs by itself: the model of `outrider.lm`, or with `independent` the stock module of
transformers, which shares no code of passes with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tokenizers import Tokenizer

from outrider.audit.ending import Decode
from outrider.audit.rows import ModelRows, Rows, allocate
from outrider.lm.interface import ModelDescription
from outrider.lm.loading import Progress, load_model
from outrider.sampling.grammar import GrammarState, GrammarVocabulary
from outrider.sampling.params import Grammar
from outrider.settings import TargetWorkerSettings
from outrider.toy_text import toy_char

TOLERANCES = {"float32": 5e-4, "bfloat16": 0.5, "float16": 0.06}
"""Logits, by the number type of the weights. Rows of a pass over one token and of one over a whole text were seen to
differ, for tokens that are likely at all, by up to a tenth of that in float32 and three quarters in bfloat16."""
EXACT_TOLERANCE = 1e-6
"""Of rows that are equal to the bit: what float32 rounds to when penalties are applied to them."""
MAX_ASIDE = 64
"""Drafts of a round at most."""


@dataclass(frozen=True, slots=True)
class Target:
    """rows: of a text, of at most as many tokens as was said at load."""

    description: ModelDescription
    rows: Callable[[Sequence[int]], Rows]
    is_independent: bool
    vocabulary: GrammarVocabulary
    decode: Decode

    def tolerance(self, numerics_fingerprints: Sequence[str]) -> float:
        """How far logits of workers with these numerics may be off from the rows here."""
        own = self.description.numerics_fingerprint
        is_exact = "numerics exact" in own and all(other == own for other in numerics_fingerprints)
        if self.description.simulated or is_exact:
            return EXACT_TOLERANCE
        return TOLERANCES.get(self.description.dtype, max(TOLERANCES.values()))

    def grammar(self, grammar: Grammar | None) -> GrammarState | None:
        """Before the first token. Raises ValueError for one that is none."""
        return None if grammar is None else self.vocabulary.state(grammar)


def load_target(
    settings: TargetWorkerSettings, max_tokens: int, *, independent: bool, on_progress: Progress | None = None
) -> Target:
    """max_tokens: of the longest text. Raises as `load_model` does."""
    rows: Callable[[Sequence[int]], Rows]
    if independent:
        from outrider.audit.stock import StockRows, load_stock

        module, about = load_stock(settings)
        rows = partial(StockRows, module, vocab_size=about.vocab_size)
    else:
        loaded = load_model(settings, on_progress=on_progress)
        about = loaded.description
        allocate(loaded.model, max_tokens, MAX_ASIDE)
        rows = partial(ModelRows, loaded.model, max_tokens=max_tokens, max_aside=MAX_ASIDE)
    vocabulary = GrammarVocabulary(about.tokenizer_json, about.vocab_size, about.eos_token_ids)
    return Target(about, rows, independent, vocabulary, _decoder(about.tokenizer_json))


def _decoder(tokenizer_json: bytes) -> Decode:
    """Of a `tokenizers` tokenizer; empty: the toy alphabet."""
    tokenizer = Tokenizer.from_str(tokenizer_json.decode()) if tokenizer_json else None

    def decode(token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if tokenizer is None:
            return "".join(map(toy_char, token_ids))
        return tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    return decode
