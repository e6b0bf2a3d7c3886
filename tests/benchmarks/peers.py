"""Outrider beside its peers on this machine: `make bench-peers TARGET=... DRAFT=... PEER_PYTHON=...`.

Every engine gets the same token ids, one prompt at a time, and gives answers of the same length, after a warm-up and
with no prompt cache. A ratio is the median over prompts of our tokens/s over the peer's; where a peer can draft, its
best γ of a few counts. Our draft and target worker are processes of their own, with the coordinator and gRPC between.
The last line of stdout is one JSON object; a peer that is absent gives null, and a line above says why.

Variables: TARGET, DRAFT (both or neither), PROMPTS (a JSONL file, a number, or FILE:NUMBER), PEER_PYTHON (a Python that
has vLLM), MAX_TOKENS, DTYPE, DRAFT_WEIGHT_DTYPE (of our draft worker: auto, int8 or int4), DRAFT_VOCAB (its ids, a file
of `outrider draft-vocab`), GAMMAS (of transformers, comma separated), VLLM_GAMMAS (of vLLM, which starts anew for each,
for minutes: give several to know its best one).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bandwidth import NUM_BYTES, bytes_read, read_bandwidth
from jobs import PLAIN, TRANSFORMERS, VLLM, Job, PeerAbsent, Seconds, run_peer
from options import models, number, prompts, text, whole_numbers

from outrider.cli.bench_profile import PREFILL
from outrider.cli.bench_runs import NEUTRAL, Bench, Cell, bench_services
from outrider.cli.bench_runs import PLAIN as PLAIN_OPTIONS
from outrider.cli.bundles import prepare
from outrider.cli.console import err, print_json, reporting_errors
from outrider.cli.measure import Timed, median, steps_of
from outrider.cli.prompts import spread
from outrider.client import GenerateOptions
from outrider.settings import DraftWorkerSettings, TargetWorkerSettings

TEMPERATURES = (0.0, 1.0)
DEFAULT_NUM_PROMPTS = 4


@dataclass(frozen=True)
class Ours:
    """What our services did. seconds[0, t] is plain, seconds[1, t] speculative with adaptive γ."""

    seconds: Seconds
    prompt_ids: list[list[int]]
    pass_ms: float
    weight_bytes: int
    bytes_per_s: float
    num_draft_tokens: int
    dtype: str
    simulated: bool


def main() -> None:
    with reporting_errors():
        target, draft = models()
        texts, count = prompts(DEFAULT_NUM_PROMPTS)
        dtype = text("DTYPE", "auto" if target.startswith("toy:") else "bfloat16")
        max_tokens = number("MAX_TOKENS", 96)
        gammas = {"transformers": whole_numbers("GAMMAS", "2,3,5"), "vllm": whole_numbers("VLLM_GAMMAS", "3")}
        draft_worker = DraftWorkerSettings(
            weight_dtype=text("DRAFT_WEIGHT_DTYPE", "auto"),  # type: ignore[arg-type]
            draft_vocab=text("DRAFT_VOCAB"),
        )
        paths = [prepare(model) for model in (target, draft)]
        settings = TargetWorkerSettings(model=paths[0], dtype=dtype)  # type: ignore[arg-type]
        ours = asyncio.run(run_ours(settings, paths[1], draft_worker, spread(texts, count), max_tokens))
        job = Job(*paths, ours.dtype, max_tokens, ours.prompt_ids, list(TEMPERATURES), [])
        peers: dict[str, Seconds] = {}
        for name, run in (("transformers", run_transformers), ("vllm", run_vllm)):
            try:
                if ours.simulated:
                    raise PeerAbsent("the models are toys, which no peer can run")
                peers[name] = run(replace(job, gammas=[PLAIN, *gammas[name]]))
            except PeerAbsent as reason:
                say(f"{name} is absent: {reason}")
        for name, seconds in {"outrider": ours.seconds, **peers}.items():
            print_rates(name, seconds, max_tokens)
        if not ours.num_draft_tokens:
            say("INCONCLUSIVE: our speculative runs drafted nothing")
        print_json(figures(ours, peers))


async def run_ours(
    settings: TargetWorkerSettings, draft: str, draft_worker: DraftWorkerSettings, texts: list[str], max_tokens: int
) -> Ours:
    """Plain and speculative answers to each prompt in turn, and the read bandwidth before and after."""
    common: GenerateOptions = {**NEUTRAL, "max_tokens": max_tokens}
    speculation: GenerateOptions = {"acceptance": "block"}
    err.print("[dim]measuring the read bandwidth...[/]")
    # a toy reads no weights: its figure is not used, so it need not be good
    num_bytes = 1 << 20 if settings.model.startswith("toy:") else NUM_BYTES
    bytes_per_s = await asyncio.to_thread(read_bandwidth, num_bytes)
    worker = {"weight_dtype": draft_worker.weight_dtype, "draft_vocab": draft_worker.draft_vocab}
    async with bench_services(settings, draft, common, speculation, draft_worker=worker) as bench:
        runs: dict[tuple[int, float], list[Timed]] = {}
        asked = bench.prompts(Cell("mixed", 0.0, tuple(texts)))
        for index, prompt in enumerate([asked[0], *asked]):
            err.print(f"[dim]outrider, prompt {index} of {len(asked)}[/]")
            for temperature in TEMPERATURES:
                cell = Cell("mixed", temperature, ())
                for mode, options in enumerate((PLAIN_OPTIONS, speculation)):
                    timed = await bench.time(prompt, cell, options)
                    if index:  # the first one, asked twice, warms up
                        runs.setdefault((mode, temperature), []).append(timed)
        prompt_ids = [await _ids(bench, prompt) for prompt in asked]
        weight_bytes = bytes_read(Path(settings.model), bench.info.dtype)
        print_passes(await bench.worker_timings())
    bytes_per_s = max(bytes_per_s, await asyncio.to_thread(read_bandwidth, num_bytes))
    plain_steps = steps_of(run.completion for run in runs[0, 0.0])
    pass_ms = median(step.verify_ms - step.sampling_ms for step in plain_steps if step.reason != PREFILL)
    say(
        f"plain pass {pass_ms:.2f} ms; {weight_bytes / 1e9:.3f} GB of weights at {bytes_per_s / 1e9:.1f} GB/s (best "
        f"two-thread read) take {1000 * weight_bytes / bytes_per_s:.2f} ms"
    )
    return Ours(
        seconds={key: [run.last_s for run in timed] for key, timed in runs.items()},
        prompt_ids=prompt_ids,
        pass_ms=pass_ms,
        weight_bytes=weight_bytes,
        bytes_per_s=bytes_per_s,
        num_draft_tokens=sum(run.completion.speculation.num_draft_tokens for timed in runs.values() for run in timed),
        dtype=bench.info.dtype,
        simulated=bench.info.simulated,
    )


async def _ids(bench: Bench, prompt: Any) -> list[int]:
    return list(prompt) if bench.info.simulated else await bench.client.tokenize(prompt)


def run_transformers(job: Job) -> Seconds:
    return run_peer(sys.executable, TRANSFORMERS, job, on_progress=dim)


def run_vllm(job: Job) -> Seconds:
    """A process per γ. It is given every core: left to itself it keeps one free."""
    python = text("PEER_PYTHON")
    if not python:
        raise PeerAbsent("set PEER_PYTHON to a Python that has it")
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    if openmp.exists():
        environment["LD_PRELOAD"] = str(openmp)
    seconds: Seconds = {}
    for gamma in job.gammas:
        seconds |= run_peer(python, VLLM, replace(job, gammas=[gamma]), environment, dim)
    return seconds


def figures(ours: Ours, peers: dict[str, Seconds]) -> dict[str, float | None]:
    """The last line. null: the peer was absent, or the weights have no size (toys)."""

    def ratio(peer: str, mode: int, temperature: float) -> float | None:
        theirs = best_seconds(peers.get(peer, {}), mode, temperature)
        if theirs is None:
            return None
        return median(b / a for a, b in zip(ours.seconds[mode, temperature], theirs, strict=True))

    floor_ms = 1000 * ours.weight_bytes / ours.bytes_per_s
    return {
        **{f"plain_vs_{peer}": ratio(peer, 0, 0.0) for peer in ("transformers", "vllm")},
        **{f"t0_vs_{peer}": ratio(peer, 1, 0.0) for peer in ("transformers", "vllm")},
        **{f"t1_vs_{peer}": ratio(peer, 1, 1.0) for peer in ("transformers", "vllm")},
        "pass_vs_floor": ours.pass_ms / floor_ms if floor_ms else None,
    }


def best_seconds(seconds: Seconds, mode: int, temperature: float) -> list[float] | None:
    """Mode 0: plain. Mode 1: the γ that needs the least time over all prompts. None: not run."""
    wanted: Callable[[int], bool] = (lambda gamma: gamma == PLAIN) if mode == 0 else (lambda gamma: gamma != PLAIN)
    runs = [values for (gamma, t), values in seconds.items() if t == temperature and wanted(gamma)]
    return min(runs, key=sum) if runs else None


def print_rates(name: str, seconds: Seconds, max_tokens: int) -> None:
    for (gamma, temperature), values in sorted(seconds.items(), key=lambda item: (item[0][1], item[0][0])):
        mode = "plain" if gamma == PLAIN else "adaptive γ" if name == "outrider" else f"γ = {gamma}"
        rate = len(values) * max_tokens / sum(values)
        print(f"{name:12} T={temperature:g} {mode:10} {rate:8.2f} tokens/s")


def print_passes(workers: list[dict[str, Any]]) -> None:
    """The workers' own lines, for one stream."""
    for worker in workers:
        for line in worker["timings"]:
            if not line["prefill"] and line["max_sequences"] == 1:
                print(
                    f"{worker['role']:12} step {line['base_ms']:.2f} ms + {line['ms_per_row']:.3f} a row + "
                    f"{1000 * line['ms_per_context_token']:.3f} per 1,000 context tokens "
                    f"({line['min_rows']} to {line['max_rows']} rows, ±{line['spread_ms']:.2f})"
                )


def dim(line: str) -> None:
    """Progress, on stderr."""
    err.print(line, style="dim", markup=False)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
