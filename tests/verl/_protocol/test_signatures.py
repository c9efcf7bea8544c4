"""Arguments that verl's users pass by name or by place keep both."""

from __future__ import annotations

import inspect

import pytest

from verl import protocol
from verl.protocol import DataProto, DataProtoFuture, DataProtoItem

METHODS = {
    "from_dict": "tensors non_tensors meta_info num_batch_dims auto_padding",
    "from_single_dict": "data meta_info auto_padding",
    "from_tensordict": "tensor_dict meta_info num_batch_dims",
    "save_to_disk": "filepath",
    "load_from_disk": "filepath",
    "print_size": "prefix",
    "check_consistency": "",
    "to": "device",
    "select": "batch_keys non_tensor_batch_keys meta_info_keys deepcopy",
    "select_idxs": "idxs",
    "slice": "start end step",
    "pop": "batch_keys non_tensor_batch_keys meta_info_keys",
    "rename": "old_keys new_keys",
    "union": "other",
    "make_iterator": "mini_batch_size epochs seed dataloader_kwargs",
    "is_padding_enabled": "",
    "padding": "padding_size padding_candidate",
    "chunk": "chunks",
    "split": "split_size",
    "concat": "data",
    "reorder": "indices",
    "repeat": "repeat_times interleave",
    "unfold_column_chunks": "n_split split_keys",
    "sample_level_repeat": "repeat_times",
    "to_tensordict": "",
    "get_data_info": "",
}
FUNCTIONS = {
    "pad_dataproto_to_divisor": "data size_divisor",
    "unpad_dataproto": "data pad_size",
    "union_tensor_dict": "tensor_dict1 tensor_dict2",
    "union_numpy_dict": "tensor_dict1 tensor_dict2",
    "list_of_dict_to_dict_of_list": "list_of_dict",
    "fold_batch_dim": "data new_batch_size",
    "unfold_batch_dim": "data batch_dims",
    "serialize_single_tensor": "obj",
    "deserialize_single_tensor": "arr",
    "serialize_tensordict": "batch",
    "deserialize_tensordict": "arr",
    "collate_fn": "x",
    "all_gather_data_proto": "data process_group",
}
CLASSES = {
    DataProto: "batch non_tensor_batch meta_info",
    DataProtoItem: "batch non_tensor_batch meta_info",
    DataProtoFuture: "collect_fn futures dispatch_fn",
}


def _begins(function: object, names: str) -> bool:
    """Whether the arguments begin with these names; what follows must have defaults."""
    arguments = list(inspect.signature(function).parameters.values())  # type: ignore[arg-type]
    wanted = names.split()
    return [argument.name for argument in arguments[: len(wanted)]] == wanted and all(
        argument.default is not inspect.Parameter.empty for argument in arguments[len(wanted) :]
    )


@pytest.mark.parametrize(("name", "arguments"), METHODS.items())
def test_methods(name: str, arguments: str) -> None:
    assert _begins(getattr(DataProto(), name), arguments)


@pytest.mark.parametrize(("name", "arguments"), FUNCTIONS.items())
def test_functions(name: str, arguments: str) -> None:
    assert name in protocol.__all__
    assert _begins(getattr(protocol, name), arguments)


@pytest.mark.parametrize(("made", "arguments"), CLASSES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_classes(made: type, arguments: str) -> None:
    assert _begins(made, arguments)
