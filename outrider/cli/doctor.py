"""`outrider doctor`: whether this machine can serve a pair, and what to do where it cannot."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import typer
from packaging.requirements import Requirement
from pydantic import ValidationError
from rich.text import Text

from outrider.cli.bundles import known_models
from outrider.cli.check import Check
from outrider.cli.console import EXIT_FAILURE, describe_failure, err, out, print_json, reporting_errors
from outrider.cli.doctor_bundle import fetch_metrics, write_bundle
from outrider.cli.doctor_fleet import check_coordinator, check_security
from outrider.cli.doctor_heads import check_heads
from outrider.cli.doctor_limits import check_files, check_limits, num_cores, read_limits
from outrider.cli.flags import CALLS_RULE, CLIENT_VARIABLES, with_likely_names
from outrider.cli.options import AUTO_DRAFT, AUTO_HEADS, Draft, Heads, Json, Target, choose_draft, choose_heads
from outrider.cli.ports import listen_fault
from outrider.cli.services import SETTINGS
from outrider.cli.stack import DEFAULT_MODEL
from outrider.errors import InvalidArgument, OutriderError
from outrider.server_info import ServerInfo
from outrider.serving import huge_pages
from outrider.settings import (
    PREFIX,
    CoordinatorSettings,
    DraftWorkerSettings,
    TargetWorkerSettings,
    WorkerSettings,
    unknown_variables,
)

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("doctor", epilog=CALLS_RULE, rich_help_panel="Prove and measure")(_command)


def _command(
    target: Target = DEFAULT_MODEL,
    draft: Draft = AUTO_DRAFT,
    heads: Heads = AUTO_HEADS,
    address: Annotated[
        str,
        typer.Option("--address", "-a", envvar="OUTRIDER_ADDRESS", help="Check this coordinator and its workers too."),
    ] = "",
    models: Annotated[bool, typer.Option("--models/--no-models", help="Load target and draft and check them.")] = True,
    numerics: Annotated[
        Literal["fast", "exact"] | None,
        typer.Option(
            help="exact: prove exact numerics of the target here, in half a minute or so. Absent: where "
            "OUTRIDER_NUMERICS or a target worker at --address is exact."
        ),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(help="Write what was found, versions, settings and metrics into this .zip, no secrets."),
    ] = None,
    metrics: Annotated[
        list[str] | None, typer.Option(help="host:port of /metrics to put into the bundle; may be given several times.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check versions, settings, access, ports, limits, memory, GPU, threads, both models, heads; with --numerics exact
    that numerics are; with --address a running coordinator and its workers.

    Exit code 1 if a check fails.
    """
    checks = []
    with reporting_errors():
        chosen_heads = choose_heads(target, heads)
        chosen = choose_draft(target, draft, chosen_heads)
        if metrics and bundle is None:
            raise InvalidArgument("--metrics goes into a bundle: give --bundle FILE too", field="metrics")
        if bundle is not None:
            bundle.touch()  # a folder that is not there is told now and not after the checks
    of_fleet, info = check_coordinator(address) if address else ([], None)
    is_exact = _is_exact(info) if numerics is None else numerics == "exact"
    of_machine = run_checks(target, chosen, chosen_heads, with_models=models, is_exact=is_exact)
    fetched = {one: fetch_metrics(one) for one in metrics or ()}
    for check in chain(of_machine, of_fleet, (check for _, check in fetched.values())):
        checks.append(check)
        if not as_json:
            _print(check)
    if bundle is not None:
        with reporting_errors():
            names = write_bundle(bundle, checks, info, {one: text for one, (text, _) in fetched.items()})
        err.print(f"{bundle} holds {', '.join(names)}", markup=False)
        if not metrics:
            err.print("It has no metrics: --metrics HOST:PORT of a service's --metrics-port adds them, once for each")
        if info is None:
            err.print("It has nothing of a running coordinator: --address HOST:PORT adds its account")
    failed = [check for check in checks if check.state == "fail"]
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in checks]})
    raise SystemExit(EXIT_FAILURE if failed else 0)


def _is_exact(info: ServerInfo | None) -> bool:
    """Whether workers are to run so, by the settings here or by a coordinator's account."""
    told = [worker.numerics.mode for worker in info.workers if worker.role == "target"] if info is not None else []
    with suppress(ValidationError):  # told by the checks
        told.append(TargetWorkerSettings().numerics)
    return "exact" in told


def _print(check: Check) -> None:
    line = Text.assemble((f"{check.state:>4}", _COLOURS[check.state]), "  ", (check.name, "bold"), f": {check.detail}")
    out.print(line)
    if check.fix:
        out.print(f"        fix: {check.fix}", markup=False)


def run_checks(
    target: str, draft: str | None, heads: Sequence[str] = (), *, with_models: bool = True, is_exact: bool = False
) -> Iterator[Check]:
    """Every check of this machine, in the order that a fix would take. is_exact: exact numerics are to be proved."""
    yield from check_packages()
    yield check_variables()
    yield from check_model_variable()
    settings = list(check_settings())
    yield from settings
    yield from check_access()
    yield check_threads()
    yield check_pages()
    with suppress(ValidationError):  # told above
        yield from check_limits(WorkerSettings(), read_limits(), num_cores())
        yield check_files(CoordinatorSettings())
    yield from check_gpu()
    if with_models and all(check.state != "fail" for check in settings):  # loading reads them too
        yield from check_models(target, draft, is_exact=is_exact)
        yield from check_heads(target, heads)


def check_packages() -> Iterator[Check]:
    """Each requirement of the base install and of the `worker` extra, against what is installed."""
    yield Check("ok", "python", platform.python_version())  # an older one could not have installed this
    for text in requires("outrider") or []:
        requirement = Requirement(text)
        worker = requirement.marker is not None and requirement.marker.evaluate({"extra": "worker"})
        base = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not (base or worker):
            continue
        install = "pip install 'outrider[worker]'" if not base else "pip install outrider"
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            state = "fail" if base else "warn"
            needed = "" if base else ", which only workers need"
            yield Check(state, requirement.name, f"not installed{needed}", install)
            continue
        if requirement.specifier.contains(installed, prereleases=True):
            yield Check("ok", requirement.name, installed)
        else:
            yield Check("fail", requirement.name, f"{installed}, needs {requirement.specifier}", f"{install} --upgrade")


def check_variables() -> Check:
    unknown = unknown_variables(CLIENT_VARIABLES)
    if unknown:
        return Check("fail", "environment", f"nothing reads {with_likely_names(unknown)}", "unset it, or mend its name")
    return Check("ok", "environment", "no unknown OUTRIDER_ variable")


def check_model_variable() -> Iterator[Check]:
    """The variable names the model of one worker; what is checked here is a pair."""
    model = os.environ.get(f"{PREFIX}MODEL")
    if model:
        detail = f"{PREFIX}MODEL={model} is for a worker run alone; it is not checked here"
        yield Check("warn", "model", detail, "give --target and --draft")


def check_settings() -> Iterator[Check]:
    """That the environment's values can be read, and then each port once, with those that would listen there."""
    roles_of: dict[tuple[str, int], list[str]] = {}
    for role, cls in SETTINGS.items():
        try:
            settings = cls()
        except ValidationError as error:
            yield Check("fail", f"settings of the {role}", describe_failure(error)[0], "mend the variable, or unset it")
        else:
            roles_of.setdefault((settings.host, settings.port), []).append(role)
    for (host, port), roles in roles_of.items():
        yield _check_port(host, port, roles)


def check_access() -> Iterator[Check]:
    """Of each service whose settings can be read."""
    for role, cls in SETTINGS.items():
        with suppress(ValidationError):
            yield check_security(role, cls())


def _check_port(host: str, port: int, roles: list[str]) -> Check:
    name = f"port {port} ({', '.join(roles)})"
    fault = listen_fault(host, port)
    if not fault:
        return Check("ok", name, "free")
    if "coordinator" in roles:
        fix = "none if an outrider coordinator runs there; else `outrider up --port`, or OUTRIDER_PORT"
    elif "gateway" in roles:
        fix = "only `outrider gateway` needs it: give it another --port"
    else:
        fix = f"only `outrider {roles[0]}` needs it, give it another --port; `outrider up` takes free ports for workers"
    return Check("warn", name, fault, fix)


def check_threads() -> Check:
    cores = num_cores()
    limit = os.environ.get("OMP_NUM_THREADS", "")
    if limit.isdigit() and int(limit) > cores:
        return Check(
            "warn", "threads", f"OMP_NUM_THREADS is {limit} on {cores} cores", f"set it to {cores} or unset it"
        )
    from outrider.lm import threads

    detail = f"{cores} cores, {threads.RUNTIME}" + (f", OMP_NUM_THREADS={limit}" if limit else "")
    is_slow = threads.RUNTIME == threads.GNU and (sys.platform, platform.machine()) == ("linux", "x86_64")
    fix = "on CPUs, `pip install outrider[cpu]` makes passes faster" if is_slow else ""
    return Check("ok", "threads", detail, fix)


def check_pages() -> Check:
    mode = huge_pages.mode()
    if mode != "never":
        return Check("ok", "memory pages", "large ones for weights" if mode else "of one size")
    fix = f"as root, `echo madvise > {huge_pages.MODE}` makes passes on CPUs up to 8% faster"
    return Check("ok", "memory pages", "large ones are turned off", fix)


def check_gpu() -> Iterator[Check]:
    with suppress(ModuleNotFoundError):
        import torch

        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                free, total = torch.cuda.mem_get_info(index)
                detail = f"{torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
                yield Check("ok", f"gpu {index}", detail)
        else:
            yield Check("ok", "gpu", "none that torch sees: models run on the CPU")


def check_models(target: str, draft: str | None, *, is_exact: bool) -> Iterator[Check]:
    """Loads both, one after the other, and compares tokenizers and memory. is_exact: the target in exact numerics."""
    descriptions = []
    for role, model in (("target", target), ("draft", draft)):
        if model is None:
            continue
        loaded, numerics_fault = _load(model, role, is_exact=is_exact)
        if isinstance(loaded, str):
            yield Check("fail", role, f"{model}: {loaded}", _model_fix(role, model))
            continue
        detail = f"{model}: {loaded.vocab_size} ids, context {loaded.context_length}, {loaded.dtype}"
        yield Check("ok", role, detail + (", SIMULATED" if loaded.simulated else ""))
        yield from check_number_type(role, loaded.dtype)
        if role == "target":
            yield _check_numerics(loaded, numerics_fault)
        descriptions.append(loaded)
    if len(descriptions) == 2:
        yield _check_tokenizers(*descriptions)
    if descriptions:
        yield _check_memory(sum(d.weight_bytes for d in descriptions))


def check_number_type(role: str, dtype: str) -> Iterator[Check]:
    """Only where it is bfloat16 on a processor that has to take it apart."""
    if dtype != "bfloat16":
        return
    import torch

    from outrider.lm.cpu_linear import packs

    if not torch.cuda.is_available() and not packs(torch.bfloat16):
        detail = "bfloat16, which this processor lacks: a pass over several rows costs nearly as many passes"
        yield Check("warn", f"{role} dtype", detail, "--dtype float32, where memory allows")


def _model_fix(role: str, model: str) -> str:
    if model.startswith("toy:"):
        return f"mend --{role}"
    if "/" in model or model in (row["model"] for row in known_models()):
        return f"`outrider models get {model}`, or give another --{role}"
    return f"give another --{role}: a name that `outrider models list` shows, a hub id (owner/name), a folder or a file"


def _check_tokenizers(target: Any, draft: Any) -> Check:
    if target.tokenizer_fingerprint == draft.tokenizer_fingerprint:
        return Check("ok", "tokenizers", "target and draft share one")
    detail = f"target has {target.vocab_size} ids, draft {draft.vocab_size}, and they are different tokenizers"
    translated = DraftWorkerSettings().target_tokenizer
    if translated and not draft.simulated:
        return Check("ok", "tokenizers", f"{detail}: the draft worker translates for {translated}")
    fix = f"choose a draft of the target's own family, or set {PREFIX}TARGET_TOKENIZER, its worker's --target-tokenizer"
    return Check("fail", "tokenizers", detail, fix)


def _check_memory(weight_bytes: int) -> Check:
    available = psutil.virtual_memory().available
    detail = f"{weight_bytes / 2**30:.1f} GiB of weights, {available / 2**30:.1f} GiB free"
    if weight_bytes > available:
        return Check("fail", "memory", detail, "choose smaller models, or --dtype bfloat16")
    if weight_bytes > 0.7 * available:
        return Check(
            "warn", "memory", f"{detail}: little is left for the cache", "choose smaller models, or free memory"
        )
    return Check("ok", "memory", detail)


def _check_numerics(target: Any, fault: str) -> Check:
    """What the probe of exact numerics found on this machine, and what that holds for."""
    if target.simulated:
        return Check("ok", "numerics", "a toy looks its logits up: there is nothing to prove")
    if not fault and target.numerics.mode != "exact":
        detail = f"fast ({target.numerics_fingerprint}); exact is not tried: --numerics exact does, as long as it takes"
        return Check("ok", "numerics", detail)
    if fault:
        fix = "none if text may differ in near-ties: serve with numerics fast"
        return Check("warn", "numerics", f"{fault} ({target.numerics_fingerprint})", fix)
    detail = f"{target.numerics.summary()} ({target.numerics_fingerprint})"
    return Check("ok", "numerics", f"{detail}; workers run {WorkerSettings().numerics} as it is set here")


def _load(model: str, role: str, *, is_exact: bool) -> tuple[Any, str]:
    """The description, or why it does not load; and why exact numerics, if a real target is to have them, fail."""
    from outrider.lm.loading import load_model

    err.print(f"[dim]loading {model}...[/]")
    try:
        if role != "target" or model.startswith("toy:"):
            return load_model(WorkerSettings(model=model)).description, ""
        settings = TargetWorkerSettings(model=model, numerics="exact" if is_exact else "fast", tensor_parallel=1)
        try:
            return load_model(settings).description, ""
        except OutriderError as error:
            if error.field != "numerics":
                raise
            return load_model(settings.model_copy(update={"numerics": "fast"})).description, error.message
    except (OutriderError, ModuleNotFoundError, OSError) as error:
        return describe_failure(error)[0], ""
