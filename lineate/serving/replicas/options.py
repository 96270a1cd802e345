"""Options of replicas: their number, where they run, and how requests are spread over them."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaOptions:
    """The options of `lineate serve` for replicas; a wrong value raises a ValueError that names its option."""

    replicas: int
    """The number of replicas, or its minimum if it changes."""
    most: int | None = None
    """The most replicas; None: always `replicas`."""
    target: float = 8.0
    """Requests of a replica, running or waiting, at which more replicas are started."""
    imbalance: int = 4
    """The most requests that the replica with a prompt's beginning may have more than the least busy one."""
    cluster: str | None = None
    """Address of the Ray cluster to join, or "auto"; None: a Ray of its own, or that of RAY_ADDRESS."""
    cpus: float = 1.0
    """Processors that Ray accounts for a replica; torch gets the same number of threads."""
    gpus: float = 0.0
    """GPUs that a replica takes."""
    at_once: int = 256
    """The most concurrent requests of a replica; more wait in the front."""
    drain_seconds: float = 30.0
    """Seconds for a stopping replica to end its answers."""
    grow_seconds: float = 10.0
    """Seconds of too many requests before replicas are started."""
    shrink_seconds: float = 300.0
    """Seconds of too few requests before replicas are stopped."""

    def __post_init__(self) -> None:
        for flag, value, least in (("--replicas", self.replicas, 1), ("--imbalance", self.imbalance, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{flag} must be an int of at least {least}, got {value!r}")
        if self.most is not None and self.most < self.replicas:
            raise ValueError(f"--max-replicas must be at least --replicas, {self.replicas}, got {self.most}")
        for flag, number in (("--target-queue", self.target), ("--replica-cpus", self.cpus)):
            if not (0 < number < math.inf):
                raise ValueError(f"{flag} must be a number above 0, got {number}")
        if not (0 <= self.gpus < math.inf) or (self.gpus > 1 and self.gpus != int(self.gpus)):
            raise ValueError(f"--replica-gpus must be a part of one GPU or a whole number of them, got {self.gpus}")

    @property
    def limit(self) -> int:
        """The most replicas that there may be."""
        return self.replicas if self.most is None else self.most
