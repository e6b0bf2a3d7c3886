"""What is measured again and again, and now and then wrong by far."""

from __future__ import annotations

from statistics import median


class Median:
    """Of the last few values."""

    def __init__(self, size: int = 12) -> None:
        self._size = size
        self._values: list[float] = []
        self._cached: float | None = None

    def add(self, value: float) -> None:
        self._values.append(value)
        if len(self._values) > self._size:
            del self._values[0]
        self._cached = None

    def scale(self, factor: float) -> None:
        """As if all values had been so many times what they were."""
        self._values = [factor * value for value in self._values]
        self._cached = None

    def __len__(self) -> int:
        return len(self._values)

    def value(self, default: float = 0.0) -> float:
        if self._cached is None and self._values:
            self._cached = median(self._values)
        return default if self._cached is None else self._cached
