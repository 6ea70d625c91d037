"""Offload graphs of micro-batches from device memory and load them again: the actions `O` and `L`.

```
compute   F0 ──── F1 ──────── L0 F2 ──── B0
            └ out O0 ─┐        └ back ──┘      on separate streams, so the host never waits
              runs beside F1; the memory of F0 is reusable from the next O or L on
```

Tensors that autograd saves in a forward are held here until the backward, by storage: a tensor
saved twice, or as several views, is copied once. Parameters, buffers, a batch's inputs and tensors
received from another stage are in memory anyway and are not offloaded. Neither are tensors without
plain device memory, and tensors kept by the model's own saved-tensor hooks.

Graphs of a GPU are copied to pinned host memory. Graphs of a CPU can only be copied to a disk: they
are written to unnamed files in TMPDIR.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from varuna_core.checkpoint.format.entries import view_bytes

# The places.


class Copies(Protocol):
    """Copies of one graph's memory outside the device."""

    def bring_back(self) -> list[Tensor]:
        """Start to copy the offloaded tensors back into newly allocated device memory; return the
        new tensors in order."""

    def wait(self) -> None:
        """Make later work of the device wait until all copies are back."""


class Place(Protocol):
    """Pinned memory or files that graphs are copied to."""

    def copy_out(self, memories: Sequence[Tensor]) -> Copies:
        """Start to copy these bytes of the device, which must not change during the copy."""


class HostMemory:
    """Pinned host memory, for graphs of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch: untyped
        self._leaving: Sequence[Tensor] = ()

    def copy_out(self, memories: Sequence[Tensor]) -> Copies:
        self.free_copied()
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.out):
            copies = [self.copy(memory, self.make_room(memory)) for memory in memories]
        self._leaving = memories
        return HostCopies(self, copies)

    def free_copied(self) -> None:
        """Let later work reuse the memory of the last offloaded graph. The allocator's own
        `record_stream` would free it only when the host next checks, and the host, which runs ahead
        of the GPU, would allocate more memory until then."""
        if self._leaving:
            torch.cuda.current_stream(self.device).wait_stream(self.out)
            self._leaving = ()

    def make_room(self, memory: Tensor) -> Tensor:
        return torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True)

    def copy(self, source: Tensor, into: Tensor) -> Tensor:
        return into.copy_(source, non_blocking=True)


class HostCopies:
    def __init__(self, place: HostMemory, copies: Sequence[Tensor]) -> None:
        self.place, self.copies = place, copies
        self._is_back: Any = None

    def bring_back(self) -> list[Tensor]:
        place, device = self.place, self.place.device
        place.free_copied()
        # In the order of the device's work, whose memory it may have been: hence the wait.
        memories = [torch.empty_like(copy, device=device) for copy in self.copies]
        place.back.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(place.back):
            for copy, memory in zip(self.copies, memories, strict=True):
                place.copy(copy, memory)
        self._is_back = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch: untyped
        self._is_back.record(place.back)
        self.copies = ()
        return memories

    def wait(self) -> None:
        torch.cuda.current_stream(self.place.device).wait_event(self._is_back)


class Files:
    """Files in TMPDIR, for graphs of a CPU."""

    def copy_out(self, memories: Sequence[Tensor]) -> Copies:
        return FileCopies(tempfile.TemporaryFile(buffering=0), memories)


class FileCopies:
    def __init__(self, file: Any, memories: Sequence[Tensor]) -> None:
        self.file = file
        weakref.finalize(self, file.close)
        self.sizes = [len(memory) for memory in memories]
        try:
            for memory in memories:
                rest = view_bytes(memory)
                while rest:
                    rest = rest[file.write(rest) :]
        except OSError as error:
            raise OSError(
                error.errno,
                f"recompute='offload' writes graphs of a CPU to files: {error.strerror}",
                tempfile.gettempdir(),
            ) from None

    def bring_back(self) -> list[Tensor]:
        memories = [torch.empty(size, dtype=torch.uint8) for size in self.sizes]
        self.file.seek(0)
        for memory in memories:
            rest = view_bytes(memory)
            while rest:
                rest = rest[self.file.readinto(rest) :]
        self.file.close()
        return memories

    def wait(self) -> None:
        pass


def choose_place(device: torch.device) -> Place:
    return HostMemory(device) if device.type == "cuda" else Files()


# What autograd saves.


@dataclass(slots=True)
class Storage:
    """Memory shared by several tensors."""

    data: Tensor | None
    """The bytes while they are on the device, else None."""


Rebuild = Callable[[], Tensor]
"""Function that rebuilds a tensor on memory that has been copied back."""


@dataclass
class SavedTensor:
    tensor: Tensor | None
    """The tensor; None once it was offloaded."""

    version: int
    rebuild: Rebuild | None = None
    is_changed: bool = False
    """True if the tensor was changed after it was saved and before it was offloaded."""

    def find(self) -> Tensor:
        tensor = self.tensor
        if self.is_changed or (tensor is not None and tensor._version != self.version):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: a tensor that the forward saved was changed before its "
                "backward; plain PyTorch raises this error too, and names the tensor"
            )
        if tensor is not None:
            return tensor
        assert self.rebuild is not None
        with torch.no_grad():
            return self.rebuild()


@dataclass(kw_only=True)
class SavedGraph:
    """The tensors that autograd saves in one forward."""

    device: torch.device
    staying: Collection[int]
    """Storages that are not offloaded, since they stay in memory anyway, by their `_cdata`."""

    _saved: list[weakref.ref[SavedTensor]] = field(default_factory=list)
    """Saved tensors that autograd still needs."""

    _storages: dict[int, Storage] = field(default_factory=dict)
    _copies: Copies | None = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Record the tensors that autograd saves for the forward within the context."""
        with torch.autograd.graph.saved_tensors_hooks(self._save, SavedTensor.find):
            yield

    def _save(self, tensor: Tensor) -> SavedTensor:
        # Detached: an output would hold the node that holds what is returned here.
        saved = SavedTensor(tensor.detach(), tensor._version)
        self._saved.append(weakref.ref(saved))
        return saved

    def offload(self, place: Place) -> None:
        """Start to copy the graph to `place`, and free its device memory."""
        for saved in [found for ref in self._saved if (found := ref()) is not None]:
            assert saved.tensor is not None
            saved.rebuild = self._take(saved.tensor)
            if saved.rebuild is not None:
                saved.is_changed = saved.tensor._version != saved.version
                saved.tensor = None
        self._saved.clear()
        held = [storage.data for storage in self._storages.values()]
        self._copies = place.copy_out([data for data in held if data is not None])
        for storage in self._storages.values():
            storage.data = None

    def load(self) -> None:
        """Start to copy the graph back; afterwards only the backward refers to the graph."""
        assert self._copies is not None
        storages = [*self._storages.values()]
        self._storages.clear()
        for storage, data in zip(storages, self._copies.bring_back(), strict=True):
            storage.data = data

    def wait(self) -> None:
        """Make the device's work wait for the copies of `load`."""
        if self._copies is not None:
            self._copies.wait()
            self._copies = None

    def _take(self, tensor: Tensor) -> Rebuild | None:
        """Register a tensor's memory for offload; return None if the tensor stays."""
        if hasattr(tensor, "trigger_wait"):  # what a collective is making
            return self._take(tensor.trigger_wait())
        if tensor.is_nested:  # one that is made again has another ragged size than its kin (2.13)
            return None
        if is_traceable_wrapper_subclass(tensor):
            return self._take_parts(tensor)
        # Others have no memory (fake ones of DTensor's own dry runs, and the zeros that
        # forward-mode differentiation makes of constants), or are more than it.
        is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
        is_plain = is_plain and tensor.device.type == self.device.type
        is_plain = is_plain and (tensor.data_ptr() != 0 or not tensor.numel())
        if not is_plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        if storage._cdata in self.staying or not storage.nbytes():
            return None
        held = self._storages.get(storage._cdata)
        if held is None:
            data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            held = self._storages[storage._cdata] = Storage(data)
        dtype, size, stride = tensor.dtype, tensor.size(), tensor.stride()
        offset = tensor.storage_offset()

        def rebuild() -> Tensor:
            assert held.data is not None
            empty = torch.empty(0, dtype=dtype, device=held.data.device)
            return empty.set_(held.data.untyped_storage(), offset, size, stride)

        return rebuild

    def _take_parts(self, tensor: Any) -> Rebuild | None:
        """Register the parts of a tensor subclass such as DTensor for offload."""
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        found = {n: self._take(part) for n, part in parts.items() if isinstance(part, Tensor)}
        rebuilds = {name: make for name, make in found.items() if make is not None}
        if not rebuilds:
            return None
        kept = {name: part for name, part in parts.items() if name not in rebuilds}
        kind, size, stride = type(tensor), tensor.size(), tensor.stride()

        def rebuild() -> Tensor:
            made = {name: make() for name, make in rebuilds.items()}
            whole: Tensor = kind.__tensor_unflatten__({**kept, **made}, context, size, stride)
            return whole

        return rebuild
