"""`python -m coordinator`: settings from `OUTRIDER_*` alone. The command `outrider coordinator` has flags too."""

from __future__ import annotations

from coordinator.server import serve
from outrider.cli.console import reporting_errors
from outrider.cli.flags import read_settings, refuse_arguments
from outrider.serving.server import run
from outrider.settings import CoordinatorSettings


def main() -> None:
    """Runs until it is told to stop. Prints one line once it serves, for whoever launched it."""
    refuse_arguments("coordinator", "coordinator")
    settings = read_settings(CoordinatorSettings, {})

    def on_ready(port: int) -> None:
        print(f"outrider coordinator ready on {settings.host}:{port}", flush=True)

    run(serve(settings, on_ready=on_ready))


if __name__ == "__main__":
    with reporting_errors(CoordinatorSettings):
        main()
