"""The order in which groups run, learnt while they run.

What comes next is predicted from the last two groups, so that a group that runs twice in a forward has a successor for each time.
A wrong guess costs a copy, never a wrong number: a guess only moves bytes, and a group is bound when it really runs.
"""

from __future__ import annotations

from collections.abc import Hashable

#: The last two groups: what the next one is predicted from.
Pair = tuple[Hashable, Hashable]


class Order:
    """A record of entered groups (any hashable objects) and the successors that it suggests."""

    #: Stands for the start and the end of a forward.
    EDGE = "edge"

    def __init__(self) -> None:
        self._next: dict[Pair, Hashable] = {}
        self._before: Hashable = self.EDGE
        self._now: Hashable = self.EDGE
        self._first: Hashable | None = None

    @property
    def now(self) -> Pair:
        """The last two groups."""
        return self._before, self._now

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

    def after(self, pair: Pair, looping: bool = False) -> tuple[Hashable, Pair] | None:
        """The group that is expected after `pair`, and the pair that it makes; None where nothing is.

        Where no edge is ever noted (a model whose parts are called one by one), the first group that ever ran counts as one: what it
        begins is another forward. That is looked into only if forwards follow one another (`looping`).
        """
        following = self._next.get(pair)
        if following is self.EDGE and looping:
            pair = (self.EDGE, self.EDGE)
            following = self._next.get(pair)
        if following is None or following is self.EDGE or (following is self._first and not looping):
            return None
        return following, (pair[1], following)

    def ended(self) -> bool:
        """True if no further group is expected in this forward."""
        return self._now is self.EDGE or self.after(self.now) is None

    def forget(self, group: Hashable) -> None:
        """Drops a group that no longer exists."""
        self._next = {key: value for key, value in self._next.items() if group not in key and value is not group}
        if self._first is group:
            self._first = None
        if group in (self._before, self._now):
            self._before = self._now = self.EDGE
