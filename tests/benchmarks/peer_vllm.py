"""Peer: vLLM, plain and with a draft model. Run by peers.py with a job file, in vLLM's own Python.

A vLLM process has one γ, so a job for it names one. One prompt at a time; a repeated prompt is computed anew.
"""

from __future__ import annotations

import time
from typing import Any

from jobs import PLAIN, Job, Seconds, answer, tell
from vllm import LLM, SamplingParams


def main() -> None:
    job = Job.read()
    (gamma,) = job.gammas
    speculation: dict[str, Any] = {}
    if gamma != PLAIN:
        speculation["speculative_config"] = {
            "method": "draft_model",
            "model": job.draft,
            "num_speculative_tokens": gamma,
        }
    tell(f"vLLM, γ {gamma}: starting, which compiles for minutes")
    engine = LLM(
        model=job.target,
        dtype=job.dtype,
        max_model_len=max(map(len, job.prompts)) + job.max_tokens + 64,
        max_num_seqs=8,
        enable_prefix_caching=False,
        **speculation,
    )
    seconds: Seconds = {}
    for temperature in job.temperatures:
        tell(f"vLLM, γ {gamma}, temperature {temperature:g}: {len(job.prompts)} prompts")
        generate(engine, job.prompts[0], min(8, job.max_tokens), temperature)  # warm-up
        seconds[gamma, temperature] = [generate(engine, ids, job.max_tokens, temperature) for ids in job.prompts]
    answer(seconds)


def generate(engine: Any, prompt_ids: list[int], num_tokens: int, temperature: float) -> float:
    """Seconds. Raises RuntimeError when the answer has another length than asked for."""
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, seed=1, ignore_eos=True)
    begin = time.perf_counter()
    (result,) = engine.generate([{"prompt_token_ids": prompt_ids}], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    if len(result.outputs[0].token_ids) != num_tokens:
        raise RuntimeError(f"{len(result.outputs[0].token_ids)} tokens came, not {num_tokens}")
    return seconds


if __name__ == "__main__":
    main()
