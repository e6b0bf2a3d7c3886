"""EAGLE heads of real checkpoints on a draft worker: what they draft there is what they draft beside the target."""

import asyncio

import pytest
from stack import in_process_stack
from waiting import wait_for_drafts

torch = pytest.importorskip("torch")

import tiny_heads  # noqa: E402

from outrider.client import Client  # noqa: E402
from outrider.errors import InvalidArgument  # noqa: E402
from outrider.lm.loading import load_model  # noqa: E402
from outrider.settings import DraftWorkerSettings  # noqa: E402

SENDS = {"eagle": ("-1",), "eagle3": tuple(map(str, tiny_heads.STATES))}
RULES = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 0.9, "seed": 11},
    "token": {"temperature": 0.8, "seed": 5, "acceptance": "token"},
    "block": {"temperature": 0.8, "seed": 5, "acceptance": "block"},
}
EXACT = {"dtype": "bfloat16", "numerics": "exact", "num_threads": 1, "max_context_length": 128}
"""States as they travel are those that lie in the cache: so drafts are equal, and not only as often right."""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_heads.write_target(tmp_path_factory.mktemp("far") / "target")


@pytest.fixture(scope="module")
def heads(target):
    folder = target.parent
    few_ids = [token_id for token_id in range(tiny_heads.VOCAB) if token_id % 7]
    return {
        "eagle": str(tiny_heads.write_eagle(folder / "eagle")),
        "eagle3": str(tiny_heads.write_eagle3(folder / "eagle3", target, few_ids)),
    }


@pytest.fixture
def patience(monkeypatch):
    """Drafts, and with them sampled texts, are then equal."""
    wait_for_drafts(monkeypatch)


async def texts(address, kind, prompts, gamma=4, rules=tuple(RULES)):
    async with Client(address) as client:
        return {
            (rule, number): await client.complete(
                prompt, max_tokens=16, ignore_eos=True, drafter=kind, num_speculative_tokens=gamma, **RULES[rule]
            )
            for rule in rules
            for number, prompt in enumerate(prompts)
        }


@pytest.mark.parametrize("kind", SENDS)
async def test_drafts_are_those_of_the_same_head_beside_the_target(target, heads, kind, patience):
    prompts = [[5 + i % 40 for i in range(60)], [5 + i % 40 for i in range(50)]]
    states = {"head_states": SENDS[kind]} if kind == "eagle3" else {}
    beside = in_process_stack(str(target), None, target_worker={"heads": (heads[kind],), **EXACT})
    far = in_process_stack(
        str(target),
        "",
        target_worker={"features": SENDS[kind], **EXACT},
        draft_worker={"head": heads[kind], "target": str(target), "dtype": "bfloat16", "num_threads": 1, **states},
    )
    async with beside as near_stack, far as far_stack:
        near, away = await asyncio.gather(
            texts(near_stack.address, kind, prompts), texts(far_stack.address, kind, prompts)
        )
        plain = await texts(far_stack.address, "auto", prompts[:1], gamma=0, rules=("greedy", "coupled"))
    for key, answer in away.items():
        mine, other = answer.speculation, near[key].speculation
        assert answer.token_ids == near[key].token_ids
        assert mine.num_draft_tokens > 0, "INCONCLUSIVE"
        assert (mine.drafters, mine.num_draft_failures, mine.num_dropped_proposals) == ((kind,), 0, 0)
        assert mine.acceptance_histogram == other.acceptance_histogram
        assert mine.num_draft_tokens_per_pos == other.num_draft_tokens_per_pos
        if key in plain:
            assert answer.token_ids == plain[key].token_ids
    accepted = [answer.speculation.num_accepted_draft_tokens for answer in away.values()]
    assert sum(accepted) > 10, "INCONCLUSIVE"
    assert away["greedy", 1].usage.cached_tokens > 0, "INCONCLUSIVE: no prefix hit"


def settings(target, head, **values):
    return DraftWorkerSettings(head=str(head), target=str(target), num_threads=1, **values)


def test_only_what_the_head_shares_is_read(target, heads):
    whole = load_model(DraftWorkerSettings(model=str(target), num_threads=1))
    loaded = load_model(settings(target, heads["eagle3"], head_states=SENDS["eagle3"]))
    about, head = loaded.description, loaded.model.head
    assert about.tokenizer_fingerprint == whole.description.tokenizer_fingerprint
    assert (about.vocab_size, about.context_length) == (whole.description.vocab_size, whole.description.context_length)
    assert whole.description.model_fingerprint in loaded.model.target_fingerprints
    assert head.states == tiny_heads.STATES
    ids = torch.arange(10)
    assert torch.equal(head.embedding(ids), whole.model.causal_lm.get_input_embeddings()(ids))
    names = {name for name, _ in getattr(head.embedding, "named_parameters", list)()}
    assert names <= {"weight"}


@pytest.mark.parametrize(
    ("changes", "field", "told"),
    [
        ({"head": "medusa"}, "head", "beside its target"),
        ({"head": "nowhere"}, "head", "no file or folder"),
        ({"target": "no_target"}, "target", "no_target"),
        ({"head_states": ("1", "3")}, "head_states", "is 1,3, but the head reads 3 states"),
        ({"head_states": ("a",)}, "head_states", "no comma list"),
        ({"head_states": ("1", "3", "99")}, "head_states", "inputs of layers 0 to"),
    ],
)
def test_what_cannot_be_a_far_head_stops_the_start(target, heads, tmp_path, changes, field, told):
    (tmp_path / "no_target").mkdir()
    tiny_heads.write_medusa(tmp_path / "medusa", target)
    values = {"head": heads["eagle3"], "target": str(target), "head_states": ()}
    for name, value in changes.items():
        values[name] = value if name == "head_states" else str(tmp_path / value)
    with pytest.raises(InvalidArgument, match=told) as caught:
        load_model(DraftWorkerSettings(num_threads=1, **values))
    assert caught.value.field == field
