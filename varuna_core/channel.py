"""One direction between two stages: messages of tensors, first in first out, over its own group.

    sender's main thread            receiver's standing thread       receiver's main thread
    send(): isend head, tensors ──► irecv head ► irecv tensors ► ─── queue (bounded) ─► take()

A message is a head (how many bytes of description follow; 0: described as the last one), the
description when it changed, and the tensors, contiguous. So shapes may change from message to
message, and None, numbers, tuples and dicts cross, at the price of one small message. The head has
a gloo tag of its own; nothing else needs one, since a direction is first in, first out.

gloo's `isend` is a rendezvous: it moves nothing before the other side has posted its `irecv`, and
`is_completed` of a receive tells nothing before `wait` (torch 2.13), hence the thread. A sender
waits for its oldest message only when as many are under way as the receiver's queue holds.

A thread that waits in gloo cannot be called off. So who leaves says so, and the neighbour's thread
answers for its own side before it ends. The group's own methods are called, which work after the
user's `destroy_process_group` too: the leave is taken at exit.
"""

from __future__ import annotations

import io
import logging
import pickle
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from varuna_core.failure import ChannelClosed, describe_error
from varuna_core.split_values import Crossing, Structure

log = logging.getLogger(__name__)

HEAD_TAG = 1
BYE = -1
POISON = -2


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a message holds, but for the values."""

    specs: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]
    structure: Structure | None

    def __eq__(self, other: object) -> bool:
        """To the types of what crosses as it is: 1, 1.0 and True are equal, and not the same."""
        if not isinstance(other, Layout) or self.specs != other.specs:
            return False
        mine, theirs = self.structure, other.structure
        if mine is None or theirs is None:
            return mine is theirs
        types = [type(leaf) for leaf in mine.leaves] == [type(leaf) for leaf in theirs.leaves]
        return types and mine == theirs


def describe(tensors: Sequence[Tensor | None], structure: Structure | None) -> Layout:
    specs = [None if t is None else (tuple(t.shape), t.dtype) for t in tensors]
    return Layout(specs=tuple(specs), structure=structure)


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same memory: gloo need not know the type."""
    return tensor.reshape(-1).view(torch.uint8)


class Sender:
    """The sending end."""

    def __init__(self, group: Any, peer: int) -> None:
        self.group, self.peer = group, peer
        self._place = dist.get_group_rank(group, peer)
        self.capacity = 1
        self._layout: Layout | None = None
        self._under_way: deque[list[tuple[Any, Tensor]]] = deque()
        self._last_words: list[tuple[Any, Tensor]] = []

    def send(self, tensors: Sequence[Tensor | None], structure: Structure | None = None) -> None:
        """Hand over the tensors; what they hold must not change before `flush`."""
        while len(self._under_way) >= self.capacity:
            self._wait_for_oldest()
        layout = describe(tensors, structure)
        works: list[tuple[Any, Tensor]] = []
        if layout == self._layout:
            self._post(works, torch.zeros(1, dtype=torch.long), HEAD_TAG)
        else:
            text = io.BytesIO()
            pickle.dump((layout.specs, layout.structure), text)
            described = torch.frombuffer(bytearray(text.getvalue()), dtype=torch.uint8)
            self._post(works, torch.tensor([described.numel()]), HEAD_TAG)
            self._post(works, described)
            self._layout = layout
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                self._post(works, _as_bytes(tensor.detach().to("cpu").contiguous()))
        self._under_way.append(works)

    def _post(self, works: list[tuple[Any, Tensor]], tensor: Tensor, tag: int = 0) -> None:
        works.append((self.group.send([tensor], self._place, tag), tensor))

    def _wait_for_oldest(self) -> None:
        for work, _ in self._under_way.popleft():
            work.wait()

    def flush(self) -> None:
        while self._under_way:
            self._wait_for_oldest()

    def close(self, word: int) -> None:
        """Tell the other side's thread that nothing follows; waits for nobody."""
        try:
            self._post(self._last_words, torch.tensor([word]), HEAD_TAG)
        except (RuntimeError, ValueError) as error:  # the neighbour, or the group, went first
            log.debug("rank %d not told: %s", self.peer, error)


class Receiver:
    """The receiving end, with the thread that stands ready for messages."""

    def __init__(self, group: Any, peer: int, device: torch.device, back: Sender) -> None:
        self.group, self.peer, self.device = group, peer, device
        self._place = dist.get_group_rank(group, peer)
        self.back = back
        """The other direction, to the same neighbour."""

        self.capacity = 1
        self._messages: deque[Crossing] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._discarding = False
        self.thread = threading.Thread(target=self._stand, daemon=True, name=f"from rank {peer}")
        self.thread.start()

    def take(self) -> Crossing:
        """The next message, waited for; tensors may be None where the sender had none."""
        with self._changed:
            while not self._messages:
                if self._error is not None:
                    raise ChannelClosed(
                        f"nothing comes from rank {self.peer}: {describe_error(self._error)}"
                    ) from self._error
                self._changed.wait()
            message = self._messages.popleft()
            self._changed.notify_all()
        return message

    def find_loss(self) -> str:
        """Why nothing more will come; empty while something may."""
        error = self._error
        return "" if error is None else f"rank {self.peer}: {describe_error(error)}"

    def hold(self, capacity: int) -> None:
        """Let so many messages wait to be taken."""
        with self._changed:
            self.capacity = capacity
            self._changed.notify_all()

    def discard(self) -> None:
        """Read on and drop what comes: the sender is not to wait for a rank that failed."""
        with self._changed:
            self._discarding = True
            self._changed.notify_all()

    def _stand(self) -> None:
        try:
            specs: Any = ()
            structure: Structure | None = None
            while True:
                head = self._receive(torch.zeros(1, dtype=torch.long), HEAD_TAG).item()
                if head in (BYE, POISON):
                    self.back.close(BYE)
                    raise ChannelClosed("it has ended" if head == BYE else "it has failed")
                if head:
                    text = self._receive(torch.empty(int(head), dtype=torch.uint8))
                    specs, structure = pickle.loads(bytes(text.tolist()))
                self._put(Crossing(self._receive_all(specs), structure))
        except BaseException as error:  # whatever ends the thread, `take` must not wait for ever
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self.group = None

    def _receive(self, tensor: Tensor, tag: int = 0) -> Tensor:
        self.group.recv([tensor], self._place, tag).wait()
        return tensor

    def _receive_all(self, specs: Any) -> tuple[Any, ...]:
        made = [None if s is None else torch.empty(s[0], dtype=s[1]) for s in specs]
        works = [
            self.group.recv([_as_bytes(tensor)], self._place, 0)
            for tensor in made
            if tensor is not None and tensor.numel()
        ]
        for work in works:
            work.wait()
        return tuple(None if tensor is None else tensor.to(self.device) for tensor in made)

    def _put(self, message: Crossing) -> None:
        with self._changed:
            while len(self._messages) >= self.capacity and not self._discarding:
                self._changed.wait()
            if not self._discarding:
                self._messages.append(message)
            self._changed.notify_all()
