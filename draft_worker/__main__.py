"""`python -m draft_worker`: settings from `OUTRIDER_*` alone. The command `outrider draft-worker` has flags too."""

from __future__ import annotations

from draft_worker.server import serve
from outrider.cli.console import reporting_errors
from outrider.cli.flags import read_settings, refuse_arguments
from outrider.serving import huge_pages
from outrider.serving.server import run
from outrider.settings import DraftWorkerSettings


def main() -> None:
    """Runs until it is told to stop. Prints one line once it serves, for whoever launched it."""
    huge_pages.start_over_asking()
    refuse_arguments("draft_worker", "draft-worker")
    settings = read_settings(DraftWorkerSettings, {})

    def on_ready(port: int) -> None:
        print(f"outrider draft-worker ready on {settings.host}:{port}", flush=True)

    run(serve(settings, on_ready=on_ready))


if __name__ == "__main__":
    with reporting_errors(DraftWorkerSettings):
        main()
