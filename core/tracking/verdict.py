"""The batch verdict: do the acked shares of a whole batch XOR to the tokens of its messages, and do the counts agree?

The XOR of many messages' ack vals is again one 64-bit value. It is zero when every tuple anchored to them was acked, and
otherwise only by an accident of probability 2^-64. An XOR is blind to copies where a row comes an odd number of times: so
messages are counted, and `stormproof.core.task.exchange` counts the rows between stages.
"""

from __future__ import annotations

from functools import reduce
from operator import xor

from stormproof.core.source.protocol import Expectation
from stormproof.core.tracking.report import JobReport


def misread(report: JobReport, expected: Expectation) -> tuple[str, ...]:
    """The differences between the messages that were read and those that were opened, one text each.

    A failed message never explains such a difference.
    """
    found: list[str] = []
    if report.read_messages != expected.messages:
        found.append(f"{expected.messages} messages were opened, {report.read_messages} were read")
    if report.read_xor != expected.xor:
        found.append("the messages that were read are not those that were opened (XOR of tokens differs)")
    return tuple(found)


def mismatches(
    report: JobReport, expected: Expectation, *, tracked: bool, per_message: bool = False
) -> tuple[str, ...]:
    """What does not add up in an attempt, one text each; empty is the verdict "complete".

    `expected` was computed apart from the read. Messages that failed early are named with their tokens, and only those
    tokens are taken off: a failed message never explains the loss of another. A share that ended in a late failure was
    counted where it ended, so acks and late failures together account for every share.

    Where ackers took a verdict for each message (`per_message`) and named some as lost, the XOR over all of them is not
    compared: every other message has a verdict of its own.
    """
    found = [*report.violations, *misread(report, expected)]
    failed_ids = {failure.id for failure in report.failures}
    if len(failed_ids) != len(report.failures):
        found.append(f"{len(report.failures)} failures name {len(failed_ids)} messages: a report was counted twice")
    if tracked and not (per_message and report.lost):
        failed = reduce(xor, (failure.token for failure in report.failures), 0)
        if report.ack_xor ^ report.late_xor != expected.xor ^ failed:
            found.append("the ack val is not zero: tuples were lost or doubled on their way to the sinks")
    return tuple(found)
