"""Models on this machine: what is there, and getting what is not, once and with a progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider.cli.console import progress
from outrider.settings import WorkerSettings


def prepare(*models: str | None, revision: str = "") -> str:
    """Downloads or converts what is missing, before several processes want it at the same time; the last one's path.

    Toys, folders and files need nothing. Raises InvalidArgument or FailedPrecondition naming the fix.
    """
    path = ""
    for model in dict.fromkeys(filter(None, models)):
        path = model
        if model.startswith("toy:"):
            from outrider.lm.toy import parse_toy

            parse_toy(model)
        else:
            from outrider.lm.loading import locate

            with progress(model) as report:
                path = str(locate(WorkerSettings(model=model, revision=revision), report)[0])
    return path


def known_models() -> Iterator[dict[str, Any]]:
    """Bundles, and models in the hub's cache: {model, source, state, bytes}."""
    try:
        from outrider.lm.bundle import BUNDLES, cache_folder
    except ModuleNotFoundError:  # installed without the worker extra: this machine can serve none
        return
    for name in BUNDLES:
        files = [path for path in (cache_folder() / name).glob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        yield {"model": name, "source": "bundle", "state": "ready" if files else "to be got", "bytes": size}
    yield from _hub_cache()


def _hub_cache() -> Iterator[dict[str, Any]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return
    for repo in sorted(cache.repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model":
            yield {"model": repo.repo_id, "source": "hub cache", "state": "ready", "bytes": repo.size_on_disk}
