"""Tenants from a file: who they are, what they may do to each other, and that nobody learns their keys."""

from __future__ import annotations

import hmac
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from app.admission.tenants import Tenants
from app.config.settings import Settings, SettingsError
from tests.support.harness import Server
from tests.support.raw_client import sse_events
from tests.support.tenants import COMPLETIONS, ask, connect, tenant_server
from tests.support.tiny_model import CONTEXT, deployed_tiny_server, tiny_server

FILE = """
[tenants.flood]
keys = ["flood-secret-1", "flood-secret-2"]

[tenants.guest]
keys = ["guest-secret"]
weight = 2.0

[tenants.small]
keys = ["small-secret"]
max_running = 1
max_queued_requests = 2
"""
SECRETS = ("flood-secret-1", "flood-secret-2", "guest-secret", "small-secret", "environment-secret")
SLOTS = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Under the shipped configuration, where the process that was started is the one that serves and gets signals.
    settings: dict[str, Any] = {"api_keys": "environment-secret", "max_num_seqs": SLOTS, "max_model_len": CONTEXT}
    folder, key = tmp_path_factory.mktemp("tenants"), "environment-secret"
    with tenant_server(deployed_tiny_server, folder, FILE, key, kv_cache_memory="16MiB", **settings) as running:
        yield running


def test_every_key_of_every_source_opens_the_door_and_no_other_does(server: Server) -> None:
    for key in SECRETS:
        assert ask(server, key).status_code == 200
    for key in ("a", "flood", "flood-secret-1 flood-secret-2", "guest-secre", "GUEST-SECRET"):
        assert ask(server, key).status_code == 401


def test_a_kept_response_is_found_by_all_keys_of_its_tenant_and_by_no_others(server: Server) -> None:
    def post(key: str, **fields: Any) -> Any:
        return server.post("/v1/responses", {"input": "Hi", **fields}, authorization=f"Bearer {key}")

    def get(key: str, path: str = "") -> int:
        headers = {"authorization": f"Bearer {key}"}
        return server.client.get(f"/v1/responses/{kept}{path}", headers=headers).status_code

    kept = post("flood-secret-1", max_output_tokens=1).json()["id"]
    assert get("flood-secret-2") == get("flood-secret-2", "/input_items") == 200
    assert get("guest-secret") == get("guest-secret", "/input_items") == 404
    continued = {"previous_response_id": kept, "max_output_tokens": 1}
    assert post("flood-secret-2", **continued).status_code == 200
    assert post("guest-secret", **continued).json()["error"]["code"] == "previous_response_not_found"


def test_the_keys_of_a_tenant_are_one_tenant_and_others_are_another(server: Server) -> None:
    prompt = "What belongs to a tenant is seen by all of its keys and by no others. " * 4

    def cached(key: str) -> int:
        return ask(server, key, prompt=prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("flood-secret-1") == 0
    assert cached("flood-secret-2") > 0
    assert cached("guest-secret") == 0

    request_id = ask(server, "flood-secret-1").headers["x-request-id"]

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return server.client.get(f"/v1/requests/{request_id}/timeline", headers=headers).status_code

    assert status("flood-secret-1") == status("flood-secret-2") == 200
    assert status("guest-secret") == status("environment-secret") == 404


def test_a_tenant_cannot_take_anothers_timeline_by_its_id(server: Server) -> None:
    def timeline(key: str) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        return server.client.get("/v1/requests/my-very-own/timeline", headers=headers).json()

    for key, max_tokens in (("guest-secret", 3), ("flood-secret-1", 5)):
        body = {"prompt": "Hi", "max_tokens": max_tokens, "ignore_eos": True}
        answer = server.post(COMPLETIONS, body, **{"authorization": f"Bearer {key}", "x-request-id": "my-very-own"})
        assert answer.headers["x-request-id"] == "my-very-own"
    assert timeline("guest-secret")["output_tokens"] == 3
    assert timeline("flood-secret-2")["output_tokens"] == 5


def test_max_running_leaves_seats_to_others(server: Server) -> None:
    server.wait_idle()
    with ExitStack() as stack:
        for _ in range(2):
            connect(server, stack, "small-secret", max_tokens=CONTEXT - 10)
        now = server.wait_until(lambda now: now.running == 1 and now.waiting == 1)
        assert now.running < SLOTS
        assert ask(server, "guest-secret").status_code == 200, "nobody waits behind the one that may not run"
    server.wait_idle()


def test_max_queued_requests_binds_the_tenant_it_is_given_to(server: Server) -> None:
    server.wait_idle()
    with ExitStack() as stack:
        connect(server, stack, "small-secret", max_tokens=CONTEXT - 10)
        server.wait_until(lambda now: now.running == 1 and now.generation_tokens > 0)
        for _ in range(2):
            connect(server, stack, "small-secret", max_tokens=1)
        server.wait_until(lambda now: now.waiting == 2)
        refused = ask(server, "small-secret")
        assert refused.status_code == 429
        assert "2 of 2" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        samples = server.metrics().samples
        assert samples["vllm:admission_rejections_total{reason=tenant_max_queued_requests}"] == 1
        assert ask(server, "guest-secret").status_code == 200
        assert server.client.get("/readyz").status_code == 200, "the server is not full"
        assert ask(server, "small-secret", n=3).status_code == 400, "and this could never fit"
    server.wait_idle()


def test_a_flood_of_one_tenant_does_not_stop_another(server: Server) -> None:
    """Forty long generations before it in the queue, and yet the guest's requests are done one after the other."""
    server.wait_idle()
    alone = [ask(server, "guest-secret", max_tokens=20, seed=seed).json()["choices"] for seed in range(4)]
    with ExitStack() as stack:
        for number in range(40):
            connect(server, stack, f"flood-secret-{1 + number % 2}", max_tokens=2000)
        server.wait_until(lambda now: now.running == SLOTS and now.waiting == 40 - SLOTS)
        before = server.metrics()
        for seed, expected in enumerate(alone):
            answer = ask(server, "guest-secret", max_tokens=20, seed=seed)
            assert answer.json()["choices"] == expected
            assert server.metrics().waiting >= 40 - 2 * SLOTS, "the flood is still there"
        after = server.metrics()
        assert after.finished["length"] - before.finished["length"] <= len(alone) + SLOTS, "nobody else's turn came"
        assert after.generation_tokens - before.generation_tokens > 20 * len(alone), "the flood got its share meanwhile"
    server.wait_idle()


def test_keys_are_in_no_log_and_no_metric_and_no_answer(server: Server) -> None:
    pages = [server.log, server.client.get("/metrics").text, server.client.get("/v1/models").text]
    pages += [ask(server, "wrong").text, ask(server, "small-secret", n=1000).text]
    for page in pages:
        assert "secret" not in page


# --- the file


@pytest.fixture
def keys_file(server: Server) -> Iterator[Path]:
    """The server's, for a test that changes it."""
    path = Path(str(server.setting("api_keys_file")))
    yield path
    path.write_text(FILE)
    reload(server, "tenants and keys were read again")


def reload(server: Server, expected: str) -> None:
    """SIGHUP, and wait until the log has another line that says so."""
    before = server.log.lower().count(expected)
    server.send_signal(signal.SIGHUP)
    server.poll(lambda: server.log.lower().count(expected), lambda count: count > before)


@pytest.mark.slow
def test_keys_change_while_the_server_runs_and_requests_that_run_keep_theirs(server: Server, keys_file: Path) -> None:
    with ExitStack() as stack:
        running = connect(server, stack, "guest-secret", max_tokens=100, stream=True)
        assert running.read_head().status_code == 200
        keys_file.write_text(
            FILE.replace("guest-secret", "new-secret") + "[tenants.newcomer]\nkeys = ['late-secret']\n"
        )
        reload(server, "read again, tenants: 5")
        assert ask(server, "guest-secret").status_code == 401
        for key in ("flood-secret-1", "new-secret", "late-secret", "environment-secret"):
            assert ask(server, key).status_code == 200
        *_, done = sse_events(running.chunks())
        assert done == "[DONE]"
        waiting = [connect(server, stack, "late-secret", max_tokens=2000) for _ in range(SLOTS + 2)]
        server.wait_until(lambda now: now.waiting == 2)
        keys_file.write_text(FILE)
        reload(server, "read again, tenants: 4")
        assert ask(server, "late-secret").status_code == 401
        assert server.metrics().samples["headrace:tenant_requests_total{status=2xx,tenant=newcomer}"] == 1
        assert waiting[-1].read_head().status_code == 200, "it waited while its tenant was removed"
    server.wait_idle()
    reload(server, "read again, tenants: 4")
    assert "newcomer" not in server.client.get("/metrics").text, "it is gone, and so are its requests"
    assert "tenant=guest" in str(server.metrics().samples)


@pytest.mark.parametrize("content", ["[tenants.a]\nkeys = ['flood-secret-1'", "", "a = " + "[" * 5000, None])
def test_a_file_that_went_wrong_changes_nothing_and_is_told(
    server: Server, keys_file: Path, content: str | None
) -> None:
    if content is None:
        keys_file.unlink()
    else:
        keys_file.write_text(content)
    reload(server, "tenants and keys stay as they were. api_keys_file: ")
    for key in SECRETS:
        assert ask(server, key).status_code == 200
    assert ask(server, "a").status_code == 401
    assert not any(secret in server.log for secret in SECRETS)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "tables named tenants.<name>"),
        ("[tenants]", "tables named tenants.<name>"),
        ("[tenants]\na = 1", "tables named tenants.<name>"),
        ("port = 1\n[tenants.a]\nkeys = ['hush-1']", "tables named tenants.<name>"),
        ("[tenants.a]\nkeys = ['hush-1'", "is not TOML"),
        ("a = " + "[" * 5000, "is not TOML"),
        ("[tenants.a]\nkeys = ['hush-1']\nweight = " + "9" * 5000, "is not TOML"),
        ("[tenants.a]", "wrong at keys"),
        ("[tenants.a]\nkeys = []", "wrong at keys"),
        ("[tenants.a]\nkeys = 'hush-1'", "wrong at keys"),
        ("[tenants.a]\nkeys = ['']", "wrong at keys.0"),
        ("[tenants.a]\nkeys = [' hush-1']", "wrong at keys.0"),
        ("[tenants.a]\nkeys = ['hush-1', 5]", "wrong at keys.1"),
        ("[tenants.a]\nkeys = ['hush-1']\nweight = 0", "wrong at weight = 0"),
        ("[tenants.a]\nkeys = ['hush-1']\nweight = nan", "wrong at weight = nan"),
        ("[tenants.a]\nkeys = ['hush-1']\nmax_running = 0", "wrong at max_running = 0"),
        (
            "[tenants.a]\nkeys = ['hush-1']\nmax_running = 9223372036854775808",
            "wrong at max_running = 9223372036854775808",
        ),
        ("[tenants.a]\nkeys = ['hush-1']\nmax_queued_requests = -1", "wrong at max_queued_requests = -1"),
        ("[tenants.a]\nkeys = ['hush-1']\nmax_runing = 1", "wrong at max_runing"),
        ("[tenants.a]\nkeys = ['hush-1']\npriority_over_others = 1", "wrong at priority_over_others = 1"),
        ("[tenants.a]\nname = 'b'\nkeys = ['hush-1']", "wrong at name"),
        ("[tenants.'']\nkeys = ['hush-1']", "wrong at name"),
        ("[tenants.a]\nkeys = ['hush-1']\n[tenants.b]\nkeys = ['hush-1']", "'b' is given twice"),
        ("[tenants.a]\nkeys = ['hush-0']", "is given twice"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong_and_without_its_keys(
    tmp_path: Path, content: str, named: str
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(content)
    with pytest.raises(SettingsError) as refused:
        Tenants(Settings(api_keys_file=path, api_keys=(SecretStr("hush-0"),)))
    message = str(refused.value)
    assert named in message
    assert "api_keys" in message
    assert "hush" not in message
    assert refused.value.__cause__ is None


def test_a_wrong_file_ends_the_server_before_it_serves_anybody(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[tenants.a]\nkeys = ['hush-hush']\nweight = -1")
    with tiny_server(api_keys_file=path) as server:
        assert server.wait_exit() != 0
        last = server.log.strip().splitlines()[-1]
        assert "api_keys_file" in last
        assert "tenants.a" in last
        assert "weight = -1" in last
        assert "0.001 to 1000" in last
        assert "hush" not in server.log


def test_finding_a_tenant_does_not_wait_for_the_one_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty keys cost twenty comparisons in constant time, wherever the right one stands."""
    path = tmp_path / "tenants.toml"
    names = [f"key-{number}" for number in range(20)]
    path.write_text("[tenants.a]\nkeys = [" + ", ".join(f"'{name}'" for name in names) + "]")
    tenants = Tenants(Settings(api_keys_file=path))
    compare, compared = hmac.compare_digest, []

    def counting(given: bytes, kept: bytes) -> bool:
        compared.append(kept)
        return compare(given, kept)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    for key, fits in ((names[0], True), (names[-1], True), ("nobody's", False)):
        compared.clear()
        assert (tenants.find(key.encode()) is not None) == fits
        assert len(set(compared)) == len(compared) == len(names)


def test_without_a_file_sighup_says_that_no_key_has_changed() -> None:
    """Keys of the settings need a restart; the log says so to an operator who sends SIGHUP instead."""
    with deployed_tiny_server(api_keys="one-secret", admin_keys="another-secret") as server:
        server.wait_ready()
        reload(server, "sighup changed nothing: there is no api_keys_file")
        assert "were read again" not in server.log
        assert ask(server, "one-secret").status_code == 200
