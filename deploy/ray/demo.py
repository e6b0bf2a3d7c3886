"""`make demo-ray`: a local Ray places two drafts and a target; the target is killed between two equal chats."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.ray.config import Fleet, Pool, load_fleet
from deploy.ray.fleet import RayFleet, free_port
from deploy.ray.local import local_coordinator, local_ray, wait_workers
from outrider import Chunk, Client, Complete
from outrider.client import Prompt

QUESTION = "In one sentence: why does the moon show us only one side?"
NUM_DRAFT_TOKENS = 4
"""Fixed, so that drafts are made after the kill too, whatever the adaptive controller has learnt."""
FLEET_FILE = Path(__file__).with_name("local.toml")
console = Console(highlight=False)


def main(
    model: Annotated[str, typer.Option(help="Model of all workers, a toy included; empty: the fleet file's.")] = "",
    file: Annotated[Path, typer.Option(help="Fleet file.")] = FLEET_FILE,
) -> None:
    """Shows that Ray only places and restarts: the text is the same before and after the target's death."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    fleet, port = load_fleet(file), free_port()
    pools = tuple(_with_model(pool, model) for pool in fleet.pools)
    fleet = fleet.model_copy(update={"coordinators": (f"127.0.0.1:{port}",), "pools": pools})
    labels = {label: value for pool in pools for label, value in pool.label_selector.items()}
    console.print("starting a local Ray ...")
    with local_ray(labels, num_cpus=4):
        asyncio.run(_show(fleet, port))


async def _show(fleet: Fleet, port: int) -> None:
    async with local_coordinator(port) as address, Client(address, timeout_s=120.0) as client:
        placed = RayFleet.place(fleet)
        serving = await asyncio.to_thread(placed.wait_serving, placement_timeout_s=60.0, ready_timeout_s=900.0)
        for status in serving.values():
            console.print(f"  {status.name} serves at {status.address}, pid {status.pid}")
        await wait_workers(client, lambda workers: len(workers) == len(serving), timeout_s=60.0)

        before = await _stream(client)
        target = next(status for name, status in serving.items() if name.startswith("target"))
        console.print(f"\nkilling the target, pid {target.pid} ...")
        killed = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):  # where Ray wonders at a death that we have told
            os.kill(target.pid, signal.SIGKILL)
            again = await asyncio.to_thread(placed.wait_restarted, target, timeout_s=300.0)
        seconds = time.monotonic() - killed
        console.print(f"  {again.name} serves again at {again.address}, pid {again.pid}, after {seconds:.1f} s")
        await wait_workers(client, lambda workers: len(workers) == len(serving), timeout_s=60.0)

        after = await _stream(client)
        console.print(f"\nsame text before and after: {'yes' if before == after else 'NO'}")
        await asyncio.to_thread(placed.stop)
    if before != after:
        raise typer.Exit(1)


async def _stream(client: Client) -> str:
    """Prints the answer as it comes and returns it."""
    text = ""
    model = await client.model_info()
    prompt: Prompt = [{"role": "user", "content": QUESTION}]
    if model.simulated:
        prompt = list(range(8))
    console.print(f"\n{model.model} (simulated)" if model.simulated else f"\n[bold]{QUESTION}[/bold]")
    async for event in client.generate(prompt, temperature=0.0, max_tokens=48, num_speculative_tokens=NUM_DRAFT_TOKENS):
        if isinstance(event, Chunk):
            text += event.text
            console.print(event.text, end="", markup=False)
        elif isinstance(event, Complete):
            counts = event.speculation
            console.print(
                f"\n  {event.usage.completion_tokens} tokens, {counts.num_accepted_draft_tokens} of "
                f"{counts.num_draft_tokens} drafts accepted, {event.timings.total_ms / 1000:.1f} s"
            )
    return text


def _with_model(pool: Pool, model: str) -> Pool:
    return pool.model_copy(update={"settings": {**pool.settings, "model": model}}) if model else pool


if __name__ == "__main__":
    typer.run(main)
