"""Bytes of a request body to a checked model. Imported by every wire format's models and by the app's routes.

All models are strict: ``"5"`` and ``true`` are not integers, ``1`` is a fine float, NaN and infinity are not. Unknown
fields are accepted without effect, because clients send fields newer than any server; known fields whose effect this
server lacks are refused by name, so that nothing that changes the answer is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from engine.errors import InvalidRequest
from protocol.errors import ApiError, to_api_error


class ClientModel(BaseModel):
    """An object that a client sent. A field that is null counts as absent, at every depth.

    `unsupported` names fields that are refused, each with the values that mean "off" and are let through.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls_and_refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in data.keys() & cls.unsupported.keys():
            off = cls.unsupported[name]
            if data[name] is not None and data[name] not in off:
                advice = " or send " + " or ".join(orjson.dumps(value).decode() for value in off) if off else ""
                raise PydanticCustomError(
                    "rule", f"is not supported by this server; leave it out{advice}", {"field": name}
                )
        return {name: value for name, value in data.items() if value is not None}


M = TypeVar("M", bound=ClientModel)


def parse_body(model: type[M], body: bytes) -> M:
    """Check a JSON body against `model`. Raises `ApiError` 400 naming the place (broken JSON) or the field."""
    if not body:
        raise ApiError(400, "The request body is empty; send a JSON object.", code="invalid_json")
    try:
        return model.model_validate(orjson.loads(body))
    except (ValidationError, orjson.JSONDecodeError, InvalidRequest) as exc:
        # `from None`: the first two carry the client's text, which would end up in a logged traceback.
        raise to_api_error(exc) from None
