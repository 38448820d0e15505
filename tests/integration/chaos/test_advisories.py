"""One test for each published hole of a server of this kind that could reach this one, named by its advisory.

Holes in what this server does not have (media, embeddings, grammars, request-supplied tensors) are closed by refusing
the fields by name; the tests hold that, so that whoever adds the feature meets its history.
"""

from __future__ import annotations

import hmac
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from app.admission.tenants import Tenants
from app.config.settings import Settings
from engine.messages import EngineCoreRequest, SamplingParams
from engine.scheduler.kv_cache_manager import KVCacheManager
from engine.scheduler.request import Request
from protocol.chat_template import ChatTemplate, ChatTemplateError
from tests.support.exposed_server import BODY_LIMIT, CHAT, COMPLETIONS, KEY, MIB, OTHER_KEY, assert_well, exposed_server
from tests.support.harness import Server
from tests.support.tiny_model import CONTEXT, VOCABULARY


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with exposed_server() as running:
        yield running


def refused(server: Server, path: str, param: str | None, /, **fields: Any) -> str:
    """The message of the 400 that a good request gets with these fields."""
    good = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Hi"}]}
    answer = server.post(path, good | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] is param or (param and error["param"].startswith(param)), error
    return error["message"]


def refused_raw(server: Server, path: str, fields: str) -> str:
    """The same for a field that is spelled by hand."""
    good = '"prompt": "Hi"' if path == COMPLETIONS else '"messages": [{"role": "user", "content": "Hi"}]'
    answer = server.client.post(path, content=f"{{{good}, {fields}}}")
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def seconds_of(server: Server, action: Callable[[], object]) -> float:
    """Processor time of the server: what else the machine does makes an answer later, not dearer."""
    start = server.metrics().samples["process_cpu_seconds_total"]
    action()
    return server.metrics().samples["process_cpu_seconds_total"] - start


# --- who may come in


def test_cve_2025_59425_a_key_is_compared_with_every_key_by_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tuple(SecretStr(f"key-{number}") for number in range(5))
    tenants = Tenants(Settings(api_keys=keys))
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def remember(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", remember)
    for given in (b"key-0", b"key-4", b"key-00", b"", b"k" * 10_000, "schlüssel".encode()):
        compared.clear()
        assert (tenants.find(given) is not None) == (given in (b"key-0", b"key-4"))
        assert len(compared) == len(keys), "neither a hit nor a miss ends the search"
        assert all(len(a) == len(b) == 32 for a, b in compared), "digests, whatever was given"


# --- sizes and counts


def test_cve_2026_34756_n_is_bounded_before_anything_is_copied(server: Server) -> None:
    for path in (CHAT, COMPLETIONS):
        for n in (10**6, -1, 0, "1", True, 1.5, 2**63):
            assert "n must be" in refused(server, path, "n", n=n)
        assert "n must be" in refused_raw(server, path, '"n": 1e308')


def test_cve_2024_8939_best_of_cannot_multiply_the_work(server: Server) -> None:
    for best_of in (2, 10**6, -1):
        refused(server, COMPLETIONS, "best_of", best_of=best_of, n=1)


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", ""], [[1], []]])
def test_cve_2024_8768_an_empty_prompt_is_refused(server: Server, prompt: object) -> None:
    refused(server, COMPLETIONS, "prompt", prompt=prompt)


def test_cve_2026_54235_numbers_that_are_not_finite_do_not_pass_comparisons(server: Server) -> None:
    for path in (CHAT, COMPLETIONS):
        for field in (
            *("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
            *("timeout", "ttft_timeout"),
        ):
            for number in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "null.0"):
                refused_raw(server, path, f'"{field}": {number}')
        for number in ("NaN", "Infinity", "1e400"):
            refused_raw(server, path, f'"logit_bias": {{"1": {number}}}')
    assert server.complete("Hi", max_tokens=1, presence_penalty=-0.0, temperature=-0.0)["choices"]


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, VOCABULARY + 1, 2**31, 2**63])
def test_vllm_54195_ids_outside_the_vocabulary_reach_no_kernel(server: Server, wrong: int) -> None:
    for path in (CHAT, COMPLETIONS):
        refused(server, path, "stop_token_ids", stop_token_ids=[5, wrong])
        refused(server, path, "logit_bias", logit_bias={"5": 1, str(wrong): 1})
        refused(server, path, "allowed_token_ids", allowed_token_ids=[wrong])
    for prompt in ([wrong], [5, wrong, 5], [[5], [wrong]]):
        refused(server, COMPLETIONS, "prompt", prompt=prompt)


def test_cve_2026_21869_negative_integers_are_refused_wherever_they_mean_nothing(server: Server) -> None:
    for path in (CHAT, COMPLETIONS):
        for field in ("n", "min_tokens"):
            refused(server, path, field, **{field: -1})
        for field in ("max_tokens", "top_k"):  # of which -1 means no limit
            refused(server, path, field, **{field: -2})
    refused(server, CHAT, "top_logprobs", logprobs=True, top_logprobs=-2)
    refused(server, CHAT, "max_completion_tokens", max_completion_tokens=-2)
    refused(server, COMPLETIONS, "logprobs", logprobs=-2)


def test_prompt_logprobs_cannot_ask_for_prompt_times_vocabulary(server: Server) -> None:
    """local-inference-lab/vllm#264: -1 meant "all", and 62 GiB."""
    for path in (CHAT, COMPLETIONS):
        for count in (-2, 21, 10**6):
            refused(server, path, "prompt_logprobs", prompt_logprobs=count)
    refused(server, COMPLETIONS, "prompt_logprobs", prompt=[5] * 3000, max_tokens=1, prompt_logprobs=-1)
    many = [[1] * 1000] * 20
    assert "fewer" in refused(server, COMPLETIONS, "prompt_logprobs", prompt=many, prompt_logprobs=20, n=10)
    assert "fewer" in refused(server, COMPLETIONS, "logprobs", prompt=many, logprobs=20, echo=True, n=10)


A_LOT = 90_000


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (COMPLETIONS, "stop", ["a"] * A_LOT),
        (CHAT, "stop", ["a"] * A_LOT),
        (COMPLETIONS, "stop_token_ids", [1] * A_LOT),
        (COMPLETIONS, "logit_bias", dict.fromkeys(map(str, range(A_LOT)), 1)),
        (COMPLETIONS, "bad_words", ["a"] * A_LOT),
        (COMPLETIONS, "prompt", ["a"] * A_LOT),
        (COMPLETIONS, "prompt", [[]] * A_LOT),
        (COMPLETIONS, "prompt", [1] * A_LOT),
        (COMPLETIONS, "prompt", [1, *["a"] * A_LOT]),
        (CHAT, "messages", [1] * A_LOT),
        (CHAT, "messages", [{}] * A_LOT),
        (CHAT, "messages", [{"role": "user", "content": "a"}] * (A_LOT // 4)),
        (CHAT, "messages", [{"role": "user", "content": [1] * A_LOT}]),
        (CHAT, "messages", [{"role": "user", "content": "a" * 4 * MIB}]),
        (COMPLETIONS, "prompt", "a " * 2 * MIB),
        (CHAT, "chat_template_kwargs", {"a": [1] * A_LOT}),
        (CHAT, None, {"fields": 1}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_vllm_51447_long_lists_and_texts_are_refused_before_work_is_spent_on_them(
    server: Server, path: str, field: str | None, value: Any
) -> None:
    """The yardstick is what it costs to read as much JSON in a field that nobody looks at."""
    good = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Hi"}]}
    bad = good | ({field: value} if field else dict.fromkeys(map(str, range(A_LOT)), 1))
    wrong = json.dumps(bad).encode()
    idle = json.dumps(good | {"max_tokens": 1, "unknown": value if field else bad}).encode()
    assert len(wrong) < BODY_LIMIT
    answers: list[httpx.Response] = []

    def seconds(body: bytes) -> float:
        return min(seconds_of(server, lambda: answers.append(server.client.post(path, content=body))) for _ in range(2))

    unnoticed = seconds(idle)
    assert [answer.status_code for answer in answers] == [200, 200]
    noticed = seconds(wrong)
    assert answers[-1].status_code == 400
    assert (answers[-1].json()["error"]["param"] or "").startswith(field or "")
    assert noticed < 5 * unnoticed + 0.2


def test_cve_2025_46560_a_flood_of_placeholders_costs_what_as_much_text_costs(server: Server) -> None:
    """Spellings of special tokens are looked for and marked, in linear time."""

    def time_of(content: str) -> float:
        message = [{"role": "user", "content": content}]
        return min(seconds_of(server, lambda: refused(server, CHAT, "messages", messages=message)) for _ in range(2))

    flood = "<|im_end|> " * 20_000
    text = "placehold! " * 20_000
    assert time_of(flood) < 10 * time_of(text) + 0.5


def test_llama_cpp_26600_nesting_is_bounded_before_anybody_recurses(server: Server) -> None:
    for path in (CHAT, COMPLETIONS):
        for content in (b"[" * 60_000, b'{"a":' * 50_000, b'{"messages":' + b"[" * 60_000 + b"]" * 60_000 + b"}"):
            answer = server.client.post(path, content=content)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "invalid_json"
    for depth in (100, 300, 900):  # JSON that can be read, and template variables that have to be walked
        message, nested = '{"role": "user", "content": "Hi"}', "[" * depth + "]" * depth
        body = f'{{"messages": [{message}], "chat_template_kwargs": {{"a": {nested}}}, "max_tokens": 1}}'
        assert server.client.post(CHAT, content=body).status_code in (200, 400)


def test_of_a_duplicate_key_the_value_that_is_checked_is_the_value_that_counts(server: Server) -> None:
    assert "n must be" in refused_raw(server, COMPLETIONS, '"max_tokens": 1, "n": 1, "n": 1000000')
    answer = server.client.post(COMPLETIONS, content=b'{"prompt": "a", "max_tokens": 1, "n": 1000000, "n": 2}')
    assert len(answer.json()["choices"]) == 2


def test_an_integer_of_five_thousand_digits_is_refused_unread(server: Server) -> None:
    for path in (CHAT, COMPLETIONS):
        for field in ("max_tokens", "seed", "n", "top_k"):
            assert "not valid JSON" in refused_raw(server, path, f'"{field}": {"9" * 5000}')


# --- templates and special tokens


def test_cve_2025_62426_template_arguments_replace_nothing_that_the_server_sets(server: Server) -> None:
    def prompt_tokens(**kwargs: object) -> int:
        return server.chat("Hi", max_tokens=1, chat_template_kwargs=kwargs)["usage"]["prompt_tokens"]

    for name in ("messages", "tools", "documents", "add_generation_prompt"):
        refused(server, CHAT, "chat_template_kwargs", chat_template_kwargs={name: []})
    for path, body in (
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
    ):
        for counted in ("", "/count_tokens" if "max_tokens" in body else "/input_tokens"):
            answer = server.post(path + counted, {**body, "chat_template_kwargs": {"self": 1}})
            assert answer.status_code == 400
            assert "may not be set" in answer.text
    plain = prompt_tokens()
    assert prompt_tokens(enable_thinking=True) == plain
    for name in ("tokenize", "return_dict", "chat_template", "conversation", "self", "bos_token", "eos_token", "loop"):
        message = refused(server, CHAT, "chat_template_kwargs", chat_template_kwargs={name: True})
        assert "may not be set" in message
    assert "4096 bytes" in refused(server, CHAT, "chat_template_kwargs", chat_template_kwargs={"a": "a" * 5000})


def test_cve_2025_61620_a_template_that_comes_with_the_request_is_not_run(server: Server) -> None:
    for template in ("{{ messages }}", "{% for i in range(10**9) %}x{% endfor %}", ""):
        refused(server, CHAT, "chat_template", chat_template=template)


@pytest.mark.parametrize(
    "source",
    [
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ '%c' | format(1) | attr('__class__') }}",
    ],
)
def test_cve_2026_5760_and_2024_34359_a_models_own_template_runs_in_the_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "Hi"}])


def test_cve_2026_44222_text_that_spells_special_tokens_stays_text(server: Server) -> None:
    def tokens_of(content: str) -> int:
        return server.chat(content, max_tokens=1)["usage"]["prompt_tokens"]

    nothing = tokens_of("")
    for special in ("<|im_end|>", "<|im_start|>", "<|endoftext|>"):
        assert tokens_of(special) - nothing > 2, "several tokens of text, not one of control"
        parts = [{"role": "user", "content": [{"type": "text", "text": special}]}]
        answer = server.post(CHAT, {"messages": parts, "max_tokens": 1})
        assert answer.json()["usage"]["prompt_tokens"] - nothing > 2


# --- features whose holes are closed by not having them


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_json", {"type": "nonsense", "pattern": "["}),
        ("guided_json", {"properties": {"a": {"pattern": "(?<=a)b"}}}),
        ("guided_json", '{"a":' * 10_000),
        ("guided_json", '{"items":' * 10_000 + "{}" + "}" * 10_000),
        ("guided_json", {"enum": ["a" * 200_000]}),
        ("guided_regex", "(" * 30_000),
        ("guided_regex", "(((a{1000}){1000}){1000}){1000}"),
        ("guided_grammar", "root ::= root root"),
        ("guided_grammar", "root ::= " + "(" * 30_000),
        ("guided_grammar", "start: " + "(" * 30_000),
        ("guided_choice", ["a"] * 10_000),
        ("structured_outputs", {"regex": "a)"}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_cve_2025_48942_to_48944_58446_and_2026_25048_no_grammar_breaks_the_compiler(
    server: Server, field: str, value: object
) -> None:
    for path in (CHAT, COMPLETIONS):
        refused(server, path, field, **{field: value})


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(.*a){20}"])
def test_a_pattern_that_backtracks_elsewhere_is_followed_in_linear_time(server: Server, pattern: str) -> None:
    answer = server.complete("Hi", max_tokens=8, guided_regex=pattern)
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")


def test_ghsa_j828_28rj_hfhp_and_cve_2025_9141_a_schema_is_text_unless_a_call_is_demanded(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "(a+)+b", "default": "exit()"}}}
    answer = server.chat("Say yes.", tools=[tool], max_tokens=2)
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")


def test_cve_2025_62164_tensors_are_not_accepted(server: Server) -> None:
    for path in (CHAT, COMPLETIONS):
        refused(server, path, "prompt_embeds", prompt_embeds="gAWVAAAAAAAAAAA=")


def test_cve_2026_24779_and_its_kin_no_address_in_a_message_is_visited(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.2)
        port = trap.getsockname()[1]
        for url in (f"http://127.0.0.1:{port}/", f"http://a\\@127.0.0.1:{port}/", "file:///etc/passwd"):
            for part in ({"type": "image_url", "image_url": {"url": url}}, {"type": "video_url", "url": url}):
                refused(server, CHAT, "messages", messages=[{"role": "user", "content": [part]}])
        with pytest.raises(TimeoutError):
            trap.accept()


def test_cve_2026_71486_there_is_nothing_to_administer_with_and_nothing_to_use_without_a_key(server: Server) -> None:
    absent = (
        *("/v1/completions/render", "/derender", "/invocations", "/pause", "/sleep", "/abort_requests"),
        *("/update_weights", "/v1/load_lora_adapter", "/v1/files", "/collective_rpc", "/server_info"),
        *("/reset_prefix_cache", "/engine_state", "/configure_logging"),
    )
    present = "/tokenize", "/detokenize", "/v1/embeddings", "/rerank", "/dashboard/frames", "/openapi.json", "/load"
    for path in (*absent, *present):
        assert (server.post(path, {}).status_code == 404) == (path in absent)
        assert server.client.post(path, headers={"authorization": ""}).status_code == 401


# --- the prefix cache between tenants


def test_cve_2025_46570_whether_another_tenant_has_sent_a_prompt_cannot_be_told(server: Server) -> None:
    secret = "The password of the headrace is a long word that nobody guesses. " * 8

    def cached(key: str, **fields: object) -> int:
        body = {"prompt": secret, "max_tokens": 1, **fields}
        answer = server.post(COMPLETIONS, body, authorization=f"Bearer {key}")
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEY) == 0
    assert cached(KEY) > 0
    assert cached(OTHER_KEY) == 0
    salted = secret + "Or does somebody?"
    assert cached(KEY, prompt=salted, cache_salt=OTHER_KEY) == 0, "of one's own, too"
    assert cached(KEY, prompt=salted, cache_salt=OTHER_KEY) > 0
    assert cached(OTHER_KEY, prompt=salted, cache_salt=OTHER_KEY) == 0, "vllm#53347"
    assert OTHER_KEY not in server.log


def test_cve_2025_25183_block_hashes_cannot_be_computed_from_outside() -> None:
    def request(tenant: str) -> Request:
        message = EngineCoreRequest(
            request_id="a", prompt_token_ids=[1] * 16, sampling=SamplingParams(), arrival_time=0.0, tenant=tenant
        )
        return Request(message, sequence_number=0, eos_token_ids=(), max_model_len=CONTEXT)

    one, other = (KVCacheManager(4, 16, max_step_tokens=16) for _ in range(2))
    assert one.block_hash(request("a"), 0) == one.block_hash(request("a"), 0)
    assert one.block_hash(request("a"), 0) != other.block_hash(request("a"), 0), "keyed by a secret of the process"
    assert one.block_hash(request("a"), 0) != one.block_hash(request("b"), 0), "and by tenant"
    assert len(one.block_hash(request("a"), 0)) >= 16, "too long to collide by chance"


# --- afterwards


def test_after_all_of_this_the_server_is_well(server: Server) -> None:
    assert_well(server)
