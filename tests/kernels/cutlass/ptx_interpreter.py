"""Runs PTX on a CPU, warp by warp: as much of it as grouped GEMMs for SM90 and SM100 compile to.

What instructions do is from the PTX ISA 9.0 manual: fragments of wgmma and stmatrix, the 128-byte
swizzle, mbarriers, tensor memory and the scales in it. MMAs, copies and TMA are done when they are
issued and sums are float32, so this finds wrong addresses, layouts, masks and deadlocks, and
neither races nor what the hardware rounds.
"""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np
import torch

LANES = np.arange(32)
E4M3, E8M0 = (
    torch.arange(256, dtype=torch.uint8).view(dtype).float().nan_to_num(torch.nan).numpy()
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu)
)
E2M1 = np.array([s * m for s in (1, -1) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)
SHARED_BASE = 1024  # not 0, so that an address without it is out of range
WIDTHS = {"b64": 64, "s64": 64, "u64": 64, "b16": 16, "s16": 16, "u16": 16, "s8": 8, "pred": 1}
NOTHING = ("wgmma.fence", "wgmma.commit", "wgmma.wait", "setmaxnreg", "griddepcontrol", "fence.")


class TensorMap:
    """A TMA descriptor of [rows, columns], one byte or int64; what lies outside reads as 0.

    Boxes of bytes have the 128-byte swizzle, others lie as they are.
    """

    def __init__(self, tensor, box):
        self.tensor, self.size_bytes = tensor.view(torch.uint8).numpy(), tensor.itemsize
        self.rows, self.columns_bytes = box[0], box[1] * self.size_bytes
        self.swizzled = self.size_bytes == 1


class Memory:
    """Global memory: tensors at addresses far apart; an access outside of one is an error."""

    def __init__(self):
        self.tensors = []

    def place(self, tensor):
        self.tensors.append(tensor.view(torch.uint8).reshape(-1).numpy())
        return len(self.tensors) << 40

    def __call__(self, address, size):
        at = address & ((1 << 40) - 1)
        tensor = self.tensors[(address >> 40) - 1]
        assert address % size == 0, f"an address that is no multiple of {size}"
        assert at + size <= tensor.size, f"access to byte {at + size} of {tensor.size}"
        return tensor[at : at + size]


class Barrier:
    """An mbarrier."""

    def __init__(self, count):
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def arrive(self, arrivals=0, expected=0):
        self.bytes += expected
        self.pending -= arrivals
        assert self.pending >= 0
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


def instructions(ptx):
    """[(predicate or None, opcode, operands)], and the index that each label stands for."""
    lines = iter(ptx[ptx.index(".entry") :].splitlines())
    next(line for line in lines if line == "{")
    code, labels, scopes, scope = [], {}, [""], 0
    for line in lines:
        text = line.partition("//")[0].strip()
        if text == "{":
            scope += 1
            scopes.append(f"#{scope}")
        elif text == "}":
            scopes.pop()
        elif text.endswith(":"):
            labels[text[:-1] + ("" if text[0] == "$" else scopes[-1])] = len(code)
        elif text and not text.startswith("."):
            found = re.fullmatch(r"(?:@(!?[%\w]+)\s+)?([\w.:]+)\s*(.*);", text)
            assert found, text
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s|]+", found[3])
            if found[2].startswith("bra") and operands[0][0] != "$":
                operands[0] += scopes[-1]
            code.append((found[1], found[2], operands))
    return code, labels


class Cta:
    """A CTA: its code, shared memory and barriers."""

    def __init__(self, program, parameters, memory, *, threads, shared_bytes, block, grid):
        self.code, self.labels = program
        self.parameters, self.memory = parameters, memory
        self.block, self.grid, self.threads = block, grid, threads
        self.shared = np.full(SHARED_BASE + shared_bytes, 0xFF, dtype=np.uint8)
        self.barriers, self.waiting = {}, defaultdict(set)
        # Of SM100: 128 lanes of 512 words, in use from alloc to dealloc.
        self.tensor_memory, self.allocated = np.full((128, 512), 0xFFFFFFFF, dtype=np.uint32), 0

    def run(self):
        """Each warp as far as it comes, in turn."""
        warps = [Warp(self, index) for index in range(self.threads // 32)]
        while any(warp.alive() for warp in warps):
            moved = [warp.advance() for warp in warps if warp.alive()]
            assert any(moved), "deadlock"
        assert not self.allocated, "tensor memory that is not freed"


class Warp:
    """32 lanes with an instruction counter each; the lanes furthest behind go first."""

    def __init__(self, cta, index):
        self.cta, self.index = cta, index
        self.at = np.zeros(32, dtype=np.int64)
        self.registers = defaultdict(lambda: np.zeros(32, dtype=np.uint64))
        self.passed = None

    def alive(self):
        return bool((self.at < len(self.cta.code)).any())

    def advance(self):
        """Run until all lanes have ended or wait; whether any instruction was run."""
        moved = False
        while self.alive():
            at = int(self.at.min())
            self.mask = self.at == at
            predicate, opcode, operands = self.cta.code[at]
            if predicate:
                holds = self.value(predicate.lstrip("!")) != 0
                self.mask &= holds ^ (predicate[0] == "!")
            where = self.mask.copy()
            active = self.at == at
            target = self.execute(opcode, operands) if where.any() else at + 1
            if target is None:
                return moved  # has to wait
            self.at[active] = at + 1
            self.at[where] = target
            moved = True
        return moved

    def value(self, operand):
        """Of a register, special register, number or address, [32] uint64."""
        if operand.endswith(".x"):
            place = {"%tid.x": 32 * self.index + LANES, "%ctaid.x": self.cta.block}
            place["%nctaid.x"] = self.cta.grid
            return np.broadcast_to(place[operand], 32).astype(np.uint64)
        if operand == "%cluster_ctarank":
            return np.zeros(32, dtype=np.uint64)
        if operand[0] == "%" or operand in ("p", "P1"):
            return self.registers[operand]
        if operand == "__dynamic_shmem__0":
            return np.full(32, SHARED_BASE, dtype=np.uint64)
        if match := re.search(r"_param_(\d+)$", operand):
            return np.full(32, int(match[1]), dtype=np.uint64)
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
        return np.full(32, number & (2**64 - 1), dtype=np.uint64)

    def signed(self, operand, width):
        shift = np.uint64(64 - width)
        return (self.value(operand) << shift).view(np.int64) >> np.int64(64 - width)

    def floats(self, operand):
        return self.value(operand).astype(np.uint32).view(np.float32)

    def put(self, register, value, width=64):
        value = np.asarray(value)
        bits = value.astype(np.int64).view(np.uint64) if value.dtype != np.uint64 else value
        if width < 64:
            bits = bits & np.uint64((1 << width) - 1)
        self.registers[register] = np.where(self.mask, bits, self.registers[register])

    def put_floats(self, register, value):
        self.put(register, value.astype(np.float32).view(np.uint32).astype(np.uint64))

    def address(self, operand):
        base, _, offset = operand.strip("[]").partition("+")
        return [int(a) + int(offset or 0) for a in self.value(base)]

    def lanes(self):
        return np.flatnonzero(self.mask)

    def execute(self, opcode, operands):
        """Run an instruction for the lanes of `mask`; where they go on, None to wait."""
        after = int(self.at[self.mask][0]) + 1
        name, *kinds = opcode.split(".")
        if opcode.startswith(NOTHING):
            return after
        if name == "bra":
            return self.cta.labels[operands[0]]
        if name == "ret":
            return len(self.cta.code)
        if name == "bar":
            return after if self.synchronize(operands) else None
        if opcode.startswith("mbarrier.try_wait"):
            return after if self.completed(operands) else None
        special = {
            "mbarrier": self.mbarrier, "cp": self.load_box, "wgmma": self.multiply,
            "stmatrix": self.store_matrices, "ld": self.load, "st": self.store,
            "shfl": self.shuffle, "elect": self.elect, "mov": self.move, "cvt": self.convert,
            "setp": self.compare, "tcgen05": self.tensor_core,
            "cvta": lambda kinds, o: self.put(o[0], self.value(o[1])),
        }  # fmt: skip
        if name in special:
            special[name](kinds, operands)
        elif kinds[-1] == "f32":
            a, b, *c = (self.floats(o).astype(np.float64) for o in operands[1:])
            result = {"add": a + b, "mul": a * b, "fma": a * b + (c[0] if c else 0)}
            self.put_floats(operands[0], result[name])
        else:
            self.compute(name, kinds, operands)
        return after

    def compute(self, name, kinds, operands):
        """Integers."""
        width = WIDTHS.get(kinds[-1], 32)
        to, *rest = operands
        if name == "selp":
            self.put(to, np.where(self.value(rest[2]) != 0, *map(self.value, rest[:2])), width)
            return
        if name == "shr" and kinds[-1][0] == "u":
            self.put(to, (self.value(rest[0]) & np.uint64((1 << width) - 1)) >> self.value(rest[1]))
            return
        a, *others = (self.signed(o, width) for o in rest)
        b = others[0] if others else None
        result = {
            "add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b,
            "mad": lambda: a * b + others[1], "neg": lambda: -a, "not": lambda: ~a,
            "div": lambda: (np.abs(a) // np.abs(b)) * np.sign(a) * np.sign(b),
            "rem": lambda: (np.abs(a) % np.abs(b)) * np.sign(a),
            "min": lambda: np.minimum(a, b), "and": lambda: a & b, "or": lambda: a | b,
            "xor": lambda: a ^ b, "shl": lambda: a << b, "shr": lambda: a >> b,
        }[name]()  # fmt: skip
        self.put(to, result, 2 * width if "wide" in kinds else width)

    def compare(self, kinds, operands):
        relation, kind = kinds
        a, b = (
            self.value(o) & np.uint64(0xFFFFFFFF) if kind[0] == "u" else self.signed(o, 32)
            for o in operands[1:]
        )
        relations = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal"}
        relations |= {"gt": "greater", "ge": "greater_equal"}
        self.put(operands[0], getattr(np, relations[relation])(a, b))

    def move(self, kinds, operands):
        (to, source), width = operands, WIDTHS.get(kinds[0], 32)
        half = np.uint64(width // 2)
        if source[0] == "{":
            low, high = (self.value(o) for o in re.findall(r"%\w+", source))
            self.put(to, low | (high << half), width)
        elif to[0] == "{":
            for i, part in enumerate(re.findall(r"[%\w]+", to)):
                if part != "_":
                    self.put(part, self.value(source) >> half * np.uint64(i), int(half))
        else:
            self.put(to, self.value(source), width)

    def convert(self, kinds, operands):
        if kinds == ["rn", "bf16x2", "f32"]:
            high, low = (torch.from_numpy(self.floats(o).copy()) for o in operands[1:])
            pair = torch.stack([low, high], 1).bfloat16().view(torch.int32)
            self.put(operands[0], pair.flatten().numpy(), 32)
            return
        if kinds == ["rn", "bf16", "f32"]:
            number = torch.from_numpy(self.floats(operands[1]).copy()).bfloat16()
            self.put(operands[0], number.view(torch.int16).numpy(), 16)
            return
        to, source = kinds
        width = WIDTHS.get(source, 32)
        value = self.value(operands[1]) & np.uint64((1 << width) - 1 if width < 64 else 2**64 - 1)
        if source[0] == "s":
            value = self.signed(operands[1], width)
        self.put(operands[0], value, WIDTHS.get(to, 32))

    def shuffle(self, kinds, operands):
        assert self.mask.all()
        self.put(operands[0], self.value(operands[1])[int(self.value(operands[2])[0])])

    def elect(self, kinds, operands):
        self.put(operands[0], 0)
        self.put(operands[1], self.lanes()[0] == LANES)

    def load(self, kinds, operands):
        to = re.findall(r"%\w+", operands[0])
        if kinds[0] == "param":
            self.put(to[0], self.cta.parameters[int(re.search(r"_param_(\d+)", operands[1])[1])])
            return
        for lane in self.lanes():
            data = self.bytes_at(kinds[0], self.address(operands[1])[lane], 4 * len(to))
            for register, word in zip(to, data.view(np.uint32), strict=True):
                # Its array is this warp's alone after a first write by `put`.
                self.registers[register] = self.registers[register].copy()
                self.registers[register][lane] = word

    def store(self, kinds, operands):
        values = [self.value(o) for o in re.findall(r"%\w+", operands[1])]
        for lane in self.lanes():
            words = np.array([int(v[lane]) for v in values], dtype=np.uint32)
            at = self.address(operands[0])[lane]
            self.bytes_at(kinds[0], at, 4 * len(values))[:] = words.view(np.uint8)

    def bytes_at(self, space, address, size):
        if space == "global":
            return self.cta.memory(address, size)
        assert address % size == 0
        assert SHARED_BASE <= address <= self.cta.shared.size - size
        return self.cta.shared[address : address + size]

    def mbarrier(self, kinds, operands):
        is_arrival = kinds[0] == "arrive"
        places = [o for o in operands if o[0] == "["]
        for lane in self.lanes():
            at = self.address(places[0])[lane]
            if kinds[0] == "init":
                self.cta.barriers[at] = Barrier(int(self.value(operands[1])[lane]))
            else:
                assert is_arrival
                expected = int(self.value(operands[-1])[lane]) if "expect_tx" in kinds else 0
                self.cta.barriers[at].arrive(1, expected)

    def completed(self, operands):
        barrier = self.cta.barriers[self.address(operands[1])[self.lanes()[0]]]
        parity = int(self.value(operands[2])[self.lanes()[0]])
        done = barrier.phase != parity
        if done:
            self.put(operands[0], 1)
        return done

    def synchronize(self, operands):
        assert self.mask.all()
        threads = int(operands[1]) if len(operands) > 1 else self.cta.threads
        if self.passed is not None:
            done = self.index not in self.passed
        else:
            arrived = self.cta.waiting[operands[0]]
            arrived.add(self.index)
            self.passed = arrived
            done = 32 * len(arrived) == threads
            if done:
                self.cta.waiting[operands[0]] = set()
                arrived.clear()
        if done:
            self.passed = None
        return done

    def load_box(self, kinds, operands):
        """cp.async.bulk.tensor.2d."""
        (lane,) = self.lanes()
        to, barrier = self.address(operands[0])[lane], self.address(operands[2])[lane]
        source = re.fullmatch(r"\[(%\w+), \{(%\w+), (%\w+)\}\]", operands[1])
        tensor_map = self.cta.parameters[int(self.value(source[1])[lane])]
        column, row = (int(self.signed(source[i], 32)[lane]) for i in (2, 3))
        rows, columns = tensor_map.rows, tensor_map.columns_bytes
        first = column * tensor_map.size_bytes
        box = np.zeros((rows, columns), dtype=np.uint8)
        part = tensor_map.tensor[row : row + rows, first : first + columns]
        assert row >= 0
        assert column >= 0
        box[: part.shape[0], : part.shape[1]] = part
        at = to + np.arange(box.size)
        assert to >= SHARED_BASE
        assert to % 128 == 0
        self.cta.shared[swizzled(at) if tensor_map.swizzled else at] = box.reshape(-1)
        self.cta.barriers[barrier].arrive(expected=-box.size)

    def multiply(self, kinds, operands):
        """A warp's 16 rows of wgmma.mma_async, E4M3, both operands from shared memory."""
        assert self.mask.all()
        n = int(re.fullmatch(r"m64n(\d+)k32", kinds[3])[1])
        sums = re.findall(r"%\w+", operands[0])
        first = 16 * (self.index % 4)
        a = self.operand(operands[1], range(first, first + 16))
        b = self.operand(operands[2], range(n))
        product = E4M3[a] @ E4M3[b].T
        assert operands[4:] == ["1", "1"]
        keep = self.value(operands[3]) != 0
        for i, register in enumerate(sums):
            row, column = LANES // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (LANES % 4) + i % 2
            before = np.where(keep, self.floats(register), np.float32(0))
            self.put_floats(register, before + product[row, column])

    def operand(self, descriptor, rows):
        """[rows, 32] bytes that a shared memory descriptor names."""
        (bits,) = {int(v) for v in self.value(descriptor)[self.mask]}
        assert bits >> 62 == 1  # the 128-byte swizzle
        assert bits >> 49 & 7 == 0
        start, stride = (bits & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4
        row = np.array(rows)[:, None]
        at = start + row // 8 * stride + row % 8 * 128 + np.arange(32)
        return self.cta.shared[swizzled(at)]

    def tensor_core(self, kinds, operands):
        """tcgen05: tensor memory, and the MMA into it."""
        assert "cta_group::1" in kinds or kinds[0] in ("ld", "wait::ld")
        if "aligned" in kinds:
            assert self.mask.all()
        {
            "alloc": self.allocate, "dealloc": self.free, "cp": self.copy_scales,
            "mma": self.multiply_scaled, "commit": self.commit, "ld": self.load_sums,
            "relinquish_alloc_permit": lambda *_: None, "wait::ld": lambda *_: None,
        }[kinds[0]](kinds, operands)  # fmt: skip

    def allocate(self, kinds, operands):
        assert not self.cta.allocated
        self.cta.allocated = int(self.value(operands[1])[0])
        assert self.cta.allocated in (32, 64, 128, 256, 512)
        self.bytes_at("shared", self.address(operands[0])[0], 4)[:] = 0

    def free(self, kinds, operands):
        assert [int(self.value(o)[0]) for o in operands] == [0, self.cta.allocated]
        self.cta.allocated = 0

    def commit(self, kinds, operands):
        """What the thread issued is done, so the barrier gets its arrival now."""
        (lane,) = self.lanes()
        self.cta.barriers[self.address(operands[0])[lane]].arrive(1)

    def of_one_lane(self, operand):
        """The value of a register or address for the one active lane."""
        (lane,) = self.lanes()
        return self.address(operand)[lane]

    def words(self, address, columns, lanes=slice(None)):
        """[lanes, columns] of tensor memory, a view."""
        first = address & 0xFFFF
        assert first + columns <= self.cta.allocated
        return self.cta.tensor_memory[lanes, first : first + columns]

    def copy_scales(self, kinds, operands):
        """32 rows of 16 bytes, to every 32 lanes."""
        assert kinds[2:] == ["32x128b", "warpx4"]
        to, bits = (self.of_one_lane(o) for o in operands)
        assert bits >> 61 == 0  # no swizzle
        assert bits >> 46 & 7 == 1
        assert to >> 16 == 0
        start, stride = (bits & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4
        row = np.arange(32)[:, None]
        at = start + row // 8 * stride + row % 8 * 16 + np.arange(16)
        assert at.min() >= SHARED_BASE
        self.words(to, 4)[:] = np.tile(self.cta.shared[at].view(np.uint32), (4, 1))

    def multiply_scaled(self, kinds, operands):
        """128 x 128 x 64 of E2M1 with a scale for 16 or 32 columns."""
        assert "block_scale" in kinds
        groups = {"block16": 4, "scale_vec::4X": 4, "block32": 2, "scale_vec::2X": 2}[kinds[4]]
        descriptor = self.of_one_lane(operands[3])
        assert descriptor >> 31 == 0  # K is 64
        assert descriptor >> 17 & 0x3F == 128 // 8
        assert descriptor >> 27 & 3 == 128 // 128
        assert (descriptor >> 7 & 7, descriptor >> 10 & 3) == (1, 1)  # E2M1
        table = E8M0 if descriptor >> 23 & 1 else E4M3
        numbers = []
        for operand, scales, shift in ((1, 4, 29), (2, 5, 4)):
            codes = self.operand(operands[operand], range(128))
            pairs = np.stack([codes & 15, codes >> 4], -1).reshape(128, 64)
            first = descriptor >> shift & 3
            assert first % groups == 0
            place = self.of_one_lane(operands[scales])
            assert place >> 30 == first
            # Column j has the scales of rows 32 * j on, by lane, four to a word; every 32 lanes do.
            quarters = self.words(place, 4).reshape(4, 32, 4)
            assert (quarters == quarters[0]).all()
            scale = np.ascontiguousarray(quarters[0].T).view(np.uint8).reshape(128, 4)
            scale = table[scale[:, first : first + groups]]
            numbers.append(E2M1[pairs] * scale.repeat(64 // groups, 1))
        to = self.words(self.of_one_lane(operands[0]), 128).view(np.float32)
        (lane,) = self.lanes()
        before = to if self.value(operands[6])[lane] else np.float32(0)
        to[:] = before + numbers[0] @ numbers[1].T

    def load_sums(self, kinds, operands):
        """A word of each column for each lane, of the warp's own 32."""
        registers = re.findall(r"%\w+", operands[0])
        assert kinds[3:] == ["32x32b", f"x{len(registers)}", "b32"]
        (address,) = set(self.address(operands[1]))
        first = 32 * (self.index % 4)
        assert address >> 16 == first
        words = self.words(address, len(registers), slice(first, first + 32))
        for register, column in zip(registers, words.T, strict=True):
            self.put(register, column.astype(np.uint64))

    def store_matrices(self, kinds, operands):
        """stmatrix of 8 x 8 matrices, transposed."""
        assert self.mask.all()
        assert "trans" in kinds
        rows = self.address(operands[0])
        for matrix, register in enumerate(re.findall(r"%\w+", operands[1])):
            words = self.value(register)
            for lane in LANES:
                for half in range(2):
                    at = rows[8 * matrix + 2 * (lane % 4) + half]
                    assert at % 16 == 0
                    word = int(words[lane]) >> 16 * half & 0xFFFF
                    to = at + 2 * (lane // 4)
                    self.cta.shared[to : to + 2].view(np.uint16)[0] = word


def swizzled(address):
    """Where shared memory holds what the 128-byte swizzle has at `address`."""
    return address ^ ((address >> 7 & 7) << 4)
