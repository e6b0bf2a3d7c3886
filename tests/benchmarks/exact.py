"""bf16 text with speculation against plain text, token for token: `make bench-exact`.

Each prompt is decoded plain, alone and with nothing in the prefix cache; then with drafts and alone; then with drafts
among seven others at once. γ and drafter change from prompt to prompt. The prompts share a beginning, which the prefix
cache reuses, and the target's cache holds little more than half of eight streams, so that they preempt one another and
are computed again. Prompts go in batches, each through all three, so that a run cut short has compared what it did.
The last line of stdout is one JSON object: prompts, how many gave the same text all three times, streams at once,
drafts checked; and, of the eight at once, preemptions and answers that began with a prefix hit. Exit code 1 when
numerics=exact gave another text; 3, INCONCLUSIVE, when it did not but nothing was drafted, preempted or reused.

Variables: TARGET, DRAFT (both or neither), PROMPTS (a JSONL file, a number, or FILE:NUMBER), NUMERICS (exact, or
fast to see what it would cost to do without), MAX_TOKENS, DTYPE, TEMPERATURE (0, greedy; above, the COUPLED rule, whose
text drafts do not change either), CACHE_BYTES (of the target, where its config.json does not tell).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from options import models, number, prompts, real, text

from outrider.cli.bench_runs import PLAIN as PLAIN_OPTIONS
from outrider.cli.bench_runs import Bench, Cell, bench_services
from outrider.cli.bundles import prepare
from outrider.cli.console import EXIT_FAILURE, EXIT_INCONCLUSIVE, err, print_json, reporting_errors
from outrider.client import Client, GenerateOptions
from outrider.errors import InvalidArgument
from outrider.results import Completion
from outrider.settings import CoordinatorSettings, TargetWorkerSettings

EXACT = "exact"
CONCURRENCY = 8
DEFAULT_NUM_PROMPTS = 200
BATCH = 5 * CONCURRENCY
GAMMAS = (1, 2, 3, 4, 5, 8)
SHARED_BEGINNING = (
    "You answer questions of all kinds for the readers of a small weekly paper. Be exact, say what you do not know, "
    "and prefer short sentences. Where a question leaves something open, choose what is most likely and say so."
)
SHARED_IDS = [5, 3, 1, 4] * 10
"""The beginning of a toy's prompts."""
STYLES = ("", "Answer briefly. ", "Explain every step. ", "Give an example first. ", "Write for an expert. ")
CACHE_SHARE = 0.55
"""Of what so many streams of average length take: enough for the longest one, too little for all."""
OVERCOMMIT = 8.0
TOY_BYTES_PER_TOKEN = 8
MEAN_CHARS_PER_TOKEN, MIN_CHARS_PER_TOKEN = 4, 2
SPARE_TOKENS = 40
"""A chat template's own, and drafts."""


@dataclass
class Tally:
    """What was compared so far."""

    num_prompts: int = 0
    num_identical: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    num_prefix_hits: int = 0

    def missing(self) -> list[str]:
        """What never happened, so that nothing is shown about it."""
        events = {
            "drafted": self.num_drafted, "preempted": self.num_preemptions, "found in the prefix cache":
            self.num_prefix_hits,
        }  # fmt: skip
        return [event for event, count in events.items() if not count]

    def figures(self) -> dict[str, Any]:
        """The last line."""
        return {
            "prompts": self.num_prompts,
            "identical": self.num_identical,
            "concurrency": CONCURRENCY,
            "drafted": self.num_drafted,
            "preemptions": self.num_preemptions,
            "prefix_hits": self.num_prefix_hits,
        }


def main() -> None:
    with reporting_errors():
        target, draft = models()
        texts, count = prompts(DEFAULT_NUM_PROMPTS)
        asked = distinct(texts, count)
        dtype = text("DTYPE", "auto" if target.startswith("toy:") else "bfloat16")
        max_tokens = number("MAX_TOKENS", 128)
        numerics = text("NUMERICS", EXACT)
        common = common_options(max_tokens, real("TEMPERATURE", 0.0))
        if not target.startswith("toy:"):
            target, draft = prepare(target), prepare(draft)
        settings = TargetWorkerSettings(model=target, dtype=dtype, numerics=numerics)  # type: ignore[arg-type]
        worker: dict[str, Any] = {"numerics": numerics, "cache_overcommit": OVERCOMMIT}
        given = text("CACHE_BYTES")
        worker["kv_cache_bytes"] = number("CACHE_BYTES", 1) if given else cache_bytes(settings, asked, max_tokens)
        tally = asyncio.run(run(settings, draft, asked, common, worker))
    for event in tally.missing():
        print(f"INCONCLUSIVE: nothing was {event}")
    print_json(tally.figures())
    if numerics == EXACT and tally.num_identical < tally.num_prompts:
        raise SystemExit(EXIT_FAILURE)
    if tally.missing():
        raise SystemExit(EXIT_INCONCLUSIVE)


def common_options(max_tokens: int, temperature: float) -> GenerateOptions:
    """What all requests share. Above temperature 0 the COUPLED rule, whose text does not depend on drafts."""
    shared: GenerateOptions = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": temperature}
    if temperature:
        shared |= {"acceptance": "coupled", "seed": 1}
    return shared


def distinct(texts: Sequence[str], count: int) -> list[str]:
    """`count` different prompts: each text in each style, and numbered when even those are too few."""
    found = []
    for index in range(count):
        lap, style = divmod(index // len(texts), len(STYLES))
        begin = f"(Question {lap}) " if lap else ""
        found.append(f"{begin}{STYLES[style]}{texts[index % len(texts)]}")
    return found


def cache_bytes(settings: TargetWorkerSettings, texts: Sequence[str], max_tokens: int) -> int:
    """A cache for the longest stream, and for CACHE_SHARE of CONCURRENCY streams. Token counts are estimates."""
    if settings.model.startswith("toy:"):
        own, per_token = len(SHARED_IDS) + max_tokens, TOY_BYTES_PER_TOKEN
        mean = longest = own
    else:
        own, per_token = max_tokens + SPARE_TOKENS, bytes_per_token(Path(settings.model), settings.dtype)
        lengths = [len(text) + len(SHARED_BEGINNING) for text in texts]
        mean = own + sum(lengths) // len(lengths) // MEAN_CHARS_PER_TOKEN
        longest = own + max(lengths) // MIN_CHARS_PER_TOKEN
    tokens = max(longest + SPARE_TOKENS, int(CACHE_SHARE * CONCURRENCY * mean))
    err.print(f"[dim]the target's cache holds {tokens} tokens[/]")
    return tokens * per_token


def bytes_per_token(folder: Path, dtype: str) -> int:
    """Keys and values of one token. Raises InvalidArgument where there is no config.json."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except OSError:
        raise InvalidArgument(f"{folder} has no config.json: give CACHE_BYTES", field="CACHE_BYTES") from None
    num_heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // num_heads
    num_values = 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", num_heads) * width
    return int(num_values) * (4 if dtype == "float32" else 2)


async def run(
    settings: TargetWorkerSettings, draft: str, texts: list[str], common: GenerateOptions, worker: dict[str, Any]
) -> Tally:
    tally = Tally()
    started_s = time.monotonic()
    async with bench_services(settings, draft, common, {}, **worker) as bench:
        (target,) = (w for w in (await bench.client.server_info()).workers if w.role == "target")
        print(f"numerics: {target.numerics.summary()}", flush=True)
        asked = _prompts(bench, texts)
        for start in range(0, len(asked), BATCH):
            await _compare(bench, start, asked[start : start + BATCH], tally)
            minutes = (time.monotonic() - started_s) / 60
            print(f"{minutes:.1f} min: {json.dumps(tally.figures())}", flush=True)
    print(f"{tally.num_accepted} of {tally.num_drafted} drafts accepted")
    return tally


async def _compare(bench: Bench, start: int, asked: list[Any], tally: Tally) -> None:
    """One batch, of which the first prompt is number `start`, through all three."""
    own = [_speculation(bench, start + index) for index in range(len(asked))]
    err.print(f"[dim]prompts {start} to {start + len(asked) - 1}: plain, alone[/]")
    plain = [await _ask_as(secrets.token_hex(8), bench, prompt, PLAIN_OPTIONS) for prompt in asked]
    err.print("[dim]speculative, alone[/]")
    alone = [await _ask(bench.client, bench, prompt, o) for prompt, o in zip(asked, own, strict=True)]
    err.print(f"[dim]speculative, {CONCURRENCY} at once[/]")
    before = (await bench.cache_counters("target")).num_preemptions
    together = await _ask_together(bench, asked, own)
    tally.num_preemptions += (await bench.cache_counters("target")).num_preemptions - before
    tally.num_prefix_hits += sum(answer.usage.cached_tokens > 0 for answer in together)
    tally.num_prompts += len(asked)
    for answer in [*alone, *together]:
        tally.num_drafted += answer.speculation.num_draft_tokens
        tally.num_accepted += answer.speculation.num_accepted_draft_tokens
    for index, answers in enumerate(zip(plain, alone, together, strict=True)):
        differences = [first_difference(answers[0].token_ids, answer.token_ids) for answer in answers[1:]]
        tally.num_identical += differences == [None, None]
        for where, position in zip(("alone", f"{CONCURRENCY} at once"), differences, strict=True):
            if position is not None:
                gamma = own[index]["num_speculative_tokens"]
                print(f"prompt {start + index}, {where}, γ {gamma}: differs at {position}", flush=True)


def _prompts(bench: Bench, texts: list[str]) -> list[Any]:
    prompts: list[Any] = bench.prompts(Cell("mixed", 0.0, tuple(texts)))
    if bench.info.simulated:
        return [[*SHARED_IDS, *prompt] for prompt in prompts]
    if bench.info.has_chat_template:
        return [[{"role": "system", "content": SHARED_BEGINNING}, *prompt] for prompt in prompts]
    return [f"{SHARED_BEGINNING}\n\n{prompt}" for prompt in prompts]


def _speculation(bench: Bench, index: int) -> GenerateOptions:
    """γ and drafter in turn."""
    drafters = bench.info.drafters or ("auto",)
    return {
        "num_speculative_tokens": GAMMAS[index % len(GAMMAS)],
        "drafter": drafters[index // len(GAMMAS) % len(drafters)],
    }


async def _ask(client: Client, bench: Bench, prompt: Any, own: GenerateOptions) -> Completion:
    asked: GenerateOptions = {**bench.common, **own}
    return await client.complete(prompt, **asked)


async def _ask_as(tenant: str, bench: Bench, prompt: Any, own: GenerateOptions) -> Completion:
    """As a tenant of its own, with whom nobody shares what was computed."""
    metadata = {CoordinatorSettings().trusted_tenant_header: tenant}
    async with Client(bench.stack.address, metadata=metadata) as client:
        return await _ask(client, bench, prompt, own)


async def _ask_together(bench: Bench, prompts: list[Any], own: list[GenerateOptions]) -> list[Completion]:
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(prompt: Any, options: GenerateOptions) -> Completion:
        async with places:
            return await _ask(bench.client, bench, prompt, options)

    return await asyncio.gather(*(one(prompt, options) for prompt, options in zip(prompts, own, strict=True)))


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first id that differs; None for equal ids."""
    if plain == other:
        return None
    shorter = min(len(plain), len(other))
    return next((index for index in range(shorter) if plain[index] != other[index]), shorter)


if __name__ == "__main__":
    main()
