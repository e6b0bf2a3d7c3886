"""The model and the head that come with the package, as `outrider up` pairs them: same text, fewer passes."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from conftest import scaled
from stack import in_process_stack

import outrider
from outrider.cli.options import choose_draft, choose_heads
from outrider.cli.stack import DEFAULT_MODEL
from outrider.drafts import head_folder
from outrider.errors import OutriderError

PROMPTS = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "user", "content": "Write a Python function that adds two numbers."}],
]
HEADS = choose_heads(DEFAULT_MODEL, "auto")
SMALL = {"kv_cache_bytes": 64 << 20, "num_threads": 1}


def test_a_user_who_names_nothing_gets_the_head_and_no_draft_worker() -> None:
    assert len(HEADS) == 1
    assert choose_draft(DEFAULT_MODEL, "auto", HEADS) is None


@pytest.mark.slow
async def test_greedy_and_coupled_text_is_plain_text() -> None:
    worker = {"heads": HEADS, **SMALL}
    async with in_process_stack(DEFAULT_MODEL, None, target_worker=worker) as stack:
        async with outrider.Client(stack.address, timeout_s=120) as client:
            name, trees = (await client.model_info()).drafters[:2]
            assert trees == f"{name}-tree"
            num_drafted = num_accepted = 0
            for prompt in PROMPTS:
                for options in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 5}):
                    asked = {"max_tokens": scaled(40, at_least=16), **options}
                    plain = await client.complete(prompt, num_speculative_tokens=0, **asked)
                    fixed = [{"drafter": drafter, "num_speculative_tokens": 3} for drafter in (name, trees)]
                    for more in (*fixed, {"drafter": name}, {}):
                        answer = await client.complete(prompt, **asked, **more)
                        assert answer.token_ids == plain.token_ids, more
                        if more.get("num_speculative_tokens"):
                            num_drafted += answer.speculation.num_draft_tokens
                            num_accepted += answer.speculation.num_accepted_draft_tokens
    assert num_drafted > 0, "INCONCLUSIVE: nothing was drafted"
    assert num_accepted > 0.12 * num_drafted, "the head hardly ever agrees with its target"


@pytest.mark.slow
async def test_another_models_head_is_refused_at_start(tmp_path: Path) -> None:
    shipped = head_folder(HEADS[0])
    assert shipped is not None
    config = json.loads((shipped / "config.json").read_text())
    config["outrider"] |= {"target_model": "another", "target_fingerprints": {"float32": "0" * 64}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(shipped / "model.safetensors")
    with pytest.raises(OutriderError, match="trained for 'another', whose weights are not those of smollm2-135m"):
        async with in_process_stack(DEFAULT_MODEL, None, target_worker={"heads": (str(tmp_path),), **SMALL}):
            pytest.fail("it cannot have started")


@pytest.mark.slow
async def test_the_demo_shows_it() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider.cli", "demo", f"--max-tokens={scaled(64, at_least=8)}",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await asyncio.wait_for(process.communicate(), 280)
    assert process.returncode == 0, errors.decode()
    assert "drafts of the target's own head (eagle3), γ = 3" in output.decode()
