"""Copies a state as ``copy.deepcopy`` does, but copies its tensors into given storages on the host.

Tensors that share a storage share one afterwards. A view's whole storage is copied with it.
"""

import copy
import types
import weakref
from collections.abc import Callable, Iterable
from copyreg import dispatch_table
from typing import Any

import torch

ATOMS = frozenset(
    (
        *(type(None), type(Ellipsis), type(NotImplemented), bool, int, float, complex, bytes, str, range),
        *(property, weakref.ref, types.CodeType, types.FunctionType, types.BuiltinFunctionType),
        *(torch.dtype, torch.device, torch.layout),
    )
)
"""The types of values that are their own copies."""


class StateCopy:
    """Copies the parts of one state.

    Args:
        new_storage: returns a storage on the host, of the given number of bytes.
        uncopied: what the copy holds itself, and no copy of.
    """

    def __init__(
        self, new_storage: Callable[[int], torch.UntypedStorage], uncopied: Iterable[Any] = ()
    ) -> None:
        self._new_storage = new_storage
        self._kept: list[Any] = list(uncopied)
        """The originals: no other object may get the id of one."""
        self._memo: dict[int, Any] = {id(one): one for one in self._kept}
        """Copies by the id of the original, as ``__deepcopy__`` takes them."""
        self._storages: dict[int, torch.UntypedStorage] = {}

    @torch.no_grad()
    def copy(self, value: Any) -> Any:  # noqa: ANN401
        """Copy a part. Copies to pinned memory may still be under way on the GPU's current stream.

        Args:
            value: the part: dictionaries, lists, tuples, tensors, and whatever ``copy.deepcopy`` takes.

        Raises:
            TypeError: it holds something that cannot be copied.
        """
        return self._copy(value, self._memo)

    def _copy(self, value: Any, memo: dict[int, Any]) -> Any:  # noqa: ANN401
        kind = type(value)
        if kind in ATOMS or issubclass(kind, type):
            return value
        if id(value) in memo:
            return memo[id(value)]
        copied: Any
        if isinstance(value, torch.Tensor):
            copied = self._tensor(value)
        elif kind is dict:
            copied = memo[id(value)] = {}
            for key, item in value.items():
                copied[self._copy(key, memo)] = self._copy(item, memo)
        elif kind is list:
            copied = memo[id(value)] = []
            copied.extend(self._copy(item, memo) for item in value)
        elif kind is tuple:
            items = tuple(self._copy(item, memo) for item in value)
            # A list in the tuple may hold the tuple itself, and has then copied it already.
            copied = memo.get(id(value), items)
        elif kind is types.MethodType:
            copied = kind(value.__func__, self._copy(value.__self__, memo))
        else:
            copied = self._object(value, memo)
        memo[id(value)] = copied
        self._kept.append(value)
        return copied

    def _object(self, value: Any, memo: dict[int, Any]) -> Any:  # noqa: ANN401
        if (own := getattr(value, "__deepcopy__", None)) is not None:
            return own(memo)
        reduce = dispatch_table.get(type(value))
        reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        if isinstance(reduced, str):
            return value
        return copy._reconstruct(value, memo, *reduced, deepcopy=self._copy)  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ tensors

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if hasattr(tensor, "trigger_wait"):  # The result of a collective that may be under way.
            return self._tensor(tensor.trigger_wait())
        if hasattr(tensor, "local_shards"):
            return self._sharded(tensor)
        if hasattr(tensor, "__tensor_flatten__"):
            return self._wrapper(tensor)
        if tensor.device.type == "meta":
            return tensor  # It has no data.
        if not _is_in_a_storage(tensor):
            return tensor.detach().to("cpu", copy=True)
        tensor = tensor.resolve_conj().resolve_neg()
        storage = self._storage(tensor.untyped_storage())
        copied = torch.empty(0, dtype=tensor.dtype)
        copied.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
            copied = copied.as_subclass(type(tensor))
        self._memo[id(tensor)] = copied
        for name, attribute in vars(tensor).items():
            setattr(copied, name, self._copy(attribute, self._memo))
        return copied

    def _storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copied = self._storages.get(id(storage))
        if copied is None:
            copied = self._new_storage(storage.nbytes())
            copied.copy_(storage, non_blocking=storage.is_cuda)
            self._storages[id(storage)] = copied
            self._kept.append(storage)
        return copied

    def _wrapper(self, tensor: Any) -> torch.Tensor:  # noqa: ANN401
        """Copy a tensor that is made of others, such as a DTensor."""
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        # Not all parts are tensors: a DTensor has its mesh among them.
        copied = {
            name: self._copy(part, self._memo) if isinstance(part, torch.Tensor) else part
            for name, part in parts.items()
        }
        made: torch.Tensor = type(tensor).__tensor_unflatten__(
            copied, context, tensor.size(), tensor.stride()
        )
        return made.requires_grad_(False)

    def _sharded(self, tensor: Any) -> torch.Tensor:  # noqa: ANN401
        metadata = copy.deepcopy(tensor.metadata())
        shards = [copy.copy(shard) for shard in tensor.local_shards()]
        for shard in shards:
            shard.tensor = self._copy(shard.tensor, self._memo)
            shard.metadata = copy.deepcopy(shard.metadata)
        for one in (*metadata.shards_metadata, *(shard.metadata for shard in shards)):
            one.placement._device = torch.device("cpu")
        made: torch.Tensor = type(tensor)._init_from_local_shards_and_global_metadata(
            shards, sharded_tensor_metadata=metadata, process_group=tensor._process_group
        )
        return made


def _is_in_a_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's storage, strides and type describe it completely."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    storage = tensor.untyped_storage()
    return storage.nbytes() == 0 or storage.data_ptr() != 0
