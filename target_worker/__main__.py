"""`python -m target_worker`: settings from `OUTRIDER_*` alone. The command `outrider target-worker` has flags too."""

from __future__ import annotations

from outrider.cli.console import reporting_errors
from outrider.cli.flags import read_settings, refuse_arguments
from outrider.serving import huge_pages
from outrider.serving.server import run
from outrider.settings import TargetWorkerSettings
from target_worker.server import serve


def main() -> None:
    """Runs until it is told to stop. Prints one line once it serves, for whoever launched it."""
    huge_pages.start_over_asking()
    refuse_arguments("target_worker", "target-worker")
    settings = read_settings(TargetWorkerSettings, {})

    def on_ready(port: int) -> None:
        print(f"outrider target-worker ready on {settings.host}:{port}", flush=True)

    run(serve(settings, on_ready=on_ready))


if __name__ == "__main__":
    with reporting_errors(TargetWorkerSettings):
        main()
