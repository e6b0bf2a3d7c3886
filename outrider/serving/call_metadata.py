"""What a caller may send along with its calls."""

from __future__ import annotations

import re
from collections.abc import Mapping

from outrider.errors import InvalidArgument
from outrider.settings import METADATA_KEY_FORM

_KEY = re.compile(METADATA_KEY_FORM)
_VALUE = re.compile(r"[ -~]*")
_BINARY = "-bin"
"""Ends keys whose values are bytes of any kind."""


def checked_metadata(metadata: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """For a call. Raises InvalidArgument for what gRPC cannot send, without quoting values: they may be secret."""
    for key, value in metadata.items():
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise InvalidArgument(
                f"metadata has the key {key!r:.80}, must be lower-case letters, digits, '_', '-' and '.'",
                field="metadata",
            )
        if key.endswith(_BINARY):
            is_good, what = isinstance(value, bytes), "bytes, as its key ends with -bin"
        else:
            is_good, what = isinstance(value, str) and _VALUE.fullmatch(value) is not None, "printable ASCII text"
        if not is_good:
            raise InvalidArgument(f"the value of metadata {key} must be {what}", field="metadata")
    return tuple(metadata.items())
