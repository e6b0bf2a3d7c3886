"""What `outrider up` prints for the next terminal: each line works there as it stands.

All ask for the likeliest text: at the temperature that its maker recommends, a small model's first words may be noise.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

TEXT, TOY_TEXT = "Once upon a time", "!!"
"""Of real models; of every toy: its id 0, twice."""
EXAMPLE = Path("docs/examples/stream.py")
"""Where a checkout is the folder at hand."""
EXAMPLES_PORT = ":50050"
"""That the examples call."""
SOME_TOKEN = "TOKEN"
"""Stands for one that the file of tokens has and nobody told us."""


def calls(address: str, gateway: str | None, token: str, *, is_toy: bool) -> list[str]:
    """address: of the coordinator. token: that is asked for, empty: none is. is_toy: no chat template, and few
    characters, one for each id."""
    who = f"OUTRIDER_TOKEN={shlex.quote(token)} " if token else ""
    header = f" -H {shlex.quote(f'authorization: Bearer {token}')}" if token else ""
    text = TOY_TEXT if is_toy else TEXT
    words = [shlex.quote(text)] if is_toy else ["--chat", '"Write a haiku about rivers."']
    shown = [f"{who}{program()} generate --address {address} --temperature 0 {' '.join(words)}"]
    if not is_toy:
        shown.append(f"{who}{program()} chat --address {address} --temperature 0")
    body = shlex.quote(json.dumps({"text": text, "sampling": {"temperature": 0}}))
    shown.append(f"grpcurl -plaintext{header} -d {body} {address} outrider.v1.GenerationService/Generate")
    shown_token = f', token="{token}"' if token else ""
    shown.append(f'python: async with outrider.Client("{address}"{shown_token}) as client: ...')
    if EXAMPLE.exists() and address.endswith(EXAMPLES_PORT) and not is_toy:
        shown.append(f"{who}{beside(sys.executable)} {EXAMPLE}")
    if gateway is not None:
        shown += _over_http(gateway, text, header, token)
    if token:
        shown.append(f"token: {token if token != SOME_TOKEN else 'one that --tokens-file knows, for TOKEN above'}")
    return shown


def _over_http(gateway: str, text: str, header: str, token: str) -> list[str]:
    asked = shlex.quote(json.dumps({"prompt": text, "max_tokens": 40, "temperature": 0, "stream": True}))
    return [
        f"curl -N http://{gateway}/v1/completions{header} -H 'content-type: application/json' -d {asked}",
        f'python: openai.OpenAI(base_url="http://{gateway}/v1", api_key="{token or "any"}")',
        f"browser: http://{gateway}/playground/" + (" (the token goes into Settings, Bearer token)" if token else ""),
    ]


def program() -> str:
    """Of this installation, as a shell in this folder finds it."""
    own = Path(sys.executable).with_name("outrider")
    found = shutil.which("outrider")
    if not own.exists() or (found and Path(found).absolute() == own.absolute()):
        return "outrider"
    return beside(own)


def beside(path: str | Path) -> str:
    """As short as it can be told in this folder, for a shell."""
    near = os.path.relpath(path)
    return shlex.quote(str(path) if near.startswith("..") else near)
