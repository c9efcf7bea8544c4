"""The batch that flows between driver and workers, and its future."""

from verl._protocol.columns import list_of_dict_to_dict_of_list, union_numpy_dict, union_tensor_dict
from verl._protocol.data import DataProto, DataProtoConfig, DataProtoItem
from verl._protocol.future import DataProtoFuture
from verl._protocol.padding import collate_fn, pad_dataproto_to_divisor, unpad_dataproto
from verl._protocol.serialization import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "serialize_single_tensor",
    "serialize_tensordict",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]
