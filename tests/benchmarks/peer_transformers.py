"""Peer: `generate` of transformers, plain and with an assistant model. Run by peers.py with a job file.

γ drafts a round, none held back by confidence. One prompt at a time, on all cores.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from jobs import PLAIN, Job, Seconds, answer, tell
from transformers import AutoModelForCausalLM, GenerationConfig


def main() -> None:
    job = Job.read()
    torch.set_num_threads(os.cpu_count() or 1)
    target = load(job.target, job.dtype)
    draft = load(job.draft, job.dtype) if job.draft else None
    prompts = [torch.tensor([ids]) for ids in job.prompts]
    seconds: Seconds = {}
    for temperature in job.temperatures:
        for gamma in job.gammas:
            if gamma == PLAIN or draft is not None:
                tell(f"transformers, temperature {temperature:g}, γ {gamma}")
                options = {} if gamma == PLAIN else {"assistant_model": assistant(draft, gamma)}
                generate(target, prompts[0], min(8, job.max_tokens), temperature, options)  # warm-up
                seconds[gamma, temperature] = [
                    generate(target, prompt, job.max_tokens, temperature, options) for prompt in prompts
                ]
    answer(seconds)


def load(path: str, dtype: str) -> Any:
    """The model with neutral generation settings: its own would change the law, and add work."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    own = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
    return model


def assistant(draft: Any, gamma: int) -> Any:
    draft.generation_config.num_assistant_tokens = gamma
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


def generate(target: Any, prompt: torch.Tensor, num_tokens: int, temperature: float, options: dict[str, Any]) -> float:
    """Seconds. Raises RuntimeError when the answer has another length than asked for."""
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(1)
    begin = time.perf_counter()
    output = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        **sampling,
        **options,
    )
    seconds = time.perf_counter() - begin
    if output.shape[1] - prompt.shape[1] != num_tokens:
        raise RuntimeError(f"{output.shape[1] - prompt.shape[1]} tokens came, not {num_tokens}")
    return seconds


if __name__ == "__main__":
    main()
