"""What the text of a request must be, computed from the toy's own tables: no service, session, cache or draft is asked.

Greedy and COUPLED text is known to the token. Under TOKEN and BLOCK a text is judged by its law: every id must be
possible after exactly the ids before it (the toys may depend on all of them, so a token lost, doubled or changed shows
at once), and where each id falls in its own distribution must be uniform, whatever the ids before were.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from faults.soak.plan import VOCAB, Request
from scipy import stats

from outrider.lm.toy import ToyModel, parse_toy
from outrider.sampling import (
    AcceptanceRule,
    History,
    Noise,
    SamplingParams,
    StoppingParams,
    coupled_token,
    distribution,
)
from outrider.toy_text import toy_char

PAIR_BINS = 5
MIN_PAIRS = 25 * PAIR_BINS**2
MAX_LOGPROB_ERROR = 1e-4
BLOCKS = 120
"""Cache blocks of a target: a cancel storm on one alone needs more, so that streams are put off and come back."""


def target_model(seed: int) -> str:
    """Every second seed has toys that read their whole context, the others such that often repeat themselves."""
    return f"toy:vocab={VOCAB},seed={seed % 1000},order={0 if seed % 2 else 2},pass_ms=2,blocks={BLOCKS}"


def draft_model(seed: int) -> str:
    return target_model(seed).replace(f"pass_ms=2,blocks={BLOCKS}", "agreement=0.85,pass_ms=0.7,blocks=400")


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a client got of one choice, all its calls together. `finish`: "" where it hung up before the end."""

    token_ids: tuple[int, ...]
    text: str
    finish: str
    matched_stop: int | str | None
    token_logprobs: tuple[float, ...]
    seed: int
    acceptance: AcceptanceRule
    choice: int = 0


@dataclass
class Oracle:
    """Judges texts, one after the other."""

    seed: int
    places: list[list[float]] = field(default_factory=list)
    """By text of TOKEN or BLOCK: where each id fell in its distribution."""

    def __post_init__(self) -> None:
        self._model = ToyModel(parse_toy(target_model(self.seed)))

    def fault(self, request: Request, got: Delivered) -> str:
        """What is wrong with a text; empty: nothing is."""
        params, stopping = _params(request.options, got), _stopping_params(request.options)
        history, prompt = History(request.prompt), list(request.prompt)
        rng = random.Random(f"{self.seed}/places/{request.name}/{got.choice}")
        places: list[float] = []
        text, finish, matched = "", "", None
        for index, token_id in enumerate(got.token_ids):
            if finish:
                return f"goes on for {len(got.token_ids) - index} tokens after its end"
            logits = self._model.logits_for([*prompt, *got.token_ids[:index]])
            if params.decides_by_match:
                noise, position = Noise(params.seed, params.choice), len(prompt) + index
                right = coupled_token(logits, params, stopping, history, noise, position)
                if token_id != right:
                    return f"token {index} is {token_id}, not {right}"
            else:
                p = distribution(logits, params, stopping, history)
                if not p[token_id]:
                    return f"token {index} is {token_id}, which is impossible there"
                likelier = float(p[p > p[token_id]].sum() + p[:token_id][p[:token_id] == p[token_id]].sum())
                places.append(likelier + rng.random() * float(p[token_id]))
            if got.token_logprobs[index : index + 1] and request.options.get("logprobs"):
                error = abs(_log_softmax(logits)[token_id] - got.token_logprobs[index])
                if not error <= MAX_LOGPROB_ERROR:
                    return f"logprob of token {index} is off by {error}"
            history.push(token_id)
            text += toy_char(token_id)
            finish, matched = _end(text, token_id, request.options, stopping)
        if got.finish or request.cancel_after is not None:
            # Whether a token comes with the one before it may follow from what it is: none past a planned end counts.
            self.places.append(places[: request.cancel_after])
        return _end_fault(got, text, finish, matched, request.options)

    @property
    def num_law_pairs(self) -> int:
        return sum(len(places) // 2 for places in self.places)

    def law_p_value(self) -> float:
        """Of the joint law of neighbouring tokens, all texts pooled, by chi-square; 1 where there are too few.

        The place of a token in its own distribution, likeliest ids first and spread over the token's own mass, is
        uniform and independent of all before it. So are pairs of neighbours, in a square.
        """
        if self.num_law_pairs < MIN_PAIRS:
            return 1.0
        counts = np.zeros((PAIR_BINS, PAIR_BINS))
        for places in self.places:
            for first, second in zip(places[::2], places[1::2], strict=False):
                counts[_bin(first), _bin(second)] += 1
        expected = counts.sum() / PAIR_BINS**2
        return float(stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), PAIR_BINS**2 - 1))


def _end_fault(got: Delivered, text: str, finish: str, matched: int | str | None, options: Any) -> str:
    """What is wrong with all but the ids, which give `text` and end as they should by `finish` and `matched`."""
    if len(got.token_logprobs) != (len(got.token_ids) if options.get("logprobs") else 0):
        return f"{len(got.token_logprobs)} logprobs came with {len(got.token_ids)} tokens"
    if not got.finish:
        return "" if text.startswith(got.text) else f"its text so far is {got.text!r}, its ids are {text!r}"
    if (got.finish, got.matched_stop) != (finish, matched):
        return f"ended by {got.finish} {got.matched_stop!r} where {finish or 'nothing'} {matched!r} ends it"
    return "" if got.text == _shown(text, matched, options) else f"its text is {got.text!r}, its ids are {text!r}"


def _bin(place: float) -> int:
    return min(PAIR_BINS - 1, int(place * PAIR_BINS))


def _params(options: Any, got: Delivered) -> SamplingParams:
    names = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
    given = {name: options[name] for name in names if name in options}
    return SamplingParams(
        temperature=options["temperature"], seed=got.seed, choice=got.choice, acceptance=got.acceptance, **given
    )


def _stopping_params(options: Any) -> StoppingParams:
    stop_ids = frozenset(options.get("stop_token_ids", ()))
    return StoppingParams(options["max_tokens"], options.get("min_tokens", 0), stop_ids)


def _end(text: str, token_id: int, options: Any, stopping: StoppingParams) -> tuple[str, int | str | None]:
    """(finish reason, what matched) of a text of one character a token, if it ends with this one."""
    counts = len(text) > stopping.min_tokens
    for stop in options.get("stop", ()):
        if counts and text.endswith(stop):
            return "stop", stop
    if counts and token_id in stopping.stop_token_ids:
        return "stop", token_id
    return ("length", None) if len(text) == stopping.max_tokens else ("", None)


def _shown(text: str, matched: int | str | None, options: Any) -> str:
    cut = isinstance(matched, str) and not options.get("include_stop_str_in_output")
    return text[: len(text) - len(matched)] if cut and isinstance(matched, str) else text


def _log_softmax(logits: Sequence[float]) -> np.ndarray:
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max()
    return wide - math.log(np.exp(wide).sum())
