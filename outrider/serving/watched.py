"""What files hold, read again when they change: certificates, tokens and limits are replaced while a server runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from outrider.errors import InvalidArgument, OutriderError

log = logging.getLogger(__name__)

UNREADABLE_FILE = "UNREADABLE_FILE"
"""Reason of a file that cannot be read: the message begins with its path."""
T = TypeVar("T")
_Stamp = tuple[tuple[int, int, int] | None, ...]


class Watched(Generic[T]):
    """What `parse` makes of the contents of `paths`. Raises InvalidArgument for files that cannot be read at first;
    later ones that are no good are told in the log, and what was read before stays in force."""

    def __init__(self, paths: Sequence[str], parse: Callable[..., T], fields: Sequence[str] = ()) -> None:
        """parse: gets the bytes of each file, and raises OutriderError for what it cannot use. fields: the settings
        that name the files, for errors."""
        self._paths = tuple(paths)
        self._fields = tuple(fields) or (None,) * len(self._paths)
        self._parse = parse
        self.version = 0
        """Counts the changes."""
        self._stamp = self._look()
        try:
            self._value = self._read()
        except InvalidArgument as error:
            if any(path in error.message for path in self._paths):
                raise
            raise InvalidArgument(
                f"{error.message} (in {', '.join(self._paths)})", field=error.field, reason=error.reason
            ) from None

    def current(self) -> T:
        """As of now. A look costs a `stat` of each file."""
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp = stamp  # of before the reading, so that a change meanwhile is seen by the next look
            names = ", ".join(self._paths)
            try:
                self._value = self._read()
            except Exception as error:
                # of any other kind the name alone: its message might quote a secret
                why = error.message if isinstance(error, OutriderError) else type(error).__name__
                log.error("%s changed, but what was read before stays in force: %s", names, why)
            else:
                self.version += 1
                log.info("%s changed and was read again", names)
        return self._value

    def _look(self) -> _Stamp:
        return tuple(_stamp_of(path) for path in self._paths)

    def _read(self) -> T:
        contents = []
        for path, field in zip(self._paths, self._fields, strict=True):
            try:
                contents.append(Path(path).read_bytes())
            except OSError as error:
                raise InvalidArgument(
                    f"{path} cannot be read: {error.strerror}", field=field, reason=UNREADABLE_FILE
                ) from None
        return self._parse(*contents)


def _stamp_of(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
