"""The fleet file: which pools of workers Ray places, where, and with which settings."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider.errors import InvalidArgument, OutriderError
from outrider.serving.naming import split_names
from outrider.settings import ClientSettings, DraftWorkerSettings, TargetWorkerSettings, WorkerSettings

SETTINGS: dict[str, type[WorkerSettings]] = {"draft": DraftWorkerSettings, "target": TargetWorkerSettings}
DRIVER_SETTINGS = ("host", "port", "coordinators", "advertise_address")
"""Settings that follow from where Ray puts a worker."""


class ConfigError(InvalidArgument):
    """The fleet file is wrong. The message names the field."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Pool(_Model):
    """Equal workers. Each is one actor that demands the given resources of one node.

    One of several ranks (settings.tensor_parallel) has a placement group of its own: its cards stay reserved while its
    process is started again.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", description="Actors are called NAME-0, NAME-1, ...")
    role: Literal["draft", "target"]
    replicas: int = Field(1, ge=1, description="At the start; absent: `min_replicas`.")
    min_replicas: int = Field(1, ge=1, description="Never fewer than these; absent: `replicas`.")
    max_replicas: int = Field(1, ge=1, description="Never more at once, leaving ones included; absent: `replicas`.")
    num_cpus: float = Field(1.0, ge=0)
    num_gpus: float = Field(0.0, ge=0, description="A fraction shares one card, and caps the worker's memory on it.")
    memory_bytes: int = Field(0, ge=0, description="Host memory to reserve; Ray counts it, nothing enforces it.")
    accelerator_type: str = Field("", description="Kind of card, as Ray names it: L4, A100, H100, ...")
    resources: dict[str, float] = Field(default_factory=dict, description="Custom Ray resources.")
    label_selector: dict[str, str] = Field(default_factory=dict, description='Ray node labels: {"pool" = "draft"}.')
    first_port: int = Field(0, ge=0, le=65535, description="Worker i listens on this + i; 0 picks free ports here.")
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the worker: `outrider ROLE-worker`."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_replicas(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        replicas = values.get("replicas", values.get("min_replicas", 1))
        return {"replicas": replicas, "min_replicas": replicas, "max_replicas": replicas, **values}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.min_replicas <= self.replicas <= self.max_replicas:
            raise ValueError(
                f"replicas: {self.replicas} is not between min_replicas {self.min_replicas} and max_replicas "
                f"{self.max_replicas}"
            )
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError(f"num_gpus: {self.num_gpus} is neither a fraction of one card nor a whole number of cards")
        reserved = [name for name in self.settings if name in DRIVER_SETTINGS]
        if reserved:
            raise ValueError(f"settings: {', '.join(reserved)} follow from the placement, remove them")
        self.worker_settings()
        if self.num_gpus and self.num_ranks not in (1, self.num_gpus):
            raise ValueError(
                f"num_gpus: {self.num_gpus:g}, but the {self.num_ranks} ranks of tensor_parallel want one each"
            )
        if self.num_ranks > 1 and not (self.num_cpus or self.num_gpus or self.resources):
            raise ValueError("num_cpus: 0, with no card or other resource: several ranks must reserve something")
        return self

    @property
    def num_ranks(self) -> int:
        """Processes of one worker that share its model."""
        return int(getattr(self.worker_settings(), "tensor_parallel", 1))

    @property
    def scales(self) -> bool:
        return self.min_replicas < self.max_replicas

    def worker_settings(self, **placement: Any) -> WorkerSettings:
        """The settings of one worker of this pool. A pool without cards never touches one."""
        device = {} if self.num_gpus else {"device": "cpu"}
        return SETTINGS[self.role](**{**device, **self.settings, **placement})


class Scaling(_Model):
    """When pools grow and shrink; `deploy/ray/scaling.py` tells how. Shares are 0 to 1."""

    interval_s: float = Field(5.0, gt=0, description="Between looks at workers and coordinators.")
    window_s: float = Field(60.0, gt=0, description="Draft wait and acceptance are those of the last so many seconds.")
    up_delay_s: float = Field(15.0, ge=0, description="Need must last this long before workers are added.")
    down_delay_s: float = Field(300.0, ge=0, description="Need must be lower this long before one worker is drained.")
    max_usage: float = Field(0.85, gt=0, le=1, description="A pool grows when so much of its room is taken.")
    min_usage: float = Field(0.5, gt=0, le=1, description="A pool shrinks while no more than this would be taken.")
    max_draft_wait: float = Field(
        0.1, gt=0, lt=1, description="Share of a round that waiting for draft workers may take before these grow."
    )
    min_draft_wait: float = Field(0.02, ge=0, lt=1, description="Below this share they shrink.")
    min_accepted_drafts: float = Field(
        0.2, ge=0, description="Accepted drafts a round of a worker's below which the pool shrinks to its minimum."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for least, most in (("min_usage", "max_usage"), ("min_draft_wait", "max_draft_wait")):
            if getattr(self, least) >= getattr(self, most):
                raise ValueError(f"{least}: must be below {most}, else a pool would swing")
        return self


class Fleet(_Model):
    """All pools, and the coordinators that they register with."""

    namespace: str = Field("outrider", min_length=1, description="Ray namespace of the actors' names.")
    coordinators: tuple[str, ...] = Field(
        min_length=1, description="host:port of each coordinator, or dns:///name:port for all behind a name."
    )
    client: ClientSettings = Field(
        default_factory=ClientSettings, description="How the driver asks coordinators: token and TLS, by files there."
    )
    scaling: Scaling = Field(default_factory=Scaling)
    pools: tuple[Pool, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError("pools: two pools have one name")
        if not any(pool.role == "target" for pool in self.pools):
            raise ValueError("pools: at least one pool must have role target")
        split_names(self.coordinators, "coordinators")
        return self


def load_fleet(path: Path) -> Fleet:
    """Reads a TOML fleet file. Raises ConfigError."""
    try:
        return Fleet.model_validate(tomllib.loads(path.read_text()))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except OutriderError as error:
        raise ConfigError(f"{path}: {error.message}") from error
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, fault['loc'])) or 'fleet'}: {fault['msg'].removeprefix('Value error, ')}"
            for fault in error.errors()
        ]
        raise ConfigError(f"{path}: {'; '.join(lines)}") from error
