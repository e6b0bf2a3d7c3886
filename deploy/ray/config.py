"""The fleet file: which pools of workers Ray places, where, and with which settings."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider.settings import DraftWorkerSettings, TargetWorkerSettings, WorkerSettings

SETTINGS: dict[str, type[WorkerSettings]] = {"draft": DraftWorkerSettings, "target": TargetWorkerSettings}
DRIVER_SETTINGS = ("host", "port", "coordinators", "advertise_address")
"""Settings that follow from where Ray puts a worker."""


class ConfigError(Exception):
    """The fleet file is wrong. The message names the field."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Pool(_Model):
    """Equal workers. Each is one actor that demands the given resources of one node."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", description="Actors are called NAME-0, NAME-1, ...")
    role: Literal["draft", "target"]
    replicas: int = Field(1, ge=1)
    num_cpus: float = Field(1.0, ge=0)
    num_gpus: float = Field(0.0, ge=0, description="A fraction shares one card, and caps the worker's memory on it.")
    memory_bytes: int = Field(0, ge=0, description="Host memory to reserve; Ray counts it, nothing enforces it.")
    resources: dict[str, float] = Field(default_factory=dict, description="Custom Ray resources.")
    label_selector: dict[str, str] = Field(default_factory=dict, description='Ray node labels: {"pool" = "draft"}.')
    first_port: int = Field(0, ge=0, le=65535, description="Replica i listens on this + i; 0 picks free ports here.")
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the worker: `outrider ROLE-worker`."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError(f"num_gpus: {self.num_gpus} is neither a fraction of one card nor a whole number of cards")
        reserved = [name for name in self.settings if name in DRIVER_SETTINGS]
        if reserved:
            raise ValueError(f"settings: {', '.join(reserved)} follow from the placement, remove them")
        self.worker_settings()
        return self

    def worker_settings(self, **placement: Any) -> WorkerSettings:
        """The settings of one worker of this pool. A pool without cards never touches one."""
        device = {} if self.num_gpus else {"device": "cpu"}
        return SETTINGS[self.role](**{**device, **self.settings, **placement})


class Fleet(_Model):
    """All pools, and the coordinators that they register with."""

    namespace: str = Field("outrider", min_length=1, description="Ray namespace of the actors' names.")
    coordinators: tuple[str, ...] = Field(min_length=1, description="host:port of each coordinator.")
    pools: tuple[Pool, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError("pools: two pools have one name")
        if not any(pool.role == "target" for pool in self.pools):
            raise ValueError("pools: at least one pool must have role target")
        return self


def load_fleet(path: Path) -> Fleet:
    """Reads a TOML fleet file. Raises ConfigError."""
    try:
        return Fleet.model_validate(tomllib.loads(path.read_text()))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'fleet'}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{path}: {'; '.join(lines)}") from error
