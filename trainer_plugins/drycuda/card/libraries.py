"""Build the libraries that replace CUDA's, once for each installed torch."""

import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from elftools.common.exceptions import ELFError

from trainer_plugins.compiled import (
    CompileError,
    cache_folder,
    compile_once,
    fingerprint,
    lock,
    package_site,
    plain_compiler,
)
from trainer_plugins.drycuda.card.needs import Library, list_definitions, list_links, needs_of
from trainer_plugins.drycuda.cuda_build import DryCudaUnavailable, site_with_cuda

_SOURCES = Path(__file__).parent
_CARD_FILE = _SOURCES.parent.parent / "testing" / "card_file.h"
_TIMEOUT_SECONDS = 600
_CORE = "libdrycuda.so"
NO_COMPILER = (
    "the dry card needs a C++ compiler: `plan --dry-env` fetches one; or install g++, or set CXX"
)
WALL = "libdrywall.so"

_OURS = {
    "libcudart.so": "cudart.cpp",
    "libcuda.so": "driver.cpp",
    "libnccl.so": "nccl.cpp",
    "libcublas.so": "cublas.c",
    "libcublasLt.so": "cublas.c",
    "libcudnn.so": "cudnn.c",
    "libnvrtc.so": "nvrtc.c",
}
"""The handwritten sources of each library; its other functions are generated stubs."""

_WITH_LIBRARIES = ("bitsandbytes", "torchaudio", "torchvision", "flash_attn", "xformers", "apex")
"""Packages whose compiled code also calls CUDA's libraries."""

_OF_LINEAR_ALGEBRA = {
    "(sytrf)": (4, 8), "(potrf|getrf)": (5, 7), "(geqrf)": (5, 8), "(gesvd)": (3, 15),
    "(orgqr|ungqr|(?:syev|heev)(?:d|j|jBatched))": (7, 9), "(ormqr|unmqr|gesvdjBatched)": (11, 13),
    "(gesvdj)": (12, 14), "(gesvdaStridedBatched)": (16, 18), "(potrfBatched)": (0, 5),
    "(potrs|potrsBatched)": (0, 8), "(getrs)": (0, 9), "(Xpotrs)": (0, 11), "(Xpotrf)": (8, 12),
    "(Xgeqrf)": (10, 14), "(Xsytrs|Xsyevd|XsyevBatched)": (11, 15), "(Xgeev)": (17, 21),
}  # fmt: skip
"""cuSOLVER's functions, each with the parameter of `_bufferSize` that receives the workspace size,
and its own parameter that receives the status (cusolverDn.h of CUDA 12.8 and 13.0). The sizes are
not published: here they are 0, and every call succeeds.
"""


def built() -> Path:
    """Return the folder with the libraries for the installed torch, built if necessary.

    Raises:
        DryCudaUnavailable: no such torch, no compiler, or the build failed.
    """
    site = site_with_cuda()
    of_torch = sorted((site / "torch" / "lib").glob("*.so*"))
    callers = [*of_torch, *_other_callers(site, {*chain(*map(list_links, of_torch))})]
    stamps = [f"{path}:{(stat := path.stat()).st_size}:{stat.st_mtime_ns}" for path in callers]
    sources = sorted([*_SOURCES.glob("*.[hcp]*"), _CARD_FILE])  # .py too: needs.py makes names
    of_driver = _names_of_the_driver(site)
    stamps.append(str(sorted(of_driver)))
    name = fingerprint(*stamps, *(path.read_bytes() for path in sources))
    folder = cache_folder().absolute() / f"drycuda-{name}"
    if folder.exists():
        return folder
    compiler = plain_compiler("c++")
    if not compiler:
        raise DryCudaUnavailable(NO_COMPILER)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock(folder.parent):  # two plans that start together build it once
            if not folder.exists():
                needed = {"libcuda.so.1": Library(), **needs_of(callers)}
                needed["libcuda.so.1"].names |= of_driver
                with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as scratch:
                    draft = Path(scratch) / "libraries"
                    _build(draft, compiler, needed, _version_of_cudnn(site))
                    draft.replace(folder)
    except CompileError as error:
        raise DryCudaUnavailable(
            f"the dry card cannot be built: {error}\n{error.output}"
        ) from error
    except (ELFError, OSError) as error:
        raise DryCudaUnavailable(
            f"the dry card cannot be built: {error}. If {folder.parent} is not writable, name"
            " another folder with TRAINER_PLUGINS_CACHE"
        ) from error
    return folder


def libraries_in(folder: Path) -> list[Path]:
    """Return the libraries to load before a program, dependencies first."""
    first = [folder / _CORE, *sorted(folder.glob("libcuda.so.*"))]
    return [*first, *(each for each in sorted(folder.glob("lib*.so.*")) if each not in first)]


def _other_callers(site: Path, torchs: set[str]) -> Iterator[Path]:
    """Yield the compiled code of other packages that needs the same CUDA as torch.

    It may need a library that torch does not load: bitsandbytes 0.49 is linked to nvJitLink.
    """
    known = {name.partition(".so")[0] for name in torchs}
    for name in _WITH_LIBRARIES:
        folders = (folder / name for folder in (site, package_site(), *map(Path, sys.path)))
        for folder in dict.fromkeys(filter(Path.is_dir, folders)):
            for path in sorted(folder.rglob("*.so")):
                needed = list_links(path)
                if all(each in torchs or each.partition(".so")[0] not in known for each in needed):
                    yield path


def _names_of_the_driver(site: Path) -> set[str]:
    """Return the functions that Triton's launchers may call; they are compiled at run time."""
    header = site / "triton" / "backends" / "nvidia" / "include" / "cuda.h"
    if not header.is_file():
        return set()
    text = header.read_text(errors="replace")
    versions = dict(re.findall(r"^#define (cu[A-Z]\w+)\s+(cu[A-Z]\w+_v\d)$", text, re.MULTILINE))
    names = re.findall(r"^CUresult CUDAAPI\s+(cu[A-Z]\w+)\(", text, re.MULTILINE)
    return {*names, *(versions[name] for name in names if name in versions)}


def _version_of_cudnn(site: Path) -> int:
    """Return the cuDNN version that torch requires, as the number that torch compares."""
    found: list[str] = []
    for about in site.glob("torch-*.dist-info/METADATA"):
        text = about.read_text(errors="replace")
        found += re.findall(r"^Requires-Dist: nvidia-cudnn-cu\d+==([\d.]+)", text, re.MULTILINE)
    major, minor, patch = map(int, (found or ["9.20.0"])[0].split(".")[:3])
    return major * 10000 + minor * 100 + patch


def _build(folder: Path, compiler: list[str], needed: Mapping[str, Library], cudnn: int) -> None:
    """Compile the core, then each library: its handwritten part, and stubs for the rest."""
    cudart = next((name for name in needed if name.startswith("libcudart.so.")), None)
    if cudart is None:
        raise DryCudaUnavailable("torch's libraries are not linked to CUDA's runtime")
    flags = ["-O1", "-fPIC", "-shared", "-w", f"-DCUDA_MAJOR={cudart.rpartition('.')[2]}"]
    flags.append(f"-DCUDNN_VERSION={cudnn}")
    base = [*compiler, "-std=c++17", *flags]
    sources = (str(_SOURCES / name) for name in ("core.cpp", "host.cpp"))
    core = [*base, f"-Wl,-soname,{_CORE}", *sources, "-ldl"]
    compile_once(folder / _CORE, core, _TIMEOUT_SECONDS)
    wall = [*base, f"-Wl,-soname,{WALL}", str(_SOURCES / "wall.cpp"), "-ldl"]
    compile_once(folder / WALL, wall, _TIMEOUT_SECONDS)
    for name, library in sorted(needed.items()):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            ours = _OURS.get(re.sub(r"\.\d+$", "", name))
            own = _object(base, _SOURCES / ours, Path(scratch)) if ours else None
            stub = Path(scratch) / "stub.c"
            stub.write_text(stub_of(name, library, list_definitions(own) if own else set()))
            link = [*base, f"-Wl,-soname,{name}"]
            if library.version:
                script = Path(scratch) / "versions"
                script.write_text(f"{library.version} {{ global: *; }};\n")
                link.append(f"-Wl,--version-script={script}")
            parts = [str(each) for each in (own, _object(base, stub, Path(scratch))) if each]
            link += [*parts, f"-L{folder}", f"-l:{_CORE}", "-Wl,-rpath,$ORIGIN"]
            compile_once(folder / name, link, _TIMEOUT_SECONDS)


def _object(base: list[str], source: Path, scratch: Path) -> Path:
    language = ["-x", "c", "-std=gnu17"] if source.suffix == ".c" else []
    command = [each for each in base if each != "-shared"]
    if language:
        command.remove("-std=c++17")
    made = scratch / f"{source.stem}.o"
    return compile_once(made, [*command, *language, "-c", str(source)], _TIMEOUT_SECONDS)


def stub_of(name: str, library: Library, written: Iterable[str]) -> str:
    """Return C for every function that is not handwritten: each counts its calls.

    A function that returns text returns an empty string; others return 0. `...Create` sets a
    handle.
    """
    lines = ["extern int drycuda_unwritten(const char *, const char *);", "static int handle;"]
    given = ", ".join(f"long *a{number}" for number in range(22))
    for each in sorted(library.names - set(written)):
        counted = f'drycuda_unwritten("{name}", "{each}")'
        if re.search(r"(String|ErrorName|LastError)$", each):
            lines.append(f'const char *{each}(void) {{ {counted}; return ""; }}')
        elif zeros := _zeros_of(each):
            lines.append(f"int {each}({given}) {{ {zeros} return {counted}; }}")
        elif re.search(r"Create(_v2)?$", each):
            lines.append(f"int {each}(void **made) {{ *made = &handle; return {counted}; }}")
        else:
            lines.append(f"int {each}(void) {{ return {counted}; }}")
    return "\n".join(lines) + "\n"


def _zeros_of(name: str) -> str:
    """Return C that sets the outputs of a linear algebra or cuFFT function; empty for others."""
    if name.startswith("cufft"):  # cufft.h: a plan is an int; the 13th is the workspace size
        return {"cufftCreate": "*(int *)a0 = 1;", "cufftXtMakePlanMany": "*a12 = 0;"}.get(name, "")
    if found := re.fullmatch(r"cublas[SDCZ](geqrf|getrs|gels)Batched", name):  # cublas_api.h
        return f"*(int *)a{6 if found[1] == 'geqrf' else 9} = 0;"
    for pattern, (size, info) in _OF_LINEAR_ALGEBRA.items():
        found = re.fullmatch(f"cusolverDn[SDCZ]?{pattern}(_bufferSize)?", name)
        if found is None:
            continue
        if found[2]:
            is_long = found[1].startswith("X")  # of the device, and of the host
            return f"*a{size} = *a{size + 1} = 0;" if is_long else f"*(int *)a{size} = 0;"
        if not found[1].endswith("Batched"):
            return f"*(int *)a{info} = 0;"
        # The number of matrices is the last parameter; some have one more before it.
        count = info + (1 if found[1].startswith(("X", "potr")) else 2)
        return f"for (int at = 0; at < (int)(long)a{count}; at++) ((int *)a{info})[at] = 0;"
    return ""
