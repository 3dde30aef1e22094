"""The proof that no message is lost: XOR shares, the acker, the batch verdict, and the attempts that it decides.

Storm gives each tuple a random 64-bit id, and its acker XORs, for each message, every id that is created and every id
that is acked: the message's tree of tuples is done when the XOR is 0. Here the ids are chosen so that the middle of a
tree cancels by itself: a tuple hands its children shares that XOR to its own, and only tuples that end are acked. No ack
is sent between two bolts.

In the order in which a reader needs them:

| module | what it has |
| --- | --- |
| `share` | the arithmetic: a message's token, and how a share is split over children |
| `anchors` | what a task holds beside its rows: the messages that anchor each tuple, and the shares |
| `report` | what the tasks of an attempt reported, taken together |
| `verdict` | the batch verdict: whether acked shares XOR to the tokens of the batch, and whether the counts agree |
| `acker` | the verdict message by message, for a batch whose own verdict was wrong: Storm's acker, over arrays |
| `sorted_run` | the acker's memory: entries of 18 bytes, sorted by id |
| `attempts` | what follows from a verdict: complete, run again, or halve the batch, down to one message |
| `outcome` | what can become of a batch in the end |
| `together` | which messages a failure spreads to, where they share tuples |
| `breaker` | when messages that fail alone are not to blame, and the run stops instead |
"""
