"""The order in which groups run, learnt while they run.

What comes next is predicted from the last two groups, so that a group that runs twice in a forward has a successor for each time.
A wrong guess costs a copy, never a wrong number: a guess only moves bytes, and a group is bound when it really runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator


class Order:
    """A record of entered groups (any hashable objects) and the successors that it suggests."""

    #: Stands for the start and the end of a forward.
    EDGE = "edge"

    def __init__(self) -> None:
        self._next: dict[tuple[Hashable, Hashable], Hashable] = {}
        self._before: Hashable = self.EDGE
        self._now: Hashable = self.EDGE
        self._first: Hashable | None = None

    def enter(self, group: Hashable) -> None:
        """Notes that `group` runs now."""
        if self._first is None:
            self._first = group
        self._next[self._before, self._now] = group
        self._before, self._now = self._now, group

    def edge(self) -> None:
        """Notes that a forward starts or ends here."""
        if self._now is self.EDGE:
            return
        self._next[self._before, self._now] = self.EDGE
        self._before = self._now = self.EDGE

    def ahead(self) -> Iterator[Hashable]:
        """The groups that are expected next in this forward, nearest first.

        Where no edge is ever noted (a model whose parts are called one by one), the first group that ever ran counts as one: what it
        begins is another forward, and nothing may stay on the device until then.
        """
        before, now = self._before, self._now
        if now is self.EDGE:
            # Between forwards nothing is expected: what were copied now would stay on the device until the next one.
            return
        for _ in range(len(self._next)):
            following = self._next.get((before, now))
            if following is None or following is self.EDGE or following is self._first:
                return
            yield following
            before, now = now, following

    def forget(self, group: Hashable) -> None:
        """Drops a group that no longer exists."""
        self._next = {key: value for key, value in self._next.items() if group not in key and value is not group}
        if self._first is group:
            self._first = None
        if group in (self._before, self._now):
            self._before = self._now = self.EDGE
