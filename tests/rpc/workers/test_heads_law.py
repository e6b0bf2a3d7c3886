"""Sampled text of a real tiny target through the services, drafted by heads, their trees, and its own first layers: the
joint law of the first tokens is the target's."""

import asyncio
from collections import Counter

import pytest
from conftest import scaled
from law import FALSE_ALARM, chi_square, joint_law
from stack import in_process_stack

torch = pytest.importorskip("torch")

import tiny_heads  # noqa: E402
import transformers  # noqa: E402
from test_self_drafters_served import write_exit  # noqa: E402

from outrider.client import Client  # noqa: E402
from outrider.sampling.params import SamplingParams  # noqa: E402

DRAFTERS = ("eagle", "eagle-tree", "eagle3-tree", "medusa-tree", "exit", "skip")
PROMPT = [5, 6, 7]
NUM_TOKENS = 3
BUSY = {"temperature": 1.2, "top_k": 3, "frequency_penalty": 0.2}


class Rows:
    """A checkpoint as `law` reads models."""

    def __init__(self, folder):
        self._model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()

    @torch.inference_mode()
    def row(self, ids):
        return self._model(input_ids=torch.tensor([list(ids)])).logits[0, -1].numpy()


@pytest.mark.slow
async def test_the_joint_law_is_the_targets(tmp_path, monkeypatch) -> None:
    """Under both rules that sample, in turn."""
    monkeypatch.setattr("coordinator.fleet.worker.PROBE_TIMEOUT_S", 60.0)  # a busy machine is no lost worker
    target = tiny_heads.write_target(tmp_path / "target")
    heads = (
        tiny_heads.write_eagle(tmp_path / "eagle"),
        tiny_heads.write_eagle3(tmp_path / "eagle3", target, [i for i in range(tiny_heads.VOCAB) if i % 7]),
        tiny_heads.write_medusa(tmp_path / "medusa", target),
        write_exit(tmp_path / "exit", target),
    )
    expected = joint_law(Rows(target), SamplingParams(**BUSY), NUM_TOKENS, prompt=PROMPT)
    worker = {"heads": (*map(str, heads), "skip:2;3"), "num_threads": 1}
    async with in_process_stack(str(target), None, target_worker=worker) as stack, Client(stack.address) as client:
        for drafter in DRAFTERS:

            async def one(seed: int, drafter: str = drafter):
                return await client.complete(
                    PROMPT, seed=seed, max_tokens=5, acceptance=("token", "block")[seed % 2], drafter=drafter,
                    ignore_eos=True, num_speculative_tokens=2 + seed // 2 % 3, **BUSY,
                )  # fmt: skip

            answers = []
            for start in range(0, scaled(1000, at_least=100), 10):
                answers += await asyncio.gather(*(one(seed) for seed in range(start, start + 10)))
            drafted = sum(answer.speculation.num_draft_tokens for answer in answers)
            assert 0 < sum(a.speculation.num_accepted_draft_tokens for a in answers) < drafted, "INCONCLUSIVE"
            counts = Counter(tuple(answer.token_ids[:NUM_TOKENS]) for answer in answers)
            assert chi_square(counts, expected) > FALSE_ALARM, drafter
