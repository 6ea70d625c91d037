"""One-way channel between two ranks: messages of tensors, first in first out, over its own group.
CPU ranks of one host use another kind of channel (memory_channel.py).

    sender's main thread            receiver's standing thread       receiver's main thread
    send(): isend the tensors  ───► irecv, wait, irecv the rest ───► queue (bounded) ─► take()

A message is preceded by a head and a description only if its shapes, types or structure differ from
the previous message's. So shapes may change between messages, None, numbers, tuples and dicts can
be sent, and a message like the previous one consists of its tensors only.

    like the last one    tensors
    otherwise            HEAD, a byte in place of the first tensor, description, tensors

The receiver waits for the first tensor of a message like the last one, and then checks if a head
for that message has arrived (a head may belong to a later message, so it holds a number): heads
have their own gloo tag and pending receive, and a gloo pair delivers in order. If the last message
had no tensor, the next message has a head.

If tensors take another path than heads (`wire.in_order` is False), every message has a head, and a
second thread reads the heads. This thread waits in gloo while the first one waits for tensors, and
so notices at once that the sender is gone, which the tensors' path does not report.

gloo's `isend` is a rendezvous: no data moves before the other side has posted its `irecv`, and
`is_completed` of a receive is not updated before `wait` (torch 2.13), so a thread is needed. A
sender waits for its oldest message only if the receiver's queue could not hold another message.

A thread that waits in gloo cannot be cancelled. So a rank that leaves sends a final message, and
the neighbour's thread replies for its own side before it ends. The methods are those of the group
object, which still work after the user's `destroy_process_group`, since a rank leaves at exit.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from varuna_core.runtime.comm.bells import Bell, sleep_until
from varuna_core.runtime.comm.failure import ChannelClosed, describe_error, is_connection_error
from varuna_core.runtime.comm.values import Crossing, Structure
from varuna_core.runtime.comm.wire import HEAD_TAG, Wire, find_strides, make_dense
from varuna_core.runtime.comm.words import HOLE, read, spell

log = logging.getLogger(__name__)

LAST_WAY_S = 30.0
"""Seconds to wait for tensors that a rank sent before it left."""

# A head: the message's number, a word (the length of the description, or one of these), the mark.
POISON = -2
BYE = -1
SAME = 0  # described as the last one
LEFT = {BYE: "it has ended", POISON: "it has failed"}
MARK = 0x0101010101010101  # no byte of it is 0: a head that has come in part has it not


class SendingEnd(Protocol):
    """Sending end of a channel (of this module or of memory_channel.py)."""

    peer: int

    def hold(self, capacity: int) -> None:
        """Set the maximum number of sent messages that have not been taken yet."""

    def send(self, tensors: Sequence[Tensor | None], structure: Structure | None = None) -> None:
        """Send the tensors; do not change their contents before `flush`."""

    def flush(self) -> None: ...

    def close(self, word: int) -> None:
        """Send a final message with `word`, such as BYE, without waiting."""


class ReceivingEnd(Protocol):
    peer: int
    came_s: float
    """Arrival time of the last message taken, by `time.perf_counter`."""

    batch: str
    """Description of the shapes of the sender's batch, sent with the last message."""

    @property
    def descriptors(self) -> Sequence[int]:
        """Return descriptors that are readable once a message is there; empty if a thread waits."""

    def is_there(self) -> bool:
        """Return True if `take` would not wait."""

    def take(self) -> Crossing:
        """Wait for the next message and return it; a tensor is None if the sender passed None."""

    def find_lost_peer(self) -> str:
        """Return the reason why the peer can send nothing more; empty while it still can."""

    def hold(self, capacity: int) -> None:
        """Set the maximum number of sent messages that have not been taken yet."""

    def discard(self) -> None:
        """Discard further messages, so that the sender does not block on a rank that failed."""

    def end(self, limit_s: float) -> None:
        """Free the channel; call this after `close` of the channel in the opposite direction."""


class Arrivals:
    """Condition on which a rank waits for messages of one channel or several."""

    def __init__(self, patience_s: float | None = None) -> None:
        self.changed = threading.Condition()
        """Notified by the receivers' threads."""

        self.patience_s = patience_s
        """Seconds that a rank waits for another rank; None means no limit."""

        self.batch = ""
        """Description of the shapes of this step's batch, sent with the step's messages."""

        self._bell: Bell | None = None
        """Bell that the receivers' threads ring if the rank also waits for other descriptors."""

    def notify(self) -> None:
        """Wake waiting threads; the caller must hold `changed`."""
        self.changed.notify_all()
        if self._bell is not None:
            self._bell.ring()

    def wait(self, receivers: Sequence[ReceivingEnd]) -> None:
        """Wait until one of the receivers has a message, so that its `take` would not block."""

        descriptors = [one for receiver in receivers for one in receiver.descriptors]
        if descriptors and not all(receiver.descriptors for receiver in receivers):
            descriptors.append(self._open_bell())

        def has_come() -> bool:
            if self._bell is not None:
                self._bell.hear()
            return any(receiver.is_there() for receiver in receivers)

        if descriptors:
            is_there = sleep_until(has_come, descriptors, self.patience_s)
        else:
            with self.changed:
                is_there = self.changed.wait_for(has_come, self.patience_s)
        if not is_there:
            raise describe_hanging([receiver.peer for receiver in receivers], self.patience_s)

    def _open_bell(self) -> int:
        with self.changed:
            self._bell = self._bell or Bell.make()
            return self._bell.descriptor


def describe_hanging(peers: Sequence[int], patience_s: float | None) -> ChannelClosed:
    who = " or ".join(f"rank {peer}" for peer in dict.fromkeys(peers))
    return ChannelClosed(
        f"no message to or from {who} for {patience_s:g} s (hang_timeout_s): a rank hangs, or a "
        "single action takes longer than that"
    )


@dataclass(kw_only=True, slots=True)
class MessageLayout:
    """Shapes, types, strides and structure of a message, without the values."""

    specs: list[tuple[torch.Size, torch.dtype, tuple[int, ...] | None] | None]
    structure: Structure | None
    batch: str = ""
    """Description of the shapes of the sender's batch."""

    def __eq__(self, other: object) -> bool:
        """Compare strictly, including types of plain values, so that 1, 1.0 and True differ."""
        if not isinstance(other, MessageLayout) or self.specs != other.specs:
            return False
        if self.batch != other.batch:
            return False
        mine, theirs = self.structure, other.structure
        if mine is theirs:
            return True
        if mine is None or theirs is None:
            return False
        types = [type(leaf) for leaf in mine.leaves] == [type(leaf) for leaf in theirs.leaves]
        return types and mine == theirs

    @property
    def has_data(self) -> bool:
        return any(spec is not None and spec[0].numel() for spec in self.specs)


def describe_message(
    tensors: Sequence[Tensor | None], structure: Structure | None, batch: str = ""
) -> MessageLayout:
    return MessageLayout(
        specs=[None if t is None else (t.shape, t.dtype, find_strides(t)) for t in tensors],
        structure=structure,
        batch=batch,
    )


def describe_layout(layout: MessageLayout) -> bytes:
    """Serialize a layout for the receiver."""
    structure = layout.structure
    shown = None if structure is None else [structure.show(HOLE), structure.learning]
    return spell([layout.specs, shown, layout.batch])


def read_layout(text: bytes) -> MessageLayout:
    specs, shown, batch = read(text)
    structure = None if shown is None else Structure.of(shown[0], HOLE, shown[1])
    return MessageLayout(specs=specs, structure=structure, batch=batch)


class Sender:
    """Sending end of a channel between two ranks."""

    def __init__(self, wire: Wire, peer: int, arrivals: Arrivals) -> None:
        self.wire, self.peer, self.arrivals = wire, peer, arrivals
        self.capacity = 1
        self._number = 0
        self._layout: MessageLayout | None = None
        self._is_awaited = False
        """True if the receiver is waiting for another message like the last one."""

        self._under_way: deque[list[tuple[Any, Tensor]]] = deque()
        self._last_words: list[tuple[Any, Tensor]] = []

    def hold(self, capacity: int) -> None:
        self.capacity = capacity

    def send(self, tensors: Sequence[Tensor | None], structure: Structure | None = None) -> None:
        while len(self._under_way) >= self.capacity:
            self._wait_for_oldest()
        tensors = [t if t is None else make_dense(t) for t in tensors]
        layout = describe_message(tensors, structure, self.arrivals.batch)
        works: list[tuple[Any, Tensor]] = []
        if layout != self._layout:
            described = torch.frombuffer(bytearray(describe_layout(layout)), dtype=torch.uint8)
            self._post_head(works, described.numel())
            works.append(self.wire.post(described))
            self._layout = layout
            self._is_awaited = self.wire.in_order and layout.has_data
        elif not self._is_awaited:
            self._post_head(works, SAME)
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                works.append(self.wire.send(tensor))
        self._under_way.append(works)
        self._number += 1

    def _post_head(self, works: list[tuple[Any, Tensor]], word: int) -> None:
        works.append(self.wire.post(torch.tensor([self._number, word, MARK]), HEAD_TAG))
        if self._is_awaited:
            works.append(self.wire.post(torch.zeros(1, dtype=torch.uint8)))

    def _wait_for_oldest(self) -> None:
        patience_s = self.arrivals.patience_s
        for work, _ in self._under_way.popleft():
            if patience_s is None:
                work.wait()
                continue
            try:
                work.wait(timedelta(seconds=patience_s))
            except RuntimeError as error:
                if "imed out" not in str(error):
                    raise
                raise describe_hanging([self.peer], patience_s) from error

    def flush(self) -> None:
        while self._under_way:
            self._wait_for_oldest()

    def close(self, word: int) -> None:
        try:
            self._post_head(self._last_words, word)
        except (RuntimeError, ValueError) as error:  # the neighbour, or the group, went first
            log.debug("rank %d not notified: %s", self.peer, error)


class Receiver:
    """Receiving end of a channel, with the thread that waits for messages."""

    def __init__(self, wire: Wire, peer: int, back: Sender, arrivals: Arrivals) -> None:
        self.wire, self.peer, self.arrivals = wire, peer, arrivals
        self.back = back
        """The channel in the opposite direction, to the same neighbour."""

        self.capacity = 1
        self.came_s = 0.0
        self.batch = ""
        self.descriptors = ()
        self._messages: deque[tuple[float, Crossing, str]] = deque()
        self._changed = arrivals.changed
        self._error: BaseException | None = None
        self._discarding = False
        self.thread = threading.Thread(target=self._stand, daemon=True, name=f"from rank {peer}")
        self.thread.start()

    def is_there(self) -> bool:
        return bool(self._messages) or self._error is not None

    def take(self) -> Crossing:
        if not self._messages:
            self.arrivals.wait([self])
        with self._changed:
            if not self._messages:
                assert self._error is not None
                raise ChannelClosed(
                    f"cannot receive from rank {self.peer}: {describe_error(self._error)}"
                ) from self._error
            self.came_s, message, self.batch = self._messages.popleft()
            self._changed.notify_all()
        self.wire.enter(message.tensors)
        return message

    def find_lost_peer(self) -> str:
        error = self._error
        return "" if error is None else f"rank {self.peer}: {describe_error(error)}"

    def hold(self, capacity: int) -> None:
        with self._changed:
            self.capacity = capacity
            self._changed.notify_all()

    def discard(self) -> None:
        """Keep reading, but drop all messages."""
        with self._changed:
            self._discarding = True
            self._changed.notify_all()

    def end(self, limit_s: float) -> None:
        self.thread.join(limit_s)

    def _stand(self) -> None:
        heads: Heads | None = None
        try:
            self.wire.enter_thread()
            if self.wire.in_order:
                self._read_in_order()
            else:
                heads = Heads(self.wire, self.back, f"heads from rank {self.peer}")
                self._read_apart(heads)
        except BaseException as error:  # whatever ends the thread, `take` must not wait for ever
            drop_frames(error)
            with self._changed:
                self._error = error
                self.arrivals.notify()
        finally:
            if heads is not None:
                heads.thread.join()
            self.wire.release()

    def _read_in_order(self) -> None:
        layout = MessageLayout(specs=[], structure=None)
        head, coming = _await_head(self.wire)
        for number in itertools.count():
            tensors = self.wire.make(layout.specs)
            places = [i for i, t in enumerate(tensors) if t is not None and t.numel()]
            if places:
                self.wire.receive([tensors[places[0]]], self._look)
                if not _is_head_of(number, head):
                    self.wire.receive([tensors[i] for i in places[1:]], self._look)
                    self._put(tensors, layout)
                    continue
            coming.wait()
            word = int(head[1])
            if word in (BYE, POISON):
                self.back.close(BYE)
                raise ChannelClosed(LEFT[word])
            # Ready for the next head before what follows this one, so that it overtakes nothing.
            head, coming = _await_head(self.wire)
            if word != SAME:
                layout = _receive_layout(self.wire, word)
                tensors = self.wire.make(layout.specs)
            self.wire.receive([t for t in tensors if t is not None and t.numel()], self._look)
            self._put(tensors, layout)

    def _read_apart(self, heads: Heads) -> None:
        def look(waited_s: float) -> None:
            heads.look(waited_s)
            self._look(waited_s)

        while True:
            layout = heads.take()
            tensors = self.wire.make(layout.specs)
            self.wire.receive([t for t in tensors if t is not None and t.numel()], look)
            self._put(tensors, layout)

    def _look(self, waited_s: float) -> None:
        """Raise an error if the wait for tensors on the GPU must be abandoned."""
        if self._discarding:
            raise ChannelClosed("this rank has failed")
        patience_s = self.arrivals.patience_s
        if patience_s is not None and waited_s > patience_s:
            raise describe_hanging([self.peer], patience_s)

    def _put(self, tensors: list[Any], layout: MessageLayout) -> None:
        message = Crossing(tuple(self.wire.bring(tensors)), layout.structure)
        now = time.perf_counter()
        with self._changed:
            while len(self._messages) >= self.capacity and not self._discarding:
                self._changed.wait()
            if not self._discarding:
                self._messages.append((now, message, layout.batch))
            self.arrivals.notify()


class Heads:
    """Thread that reads heads and descriptions of messages whose tensors arrive separately."""

    def __init__(self, wire: Wire, back: Sender, name: str) -> None:
        self._wire, self._back = wire, back
        self._changed = threading.Condition()
        self._layouts: deque[MessageLayout] = deque()
        self._error: BaseException | None = None
        self._is_bye = False
        self.thread = threading.Thread(target=self._stand, daemon=True, name=name)
        self.thread.start()

    def take(self) -> MessageLayout:
        """Return the next message's layout; after the last, raise the error that ended reading."""
        with self._changed:
            self._changed.wait_for(lambda: self._layouts or self._error is not None)
            if self._layouts:
                return self._layouts.popleft()
        assert self._error is not None
        raise self._error

    def look(self, waited_s: float) -> None:
        """Raise an error if the sender is gone and no sent data can still arrive: tensors may be in
        flight when the sender's final message (BYE) arrives."""
        if self._error is not None and (not self._is_bye or waited_s > LAST_WAY_S):
            raise self._error

    def _stand(self) -> None:
        try:
            layout = MessageLayout(specs=[], structure=None)
            while True:
                head, coming = _await_head(self._wire)
                coming.wait()
                word = int(head[1])
                if word in (BYE, POISON):
                    self._back.close(BYE)
                    self._is_bye = word == BYE
                    raise ChannelClosed(LEFT[word])
                layout = layout if word == SAME else _receive_layout(self._wire, word)
                with self._changed:
                    self._layouts.append(layout)
                    self._changed.notify_all()
        except BaseException as error:  # whatever it is, nobody must wait for ever
            drop_frames(error)
            with self._changed:
                self._error = error
                self._changed.notify_all()


def drop_frames(error: BaseException) -> None:
    """Drop the frames of an error caused by a lost peer: they keep the channel, and thus sockets,
    open until the next garbage collection. Other errors keep their frames."""
    if is_connection_error(error):
        error.__traceback__ = None


def _await_head(wire: Wire) -> tuple[Tensor, Any]:
    head = torch.tensor([-1, SAME, 0])
    return head, wire.await_head(head)


def _receive_layout(wire: Wire, size: int) -> MessageLayout:
    text = torch.empty(size, dtype=torch.uint8)
    wire.receive_text(text)
    return read_layout(bytes(text.tolist()))


def _is_head_of(number: int, head: Tensor) -> bool:
    """Return True if `head` is for message `number` or is a final head."""
    its_number, word, mark = head.tolist()
    return mark == MARK and (its_number == number or word in (BYE, POISON))
