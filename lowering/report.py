"""What the compiler made of a kernel: registers, shared memory, spills and the instructions in its machine code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from terrazzo.lowering.data_files import is_count
from terrazzo.lowering.errors import ToolchainError
from terrazzo.lowering.folders import parse_json
from terrazzo.lowering.toolchain import INSTALL_DISASSEMBLER, find_cuda_tool, run_tool

# "/*0070*/  @!P0 HGMMA.64x64x16.F32 R24, ..." -> "HGMMA.64x64x16.F32"
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]+)", re.MULTILINE)
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class KernelReport:
    """Resources of one compiled kernel (the largest, should a module hold several).

    Attributes:
        registers: 32-bit registers per thread.
        smem_static, smem_dynamic: shared memory per block, bytes (dynamic: None if the launch decides it).
        stack: local memory frame per thread, bytes.
        spill_stores, spill_loads: spilled bytes per thread.
        instructions: SASS opcode with modifiers -> number of times it stands in the code; empty without a disassembler.
        tensor_instructions: the distinct tensor-core opcodes among them.
        note: how to get what is missing, else "".
    """

    registers: int
    smem_static: int
    smem_dynamic: int | None
    stack: int
    spill_stores: int
    spill_loads: int
    instructions: dict[str, int] = field(default_factory=dict)
    tensor_instructions: list[str] = field(default_factory=list)
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    @staticmethod
    def read(path: Path) -> KernelReport:
        """The report of `as_dict` in a file; OSError or ValueError where there is none.

        A kernel that was compiled for a launch has no counts yet: its machine code beside the file is read for them.
        """
        said = _parse(path.read_bytes(), path.name)
        binary = path.with_name("kernel.cubin")
        if "instructions" not in said and binary.is_file():
            said |= _counted(binary)
        return KernelReport(**said)

    @staticmethod
    def parse(data: bytes, name: str) -> KernelReport:
        """The report of `as_dict` as JSON text, which errors call `name`; ValueError if it is none."""
        return KernelReport(**_parse(data, name))

    def count(self, pattern: str) -> int:
        """Number of instructions whose opcode matches a regular expression from its start, for example "LDGSTS"."""
        return sum(number for opcode, number in self.instructions.items() if re.match(pattern, opcode))


def _parse(data: bytes, name: str) -> dict[str, Any]:
    try:
        said = parse_json(data)
    except ValueError as error:
        raise ValueError(f"{name} is no report: {error}") from error
    if not isinstance(said, dict):
        raise ValueError(f"{name} is no report: it is a {type(said).__name__}")
    wrong = [field for field, value in said.items() if field not in _FIELDS or not _FIELDS[field](value)]
    wrong += [field for field in _REQUIRED if field not in said]
    if wrong:
        raise ValueError(f"{name} is no report: {', '.join(wrong)[:200]} missing, unknown or of another kind")
    return said


def _counted(binary: Path) -> dict[str, Any]:
    """The fields of a report that need a disassembler."""
    instructions, note = count_instructions(binary)
    tensor = sorted(opcode for opcode in instructions if "MMA" in opcode)
    return {"instructions": instructions, "tensor_instructions": tensor, "note": note}


def _are_counts(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_count, value.values()))


_REQUIRED = ("registers", "smem_static", "smem_dynamic", "stack", "spill_stores", "spill_loads")
_FIELDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_REQUIRED, is_count),
    "smem_dynamic": lambda value: value is None or is_count(value),
    "instructions": _are_counts,
    "tensor_instructions": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    "note": lambda value: isinstance(value, str),
}


def make_report(binary: Path, ptxas_log: str, smem_dynamic: int | None, count: bool = True) -> KernelReport:
    """Report on a cubin or fatbin from ptxas's own words (`-Xptxas -v`) and, if there is a disassembler, its SASS.

    Without `count` no instruction is counted, which is a third of a second: `read` does it when it is asked.
    """
    frames = [tuple(map(int, frame)) for frame in _FRAME.findall(ptxas_log)]
    stack, stores, loads = (max(column) for column in zip(*frames, strict=True)) if frames else (0, 0, 0)
    return KernelReport(
        registers=max(map(int, _USED.findall(ptxas_log)), default=0),
        smem_static=max(map(int, _SHARED.findall(ptxas_log)), default=0),
        smem_dynamic=smem_dynamic,
        stack=stack,
        spill_stores=stores,
        spill_loads=loads,
        **(_counted(binary) if count else {}),
    )


def count_instructions(binary: Path) -> tuple[dict[str, int], str]:
    """Opcode counts of a cubin or fatbin, most frequent first, and a note if it could not be disassembled.

    Raises:
        ToolchainError: the disassembler is there but fails.
    """
    tool = find_cuda_tool("cuobjdump")
    if tool is None:
        return {}, f"no disassembler, so no instruction counts: {INSTALL_DISASSEMBLER}"
    done = run_tool([tool, "-sass", binary.name], binary.parent)
    if done.returncode:
        if "nvdisasm" in done.stderr:
            return {}, f"cuobjdump does not find nvdisasm: {INSTALL_DISASSEMBLER}"
        raise ToolchainError(f"{tool} -sass fails: {done.stderr.strip()}; {INSTALL_DISASSEMBLER}")
    return dict(Counter(_INSTRUCTION.findall(done.stdout)).most_common()), ""
