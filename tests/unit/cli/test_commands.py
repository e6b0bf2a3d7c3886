"""Every command explains itself, refuses what it does not know, and ends errors in one line that names the fix."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from typer.main import get_command
from typer.testing import CliRunner

from outrider.cli import doctor, models
from outrider.cli.app import app
from outrider.cli.console import describe_failure, reporting_errors
from outrider.cli.doctor import _check_port, _model_fix, check_settings
from outrider.cli.main import FILES, application
from outrider.cli.options import choose_draft, choose_heads
from outrider.cli.prompts import MIXED, WORKLOADS, read_prompts, spread
from outrider.cli.stack import small_worker
from outrider.cli.up import stack_settings
from outrider.errors import InvalidArgument, ResourceExhausted, Unavailable
from outrider.settings import CoordinatorSettings

COMMANDS = [
    ["up"], ["coordinator"], ["draft-worker"], ["target-worker"], ["gateway"], ["generate"], ["chat"], ["doctor"],
    ["verify"], ["audit"], ["bench"], ["plan"], ["trace"], ["top"], ["token"], ["demo"], ["draft-vocab"], ["distill"],
    ["models"], ["models", "list"], ["models", "get"], ["models", "info"], ["ray"], ["ray", "up"], ["ray", "down"],
]  # fmt: skip
PAIR = ["--target=toy:vocab=16,seed=1", "--draft=toy:vocab=16,seed=1,agreement=0.5"]


def invoke(*args: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `outrider <args>` in this process."""
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_list_of_commands_is_whole() -> None:
    names = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    names |= {group.typer_instance.info.name for group in app.registered_groups if group.typer_instance}
    assert {command[0] for command in COMMANDS} == {str(name) for name in names if isinstance(name, str)}


def test_each_command_is_in_the_file_that_is_loaded_for_it() -> None:
    assert set(FILES) == {command[0] for command in COMMANDS}
    for name in FILES:
        assert name in get_command(application([name])).commands  # type: ignore[attr-defined]


def test_a_service_loads_no_other_command() -> None:
    code = "import sys; from outrider.cli.main import application; application(['coordinator']); print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert {"outrider.cli.services", "outrider.cli.flags"} <= set(output.split())
    assert not {"outrider.client", "outrider.cli.doctor", "outrider.cli.bench", "target_worker"} & set(output.split())


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(command: list[str]) -> None:
    exit_code, output, _ = invoke(*command, "--help")
    assert exit_code == 0
    assert "Usage: " in output
    assert "--help" in output


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_unknown_flags_are_usage_errors(command: list[str]) -> None:
    exit_code, _, errors = invoke(*command, "--no-such-flag=1")
    assert exit_code == 2
    assert "--no-such-flag" in errors


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "x"],
        ["chat"],
        ["models", "list"],
        ["up"],
        ["verify"],
        ["bench"],
        ["demo"],
        ["coordinator"],
        ["distill"],
    ],
    ids=" ".join,
)
def test_unknown_variables_are_usage_errors(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ADRESS", "x")
    exit_code, _, errors = invoke(*command)
    assert exit_code == 2
    assert "OUTRIDER_ADRESS" in errors
    assert len(errors.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["up", "verify", "bench", "demo"])
@pytest.mark.parametrize("name", ["MODEL", "TARGET_WORKERS", "DRAFT_WORKERS", "ADVERTISE_ADDRESS"])
def test_variables_that_a_command_cannot_honour_are_usage_errors(
    command: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"OUTRIDER_{name}", "127.0.0.1:1")
    exit_code, output, errors = invoke(command, *PAIR)
    assert (exit_code, output) == (2, "")
    assert f"OUTRIDER_{name} means nothing to `outrider {command}`: unset it, and " in errors


def test_doctor_warns_of_a_model_that_it_does_not_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_MODEL", "toy:vocab=8")
    exit_code, output, _ = invoke("doctor", *PAIR, "--json")
    (warning,) = [c for c in json.loads(output)["checks"] if "OUTRIDER_MODEL" in c["detail"]]
    assert (exit_code, warning["state"]) == (0, "warn")
    assert "--target" in warning["fix"]


def test_without_torch_the_client_commands_start() -> None:
    code = "import sys, outrider.cli.app; print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[]"


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"], ["models", "info"]], ids=" ".join)
def test_no_coordinator_names_the_fix(command: list[str]) -> None:
    exit_code, output, errors = invoke(*command, "--address=127.0.0.1:1")
    assert exit_code == 1
    assert output == ""
    assert "outrider up" in errors
    assert len(errors.strip().splitlines()) == 1


def test_models_list_needs_no_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(address: str) -> list[dict[str, object]]:
        raise Unavailable("nothing answers there")

    monkeypatch.setattr(models, "_served", nobody)
    exit_code, output, errors = invoke("models", "list", "--json")
    assert exit_code == 0
    assert any(row["model"] == "smollm2-135m" and row["source"] == "bundle" for row in json.loads(output))
    assert "of this machine alone: nothing answers there" in errors


def test_models_list_fails_where_the_coordinator_that_was_named_does_not_tell() -> None:
    exit_code, output, errors = invoke("models", "list", "--address=127.0.0.1:1", "--json")
    assert exit_code == 1
    assert any(row["source"] == "bundle" for row in json.loads(output)), "what is known is told all the same"
    assert "nothing answers at 127.0.0.1:1" in errors


def test_models_info_describes_what_can_be_loaded() -> None:
    exit_code, output, _ = invoke("models", "info", "toy:vocab=16", "--address=127.0.0.1:1", "--json")
    assert exit_code == 0
    values = json.loads(output)
    assert (values["vocab_size"], values["simulated"]) == (16, True)
    exit_code, _, errors = invoke("models", "info", "toy:vocabulary=16", "--address=127.0.0.1:1")
    assert exit_code == 2
    assert "vocabulary" in errors


def test_failures_have_one_line_and_a_code() -> None:
    assert describe_failure(InvalidArgument("top_p is 2", field="sampling.top_p")) == ("top_p is 2 [sampling.top_p]", 2)
    assert describe_failure(ResourceExhausted("full", retry_delay_s=2)) == ("full (try again in 2 s)", 1)
    missing = ModuleNotFoundError("No module named 'torch'", name="torch")
    assert "outrider[worker]" in describe_failure(missing)[0]
    with pytest.raises(ValidationError) as caught:
        CoordinatorSettings(peer_timeout_s=0)
    message, code = describe_failure(caught.value)
    assert code == 2
    assert "--peer-timeout-s (OUTRIDER_PEER_TIMEOUT_S) is 0" in message


@pytest.mark.parametrize(
    ("error", "code"), [(Unavailable("away"), 4), (InvalidArgument("no"), 2), (OSError("full"), 4), (KeyError("x"), 4)]
)
def test_where_1_is_a_finding_no_failure_is_told_by_it(error: Exception, code: int) -> None:
    with pytest.raises(SystemExit) as ended, reporting_errors(is_finding=True):
        raise error
    assert ended.value.code == code


@pytest.mark.parametrize("command", ["audit", "verify", "demo"])
def test_each_such_command_tells_its_codes(command: str) -> None:
    text = " ".join(invoke(command, "--help")[1].split())
    assert re.search(r"[Ee]xit code .*1.* 4: no", text), text


def test_doctor_passes_a_fitting_pair() -> None:
    exit_code, output, _ = invoke("doctor", *PAIR, "--json")
    report = json.loads(output)
    assert exit_code == 0, report
    assert report["ok"]
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert states["tokenizers"] == states["target"] == states["draft"] == states["memory"] == "ok"
    assert all(check["fix"] for check in report["checks"] if check["state"] != "ok")


@pytest.mark.parametrize(
    ("args", "failing", "says"),
    [
        (["--target=toy:vocab=16", "--draft=toy:vocab=17"], "tokenizers", "draft 17"),
        (["--target=toy:vocab=16", "--draft=toy:speed=1"], "draft", "speed"),
        (["--target=no-such-model", "--draft=none"], "target", "no-such-model"),
    ],
)
def test_doctor_fails_and_says_why(args: list[str], failing: str, says: str) -> None:
    exit_code, output, _ = invoke("doctor", *args, "--json")
    (check,) = (check for check in json.loads(output)["checks"] if check["state"] == "fail")
    assert exit_code == 1
    assert check["name"] == failing
    assert says in check["detail"]
    assert check["fix"]


def test_doctor_knows_of_translation(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = (SimpleNamespace(tokenizer_fingerprint=i, vocab_size=i, simulated=False) for i in (16, 17))
    assert "OUTRIDER_TARGET_TOKENIZER" in doctor._check_tokenizers(target, draft).fix
    monkeypatch.setenv("OUTRIDER_TARGET_TOKENIZER", "owner/name")
    check = doctor._check_tokenizers(target, draft)
    assert check.state == "ok"
    assert "translates for owner/name" in check.detail


def test_doctor_sees_unknown_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ADRESS", "x")
    exit_code, output, _ = invoke("doctor", *PAIR)
    assert exit_code == 1
    assert "OUTRIDER_ADRESS" in output


def test_doctor_names_a_value_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_PORT", "abc")
    exit_code, output, _ = invoke("doctor", *PAIR)
    assert exit_code == 1
    assert "OUTRIDER_PORT" in output


def test_doctor_tells_ports_apart() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        alone = _check_port("127.0.0.1", port, ["draft-worker"])
    assert (alone.state, alone.name) == ("warn", f"port {port} (draft-worker)")
    assert "outrider draft-worker" in alone.fix
    names = [check.name for check in check_settings()]
    assert [name.partition(" (")[2] for name in names] == [
        "coordinator)", "draft-worker)", "target-worker)", "gateway)",
    ]  # fmt: skip


def test_doctor_does_not_propose_to_get_what_nobody_knows() -> None:
    assert "models get" not in _model_fix("target", "no-such-model")
    assert "models get owner/name" in _model_fix("target", "owner/name")


@pytest.mark.parametrize("name", ["MODEL", "TARGET_WORKERS", "DRAFT_WORKERS", "ADVERTISE_ADDRESS"])
def test_up_refuses_variables_that_it_cannot_honour(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"OUTRIDER_{name}", "127.0.0.1:1")
    exit_code, _, errors = invoke("up", *PAIR)
    assert exit_code == 2
    assert f"OUTRIDER_{name}" in errors


def test_up_honours_the_grace_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "drain_grace_s" not in stack_settings({})["shared"]
    monkeypatch.setenv("OUTRIDER_DRAIN_GRACE_S", "7")
    assert stack_settings({})["shared"]["drain_grace_s"] == 7


def test_up_hands_worker_settings_on_and_a_revision_to_one_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"kv_cache_dtype": "bfloat16", "memory_fraction": 0.2, "trust_remote_code": True, "max_context_length": 64}
    settings = stack_settings({**given, "revision": "v1", "draft_revision": ""})
    for worker, revision in (("target_worker", "v1"), ("draft_worker", "")):
        assert {name: settings[worker][name] for name in given} == given
        assert settings[worker]["revision"] == revision
    assert stack_settings({"draft_revision": "v2"})["draft_worker"]["revision"] == "v2"
    exit_code, _, errors = invoke("up", *PAIR, "--kv-cache-dtype=int3")
    assert (exit_code, "kv-cache-dtype" in errors) == (2, True)
    monkeypatch.setenv("OUTRIDER_REVISION", "v1")
    exit_code, _, errors = invoke("up", *PAIR)
    assert (exit_code, "give --revision and --draft-revision" in errors) == (2, True)


def test_up_hands_settings_of_the_coordinator_to_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "metrics_port": 0, "metrics_host": "::1", "record_streams": 4, "model_aliases": "it=toy", "tokens_file": "file",
    }  # fmt: skip
    settings = stack_settings({**given, "gateway_port": 0})
    assert {name: settings["coordinator"][name] for name in given} == given
    for service in ("shared", "target_worker", "draft_worker", "gateway"):
        assert not set(given) & set(settings[service])
    for name in ("METRICS_PORT", "METRICS_HOST"):
        with monkeypatch.context() as patched:
            patched.setenv(f"OUTRIDER_{name}", "1")
            exit_code, _, errors = invoke("up", *PAIR)
        assert (exit_code, f"give --{name.lower().replace('_', '-')}, the coordinator's" in errors) == (2, True)


def test_up_needs_a_token_where_its_coordinator_asks_for_one() -> None:
    exit_code, _, errors = invoke("up", *PAIR, "--port=0", "--tokens-file=tokens")
    assert (exit_code, "set OUTRIDER_TOKEN_FILE" in errors) == (2, True)
    assert "starting" not in errors


def test_a_share_of_memory_is_not_outdone_by_a_small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "kv_cache_bytes" in small_worker("some/model")
    monkeypatch.setenv("OUTRIDER_MEMORY_FRACTION", "0.1")
    assert small_worker("some/model") == {}


def test_a_toy_target_gets_a_toy_draft() -> None:
    assert choose_draft("toy:vocab=16,seed=1", "auto") == "toy:vocab=16,seed=1,agreement=0.8"
    assert choose_draft("toy:vocab=16,pass_ms=20,token_ms=0.3", "auto") == (
        "toy:vocab=16,agreement=0.8,pass_ms=2.0,token_ms=0.03"
    ), "one as dear as its target would never be asked"
    assert choose_draft("some/model", "auto") == "smollm2-135m"
    assert choose_draft("toy:vocab=16", "none") is None
    assert choose_draft("some/model", "auto", ("head",)) is None
    assert choose_draft("some/model", "some/draft", ("head",)) == "some/draft"
    assert choose_draft("toy:vocab=16", "toy:vocab=16") == "toy:vocab=16"


def test_heads_are_named_left_out_the_environments_or_those_that_come_with_the_target(monkeypatch) -> None:
    assert choose_heads("smollm2-135m", "auto") == ("smollm2-135m-eagle3",)
    assert choose_heads("some/model", "auto") == choose_heads("toy:", "auto") == ()
    assert choose_heads("smollm2-135m", "none") == ()
    assert choose_heads("smollm2-135m", "head, eagle=owner/name") == ("head", "eagle=owner/name")
    monkeypatch.setenv("OUTRIDER_HEADS", "mine")
    assert choose_heads("smollm2-135m", "auto") == ("mine",)
    assert choose_heads("smollm2-135m", "none") == ()


def test_own_prompts_are_many_and_of_all_kinds() -> None:
    everyday = read_prompts()
    assert len(set(everyday)) == len(everyday) == 41
    by_kind = {kind: read_prompts(kind=kind) for kind in WORKLOADS}
    assert sorted(everyday) == sorted(prompt for kind in MIXED for prompt in by_kind[kind])
    assert not set(everyday) & {*by_kind["off-domain"], *by_kind["long-context"]}
    assert all(len(prompts) >= (4 if kind == "long-context" else 8) for kind, prompts in by_kind.items())
    assert all(len(prompt) > 12_000 for prompt in by_kind["long-context"])  # some 4,000 tokens


def test_spread_covers_the_list() -> None:
    letters = list("abcdefgh")
    assert spread(letters, 4) == ["a", "c", "e", "g"]
    assert spread(letters, 8) == letters
    assert spread(letters, 10) == [*letters, "a", "b"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no prompt"),
        ("not json", ":1 must be"),
        ('{"prompt": "a"}\n{"text": "b"}', ":2 must be"),
        ('{"prompt": ""}', ":1"),
    ],
)
def test_bad_prompt_files_name_the_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=says):
        read_prompts(path)
    exit_code, _, errors = invoke("bench", *PAIR, f"--prompts={path}")
    assert exit_code == 2
    assert says in errors


def test_a_missing_prompt_file_is_a_usage_error(tmp_path: Path) -> None:
    exit_code, _, errors = invoke("verify", *PAIR, f"--prompts-file={tmp_path / 'none.jsonl'}")
    assert exit_code == 2
    assert "none.jsonl" in errors


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--draft=none"], "compare with itself"),
        (["--workload=poems"], "'poems' is none of chat"),
        (["--sweep=gamma", "--profile=p.json"], "without --sweep"),
        (["--sweep=tokens"], "--sweep"),
        (["--temperature=-1"], "--temperature"),
        (["--profile=no-such-folder/p.json"], "--profile: cannot write no-such-folder/p.json: No such file"),
    ],
)
def test_bench_refuses_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    exit_code, output, errors = invoke("bench", *PAIR, *flags)
    assert exit_code in (1, 2)
    assert output == ""
    assert says in errors
    assert not list(tmp_path.iterdir())
