"""What a RabbitMQ queue's own limits may do to messages, of which AMQP does not tell: its management interface does."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

TIMEOUT_S: Final = 3.0
AUTO: Final = "auto"


def limits_said(url: str, management: str, queue: str, prefetch: int) -> list[str]:
    """What cannot be kept of a queue's limits, a text each; or that they are not known. `management` is a URL, or "auto"."""
    try:
        found = _asked(url, management, queue)
    except (OSError, ValueError, http.client.HTTPException) as error:
        text = str(error) if isinstance(error, OSError) else type(error).__name__  # which may repeat the URL
        return [
            f"its delivery limit, time-outs and dead-letter exchange are not known: the management interface says {text}. "
            "Give its address by management='http://HOST:15672', and the user the tag 'monitoring'; or management=None"
        ]
    limit, timeout_ms = _setting(found, "delivery-limit"), _setting(found, "consumer-timeout")
    exchange = _setting(found, "dead-letter-exchange")
    goes = "drops it" if exchange is None else f"moves it to the exchange {exchange!r}"
    said: list[str] = []
    if limit is not None and limit >= 0:
        said.append(
            f"delivery-limit {limit}: the broker {goes} once a message was returned more often. A run that ends in order "
            f"returns none that it opened; one that is killed returns up to {prefetch}, which are applied here anyway. "
            "Attempts are counted in Postgres, so the queue needs no limit"
        )
    if timeout_ms is not None:
        said.append(
            f"consumer-timeout {timeout_ms} ms: what a batch has not confirmed by then is returned, which counts as a "
            "delivery. Set it above the time of a batch"
        )
    if (ttl_ms := _setting(found, "message-ttl")) is not None:
        said.append(f"message-ttl {ttl_ms} ms: the broker {goes} before it is read, if a message waits longer")
    return said


def _asked(url: str, management: str, queue: str) -> Mapping[str, Any]:
    broker = urlsplit(url)
    is_safe = broker.scheme == "amqps"
    auto = f"http{'s' if is_safe else ''}://{broker.hostname or '127.0.0.1'}:{15671 if is_safe else 15672}"
    vhost = unquote(broker.path[1:]) or "/"
    base = auto if management == AUTO else management.rstrip("/")
    asked = urllib.request.Request(f"{base}/api/queues/{quote(vhost, safe='')}/{quote(queue, safe='')}")  # noqa: S310
    user = f"{unquote(broker.username or 'guest')}:{unquote(broker.password or 'guest')}"
    asked.add_header("Authorization", f"Basic {base64.b64encode(user.encode()).decode()}")
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:  # noqa: S310 - of the scheme that was given
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        error.close()
        raise
    if not isinstance(found, dict):
        raise ValueError
    return found


def _setting(found: Mapping[str, Any], name: str) -> Any:
    """A setting by argument or by policy; of two numbers the lower one holds. A newer broker tells its own default, too."""
    given = (found.get("arguments") or {}).get(f"x-{name}")
    values = [given, (found.get("effective_policy_definition") or {}).get(name), found.get(name.replace("-", "_"))]
    there = [value for value in values if value is not None and value != "unlimited"]
    return min(there) if there and all(isinstance(value, int) for value in there) else next(iter(there), None)
