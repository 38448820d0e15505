"""The GGUF container: every supported tensor type is read right, and no damage to a file goes unseen."""

import struct

import gguf
import numpy as np
import pytest

from gpu.checkpoint import ModelError, open_model
from gpu.checkpoint.gguf_file import GGUFFile
from gpu.checkpoint.quantized_rows import TENSOR_TYPES
from tests.gpu.checkpoint.test_quantized_rows import SCALES
from tests.gpu.checkpoint_files import ALPHABET, TINY, TinyGGUF, random_weights

# The largest error of one element, as a share of its block's largest magnitude (F16, BF16: of its own): half a step,
# or a whole one for the symmetric kinds, whose largest value is clipped. 2 ** -10 is for the 16-bit scales.
ERROR_BOUNDS = {
    "F32": 0.0,
    "F16": 2**-11,
    "BF16": 2**-8,
    "Q4_0": 1 / 8 + 2**-10,
    "Q4_1": 1 / 15 + 2**-9,
    "Q5_0": 1 / 16 + 2**-10,
    "Q5_1": 1 / 31 + 2**-9,
    "Q8_0": 0.5 / 127 + 2**-10,
    "MXFP4": 1 / 4,
}


def write_tensor(path, packed, kind):
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("x.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


@pytest.mark.parametrize("name", ERROR_BOUNDS)
def test_a_quantized_tensor_is_read_within_the_error_of_its_type(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    values = (np.random.default_rng(1).standard_normal((24, 128)) * 3).astype(np.float32)
    file = write_tensor(tmp_path / "x.gguf", gguf.quants.quantize(values, kind), kind)

    read = file.read("x.weight")

    assert read.dtype == np.float32
    assert read.shape == values.shape
    assert read.flags.writeable
    block = 1 if name in {"F16", "BF16"} else 32
    largest = np.abs(values).reshape(-1, block).max(axis=1, keepdims=True)
    errors = np.abs(read - values).reshape(-1, block)
    assert (errors <= largest * ERROR_BOUNDS[name]).all()


def q4_k(block):
    """As in dequantize_row_q4_K of ggml, one element at a time: 8 groups of 32, each with a 6-bit scale and minimum."""
    scale, minimum, scales, quants = *np.frombuffer(block[:4], np.float16).astype(float), block[4:16], block[16:]
    return [
        scale * six_bit(scales, group)[0] * (quants[group // 2 * 32 + i] >> 4 * (group % 2) & 15)
        - minimum * six_bit(scales, group)[1]
        for group in range(8)
        for i in range(32)
    ]


def q5_k(block):
    """As Q4_K, with the fifth bits in a plane of their own."""
    scale, minimum = np.frombuffer(block[:4], np.float16).astype(float)
    scales, high, quants = block[4:16], block[16:48], block[48:]
    return [
        scale
        * six_bit(scales, group)[0]
        * ((quants[group // 2 * 32 + i] >> 4 * (group % 2) & 15) + 16 * (high[i] >> group & 1))
        - minimum * six_bit(scales, group)[1]
        for group in range(8)
        for i in range(32)
    ]


def six_bit(scales, group):
    if group < 4:
        return scales[group] & 63, scales[group + 4] & 63
    return (
        scales[group + 4] & 15 | scales[group - 4] >> 6 << 4,
        scales[group + 4] >> 4 | scales[group] >> 6 << 4,
    )


def q6_k(block):
    """As in dequantize_row_q6_K of ggml: two halves of 128, four runs of 32 in each, a signed scale for every 16."""
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8).astype(int)
    scale = float(np.frombuffer(block[208:], np.float16)[0])
    values = []
    for half in range(2):
        for run in range(4):
            for i in range(32):
                four = low[half * 64 + run % 2 * 32 + i] >> 4 * (run // 2) & 15
                two = high[half * 32 + i] >> 2 * run & 3
                values.append(scale * scales[half * 8 + run * 2 + i // 16] * ((four | two << 4) - 32))
    return values


@pytest.mark.parametrize(("name", "reference"), [("Q4_K", q4_k), ("Q5_K", q5_k), ("Q6_K", q6_k)])
def test_a_k_quant_is_read_as_its_definition_says(tmp_path, name, reference):
    kind = gguf.GGMLQuantizationType[name]
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(2).integers(0, 256, (6, block_bytes), dtype=np.uint8)
    sixteen_bit_scales = slice(208, 210) if name == "Q6_K" else slice(0, 4)
    blocks[:, sixteen_bit_scales] = np.full((6, blocks[:, sixteen_bit_scales].shape[1] // 2), 0.0123, np.float16).view(
        np.uint8
    )

    read = write_tensor(tmp_path / "x.gguf", blocks.reshape(3, -1), kind).read("x.weight")

    expected = np.array([reference(block.tobytes()) for block in blocks]).reshape(3, 512)
    np.testing.assert_allclose(read, expected, rtol=1e-5, atol=1e-6)


def test_every_supported_type_is_tested():
    assert {kind.name for kind in TENSOR_TYPES} == {*ERROR_BOUNDS, "Q2_K", "Q4_K", "Q5_K", "Q6_K", *SCALES}


def test_metadata_reads_as_the_gguf_library_reads_it(tmp_path):
    path = (
        TinyGGUF(tmp_path / "m.gguf")
        .add_tokenizer(tokens=[*ALPHABET, "Ġt"], merges=["t h", "Ġ t"])
        .add_weights(random_weights(TINY))
        .save()
    )
    theirs = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}

    ours = GGUFFile(path).metadata

    assert ours == {key: value for key, value in theirs.items() if not key.startswith("GGUF.")}


def test_packed_blocks_are_those_of_the_file(tmp_path):
    kind = gguf.GGMLQuantizationType.Q4_0
    packed = gguf.quants.quantize(np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32), kind)

    file = write_tensor(tmp_path / "x.gguf", packed, kind)

    np.testing.assert_array_equal(file.packed("x.weight"), packed)


def test_an_unsupported_tensor_type_names_itself_the_tensor_and_what_is_supported(tmp_path):
    kind = gguf.GGMLQuantizationType.NVFP4
    packed = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    with pytest.raises(ModelError, match=r"tensor 'x\.weight' has the type NVFP4; supported are F32, F16, BF16, Q4_0"):
        write_tensor(tmp_path / "x.gguf", packed, kind)


@pytest.fixture
def tiny(tmp_path):
    return TinyGGUF(tmp_path / "m.gguf").add_tokenizer().add_weights(random_weights(TINY)).save()


def test_no_truncation_goes_unseen(tiny):
    whole = tiny.read_bytes()
    data_start = min(tensor.offset for tensor in GGUFFile(tiny).tensors.values())
    padding = -len(whole) % 32  # the writer may pad the last tensor
    cuts = [
        0,
        1,
        3,
        4,
        7,
        8,
        15,
        23,
        *range(24, data_start, 97),
        data_start,
        len(whole) // 2,
        len(whole) - 33 - padding,
    ]
    for cut in cuts:
        tiny.write_bytes(whole[:cut])
        with pytest.raises(ModelError, match=r"m\.gguf cannot be read: it is empty" if cut == 0 else r"m\.gguf"):
            open_model(str(tiny))


@pytest.mark.seconds
def test_damaged_headers_end_in_a_model_error(tiny):
    """Whatever bytes of the header are overwritten, the answer is a model that could be described or a `ModelError`."""
    whole = tiny.read_bytes()
    data_start = min(tensor.offset for tensor in GGUFFile(tiny).tensors.values())
    generator = np.random.default_rng(4)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for position in generator.integers(0, data_start, 3):
            damaged[position] = generator.integers(0, 256)
        tiny.write_bytes(damaged)
        try:
            open_model(str(tiny)).tokenizer  # noqa: B018
        except ModelError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("position", "content", "message"),
    [
        (0, b"PK\x03\x04", "begins with b'PK"),
        (4, struct.pack("<I", 1), "version 1 "),
        (4, struct.pack(">I", 3), "version 50331648 "),
        (8, struct.pack("<Q", 2**60), "not a GGUF file that can be read"),
        (16, struct.pack("<Q", 2**60), "not a GGUF file that can be read"),
        (24, struct.pack("<Q", 2**63), "runs past its end"),
    ],
)
def test_a_wrong_header_says_what_is_wrong(tiny, position, content, message):
    damaged = bytearray(tiny.read_bytes())
    damaged[position : position + len(content)] = content
    tiny.write_bytes(damaged)
    with pytest.raises(ModelError, match=message):
        GGUFFile(tiny)


def test_a_file_that_was_cut_off_anywhere_is_said_to_be_incomplete(tiny):
    whole = tiny.read_bytes()
    for size in (*range(5, len(whole) - 1, len(whole) // 40), len(whole) - 1):
        tiny.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"incomplete or damaged; download it again") as refused:
            GGUFFile(tiny)
        assert f"{size:,} bytes" in str(refused.value)


def test_a_claim_of_many_strings_is_refused_before_memory_is_taken(tmp_path):
    key = b"tokenizer.ggml.tokens"
    path = tmp_path / "bomb.gguf"
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<IIQ", 9, 8, 2**40) + bytes(64)
    )
    with pytest.raises(ModelError, match=r"claims 1,099,511,627,776 strings"):
        GGUFFile(path)
