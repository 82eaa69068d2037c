"""A HIP runtime without a GPU, on which the unmodified CuPy wheel for ROCm runs.

`build` makes it, below build/, of what is here and in tests/simulators/cpu/source; `environment` is what processes need
to run on it::

    env = standin.environment(wave=64, devices=2)
    subprocess.run([sys.executable, "-m", "services.kvcache", ...], env=env)
    subprocess.run([sys.executable, "-m", "services.engine", ...], env=env)  # the same machine: memory can be shared

Each call of `environment` is a machine of its own, and processes see each other's device memory on the same one only;
`leftovers` says what memory of a machine is still there. From a shell::

    eval "$(python -m tests.simulators.rocm.standin)"        # or `... standin idle` for an idle machine
    python -m tests.simulators.rocm.standin build            # builds it and no more, or says why it cannot

**What it is.** CuPy's own code for ROCm runs: its calls of HIP, HIPRTC and hipBLAS, its compiler's options and caches,
its error handling. Behind them, a kernel is compiled by g++ and run by the CPU executor of the kernels' tests, the
memory of a device is shared memory of the host, and a matrix product is a loop. What HIP refuses is refused with HIP's
error, and so is some more that a GPU would get wrong in silence: copies that leave an allocation, handles that were
destroyed, launches on a stream or with a module of another device. Memory is 0xCD when it is allocated; an access
outside of any ends the process.

**What it is not.** Nothing is asynchronous: every call has done its work when it returns, so a missing synchronisation
is never noticed, and no time means anything. Denormals are kept where a GPU flushes them. A kernel may read memory of
another device. Stream capture keeps kernels and products of one stream; copies, memory sets and events end a capture
with an error. Device code that was compiled into CuPy, and libraries of ROCm but the parts of hipBLAS that the product
uses, are not there: a call ends the process, and says of what.

What differs between machines is set by the arguments of `environment`, which see. ``HIP_VISIBLE_DEVICES`` is honoured.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = Path(__file__).parent / "hip"
RESOURCES = Path(__file__).parent / "resources.py"
EXECUTOR = ROOT / "tests" / "simulators" / "cpu" / "source"
BUILD = ROOT / "build" / "rocm"
WHEEL = "cupy-rocm-7-0"
COMPILER = os.environ.get("CXX") or "g++"
FLAGS = ["-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Werror"]

#: Library -> the beginning of its functions' names, and the sources of those that are there; the rest end the process.
LIBRARIES: dict[str, tuple[str, list[Path]]] = {
    "libamdhip64.so.7": (
        r"(__)?hip[A-Z]",
        [
            *(
                SOURCES / f"{name}.cpp"
                for name in ("error", "device", "memory", "ipc", "stream", "graph", "module", "occupancy")
            ),
            *(EXECUTOR / f"{name}.cpp" for name in ("block", "fiber")),
        ],
    ),
    "libhiprtc.so.7": (r"hiprtc", [SOURCES / "hiprtc.cpp"]),
    "libhipblas.so.3": (r"hipblas", [SOURCES / "hipblas.cpp"]),
    "librocblas.so.5": (r"rocblas_", []),
    "librocsolver.so.0": (r"rocsolver_", []),
    "libhipsparse.so.4": (r"hipsparse", []),
    "libhiprand.so.1": (r"hiprand", []),
    "libhipfft.so.0": (r"hipfft", []),
    "librocfft.so.0": (r"rocfft_", []),
    "librccl.so.1": (r"nccl", []),
    "libroctx64.so.4": (r"roctx", []),
    "libroctracer64.so.4": (r"roctracer_", []),
}
#: Those of them that use libamdhip64.
ON_HIP = ("libhiprtc.so.7", "libhipblas.so.3")
#: Device memory lies here; see hip/memory.cpp.
SHARED_MEMORY = Path("/dev/shm")


class Unavailable(Exception):
    """The stand-in cannot be built on this machine; says what is missing."""


def build() -> Path:
    """Return the folder of the stand-in, built if it is not; Unavailable if it cannot be.

    Raises subprocess.CalledProcessError if its own sources do not compile.
    """
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise Unavailable(f"{WHEEL} is for Linux on x86-64 only")
    for tool in (COMPILER, "nm"):
        if not shutil.which(tool):
            raise Unavailable(f"{tool} is not installed")
    with _one_at_a_time():
        site = _site()
        folder = BUILD / f"standin-{_digest(site)}"
        if not folder.exists():
            with _made_at_once(folder) as new:
                _compile(new, site)
        return folder


def environment(
    *,
    wave: int = 64,
    devices: int = 1,
    memory: int = 1 << 30,
    machine: str | None = None,
    idle: bool = False,
    fault: str = "",
    occupancy: bool = False,
) -> dict[str, str]:
    """Return the whole environment of a process that runs on the stand-in; builds it.

    ``wave``: 64 is a gfx942, 32 a gfx1100. ``devices`` of ``memory`` bytes each. ``machine`` names one that is there
    already, as `machine_of` tells; by default it is a new one. An ``idle`` one checks kernels and products as ever and
    runs none: what is left is the time of the host. What is wrong with it is its ``fault``: ``matrix``, other rows in
    the matrix unit's lanes than the kernels expect, or ``handles``, wrong memory from the 36th opened IPC handle on.
    With ``occupancy`` it answers how many blocks of a kernel fit, by what clang for AMD's GPUs makes of the source.
    """
    if fault not in ("", "matrix", "handles"):
        raise ValueError(f"fault is {fault!r}; it must be matrix or handles")
    folder = build()
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("HIP", "ROC", "HSA_", "CUPY_"))
    }
    return {
        **inherited,
        "HIPSTANDIN_MACHINE": machine or f"{os.getpid()}-{secrets.token_hex(4)}",
        "HIPSTANDIN_WAVE": str(wave),
        "HIPSTANDIN_DEVICES": str(devices),
        "HIPSTANDIN_MEMORY": str(memory),
        "HIPSTANDIN_IDLE": str(int(idle)),
        "HIPSTANDIN_FAULT": fault,
        "HIPSTANDIN_RESOURCES": shlex.join([sys.executable, str(RESOURCES)]) if occupancy else "",
        "LD_LIBRARY_PATH": _before(str(folder / "lib"), "LD_LIBRARY_PATH"),
        "PATH": _before(str(folder / "bin"), "PATH"),
        "PYTHONPATH": _before(str(_site()), "PYTHONPATH"),
        "ROCM_HOME": str(folder),
        # The arch that CuPy puts into a kernel's key does not tell waves apart in all its versions.
        "CUPY_CACHE_DIR": str(folder / f"cupy-{wave}{'-wrong' if fault == 'matrix' else ''}"),
    }


def machine_of(environment: dict[str, str]) -> str:
    """Return the name of the machine that an environment is of."""
    return environment["HIPSTANDIN_MACHINE"]


def leftovers(machine: str) -> list[str]:
    """Return the names of the files of device memory that a machine has now."""
    return sorted(path.name for path in SHARED_MEMORY.glob(f"rocmforge-standin.{os.getuid()}.{machine}.*"))


def _before(first: str, variable: str) -> str:
    return os.pathsep.join(filter(None, [first, os.environ.get(variable)]))


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Held by one process: builds are shared by all tests that run."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _made_at_once(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes ``folder`` if all goes well."""
    new = Path(tempfile.mkdtemp(dir=BUILD, prefix=".new-"))
    try:
        yield new
        new.chmod(0o755)
        new.rename(folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


@functools.cache
def _site() -> Path:
    """The folder that holds the wheel, and nothing else; installed if it is not."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.search(rf"^{WHEEL}==(.*)$", pins, re.MULTILINE)
    if not pinned:
        raise Unavailable(f"constraints.txt does not pin {WHEEL}")
    folder = BUILD / f"cupy-{pinned[1]}-{sys.implementation.cache_tag}"
    if not folder.exists():
        with _made_at_once(folder) as new:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--retries", "1"]
            try:
                done = subprocess.run(
                    [*pip, "--target", str(new), f"{WHEEL}=={pinned[1]}"], capture_output=True, text=True, timeout=600
                )
            except subprocess.TimeoutExpired:
                raise Unavailable(f"pip did not install {WHEEL}=={pinned[1]} within 600 s") from None
            if done.returncode:
                raise Unavailable(f"pip cannot install {WHEEL}=={pinned[1]}: {done.stderr.strip()[-300:]}")
    return folder


def _digest(site: Path) -> str:
    """Of all that the build is made of."""
    version = subprocess.run([COMPILER, "--version"], check=True, capture_output=True).stdout
    digest = hashlib.sha256(version + site.name.encode())
    for path in [Path(__file__), *sorted(SOURCES.rglob("*")), *sorted(EXECUTOR.iterdir())]:
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(folder: Path, site: Path) -> None:
    """Fill ``folder``: lib/ and bin/ for the environment; include/ and executor/ for kernels."""
    for name in ("lib", "bin", "objects"):
        (folder / name).mkdir()
    shutil.copytree(SOURCES / "include", folder / "include")
    shutil.copytree(EXECUTOR, folder / "executor")
    shutil.copy(SOURCES / "hipcc", folder / "bin")
    wanted, needed = _wants(site)
    if unknown := needed - LIBRARIES.keys():
        raise Unavailable(f"the wheel wants {', '.join(sorted(unknown))}, which the stand-in knows nothing of")
    objects = _objects(folder / "objects")
    for library, (names, sources) in LIBRARIES.items():
        own = [objects[source] for source in sources]
        defined = _symbols("--defined-only", own) if own else set()
        missing = sorted(name for name in wanted if re.match(names, name) and name not in defined)
        absent = folder / "objects" / f"{library}.cpp"
        absent.write_text(
            f'#include "{SOURCES / "absent.h"}"\n' + "".join(f"ABSENT({name})\n" for name in missing), encoding="utf-8"
        )
        on = [str(folder / "lib" / "libamdhip64.so.7")] if library in ON_HIP else []
        link = ["-shared", "-Wl,-z,defs", f"-Wl,-soname,{library}", "-o", str(folder / "lib" / library)]
        _run([COMPILER, *FLAGS, "-O1", str(absent), *map(str, own), *on, "-ldl", "-lpthread", *link])
    shutil.rmtree(folder / "objects")


def _objects(folder: Path) -> dict[Path, Path]:
    """Compile every source, a few at a time; source -> object."""
    made: dict[Path, Path] = {}
    running: list[tuple[list[str], subprocess.Popen[bytes]]] = []
    for source in (source for _, sources in LIBRARIES.values() for source in sources):
        made[source] = folder / f"{source.stem}.o"
        # The executor's names are for the kernels' libraries; it and the products take nearly all the time.
        of_executor = source.is_relative_to(EXECUTOR)
        hidden = [] if of_executor else ["-fvisibility=hidden"]
        level = "-O3" if source.stem == "hipblas" else "-O2" if of_executor else "-O1"
        flags = [*FLAGS, level, *hidden, f"-I{EXECUTOR}"]
        command = [COMPILER, *flags, "-c", str(source), "-o", str(made[source])]
        running.append((command, subprocess.Popen(command)))
        if len(running) == (os.cpu_count() or 1):
            _finish(*running.pop(0))
    for command, process in running:
        _finish(command, process)
    return made


def _finish(command: list[str], process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _wants(site: Path) -> tuple[set[str], set[str]]:
    """Functions that the wheel's extensions take from elsewhere, and the libraries of ROCm that they name."""
    extensions = sorted(site.rglob("*.so"))
    needed = set()
    for extension in extensions:
        names = re.findall(rb"\0(lib(?:amdhip|hip|roc|rccl|hsa)[a-z0-9]*\.so\.\d+)(?=\0)", extension.read_bytes())
        needed |= {name.decode() for name in names}
    return _symbols("--undefined-only", extensions, "-D"), needed


def _symbols(which: str, files: list[Path], *flags: str) -> set[str]:
    lines = _run(["nm", *flags, which, *map(str, files)]).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line.strip() and not line.endswith(":")}


def _main(arguments: list[str]) -> None:
    if arguments not in ([], ["build"], ["idle"]):
        raise SystemExit("usage: python -m tests.simulators.rocm.standin [build | idle]")
    try:
        if arguments == ["build"]:
            build()
            return
        for name, value in environment(idle=bool(arguments)).items():
            if os.environ.get(name) != value:
                print(f"export {name}={shlex.quote(value)}")
    except Unavailable as error:
        # Not a failure of `make test`: the tests that need it tell, and fail where they must run.
        print(f"no stand-in for a GPU: {error}", file=sys.stderr)
        raise SystemExit(0 if arguments else 1) from None


if __name__ == "__main__":
    _main(sys.argv[1:])
