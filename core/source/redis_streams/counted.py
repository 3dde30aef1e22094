"""How many of a stream's entries are accounted for: given to a driver, or removed by the server and decided on.

The server counts the entries that were ever added. Where all that is left of them was not given to us yet, or nothing is
left to give, the difference to what is accounted for was removed before it was read. What the server says of the group is
not relied on: one XDEL makes it unknown. Servers before 7.0 do not count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from stormproof.core.base.errors import Json
from stormproof.core.pending.continuity import CONTINUOUS, Continuity, Look

NONE = "0-0"


class Facts(NamedTuple):
    """What a stream has. `added`: entries that were ever added; -1: the server does not count. `first` and `last`: the ids
    of the first entry ("": none is left) and of the newest ever; `deleted` is the highest id that XDEL ever removed.
    `has_anchor`: whether the entry is there that trimming takes before any that was not read. `group_read` and `group_last`
    are what the server says of the group: entries that it was given (-1: unknown), and the last of them.
    """

    added: int
    length: int
    first: str
    last: str
    deleted: str
    has_anchor: bool
    group_read: int
    group_last: str


def order(id_: str) -> tuple[int, int]:
    """An entry's id, to be compared."""
    time, _, number = id_.partition("-")
    return int(time), int(number or 0)


@dataclass(frozen=True, slots=True)
class Counted:
    """`read` of the entries that were ever added are accounted for (-1: it is not known how many), up to the id `last`.

    `anchor` is an entry that stands before those that were not read. `exact` is what `last` was when it was last known what
    is missing, and `deleted` the highest id of XDEL then. XDEL removed `withdrawn` entries before they were read.
    """

    read: int = -1
    last: str = NONE
    anchor: str = ""
    deleted: str = NONE
    withdrawn: int = 0
    exact: str = NONE

    @classmethod
    def begun(cls, facts: Facts, *, is_new: bool) -> Counted:
        """Where the group is, which is new or was there; what the stream has not any more is not missed."""
        last, read = facts.group_last, facts.added if is_new else facts.group_read
        one = cls(read, last, facts.first if last == NONE else last, facts.deleted, exact=last)
        return replace(one, read=facts.added - facts.length) if facts.added >= 0 and one.is_before_all(facts) else one

    def is_before_all(self, facts: Facts) -> bool:
        """Whether nothing is left of what was read: each entry of the stream is a new one."""
        return not facts.first or order(facts.first) > order(self.last)

    def given(self, ids: Sequence[str]) -> Counted:
        """These, ascending, were given to a driver, too; those that were given before do not count."""
        new = ids[bisect_right(ids, order(self.last), key=order) :]
        if not new:
            return self
        return replace(self, read=self.read + len(new) if self.read >= 0 else -1, last=new[-1], anchor=new[-1])

    def looked(self, facts: Facts, ids: Sequence[str] | None, *, is_all: bool) -> tuple[Look, Counted]:
        """What a look has shown, and how many are accounted for after it. `ids` were given by it; None: none was asked for.
        `is_all`: nothing else is left.
        """
        now = self.given(ids or ())
        unread = 0 if is_all else facts.length
        is_exact = is_all or (ids is None and self.is_before_all(facts))
        if ids is None and self._is_set_back(facts):
            last = min(self.last, facts.last, key=order)
            return self._rewound(facts), replace(now, read=-1, last=last, anchor=last)
        if facts.added < 0 or now.read < 0:
            look = self._untold(facts) if ids is None and self.is_before_all(facts) else CONTINUOUS
            return look, replace(now, read=facts.added - unread) if is_exact and facts.added >= 0 else now
        missing = facts.added - unread - now.read
        if not is_exact:
            return CONTINUOUS, now
        after = replace(now, read=now.read + missing, deleted=facts.deleted, exact=now.last)
        if not missing:
            return CONTINUOUS, after
        if missing < 0:
            return self._rewound(facts), after
        if is_all or not facts.first:  # so all up to the newest is accounted for
            after = replace(after, last=facts.last, anchor=facts.last, exact=facts.last)
        was_deleted = order(facts.deleted) > order(self.exact)
        is_one = missing == 1 and facts.deleted != self.deleted and order(facts.deleted) > order(self.last)
        if was_deleted and (facts.has_anchor or is_one):
            return CONTINUOUS, replace(after, withdrawn=now.withdrawn + missing)
        before = facts.first or "the stream's end"
        text = f"{missing} entries between {self.last} and {before} were removed from the stream before they were read"
        if was_deleted:
            text += ", and whether all of them were deleted one by one (XDEL), or some were trimmed, cannot be told"
            return Look(Continuity.UNKNOWN, text, missing, self.last, before), after
        return Look(Continuity.REMOVED, f"{text} (MAXLEN, XTRIM)", missing, self.last, before), after

    def _is_set_back(self, facts: Facts) -> bool:
        """Whether what was read is not there, and nothing but a server that was set back explains it."""
        is_gone = self.anchor == self.last and not facts.has_anchor and not self.is_before_all(facts)
        return (
            order(self.last) > order(facts.last)
            or 0 <= facts.added < self.read
            or (is_gone and order(facts.deleted) < order(self.last))
        )

    def _rewound(self, facts: Facts) -> Look:
        text = (
            f"it ends at {facts.last} with {facts.added} entries that were ever added, and entries up to {self.last} were "
            "read: the server was set back (a power loss under appendfsync everysec, a copy)"
        )
        return Look(Continuity.REWOUND, text, 0, facts.last, self.last)

    def _untold(self, facts: Facts) -> Look:
        if facts.has_anchor or facts.first == "" == self.anchor or self.last == NONE:
            return CONTINUOUS
        why = (
            "servers before 7.0 do not count entries"
            if facts.added < 0
            else "how many entries its group had read is unknown"
        )
        text = f"whether entries behind {self.last} were removed before they were read cannot be told: {why}"
        return Look(Continuity.UNKNOWN, text, 0, self.last, facts.first)

    def to_json(self) -> dict[str, Json]:
        """For the position."""
        return {"counted": [*astuple(self)]}

    @classmethod
    def of(cls, position: Mapping[str, Json]) -> Counted:
        """What `to_json` wrote."""
        match position.get("counted"):
            case [int(read), str(last), str(anchor), str(deleted), int(withdrawn), str(exact)]:
                return cls(read, last, anchor, deleted, withdrawn, exact)
            case _:
                return cls()
