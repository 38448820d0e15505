"""Request bodies parsed into checked models, and the pages of lists.

1. Models are strict: ``"5"`` and ``true`` are not integers, ``1`` is a float, NaN and infinity are not.
2. Unknown fields are accepted without effect, because clients send fields newer than any server; the header
   `x-headrace-warning` names them, and of those inside objects, where each API has fields of its own, the ones that are
   like a known field which is not given. Known fields that this server lacks are refused by name.
3. Checking holds the GIL, so a list is measured before its entries are checked (`at_most`), and the first wrong entry
   of a long one ends the check (`fail_fast`): collecting the errors of six megabytes of wrong messages takes 20 s.
"""

from __future__ import annotations

import difflib
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, lru_cache
from itertools import islice
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, TypeVar, Union, get_args, get_origin

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    Tag,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue, SkipJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError

from engine.errors import InvalidRequest
from protocol.errors import TAG_PREFIX, ApiError, shown, to_api_error

MAX_FIELDS = 1024
"""The largest number of fields of one object, with unknown ones."""

MAX_JSON_WEIGHT = 2**20
"""The largest weight of one body. A value weighs 1 and holds the interpreter's lock for at most 0.07 microseconds."""

MAX_COMPARED = 8
"""The largest number of unknown fields of one request that are compared with the known ones, which takes time."""

MAX_NOTED = 16
"""The largest number of different unknown fields of all objects in a request that are compared."""

_MAX_SEARCHED = 2**13  # objects and arrays of a body that are searched for those with misspelt fields
_MAX_PATH = 200  # characters

_COMPOUND = 8  # the weight of an object, array or field name in addition to that of a number
_PIECE = 64 * 1024  # bytes that are counted without releasing the interpreter's lock
_MAX_SHOWN = 40  # characters of an unknown type that an error repeats
_NAME = re.compile("[A-Za-z0-9_]{1,40}")


def at_most(limit: int, entries: str) -> BeforeValidator:
    """Return a validator that refuses arrays and objects of more entries, before checking their content."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise PydanticCustomError("rule", f"takes at most {limit} {entries}, got {len(value)}")
        return value

    return BeforeValidator(check)


def at_most_inside(limit: int, entries: str) -> BeforeValidator:
    """Return a validator that refuses arrays of objects with more entries in total, before checking their content.

    Each entry holds the GIL for microseconds and creates objects that the garbage collector visits.
    """

    def check(value: Any) -> Any:
        if isinstance(value, list) and (count := _num_inside(value)) > limit:
            raise PydanticCustomError("rule", f"takes at most {limit} {entries} in all, got {count}")
        return value

    return BeforeValidator(check)


def _num_inside(objects: list[Any], depth: int = 3) -> int:
    """Count the entries of all arrays, nested ones too, in these objects' fields and in the `content` of fields."""
    count = 0
    for each in objects:
        if isinstance(each, dict):
            for field in each.values():
                inner = field.get("content") if isinstance(field, dict) else field
                if isinstance(inner, list):
                    count += len(inner) + (_num_inside(inner, depth - 1) if depth > 1 else 0)
    return count


def type_of(value: Any) -> Any:
    """Return the `type` of an object or a model; None if it has none."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


class OneOf:
    """Annotates a union of models with a fixed `type`, a model for all other types (the last one), and JSON types.

    An object goes to the model of its `type`; `default` is the type of an object without one. An object of another type
    goes to the model for other types if `others(type)` is true; that model's schema excludes the fixed types, unless it
    brings its own schema. All else is an error, which says `expected` for another JSON type, or names the unknown
    `type`. `kind_of` returns the type of an object, or the model for it.
    """

    def __init__(
        self,
        expected: str = "an object",
        *,
        default: str | None = None,
        others: Callable[[str], bool] = lambda kind: True,
        kind_of: Callable[[Any], Any] = type_of,
    ) -> None:
        self._expected, self._default, self._others, self._kind_of = expected, default, others, kind_of

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        plain: dict[type, str] = {}  # tags by Python types
        words: tuple[str, ...] = ()
        kinds: dict[str | type, str] = {}  # tags by `type`, or by the model that `kind_of` returns
        other: str | None = None
        members = [*(get_args(source) if get_origin(source) in (Union, UnionType) else (source,))]
        for number, member in enumerate(members):
            tag = f"{TAG_PREFIX}{number}"
            base = get_origin(_unannotated(member)) or _unannotated(member)
            if not (isinstance(base, type) and issubclass(base, BaseModel)):
                plain[str if base is Literal else base] = tag
                words = get_args(_unannotated(member)) if base is Literal else words
            elif served := get_args(base.model_fields["type"].annotation) if "type" in base.model_fields else ():
                kinds |= dict.fromkeys(served, tag)
            else:
                other = kinds[base] = tag
        names = [kind for kind in kinds if isinstance(kind, str)]
        if other is not None and names and get_origin(member := members[int(other[1:])]) is not Annotated:
            members[int(other[1:])] = Annotated[member, with_type({"type": "string", "not": {"enum": names}})]
        wrong = f"{TAG_PREFIX}wrong"
        kind_of, default = self._kind_of, self._default

        def tag_of(value: Any) -> str:
            if (tag := plain.get(type(value))) is not None:
                return tag if not words or type(value) is not str or value in words else wrong
            if (kind := kind_of(value)) is None:
                kind = default
            tag = kinds.get(kind) if type(kind) is str or isinstance(kind, type) else None
            if tag is not None:
                return tag if type(value) is dict or isinstance(value, BaseModel) else wrong
            is_other = isinstance(kind, str) and self._others(kind) if names else isinstance(value, dict | BaseModel)
            return other if other is not None and is_other else wrong

        def refuse(value: Any) -> NoReturn:
            if not isinstance(value, dict) or not names:
                raise PydanticCustomError("shape", self._expected)
            if (kind := value.get("type")) is None:
                raise PydanticCustomError("rule", f"is required: one of {', '.join(names)}", {"field": "type"})
            refuse_type(kind, names)

        choices = [Annotated[each, Tag(f"{TAG_PREFIX}{number}")] for number, each in enumerate(members)]
        choices.append(Annotated[Any, PlainValidator(refuse), SkipJsonSchema(), Tag(wrong)])  # type: ignore[type-arg]
        return handler.generate_schema(Annotated[Union[tuple(choices)], Discriminator(tag_of)])  # noqa: UP007


def with_type(kind: Mapping[str, Any]) -> WithJsonSchema:
    """The JSON Schema of an object with a `type` of this schema."""
    return WithJsonSchema({"type": "object", "properties": {"type": dict(kind)}, "required": ["type"]})


def _unannotated(member: Any) -> Any:
    return get_args(member)[0] if get_origin(member) is Annotated else member


def refuse_type(kind: Any, kinds: Sequence[str], field: str = "type") -> NoReturn:
    """Refuse the type `kind` of `field`."""
    shown = repr(kind[:_MAX_SHOWN]) if isinstance(kind, str) else "no string"
    works = ", ".join(kinds)
    raise PydanticCustomError(
        "rule", f"is {shown}, which is not supported by this server; send {works}", {"field": field}
    )


def json_text(value: Any, param: str) -> str:
    """Return `value`, of the field `param`, as JSON text. Raises `InvalidRequest`."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # the value came from JSON, so only its depth can be wrong
        raise InvalidRequest(f"{param} is nested too deeply.", param=param) from None


def check_size(value: Any, limit: int) -> Any:
    """Refuse JSON that is longer than `limit` bytes. Return the value."""
    try:
        size = len(orjson.dumps(value))
    except orjson.JSONEncodeError:  # the value came from JSON, so only its depth can be wrong
        raise PydanticCustomError("rule", "is nested too deeply") from None
    if size > limit:
        raise PydanticCustomError("rule", f"takes at most {limit} bytes of JSON, got {size}")
    return value


def at_most_bytes(limit: int) -> BeforeValidator:
    """Apply `check_size` to a field before anything in it is checked."""
    return BeforeValidator(lambda value: check_size(value, limit))


class _FailFast(FailFast):
    __hash__ = object.__hash__  # what `typing` needs to put an annotated type into a union


fail_fast = _FailFast()
"""The annotation of a list: only its first wrong entry is reported."""


_MODELS: list[type[BaseModel]] = []  # in the order of definition: parts before the models that contain them


def build_models() -> None:
    """Build the validators of all models, which takes about 0.2 s. Parts come first, because this order is fastest."""
    for model in _MODELS:
        model.model_rebuild()


class ClientModel(BaseModel):
    """An object that a client sent. A field that is null counts as absent, at every depth.

    `unsupported` are the fields that are refused, each with the values that mean "off" and are accepted.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, defer_build=True)

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _MODELS.append(cls)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls_and_refuse_unsupported(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise PydanticCustomError("rule", f"takes at most {MAX_FIELDS} fields, got {len(data)}")
        if info.context is not None and len(info.context) < MAX_NOTED and not data.keys() <= _known(cls):
            unknown = (name for name in data if name not in _known(cls))
            info.context.update({(cls, name): data for name in islice(unknown, MAX_NOTED)} | info.context)
        for name in data.keys() & cls.unsupported.keys():
            off = cls.unsupported[name]
            if data[name] is not None and data[name] not in off:
                advice = " or send " + " or ".join(orjson.dumps(value).decode() for value in off) if off else ""
                raise PydanticCustomError(
                    "rule", f"is not supported by this server; leave it out{advice}", {"field": name}
                )
        return {name: value for name, value in data.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Add null to the types of every field that may be absent."""
        schema = handler(core_schema)
        described = handler.resolve_ref_schema(schema)
        required = described.get("required", ())
        for name, field in described.get("properties", {}).items():
            if name not in required and {"type": "null"} not in field.get("anyOf", ()):
                default = {"default": field.pop("default")} if "default" in field else {}
                described["properties"][name] = {"anyOf": [field, {"type": "null"}], **default}
        return schema


class RequestBody(ClientModel):
    """The body of a request, with the names of the client's fields that have no effect.

    `labels` are fields that name or bill a request: no answer depends on them, so no warning names them.
    """

    labels: ClassVar[frozenset[str]] = frozenset(
        (
            *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
            *("prompt_cache_retention", "client_metadata", "session_id", "chat_id"),
        )
    )
    _without_effect: tuple[str, ...] = PrivateAttr(())

    @property
    def without_effect(self) -> tuple[str, ...]:
        """The names of the fields that the client set and this server does not know, in the client's order, each with
        a known name that is like it, if there is one."""
        return self._without_effect

    def given(self, model: type[BaseModel]) -> dict[str, Any]:
        """Return the fields that the client set and that `model` has, too."""
        return {name: getattr(self, name) for name in model.model_fields if name in self.model_fields_set}

    @model_validator(mode="wrap")
    @classmethod
    def _remember_unknown_fields(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(data)
        if isinstance(data, dict) and (unknown := data.keys() - cls.model_fields.keys() - cls.labels):
            unknown -= cls.unsupported.keys()  # these were sent with a value that means "off"
            names = [name for name in data if name in unknown and data[name] is not None]
            near = [_with_nearest(cls, name) for name in names[:MAX_COMPARED]]
            made._without_effect = (*near, *names[MAX_COMPARED:])
        return made


@cache
def _known(model: type[ClientModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items()) | model.unsupported.keys()


@lru_cache(1024)
def _nearest(model: type[ClientModel], name: str) -> str:
    """Return the known field that was probably meant by an unknown one; empty if none is like it."""
    known = _known(model) - model.unsupported.keys()
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.75)), "") if _NAME.fullmatch(name) else ""


def _with_nearest(model: type[ClientModel], name: str, path: str = "") -> str:
    near = _nearest(model, name)
    return f"{path}{name} (did you mean {near}?)" if near else name


_Noted = dict[tuple[type[ClientModel], str], dict[str, Any]]  # unknown fields: the first object of a model with each


def _misspelt(content: Any, noted: _Noted) -> list[str]:
    """Return the unknown fields in `content` that are like a field which their object lacks, with their paths."""
    found = [
        (model, name, inside)
        for (model, name), inside in noted.items()
        if inside[name] is not None and (near := _nearest(model, name)) and inside.get(near) is None
    ]
    places = _places(content, {id(inside) for _, _, inside in found}) if found else {}
    return [_with_nearest(model, name, places.get(id(inside), "")) for model, name, inside in found]


def _places(content: Any, wanted: Collection[int]) -> dict[int, str]:
    """Return the paths of objects in decoded JSON, which are given by their `id`; those that are found soon."""
    places: dict[int, str] = {}
    queue: deque[tuple[str, Any]] = deque([("", content)])
    for _ in range(_MAX_SEARCHED):
        if not queue or len(places) == len(wanted):
            break
        path, value = queue.popleft()
        if id(value) in wanted:
            places[id(value)] = path
        if len(path) < _MAX_PATH:
            inner = value.items() if isinstance(value, dict) else enumerate(value[:_MAX_SEARCHED])
            queue.extend((f"{path}{str(name)[:40]}.", each) for name, each in inner if isinstance(each, dict | list))
    return places


M = TypeVar("M", bound=ClientModel)


def parse_body(model: type[M], body: bytes) -> M:
    """Check a JSON body against `model`. Raises `ApiError` as `decode_json` does, and 400 naming the field."""
    return validate(model, decode_json(body))


def validate(model: type[M], content: Any) -> M:
    """Check decoded JSON against `model`. Raises `ApiError` 400 naming the field."""
    noted: _Noted = {}
    try:
        made = model.model_validate(content, context=noted)
    except (ValidationError, InvalidRequest) as exc:
        error = to_api_error(exc)
        if misspelt := _misspelt(content, noted):
            error.message += f" Unknown: {', '.join(misspelt)}."
        # `from None`: the cause quotes the client's text, which would end up in a logged traceback.
        raise error from None
    if isinstance(made, RequestBody):
        inside = {of: each for of, each in noted.items() if not issubclass(of[0], RequestBody)}
        made._without_effect += tuple(_misspelt(content, inside))
    return made


def decode_json(body: bytes) -> Any:
    """Decode the JSON of a request. Raises `ApiError`: 400 with the place of an error, 413 for too many values."""
    if not body:
        raise ApiError(400, "The request body is empty; send a JSON object.", code="invalid_json")
    if weight_above(body, MAX_JSON_WEIGHT):
        raise ApiError(
            413,
            f"The request body has too many JSON values: a value counts 1, a string 2 more, an object, array or field "
            f"name {_COMPOUND} more; allowed: {MAX_JSON_WEIGHT} together. Send fewer in one request.",
            code="too_many_values",
        )
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise to_api_error(exc) from None  # the cause quotes the client's text


def weight_above(body: bytes, limit: int) -> bool:
    """Return True if the values of `body` weigh more than `limit`. Strings' content does not count. Reads in pieces.

    Decoding is one call that keeps the GIL: 16 MiB of empty arrays would stop every thread for a second.
    """
    if len(body) * _COMPOUND <= limit:
        return False
    weight, is_inside, rest = 0, False, b""
    for begin in range(0, len(body), _PIECE):
        piece = rest + body[begin : begin + _PIECE]
        kept = len(piece) - len(piece.rstrip(b"\\")) & 1  # a backslash that escapes the next piece's first character
        piece, rest = piece[: len(piece) - kept], piece[len(piece) - kept :]
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[is_inside::2])
        weight += len(parts) - 1 + outside.count(b",")
        weight += _COMPOUND * sum(map(outside.count, (b"{", b"[", b":")))
        if weight > limit:
            return True
        is_inside ^= len(parts) % 2 == 0
    return False


def page_size(limit: str, most: int) -> int:
    """Return the number of entries on a page. Raises `ApiError` 400 if `limit` is no number from 1 to `most`."""
    if not re.fullmatch(r"[0-9]{1,5}", limit) or not 1 <= int(limit) <= most:
        raise ApiError(400, f"limit must be a whole number from 1 to {most}, got {shown(limit)}.", param="limit")
    return int(limit)


def page_order(query: Mapping[str, str]) -> str:
    """Return the order of a page's entries, asc or desc. Raises `ApiError` 400."""
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise ApiError(400, f"order must be 'asc' or 'desc', got {shown(order)}.", param="order")
    return order


def page_body(page: Sequence[Mapping[str, Any]], *, has_more: bool, **fields: str) -> bytes:
    """Return the body of one page of a list of objects with ids, with further `fields`."""
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return orjson.dumps({**fields, "data": page, **ends, "has_more": has_more})
