"""A network as it was measured: fits of each kind of collective, within a node and between nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .fit import Fit, Overlap, Sample, fit, fit_overlap
from .links import KINDS, Group, Link, Network, Range

__all__ = ["Measured", "of_records"]


@dataclass(frozen=True)
class Measured:
    """Fits where there are some, links that were given where there are: what was given goes before."""

    gpus_per_node: int
    inside: Mapping[str, Fit] = field(default_factory=dict)
    between: Mapping[str, Fit] = field(default_factory=dict)
    overlap: Mapping[str, Overlap] = field(default_factory=dict)
    given: Mapping[str, Link] = field(default_factory=dict)
    """Links "inside" and "between" of ``--link``."""

    def group(self, ranks: int, stride: int = 1) -> Group:
        """Every ``stride``-th rank, so many of them."""
        return Group(ranks, max(1, min(ranks, self.gpus_per_node // stride)))

    def link(self, where: str, kind: str) -> Link | None:
        """The link for a kind of collective; that of the all-gather for one that was not measured."""
        fits = self.inside if where == "inside" else self.between
        found = fits.get(kind) or fits.get("all_gather")
        return self.given.get(where) or (None if found is None else found.link(where))

    def seconds(self, kind: str, group: Group, size: float) -> Range:
        """As :meth:`launch.scale.links.Network.seconds`."""
        if group.ranks < 2:
            return Range(0.0, 0.0, 0.0)
        if group.nodes == 1 and "inside" not in self.given and kind in self.inside:
            return self.inside[kind].seconds(group.ranks, size)
        between = self.link("between", kind)
        inside = self.link("inside", kind) or between
        if inside is None:
            inside = Link("unknown", 1.0, 1.0)  # of a group on one node: the error below is about the node's own link
            if group.nodes == 1:
                from coat_dist import CoatConfigError

                raise CoatConfigError(
                    f"--link: nothing known within a node, accepted: nvlink=BANDWIDTH for {group.ranks} ranks of a node"
                )
        return Network(inside, between, self.gpus_per_node).seconds(kind, group, size)


def of_records(records: Sequence[Mapping[str, Any]], gpus_per_node: int, given: Mapping[str, Link]) -> Measured:
    """What measurements of ``scaling.py`` say.

    Args:
        records: those of collectives: ``samples`` and ``overlaps`` of a group, which had ``a_node`` ranks on a node.
    """
    samples: dict[tuple[str, str], list[Sample]] = {}
    pairs: dict[str, list[tuple[float, float, float]]] = {}
    for record in records:
        group = Group(record["ranks"], record["a_node"])
        where = "inside" if group.nodes == 1 else "between" if group.a_node == 1 else None
        if where is None:  # both links at once
            continue
        for one in record["samples"]:
            samples.setdefault((where, one["kind"]), []).append(Sample(**one))
        for one in record["overlaps"]:
            pairs.setdefault(one["kind"], []).append((one["computing"], one["collective"], one["together"]))
    fits: dict[str, dict[str, Fit]] = {"inside": {}, "between": {}}
    for (where, kind), found in samples.items():
        if len(found) > 1:
            fits[where][kind] = fit(found)
    overlap = {
        kind: fit_overlap([(c, m) for c, m, _ in found], [b for *_, b in found]) for kind, found in pairs.items()
    }
    order = {kind: i for i, kind in enumerate(KINDS)}
    ordered = {where: dict(sorted(one.items(), key=lambda item: order[item[0]])) for where, one in fits.items()}
    return Measured(gpus_per_node, ordered["inside"], ordered["between"], overlap, given)
