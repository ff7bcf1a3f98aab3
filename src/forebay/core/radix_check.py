"""What holds of the directory's tree between any two calls, checked from scratch."""

from __future__ import annotations

import numpy as np

from forebay.core.radix import ID_BYTES, LEAF, NO_NODE, Nodes
from forebay.errors import ProtocolError


def check_nodes(nodes: Nodes, roots: set[int], published: int) -> None:
    """Raises :class:`ProtocolError` at the first contradiction. Time in the size of the tree.

    Every node is reachable from one of ``roots``, or free, and once only; links agree in both
    directions; every block that lies in a node says so, and no other block says it is published;
    a run that a node's only child continues is too long for one node.
    """
    holders = np.full(len(nodes.blocks), NO_NODE, np.int32)
    reached: set[int] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        _require(node not in reached, f"node {node} is reachable twice")
        reached.add(node)
        ids = nodes.block_ids(node)
        _require(bool((holders[ids] == NO_NODE).all()), f"node {node} holds a block of another")
        holders[ids] = node
        depths = np.arange(nodes.start[node], nodes.start[node] + len(ids))
        _require(bool((nodes.blocks.depth[ids] == depths).all()), f"node {node}: wrong depths")
        _check_shape(nodes, node, is_root=node in roots)
        for key, child in nodes.fan[node].items():
            _require(nodes.parent[child] == node, f"node {child} has another parent than {node}")
            _require(nodes.segment[child].startswith(key), f"node {child} has another first key")
            below = nodes.start[node] + nodes.length(node)
            _require(nodes.start[child] == below, f"node {child} starts at a wrong depth")
            pending.append(child)
    _require(bool((holders == nodes.blocks.node).all()), "a block says that it is elsewhere")
    _require(int((holders != NO_NODE).sum()) == published, "the count of blocks is wrong")
    free = set(nodes.free)
    _require(len(free) == len(nodes.free), "a node is free twice")
    _require(free | reached == set(range(len(nodes.parent))), "a node is neither used nor free")
    _require(not free & reached, "a node is both used and free")


def _check_shape(nodes: Nodes, node: int, *, is_root: bool) -> None:
    length = nodes.length(node)
    children = nodes.fan[node]
    _require(len(nodes.segment[node]) == length * nodes.key_bytes, f"node {node}: ids or keys lack")
    _require(len(nodes.ids[node]) == length * ID_BYTES, f"node {node}: a broken id")
    _require(all(len(key) == nodes.key_bytes for key in children), f"node {node}: a broken key")
    recent = nodes.recent[node]
    of_them = recent in children.values() if children else recent == NO_NODE
    _require(of_them, f"node {node} tries {recent} first, which is no child of it")
    _require(nodes.is_root(node) == is_root, f"node {node} is a root by one account only")
    if is_root:
        _require(length == 0 and nodes.start[node] == 0, f"root {node} has blocks of its own")
        return
    _require(0 < length <= nodes.run_blocks, f"node {node} has {length} blocks")
    _require((children is LEAF) == (not children), f"leaf {node} has a fan of its own")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ProtocolError(f"the directory contradicts itself: {otherwise}")
