"""What a cubin says of its kernels: registers, stack, and how often an instruction stands in the code.

Read straight from the ELF, so that neither nvdisasm nor cuobjdump is needed. Instructions are 16 bytes since Volta: the
low 12 bits name one, bits 73 to 75 of a load or store its width. ``test_budget_cubin.py`` holds this against nvdisasm.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["KernelUsage", "usage"]

# Records of .nv.info, and the form of those that say how long they are.
REGCOUNT, FRAME_SIZE, MIN_STACK_SIZE = 0x2F, 0x11, 0x12
SIZED = 4

LDG, STG, LDL, STL, HMMA, LDGSTS = 0x981, 0x986, 0x983, 0x387, 0x23C, 0xFAE
WIDTH_64, WIDTH_128 = 5, 6


@dataclass(frozen=True, slots=True)
class KernelUsage:
    """One kernel on one architecture.

    Attributes:
        registers: of a thread.
        stack: bytes of a thread in local memory; registers that did not fit are here too.
        spills: instructions that load from or store to local memory.
        ldg128: loads of 16 bytes from global memory.
        ldg64: loads of 8 bytes.
        stg128: stores of 16 bytes.
        ldgsts: copies from global straight to shared memory (``cp.async``).
        hmma: products of the tensor cores.
    """

    registers: int
    stack: int
    spills: int
    ldg128: int
    ldg64: int
    stg128: int
    ldgsts: int
    hmma: int


def usage(cubin: bytes) -> dict[str, KernelUsage]:
    """What every kernel of a cubin uses, by name.

    Raises:
        ValueError: it is no cubin.
    """
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    sections = _sections(cubin)
    symbols = _symbols(cubin, sections)
    records: dict[str, dict[int, int]] = {}
    for attribute, symbol, value in _records(_body(cubin, sections, ".nv.info")):
        records.setdefault(symbols[symbol], {})[attribute] = value
    found = {}
    for section in sorted(sections):
        kernel = section.removeprefix(".text.")
        if kernel == section or REGCOUNT not in records.get(kernel, {}):
            continue
        record = records[kernel]
        found[kernel] = KernelUsage(
            registers=record[REGCOUNT],
            stack=max(record.get(FRAME_SIZE, 0), record.get(MIN_STACK_SIZE, 0)),
            **_instructions(_body(cubin, sections, section)),
        )
    return found


def _instructions(code: bytes) -> dict[str, int]:
    counts = dict.fromkeys(("spills", "ldg128", "ldg64", "stg128", "ldgsts", "hmma"), 0)
    for low, high in struct.iter_unpack("<QQ", code):
        name, width = low & 0xFFF, high >> 9 & 7
        if name in {LDL, STL}:
            counts["spills"] += 1
        elif name == HMMA:
            counts["hmma"] += 1
        elif name == LDGSTS:
            counts["ldgsts"] += 1
        elif name == LDG and width in {WIDTH_64, WIDTH_128}:
            counts["ldg128" if width == WIDTH_128 else "ldg64"] += 1
        elif name == STG and width == WIDTH_128:
            counts["stg128"] += 1
    return counts


def _sections(cubin: bytes) -> dict[str, tuple[int, int, int]]:
    """Offset, size and entry size of every section by name."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    entry, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    raw = []
    for i in range(count):
        fields = struct.unpack_from("<IIQQQQIIQQ", cubin, start + i * entry)
        raw.append((fields[0], fields[4], fields[5], fields[9]))
    names = raw[names_at][1]
    return {_text(cubin, names + name): (offset, size, each) for name, offset, size, each in raw}


def _symbols(cubin: bytes, sections: dict[str, tuple[int, int, int]]) -> list[str]:
    offset, size, each = sections[".symtab"]
    names = sections[".strtab"][0]
    return [
        _text(cubin, names + struct.unpack_from("<I", cubin, at)[0])
        for at in range(offset, offset + size, each)
    ]


def _records(body: bytes) -> list[tuple[int, int, int]]:
    """(attribute, symbol, value) of the records that hold a number for a kernel."""
    found, at = [], 0
    while at < len(body):
        form, attribute, size = struct.unpack_from("<BBH", body, at)
        at += 4
        if form != SIZED:
            continue
        if attribute in {REGCOUNT, FRAME_SIZE, MIN_STACK_SIZE}:
            symbol, value = struct.unpack_from("<II", body, at)
            found.append((attribute, symbol, value))
        at += size
    return found


def _body(cubin: bytes, sections: dict[str, tuple[int, int, int]], name: str) -> bytes:
    offset, size, _ = sections[name]
    return cubin[offset : offset + size]


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()
