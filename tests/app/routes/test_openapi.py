"""/openapi.json is true: whatever it says may be asked is answered as it says, and never with a failure of the server.

schemathesis makes bodies that fit the description and bodies that do not; answers must have a status, a content type
and a shape that are described. The model is random and its context short, so that generating costs next to nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.specs.openapi.schemas import OpenApiSchema

import app
from app.application import create_app
from app.config.settings import Settings
from app.routes import pages
from protocol.body import ClientModel
from protocol.openai.batches import BATCH_OPERATIONS
from protocol.openapi import document
from protocol.operations import Operation
from protocol.registry import ADMINISTRATION, OF_PAGES, OPERATIONS, TOKENIZER_INFO
from tests.support.harness import Server
from tests.support.tiny_model import tiny_server, write_tiny_model


def not_a_failure(context: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case) -> None:
    """Whoever asks for an answer within no time at all gets the 504 that is described."""
    asks_for_time = isinstance(case.body, dict) and not case.body.keys().isdisjoint({"timeout", "ttft_timeout"})
    if not (asks_for_time and response.status_code == 504):
        not_a_server_error(context, response, case)


def wrong_data_is_refused(
    context: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """Tools of other types are described, too, and left out: the coverage phase takes another type for a wrong one."""
    tools = case.body.get("tools") if isinstance(case.body, dict) else None
    kinds = [tool.get("type") for tool in tools or () if isinstance(tool, dict)] if isinstance(tools, list) else []
    if not any(isinstance(kind, str) and kind not in SERVED_TOOLS for kind in kinds):
        negative_data_rejection(context, response, case)


SERVED_TOOLS = ("custom", "function", "namespace", "local_shell", "shell", "apply_patch")
CHECKS = [not_a_failure, content_type_conformance, response_schema_conformance, status_code_conformance]
MOST_CASES = 160  # of an operation's coverage phase, which has up to a thousand: every few of them
ASKED = [
    pytest.param(each.method, each.path, mode, id=f"{each.method} {each.path} {mode.value}")
    for each in OPERATIONS
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if mode is GenerationMode.POSITIVE or each.request  # without a body, nothing can be wrong
]
EXAMPLES = {
    "/v1/chat/completions": 24,
    "/v1/completions": 16,
    "/v1/responses": 12,
    "/v1/messages": 12,
    "/v1/embeddings": 12,
}
_RERANK = {"query": "Hello", "documents": ["Hello", "Bye"]}
OF_RERANKERS: dict[str, dict[str, Any]] = {
    "/v1/rerank": _RERANK,
    "/v2/rerank": {"model": "Qwen3-Reranker-0.6B", **_RERANK},
    "/v1/score": {"text_1": "Hello", "text_2": "Bye"},
    "/v1/classify": {"input": "Hello"},
}
"""A body for each route that only rerankers and classifiers serve."""
LEAST = 3  # of these, so that one is answered
EVERY = pytest.mark.parametrize(
    "every",
    [16, pytest.param(4, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.storm)],
    ids=["few", "some", "all"],
)

SIMPLE = {
    *("messages", "prompt", "input", "stream", "temperature", "top_p", "top_k", "seed", "n", "user"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "echo", "logprobs", "return_token_ids"),
    *("encoding_format", "dimensions", "pooling", "normalize", "instructions", "metadata"),
}


@pytest.fixture(scope="module")
def described() -> Iterator[Server]:
    with tiny_server(max_model_len=96, max_queued_requests=4096) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def schema(described: Server) -> OpenApiSchema:
    found = described.client.get("/openapi.json").json()
    told = described.client.get("/v1/models").json()["data"][0]["default_parameters"]
    sampling = {name: value for name, value in told.items() if name != "max_tokens"}
    assert found == document(found["info"]["version"], sampling=sampling)
    return schemathesis.openapi.from_dict(found)


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize(("method", "path", "mode"), ASKED)
def test_answers_are_as_described(
    described: Server, schema: OpenApiSchema, method: str, path: str, mode: GenerationMode, every: int
) -> None:
    operation = schema[path][method]

    @settings(
        max_examples=max(LEAST if path in EXAMPLES else 1, -(-EXAMPLES.get(path, 6) // every)),
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        case.call_and_validate(base_url=described.base_url, checks=CHECKS)
        if mode is GenerationMode.POSITIVE and path in EXAMPLES:
            _simplify(case)
            case.call_and_validate(base_url=described.base_url, checks=CHECKS)

    ask()


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize(
    ("method", "path"), [pytest.param(each.method, each.path) for each in OPERATIONS if each.path != "/v1/tokenize"]
)
def test_what_is_described_is_accepted_and_what_is_not_is_refused(
    described: Server, schema: OpenApiSchema, method: str, path: str, every: int
) -> None:
    """Every field with the values at its bounds, just beyond them, and of other types, null among them."""
    operation = schema[path][method]
    config = schema.config.generation_for(operation=operation)
    cases = list(schema.iter_coverage_cases(operation, generation_modes=list(GenerationMode), generation_config=config))
    for case in cases[:: -(-len(cases) * every // MOST_CASES)]:
        case.body = _with_integers(case.body)
        case.call_and_validate(base_url=described.base_url, checks=[*CHECKS, wrong_data_is_refused])


def _with_integers(value: Any) -> Any:
    """1.0 as 1: JSON Schema knows no difference."""
    if isinstance(value, dict):
        return {name: _with_integers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_integers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def test_every_field_that_may_be_absent_may_be_null() -> None:
    def models(kind: type[ClientModel]) -> Iterator[type[ClientModel]]:
        yield kind
        for each in kind.__subclasses__():
            yield from models(each)

    schemas = document("1")["components"]["schemas"]
    found = {kind.__name__ for kind in models(ClientModel)} & schemas.keys()
    assert len(found) > 30
    for name in found:
        required = schemas[name].get("required", ())
        for field, kind in schemas[name].get("properties", {}).items():
            assert field in required or {"type": "null"} in kind["anyOf"], f"{name}.{field}"


def test_the_defaults_of_sampling_are_those_in_force() -> None:
    schemas = document("1", sampling={"temperature": 0.2, "top_p": None})["components"]["schemas"]
    for name in ("ChatCompletionRequest", "CompletionRequest", "MessagesRequest", "ResponsesRequest"):
        fields = schemas[name]["properties"]
        assert (fields["temperature"]["default"], fields["top_p"]["default"]) == (0.2, None), name


def _simplify(case: schemathesis.Case) -> None:
    """What asks for everything at once, or for more than the context, is refused; to look at nothing but refusals would
    prove little."""
    if isinstance(case.body, dict):
        body: dict[str, Any] = {name: value for name, value in case.body.items() if name in SIMPLE}
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(name), int):
                body[name] = 1 + body[name] % 8
        if isinstance(body.get("messages"), list):
            said = [{"role": "user", "content": each.get("content")} for each in body["messages"]]
            body["messages"] = [each for each in said if isinstance(each["content"], str) and each["content"]][:1]
            body["messages"] += [{"role": "user", "content": "Hi"}]
        case.body = body


@pytest.mark.slow
def test_scores_are_as_described(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "Qwen3-Reranker-0.6B", architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    with tiny_server(model=model) as server:
        described = schemathesis.openapi.from_dict(server.wait_ready().client.get("/openapi.json").json())
        for path, body in OF_RERANKERS.items():
            case = described[path]["post"].Case(body=body, media_type="application/json")
            answer = case.call_and_validate(base_url=server.base_url, checks=CHECKS)
            assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_after_all_of_this_the_server_is_well(described: Server) -> None:
    # Few of the drawn bodies fit these paths, so one that does is sent.
    for path, fits in {"/v1/embeddings": {"input": "Hello"}, "/api/show": {"model": "tiny"}}.items():
        answer = described.post(path, fits)
        assert answer.status_code == 200, answer.text
    now = described.wait_idle()
    assert "Traceback" not in described.log
    whole = [
        (each.path, each.method.upper())
        for each in OPERATIONS
        if "{" not in each.path and each.path not in OF_RERANKERS  # which have a test of their own
    ]
    never = [(path, method) for path, method in whole if not now.http_requests(path, "2xx", method)]
    assert not never, "these were never asked for anything that they give"
    body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
    assert described.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("with_settings", "operations"),
    [
        (Settings(), OPERATIONS),
        (Settings(admin_keys=("key",)), OPERATIONS + ADMINISTRATION),
        (Settings(enable_tokenizer_info_endpoint=True), OPERATIONS + TOKENIZER_INFO),
        (Settings(files_dir=Path("files")), OPERATIONS + BATCH_OPERATIONS),
    ],
    ids=["open", "governed", "tokenizer", "batches"],
)
def test_every_route_is_described_and_nothing_else(
    with_settings: Settings, operations: Sequence[Operation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    served: Any = create_app(with_settings).routes  # each with a path and methods
    routes = {
        (method.lower(), re.sub(r":\w+}", "}", route.path))
        for route in served
        if route.path not in OF_PAGES
        for method in route.methods - {"HEAD"}
    }
    assert routes == {(operation.method, operation.path) for operation in operations}


def test_requests_at_once_make_the_description_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []

    def make(*given: Any) -> dict[str, Any]:
        made.append(b"")
        time.sleep(0.05)  # other threads run
        return {}

    monkeypatch.setattr(pages, "document", make)
    pages._description.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: pages._described(False, False, False), range(8)))
    pages._description.cache_clear()
    assert len(made) == 1


def test_the_page_sends_the_administrators_key_to_every_route_of_theirs() -> None:
    page = (Path(app.__file__).parent / "dashboard" / "docs" / "docs.js").read_text()
    [listed] = re.findall(r"const ADMIN = \[(.*?)\]", page, re.DOTALL)
    assert set(re.findall(r'"([^"]+)"', listed)) == {operation.path for operation in ADMINISTRATION}
