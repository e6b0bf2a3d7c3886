"""What a peer is asked to run, and how its answer is read. Peers import this file: it needs the standard library only.

A job is a JSON file; an answer is the last line of a peer's stdout. A figure is the list of seconds per prompt, from
the call to the last token, each for exactly `max_tokens` tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).parent
TRANSFORMERS = HERE / "peer_transformers.py"
VLLM = HERE / "peer_vllm.py"
PROGRESS = "progress: "
"""How a line of a peer's stderr begins that is for the user."""
NUM_LAST_WORDS = 30
INHERITED = dict(os.environ)
"""As this process was started. Import this module before any of ours: those let idle threads sleep, because two
services share the cores, and a peer has the cores to itself."""
PLAIN = 0
"""γ of plain decoding."""

Seconds = dict[tuple[int, float], list[float]]
"""By (γ, temperature)."""


@dataclass(frozen=True)
class Job:
    """prompts: token ids, with the chat template applied. gammas: 0 is plain decoding. draft: empty for none."""

    target: str
    draft: str
    dtype: str
    max_tokens: int
    prompts: list[list[int]]
    temperatures: list[float]
    gammas: list[int]

    @classmethod
    def read(cls) -> Job:
        """The job that this process was started with."""
        return cls(**json.loads(Path(sys.argv[1]).read_text()))


def answer(seconds: Seconds) -> None:
    """Prints a peer's figures as its last line."""
    print(json.dumps([[gamma, temperature, values] for (gamma, temperature), values in seconds.items()]), flush=True)


def tell(line: str) -> None:
    """Shows the user, at once, how far a peer is."""
    print(f"{PROGRESS}{line}", file=sys.stderr, flush=True)


class PeerAbsent(Exception):
    """The peer cannot be run here; the text says why."""


def run_peer(
    python: str,
    script: Path,
    job: Job,
    environment: dict[str, str] | None = None,
    on_progress: Callable[[str], None] = lambda line: None,
) -> Seconds:
    """Runs a peer as a process of its own. Raises PeerAbsent with its last words when it fails."""
    words: deque[str] = deque(maxlen=NUM_LAST_WORDS)
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder, "job.json"), Path(folder, "output")
        path.write_text(json.dumps(asdict(job)))
        try:
            with output.open("w") as file:
                process = subprocess.Popen(
                    [python, str(script), str(path)],
                    stdout=file,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    env={**INHERITED, "HF_HUB_OFFLINE": "1", **(environment or {})},
                )
        except OSError as error:
            raise PeerAbsent(f"{python} cannot be started: {error.strerror}") from None
        with process:
            assert process.stderr is not None
            for line in process.stderr:
                if line.startswith(PROGRESS):
                    on_progress(line.removeprefix(PROGRESS).rstrip())
                elif line.strip():
                    words.append(line.strip())
        lines = output.read_text().strip().splitlines()
    if process.returncode != 0:
        words.extend(lines if not words else [])
        raise PeerAbsent(words[-1] if words else f"exit code {process.returncode}")
    return {(gamma, temperature): values for gamma, temperature, values in json.loads(lines[-1])}
