"""Sampled text through the real services follows the target's law, for every parameter and every rule.

Each delivered token is turned into U = P(likelier tokens) + v p(token), with p computed from the whole prefix by the
slow path: uniform on [0, 1) given everything before it. Single values and consecutive pairs are tested by chi-square;
the pairs see what the single ones cannot: noise that a later round shares with an earlier one.
"""

import asyncio
import itertools

import numpy as np
import pytest
from conftest import scaled
from scipy import stats
from stack import in_process_stack

import outrider
from outrider.lm.toy import ToyModel, parse_toy
from outrider.sampling.distribution import distribution
from outrider.sampling.history import History
from outrider.sampling.params import AcceptanceRule, SamplingParams, StoppingParams

VOCAB = 8
TARGET, DRAFT = f"toy:vocab={VOCAB},seed=3,order=2", f"toy:vocab={VOCAB},seed=3,order=2,agreement=0.7"
FILTERS = {
    "none": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "logit_bias": {"logit_bias": {1: 1.5, 3: -2.0}},
}
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
RULES = ("token", "block", "coupled")
PROMPT = [1, 2, 5]
MAX_TOKENS = 60
NUM_BINS = 10
FALSE_ALARM = 1e-6


class Uniforms:
    """Collects U over streams, and pairs of neighbours within a stream."""

    def __init__(self, seed):
        self.model = ToyModel(parse_toy(TARGET))
        self.rng = np.random.default_rng(seed)
        self.singles, self.pairs = [], []

    def add(self, token_ids, params):
        history, stopping, last = History(PROMPT), StoppingParams(max_tokens=MAX_TOKENS), None
        for index, token_id in enumerate(token_ids):
            p = distribution(self.model.logits_for([*PROMPT, *token_ids[:index]]), params, stopping, history)
            assert p[token_id] > 0, f"token {token_id} is impossible after {token_ids[:index]}"
            u = float(p[p > p[token_id]].sum() + self.rng.random() * p[token_id])
            self.singles.append(u)
            if last is not None:
                self.pairs.append((last, u))
            last = u
            history.push(token_id)

    def p_values(self):
        ones = np.bincount((np.array(self.singles) * NUM_BINS).astype(int).clip(0, NUM_BINS - 1), minlength=NUM_BINS)
        grid = (np.array(self.pairs) * 4).astype(int).clip(0, 3)
        twos = np.bincount(grid[:, 0] * 4 + grid[:, 1], minlength=16)
        return stats.chisquare(ones).pvalue, stats.chisquare(twos).pvalue


@pytest.fixture(scope="module")
def matrix_loop():
    return list(itertools.product(RULES, TEMPERATURES, FILTERS))


@pytest.mark.slow
async def test_every_parameter_under_every_rule(matrix_loop):
    """{0.3, 0.7, 1, 1.5} x {none, top-k, top-p, min-p, penalties, logit bias} x rules; γ 1 to 5 and adaptive."""
    num_streams = scaled(80)
    failures, num_accepted, num_drafted = [], 0, 0
    async with in_process_stack(TARGET, DRAFT) as stack, outrider.Client(stack.address) as client:
        for rule, temperature, name in matrix_loop:
            options = {"temperature": temperature, **FILTERS[name]}
            rule_number = AcceptanceRule[rule.upper()]
            uniforms = Uniforms(seed=hash_of(rule, temperature, name))

            async def one(seed, options=options, rule=rule):
                gamma = {} if seed % 6 == 0 else {"num_speculative_tokens": seed % 6}
                return await client.complete(
                    PROMPT, seed=seed, max_tokens=MAX_TOKENS, acceptance=rule, drafter="model", **gamma, **options
                )

            answers = await asyncio.gather(*(one(seed) for seed in range(num_streams)))
            drafted = sum(a.speculation.num_draft_tokens for a in answers)
            assert drafted > 0, f"INCONCLUSIVE: nothing was drafted for {rule}, {options}"
            num_drafted += drafted
            num_accepted += sum(a.speculation.num_accepted_draft_tokens for a in answers)
            for answer in answers:
                assert answer.started.acceptance == rule_number
                uniforms.add(answer.token_ids, SamplingParams(acceptance=rule_number, **options))
            if min(uniforms.p_values()) < FALSE_ALARM / (2 * len(matrix_loop)):
                failures.append((rule, options, uniforms.p_values()))
    assert not failures
    assert 0 < num_accepted < num_drafted


@pytest.mark.slow
async def test_a_biased_sampler_is_caught():
    """The same machinery, fed with text of a slightly hotter sampler, sees it: else the test above proves nothing."""
    uniforms = Uniforms(seed=1)
    async with in_process_stack(TARGET, DRAFT) as stack, outrider.Client(stack.address) as client:
        answers = await asyncio.gather(
            *(
                client.complete(PROMPT, temperature=1.15, seed=s, max_tokens=MAX_TOKENS, acceptance="block")
                for s in range(80)
            )
        )
    for answer in answers:
        uniforms.add(answer.token_ids, SamplingParams(temperature=1.0))
    assert min(uniforms.p_values()) < FALSE_ALARM


def hash_of(*values):
    return sum(ord(c) * 31**i for i, c in enumerate(repr(values))) % 2**32
