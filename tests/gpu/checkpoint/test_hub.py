"""Models of a hub: which file is chosen, and that only checked bytes of it are kept, over real HTTP."""

import hashlib
import logging
import random
import threading

import pytest

from gpu.checkpoint import ModelError, models_here, open_model
from gpu.checkpoint.hub import HubFile, choose_gguf, fetch_from_hub, gguf_models
from tests.gpu.checkpoint_files import TINY, TinyGGUF, random_weights
from tests.support.fake_hub import COMMIT, FakeHub

BIG = random.Random(0).randbytes(3_000_000)
NAME = "tiny-Q4_K_M.gguf"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with FakeHub({"org/tiny-GGUF": {NAME: BIG, "README.md": b"hello"}}) as served:
        served.use_here(monkeypatch, tmp_path)
        monkeypatch.setattr("gpu.checkpoint.hub._FIRST_PAUSE", 0.01)
        yield served


def fetch(*arguments, **options):
    return fetch_from_hub(*arguments, **{"tag": None, "revision": None} | options)


def kept(tmp_path):
    return sorted(path.name for path in tmp_path.glob("hub/*/blobs/*"))


# --------------------------------------------------------------------------------------------------------------- choice

FULL = [
    "mmproj-F16.gguf", "imatrix_unsloth.gguf", "tiny-imatrix.gguf", "BF16/tiny-BF16-00001-of-00002.gguf",
    "BF16/tiny-BF16-00002-of-00002.gguf", "tiny-F16.gguf", "tiny-IQ4_XS.gguf", "tiny-Q2_K.gguf", "tiny-Q3_K_L.gguf",
    "tiny-Q3_K_M.gguf", "tiny-Q4_0.gguf", "tiny-Q4_K_M.gguf", "tiny-Q4_K_S.gguf", "tiny-Q5_K_M.gguf", "tiny-Q6_K.gguf",
    "tiny-Q8_0.gguf", "tiny-UD-Q4_K_XL.gguf", "tiny-UD-Q2_K_XL.gguf", "tiny-TQ1_0.gguf", "README.md",
]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "tag", "chosen"),
    [
        (FULL, None, "tiny-Q4_K_M.gguf"),
        (FULL, "q4_k_m", "tiny-Q4_K_M.gguf"),
        (FULL, "Q6_K", "tiny-Q6_K.gguf"),
        (FULL, "Q5", "tiny-Q5_K_M.gguf"),
        (FULL, "Q4_K_XL", "tiny-UD-Q4_K_XL.gguf"),
        (FULL, "UD-Q2_K_XL", "tiny-UD-Q2_K_XL.gguf"),
        (FULL, "UD-Q2", "tiny-UD-Q2_K_XL.gguf"),
        (FULL, "Q2_K", "tiny-Q2_K.gguf"),
        (FULL, "bf16", "BF16/tiny-BF16-00001-of-00002.gguf"),
        (FULL, "tq1_0", "tiny-TQ1_0.gguf"),
        (FULL, "tiny-Q3_K_L.gguf", "tiny-Q3_K_L.gguf"),
        (FULL, "tiny-BF16-00002-of-00002.gguf", "BF16/tiny-BF16-00001-of-00002.gguf"),
        (FULL, "TINY-q3_k_l.GGUF", "tiny-Q3_K_L.gguf"),
        (["old/tiny.gguf", "tiny.gguf"], "tiny.gguf", "tiny.gguf"),
        (["old/tiny.gguf", "tiny.gguf"], "OLD/tiny.gguf", "old/tiny.gguf"),
        (FULL, "mmproj-F16.gguf", "! no GGUF file for 'mmproj-F16.gguf'"),
        (FULL, "Q4_K", "! more than one GGUF file for 'Q4_K'"),
        (FULL, "Q3_K", "! more than one GGUF file for 'Q3_K'"),
        (FULL, "Q7", "! no GGUF file for 'Q7'"),
        (["a-Q4_0.gguf", "a-Q4_1.gguf.", "a-Q4_1.gguf", "a-Q8_0.gguf"], None, "a-Q4_1.gguf"),  # of these sizes
        (["a-Q8_0.gguf", "a-F16.gguf"], None, "a-Q8_0.gguf"),
        (["a-F16.gguf"], None, "a-F16.gguf"),
        (["model.gguf"], None, "model.gguf"),
        (["a-Q5_0.gguf", "a-F16.gguf"], None, "! more than one GGUF file"),
        (["UD-Q3_K_XL/a-UD-Q3_K_XL.gguf", "a-UD-Q4_K_XL.gguf"], None, "a-UD-Q4_K_XL.gguf"),
        (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], None, "! more than one GGUF file. It has: a-Q4_K_M"),
        (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], "Q4_K_M", "! for example org/name:a-Q4_K_M.gguf"),
        (["a.i1-IQ3_XXS.gguf", "a.i1-Q4_K_S.gguf"], None, "a.i1-Q4_K_S.gguf"),
        (["gpt-oss-20b-mxfp4.gguf"], "MXFP4", "gpt-oss-20b-mxfp4.gguf"),
        (["gemma-3-4b-it-q4_0.gguf"], "Q4_0", "gemma-3-4b-it-q4_0.gguf"),
        (["Q4_K_M/model.gguf", "Q8_0/model.gguf"], "q8_0", "Q8_0/model.gguf"),
        (["a-Q4_K_M-00001-of-00003.gguf", "a-Q4_K_M-00003-of-00003.gguf"], None, "! no GGUF file. It has: none"),
        (["README.md"], "Q4_0", "! no GGUF file for 'Q4_0'"),
    ],
)
def test_a_quantization_is_chosen_by_its_name_or_the_list_is_shown(names, tag, chosen):
    models = gguf_models(HubFile(name, 1000 + number) for number, name in enumerate(names))
    try:
        found = choose_gguf(models, tag, "org/name").files[0].path
    except ModelError as error:
        found = str(error)
    assert found == chosen or (chosen.startswith("! ") and chosen[2:] in found), found


# ------------------------------------------------------------------------------------------------------------- download


def test_a_model_is_served_by_its_quantization_from_the_hub(hub, tmp_path, monkeypatch):
    gguf = TinyGGUF(tmp_path / "t.gguf").add_weights(random_weights(TINY), "Q8_0").add_tokenizer().save()
    hub.repositories["org/tiny-GGUF"] = {"tiny-Q8_0.gguf": gguf.read_bytes(), NAME: BIG, "config.json": b"{}"}
    model = open_model("org/tiny-GGUF:q8_0")
    assert (model.name, model.config.hidden_size) == ("org/tiny-GGUF:Q8_0", 256)
    assert model.tokenizer.encode("a").ids == [ord("a")]
    assert {each.path for each in hub.transfers()} == {"/cdn/org/tiny-GGUF/tiny-Q8_0.gguf"}, "more was fetched"
    before = len(hub.transfers())
    open_model(f"org/tiny-GGUF:tiny-Q8_0.gguf@{COMMIT}")
    hub.status = 503
    assert open_model("org/tiny-GGUF:Q8_0").name == "org/tiny-GGUF:Q8_0", "the cache is used while the hub is down"
    assert len(hub.transfers()) == before


def test_the_revision_is_pinned(hub, tmp_path):
    other = "f" * 40
    hub.commits["v2"] = other
    path, _ = fetch("org/tiny-GGUF", revision="v2")
    assert path == tmp_path / "hub/models--org--tiny-GGUF/snapshots" / other / NAME
    with pytest.raises(ModelError, match="has no revision 'v3'"):
        fetch("org/tiny-GGUF", revision="v3")


def test_the_token_goes_to_the_hub_alone(hub, monkeypatch):
    hub.token = "secret"
    with pytest.raises(ModelError, match="no such repository on the hub .or it is private and HF_TOKEN is not set"):
        fetch("org/tiny-GGUF")
    monkeypatch.setenv("HF_TOKEN", "secret")
    fetch("org/tiny-GGUF")
    assert {each.authorization for each in hub.transfers()} == {None}
    assert {each.authorization for each in hub.requests if each.path.startswith("/org/")} == {"Bearer secret"}


def test_a_gated_repository_is_named(hub, monkeypatch, tmp_path):
    hub.gated, hub.token = True, "secret"
    for token in ("", "wrong"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(ModelError, match="org/tiny-GGUF is gated: accept its terms"):
            fetch("org/tiny-GGUF")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert fetch("org/tiny-GGUF")[0].read_bytes() == BIG


@pytest.mark.parametrize(
    "files", [{}, {"model.bin": BIG}, {"a-Q4_0-00001-of-00003.gguf": BIG, "a-Q4_0-00003-of-00003.gguf": BIG[1:]}]
)
def test_a_repository_without_a_whole_model_is_named(hub, tmp_path, files):
    hub.repositories["org/other"] = files
    with pytest.raises(ModelError, match=f"org/other has no model .* with all its parts. It has {len(files)} files"):
        fetch("org/other")
    assert kept(tmp_path) == []


def test_a_repository_that_is_not_there_is_named(hub):
    with pytest.raises(ModelError, match="There is no directory org/other here and no such repository"):
        fetch("org/other")


@pytest.mark.parametrize(("status", "message"), [(500, "answers 500"), (403, "answers 403 .* HF_TOKEN")])
def test_a_hub_that_refuses_is_named_with_its_status(hub, status, message):
    hub.status = status
    with pytest.raises(ModelError, match=message):
        fetch("org/tiny-GGUF", revision=COMMIT)


def test_a_transfer_that_breaks_goes_on_where_it_was(hub, tmp_path):
    hub.faults = ["break", "busy", "busy", "break", "break"]
    reports = []
    path, _ = fetch("org/tiny-GGUF", progress=lambda *report: reports.append(report))
    assert path.read_bytes() == BIG
    asked = [each.range for each in hub.transfers()]
    assert asked[0] == "bytes=0-2999999"
    begins = [int(each.removeprefix("bytes=").split("-")[0]) for each in asked]
    assert begins == sorted(begins)
    assert 0 < begins[1] == begins[2] == begins[3] < begins[4] < begins[5]
    assert reports[-1] == ("Downloading the model", 3_000_000, 3_000_000)
    assert [done for _, done, _ in reports] == sorted(done for _, done, _ in reports)


def test_a_server_without_ranges_is_read_again_and_the_bytes_are_right(hub):
    hub.faults, hub.ignores_ranges = ["break", "break"], True
    hub.break_after = 2_000_000
    assert fetch("org/tiny-GGUF")[0].read_bytes() == BIG


def test_a_server_that_sends_nothing_is_given_up_and_the_part_is_kept(hub, tmp_path):
    hub.faults, hub.after = ["break"], "busy"
    with pytest.raises(ModelError, match="hub answers 503"):
        fetch("org/tiny-GGUF")
    (part,) = kept(tmp_path)
    assert part.endswith(".headrace.incomplete")
    hub.after = ""
    assert fetch("org/tiny-GGUF")[0].read_bytes() == BIG
    assert not hub.transfers()[-1].range.startswith("bytes=0-")


def test_wrong_bytes_are_fetched_once_more(hub, caplog, tmp_path):
    hub.faults = ["damage"]
    with caplog.at_level(logging.WARNING):
        assert fetch("org/tiny-GGUF")[0].read_bytes() == BIG
    assert "was damaged in transfer" in caplog.text
    assert len(hub.transfers()) == 2


def test_wrong_bytes_twice_are_refused_and_nothing_is_kept(hub, tmp_path):
    hub.faults = ["damage", "damage"]
    with pytest.raises(ModelError, match=r"states the sha256 \w{64} of org/tiny-GGUF/tiny-Q4_K_M.gguf, and sent other"):
        fetch("org/tiny-GGUF")
    assert kept(tmp_path) == []
    hub.stated[NAME] = "0" * 64
    with pytest.raises(ModelError, match="states the sha256 0000"):
        fetch("org/tiny-GGUF")
    assert kept(tmp_path) == []


def test_a_part_that_was_damaged_on_disk_is_not_built_upon(hub, tmp_path):
    blobs = tmp_path / "hub/models--org--tiny-GGUF/blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(BIG).hexdigest()}.headrace.incomplete").write_bytes(bytes(1000))
    assert fetch("org/tiny-GGUF")[0].read_bytes() == BIG


def test_a_model_that_does_not_fit_on_the_disk_is_refused_before_a_byte(hub, tmp_path):
    hub.sizes[NAME] = 10**15
    with pytest.raises(
        ModelError, match=r"org/tiny-GGUF needs 1000000.00 GB in .*, which has .* free. Free disk space"
    ):
        fetch("org/tiny-GGUF")
    assert hub.transfers() == []


def test_all_parts_of_a_split_file_come(hub):
    parts = {f"a-Q4_0-{number:05}-of-00003.gguf": BIG[number:] for number in (1, 2, 3)}
    hub.repositories["org/split"] = parts
    path, name = fetch("org/split")
    assert name == "org/split:Q4_0"
    assert {each.name: each.read_bytes() for each in path.parent.iterdir()} == parts


def test_a_failure_ends_the_other_transfers(hub):
    hub.repositories["org/split"] = {f"a-Q4_0-{number:05}-of-00003.gguf": BIG[number:] for number in (1, 2, 3)}
    hub.stated["a-Q4_0-00002-of-00003.gguf"] = "0" * 64
    hub.pause, hub.chunk = 0.01, 100_000
    with pytest.raises(ModelError, match="00002-of-00003.gguf, and sent other bytes twice"):
        fetch("org/split")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("download")]


def test_safetensors_are_checked_too(hub, tmp_path):
    hub.repositories["org/plain"] = {"config.json": b"{}", "model.safetensors": BIG, "pytorch_model.bin": BIG[1:]}
    path, name = fetch("org/plain")
    assert (path / "model.safetensors").read_bytes() == BIG
    assert {each.name for each in path.iterdir()} == {"config.json", "model.safetensors"}
    assert name == "org/plain"
    hub.repositories["org/wrong"] = {"config.json": b"{}", "model.safetensors": BIG[2:]}
    hub.faults = ["damage", "damage"]
    with pytest.raises(ModelError, match="sent other bytes twice"):
        fetch("org/wrong")


def test_without_weights_no_weights_are_fetched(hub):
    hub.repositories["org/plain"] = {"config.json": b"{}", "model.safetensors": BIG}
    fetch("org/plain", with_weights=False)
    assert hub.transfers() == []


def test_models_that_are_here_are_listed_by_the_names_that_serve_them(hub, tmp_path):
    hub.repositories["org/plain"] = {"config.json": b"{}", "model.safetensors": BIG}
    hub.commits["v2"] = "f" * 40
    assert list(models_here(tmp_path)) == []
    fetch("org/tiny-GGUF", revision="v2")
    fetch("org/plain")
    hub.repositories["org/partial"] = {"x-Q8_0.gguf": BIG[1:]}
    hub.faults, hub.after = ["break"], "busy"
    with pytest.raises(ModelError):
        fetch("org/partial")
    (name, size, state), *complete = models_here(tmp_path)
    assert (name, state) == ("org/partial", "partly fetched")
    assert 0 < size <= 500_000
    assert complete == [("org/plain", 3_000_000, "complete"), ("org/tiny-GGUF:Q4_K_M@v2", 3_000_000, "complete")]
