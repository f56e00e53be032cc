"""Read which CUDA names and versions compiled libraries need, from their own tables."""

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

# NVPL computes on the CPU: torch's aarch64 wheel ships its BLAS and LAPACK.
CUDA_LIBRARY = re.compile(r"lib(cu|nccl|nv(?!pl_))[\w-]*\.so(\.\d+)?$")


@dataclass(slots=True)
class Library:
    """Describes the part of a CUDA library that others need."""

    # the version that its symbols carry (`libcudart.so.13`); empty if they have none
    version: str = ""
    names: set[str] = field(default_factory=set)


# Names without a version are recognised by their prefix; the first match counts.
_BEGINNINGS = (
    ("nccl", "libnccl.so"),
    ("cuFile", "libcufile.so"),
    ("cusparseLt", "libcusparseLt.so"),
    ("nvshmem", "libnvshmem_host.so"),
    ("nvrtc", "libnvrtc.so"),
    ("nvJitLink", "libnvJitLink.so"),
    ("curand", "libcurand.so"),
    ("cudnn", "libcudnn.so"),
    ("cublasLt", "libcublasLt.so"),
    ("cublas", "libcublas.so"),
    ("cu[A-Z]", "libcuda.so"),  # not `cungqr_`, which is LAPACK's
)


@functools.cache
def list_links(path: Path) -> list[str]:
    """Return the CUDA libraries that a library is linked to, by the loader's names."""
    with path.open("rb") as file:
        return _read_links(ELFFile(file)) if file.read(4) == b"\x7fELF" else []


def needs_of(paths: Iterable[Path]) -> dict[str, Library]:
    """Return which parts of CUDA some libraries need; takes seconds for torch's.

    Raises:
        elftools.common.exceptions.ELFError: a file is not a library.
    """
    found: dict[str, Library] = {}
    nameless: set[str] = set()
    for path in paths:
        with path.open("rb") as file:
            elf = ELFFile(file)
            for name in _read_links(elf):
                found.setdefault(name, Library())
            for name, version, library in _find_undefined(elf):
                if library in found:
                    found[library].names.add(name)
                    found[library].version = version
                elif not library:
                    nameless.add(name)
    for name in nameless:
        home = next((home for begins, home in _BEGINNINGS if re.match(begins, name)), None)
        for file_name, described in found.items():
            if home is not None and file_name.startswith(home + "."):
                described.names.add(name)
    return found


def list_definitions(path: Path) -> set[str]:
    """Return the names that an object file exports."""
    with path.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".symtab").iter_symbols()
        return {
            each.name
            for each in symbols
            if each["st_info"]["bind"] == "STB_GLOBAL" and each["st_shndx"] != "SHN_UNDEF"
        }


def _read_links(elf: ELFFile) -> list[str]:
    dynamic = elf.get_section_by_name(".dynamic")
    needed = dynamic.iter_tags("DT_NEEDED") if dynamic else ()
    return [tag.needed for tag in needed if CUDA_LIBRARY.match(tag.needed)]


def _find_undefined(elf: ELFFile) -> Iterator[tuple[str, str, str]]:
    """Yield each undefined name with its version and the library that defines it."""
    versions = {
        needed["vna_other"]: (needed.name, library.name)
        for section in elf.iter_sections()
        if isinstance(section, GNUVerNeedSection)
        for library, all_needed in section.iter_versions()
        for needed in all_needed
    }
    symbols, of_each = (elf.get_section_by_name(name) for name in (".dynsym", ".gnu.version"))
    for number, symbol in enumerate(symbols.iter_symbols() if symbols else ()):
        if symbol["st_shndx"] == "SHN_UNDEF":
            index = of_each.get_symbol(number)["ndx"] if of_each else 0
            yield symbol.name, *versions.get(index, ("", ""))
