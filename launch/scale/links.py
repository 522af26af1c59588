"""What a collective costs: one formula, links with its numbers, and a network of nodes that is made of two links.

A collective of ``kind`` over n ranks that handles S bytes takes

    hops(kind, n) * latency + S * share(kind, n) / bandwidth

S are the bytes of the whole tensor: what is reduced, what a rank has after a gather or before a scatter, what a rank
sends to all others together, what one rank sends to another. ``share`` is the part of S that each rank sends over its
link, the least that is possible and what a ring does. How the number of hops grows is a ``shape``: a "ring" passes
every rank, a "tree" doubles, and "flat" does not grow.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

from coat_dist import CoatConfigError

__all__ = ["KINDS", "SHAPES", "Group", "Link", "Network", "Range", "hops", "parse_links", "share", "usual_shape"]

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "p2p")
SHAPES = ("tree", "ring", "flat")


class Range(NamedTuple):
    """A number that is known in part."""

    low: float
    middle: float
    high: float

    def times(self, factor: float) -> Range:
        return Range(self.low * factor, self.middle * factor, self.high * factor)

    def plus(self, other: Range) -> Range:
        """Both at their low ends at once, and both at their high ends: errors of one network go together."""
        return Range(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def share(kind: str, ranks: int) -> float:
    """Bytes that a rank sends, as a part of S."""
    if ranks < 2:
        return 0.0
    if kind == "p2p":
        return 1.0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


def hops(kind: str, ranks: int, shape: str) -> float:
    """Messages that wait for one another."""
    if ranks < 2:
        return 0.0
    one = 1.0 if kind == "p2p" or shape == "flat" else float(ranks - 1) if shape == "ring" else float(ceil(log2(ranks)))
    return (2 if kind == "all_reduce" and shape != "flat" else 1) * one


def usual_shape(kind: str) -> str:
    """What NCCL does among many ranks, where no measurement says it."""
    return "tree" if kind == "all_reduce" else "flat" if kind == "p2p" else "ring"


@dataclass(frozen=True)
class Group:
    """Ranks of one collective."""

    ranks: int
    a_node: int
    """The most of them on one node."""

    @property
    def nodes(self) -> int:
        return ceil(self.ranks / self.a_node)


@dataclass(frozen=True)
class Link:
    """What one rank sends over, in one direction."""

    name: str
    bandwidth: float
    """Bytes a second."""
    latency: float
    """Seconds of a hop."""
    start: float = 0.0
    """Seconds of a collective, however many ranks it has."""
    best: float = 1.15
    worst: float = 0.7
    """Ends of what the bandwidth may be, as factors, where it was not measured."""

    def seconds(self, kind: str, ranks: int, size: float, shape: str | None = None, bandwidth: float = 0) -> float:
        """Of one collective over this link alone."""
        shape = shape or usual_shape(kind)
        return hops(kind, ranks, shape) * self.latency + size * share(kind, ranks) / (bandwidth or self.bandwidth)


@dataclass(frozen=True)
class Network:
    """Nodes of ``gpus_per_node`` ranks: a link between two ranks of a node, and one of a rank to other nodes."""

    inside: Link
    between: Link | None
    gpus_per_node: int

    def group(self, ranks: int, stride: int = 1) -> Group:
        """Every ``stride``-th rank, so many of them."""
        return Group(ranks, max(1, min(ranks, self.gpus_per_node // stride)))

    def seconds(self, kind: str, group: Group, size: float) -> Range:
        """Of one collective; low and high: a link's worst and best bandwidth, and the shapes that hops may have.

        All ranks of a node send at once, each by its own network card, so a group with several ranks on a node has
        the cards of all of them, up to what the link inside the node lets through.

        Raises:
            CoatConfigError: the group spans nodes, and there is no link between nodes.
        """
        if group.ranks < 2:
            return Range(0.0, 0.0, 0.0)
        links = [self.inside]
        if group.nodes > 1:
            if self.between is None:
                raise CoatConfigError(
                    f"--link: nothing known between nodes, accepted: nic=BANDWIDTH for {group.ranks} ranks on "
                    f"{group.nodes} nodes of {self.gpus_per_node} (or --gpus-per-node)"
                )
            links.append(self.between)
        cards = 1 if kind == "p2p" else group.a_node
        best, middle, worst = (
            min(one.bandwidth * (cards if one is self.between else 1) * factor(one) for one in links)
            for factor in (lambda one: one.best, lambda one: 1.0, lambda one: one.worst)
        )
        sent, last = size * share(kind, group.ranks), links[-1]

        def latency(shape: str) -> float:
            inner, outer = hops(kind, group.ranks, shape), hops(kind, group.nodes, shape)
            if group.nodes == 1 or kind == "p2p" or shape == "flat":
                return last.start + inner * last.latency
            return last.start + outer * last.latency + (inner - outer) * self.inside.latency

        return Range(
            latency("flat") + sent / best, latency(usual_shape(kind)) + sent / middle, latency("ring") + sent / worst
        )


_INSIDE = ("nvlink", "intra", "inside", "node", "pcie")
_BETWEEN = ("nic", "inter", "between", "ib", "infiniband", "roce", "ethernet", "efa")
_SIZES = {"": 1e0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)(b|bit|bytes?)(?:/s|ps)", re.IGNORECASE)
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(us|ms|ns|s)", re.IGNORECASE)
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_LATENCY = {"inside": 3e-6, "between": 8e-6}
"""Of a link that is given without one."""


def parse_links(given: Sequence[str]) -> dict[str, Link]:
    """``["nvlink=450GB/s,3us", "nic=400Gb/s"]`` as links "inside" and "between".

    Raises:
        CoatConfigError: another name, no bandwidth, a link that is given twice.
    """
    found: dict[str, Link] = {}
    for text in given:
        name, _, rest = text.partition("=")
        where = "inside" if name.lower() in _INSIDE else "between" if name.lower() in _BETWEEN else None
        if where is None:
            raise CoatConfigError(
                f"--link: got {text!r}, accepted: {', '.join(_INSIDE)} (within a node) or {', '.join(_BETWEEN)} "
                "(between nodes), then =BANDWIDTH[,LATENCY]"
            )
        if where in found:
            raise CoatConfigError(f"--link: got {text!r} after {found[where].name!r}, accepted: one link {where} nodes")
        first, _, second = rest.partition(",")
        rate, delay = _RATE.fullmatch(first.strip()), _TIME.fullmatch(second.strip())
        bits = rate is not None and (rate[3] == "b" or rate[3].lower() == "bit")
        if rate is None or not float(rate[1]) or (second and delay is None):
            raise CoatConfigError(
                f"--link: got {text!r}, accepted: {name}=BANDWIDTH[,LATENCY] of a GPU in one direction, such as "
                f"{name}=400GB/s,3us or {name}=400Gb/s (bits)"
            )
        found[where] = Link(
            name.lower(),
            float(rate[1]) * _SIZES[rate[2].lower()] / (8 if bits else 1),
            _LATENCY[where] if delay is None else float(delay[1]) * _UNITS[delay[2].lower()],
        )
    return found
