"""A radix tree over token ids: a node is a prefix, an edge is a run of tokens, and edges below a node differ at once.

Looking up a prompt compares each of its tokens at most once, however many nodes there are. Nodes that hold no value
are removed unless the tree branches there, so the tree has at most twice as many nodes as values.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import torch

Value = TypeVar("Value")
STEP = 64
"""Tokens that are compared at once when two runs differ."""


def as_ids(ids: "Sequence[int] | torch.Tensor") -> "array[int]":
    """Return token ids as an array of 64-bit numbers, 8 bytes a token."""
    if isinstance(ids, array) and ids.typecode == "q":
        return ids
    return array("q", ids.tolist() if isinstance(ids, torch.Tensor) else ids)


class Node(Generic[Value]):
    """A prefix: the edges from the root to this node, one after another.

    Args:
        edge: the tokens between the parent and this node.
        parent: None for the root.
        value: the value of this prefix; None: no value.
    """

    __slots__ = ("children", "edge", "length", "parent", "value")

    def __init__(self, edge: "array[int]", parent: "Node[Value] | None", value: Value | None = None) -> None:
        self.edge, self.parent, self.value = edge, parent, value
        self.length: int = len(edge) + (0 if parent is None else parent.length)
        self.children: dict[int, Node[Value]] = {}

    @property
    def ids(self) -> "array[int]":
        """The tokens of the prefix."""
        edges, node = [], self
        while node.parent is not None:
            edges.append(node.edge)
            node = node.parent
        found = array("q")
        for edge in reversed(edges):
            found.extend(edge)
        return found


class RadixTree(Generic[Value]):
    """Values by prefixes of token ids."""

    def __init__(self) -> None:
        self.root: Node[Value] = Node(array("q"), None)
        self.nodes = 0
        """Nodes below the root."""

    def __iter__(self) -> Iterator[Node[Value]]:
        """Yield all nodes, parents before their children."""
        ahead = [self.root]
        while ahead:
            node = ahead.pop()
            yield node
            ahead.extend(node.children.values())

    def walk(self, ids: "array[int]") -> tuple[list[Node[Value]], int]:
        """Return the nodes that are prefixes of ids, the shortest first, and how many tokens any path shares with ids.

        Args:
            ids: the tokens of a prompt.
        """
        node, nodes = self.root, [self.root]
        while (child := node.children.get(ids[node.length]) if node.length < len(ids) else None) is not None:
            if ids[node.length : child.length] != child.edge:
                return nodes, node.length + _agreeing(ids, node.length, child.edge)
            nodes.append(child)
            node = child
        return nodes, node.length

    def insert(self, ids: "array[int]") -> Node[Value]:
        """Return the node of this prefix; an edge that passes it is split there.

        Args:
            ids: the tokens of the prefix.
        """
        nodes, shared = self.walk(ids)
        node = nodes[-1]
        if shared > node.length:
            node = self._split(node.children[ids[node.length]], shared - node.length)
        if len(ids) > node.length:
            made = Node(ids[node.length :], node)
            node.children[made.edge[0]] = made
            self.nodes += 1
            node = made
        return node

    def prune(self, node: Node[Value]) -> None:
        """Remove a node without a value, and those above it that are no longer needed.

        Args:
            node: where a value has been removed; with a value, nothing happens.
        """
        while node.value is None and node.parent is not None and not node.children:
            del node.parent.children[node.edge[0]]
            removed, node = node, node.parent
            removed.parent = None
            self.nodes -= 1
        if node.value is None and node.parent is not None and len(node.children) == 1:
            (child,) = node.children.values()
            child.edge, child.parent = node.edge + child.edge, node.parent
            node.parent.children[child.edge[0]] = child
            node.parent = None
            self.nodes -= 1

    def _split(self, child: Node[Value], at: int) -> Node[Value]:
        """Return a new node after the first `at` tokens of the child's edge."""
        parent = child.parent
        assert parent is not None and 0 < at < len(child.edge)
        middle = Node(child.edge[:at], parent)
        parent.children[middle.edge[0]] = middle
        self.nodes += 1
        child.edge, child.parent = child.edge[at:], middle
        middle.children[child.edge[0]] = child
        return middle


def _agreeing(ids: "array[int]", start: int, edge: "array[int]") -> int:
    """Return how many first tokens of the edge equal ids from start on."""
    n = 0
    while n < len(edge) and ids[start + n : start + n + STEP] == edge[n : n + STEP]:
        n += STEP
    while n < len(edge) and start + n < len(ids) and ids[start + n] == edge[n]:
        n += 1
    return min(n, len(edge))
