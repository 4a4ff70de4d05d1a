"""The order in which groups run, learnt while they run.

What comes next is predicted from the last two groups, so that a group that runs twice in a forward has a successor for each time,
and from what followed these two the last times, so that blocks which a cache skips every second or third forward are expected in the
others only. Such a rhythm counts once it has been seen twice: caches also skip blocks at moments that nobody can tell.

A wrong guess costs a copy, never a wrong number: a guess only moves bytes, and a group is bound when it really runs.
"""

from __future__ import annotations

from collections.abc import Hashable

#: The last two groups: what the next one is predicted from.
Pair = tuple[Hashable, Hashable]
#: What followed a pair, latest last.
Past = tuple[Hashable, ...]

#: How many earlier successors of a pair tell the next one: caches skip a block in at most three of four forwards.
DEPTH = 3
#: Rules that are remembered, at most. Only an order that never repeats itself has more, and there none of them is of use.
RULES = 1 << 16


class Order:
    """A record of entered groups (any hashable objects) and the successors that it suggests."""

    #: Stands for the start and the end of a forward.
    EDGE = "edge"

    def __init__(self) -> None:
        self._past: dict[Pair, Past] = {}
        self._next: dict[tuple[Pair, Past], tuple[Hashable, bool]] = {}
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
        self._learn(group)
        self._before, self._now = self._now, group

    def edge(self) -> None:
        """Notes that a forward starts or ends here."""
        if self._now is self.EDGE:
            return
        self._learn(self.EDGE)
        self._before = self._now = self.EDGE

    def after(self, pair: Pair, looping: bool = False) -> tuple[Hashable, Pair] | None:
        """The group that is expected after `pair`, and the pair that it makes; None where nothing is.

        Where no edge is ever noted (a model whose parts are called one by one), the first group that ever ran counts as one: what it
        begins is another forward. That is looked into only if forwards follow one another (`looping`).
        """
        following = self._following(pair)
        if following is self.EDGE and looping:
            pair = (self.EDGE, self.EDGE)
            following = self._following(pair)
        if following is None or following is self.EDGE or (following is self._first and not looping):
            return None
        return following, (pair[1], following)

    def ended(self) -> bool:
        """True if no further group is expected in this forward."""
        return self._now is self.EDGE or self.after(self.now) is None

    def forget(self, group: Hashable) -> None:
        """Drops a group that no longer exists."""
        self._past = {pair: past for pair, past in self._past.items() if group not in pair and group not in past}
        self._next = {rule: value for rule, value in self._next.items() if rule[0] in self._past and value[0] is not group}
        if self._first is group:
            self._first = None
        if group in (self._before, self._now):
            self._before = self._now = self.EDGE

    def _learn(self, following: Hashable) -> None:
        pair = (self._before, self._now)
        past = self._past.get(pair, ())
        if len(self._next) >= RULES:
            self._next.clear()
        before = self._next.get((pair, past))
        self._next[pair, past] = following, before is not None and before[0] is following
        self._past[pair] = (*past[1 - DEPTH :], following)

    def _following(self, pair: Pair) -> Hashable | None:
        past = self._past.get(pair)
        if past is None:
            return None
        following, is_sure = self._next.get((pair, past), (None, False))
        return following if is_sure else past[-1]
