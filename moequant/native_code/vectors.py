"""Functions on vectors, as LLVM IR: arithmetic on a `Value` writes the instruction that does it.

IR vectors are of any length; LLVM cuts them to what the processor has. No instruction here carries
a fast-math flag, so each is rounded as IEEE 754 says and gives what torch gives, on any processor.

The text is written here and not by `llvmlite.ir`, which takes 9 to 18 CPU ms for a format instead
of 1 to 2, and 57 instead of 4 from FP8 blocks to NVFP4, at the start of each conversion. It also
has no names for intrinsics on vectors, and refuses some uses of pointers that LLVM takes.
"""

from __future__ import annotations

import struct
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "float": 32, "double": 64, "ptr": 64}
_FLOATS = {"float": "f32", "double": "f64"}


@dataclass(frozen=True)
class Type:
    """Type of a value: `lanes` numbers side by side, or a plain number if that is 1."""

    element: str
    lanes: int = 1

    @property
    def is_float(self) -> bool:
        """Whether arithmetic is that of floating-point numbers."""
        return self.element in _FLOATS

    @property
    def bits(self) -> int:
        """Bits of a lane."""
        return _BITS[self.element]

    @property
    def suffix(self) -> str:
        """What the names of intrinsics end in."""
        element = _FLOATS.get(self.element, self.element)
        return element if self.lanes == 1 else f"v{self.lanes}{element}"

    def __str__(self) -> str:
        return self.element if self.lanes == 1 else f"<{self.lanes} x {self.element}>"


I32, I64, F32, F64, PTR = (Type(element) for element in ("i32", "i64", "float", "double", "ptr"))


@dataclass(frozen=True)
class Value:
    """A value of the function being written.

    Operands of one operation have one type; a Python number becomes it. Shifts to the right bring
    in zeros; comparisons give i1.
    """

    function: Function
    type: Type
    text: str

    def __add__(self, other: Value | float) -> Value:
        return self._binary("fadd" if self.type.is_float else "add", other)

    def __sub__(self, other: Value | float) -> Value:
        return self._binary("fsub" if self.type.is_float else "sub", other)

    def __mul__(self, other: Value | float) -> Value:
        return self._binary("fmul" if self.type.is_float else "mul", other)

    def __truediv__(self, other: Value | float) -> Value:
        assert self.type.is_float
        return self._binary("fdiv", other)

    def __floordiv__(self, other: Value | int) -> Value:
        return self._binary("udiv", other)

    def __and__(self, other: Value | int) -> Value:
        return self._binary("and", other)

    def __or__(self, other: Value | int) -> Value:
        return self._binary("or", other)

    def __xor__(self, other: Value | int) -> Value:
        return self._binary("xor", other)

    def __lshift__(self, other: int) -> Value:
        return self._binary("shl", other)

    def __rshift__(self, other: Value | int) -> Value:
        return self._binary("lshr", other)

    def __lt__(self, other: Value | float) -> Value:
        """Signed, for integers."""
        return self._compare("fcmp olt" if self.type.is_float else "icmp slt", other)

    def equals(self, other: Value | float) -> Value:
        """Whether it equals `other`; not `==`, which dataclasses use."""
        return self._compare("fcmp oeq" if self.type.is_float else "icmp eq", other)

    def where(self, condition: Value, other: Value | float) -> Value:
        """This where `condition` holds, `other` elsewhere."""
        chosen = self._same(other)
        return self.function.emit(
            self.type, f"select {condition.type} {condition.text}, {self.typed}, {chosen.typed}"
        )

    def umax(self, other: Value | int) -> Value:
        """The larger of unsigned integers."""
        return self._intrinsic("umax", other)

    def umin(self, other: Value | int) -> Value:
        """The smaller of unsigned integers."""
        return self._intrinsic("umin", other)

    def smax(self, other: Value | int) -> Value:
        """The larger of signed integers."""
        return self._intrinsic("smax", other)

    def clamp(self, low: float, high: float) -> Value:
        """Floats held between two numbers; no NaN."""
        above = self.where(self._same(low) < self, low)
        return above.where(above < high, high)

    def reduce(self, operation: str) -> Value:
        """All lanes joined by the intrinsic `operation`: umax or smax."""
        if self.type.lanes == 1:
            return self
        scalar = Type(self.type.element)
        name = f"llvm.vector.reduce.{operation}.{self.type.suffix}"
        return self.function.call(name, scalar, self)

    def halves(self) -> tuple[Value, Value]:
        """The lower and the upper half of the lanes."""
        half = self.type.lanes // 2
        return self.pick(range(half)), self.pick(range(half, 2 * half))

    def pick(self, lanes: Sequence[int], beside: Value | None = None) -> Value:
        """The named lanes, in that order; those of `beside` count on from the last of these."""
        mask = ", ".join(f"i32 {lane}" for lane in lanes)
        picked = Type(self.type.element, len(lanes))
        other = f"{self.type} poison" if beside is None else beside.typed
        if self.type.lanes == 1:
            return self.splat(len(lanes))
        if picked.lanes == 1:
            return self.function.emit(picked, f"extractelement {self.typed}, i32 {lanes[0]}")
        return self.function.emit(
            picked,
            f"shufflevector {self.typed}, {other}, <{len(lanes)} x i32> <{mask}>",
        )

    def beside(self, other: Value) -> Value:
        """These lanes, then as many of `other`."""
        return self.pick(range(2 * self.type.lanes), other)

    def splat(self, lanes: int) -> Value:
        """A number in every one of `lanes` lanes."""
        if lanes == 1:
            return self
        whole = Type(self.type.element, lanes)
        first = self.function.emit(whole, f"insertelement {whole} poison, {self.typed}, i32 0")
        return first.pick([0] * lanes)

    def bitcast(self, element: str) -> Value:
        """The same bits as numbers of type `element`; as many lanes as they make."""
        lanes = self.type.lanes * self.type.bits // _BITS[element]
        to = Type(element, lanes)
        return self.function.emit(to, f"bitcast {self.typed} to {to}")

    def to(self, element: str) -> Value:
        """Integers widened with zeros, cut, or made floats as if they had no sign.

        Floats are widened, or rounded to narrower ones.
        """
        to = replace(self.type, element=element)
        if to == self.type:
            return self
        assert to.is_float or not self.type.is_float
        wider = to.bits > self.type.bits
        if self.type.is_float:
            operation = "fpext" if wider else "fptrunc"
        else:
            operation = "uitofp" if to.is_float else "zext" if wider else "trunc"
        return self.function.emit(to, f"{operation} {self.typed} to {to}")

    @property
    def typed(self) -> str:
        """Type and name, as operands are written."""
        return f"{self.type} {self.text}"

    def _binary(self, operation: str, other: Value | float) -> Value:
        return self.function.emit(self.type, f"{operation} {self.typed}, {self._same(other).text}")

    def _compare(self, operation: str, other: Value | float) -> Value:
        to = replace(self.type, element="i1")
        return self.function.emit(to, f"{operation} {self.typed}, {self._same(other).text}")

    def _intrinsic(self, operation: str, other: Value | int) -> Value:
        name = f"llvm.{operation}.{self.type.suffix}"
        return self.function.call(name, self.type, self, self._same(other))

    def _same(self, other: Value | float) -> Value:
        if isinstance(other, Value):
            assert other.type == self.type, (other.type, self.type)
            return other
        return self.function.constant(self.type, other)


class Function:
    """An LLVM function, written from its first instruction to its last.

    Args:
        name: under which it is found once compiled.
        parameters: name and type of each; those of pointers do not overlap in memory.
        result: type it returns.
    """

    def __init__(self, name: str, parameters: Mapping[str, Type], result: Type) -> None:
        self.name = name
        self.result = result
        self.parameters = dict(parameters)
        self._variables: list[str] = []
        self._lines: list[str] = []
        self._declared: dict[str, str] = {}
        self._count = 0

    def parameter(self, name: str) -> Value:
        """The parameter of that name."""
        return Value(self, self.parameters[name], f"%{name}")

    def emit(self, type: Type, instruction: str) -> Value:
        """Write an instruction; its result."""
        name = self._fresh()
        self._lines.append(f"  {name} = {instruction}")
        return Value(self, type, name)

    def constant(self, type: Type, number: float) -> Value:
        """A number; in every lane, if `type` has several."""
        if type.is_float:
            # LLVM writes a float as the double of the same value.
            code = "<f" if type.element == "float" else "<d"
            held = struct.unpack(code, struct.pack(code, number))[0]
            text = f"0x{struct.unpack('<Q', struct.pack('<d', held))[0]:016X}"
        else:
            text = str(number)
        if type.lanes == 1:
            return Value(self, type, text)
        lanes = ", ".join([f"{type.element} {text}"] * type.lanes)
        return Value(self, type, f"<{lanes}>")

    def call(self, name: str, result: Type, *arguments: Value) -> Value:
        """Call the intrinsic `name`."""
        types = ", ".join(str(argument.type) for argument in arguments)
        self._declared[name] = f"declare {result} @{name}({types})"
        values = ", ".join(argument.typed for argument in arguments)
        return self.emit(result, f"call {result} @{name}({values})")

    def load(self, type: Type, base: Value, index: Value) -> Value:
        """Read a `type` at `base`, offset by `index` elements; aligned to one element."""
        address = self._address(base, index, type.element)
        return self.emit(type, f"load {type}, ptr {address.text}, align {type.bits // 8}")

    def store(self, value: Value, base: Value, index: Value) -> None:
        """Write `value` at `base`, offset by `index` elements; aligned to one element."""
        address = self._address(base, index, value.type.element)
        self._lines.append(
            f"  store {value.typed}, ptr {address.text}, align {value.type.bits // 8}"
        )

    def prefetch(self, base: Value, index: Value, element: str) -> None:
        """Have what is at `base`, `index` numbers of type `element` behind, brought to the cache.

        Of no effect otherwise, and none where there is no memory.
        """
        name = "llvm.prefetch.p0"
        self._declared[name] = f"declare void @{name}(ptr, i32, i32, i32)"
        address = self._address(base, index, element)
        # To be read, soon and more than once; data.
        self._lines.append(f"  call void @{name}({address.typed}, i32 0, i32 3, i32 1)")

    def variable(self, initial: Value) -> Variable:
        """A variable that holds `initial`."""
        slot = self._fresh()
        self._variables.append(f"  {slot} = alloca {initial.type}")
        variable = Variable(self, initial.type, slot)
        variable.set(initial)
        return variable

    def array(self, type: Type, count: int) -> Value:
        """The address of room for `count` values of `type`, there while the function runs."""
        slot = self._fresh()
        self._variables.append(f"  {slot} = alloca [{count} x {type}]")
        return Value(self, PTR, slot)

    @contextmanager
    def loop(self, start: Value, stop: Value, step: int) -> Iterator[Value]:
        """Do what is written in the block for start, start + step, ... below `stop` (i64)."""
        index = self.variable(start)
        test, body, end = (self._fresh()[1:] for _ in range(3))
        self._lines += [f"  br label %{test}", f"{test}:"]
        at = index.get()
        more = at < stop
        self._lines += [f"  br i1 {more.text}, label %{body}, label %{end}", f"{body}:"]
        yield at
        index.set(at + step)
        self._lines += [f"  br label %{test}", f"{end}:"]

    def strips(
        self, start: Value, stop: Value, lanes: int, rest: int = 1
    ) -> Iterator[tuple[int, AbstractContextManager[Value]]]:
        """Loops that together cover start .. stop: by `lanes` while they last, then by `rest`."""
        whole = start + (stop - start) // lanes * lanes
        yield lanes, self.loop(start, whole, lanes)
        yield rest, self.loop(whole, stop, rest)

    def give(self, value: Value) -> None:
        """Return `value`."""
        self._lines.append(f"  ret {value.typed}")

    def text(self) -> str:
        """The function as LLVM IR."""
        parameters = ", ".join(
            f"{type} noalias %{name}" if type == PTR else f"{type} %{name}"
            for name, type in self.parameters.items()
        )
        head = f"define {self.result} @{self.name}({parameters}) nounwind {{"
        lines = [head, "entry:", *self._variables, *self._lines, "}", *self._declared.values()]
        return "\n".join(lines) + "\n"

    def _address(self, base: Value, index: Value, element: str) -> Value:
        return self.emit(PTR, f"getelementptr {element}, {base.typed}, {index.typed}")

    def _fresh(self) -> str:
        self._count += 1
        return f"%v{self._count}"


@dataclass(frozen=True)
class Variable:
    """A place for values of one type that change as the function runs."""

    function: Function
    type: Type
    slot: str

    def get(self) -> Value:
        """What it holds now."""
        return self.function.emit(self.type, f"load {self.type}, ptr {self.slot}")

    def set(self, value: Value) -> None:
        """Have it hold `value`."""
        assert value.type == self.type, (value.type, self.type)
        self.function._lines.append(f"  store {value.typed}, ptr {self.slot}")
