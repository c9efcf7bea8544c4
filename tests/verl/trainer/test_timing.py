from __future__ import annotations

from verl.trainer.timing import PhaseTimer, covered_seconds


def test_union_of_intervals_counts_overlaps_once() -> None:
    assert covered_seconds([(5, 6), (0, 2), (1, 3), (1.5, 1.6)]) == 4.0
    assert covered_seconds([]) == 0.0


def test_phases_add_up_per_step_and_in_total() -> None:
    timer = PhaseTimer()
    for _ in range(2):
        with timer.phase("a"):
            pass
    first = timer.take_step()
    with timer.phase("a"):
        pass
    second = timer.take_step()
    assert set(first) == set(second) == {"a"}
    assert timer.totals["a"] == first["a"] + second["a"]
    assert timer.take_step() == {}
