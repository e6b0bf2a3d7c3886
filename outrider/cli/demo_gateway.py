"""`make demo-gateway`: all services and the gateway on loopback, with a token made for this run.

Arguments are those of `outrider up`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from outrider.cli.app import app
from outrider.serving.tokens import line_for, new_token
from outrider.settings import PREFIX, GatewaySettings

TENANT = "demo"


def main() -> None:
    """Until Ctrl-C. What is kept of the token is gone with the run."""
    with tempfile.TemporaryDirectory() as folder:
        token = new_token()
        shown, known = Path(folder) / "token", Path(folder) / "tokens"
        shown.write_text(f"{token}\n")
        known.write_text(f"{line_for(token, TENANT)}\n")
        os.environ |= {f"{PREFIX}TOKEN_FILE": str(shown), f"{PREFIX}TOKENS_FILE": str(known)}
        port = GatewaySettings.model_fields["port"].default
        app(["up", f"--gateway-port={port}", *sys.argv[1:]])


if __name__ == "__main__":
    main()
