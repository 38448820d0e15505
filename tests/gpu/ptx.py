"""A CUDA device for tests: executes what Triton compiles for Hopper, on CPU tensors, an instruction at a time.

Triton's interpreter computes what a kernel means; this computes what the compiler made of it: layouts, matrix
instructions of bfloat16, asynchronous copies, barriers. It is strict where a card may not be: an asynchronous copy
arrives when it is waited for and not before, warps run from barrier to barrier in any order, shared memory begins as
NaN, and no kernel reaches beyond its arguments. It knows the instructions that the kernels of a layer need. What it
cannot show: what becomes of PTX on the card, and time.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

Lanes = NDArray[Any]  # of one warp
WARP = 32
SHARED_BYTES = 227 * 1024
ALL = np.ones(WARP, dtype=bool)
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "min": np.fmin,
    "max": np.fmax,
    "div": lambda a, b: a / b if a.dtype.kind == "f" else np.trunc(a / b),
    "rem": np.fmod,
}
UNARY: dict[str, Callable[..., Any]] = {
    "neg": np.negative,
    "not": np.invert,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcp": lambda x: 1 / x,
}
COMPARE: dict[str, Callable[..., Any]] = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
COMPARE |= {"eq": np.equal, "ne": np.not_equal, "neu": np.not_equal}


def run_instead(kernel: JITFunction, *args: Any, grid: Any, warmup: bool = False, **keywords: Any) -> None:
    """In place of `JITFunction.run`: specialize and compile as a launch would, and execute all programs."""
    options = {name: keywords.pop(name) for name in ("num_warps", "num_stages") if name in keywords}
    given = dict(zip(kernel.arg_names, args, strict=False)) | keywords
    signature, constants, attributes, values, tensors = {}, {}, {}, [], []
    for index, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        whole = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            tensors.append(value)
        elif isinstance(value, float):
            signature[parameter.name], whole = "fp32", struct.unpack("I", struct.pack("f", value))[0]
        else:
            signature[parameter.name] = "i32"
        values.append(whole)
        if not isinstance(value, float) and whole % 16 == 0 and not parameter.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    program, memory = Program(compiled.asm["ptx"]), Memory(tensors)
    sizes = (*grid, 1, 1)[:3]
    for place in itertools.product(*(range(size) for size in sizes)):
        program.run(values, place, sizes, memory, options.get("num_warps", 4))


class Memory:
    """What a kernel may reach: the storages of its arguments."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._parts = []
        for storage in (tensor.untyped_storage() for tensor in tensors):
            start, size = storage.data_ptr(), storage.nbytes()
            self._parts.append((start, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))))

    def at(self, address: int, size: int) -> NDArray[np.uint8]:
        """These bytes, to read or to write."""
        for start, part in self._parts:
            if start <= address and address + size <= start + len(part):
                return part[address - start : address - start + size]
        raise AssertionError(f"{size} bytes at {address:#x} belong to no argument")


class Program:
    """A compiled kernel."""

    def __init__(self, ptx: str) -> None:
        body = ptx[ptx.index(".visible .entry") :].partition("\n}")[0]
        head, _, code = body.partition("{")
        self.parameters = re.findall(r"\.param [^\n]*?(\w+_param_\d+)", head)
        self.lines: list[str] = []
        self.labels: dict[str, int] = {}
        code = re.sub(r"//[^\n]*|^\s*\.(loc|reg|pragma)[^\n]*", "", code, flags=re.MULTILINE)
        for line in (" ".join(line.split()) for line in re.sub(r"(\$L\w+):", r"\1:;", code).split(";")):
            if line.endswith(":"):
                self.labels[line[:-1]] = len(self.lines)
            elif line:
                self.lines.append(line)

    def run(
        self, values: list[int], place: tuple[int, ...], sizes: tuple[int, ...], memory: Memory, num_warps: int
    ) -> None:
        shared = np.full(SHARED_BYTES, 0xFF, dtype=np.uint8)
        order = np.random.default_rng(sum(place))
        special = {
            f"%{name}.{axis}": np.full(WARP, number)
            for name, numbers in (("ctaid", place), ("nctaid", sizes))
            for axis, number in zip("xyz", numbers, strict=True)
        }
        special |= {name: np.full(WARP, value) for name, value in zip(self.parameters, values, strict=False)}
        special["global_smem"] = np.zeros(WARP, dtype=np.int64)
        warps = [
            Warp(self, memory, shared, special | {"%tid.x": np.arange(WARP) + WARP * number}).run()
            for number in range(num_warps)
        ]
        with np.errstate(all="ignore"):
            while warps:
                ended = [next(warps[index], None) is None for index in order.permutation(num_warps)]
                assert all(ended) or not any(ended), "a barrier that not all warps reach"
                if all(ended):
                    warps = []


class Warp:
    """Registers are uint64 [32], whatever they hold."""

    def __init__(self, program: Program, memory: Memory, shared: NDArray[np.uint8], special: dict[str, Lanes]) -> None:
        self.program, self.memory, self.shared = program, memory, shared
        self.registers: dict[str, Lanes] = {name: lanes.astype(np.uint64) for name, lanes in special.items()}
        self.copies: list[list[tuple[int, int, int, int]]] = [[]]

    def run(self) -> Iterator[bool]:
        """To the next barrier, each time."""
        place = 0
        while True:
            line = self.program.lines[place]
            place += 1
            guard = re.match(r"@(!?)(%\w+) (.*)", line)
            active = ALL
            if guard:
                active = self.registers[guard[2]].astype(bool) ^ bool(guard[1])
                line = guard[3]
            name, _, rest = line.replace("::cta", "").partition(" ")
            operands = [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)]
            if name in ("bra", "bra.uni"):
                assert active.all() or not active.any(), "a warp that parts"
                place = self.program.labels[operands[0]] if active.all() else place
            elif name == "bar.sync":
                yield True
            elif name == "ret":
                return
            else:
                self.execute(name.split("."), operands, active)

    def execute(self, name: list[str], operands: list[str], active: Lanes) -> None:
        kind, number = name[0], name[-1]
        special = getattr(self, f"_{'_'.join(name[:2])}", None) or getattr(self, f"_{kind}", None)
        if special is not None:
            special(name, operands, active)
        elif kind in BINARY and number in ("bf16", "bf16x2"):
            halves = [BINARY[kind](*(self.halves(operand, part) for operand in operands[1:])) for part in (0, 1)]
            self.set(operands[0], pack(*halves))
        elif kind in BINARY and "wide" in name:
            a, b = (self.get(operand, number).astype(widened(number)) for operand in operands[1:])
            self.set(operands[0], a * b)
        elif kind in BINARY:
            a, b = (self.get(operand, number) for operand in operands[1:])
            self.set(operands[0], BINARY[kind](a, b).astype(a.dtype))
        elif kind in UNARY:
            self.set(operands[0], UNARY[kind](self.get(operands[1], number)))
        else:
            raise NotImplementedError(f"{'.'.join(name)} {operands}")

    def get(self, operand: str, number: str) -> Lanes:
        """The lanes of an operand as numbers of a type of PTX."""
        if operand.startswith("0f"):
            lanes = np.full(WARP, int(operand.replace("0f", "0x"), 16), dtype=np.uint64)
        elif re.match(r"-?\d", operand):
            lanes = np.full(WARP, int(operand, 0) & (2**64 - 1), dtype=np.uint64)
        else:
            lanes = self.registers[operand]
        if number == "pred":
            return lanes.astype(bool)
        kind = dtype_of(number)
        return lanes.astype(f"u{kind.itemsize}").view(kind)

    def set(self, operand: str, lanes: Lanes, active: Lanes = ALL) -> None:
        lanes = (lanes if lanes.dtype == bool else lanes.view(f"u{lanes.itemsize}")).astype(np.uint64)
        before = self.registers.get(operand, np.zeros(WARP, dtype=np.uint64))
        self.registers[operand] = np.where(active, lanes, before)

    def halves(self, operand: str, part: int) -> Lanes:
        """One of the two bfloat16 of a register, as float32."""
        return ((self.get(operand, "b32") >> np.uint32(16 * part)) << np.uint32(16)).view(np.float32)

    def addresses(self, operand: str) -> list[int]:
        found = re.fullmatch(r"\[ ?([%\w.$]+?)(?: ?\+ ?(-?\d+))? ?\]", operand)
        assert found is not None, operand
        return [int(address) + int(found[2] or 0) for address in self.registers[found[1]]]

    def _ld_param(self, name: list[str], operands: list[str], active: Lanes) -> None:
        self.set(operands[0], self.registers[operands[1].strip("[]")])

    def _mov(self, name: list[str], operands: list[str], active: Lanes) -> None:
        target, source = (names_in(operand) for operand in operands)
        if len(target) == 2:
            for part, operand in enumerate(target):
                self.set(operand, self.get(source[0], "b32") >> np.uint32(16 * part) & np.uint32(0xFFFF))
        elif len(source) == 2:
            low, high = (self.get(operand, "b16").astype(np.uint32) for operand in source)
            self.set(target[0], low | high << np.uint32(16))
        else:
            self.set(target[0], self.get(source[0], name[-1]))

    def _mad(self, name: list[str], operands: list[str], active: Lanes) -> None:
        wide = widened(name[-1]) if "wide" in name else dtype_of(name[-1])
        a, b = (self.get(operand, name[-1]).astype(wide) for operand in operands[1:3])
        self.set(operands[0], a * b + self.get(operands[3], f"s{8 * wide.itemsize}").view(wide))

    def _fma(self, name: list[str], operands: list[str], active: Lanes) -> None:
        a, b, c = (self.get(operand, "f32").astype(np.float64) for operand in operands[1:])
        self.set(operands[0], (a * b + c).astype(np.float32))

    def _setp(self, name: list[str], operands: list[str], active: Lanes) -> None:
        self.set(operands[0], COMPARE[name[1]](*(self.get(operand, name[-1]) for operand in operands[1:])))

    def _selp(self, name: list[str], operands: list[str], active: Lanes) -> None:
        a, b = (self.get(operand, name[-1]) for operand in operands[1:3])
        self.set(operands[0], np.where(self.get(operands[3], "pred"), a, b))

    def _bfe(self, name: list[str], operands: list[str], active: Lanes) -> None:
        start, length = int(operands[2]), int(operands[3])
        moved = self.get(operands[1], name[-1]) << (32 - start - length)
        self.set(operands[0], moved >> (32 - length))

    def _cvt(self, name: list[str], operands: list[str], active: Lanes) -> None:
        to, source = name[-2:]
        if to == "bf16x2":
            self.set(operands[0], pack(self.get(operands[2], "f32"), self.get(operands[1], "f32")))
        elif to == "bf16":
            self.set(operands[0], pack(self.get(operands[1], "f32"), np.zeros(WARP, dtype=np.float32)))
        elif source == "bf16":
            self.set(operands[0], self.halves(operands[1], 0))
        else:
            self.set(operands[0], self.get(operands[1], source).astype(dtype_of(to)))

    def _shfl(self, name: list[str], operands: list[str], active: Lanes) -> None:
        lane, by = np.arange(WARP), self.get(operands[2], "s32")
        source = {"bfly": lane ^ by, "idx": by, "up": np.where(lane < by, lane, lane - by)}[name[2]]
        self.set(operands[0], self.get(operands[1], "b32")[source])

    def _place(self, name: list[str], address: int, size: int) -> NDArray[np.uint8]:
        if name[1] == "shared":
            return self.shared[address : address + size]
        return self.memory.at(address, size)

    def _ld(self, name: list[str], operands: list[str], active: Lanes) -> None:
        kind, addresses = dtype_of(name[-1]), self.addresses(operands[1])
        for index, target in enumerate(names_in(operands[0])):
            lanes = np.zeros(WARP, dtype=kind)
            for lane in np.flatnonzero(active):
                place = self._place(name, addresses[lane] + index * kind.itemsize, kind.itemsize)
                lanes[lane] = place.copy().view(kind)[0]
            self.set(target, lanes, active)

    def _st(self, name: list[str], operands: list[str], active: Lanes) -> None:
        kind, addresses = dtype_of(name[-1]), self.addresses(operands[0])
        for index, source in enumerate(names_in(operands[1])):
            lanes = self.get(source, name[-1])
            for lane in np.flatnonzero(active):
                place = self._place(name, addresses[lane] + index * kind.itemsize, kind.itemsize)
                place[:] = lanes[lane : lane + 1].view(np.uint8)

    def _cp_async(self, name: list[str], operands: list[str], active: Lanes) -> None:
        if name[2] == "commit_group":
            self.copies.append([])
        elif name[2] == "wait_group":
            while len(self.copies) > int(operands[0]) + 1:
                for target, source, taken, size in self.copies.pop(0):
                    self.shared[target : target + size] = 0
                    self.shared[target : target + taken] = self._place(["", "global"], source, taken) if taken else 0
        else:
            size = int(operands[2], 0)
            lengths = self.get(operands[3], "s32") if len(operands) > 3 else np.full(WARP, size)
            each = zip(self.addresses(operands[0]), self.addresses(operands[1]), lengths.tolist(), strict=True)
            self.copies[-1] += [(*one, size) for one, is_active in zip(each, active, strict=True) if is_active]

    def _ldmatrix(self, name: list[str], operands: list[str], active: Lanes) -> None:
        addresses = self.addresses(operands[1])
        for index, target in enumerate(names_in(operands[0])):
            rows = [self.shared[start : start + 16] for start in addresses[8 * index : 8 * index + 8]]
            matrix = np.stack(rows).view(np.uint16)
            self.set(target, np.ascontiguousarray(matrix.T if "trans" in name else matrix).view(np.uint32).ravel())

    def _stmatrix(self, name: list[str], operands: list[str], active: Lanes) -> None:
        assert "trans" not in name
        addresses = self.addresses(operands[0])
        for index, source in enumerate(names_in(operands[1])):
            matrix = self.get(source, "b32").reshape(8, 4)
            for start, row in zip(addresses[8 * index : 8 * index + 8], matrix, strict=True):
                self.shared[start : start + 16] = row.view(np.uint8)

    def _mma(self, name: list[str], operands: list[str], active: Lanes) -> None:
        assert name[3:] == ["m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32"]
        targets, *sources = (names_in(operand) for operand in operands)
        a, b = (self._quarters(registers) for registers in sources[:2])
        left = np.block([[a[0], a[2]], [a[1], a[3]]])
        right = np.vstack([b[0].T, b[1].T])
        c = [self.get(register, "f32").reshape(8, 4) for register in sources[2]]
        total = np.vstack([np.stack(c[:2], 2).reshape(8, 8), np.stack(c[2:], 2).reshape(8, 8)]) + left @ right
        for index, target in enumerate(targets):
            self.set(target, np.ascontiguousarray(total[index // 2 * 8 :][:8, index % 2 :: 2], np.float32).ravel())

    def _quarters(self, registers: list[str]) -> list[Lanes]:
        """Of each register the matrix of 8 x 8 that it is."""
        return [
            np.stack([self.halves(name, 0), self.halves(name, 1)], 1).reshape(8, 8).astype(float) for name in registers
        ]


def names_in(operand: str) -> list[str]:
    """One operand, or those of a vector."""
    return [part.strip() for part in operand.strip("{} ").split(",")]


def dtype_of(number: str) -> np.dtype[Any]:
    """`s32` and its like."""
    return np.dtype(f"{ {'s': 'i', 'u': 'u', 'b': 'u', 'f': 'f'}[number[0]] }{int(number[1:]) // 8}")


def widened(number: str) -> np.dtype[Any]:
    return dtype_of(f"{number[0]}64")


def pack(low: Lanes, high: Lanes) -> Lanes:
    """Two float32, rounded to bfloat16, in a register."""
    bits = [lanes.astype(np.float32).view(np.uint32).astype(np.uint64) for lanes in (low, high)]
    rounded = [
        (one + 0x7FFF + (one >> np.uint64(16) & np.uint64(1))) >> np.uint64(16) & np.uint64(0xFFFF) for one in bits
    ]
    return (rounded[0] | rounded[1] << np.uint64(16)).astype(np.uint32)
