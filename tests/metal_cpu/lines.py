"""Source lines of a compiled library's addresses, from its debug information (DWARF)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def lines_at(library: Path, address: int, source: str) -> list[int]:
    """Lines of the file `source` that the code at an address is of, the innermost call first.

    Where functions were inlined there is one for each call that leads there.
    """
    from elftools.elf.elffile import ELFFile  # where kernels run; others only collect the tests

    with library.open("rb") as stream:
        dwarf = ELFFile(stream).get_dwarf_info()
        for unit in dwarf.iter_CUs():
            program = dwarf.line_program_for_CU(unit)
            if program is None or (place := _row(program, address)) is None:
                continue
            places = [place]
            for die in _inlined(dwarf, unit.get_top_DIE(), address):
                call = die.attributes
                places.insert(1, (call["DW_AT_call_file"].value, call["DW_AT_call_line"].value))
            # What the compiler made up itself has line 0.
            return [line for file, line in places if line and _name(program, file) == source]
    return []


def _row(program: Any, address: int) -> tuple[int, int] | None:
    """File number and line of the row that covers the address."""
    before = None
    for entry in program.get_entries():
        state = entry.state
        if state is None:
            continue
        if before is not None and before.address <= address < state.address:
            return before.file, before.line
        before = None if state.end_sequence else state
    return None


def _inlined(dwarf: Any, die: Any, address: int) -> list[Any]:
    """Inlined calls that the address is in, the outermost first."""
    for child in die.iter_children():
        if _covers(dwarf, child, address):
            own = [child] if child.tag == "DW_TAG_inlined_subroutine" else []
            return own + _inlined(dwarf, child, address)
    return []


def _covers(dwarf: Any, die: Any, address: int) -> bool:
    attributes = die.attributes
    if "DW_AT_ranges" in attributes:
        ranges = dwarf.range_lists().get_range_list_at_offset(
            attributes["DW_AT_ranges"].value, cu=die.cu
        )
        base = die.cu.get_top_DIE().attributes["DW_AT_low_pc"].value
        for entry in ranges:
            if hasattr(entry, "base_address"):
                base = entry.base_address
                continue
            start = 0 if entry.is_absolute else base
            if start + entry.begin_offset <= address < start + entry.end_offset:
                return True
        return False
    if "DW_AT_low_pc" not in attributes or "DW_AT_high_pc" not in attributes:
        return False
    low, high = attributes["DW_AT_low_pc"].value, attributes["DW_AT_high_pc"]
    return low <= address < (high.value if high.form == "DW_FORM_addr" else low + high.value)


def _name(program: Any, number: int) -> str:
    """A file's name without folders."""
    first = 0 if program.header["version"] >= 5 else 1
    name = program["file_entry"][number - first].name
    return Path(name.decode()).name
