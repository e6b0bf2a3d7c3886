"""The joint law over rounds is the target's, whatever local drafters guess and whoever is chosen: by enumeration."""

import random

import pytest
from asking_workers import Pair
from conftest import scaled
from loop_law import World, total_variation, warm_policy

from coordinator.drafting import Drafted
from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.policy import Choice
from coordinator.round_loop import RoundLoop
from outrider.sampling.params import AcceptanceRule

RULES = [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK]
EXACT = 1e-12


def texts(seed: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Past outputs that agree with nothing, and one that the target is likely to repeat."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(vocab_size) for _ in range(12)) for _ in range(3)]


def corrections(seed: int, vocab_size: int) -> list[tuple[tuple[int, ...], int]]:
    rng = random.Random(seed)
    return [(tuple(rng.randrange(vocab_size) for _ in range(3)), rng.randrange(vocab_size)) for _ in range(12)]


def check(world: World) -> None:
    assert total_variation(world.law(), world.target_law()) < EXACT


@pytest.mark.parametrize("drafter", ["lookup", "suffix"])
@pytest.mark.parametrize("rule", RULES)
def test_a_local_drafter_alone(rule: AcceptanceRule, drafter: str) -> None:
    num_used = 0
    for seed in range(scaled(40, at_least=3)):
        world = World(
            Pair(2, seed), rule, lambda: FixedGamma(3), num_tokens=5, drafter=drafter, max_drafts=3, fixed=3,
            past=texts(seed, 2), corrections=corrections(seed, 2),
        )  # fmt: skip
        check(world)
        num_used += world.reasons[drafter, "fixed"]
    assert num_used > 0, "INCONCLUSIVE: nothing was drafted"


@pytest.mark.parametrize("rule", RULES)
def test_corrections_alone(rule: AcceptanceRule) -> None:
    """A prompt without a repetition: only what the target said elsewhere can be guessed."""
    num_used = 0
    for seed in range(scaled(40, at_least=3)):
        known = [*corrections(seed, 3), *(((0, 1, 2)[i:] + (x,) * i, 1) for i in range(1, 3) for x in range(3))]
        world = World(
            Pair(3, seed), rule, lambda: FixedGamma(2), prompt=(0, 1, 2), num_tokens=3, drafter="suffix", fixed=2,
            corrections=known,
        )  # fmt: skip
        check(world)
        num_used += world.reasons["suffix", "fixed"]
    assert num_used > 0, "INCONCLUSIVE: nothing was drafted"


COSTS = {
    "a cheap model": {"draft_ms": 0.05, "accept": 2},
    "a dear model": {"draft_ms": 30.0, "accept": 0},
    "a middling model": {"draft_ms": 1.0, "accept": 1},
}


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("rule", RULES)
def test_the_merger_of_model_and_guesses(rule: AcceptanceRule, costs: str) -> None:
    """Chosen by the adaptive controller round by round, from what was accepted before; chains go on in guesses."""
    used: set[str] = set()
    for seed in range(scaled(20, at_least=2)):
        world = World(
            Pair(2, seed), rule, lambda: warm_policy(cap=3, **COSTS[costs]), num_tokens=4, max_drafts=3,
            past=texts(seed, 2), corrections=corrections(seed, 2),
        )  # fmt: skip
        check(world)
        used |= {drafter for drafter, _ in world.reasons}
    assert used, "INCONCLUSIVE: nothing was drafted"
    if costs == "a middling model":
        assert "model" in used
        assert used & {"lookup", "suffix"}, "INCONCLUSIVE: only one side was chosen"


class Continues(FixedGamma):
    """Two drafts of the model, then whatever the guess has: how long a chain is depends on what was sampled."""

    def num_continued(self, choice: Choice, num_drafted: int, guess: object) -> int:
        return len(guess)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", RULES)
def test_a_sampled_chain_that_goes_on_in_a_guess(rule: AcceptanceRule) -> None:
    num_mixed = 0
    for seed in range(scaled(30, at_least=3)):
        world = World(
            Pair(2, seed), rule, lambda: Continues(1), num_tokens=4, max_drafts=3, past=texts(seed, 2),
            corrections=corrections(seed, 2),
        )  # fmt: skip
        check(world)
        num_mixed += world.num_mixed
    assert num_mixed > 0, "INCONCLUSIVE: no chain went on"


@pytest.mark.parametrize("rule", RULES)
def test_guesses_instead_of_proposals_that_come_late_or_from_nobody(rule: AcceptanceRule) -> None:
    num_used = 0
    for seed in range(scaled(30, at_least=2)):
        late = World(
            Pair(2, seed), rule, lambda: FixedGamma(2), num_tokens=4, fixed=2, is_late=lambda length: length % 2 == 0,
            past=texts(seed, 2),
        )  # fmt: skip
        lost = World(Pair(2, seed), rule, lambda: FixedGamma(2), num_tokens=4, fixed=2, drafters=())
        for world in (late, lost):
            check(world)
            num_used += sum(count for (drafter, _), count in world.reasons.items() if drafter != "model")
    assert num_used > 0, "INCONCLUSIVE: no guess took a proposal's place"


class LooksFirst(RoundLoop):
    """A biased twin: sees the sample, and keeps it only where the guess says the same."""

    async def _drafts(self, choice: Choice) -> tuple[Drafted, str, int]:
        guesses = self._local.guesses(self._room)
        drafted = await self._draft.propose(choice)
        if guesses and guesses[0].token_ids[0] != drafted.proposal.token_ids[0]:
            guess = guesses[0].cut(choice.num_draft_tokens)
            return Drafted(self._local.seal(guess)), guess.drafter, len(guess)
        return drafted, "", 0


@pytest.mark.parametrize("rule", RULES)
def test_a_choice_made_after_looking_at_the_sample_is_caught(rule: AcceptanceRule) -> None:
    distances = []
    for seed in range(4):
        world = World(Pair(2, seed), rule, lambda: FixedGamma(1), num_tokens=3, fixed=1, make_loop=LooksFirst)
        distances.append(total_variation(world.law(), world.target_law()))
    assert max(distances) > 0.01
