"""Requests that wait for a seat, in the order in which they will get one: by priority, then by arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from engine.request import Request


class WaitingQueue:
    """One FIFO per priority value. Every operation is O(1) but for iteration. Owned by the Scheduler."""

    def __init__(self) -> None:
        self._by_priority: dict[int, OrderedDict[str, Request]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """In order. The queue must not change meanwhile."""
        for priority in sorted(self._by_priority):
            yield from self._by_priority[priority].values()

    def push(self, request: Request) -> None:
        """Behind everybody of the same priority."""
        self._by_priority.setdefault(request.priority, OrderedDict())[request.request_id] = request
        self._size += 1

    def push_front(self, request: Request) -> None:
        """Before everybody of the same priority: a preempted request has waited its turn already."""
        self.push(request)
        self._by_priority[request.priority].move_to_end(request.request_id, last=False)

    def remove(self, request: Request) -> None:
        queue = self._by_priority[request.priority]
        del queue[request.request_id]
        if not queue:
            del self._by_priority[request.priority]
        self._size -= 1
