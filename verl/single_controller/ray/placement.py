"""Placing bundles of resources on a Ray cluster, or refusing with the numbers."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

_EPSILON = 1e-6
_MARK = 1e-4  # of a custom resource that only says what a node is


@dataclass(frozen=True)
class Resources:
    """CPUs and GPUs."""

    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.cpus:g} CPUs and {self.gpus:g} GPUs"

    def times(self, count: int) -> Resources:
        return Resources(self.cpus * count, self.gpus * count)

    def plus(self, other: Resources) -> Resources:
        return Resources(self.cpus + other.cpus, self.gpus + other.gpus)

    def fits(self, room: Resources) -> bool:
        return self.cpus <= room.cpus + _EPSILON and self.gpus <= room.gpus + _EPSILON

    def bundle(self) -> dict[str, float]:
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount > 0}

    @classmethod
    def of(cls, amounts: dict[str, float]) -> Resources:
        return cls(amounts.get("CPU", 0.0), amounts.get("GPU", 0.0))


@dataclass(frozen=True)
class Slot:
    """One rank's bundle and the node it is on."""

    placement_group: PlacementGroup
    bundle_index: int
    node_id: str


@dataclass
class Bundles:
    """Placed bundles and who holds a share of them.

    Invariant: the shares held of a bundle never exceed it. The placement groups live until the
    last share is given back.
    """

    groups: list[PlacementGroup]
    slots: list[Slot]
    size: Resources
    shares: dict[str, tuple[frozenset[int], Resources]] = field(default_factory=dict)
    removed: bool = False

    def claim(self, owner: str, positions: Iterable[int], share: Resources) -> None:
        """Takes a share of each slot. Raises ValueError with what is asked, held and there."""
        wanted = frozenset(positions)
        for position in wanted:
            held = self._held(position)
            if not held.plus(share).fits(self.size):
                raise ValueError(
                    f"worker group {owner!r} asks for {share} of a bundle of {self.size}, of which {held} are taken; "
                    "lower num_cpus, or raise max_colocate_count or cpus_per_bundle"
                )
        self.shares[owner] = wanted, share

    def _held(self, position: int) -> Resources:
        held = Resources(0, 0)
        for owned, share in self.shares.values():
            held = held.plus(share) if position in owned else held
        return held

    def release(self, owner: str) -> None:
        """Gives a share back; the placement groups, with every actor in them, go with the last one."""
        self.shares.pop(owner, None)
        if not self.shares and not self.removed:
            self.removed = True
            for group in self.groups:
                remove_placement_group(group)


def place(
    counts: Sequence[int],
    size: Resources,
    strategy: str,
    name: str,
    lifetime: str | None,
    timeout_s: float,
    accelerator_type: str | None = None,
) -> Bundles:
    """Reserves ``counts[i]`` bundles for each i, with STRICT_PACK on one node.

    With ``accelerator_type`` only nodes count that have a custom Ray resource of that name.

    Slots are in rank order: the groups as ``counts`` has them, those of equal size by their node's
    address. Raises ValueError at once when the cluster's nodes
    could never hold them, and TimeoutError when they are not free within ``timeout_s``; both with
    what is asked and what is there.
    """
    _refuse_impossible(counts, size, name, strategy == "STRICT_PACK", accelerator_type)
    bundle = size.bundle() | ({} if accelerator_type is None else {accelerator_type: _MARK})
    unique = f"{name}{secrets.token_hex(3)}:"  # Ray refuses a name that is in use
    groups = [
        placement_group([bundle] * count, strategy=strategy, name=f"{unique}{position}", lifetime=lifetime)
        for position, count in enumerate(counts)
    ]
    deadline = time.monotonic() + timeout_s
    # Ray waits whole seconds.
    if not all(group.wait(math.ceil(max(0.0, deadline - time.monotonic()))) for group in groups):
        free = Resources.of(ray.available_resources())
        for group in groups:
            remove_placement_group(group)
        asked, total = size.times(sum(counts)), Resources.of(ray.cluster_resources())
        raise TimeoutError(
            f"{name!r} asks for {asked}; of the cluster's {total} only {free} came free in {timeout_s:g} s"
        )
    return Bundles(groups, _in_rank_order(counts, groups), size)


def _refuse_impossible(
    counts: Sequence[int], size: Resources, name: str, one_node: bool, accelerator_type: str | None
) -> None:
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = [Resources.of(amounts) for amounts in alive if accelerator_type is None or accelerator_type in amounts]
    if not nodes:
        raise ValueError(f"{name!r} asks for nodes with {accelerator_type!r}, which none of {len(alive)} nodes has")
    asked = size.times(sum(counts))
    total = Resources(sum(node.cpus for node in nodes), sum(node.gpus for node in nodes))
    if not asked.fits(total):
        raise ValueError(f"{name!r} asks for {asked} ({sum(counts)} x {size}); the Ray cluster has {total}")
    largest = size.times(max(counts))
    if one_node and not any(largest.fits(node) for node in nodes):
        raise ValueError(
            f"{name!r} asks for {largest} on one node ({max(counts)} x {size}); "
            f"the Ray cluster's nodes have {'; '.join(map(str, nodes))}"
        )


def _in_rank_order(counts: Sequence[int], groups: Sequence[PlacementGroup]) -> list[Slot]:
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def place_of(slot: Slot) -> tuple[tuple[int, ...], str, int]:
        numbers = tuple(int(part) for part in addresses[slot.node_id].split(".") if part.isdigit())
        return numbers, slot.node_id, slot.bundle_index

    placed = sorted((sorted(_slots(group), key=place_of) for group in groups), key=lambda slots: place_of(slots[0]))
    waiting = {count: iter([slots for slots in placed if len(slots) == count]) for count in counts}
    return [slot for count in counts for slot in next(waiting[count])]


def _slots(group: PlacementGroup) -> list[Slot]:
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [Slot(group, index, nodes[index]) for index in sorted(nodes)]
