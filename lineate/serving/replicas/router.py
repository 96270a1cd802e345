"""Ray Serve's request router with lineate's policy; it runs in the process of the handle, which calls the replicas.

Ray calls choose_replicas for each request and sends it to the first replica of the order that takes it. A request
counts from the moment its replica is chosen, so that requests that come together are spread, until the front reports
its end: requests have tickets, which the front opens and ends (cluster.py).
"""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from lineate.serving.replicas.call import Call
from lineate.serving.replicas.routing import Routing, routing_of


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Sends a request to the replica that has received the longest prefix of its prompt, unless it is too busy."""

    # A busy replica may take longer to report its number of requests than Ray waits by default, and the request would
    # go to another one.
    queue_len_response_deadline_s = 2.0
    max_queue_len_response_deadline_s = 10.0

    def initialize_state(self, imbalance: int) -> None:
        """Take the routing of this process; Ray calls this with the values of the deployment's configuration.

        Args:
            imbalance: The most requests that a replica with a prompt's beginning may have more than the least busy one.
        """
        self._routing: Routing = routing_of(self.app_name, imbalance)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are asked to take a request.

        Args:
            candidate_replicas: The current replicas.
            pending_request: The request; None if Ray looks for a replica ahead of time.
        """
        call = _call(pending_request)
        if call is None:
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        order = [by_name[name] for name in self._routing.choose(call.ticket, call.blocks) if name in by_name]
        return [[replica] for replica in order] or [candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count a request at the replica that it was sent to, if its first replica did not take it.

        Args:
            pending_request: The request.
            replica_id: The replica that it was sent to.
            result: Its answer.
        """
        if (call := _call(pending_request)) is not None:
            self._routing.move(call.ticket, replica_id.unique_id, call.blocks)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the set of replicas.

        Args:
            replicas: All replicas that take requests.
        """
        self._routing.update(replica.replica_id.unique_id for replica in replicas)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Give a replica no more requests.

        Args:
            replica_id: The replica, whose process has ended.
        """
        super().on_replica_actor_died(replica_id)
        self._routing.update(other.unique_id for other in self.curr_replicas)


def _call(request: PendingRequest | None) -> Call | None:
    """Return the call of a request, if it comes from the front."""
    given = request.args[0] if request is not None and request.args else None
    return given if isinstance(given, Call) and given.ticket else None
