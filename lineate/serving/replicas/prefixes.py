"""Records which replicas have read which prompts: a bounded radix tree of recent prompts.

A prompt is an array of blocks, numbers that stand for 16 characters or tokens each (prompts.py). Every node of the tree
names the replicas that were sent a prompt through it, so following a new prompt shows how much of it each replica has
read. The tree has the prompts sent to the replicas, not the contents of their caches, which would need requests to
them.
"""

from array import array
from collections import OrderedDict

from lineate.serving.cache.radix import Node, RadixTree

_Node = Node[set[str]]

MOST_BLOCKS = 2**20
"""Blocks that are remembered: 16 million characters, in 8 MB."""
LONGEST = 2**14
"""Blocks of one prompt that are compared."""


class Prefixes:
    """The prompts that replicas were sent last.

    Args:
        most: The most blocks that the tree may hold.
    """

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        if most < 1:
            raise ValueError(f"most must be at least 1, got {most}")
        self._most = most
        self._tree: RadixTree[set[str]] = RadixTree()
        self._ends: OrderedDict[_Node, None] = OrderedDict()
        """Nodes at which a prompt ended, the least recently used first."""
        self.blocks = 0
        """Blocks that the tree holds."""

    def shared(self, blocks: "array[int]") -> dict[str, int]:
        """Return for each replica how many first blocks of a prompt it was sent before, unless there are none.

        Args:
            blocks: The prompt.
        """
        blocks = blocks[:LONGEST]
        nodes, length = self._tree.walk(blocks)
        found: dict[str, int] = {}
        for node in nodes[1:]:
            found |= dict.fromkeys(node.value or (), node.length)
        if length > nodes[-1].length:  # the prompt leaves the tree in the middle of an edge
            below = nodes[-1].children[blocks[nodes[-1].length]]
            found |= dict.fromkeys(below.value or (), length)
        return found

    def add(self, blocks: "array[int]", replica: str) -> None:
        """Record that a replica is sent a prompt, and remove old prompts if there are too many blocks.

        Args:
            blocks: The prompt.
            replica: The replica.
        """
        blocks = blocks[: min(LONGEST, self._most)]
        if not blocks:
            return
        self.blocks += len(blocks) - self._tree.walk(blocks)[1]
        end = self._tree.insert(blocks)
        for node in self._tree.walk(blocks)[0][1:]:
            if node.value is None:  # a new node; if it splits an edge, its descendants were sent through it
                node.value = set().union(*(child.value or () for child in node.children.values()))
            node.value.add(replica)
        self._ends[end] = None
        self._ends.move_to_end(end)
        while self.blocks > self._most:
            self._remove(self._ends.popitem(last=False)[0])

    def forget(self, replica: str) -> None:
        """Remove the prompts of a replica, which has ended.

        Args:
            replica: The replica.
        """
        for node in reversed(list(self._tree)):  # children before their parents
            if node.value is not None:
                node.value.discard(replica)
                if not node.value:
                    self._ends.pop(node, None)
                    self._remove(node)

    def _remove(self, node: _Node) -> None:
        """Remove a node that is no longer an end, and those above it that lead to no end."""
        while node.parent is not None and not node.children and node not in self._ends:
            above = node.parent
            self.blocks -= len(node.edge)
            node.value = None
            self._tree.prune(node)
            node = above
