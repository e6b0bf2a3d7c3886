"""bf16 greedy text with speculation against plain text, token for token: `make bench-exact`.

Each prompt is decoded plain and alone; then with drafts and alone; then with drafts among seven others at once. γ and
drafter change from prompt to prompt. All prompts share a beginning, which a prefix cache may reuse, and the target's
cache is too small for all streams, so that they queue or preempt one another.
The last line of stdout is one JSON object: prompts, how many gave the same text all three times, streams at once, and
drafts checked. Exit code 1 when numerics=exact gave another text, 3 when nothing was drafted.

Variables: TARGET, DRAFT (both or neither), PROMPTS (a JSONL file, a number, or FILE:NUMBER), NUMERICS (exact, or
fast to see what it would cost to do without), MAX_TOKENS, DTYPE.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from options import models, number, prompts, text

from outrider.cli.bench_runs import PLAIN as PLAIN_OPTIONS
from outrider.cli.bench_runs import Bench, Cell, bench_services
from outrider.cli.console import EXIT_FAILURE, EXIT_INCONCLUSIVE, err, print_json, reporting_errors
from outrider.client import GenerateOptions
from outrider.results import Completion
from outrider.settings import TargetWorkerSettings

EXACT = "exact"
CONCURRENCY = 8
DEFAULT_NUM_PROMPTS = 200
GAMMAS = (1, 2, 3, 4, 5, 8)
SHARED_BEGINNING = (
    "You answer questions of all kinds for the readers of a small weekly paper. Be exact, say what you do not know, "
    "and prefer short sentences. Where a question leaves something open, choose what is most likely and say so."
)
STYLES = ("", "Answer briefly. ", "Explain every step. ", "Give an example first. ", "Write for an expert. ")
CACHE_BYTES = 48 << 20


def main() -> None:
    with reporting_errors():
        target, draft = models()
        texts, count = prompts(DEFAULT_NUM_PROMPTS)
        asked = distinct(texts, count)
        dtype = text("DTYPE", "auto" if target.startswith("toy:") else "bfloat16")
        settings = TargetWorkerSettings(model=target, dtype=dtype)  # type: ignore[arg-type]
        numerics = numerics_mode()
        result = asyncio.run(run(settings, draft, asked, number("MAX_TOKENS", 128), numerics))
    print_json(result)
    if not result["drafted"]:
        raise SystemExit(EXIT_INCONCLUSIVE)
    if numerics == EXACT and result["identical"] < result["prompts"]:
        raise SystemExit(EXIT_FAILURE)


def numerics_mode() -> str:
    """NUMERICS, exact where the workers have such a mode; empty where they have no modes."""
    if "numerics" not in TargetWorkerSettings.model_fields:
        print("numerics: as the engine has them, there is no exact mode in this version")
        return ""
    mode = text("NUMERICS", EXACT)
    print(f"numerics: {mode}")
    return mode


def distinct(texts: Sequence[str], count: int) -> list[str]:
    """`count` different prompts: each text in each style, and numbered when even those are too few."""
    found = []
    for index in range(count):
        lap, style = divmod(index // len(texts), len(STYLES))
        begin = f"(Question {lap}) " if lap else ""
        found.append(f"{begin}{STYLES[style]}{texts[index % len(texts)]}")
    return found


async def run(
    settings: TargetWorkerSettings, draft: str, texts: list[str], max_tokens: int, numerics: str
) -> dict[str, Any]:
    common: GenerateOptions = {"max_tokens": max_tokens, "ignore_eos": True}
    worker: dict[str, Any] = {}
    if not settings.model.startswith("toy:"):
        worker["kv_cache_bytes"] = CACHE_BYTES
    if numerics:
        worker["numerics"] = numerics
    async with bench_services(settings, draft, common, {}, **worker) as bench:
        asked = _prompts(bench, texts)
        options = [_options(bench, index) for index in range(len(asked))]
        err.print("[dim]plain, alone[/]")
        plain = [await bench.client.complete(p, **common, temperature=0.0, **PLAIN_OPTIONS) for p in asked]
        err.print("[dim]speculative, alone[/]")
        alone = [await _ask(bench, prompt, common, o) for prompt, o in zip(asked, options, strict=True)]
        err.print(f"[dim]speculative, {CONCURRENCY} at once[/]")
        together = await _ask_together(bench, asked, common, options)
    num_identical = 0
    for index, answers in enumerate(zip(plain, alone, together, strict=True)):
        differences = [first_difference(answers[0].token_ids, answer.token_ids) for answer in answers[1:]]
        num_identical += differences == [None, None]
        for where, position in zip(("alone", f"{CONCURRENCY} at once"), differences, strict=True):
            if position is not None:
                print(f"prompt {index}, {where}, γ {options[index]['num_speculative_tokens']}: differs at {position}")
    speculative = [*alone, *together]
    drafted = sum(answer.speculation.num_draft_tokens for answer in speculative)
    accepted = sum(answer.speculation.num_accepted_draft_tokens for answer in speculative)
    cached = sum(answer.usage.cached_tokens for answer in speculative)
    print(f"{accepted} of {drafted} drafts accepted; {cached} prompt tokens came from a prefix cache")
    return {"prompts": len(asked), "identical": num_identical, "concurrency": CONCURRENCY, "drafted": drafted}


def _prompts(bench: Bench, texts: list[str]) -> list[Any]:
    prompts = bench.prompts(Cell("mixed", 0.0, tuple(texts)))
    if bench.info.has_chat_template:
        return [[{"role": "system", "content": SHARED_BEGINNING}, *prompt] for prompt in prompts]
    return prompts


def _options(bench: Bench, index: int) -> GenerateOptions:
    """γ and drafter in turn."""
    drafters = bench.info.drafters or ("auto",)
    return {
        "num_speculative_tokens": GAMMAS[index % len(GAMMAS)],
        "drafter": drafters[index // len(GAMMAS) % len(drafters)],
    }


async def _ask(bench: Bench, prompt: Any, common: GenerateOptions, options: GenerateOptions) -> Completion:
    asked: GenerateOptions = {**common, "temperature": 0.0, **options}
    return await bench.client.complete(prompt, **asked)


async def _ask_together(
    bench: Bench, prompts: list[Any], common: GenerateOptions, options: list[GenerateOptions]
) -> list[Completion]:
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(prompt: Any, own: GenerateOptions) -> Completion:
        async with places:
            return await _ask(bench, prompt, common, own)

    return await asyncio.gather(*(one(prompt, own) for prompt, own in zip(prompts, options, strict=True)))


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first id that differs; None for equal ids."""
    if plain == other:
        return None
    shorter = min(len(plain), len(other))
    return next((index for index in range(shorter) if plain[index] != other[index]), shorter)


if __name__ == "__main__":
    main()
