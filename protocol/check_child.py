"""The main of a process that checks answers against JSON Schemas, under limits of the kernel: `engine.child_main`.

A check takes time and memory that grow exponentially for some schemas, and keeps the interpreter to itself; both the
schema and, by it, the answer are a client's choice.

    parent → child   {"schema": ..., "text": ...} (JSON), of which the text may be anything; or nothing: why not?
    child → parent   true, false or null, where it cannot be told; or a list of reasons, null if all are that it cannot
"""

from __future__ import annotations

import json
import sys

import jsonschema_rs

from engine.child_main import serve, to_text

MAX_ERRORS = 8
MAX_ERROR = 200  # characters
_GIVEN_UP = {
    jsonschema_rs.ValidationErrorKind.BacktrackLimitExceeded,
    jsonschema_rs.ValidationErrorKind.RegexEngineFailure,
}
BACKTRACKS = 10_000  # of patterns with look-around; all others take linear time


def main(timeout: float) -> None:
    """Serve the parent until it closes the socket. `timeout`: seconds of the processor that one check may take."""
    checker: jsonschema_rs.Validator | None = None
    value: object = None

    def answer(message: bytearray) -> tuple[int, bytes]:
        nonlocal checker, value
        try:
            if not message:
                return 0, json.dumps(_errors(checker, value)).encode()
            given = json.loads(to_text(message))
            checker = new_checker(given["schema"])
            value = json.loads(given["text"], parse_float=_finite)
            return 0, json.dumps(checker.is_valid(value)).encode()
        except (ValueError, RecursionError):  # no JSON, or a schema with a reference that leads nowhere
            return 0, b"null"

    serve(answer, timeout)


def new_checker(schema: object) -> jsonschema_rs.Validator:
    """A checker that fetches nothing and tells no values. Raises ValueError if a reference leads nowhere."""
    return jsonschema_rs.Draft202012Validator(
        schema,  # type: ignore[arg-type]
        validate_formats=True,
        offline=True,
        mask="the value",
        pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACKS),
    )


def _finite(text: str) -> float:
    """A number as far as it goes: what is beyond would be none."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def _errors(checker: jsonschema_rs.Validator | None, value: object) -> list[str] | None:
    found: list[str] = []
    kinds = set[type]()
    for error in checker.iter_errors(value) if checker is not None else ():
        place = "".join(f"/{part}" for part in error.instance_path)
        kinds.add(type(error.kind))
        found.append(f"{place[:MAX_ERROR]}: {error.message[:MAX_ERROR]}")
        if len(found) == MAX_ERRORS:
            break
    return None if kinds and kinds <= _GIVEN_UP else found
