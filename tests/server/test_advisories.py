"""One test for each published hole of a server of this kind that could reach this one, named by its advisory.

Holes in what this server does not have (media, embeddings, grammars, request-supplied tensors) are closed by refusing
the fields by name; the tests hold that, so that whoever adds the feature meets its history.
"""

from __future__ import annotations

import gzip
import hmac
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from app.settings import Settings
from app.tenants import Tenants
from engine.messages import EngineCoreRequest, SamplingParams
from engine.scheduler.kv_cache_manager import KVCacheManager
from engine.scheduler.request import Request
from protocol.chat_template import ChatTemplate, ChatTemplateError
from tests.server.harness import Server
from tests.server.tiny_model import CONTEXT, VOCABULARY, tiny_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEY, OTHER_KEY = "sk-advisory-one", "sk-advisory-two"
MIB = 2**20
BODY_LIMIT = 8 * MIB
FLAT = 16 * MIB  # what the process may grow by however much it is sent: an allocator's slack


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tiny_server(api_keys=f"{KEY},{OTHER_KEY}", max_body_bytes=BODY_LIMIT, body_timeout=4) as running:
        running.client.headers["authorization"] = f"Bearer {KEY}"
        yield running.wait_ready()


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


def raw_exchange(server: Server, data: bytes) -> bytes:
    with server.connect() as client:
        client.send_bytes(data)
        return client.read_raw()


def resident(server: Server) -> float:
    return server.metrics().samples["process_resident_memory_bytes"]


def seconds_of(server: Server, action: Callable[[], object]) -> float:
    """Processor time of the server: what else the machine does makes an answer later, not dearer."""
    start = server.metrics().samples["process_cpu_seconds_total"]
    action()
    return server.metrics().samples["process_cpu_seconds_total"] - start


# --- who may come in


@pytest.mark.parametrize(
    "path",
    [CHAT, COMPLETIONS, "/v1/models", "/metrics", "/openapi.json", "/dashboard/frames", "/v1/requests/x/timeline"],
)
@pytest.mark.parametrize("host", ["a/?", "a#", "a/health?", "a/livez", "a@b", "[::1]/health"])
def test_cve_2026_48746_and_48710_a_host_header_does_not_steer_authentication(
    server: Server, path: str, host: str
) -> None:
    for target in (path, f"http://a/health?{path}"):
        head = f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
        assert raw_exchange(server, head.encode()).split()[1] in (b"400", b"401")


@pytest.mark.parametrize("method", ["BREW", "TRACE", "PROPFIND", "GETS", "X" * 2000])
def test_cve_2026_48817_an_unknown_method_is_405_and_makes_no_series(server: Server, method: str) -> None:
    for path in ("/v1/models", "/health", "/metrics"):
        answer = server.client.request(method, path)
        assert answer.status_code == 405
        assert "GET" in answer.headers["allow"]
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not [name for name in server.metrics().samples if method in name]


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


def test_cve_2025_48956_huge_and_countless_headers_are_431_and_cost_no_memory(server: Server) -> None:
    start = b"GET /livez HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    heads = [
        start + b"x: " + b"a" * MIB + b"\r\n\r\n",
        start + b"a: b\r\n" * 10_000 + b"\r\n",
        start + b"a: b\r\n" * 200_000 + b"\r\n",
        b"GET /" + b"a" * MIB + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    ]
    before = resident(server)
    for head in heads * 10:
        try:
            answer = raw_exchange(server, head)
        except ConnectionError:
            continue  # the server had seen enough before everything was sent
        assert answer.split()[1] == b"431"
        assert b'"type":"invalid_request_error"' in answer
    assert resident(server) - before < FLAT < sum(map(len, heads)) * 10


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


A_LOT = 100_000


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


def test_cve_2026_55646_a_body_is_measured_while_it_arrives(server: Server) -> None:
    """Announced or in chunks: the answer comes before the body has, and the body is kept nowhere."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer " + KEY.encode() + b"\r\n"
    answer = raw_exchange(server, head + b"content-length: %d\r\n\r\n" % (BODY_LIMIT + 1))
    assert answer.split()[1] == b"413"

    before = resident(server)
    with server.connect() as client:
        client.send_bytes(head + b"transfer-encoding: chunked\r\n\r\n")
        with pytest.raises(ConnectionError):
            client.send_bytes((b"%x\r\n%b\r\n" % (MIB, b"[" * MIB)) * 100)
        answer = client.read_raw()
    assert answer.split()[1] == b"413"
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("The request body is larger")
    assert resident(server) - before < BODY_LIMIT + FLAT


def test_cve_2026_54233_a_compressed_body_is_not_inflated(server: Server) -> None:
    bomb = gzip.compress(b" " * 256 * MIB, compresslevel=1)
    before = resident(server)
    for path in (CHAT, COMPLETIONS):
        answer = server.client.post(path, content=bomb, headers={"content-encoding": "gzip"})
        assert answer.status_code == 415
        assert server.client.post(path, content=bomb).status_code == 400, "without the header it is no JSON"
    assert resident(server) - before < 2 * len(bomb) + FLAT


@pytest.mark.parametrize("path", [COMPLETIONS, "/nowhere", "/livez"])
def test_an_answer_before_the_end_of_its_request_says_that_the_connection_ends(server: Server, path: str) -> None:
    """Otherwise the client's next request goes into a connection that is being closed."""
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-encoding: gzip\r\ncontent-length: 1000000\r\n".encode()
    for key in (KEY, "wrong"):
        answer = raw_exchange(server, head + b"authorization: Bearer " + key.encode() + b"\r\n\r\n[")
        status_line, *headers = answer.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
        assert status_line.split()[1] in (b"401", b"404", b"405", b"415")
        assert b"connection: close" in headers


def test_a_body_that_trickles_for_ever_is_given_up(server: Server) -> None:
    with server.connect() as client:
        client.send_bytes(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer " + KEY.encode())
        client.send_bytes(b"\r\ncontent-length: 1000000\r\n\r\n")
        answer = _trickle_until_answered(client._socket)
    assert answer.split()[1] == b"408"
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_timeout"


def _trickle_until_answered(connection: socket.socket) -> bytes:
    connection.settimeout(0.05)
    received = b""
    for _ in range(2000):
        try:
            chunk = connection.recv(65536)
        except TimeoutError:
            connection.sendall(b"[")
        else:
            received += chunk
            if not chunk:
                return received
    pytest.fail("the server waits for ever")


def test_cve_2024_47874_forms_are_not_parsed(server: Server) -> None:
    form = {"prompt": ("prompt.txt", b"a" * MIB)}
    assert server.client.post(COMPLETIONS, files=form).json()["error"]["code"] == "invalid_json"
    assert server.client.post(COMPLETIONS, data={"prompt": "a"}).json()["error"]["code"] == "invalid_json"


def test_llama_cpp_26600_nesting_is_bounded_before_anybody_recurses(server: Server) -> None:
    for path in (CHAT, COMPLETIONS):
        for content in (b"[" * 60_000, b'{"a":' * 60_000, b'{"messages":' + b"[" * 60_000 + b"]" * 60_000 + b"}"):
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
        *("/v1/completions/render", "/derender", "/invocations", "/pause", "/sleep", "/abort_requests", "/rerank"),
        *("/update_weights", "/v1/load_lora_adapter", "/v1/files", "/collective_rpc", "/server_info"),
        *("/reset_prefix_cache", "/engine_state", "/configure_logging"),
    )
    for path in (*absent, "/tokenize", "/detokenize", "/v1/embeddings", "/dashboard/frames", "/openapi.json", "/load"):
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
    assert server.complete("Hi", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
    now = server.wait_idle()
    assert now.finished["error"] == 0
    assert not [name for name, count in now.samples.items() if "status=5xx" in name and "readyz" not in name and count]
    assert "Traceback" not in server.log
    assert KEY not in server.log
