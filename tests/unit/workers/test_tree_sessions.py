"""Trees through target sessions: plain, chain and tree texts are one text, and sampled trees keep the target's law."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from conftest import scaled
from law import FALSE_ALARM, chi_square, joint_law, table_pair
from session_loops import BUSY, GREEDY, PROMPT, RULES, HandDriver, plain_text, target_session, toy

from outrider.drafting import tree
from outrider.drafting.proposal import Proposal
from outrider.drafting.tree_draw import draw_children
from outrider.lm.engine import Engine
from outrider.lm.toy import ToyModel, parse_toy
from outrider.sampling.history import History
from outrider.sampling.logprobs import raw_logprobs
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import AcceptanceRule, Finish, SamplingParams, StoppingParams
from target_worker.session import TargetSession

TARGET, DRAFT = toy("vocab=16,seed=1"), toy("vocab=16,seed=1,agreement=0.8")
SHAPES = {
    "chain": (-1, 0, 1, 2),
    "siblings": (-1, -1, -1, -1),
    "binary": (-1, -1, 0, 0, 1, 1),
    "trunk_with_leaves": (-1, -1, -1, 0, 0, 3, 3, 5, 5),
    "three_chains": (-1, -1, -1, 0, 1, 2, 3, 4, 5),
}
EXACT = {
    "greedy": GREEDY,
    "greedy_busy": SamplingParams(temperature=0.0, **BUSY),
    "coupled": RULES["coupled"],
    "coupled_busy": SamplingParams(acceptance=AcceptanceRule.COUPLED, seed=3, temperature=0.7, top_k=6, **BUSY),
}


def propose(session: TargetSession, row: Callable[[Sequence[int]], np.ndarray], shape: tuple[int, ...]) -> Proposal:
    """What a draft model with these rows proposes for the session's state, in this shape as far as it can be drawn."""
    log, children = session.log, tree.children(shape)
    drawn: dict[int, tuple] = {}
    for node in range(-1, len(shape)):
        if node >= 0 and node not in drawn:
            continue
        path = [drawn[i][0] for i in tree.path(shape, node)]
        num_prompt = len(log.ids) - log.history.num_output_tokens
        history = History(log.ids[:num_prompt], [*log.ids[num_prompt:], *path])
        ids = [*log.ids, *path]
        here = draw_children(
            row(ids), log.sampling, log.stopping, history, log.noise, hash_ids(ids), len(ids), len(children[node + 1])
        )
        drawn.update(zip(children[node + 1], here, strict=False))
    kept = sorted(drawn)
    places = {-1: -1, **{node: place for place, node in enumerate(kept)}}
    return Proposal(
        tuple(drawn[node][0] for node in kept),
        tuple(drawn[node][1] for node in kept),
        parents=tuple(places[shape[node]] for node in kept),
    )


def run(session: TargetSession, hand: HandDriver, row: Callable, shapes: Sequence[tuple[int, ...]]) -> list:
    """All verdicts of a stream; the shapes take turns."""
    verdicts = [hand.run(session.open())]
    while session.finish is Finish.NONE:
        proposal = propose(session, row, shapes[len(verdicts) % len(shapes)])
        verdicts.append(hand.run(session.verify(session.log.header, (), proposal)))
        assert session.sequence.token_ids == session.log.ids[:-1]
        assert session.sequence.parents == ()
    return verdicts


def text(verdicts: list) -> list[int]:
    return [token_id for verdict in verdicts for token_id in verdict.committed_ids]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("shape", [*SHAPES, "varying"])
def test_text_is_that_of_plain_decoding(name: str, shape: str) -> None:
    stopping = StoppingParams(max_tokens=60, min_tokens=3, stop_token_ids=frozenset({15}))
    shapes = [*SHAPES.values(), ()] if shape == "varying" else [SHAPES[shape]]
    session = target_session(TARGET, EXACT[name], stopping)
    verdicts = run(session, HandDriver(TARGET.logits_for), DRAFT.logits_for, shapes)
    assert text(verdicts) == plain_text(TARGET, EXACT[name], stopping)
    assert sum(v.num_accepted for v in verdicts) > 0, "INCONCLUSIVE"
    assert not any(v.proposal_fault for v in verdicts)


def test_siblings_make_rounds_longer() -> None:
    """As many rows, but a wrong guess has a second and a third one beside it."""
    stopping, num_rounds = StoppingParams(max_tokens=200), {}
    for name in ("siblings", "trunk_with_leaves"):
        for shape in (SHAPES[name], tree.chain_parents(max(tree.depths(SHAPES[name])))):
            session = target_session(TARGET, RULES["coupled"], stopping)
            verdicts = run(session, HandDriver(TARGET.logits_for), DRAFT.logits_for, [shape])
            num_rounds[name, len(shape)] = len(verdicts)
        wide, narrow = num_rounds[name, len(SHAPES[name])], num_rounds[name, max(tree.depths(SHAPES[name]))]
        assert wide < narrow


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
@pytest.mark.parametrize("shape", ["binary", "three_chains"])
def test_sampled_trees_keep_the_law(rule: AcceptanceRule, shape: str) -> None:
    target, draft = table_pair(3, 3)
    counts: Counter[tuple[int, ...]] = Counter()
    num_drafted = num_accepted = 0
    for seed in range(scaled(6_000)):
        params = SamplingParams(acceptance=rule, seed=seed)
        session = target_session(target, params, StoppingParams(max_tokens=4), prompt_ids=(0, 1))
        verdicts = run(session, HandDriver(target.row), draft.row, [SHAPES[shape], SHAPES["siblings"]])
        counts[tuple(text(verdicts)[:3])] += 1
        num_drafted += sum(v.num_draft_tokens for v in verdicts)
        num_accepted += sum(v.num_accepted for v in verdicts)
    assert 0 < num_accepted < num_drafted, "INCONCLUSIVE"
    assert chi_square(counts, joint_law(target, SamplingParams(), 3)) > FALSE_ALARM


def test_logprobs_are_those_of_the_path() -> None:
    session = target_session(TARGET, GREEDY, StoppingParams(max_tokens=40), logprobs=True, top_logprobs=2)
    verdicts = run(session, HandDriver(TARGET.logits_for), DRAFT.logits_for, [SHAPES["three_chains"]])
    ids = [*PROMPT]
    off_trunk = 0
    for verdict in verdicts:
        for token_id, told in zip(verdict.committed_ids, verdict.logprobs.unpacked().token_logprobs, strict=True):
            assert told == np.float32(raw_logprobs(TARGET.logits_for(ids), token_id, 0)[0])
            ids.append(token_id)
        off_trunk += verdict.num_accepted > 0
    assert off_trunk > 0, "INCONCLUSIVE"


def test_a_tree_is_cut_where_the_stream_ends_and_after_stop_tokens() -> None:
    hand = HandDriver(TARGET.logits_for)
    session = target_session(TARGET, GREEDY, StoppingParams(max_tokens=5, stop_token_ids=frozenset({9})))
    hand.run(session.open())
    before = hand.num_rows
    wrong = [t for t in range(16) if t not in (9, plain_text(TARGET, GREEDY)[1])]
    drafts = Proposal((9, *wrong[:5]), parents=(-1, 0, -1, 1, -1, -1))
    verdict = hand.run(session.verify(session.log.header, (), drafts))
    # four tokens are left, the last of which needs no draft; what follows the stop token is none of these three
    assert verdict.num_draft_tokens == len(verdict.soft_acceptances) == 3
    assert hand.num_rows - before == 1 + 3


def test_a_faulty_tree_makes_a_plain_round() -> None:
    hand = HandDriver(TARGET.logits_for)
    session = target_session(TARGET)
    hand.run(session.open())
    verdict = hand.run(session.verify(session.log.header, (), Proposal((1, 2), parents=(1, -1))))
    assert "parent 1, which is not before it" in verdict.proposal_fault
    assert (verdict.num_draft_tokens, len(verdict.committed_ids)) == (0, 1)


@pytest.mark.parametrize("name", ["greedy", "coupled_busy"])
async def test_the_engine_gives_the_same_text(name: str) -> None:
    """Blocks of four tokens, so that kept paths cross them; several streams in one batch."""
    import asyncio

    model = ToyModel(parse_toy("toy:vocab=16,seed=1"))
    engine = Engine(model, num_blocks=64, block_size=4, max_batch_tokens=64, max_waiting_sessions=8)
    engine.start()
    stopping = StoppingParams(max_tokens=50)

    async def stream(prompt: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> tuple[list[int], int]:
        session = target_session(TARGET, EXACT[name], stopping, prompt_ids=prompt)
        session.sequence = sequence = await engine.open_sequence(session.reserved_length)
        verdicts = [await engine.run(session.open())]
        while session.finish is Finish.NONE:
            proposal = propose(session, DRAFT.logits_for, shapes[len(verdicts) % len(shapes)]) if shapes else Proposal()
            verdicts.append(await engine.run(session.verify(session.log.header, (), proposal)))
        engine.close_sequence(sequence)
        return text(verdicts), sum(v.num_accepted for v in verdicts)

    prompts = [(3, 1, 2), (4, 4), (7, 0, 5, 1, 1)]
    plain = await asyncio.gather(*(stream(prompt, ()) for prompt in prompts))
    trees = await asyncio.gather(*(stream(prompt, [*SHAPES.values()]) for prompt in prompts))
    engine.stop()
    assert [t for t, _ in trees] == [t for t, _ in plain]
    assert all(num_accepted > 0 for _, num_accepted in trees), "INCONCLUSIVE"
