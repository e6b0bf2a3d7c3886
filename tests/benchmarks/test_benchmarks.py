"""The two benchmarks end in their JSON line, tell an absent peer, and count what differs. No speed is judged here."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import exact
import forked
import numpy as np
import options
import peers
import pytest
from bandwidth import bytes_read, read_bandwidth
from jobs import TRANSFORMERS, VLLM, Job, PeerAbsent, run_peer

from outrider.errors import InvalidArgument

HERE = Path(__file__).parent
TOYS = {"TARGET": "toy:vocab=64,seed=1", "DRAFT": "toy:vocab=64,seed=1,agreement=0.9"}
PEER_KEYS = [
    "plain_vs_transformers", "plain_vs_vllm", "t0_vs_transformers", "t0_vs_vllm", "t1_vs_transformers", "t1_vs_vllm",
    "pass_vs_floor",
]  # fmt: skip


def run(script: str, **variables: str) -> tuple[int | None, list[str], str]:
    """(exit code, lines of stdout, stderr)."""
    code, output, errors = asyncio.run(forked.script(HERE / script, variables))
    return code, output.splitlines(), errors


def test_peers_end_in_their_figures() -> None:
    code, lines, errors = run("peers.py", **TOYS, PROMPTS="2", MAX_TOKENS="12")
    assert code == 0, errors
    figures = json.loads(lines[-1])
    assert list(figures) == PEER_KEYS
    assert set(figures.values()) == {None}  # no peer runs a toy, whose weights weigh nothing
    assert any(line.startswith("transformers is absent: ") for line in lines)
    assert any(line.startswith("vllm is absent: ") for line in lines)
    assert sum(line.startswith("outrider ") for line in lines) == 4


def test_the_engine_ends_in_its_figures() -> None:
    model = "toy:vocab=64,seed=1,pass_ms=3,token_ms=0.01"
    code, lines, errors = run("engine.py", MODEL=model, MAX_TOKENS="24", PROMPT_TOKENS="600")
    assert code == 0, errors
    figures = json.loads(lines[-1])
    assert {name for name, value in figures.items() if value is None} == {
        "stock_pass_ms", "pass_vs_floor", "pass_8_rows_vs_floor", "held_vs_weights",
    }  # fmt: skip
    assert min(figures["pass_ms"], figures["streams_8_vs_1"], figures["time_per_token_during_prefill"]) > 0


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_exact_counts_equal_texts(temperature: str) -> None:
    more = {"PROMPTS": "12", "MAX_TOKENS": "16", "NUMERICS": "fast", "TEMPERATURE": temperature}
    code, lines, errors = run("exact.py", **TOYS, **more)
    assert code == 0, errors
    figures = json.loads(lines[-1])
    assert list(figures)[:4] == ["prompts", "identical", "concurrency", "drafted"]
    assert (figures["prompts"], figures["identical"], figures["concurrency"]) == (12, 12, 8)
    assert min(figures["drafted"], figures["preemptions"], figures["prefix_hits"]) > 0


def test_exact_is_inconclusive_where_nobody_was_preempted() -> None:
    more = {"PROMPTS": "9", "MAX_TOKENS": "8", "NUMERICS": "fast", "CACHE_BYTES": "1000000"}
    code, lines, errors = run("exact.py", **TOYS, **more)
    assert code == 3, errors
    assert lines[-2] == "INCONCLUSIVE: nothing was preempted"
    figures = json.loads(lines[-1])
    assert (figures["prompts"], figures["identical"], figures["preemptions"]) == (9, 9, 0)


def test_a_small_cache_by_the_config(tmp_path: Path) -> None:
    config = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 30}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert exact.bytes_per_token(tmp_path, "bfloat16") == 23040
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 128}))
    assert exact.bytes_per_token(tmp_path, "float32") == 4 * 23040
    with pytest.raises(InvalidArgument, match="give CACHE_BYTES"):
        exact.bytes_per_token(tmp_path / "none", "bfloat16")


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"GAMMAS": "2,x"}, "GAMMAS is '2,x'"),
        ({"VLLM_GAMMAS": "0"}, "VLLM_GAMMAS is '0'"),
        ({"DRAFT_WEIGHT_DTYPE": "int3"}, "weight-dtype"),
    ],
)
def test_bad_variables_of_peers_are_usage_errors(variables: dict[str, str], says: str) -> None:
    code, lines, errors = run("peers.py", **TOYS, **variables)
    assert (code, lines) == (2, []), errors
    assert says in errors


def test_the_drafts_weight_dtype_reaches_the_draft_worker() -> None:
    code, _, errors = run("peers.py", **TOYS, PROMPTS="1", MAX_TOKENS="4", DRAFT_WEIGHT_DTYPE="int8")
    assert code == 1
    assert "--weight-dtype (OUTRIDER_WEIGHT_DTYPE): a toy has no weights to round" in errors


@pytest.mark.parametrize("script", ["peers.py", "exact.py"])
@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"TARGET": "toy:"}, "DRAFT is missing"),
        ({"PROMPTS": "no-such-file.jsonl"}, "no-such-file.jsonl"),
        ({"MAX_TOKENS": "many"}, "MAX_TOKENS is 'many'"),
    ],
)
def test_bad_variables_are_usage_errors(script: str, variables: dict[str, str], says: str) -> None:
    code, lines, errors = run(script, **{**TOYS, **({"DRAFT": ""} if "TARGET" in variables else {}), **variables})
    assert code == 2
    assert says in errors
    assert not any(line.startswith("{") for line in lines)


def test_ratios_are_medians_over_prompts_against_the_best_gamma() -> None:
    ours = peers.Ours(
        seconds={(0, 0.0): [2, 2, 2], (1, 0.0): [1, 1, 1], (0, 1.0): [2, 2, 2], (1, 1.0): [1, 1, 2]},
        prompt_ids=[],
        pass_ms=30,
        weight_bytes=200,
        bytes_per_s=10_000,
        num_draft_tokens=1,
        dtype="bfloat16",
        simulated=False,
    )
    theirs = {
        (0, 0.0): [3.0, 4.0, 40.0],
        (0, 1.0): [1.0, 1.0, 1.0],
        (2, 0.0): [2.0, 2.0, 2.0],
        (3, 0.0): [1.5, 1.5, 1.9],
        (2, 1.0): [4.0, 3.0, 3.0],
    }
    assert peers.figures(ours, {"transformers": theirs}) == {
        "plain_vs_transformers": 2,
        "plain_vs_vllm": None,
        "t0_vs_transformers": 1.5,
        "t0_vs_vllm": None,
        "t1_vs_transformers": 3,
        "t1_vs_vllm": None,
        "pass_vs_floor": 1.5,
    }


@pytest.mark.slow
def test_transformers_runs_a_job(tmp_path: Path) -> None:
    import transformers

    for name, layers in (("target", 2), ("draft", 1)):
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2
        )
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    job = Job(str(tmp_path / "target"), str(tmp_path / "draft"), "bfloat16", 12, prompts, [0.0, 1.0], [0, 2])
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    told: list[str] = []
    seconds = run_peer(sys.executable, TRANSFORMERS, job, environment, told.append)
    assert told == [f"transformers, temperature {t}, γ {gamma}" for t in (0, 1) for gamma in (0, 2)]
    assert sorted(seconds) == [(0, 0.0), (0, 1.0), (2, 0.0), (2, 1.0)]
    assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())


def test_an_absent_peer_says_why() -> None:
    job = Job("target", "draft", "bfloat16", 4, [[1]], [0.0], [0])
    with pytest.raises(PeerAbsent, match="cannot be started"):
        run_peer("no-such-python", VLLM, job)
    with pytest.raises(PeerAbsent, match="no_such_script"):
        run_peer(sys.executable, HERE / "no_such_script.py", job)


def test_prompts_by_file_by_number_or_by_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')

    def found(value: str) -> tuple[int, int]:
        monkeypatch.setenv("PROMPTS", value)
        texts, count = options.prompts(7)
        return len(texts), count

    assert found("") == (41, 7)
    assert found("3") == (41, 3)
    assert found(str(path)) == (2, 2)
    assert found(f"{path}:5") == (2, 5)
    with pytest.raises(InvalidArgument, match="at least 1"):
        found("0")


def test_two_hundred_prompts_are_distinct() -> None:
    texts = [f"text {index}" for index in range(41)]
    assert len(set(exact.distinct(texts, 500))) == 500
    assert exact.distinct(texts, 41) == texts


@pytest.mark.parametrize(
    ("plain", "other", "where"), [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (1,), 0)]
)
def test_first_difference(plain: Any, other: Any, where: int | None) -> None:
    assert exact.first_difference(plain, other) == where


def test_bandwidth_is_a_rate() -> None:
    assert 1e6 < read_bandwidth(num_bytes=1 << 22, num_repetitions=2) < 1e14


@pytest.mark.parametrize(("names", "num_weights"), [(("lm_head", "embed_tokens"), 24 + 5), (("embed_tokens",), 24 + 5)])
def test_a_pass_reads_the_head_and_not_a_separate_table(
    tmp_path: Path, names: tuple[str, ...], num_weights: int
) -> None:
    from safetensors.numpy import save_file

    tables = {f"model.{name}.weight": np.zeros((6, 4), np.float32) for name in names}
    save_file({**tables, "model.norm.weight": np.zeros(5, np.float32)}, tmp_path / "model.safetensors")
    assert bytes_read(tmp_path, "bfloat16") == 2 * num_weights
    assert bytes_read(tmp_path, "float32") == 4 * num_weights
    assert bytes_read(tmp_path / "none", "bfloat16") == 0
