"""The GPU path on a GPU, `make bench-gpu`: equal texts, passes against the bandwidth floor, speculative against plain.

Random weights made on the device; needs torch, transformers and numpy and nothing else of what the services need. Runs
in a few minutes. Draft and target share one process and one GPU here; in the 8B part the drafts are simulated: they are
the plain text, wrong at a known rate, and cost nothing.

Text is compared in float32, where it must be equal, and told for bfloat16, where passes of different shapes may round
near-ties apart. The last line of stdout is one JSON object; what was not run is null. Without CUDA nothing is run. Exit
code 1 when a float32 text differs, 3 when nothing was drafted.

--cpu-tiny: everything on a CPU with a tiny model, to see that the script works; its times mean nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import outrider.lm  # noqa: F401  (before torch: it says how torch's threads wait)

KEYS = (
    "device", "attention", "captured", "text_equal_float32", "drafted", "text_equal_bfloat16", "bandwidth_gb_s",
    "pass_ms", "pass_vs_floor", "plain_tokens_per_s", "speculative_tokens_per_s", "speculative_vs_plain",
)  # fmt: skip
BUDGET_S = 330.0
"""Parts that would begin later are left out, and told."""
NUM_DRAFT_TOKENS = 4
AGREEMENT = 0.8


@dataclass(frozen=True)
class Scale:
    """What the two sizes of a run differ in."""

    device: str
    dtype: str
    shape: dict[str, Any]
    small_shape: dict[str, Any]
    context: int
    rows: tuple[int, ...]
    num_passes: int
    num_tokens: int
    copied_bytes: int


SMALL = {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA_8B = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
TINY = {**SMALL, "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
GPU_SCALE = Scale("cuda", "bfloat16", LLAMA_8B, SMALL, 512, (1, 8, 64), 30, 64, 4 << 30)
TINY_SCALE = Scale("cpu", "bfloat16", TINY, TINY, 24, (1, 8), 2, 8, 1 << 20)


def main(arguments: Sequence[str]) -> int:
    import torch

    figures: dict[str, Any] = dict.fromkeys(KEYS)
    if "--cpu-tiny" in arguments:
        torch.set_num_threads(1)
        scale = TINY_SCALE
        print("a tiny model on a CPU: the GPU check was not run, and times here mean nothing")
    elif torch.cuda.is_available():
        scale = GPU_SCALE
    else:
        print("there is no CUDA device here: the GPU check was not run")
        print(json.dumps(figures))
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    started_s = time.monotonic()
    figures["device"] = torch.cuda.get_device_name() if scale.device == "cuda" else "cpu (tiny model)"
    for part in (compare_texts, measure_large):
        if time.monotonic() - started_s > BUDGET_S:
            print(f"{part.__name__}: left out, {BUDGET_S:.0f} s are over")
            continue
        figures |= asyncio.run(part(scale))
        print(f"{part.__name__}: done after {time.monotonic() - started_s:.0f} s")
    print(json.dumps(figures))
    if not figures["drafted"]:
        return 3
    return 0 if figures["text_equal_float32"] else 1


def random_model(shape: dict[str, Any], dtype: str, device: str, seed: int = 0) -> Any:
    """A Llama with weights large enough that texts are no constant, on the device from the start."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(**shape, initializer_range=0.05, bos_token_id=None, eos_token_id=None)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    return model.to(getattr(torch, dtype)).eval()


def adapt(model: Any) -> Any:
    from outrider.lm.gpu.model import GpuModel

    config = model.config
    return GpuModel(model, vocab_size=config.vocab_size, context_length=config.max_position_embeddings)


def engine_over(model: Any, num_tokens: int) -> Any:
    from outrider.lm.engine import Engine

    return Engine(
        model, num_blocks=-(-num_tokens // 16) + 64, block_size=16, max_batch_tokens=512, max_waiting_sessions=64
    )


def prompts(vocab_size: int, count: int, length: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


class Stream:
    """One target session over an engine; `propose` gives the drafts of a round."""

    def __init__(self, engine: Any, prompt: list[int], sampling: Any, num_tokens: int) -> None:
        from outrider.sampling.params import StoppingParams
        from outrider.serving.messages import TargetOpening
        from target_worker.session import TargetSession

        self.engine, self.stopping = engine, StoppingParams(max_tokens=num_tokens)
        opening = TargetOpening(
            epoch=1, prompt_ids=prompt, sampling=sampling, stopping=self.stopping, max_draft_tokens=16
        )
        model = engine.model
        self.session = TargetSession(
            opening, vocab_size=model.vocab_size, context_length=model.context_length, max_draft_tokens=16
        )
        self.text: list[int] = []
        self.num_drafted = 0

    async def run(self, propose: Any = None) -> list[int]:
        from outrider.drafting.proposal import EMPTY
        from outrider.sampling.params import Finish

        session, engine = self.session, self.engine
        session.sequence = await engine.open_sequence(session.reserved_length)
        verdict = await engine.run(session.open())
        self.text = list(verdict.committed_ids)
        while session.finish is Finish.NONE:
            header, committed = session.log.header, verdict.committed_ids
            proposal = await propose(self, header, committed) if propose else EMPTY
            verdict = await engine.run(session.verify(header, (), proposal))
            self.text += verdict.committed_ids
            self.num_drafted += verdict.num_draft_tokens
        engine.close_sequence(session.sequence)
        return self.text


async def compare_texts(scale: Scale) -> dict[str, Any]:
    """Float32, greedy and COUPLED: plain, one stream at a time, against a real drafter, all streams at once."""
    import torch

    from draft_worker.session import DraftSession
    from outrider.sampling.params import AcceptanceRule, SamplingParams
    from outrider.serving.messages import DraftOpening

    target_model = random_model(scale.small_shape, "float32", scale.device)
    draft_model = random_model(scale.small_shape, "float32", scale.device)
    with torch.no_grad():
        for weight in draft_model.parameters():
            weight += 0.03 * weight.std() * torch.randn_like(weight)
    target, draft = (engine_over(adapt(m), 8 * 512) for m in (target_model, draft_model))
    target.start()
    draft.start()
    asked = prompts(target_model.config.vocab_size, 6, 20)
    num_equal = num_texts = num_drafted = 0
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(acceptance=AcceptanceRule.COUPLED, seed=5)):
        plain = [await Stream(target, prompt, sampling, scale.num_tokens).run() for prompt in asked]

        async def speculate(prompt: list[int], sampling: SamplingParams = sampling) -> Stream:
            stream = Stream(target, prompt, sampling, scale.num_tokens)
            opening = DraftOpening(epoch=1, prompt_ids=prompt, sampling=sampling, stopping=stream.stopping)
            own = DraftSession(opening, vocab_size=draft.model.vocab_size, context_length=draft.model.context_length)
            own.sequence = await draft.open_sequence(own.reserved_length)

            async def propose(stream: Stream, header: Any, committed: Sequence[int]) -> Any:
                return await draft.run(own.advance(header, committed, NUM_DRAFT_TOKENS, "model"))

            await stream.run(propose)
            draft.close_sequence(own.sequence)
            return stream

        streams = await asyncio.gather(*(speculate(prompt) for prompt in asked))
        num_texts += len(asked)
        num_equal += sum(stream.text == text for stream, text in zip(streams, plain, strict=True))
        num_drafted += sum(stream.num_drafted for stream in streams)
    target.stop()
    draft.stop()
    print(f"float32 texts: {num_equal} of {num_texts} equal, {num_drafted} drafts checked")
    return {"text_equal_float32": num_equal == num_texts, "drafted": num_drafted}


async def measure_large(scale: Scale) -> dict[str, Any]:
    """The pass of the large model by rows, then plain against speculative streams."""
    model = random_model(scale.shape, scale.dtype, scale.device)
    adapted = adapt(model)
    figures: dict[str, Any] = {}
    num_slots = max(scale.rows) * (scale.context + scale.num_tokens + 64)
    engine = engine_over(adapted, num_slots)
    bandwidth = copy_bandwidth(scale)
    floor_s = weight_bytes(model) / bandwidth
    figures["bandwidth_gb_s"] = round(bandwidth / 1e9, 1)
    times = {rows: pass_s(adapted, rows, scale) for rows in scale.rows}
    figures["pass_ms"] = {str(rows): round(1e3 * seconds, 3) for rows, seconds in times.items()}
    figures["pass_vs_floor"] = {str(rows): round(seconds / floor_s, 3) for rows, seconds in times.items()}
    steps = adapted._steps.values()
    figures["captured"] = all(step.is_captured for step in steps)
    figures["attention"] = sorted({step.attention_name for step in steps})[0]
    print(f"pass: {figures['pass_ms']} ms, floor {1e3 * floor_s:.3f} ms, attention {figures['attention']}")
    engine.start()
    figures |= await speculate_large(engine, scale)
    engine.stop()
    return figures


async def speculate_large(engine: Any, scale: Scale) -> dict[str, Any]:
    """Greedy, eight streams at once, of a text known from the run before: warm, plain, speculative."""
    from outrider.drafting.proposal import Proposal
    from outrider.sampling.params import SamplingParams

    greedy = SamplingParams(temperature=0.0)
    asked = prompts(engine.model.vocab_size, 8, scale.context)
    known: dict[int, list[int]] = {}

    async def propose(stream: Stream, header: Any, committed: Sequence[int]) -> Any:
        text = known[asked.index(stream.session.log.ids[: scale.context])]
        done = len(stream.text)
        rng = random.Random(done)
        wrong = engine.model.vocab_size - 1
        ids = [i if rng.random() < AGREEMENT else wrong for i in text[done : done + NUM_DRAFT_TOKENS]]
        return Proposal(token_ids=tuple(ids), drafter="simulated")

    async def run(drafts: Any) -> tuple[list[Stream], float]:
        streams = [Stream(engine, prompt, greedy, scale.num_tokens) for prompt in asked]
        begin = time.perf_counter()
        await asyncio.gather(*(stream.run(drafts) for stream in streams))
        return streams, time.perf_counter() - begin

    warm, _ = await run(None)
    known.update({index: stream.text for index, stream in enumerate(warm)})
    await run(propose)
    plain, plain_s = await run(None)
    speculative, speculative_s = await run(propose)
    num_tokens = len(asked) * scale.num_tokens
    equal = sum(a.text == b.text for a, b in zip(plain, speculative, strict=True)) / len(asked)
    print(
        f"{len(asked)} streams of {scale.num_tokens} tokens: plain {plain_s:.2f} s, speculative {speculative_s:.2f} s"
    )
    return {
        "text_equal_bfloat16": equal,
        "plain_tokens_per_s": round(num_tokens / plain_s, 1),
        "speculative_tokens_per_s": round(num_tokens / speculative_s, 1),
        "speculative_vs_plain": round(plain_s / speculative_s, 3),
    }


def pass_s(adapted: Any, num_rows: int, scale: Scale) -> float:
    """Median seconds of a pass over one row of each of `num_rows` sequences, its greedy tokens brought to the host."""
    from outrider.drafting.proposal import EMPTY
    from outrider.lm.interface import PackedBatch, Segment
    from outrider.sampling.history import History
    from outrider.sampling.noise import Noise
    from outrider.sampling.params import SamplingParams, StoppingParams
    from target_worker.device_decision import RoundDecision

    decision = RoundDecision(
        EMPTY, SamplingParams(temperature=0.0), StoppingParams(max_tokens=9), History([1]), Noise(0), 0, scale.context
    )
    width = -(-(scale.context + 1) // 16)
    segments = [
        Segment(scale.context, [7], range(width * i, width * (i + 1)), 1, decision=decision) for i in range(num_rows)
    ]
    batch = PackedBatch(tuple(segments))
    for _ in range(3):
        adapted.forward_deciding(batch)
    times = []
    for _ in range(scale.num_passes):
        begin = time.perf_counter()
        adapted.forward_deciding(batch)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def copy_bandwidth(scale: Scale) -> float:
    """Bytes per second, read and written ones counted, of the best of ten copies within the device."""
    import torch

    source = torch.ones(scale.copied_bytes, dtype=torch.uint8, device=scale.device)
    copy = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(10):
        begin = time.perf_counter()
        copy.copy_(source)
        if scale.device == "cuda":
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - begin)
    return 2 * scale.copied_bytes / best_s


def weight_bytes(model: Any) -> int:
    """What a pass reads: all weights but the embedding table, of which it reads a few rows."""
    table = model.get_input_embeddings().weight
    return sum(p.numel() * p.element_size() for p in model.parameters() if p is not table)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
