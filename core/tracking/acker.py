"""The acker: the verdict of each message by itself.

The acker keeps one 64-bit ack val for each message of a batch, and says which messages are not complete. An ack val is
the XOR of its token (the notice `init`) and of every share that was acked for it (the notices `ack`). It is 0 when every
tuple anchored to the message was acked, and otherwise only by an accident of 2^-64. XOR commutes, so notices may come in
any order. Only a batch whose own verdict was wrong runs again with ackers.

It is made after Storm's acker (`Acker.java`, `RotatingMap.java`), with these differences:

- The verdict is taken once, at the end of the attempt. Storm decides at each notice, so it needs a clock to give a message
  up. Here the attempt itself has a timeout: the message timeout of its slice.
- A failure is no notice. The task names the failed message in its report, and the driver takes it out.
- A second `init` of a message is seen: it was read twice. Storm XORs it in.
- Notices come in arrays, and a message takes 16 bytes.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from stormproof.core.base.arrow import Rows, Words
from stormproof.core.tracking.share import as_words, mix64

ACKER: Final = "__acker"
"""The name under which the tracking is counted. No component can have it: names begin with a letter or a digit."""


class Acker:
    """The ack vals of the messages that one acker task decides.

    `ids` has one entry for each `init`, in any order: a message that was read twice stands there twice.

    Guarantee:
        A message is complete only if it has one `init` and its ack val is 0. One that was acked and has no `init` is
        incomplete, and so is one with two, even where tokens and shares cancel.
        A million messages take 16 bytes each. During a call its notices take some 60 bytes each.

    Not guaranteed:
        An XOR is blind to a notice that comes three times instead of once: who transports notices has to count them.
    """

    def __init__(self, ids: Rows) -> None:
        self.ids = np.sort(ids)
        self.ack_vals = np.zeros(len(ids), np.uint64)
        self._without_init: list[Rows] = []

    def tell(self, ids: Rows, values: Words) -> None:
        """XOR the values of notices (tokens or acked shares) into the messages' ack vals. An id may come many times."""
        order = np.argsort(ids)  # rising ids are looked up faster: the memory that they need is in the cache
        ids, values = ids[order], values[order]
        places = np.searchsorted(self.ids, ids)
        known = self.ids.take(places, mode="clip") == ids if len(self.ids) else np.zeros(len(ids), np.bool_)
        if not known.all():
            self._without_init.append(ids[~known])
            places, values = places[known], values[known]
        np.bitwise_xor.at(self.ack_vals, places, values)

    def incomplete(self) -> Rows:
        """The messages that are not complete by what was told so far, in rising order."""
        open_: Rows = self.ids[self.ack_vals != 0]
        doubled = self.ids[1:][self.ids[1:] == self.ids[:-1]]
        if not len(doubled) and not self._without_init:
            return open_  # in rising order, each once
        return np.unique(np.concatenate([open_, doubled, *self._without_init]))


def acker_of(ids: Rows, ackers: int) -> Rows:
    """The acker task of each message: Storm's mod hashing, so that all notices of a message meet at one task."""
    return (mix64(as_words(ids)) % np.uint64(ackers)).astype(np.int64)
