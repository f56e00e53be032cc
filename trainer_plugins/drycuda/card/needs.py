"""Reads what compiled libraries need of CUDA: names and versions, from their own tables."""

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

# NVPL computes on the CPU: the wheel of torch for aarch64 brings its BLAS and LAPACK along.
CUDA_LIBRARY = re.compile(r"lib(cu|nccl|nv(?!pl_))[\w-]*\.so(\.\d+)?$")


@dataclass(slots=True)
class Library:
    """Describes one library of CUDA as others need it."""

    version: str = ""
    """The version that its symbols carry (`libcudart.so.13`); empty if they have none."""

    names: set[str] = field(default_factory=set)


# Names without a version are recognised by how they begin; the first that fits counts.
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
    """Return CUDA's libraries that a library is linked to, by the names the loader looks for."""
    with path.open("rb") as file:
        return _read_links(ELFFile(file)) if file.read(4) == b"\x7fELF" else []


def needs_of(paths: Iterable[Path]) -> dict[str, Library]:
    """Return what libraries need of CUDA's; it takes seconds for those of torch.

    Raises:
        elftools.common.exceptions.ELFError: one is no library.
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
    """Return the names that an object file gives to others."""
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
    """Yield each name that others have to give: the name, its version, and whose it is."""
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
