"""A GGUF file in several parts, as the `gguf` library writes them, is the file that they were cut from."""

import shutil

import numpy as np
import pytest

from gpu.checkpoint import ModelError, model_digest, open_model, weight_paths
from gpu.checkpoint.gguf_file import GGUFFile
from gpu.kv_tiers.opening import digest_of_weights
from gpu.weights.reading import floats, read_weights
from tests.gpu.checkpoint_files import TINY, TinyGGUF, random_weights

NAMES = [f"m-{number:05}-of-00004.gguf" for number in range(1, 5)]


@pytest.fixture
def split(tmp_path):
    return write(tmp_path, small_first_shard=False)


def write(folder, *, small_first_shard):
    gguf = TinyGGUF(folder / "m.gguf")
    gguf.writer.split_max_tensors = 7 if small_first_shard else 6
    gguf.writer.tensors += [{}] * small_first_shard  # the writer's own way: the first part has metadata alone
    gguf.add_weights(random_weights(TINY), "Q8_0").add_tokenizer().save()
    return folder


def whole(folder):
    folder.mkdir()
    return TinyGGUF(folder / "m.gguf").add_weights(random_weights(TINY), "Q8_0").add_tokenizer().save()


@pytest.mark.parametrize("small_first_shard", [False, True])
def test_any_part_opens_the_whole_model(tmp_path, small_first_shard):
    write(tmp_path, small_first_shard=small_first_shard)
    other = open_model(str(whole(tmp_path / "whole")))
    names = sorted(path.name for path in tmp_path.glob("m-*"))
    assert len(names) == 4
    digests = set()
    for name in names:
        model = open_model(str(tmp_path / name))
        assert model.config == other.config
        assert model.tokenizer.to_str() == other.tokenizer.to_str()
        for (ours, weight), (theirs, expected) in zip(read_weights(model), read_weights(other), strict=True):
            assert ours == theirs
            np.testing.assert_array_equal(floats(weight), floats(expected))
        assert [path.name for path in weight_paths(model)] == names
        digests.add(model_digest(model))
    assert len(digests) == 1


def test_a_change_in_any_part_is_another_model(split):
    before = model_digest(open_model(str(split / NAMES[0])))
    model = open_model(str(split / NAMES[0]))
    last = split / NAMES[3]
    content = bytearray(last.read_bytes())
    content[-100] ^= 1
    last.write_bytes(content)
    assert model_digest(open_model(str(split / NAMES[0]))) != before
    with pytest.raises(OSError, match="files were changed"):
        digest_of_weights(model)()


@pytest.mark.parametrize("named", [0, 1])
def test_a_missing_part_is_named(split, named):
    (split / NAMES[2]).unlink()
    with pytest.raises(ModelError, match="lacks m-00003-of-00004.gguf, one of the 4 parts"):
        open_model(str(split / NAMES[named]))


def test_parts_in_the_wrong_order_are_refused(split):
    shutil.copy(split / NAMES[1], split / NAMES[2])
    with pytest.raises(ModelError, match="m-00003-of-00004.gguf: by its name split.no must be 2, got 1"):
        open_model(str(split / NAMES[0]))


def test_a_part_of_another_model_is_refused(split, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    gguf = TinyGGUF(other / "m.gguf")
    gguf.writer.split_max_tensors = 6
    weights = random_weights(TINY)
    gguf.add_weights(dict(reversed(weights.items())), "Q8_0").add_tokenizer().save()
    shutil.copy(other / NAMES[3], split / NAMES[3])
    with pytest.raises(ModelError, match="another part has the tensor"):
        GGUFFile(split / NAMES[0])


def test_a_part_under_another_name_is_refused(split):
    shutil.copy(split / NAMES[0], split / "first.gguf")
    with pytest.raises(ModelError, match="first.gguf is one of 4 parts, and the others cannot be found by this name"):
        open_model(str(split / "first.gguf"))


def test_a_name_like_that_of_a_part_alone_makes_no_parts(tmp_path):
    path = TinyGGUF(tmp_path / "m-00001-of-00002.gguf").add_weights(random_weights(TINY)).add_tokenizer().save()
    assert open_model(str(path)).config.hidden_size == 256
