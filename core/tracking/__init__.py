"""The proof that no message is lost: XOR shares, the batch verdict, the acker, and the attempts that the verdict leads to.

Storm gives each tuple a random 64-bit id. Its acker XORs, for each message, every id that is created and every id that is
acked; when the result is 0, the message's tree of tuples is done. Here the ids are chosen so that the middle of a tree
cancels by itself: a tuple hands its children shares that XOR to its own share, and only tuples that end are acked. No ack
is sent between two bolts.

The steps of the proof, in the order in which to read them:

| step | module | what it shows |
| --- | --- | --- |
| 1. shares | `share` | the shares of a tuple's children XOR to its own, so a message's acked shares XOR to its token |
| | | a task keeps this for tuples of one message, of several and of none, beside their rows |
| 2. verdict | `verdict` | a batch is complete only if reads, acks and failures account for every token and every count |
| | | what each component did, and how many tuples went over each edge: beside the proof, no part of it |
| 3. acker | `acker` | the same for each message by itself, after a batch whose own verdict was wrong |
| 4. attempts | `attempts` | a batch is completed, run again, or divided down to one message, in boundedly many attempts |
| | `verdict` | the ways in which a batch can end; where no message is to blame, the run stops or waits |
| | `partners` | a failure spreads to the messages that share a tuple with the failed one; who comes again with it |

An XOR does not see a row that comes three times instead of once. The counts in the control rows between stages do
(`stormproof.core.task.exchange`); what they find is in the report, as `violations`.
"""
