"""What the public specification of OpenLineage demands of an event and of the facets that Stormproof sends.

A schema in these tests' own words: what is required, of which type, and in which form. A field that the specification
does not have is a fault. Stormproof's own facet has a schema of its own, which is used as it is.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import jsonschema

OWN_FACET: Final[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "trident" / "telemetry" / "StormproofRunFacet.json").read_text()
)["$defs"]["StormproofRunFacet"]
STATES: Final = ("START", "RUNNING", "COMPLETE", "ABORT", "FAIL", "OTHER")
_TEXT: Final[Mapping[str, Any]] = {"type": "string", "minLength": 1}
_URI: Final[Mapping[str, Any]] = {"type": "string", "format": "uri"}
_COUNT: Final[Mapping[str, Any]] = {"type": "integer", "minimum": 0}
_RUN_ID: Final[Mapping[str, Any]] = {"type": "string", "format": "uuid"}
_BASE: Final[Mapping[str, Any]] = {"_producer": _URI, "_schemaURL": _URI}


def _record(needed: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**needed, **(others or {})},
        "required": sorted(needed),
        "additionalProperties": False,
    }


def _facets(**known: Mapping[str, Any]) -> dict[str, Any]:
    """Facets by name; each has its producer and the address of its schema."""
    return {"type": "object", "properties": known, "additionalProperties": False}


def _facet(needed: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return _record({**_BASE, **needed}, others)


_JOB_NAME: Final = {"namespace": _TEXT, "name": _TEXT}
_PARENT: Final = _facet(
    {"run": _record({"runId": _RUN_ID}, {"facets": _facets()}), "job": _record(_JOB_NAME, {"facets": _facets()})}
)
_ERROR: Final = _facet({"message": _TEXT, "programmingLanguage": _TEXT}, {"stackTrace": {"type": "string"}})
_JOB_TYPE: Final = _facet({"processingType": _TEXT, "integration": _TEXT}, {"jobType": _TEXT})
_VERSION: Final = _facet({"datasetVersion": _TEXT})
_STATISTICS: Final = _facet({}, {"rowCount": _COUNT, "size": _COUNT})
_COLUMN: Final = _record({"name": _TEXT}, {"type": _TEXT, "fields": {"type": "array", "maxItems": 0}})
_SCHEMA: Final = _facet({}, {"fields": {"type": "array", "items": _COLUMN}})
_INPUT: Final = _record(_JOB_NAME, {"facets": _facets(), "inputFacets": _facets()})
_OUTPUT: Final = _record(
    _JOB_NAME,
    {"facets": _facets(schema=_SCHEMA, version=_VERSION), "outputFacets": _facets(outputStatistics=_STATISTICS)},
)
EVENT: Final = _record(
    {
        "eventTime": {"type": "string", "format": "date-time"},
        "producer": _URI,
        "run": _record(
            {"runId": _RUN_ID}, {"facets": _facets(parent=_PARENT, errorMessage=_ERROR, stormproof=OWN_FACET)}
        ),
        "job": _record(_JOB_NAME, {"facets": _facets(jobType=_JOB_TYPE)}),
    },
    {
        "eventType": {"enum": list(STATES)},
        "schemaURL": _URI,
        "inputs": {"type": "array", "items": _INPUT},
        "outputs": {"type": "array", "items": _OUTPUT},
    },
)
_FORMS: Final = jsonschema.FormatChecker(formats=())


@_FORMS.checks("uuid", ValueError)
def _is_uuid(value: object) -> bool:
    return str(uuid.UUID(str(value))) == value


@_FORMS.checks("date-time", ValueError)
def _is_time(value: object) -> bool:
    return datetime.fromisoformat(str(value)).tzinfo is not None


@_FORMS.checks("uri", ValueError)
def _is_uri(value: object) -> bool:
    found = urlsplit(str(value))
    return bool(found.scheme and (found.netloc or found.path)) and " " not in str(value)


def faults(event: Mapping[str, Any]) -> list[str]:
    """Where an event is not what the specification demands."""
    found = jsonschema.Draft202012Validator(EVENT, format_checker=_FORMS).iter_errors(event)
    return [f"{'.'.join(map(str, error.absolute_path)) or 'event'}: {error.message}" for error in found]
