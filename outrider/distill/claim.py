"""A folder belongs to one set of settings: what was made under others is never taken for one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.distill.shards import write_json
from outrider.errors import InvalidArgument


def claim(folder: Path, file: str, values: Mapping[str, Any], field: str) -> None:
    """Writes `values` to a file of that name in a new or empty folder, or finds them there.

    Raises InvalidArgument, with `field` as the folder's setting, when the folder holds something else.
    """
    path = folder / file
    if path.is_file():
        found = json.loads(path.read_text())
        wanted = json.loads(json.dumps(dict(values)))
        for name in wanted:
            if found.get(name) != wanted[name]:
                raise InvalidArgument(
                    f"{field}: {folder} was begun with {name} {found.get(name)!r}, this is {wanted[name]!r}: "
                    f"give that, or another {field}",
                    field=field,
                )
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"{field}: cannot make {folder} ({error})", field=field) from error
    if any(not entry.name.startswith(".") and entry.suffix != ".part" for entry in folder.iterdir()):
        raise InvalidArgument(f"{field}: {folder} holds other things; give a new or empty folder", field=field)
    write_json(path, dict(values))
