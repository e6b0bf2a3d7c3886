"""Drafts with int8 weights and a trimmed vocabulary, through the real services: faster guesses, the same promises."""

import asyncio
import json

import numpy as np
import pytest
from conftest import scaled
from stack import in_process_stack
from test_law import FALSE_ALARM, MAX_TOKENS, PROMPT, TARGET, Uniforms
from test_tiny_families import VOCAB, save_tiny

torch = pytest.importorskip("torch")

import outrider  # noqa: E402
from outrider.lm.loading import load_model  # noqa: E402
from outrider.sampling.params import AcceptanceRule, SamplingParams  # noqa: E402
from outrider.settings import DraftWorkerSettings, TargetWorkerSettings  # noqa: E402

KINDS = ("int8", "int4", "trimmed", "both")
LISTED = [0, 2, 5]


@pytest.fixture
def listed(tmp_path):
    """A list of 3 of the 8 ids of the toys."""
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(LISTED))
    return str(path)


@pytest.mark.slow
async def test_sampled_text_follows_the_law_with_a_trimmed_draft(listed):
    """Five of eight ids are never drafted; the target's law gives them all the same."""
    num_streams, drafted, accepted = scaled(300), 0, 0
    async with (
        in_process_stack(TARGET, TARGET, draft_worker={"draft_vocab": listed}) as stack,
        outrider.Client(stack.address) as client,
    ):
        for rule in ("token", "block"):
            for options in ({}, {"temperature": 0.7, "top_k": 4, "repetition_penalty": 1.2}):
                options = {"temperature": 1.0, **options}
                uniforms = Uniforms(seed=len(options))
                answers = await asyncio.gather(
                    *(
                        client.complete(
                            PROMPT, seed=seed, max_tokens=MAX_TOKENS, acceptance=rule, drafter="model",
                            num_speculative_tokens=1 + seed % 4, **options,
                        )
                        for seed in range(num_streams)
                    )
                )  # fmt: skip
                for answer in answers:
                    uniforms.add(answer.token_ids, SamplingParams(acceptance=AcceptanceRule[rule.upper()], **options))
                drafted += sum(a.speculation.num_draft_tokens for a in answers)
                accepted += sum(a.speculation.num_accepted_draft_tokens for a in answers)
                assert min(uniforms.p_values()) > FALSE_ALARM / 8, (rule, options)
                assert len(np.unique(np.concatenate([a.token_ids for a in answers]))) == 8
    assert 0 < accepted < drafted, "INCONCLUSIVE"


async def test_a_request_that_rules_out_every_listed_id_is_served_all_the_same(listed):
    async with (
        in_process_stack(TARGET, TARGET, draft_worker={"draft_vocab": listed}) as stack,
        outrider.Client(stack.address) as client,
    ):
        common = {"temperature": 0.0, "max_tokens": 20, "allowed_token_ids": [1, 3, 4]}
        plain = await client.complete(PROMPT, num_speculative_tokens=0, **common)
        cornered = await client.complete(PROMPT, num_speculative_tokens=3, drafter="model", **common)
        assert cornered.token_ids == plain.token_ids
        free = await client.complete(PROMPT, temperature=0.0, max_tokens=20, num_speculative_tokens=3, drafter="model")
        assert free.speculation.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_greedy_and_coupled_text_equals_plain_text(kind, tmp_path):
    """The draft is the target itself, rounded or trimmed: it agrees often, not always."""
    folder = tmp_path / "model"
    save_tiny(folder, "qwen2", seed=1)
    path = tmp_path / "ids.txt"
    path.write_text("\n".join(map(str, range(2, VOCAB, 2))))
    weight_dtype = {"int4": "int4", "trimmed": "auto"}.get(kind, "int8")
    draft = load_model(
        DraftWorkerSettings(
            model=str(folder),
            dtype="float32",
            num_threads=1,
            weight_dtype=weight_dtype,
            draft_vocab="" if kind in ("int8", "int4") else str(path),
        )
    )
    target = load_model(TargetWorkerSettings(model=str(folder), dtype="float32", num_threads=1))
    assert (f"{weight_dtype} weights" in draft.description.numerics_fingerprint) == (kind != "trimmed")
    assert draft.description.vocab_size == target.description.vocab_size == VOCAB
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, VOCAB, n).tolist() for n in (3, 9, 20, 37)]
    drafted = accepted = 0
    async with (
        in_process_stack(target, draft, worker={"kv_cache_bytes": 1 << 24}) as stack,
        outrider.Client(stack.address) as client,
    ):
        for options in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 5, "acceptance": "coupled"}):
            common = {"max_tokens": 30, "ignore_eos": True, **options}
            plain = await texts(client, prompts, num_speculative_tokens=0, **common)
            assert len({a.token_ids for a in plain}) > 1
            for gamma in (1, 2, 4, 8):
                answers = await texts(client, prompts, num_speculative_tokens=gamma, drafter="model", **common)
                assert [a.token_ids for a in answers] == [a.token_ids for a in plain], (options, gamma)
                drafted += sum(a.speculation.num_draft_tokens for a in answers)
                accepted += sum(a.speculation.num_accepted_draft_tokens for a in answers)
    assert 0 < accepted < drafted, "INCONCLUSIVE: the draft agreed always or never"


async def texts(client, prompts, **options):
    return await asyncio.gather(*(client.complete(prompt, **options) for prompt in prompts))
