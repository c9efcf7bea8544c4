"""DataProtoFuture: what is fetched, in which order the functions are applied, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import torch

from tests.verl._protocol.rows import proto, same
from verl._protocol import future as future_module
from verl.protocol import DataProto, DataProtoFuture

pytestmark = pytest.mark.usefixtures("ray_session")


@ray.remote(num_cpus=0)
def _fail() -> DataProto:
    raise ValueError("this output cannot be fetched")


@ray.remote(num_cpus=0)
def _hold(waiting: DataProtoFuture) -> Any:
    return waiting.get()


def _rows(data: DataProto) -> list[int]:
    return data.batch["x"][:, 0].tolist()


def _counted(parts: list[DataProto | ray.ObjectRef]) -> DataProtoFuture:
    refs = [part if isinstance(part, ray.ObjectRef) else ray.put(part) for part in parts]
    counts = tuple(ray.put(2 if isinstance(part, ray.ObjectRef) else len(part)) for part in parts)
    return DataProtoFuture(DataProto.concat, refs, row_counts=counts)


def test_concat_waits_and_joins_in_order() -> None:
    data = proto(5, step=1)
    assert same(DataProtoFuture.concat([ray.put(part) for part in data.split(2)]).get(), data)


def test_chunks_are_those_of_the_joined_data() -> None:
    data = proto(12)
    waiting = DataProtoFuture.concat([ray.put(part) for part in data.split(5)])
    for parts in (3, 4, 12):
        for part, expected in zip(waiting.chunk(parts), data.chunk(parts), strict=True):
            assert same(part.get(), expected)
    assert _rows(waiting.chunk(3)[1].chunk(2)[1].get()) == [12, 14]
    assert [len(part.get()) for part in waiting.chunk(5, ragged=True)] == [3, 3, 2, 2, 2]


@pytest.mark.parametrize(("parts", "position"), [(2, 0), (2, 1), (4, 2), (6, 5)])
def test_a_chunk_fetches_only_the_outputs_that_hold_its_rows(
    parts: int, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = proto(12)
    waiting = _counted(list(data.split(3)))
    fetched: list[ray.ObjectRef] = []
    gather = future_module.gather

    def counting(refs: Any) -> list[Any]:
        fetched.extend(ref for ref in refs if ref in waiting.futures)
        return gather(refs)

    monkeypatch.setattr(future_module, "gather", counting)
    assert same(waiting.chunk(parts)[position].get(), data.chunk(parts)[position])
    size = 12 // parts
    needed = {row // 3 for row in range(position * size, (position + 1) * size)}
    assert [waiting.futures.index(ref) for ref in fetched] == sorted(needed)


def test_an_output_that_cannot_be_fetched_harms_only_its_own_rows() -> None:
    waiting = _counted([proto(2), _fail.remote()])
    first, second = waiting.chunk(2)
    assert _rows(first.get()) == [0, 2]
    with pytest.raises(ValueError, match="this output cannot be fetched"):
        second.get()
    assert _rows(first.chunk(2)[1].get()) == [2]


def test_outputs_without_rows_are_passed_over() -> None:
    waiting = _counted([proto(0), proto(2), proto(0), proto(2)])
    assert [_rows(part.get()) for part in waiting.chunk(4)] == [[0], [2], [0], [2]]
    assert len(_counted([proto(0), proto(0)]).chunk(2)[1].get()) == 0


def test_futures_pass_through_processes_unfetched() -> None:
    waiting = _counted([proto(2), _fail.remote()])
    kept = ray.get(_hold.remote(waiting.chunk(2)[0]))
    second = DataProtoFuture.concat([_hold.remote(part) for part in DataProtoFuture.concat([ray.put(kept)]).chunk(2)])
    assert _rows(second.get()) == [0, 2]


def test_outputs_are_collected_then_dispatched() -> None:
    calls: list[str] = []

    def collect(outputs: list[int]) -> DataProto:
        calls.append("collect")
        return DataProto.from_dict({"x": torch.tensor(outputs)})

    def dispatch(whole: DataProto) -> DataProto:
        calls.append("dispatch")
        return whole[[3, 2, 1, 0]]

    waiting = DataProtoFuture(collect, [ray.put(number) for number in range(4)], dispatch)
    assert waiting.get().batch["x"].tolist() == [3, 2, 1, 0]
    assert calls == ["collect", "dispatch"]
    assert waiting.chunk(2)[0].get().batch["x"].tolist() == [3, 2]


def test_unpad_before_and_after_chunk() -> None:
    for waiting in (_counted(list(proto(6).split(3))), DataProtoFuture.concat([ray.put(proto(6))])):
        assert _rows(waiting.unpad(2).get()) == [0, 2, 4, 6]
        assert _rows(waiting.unpad(2).chunk(2)[1].get()) == [4, 6]
        with pytest.raises(ValueError, match="cannot remove 7 of 6 rows"):
            waiting.unpad(7).get()


def test_rows_that_do_not_divide_are_told_when_they_are_known() -> None:
    for waiting in (_counted([proto(3), proto(2)]), DataProtoFuture.concat([ray.put(proto(5))])):
        with pytest.raises(ValueError, match="5 rows do not divide into 2 equal chunks"):
            waiting.chunk(2)[0].get()


@pytest.mark.parametrize("chunks", [0, -1])
def test_no_chunks_are_refused(chunks: int) -> None:
    with pytest.raises(ValueError, match=f"cannot split a future into {chunks} chunks"):
        DataProtoFuture.concat([]).chunk(chunks)


def test_what_fails_at_the_producer_is_raised() -> None:
    with pytest.raises(ValueError, match="this output cannot be fetched"):
        DataProtoFuture.concat([ray.put(proto(2)), _fail.remote()]).get()


def test_no_outputs_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to concatenate"):
        DataProtoFuture.concat([]).get()
