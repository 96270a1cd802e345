"""Ray and the replicas on it: start or join Ray, deploy, call, restart one replica after another, and end."""

import contextlib
import itertools
import logging
import math
import os
import re
import signal
import socket
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.types import Message

from lineate.serving.replicas.call import Call
from lineate.serving.replicas.gathered import ReplicaLost
from lineate.serving.replicas.options import ReplicaOptions
from lineate.serving.replicas.replica import Build, Replica
from lineate.serving.replicas.routing import RoutingStats, forget_routing, routing_of

LOG = logging.getLogger("lineate.serving")
ROUTER = "lineate.serving.replicas.router:PrefixRouter"
WRITING_SECONDS = 30.0
"""Seconds for a replica to write its cache to a folder after its last answer, in addition to those for its answers."""
ALL_SECONDS = 10.0
"""The timeout of a call that all replicas answer."""
OBJECT_BYTES = 256 * 2**20
"""Memory of lineate's own Ray for messages between processes; bodies and answers are small."""
LOOK_BACK_SECONDS = 15.0
"""Seconds over which the number of requests is averaged for growing and shrinking; Ray is told every 10."""
CONNECT_SECONDS = 5.0
"""The timeout of connections to a cluster."""
FAILED_STARTS = 2
"""Replicas that may fail to start before the whole start fails."""


class RayReplicas:
    """The replicas of one model for the front. They are running when this returns.

    Raises ValueError if Ray cannot be reached or lacks resources, and the replicas' exception if they cannot start.

    Args:
        build: Makes the application and the engine; it is called in the process of each replica.
        options: How many replicas there are, and where.
        name: The name of the application in Ray Serve.
    """

    def __init__(self, build: Build, options: ReplicaOptions, name: str) -> None:
        self._build, self._options = build, options
        self._name = "lineate-" + re.sub(r"[^\w.-]", "-", name)
        self._tickets = itertools.count(1)
        self._deploying = threading.Lock()
        self._closed = False
        self._handle: Any = None
        self._routing = routing_of(self._name, options.imbalance)
        self._owned = _start_ray(options)
        try:
            self._handle = self._deploy()
        except BaseException:
            self.close()
            raise

    @property
    def stats(self) -> RoutingStats:
        """Counts of routed requests, and the current replicas."""
        return self._routing.stats

    async def answer(self, call: Call) -> AsyncGenerator[tuple[str, Sequence[Message]]]:
        """Yield the name of the replica that answers, and messages of its answer; raise ReplicaLost.

        Args:
            call: The request.
        """
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import RayServeException

        ticket = str(next(self._tickets))
        self._routing.open(ticket)
        answers, whole = self._handle.remote(replace(call, ticket=ticket)), False
        try:
            async for replica, messages in answers:
                yield replica, messages
            whole = True
        except RayTaskError:
            raise  # an error in the replica's code; the replica still runs
        except (RayError, RayServeException) as error:
            raise ReplicaLost(str(error).partition("\n")[0]) from error
        finally:
            self._routing.end(ticket)
            if not whole:  # the client has left
                answers.cancel()

    async def ask_all(self, call: Call) -> Mapping[str, bytes]:
        """Return the body of each replica's answer by its name; one that does not answer with 200 is left out.

        Args:
            call: The request.
        """
        asked = self._handle.broadcast("whole", call)
        try:
            found = await asked.results_async(timeout_s=ALL_SECONDS, return_exceptions=True)
        except TimeoutError:
            LOG.warning("the replicas did not all answer %s within %g s", call.path, ALL_SECONDS)
            return {}
        answers = [x for x in found if not isinstance(x, BaseException)]
        return {name: body for name, status, body in answers if status == 200}

    def restart(self) -> None:
        """Replace one replica after another; each ends its answers first. Return when all are new."""
        with self._deploying:
            if not self._closed:
                self._deploy()

    def run(self, server: uvicorn.Server, listening: socket.socket) -> None:
        """Serve until the server ends; SIGHUP restarts the replicas. Then end them.

        Args:
            server: The server of the front.
            listening: Its listening socket.
        """
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, lambda *_: threading.Thread(target=self._restart_or_log, daemon=True).start())
        try:
            server.run([listening])
        finally:
            self.close()

    def close(self) -> None:
        """End the replicas, which write their caches to their folder; end Ray if it was started here."""
        import ray
        from ray import serve
        from ray.serve.exceptions import RayServeException

        self._closed = True
        with self._deploying:
            forget_routing(self._name)
            if ray.is_initialized():
                if self._handle is not None:
                    self._handle.shutdown()  # otherwise its threads would start another Ray when this one has ended
                with contextlib.suppress(RayServeException):  # Serve has not been started
                    serve.delete(self._name)
                if self._owned:
                    ray.shutdown()

    def _restart_or_log(self) -> None:
        try:
            self.restart()
        except Exception:
            LOG.exception("the replicas could not be restarted")

    def _deploy(self) -> Any:
        """Deploy the replicas, which replaces those that run, and return a handle to them."""
        from ray import serve
        from ray.serve.config import AutoscalingConfig, RequestRouterConfig
        from ray.serve.schema import LoggingConfig

        options = self._options
        quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
        number: dict[str, Any] = {"num_replicas": options.replicas}
        if options.limit > options.replicas:
            scaling = AutoscalingConfig(
                min_replicas=options.replicas, max_replicas=options.limit, target_ongoing_requests=options.target,
                upscale_delay_s=options.grow_seconds, downscale_delay_s=options.shrink_seconds,
                look_back_period_s=LOOK_BACK_SECONDS,
            )  # fmt: skip
            number = {"autoscaling_config": scaling}
        deployment = serve.deployment(
            Replica,
            name="replica",
            **number,
            max_ongoing_requests=options.at_once,
            ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
            graceful_shutdown_wait_loop_s=0.5,
            graceful_shutdown_timeout_s=options.drain_seconds + WRITING_SECONDS,
            health_check_period_s=5.0,
            health_check_timeout_s=30.0,
            max_constructor_retry_count=FAILED_STARTS,
            # A new replica is ready before an old one ends, where a processor is left for it.
            max_surge_percent=1 if self._owned and not options.gpus else 0,
            request_router_config=RequestRouterConfig(
                request_router_class=ROUTER, request_router_kwargs={"imbalance": options.imbalance}
            ),
            logging_config=quiet,
        )
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled", logging_config=quiet)
        try:
            handle = serve.run(deployment.bind(self._build), name=self._name, route_prefix=None)
        except RuntimeError:
            raise self._reason() from None
        return handle.options(stream=True, method_name="answer")

    def _reason(self) -> Exception:
        """Return the exception that kept the replicas from starting, converted to one of this process."""
        from ray import serve

        application = serve.status().applications.get(self._name)
        text = "" if application is None else "\n".join(x.message for x in application.deployments.values())
        found = re.findall(r"^\s*(?:\w+\.)*(\w+(?:Error|Exception)): (.*)$", text, re.MULTILINE)
        kind, message = found[-1] if found else ("RuntimeError", text.strip().rpartition("\n")[2])
        if kind in ("ValueError", "CheckpointError", "FileNotFoundError", "OSError", "ImportError"):
            return ValueError(message)
        return RuntimeError(f"the replicas could not start: {kind}: {message}")


def _start_ray(options: ReplicaOptions) -> bool:
    """Start a Ray on this machine or join one; return whether it was started here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    import ray

    if ray.is_initialized():
        return False
    address = options.cluster or os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        try:
            _check_reachable(address)
            ray.init(address, logging_level="WARNING")
        except (ValueError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"--cluster must be auto or the HOST:PORT of a running Ray cluster, got {address!r} ({reason}); "
                "start one with ray start --head, or leave the option out"
            ) from None
        return False
    cpus = max(os.cpu_count() or 1, math.ceil((options.limit + 1) * options.cpus))  # nominal, for Ray; they are shared
    ray.init(
        "local",
        num_cpus=cpus,
        object_store_memory=OBJECT_BYTES,
        include_dashboard=False,
        logging_level="WARNING",
    )
    found = ray.cluster_resources().get("GPU", 0)
    if options.gpus * options.limit > found:
        ray.shutdown()
        raise ValueError(
            f"--replicas must fit on the {found:g} GPUs of this machine with {options.gpus:g} each, "
            f"got {options.limit}; give --replica-gpus a smaller part"
        )
    return True


def _check_reachable(address: str) -> None:
    """Raise ValueError or OSError if nothing listens at an address; Ray itself would wait for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ValueError("there is no port in it")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
