"""What the compiler made of the native kernel's inner loops, read from its machine code.

An inner loop carries the sums of both products. Besides multiply-adds it may hold loads,
broadcasts from memory and loop control: anything more costs time on every pair of tokens.
"""

import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass

import pytest

LIBRARY = importlib.util.find_spec("cinetile.kernels.cpu.cinetile_native")
MULTIPLY_ADD = re.compile(r"vfmadd\d+ps|vdpbf16ps")
LOAD = re.compile(r"v?mov(aps|ups|dqa|dqu)(32|64)?|vbroadcastss|vpbroadcastd")
LOOP_CONTROL = re.compile(r"(add|sub|inc|dec|cmp|lea|test|j\w+)q?|nop\w*")
# Multiply-adds of an inner loop: rows by one, two and three vectors.
SHAPES = {"avx2": {4, 8, 12}, "avx512": {8, 16, 24}, "avx512_bf16": {8, 16, 24}}


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str
    operands: str

    @property
    def target(self) -> int | None:
        """Where a jump goes."""
        found = re.match(r"([0-9a-f]+)\b", self.operands)
        return int(found[1], 16) if self.name.startswith("j") and found else None

    @property
    def result(self) -> str:
        """The register that is written, as the last operand of AT&T's syntax."""
        return re.sub(r"^%[xyz]mm", "%mm", self.operands.rsplit(",", 1)[-1].strip())

    @property
    def is_multiply_add(self) -> bool:
        return MULTIPLY_ADD.fullmatch(self.name) is not None

    @property
    def is_allowed(self) -> bool:
        if LOAD.fullmatch(self.name):
            return "(" in self.operands and self.result.startswith("%")
        return self.is_multiply_add or LOOP_CONTROL.fullmatch(self.name) is not None


Loop = list[Instruction]


def parse(disassembly: str) -> list[Instruction]:
    lines = re.finditer(r"^ +([0-9a-f]+):\t(\w+) *([^\n<#]*)", disassembly, re.MULTILINE)
    return [Instruction(int(line[1], 16), line[2], line[3].strip()) for line in lines]


def innermost_loops(code: list[Instruction]) -> list[Loop]:
    """What lies between a jump backwards and its target, if no other such range lies in it."""
    indices = {instruction.address: index for index, instruction in enumerate(code)}
    ranges = [
        (indices[instruction.target], index)
        for index, instruction in enumerate(code)
        if instruction.target in indices and instruction.target <= instruction.address
    ]
    ranges.sort(key=lambda instruction: (instruction[1], -instruction[0]))
    loops, last_start = [], -1
    for start, stop in ranges:
        if start > last_start:
            loops.append(code[start : stop + 1])
            last_start = start
    return loops


def carries_sums(loop: Loop) -> bool:
    """Whether four registers or more are only added to, by a quarter of the loop at least."""
    results = [instruction.result for instruction in loop if instruction.name[0] != "j"]
    sums = [
        instruction
        for instruction in loop
        if instruction.is_multiply_add and results.count(instruction.result) == 1
    ]
    return len(sums) >= 4 and 4 * len(sums) >= len(loop)


def path_of(loop: Loop) -> str:
    text = " ".join(f"{step.name} {step.operands}" for step in loop if step.is_multiply_add)
    if "vdpbf16ps" in text:
        return "avx512_bf16"
    return "avx512" if "%zmm" in text else "avx2"


def intruders(loop: Loop) -> list[str]:
    return [f"{step.name} {step.operands}" for step in loop if not step.is_allowed]


@pytest.fixture(scope="module")
def loops() -> list[Loop]:
    if LIBRARY is None or LIBRARY.origin is None:
        pytest.skip("the native library was not built")
    if shutil.which("objdump") is None:
        pytest.skip("there is no objdump to read machine code with")
    command = ["objdump", "--disassemble", "--no-show-raw-insn", LIBRARY.origin]
    disassembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "x86-64" not in disassembly:
        pytest.skip("only x86-64 code is read")
    if "__asan" in disassembly or "__ubsan" in disassembly:
        pytest.skip("sanitizers put their checks into the loops")
    return [loop for loop in innermost_loops(parse(disassembly)) if carries_sums(loop)]


@pytest.mark.parametrize("path", SHAPES)
def test_inner_loops_only_load_and_multiply(loops: list[Loop], path: str) -> None:
    own = [loop for loop in loops if path_of(loop) == path]
    assert {sum(instruction.is_multiply_add for instruction in loop) for loop in own} == SHAPES[
        path
    ]
    assert [intruders(loop) for loop in own] == [[]] * len(own)


FOUR_SUMS = """
    10:\tvmovaps (%rax),%ymm4
    14:\tvbroadcastss (%rdx),%ymm5
    18:\tvfmadd231ps %ymm4,%ymm5,%ymm0
    1c:\tvfmadd231ps 0x20(%rax),%ymm5,%ymm1
    20:\tvfmadd231ps %ymm4,%ymm5,%ymm2
    24:\tvfmadd231ps %ymm4,%ymm5,%ymm3
    28:\tadd    $0x10,%rdx
    2c:\tjne    10 <somewhere>
"""


def test_a_clean_loop_is_found() -> None:
    (loop,) = innermost_loops(parse(FOUR_SUMS))
    assert carries_sums(loop)
    assert path_of(loop) == "avx2"
    assert not intruders(loop)


@pytest.mark.parametrize(
    "intruder",
    [
        "vaddss %xmm6,%xmm7,%xmm7",
        "vbroadcastss %xmm7,%ymm5",
        "vmovaps %ymm4,(%rax)",
        "mov %rax,%rbx",
    ],
)
def test_anything_else_in_a_loop_is_found(intruder: str) -> None:
    code = FOUR_SUMS.replace("    28:", f"    26:\t{intruder}\n    28:")
    (loop,) = innermost_loops(parse(code))
    assert carries_sums(loop)
    assert intruders(loop) == [intruder]
