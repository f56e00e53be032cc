"""Reads what compiled libraries need of CUDA: names and versions, from their own tables.

ELF: https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html; versions of symbols:
https://refspecs.linuxfoundation.org/LSB_5.0.0/LSB-Core-generic/LSB-Core-generic/symversion.html.
"""

import mmap
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

CUDA_LIBRARY = re.compile(r"lib(cu|nccl|nv)[\w-]*\.so(\.\d+)?$")

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC = struct.Struct("<QQ")
_NEED, _NEED_VERSION = struct.Struct("<HHIII"), struct.Struct("<IHHII")
_DYNAMIC_SECTION, _DYNAMIC_SYMBOLS, _VERSIONS, _VERSIONS_NEEDED = 6, 11, 0x6FFFFFFF, 0x6FFFFFFE
_NEEDED = 1


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
    ("cu", "libcuda.so"),
)


def needs_of(paths: Iterable[Path]) -> dict[str, Library]:
    """Return what libraries need of CUDA's, by the names that the loader looks for.

    Raises:
        ValueError: one is not a library for this kind of machine.
    """
    found: dict[str, Library] = {}
    nameless: set[str] = set()
    for path in paths:
        with _Elf(path) as elf:
            for name in elf.needed():
                if CUDA_LIBRARY.match(name):
                    found.setdefault(name, Library())
            for name, version, file in elf.undefined():
                if file in found:
                    found[file].names.add(name)
                    found[file].version = version
                elif not file:
                    nameless.add(name)
    for name in nameless:
        home = next((home for begins, home in _BEGINNINGS if name.startswith(begins)), None)
        for file, library in found.items():
            if home is not None and file.startswith(home + "."):
                library.names.add(name)
    return found


class _Elf:
    """Reads a 64-bit library of a little-endian machine; what is large in it is not touched."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        try:
            self._data = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            self._file.close()
            raise ValueError(f"{path} is empty") from error
        if self._data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit little-endian library")
        (at,) = struct.unpack_from("<Q", self._data, 0x28)
        size, count = struct.unpack_from("<HH", self._data, 0x3A)
        self._sections = [_SECTION.unpack_from(self._data, at + size * i) for i in range(count)]

    def __enter__(self) -> "_Elf":
        return self

    def __exit__(self, *_: object) -> None:
        self._data.close()
        self._file.close()

    def needed(self) -> Iterator[str]:
        """Yield the libraries that this one is linked to."""
        for offset, size, strings in self._of_kind(_DYNAMIC_SECTION):
            for at in range(offset, offset + size, _DYNAMIC.size):
                tag, value = _DYNAMIC.unpack_from(self._data, at)
                if tag == _NEEDED:
                    yield self._text(strings + value)

    def undefined(self) -> Iterator[tuple[str, str, str]]:
        """Yield each name that others have to give: the name, its version, and whose it is."""
        versions = self._needed_versions()
        indices = next((offset for offset, _, _ in self._of_kind(_VERSIONS)), None)
        for offset, size, strings in self._of_kind(_DYNAMIC_SYMBOLS):
            for number in range(1, size // _SYMBOL.size):
                name, _, _, section, _, _ = _SYMBOL.unpack_from(
                    self._data, offset + number * _SYMBOL.size
                )
                if section == 0:
                    (index,) = (
                        struct.unpack_from("<H", self._data, indices + 2 * number)
                        if indices is not None
                        else (0,)
                    )
                    version, file = versions.get(index & 0x7FFF, ("", ""))
                    yield self._text(strings + name), version, file

    def _needed_versions(self) -> dict[int, tuple[str, str]]:
        found = {}
        for at, _, strings in self._of_kind(_VERSIONS_NEEDED):
            while True:
                _, count, file, first, further = _NEED.unpack_from(self._data, at)
                entry = at + first
                for _ in range(count):
                    _, _, index, name, step = _NEED_VERSION.unpack_from(self._data, entry)
                    found[index] = (self._text(strings + name), self._text(strings + file))
                    entry += step
                if not further:
                    break
                at += further
        return found

    def _of_kind(self, kind: int) -> Iterator[tuple[int, int, int]]:
        """Yield of each such section where it is, how long, and where its texts are."""
        for _, its_kind, _, _, offset, size, link, _, _, _ in self._sections:
            if its_kind == kind:
                yield offset, size, self._sections[link][4]

    def _text(self, at: int) -> str:
        return self._data[at : self._data.find(b"\0", at)].decode()
