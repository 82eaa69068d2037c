"""Every way in which a check can end, on machines that are made up."""

# One case is one row a line.
# ruff: noqa: E501

from __future__ import annotations

import dataclasses
import errno
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.edge.listener import Listener
from services.doctor import addresses, devices, namespaces, resources, roundtrip, stack
from services.doctor.check import Finding, Status
from services.doctor.machine import Node, Ran
from tests.doctor.fakes import CUDA, FILE, H200, MI300, ROCM, SOCKET, FakeMachine

M = FakeMachine
OK, WARNING, FAILED, SKIPPED = Status.OK, Status.WARNING, Status.FAILED, Status.SKIPPED
ARENAS = Path("/dev/shm/rocmforge-1000")
GIB = 1 << 30
UNIX = Listener(path=Path("/run/user/1000/rocmforge/k.sock"))
TCP = Listener(host="127.0.0.1", port=50052)
OWN = addresses.Running("daemon", "a.Daemon", "rocmforge_kvcache_")
NONE = dataclasses.replace(ROCM, gpus=(), gpu_error="no usable GPU: hipErrorNoDevice")
BROKEN = stack.Stack(error="CuPy is installed but cannot be imported: libamdhip64.so.7")
NOTHING = stack.NOT_ASKED
RDNA = dataclasses.replace(ROCM, gpus=(dataclasses.replace(MI300, arch="gfx1100"),))


def shm(machine: M) -> M:
    return machine.folder("/dev/shm", mode=0o1777, uid=0)


def run_dir(machine: M | None = None, mode: int = 0o700, uid: int = 1000) -> M:
    return (machine or M()).folder("/run/user/1000", "/run/user/1000/rocmforge", mode=mode, uid=uid)


def having(machine: M, **fields: object) -> M:
    for name, value in fields.items():
        setattr(machine, name, value)
    return machine


Case = tuple[str, Callable[[], Finding], Status, str, str]

#: (what is looked at, how, status, words of what was found, words of what to change)
CASES: list[Case] = [
    # --- device nodes
    ("no GPU, none wanted", lambda: devices.device_nodes(M(), NOTHING, False), SKIPPED, "no GPU: neither /dev/kfd", ""),
    ("no GPU, one wanted", lambda: devices.device_nodes(M(), NOTHING, True), FAILED, "neither /dev/kfd nor /dev/nvidia0", r"devices: \[/dev/kfd, /dev/dri\]"),
    ("no node, and GPUs", lambda: devices.device_nodes(M(), ROCM, True), OK, "but the runtime finds GPUs", ""),
    ("AMD", lambda: devices.device_nodes(M().amd(), NOTHING, True), OK, "AMD: /dev/kfd, /dev/dri/renderD128, /dev/dri/renderD129$", ""),
    ("AMD, driver told", lambda: devices.device_nodes(having(M().amd(), texts={"/sys/module/amdgpu/version": "6.10.5\n"}), NOTHING, True), OK, "; driver amdgpu 6.10.5$", ""),
    ("NVIDIA", lambda: devices.device_nodes(M().nvidia(), NOTHING, True), OK, "NVIDIA: /dev/nvidia0$", ""),
    ("NVIDIA, driver told", lambda: devices.device_nodes(having(M().nvidia(), texts={"/proc/driver/nvidia/version": "NVRM version: NVIDIA 580.1\nGCC"}), NOTHING, True), OK, "; NVIDIA 580.1$", ""),
    ("kfd alone", lambda: devices.device_nodes(M().device("/dev/kfd"), NOTHING, True), FAILED, r"no /dev/dri/renderD\*", "pass /dev/dri in"),
    ("kfd alone, not wanted", lambda: devices.device_nodes(M().device("/dev/kfd"), NOTHING, False), WARNING, "renderD", "pass /dev/dri in"),
    ("kfd of a group", lambda: devices.device_nodes(M().amd().device("/dev/kfd", gid=109, opening=errno.EACCES), NOTHING, True), FAILED, "uid 1000 may not open /dev/kfd: it belongs to group 109, mode 0660, .* groups 27 1000", r'group_add: \["109"\]'),
    ("renders of a group", lambda: devices.device_nodes(M().amd().device("/dev/dri/renderD128", "/dev/dri/renderD129", opening=errno.EACCES), NOTHING, True), FAILED, "uid 1000 may not open /dev/dri/renderD128", 'group_add: .*"992"'),
    ("one render of two", lambda: devices.device_nodes(M().amd().device("/dev/dri/renderD129", opening=errno.EACCES), NOTHING, True), WARNING, "may not open /dev/dri/renderD129", "group 992"),
    ("kfd mounted only", lambda: devices.device_nodes(M().amd().device("/dev/kfd", opening=errno.EPERM), NOTHING, True), FAILED, "may not be used: Operation not permitted", "list it under `devices:`"),
    ("kfd broken", lambda: devices.device_nodes(M().amd().device("/dev/kfd", opening=errno.ENODEV), NOTHING, True), FAILED, "cannot be opened: No such device", "dmesg"),
    ("NVIDIA refused", lambda: devices.device_nodes(M().device("/dev/nvidia0", opening=errno.EACCES), NOTHING, True), FAILED, "may not open /dev/nvidia0", "group"),
    # --- variables
    ("variables, no GPU", lambda: devices.visible_devices(M(), False, None), SKIPPED, "none is requested", ""),
    ("no variable", lambda: devices.visible_devices(M(), True, None), OK, "no variable hides a GPU", ""),
    ("a variable", lambda: devices.visible_devices(M(HIP_VISIBLE_DEVICES="1,0").amd(), False, None), OK, "HIP_VISIBLE_DEVICES=1,0", ""),
    *((f"{name} hides all", lambda name=name: devices.visible_devices(M(**{name: ""}), True, None), FAILED, f"{name} is '': it hides", f"unset {name}") for name in devices.VISIBLE),
    ("-1 hides all", lambda: devices.visible_devices(M(CUDA_VISIBLE_DEVICES="-1"), True, None), FAILED, "hides every GPU", "unset"),
    ("hidden, none wanted", lambda: devices.visible_devices(M(HIP_VISIBLE_DEVICES="").amd(), False, None), WARNING, "hides every GPU", "unset"),
    ("two variables", lambda: devices.visible_devices(M(ROCR_VISIBLE_DEVICES="0", HIP_VISIBLE_DEVICES="0"), True, None), WARNING, "selects among", "one of the two"),
    ("peer alike", lambda: devices.visible_devices(M(HIP_VISIBLE_DEVICES="1").process(7, {"HIP_VISIBLE_DEVICES": "1", "HOME": "/"}), True, 7), OK, "=1", ""),
    ("peer otherwise", lambda: devices.visible_devices(M(HIP_VISIBLE_DEVICES="1").process(7, {"HIP_VISIBLE_DEVICES": "0,1"}), True, 7), FAILED, "here HIP_VISIBLE_DEVICES=1; in process 7 HIP_VISIBLE_DEVICES=0,1", "start both with the same"),
    ("peer without", lambda: devices.visible_devices(M(HIP_VISIBLE_DEVICES="1").process(7, {"HOME": "/"}), True, 7), FAILED, "in process 7 no variable hides", "same"),
    ("peer hidden", lambda: devices.visible_devices(M().process(7), True, 7), OK, "no variable", ""),
    # --- the older way of sharing
    ("legacy unset", lambda: devices.ipc_mode(M(), ROCM, True), OK, "is unset", ""),
    ("legacy off", lambda: devices.ipc_mode(M(HSA_ENABLE_IPC_MODE_LEGACY="0"), RDNA, True), OK, "is 0", ""),
    ("legacy on RDNA3", lambda: devices.ipc_mode(M(HSA_ENABLE_IPC_MODE_LEGACY="1"), RDNA, True), FAILED, "is 1, and gfx1100 cannot", "unset HSA_ENABLE_IPC_MODE_LEGACY"),
    ("legacy on CDNA", lambda: devices.ipc_mode(M(HSA_ENABLE_IPC_MODE_LEGACY="1"), ROCM, True), WARNING, "RDNA3 and RDNA4", "unset"),
    ("legacy, GPU unknown", lambda: devices.ipc_mode(M(HSA_ENABLE_IPC_MODE_LEGACY="1").amd(), BROKEN, False), WARNING, "RDNA3", "unset"),
    ("legacy, no GPU", lambda: devices.ipc_mode(M(HSA_ENABLE_IPC_MODE_LEGACY="1"), stack.NOT_ASKED, False), SKIPPED, "no GPU", ""),
    ("legacy on CUDA", lambda: devices.ipc_mode(M(HSA_ENABLE_IPC_MODE_LEGACY="1"), CUDA, True), SKIPPED, "not ROCm", ""),
    # --- CuPy and below
    ("CuPy not asked", lambda: stack.cupy(stack.NOT_ASKED, False), SKIPPED, "none is requested", ""),
    ("CuPy for ROCm", lambda: stack.cupy(ROCM, True), OK, r"CuPy 14.2.0 for ROCm, built for 7\.0", ""),
    ("CuPy for CUDA", lambda: stack.cupy(CUDA, True), OK, r"CuPy 14.2.0 for CUDA, built for 13\.0", ""),
    ("CuPy broken", lambda: stack.cupy(BROKEN, True), FAILED, "libamdhip64.so.7", r"pip install -c constraints.txt -e '\.\[rocm\]'.*LD_LIBRARY_PATH=/opt/rocm/lib"),
    ("CuPy broken, not wanted", lambda: stack.cupy(BROKEN, False), WARNING, "libamdhip64.so.7", "pip install"),
    ("runtime, no CuPy", lambda: stack.runtime(BROKEN, True), SKIPPED, "no CuPy", ""),
    ("HIP", lambda: stack.runtime(ROCM, True), OK, "HIP 7.0, driver 7.0; 0: AMD Instinct MI300X gfx942 at 0000:03:00.0", ""),
    ("CUDA", lambda: stack.runtime(CUDA, True), OK, "CUDA 13.0, driver 13.0; 0: NVIDIA H200 sm_90 at", ""),
    ("HIP 6 under a wheel for 7", lambda: stack.runtime(dataclasses.replace(ROCM, runtime=60342134), True), FAILED, "the runtime is HIP 6.3, but CuPy was built for 7.0", "install ROCm 7.x, or the CuPy wheel for ROCm 6"),
    ("an old NVIDIA driver", lambda: stack.runtime(dataclasses.replace(CUDA, driver=12080), True), FAILED, "driver supports CUDA 12.8, but the runtime is 13.0", "newer NVIDIA driver"),
    ("no GPU found", lambda: stack.runtime(NONE, True), FAILED, "hipErrorNoDevice", "device nodes"),
    ("no GPU found, none wanted", lambda: stack.runtime(NONE, False), WARNING, "hipErrorNoDevice", "device nodes"),
    ("no GPU, no reason", lambda: stack.runtime(dataclasses.replace(NONE, gpu_error=""), True), FAILED, "finds no GPU", "device nodes"),
    ("compiler, no CuPy", lambda: stack.compiler(M(), BROKEN, True), SKIPPED, "no CuPy", ""),
    ("hipcc", lambda: stack.compiler(having(M(), programs={"hipcc": "/opt/rocm/bin/hipcc"}), ROCM, True), OK, "/opt/rocm/bin/hipcc", ""),
    ("no hipcc", lambda: stack.compiler(M(), ROCM, True), FAILED, "hipcc is not on PATH", "put /opt/rocm/bin on PATH"),
    ("no hipcc, CUDA", lambda: stack.compiler(M(), CUDA, True), OK, "NVRTC", ""),
    ("cache, no CuPy", lambda: stack.kernel_cache(M(), stack.NOT_ASKED, False), SKIPPED, "no CuPy", ""),
    ("cache at home", lambda: stack.kernel_cache(M().folder("/home/user"), ROCM, True), OK, "/home/user/.cupy/kernel_cache", ""),
    ("cache elsewhere", lambda: stack.kernel_cache(M(CUPY_CACHE_DIR="/var/cache/cupy").folder("/var/cache"), ROCM, True), OK, "/var/cache/cupy", ""),
    ("cache read-only", lambda: stack.kernel_cache(having(M(), read_only={"/"}), ROCM, True), FAILED, r"kernel_cache is not writable \(at /\)", "set CUPY_CACHE_DIR"),
    ("GPU memory, no GPU", lambda: stack.device_memory(NONE, GIB, True), SKIPPED, "no GPU", ""),
    ("GPU memory, no budget", lambda: stack.device_memory(ROCM, None, True), OK, "GPU 0: 184320 MiB free of 196608", ""),
    ("GPU memory fits", lambda: stack.device_memory(ROCM, 100 * GIB, True), OK, "--memory is 102400 MiB on each", ""),
    ("GPU memory taken", lambda: stack.device_memory(ROCM, 185 * GIB, True), WARNING, "189440 MiB", "lower --memory, or stop"),
    ("GPU memory too small", lambda: stack.device_memory(ROCM, 193 * GIB, True), FAILED, "197632 MiB", "lower --memory"),
    ("one GPU too small", lambda: stack.device_memory(dataclasses.replace(ROCM, gpus=(MI300, dataclasses.replace(H200, ordinal=1))), 150 * GIB, True), FAILED, "GPU 1: .* of 142336", "lower"),
    # --- namespaces
    ("no peer", lambda: namespaces.namespaces(M(), None, True), SKIPPED, "--peer PID", ""),
    ("peer gone", lambda: namespaces.namespaces(M().process("self"), 7, True), FAILED, "no process 7 here", "pid: \"service:kvcache\""),
    ("peer beside", lambda: namespaces.namespaces(M().process("self").process(7), 7, True), OK, "process 7 shares ipc, pid, net", ""),
    ("peer not to be seen", lambda: namespaces.namespaces(M().process("self").process(7, ipc=""), 7, True), FAILED, "/proc/7/ns/ipc cannot be read", "as the user"),
    *((f"another {kind}", lambda kind=kind: namespaces.namespaces(M().process("self").process(7, **{kind: "2"}), 7, True), FAILED, rf"{kind}:.*\[1\] here, {kind}:\[2\] there", "docker compose") for kind in namespaces.KINDS),
    ("another pid, no GPU", lambda: namespaces.namespaces(M().process("self").process(7, pid="2", net="2"), 7, False), WARNING, "pid: .*; net: ", "share the pid namespace"),
    ("another net, no GPU", lambda: namespaces.namespaces(M().process("self").process(7, net="2"), 7, False), OK, "does not depend on them", ""),
    # --- the host's memory, files
    ("arenas fit", lambda: resources.shared_memory(shm(M()), ARENAS, GIB), OK, "8192 MiB free of 16384, --memory is 1024 MiB", ""),
    ("arenas do not fit now", lambda: resources.shared_memory(shm(M()), ARENAS, 9 * GIB), WARNING, "9216 MiB", "free space"),
    ("arenas never fit", lambda: resources.shared_memory(having(shm(M()), spaces=(64 << 20, 64 << 20)), ARENAS, GIB), FAILED, "64 MiB free of 64", "shm_size"),
    ("arenas without bounds", lambda: resources.shared_memory(having(shm(M()), spaces=(0, 0)), ARENAS, GIB), OK, "reports no size", ""),
    ("arenas forbidden", lambda: resources.shared_memory(having(shm(M()), read_only={"/dev/shm"}), ARENAS, GIB), FAILED, "uid 1000 may not write to /dev/shm", "another --arena-dir"),
    ("files", lambda: resources.open_files(M(), 256), OK, "1048576 open files", ""),
    ("few files", lambda: resources.open_files(having(M(), files=256), 256), WARNING, "256 open files; 256 connections need 320", "ulimit -n 320"),
    # --- addresses
    ("port free", lambda: addresses.listen(M(), TCP, OWN), OK, "127.0.0.1:50052 is free", ""),
    ("port taken", lambda: addresses.listen(having(M(), binding={str(TCP): errno.EADDRINUSE}), TCP, OWN), FAILED, "is in use", "stop the process"),
    ("port for metrics taken", lambda: addresses.metrics(having(M(), binding={str(TCP): errno.EADDRINUSE}), TCP, OWN), FAILED, "is in use", "choose another --metrics"),
    ("port of the service itself", lambda: addresses.listen(having(M(), binding={str(TCP): errno.EADDRINUSE}, serving={str(TCP): OWN.service}), TCP, OWN), OK, "in use by the running daemon", ""),
    ("port of the other service", lambda: addresses.listen(having(M(), binding={str(TCP): errno.EADDRINUSE}, serving={str(TCP): "an.Engine"}), TCP, OWN), FAILED, "is in use$", "stop the process"),
    ("metrics of the service itself", lambda: addresses.metrics(having(M(), binding={str(TCP): errno.EADDRINUSE}, pages={str(TCP): "# HELP rocmforge_kvcache_up x"}), TCP, OWN), OK, "in use by the running daemon", ""),
    ("metrics of the other service", lambda: addresses.metrics(having(M(), binding={str(TCP): errno.EADDRINUSE}, pages={str(TCP): "# HELP rocmforge_engine_up x"}), TCP, OWN), FAILED, "is in use$", "choose another --metrics"),
    ("not our address", lambda: addresses.listen(having(M(), binding={str(TCP): errno.EADDRNOTAVAIL}), TCP, OWN), FAILED, "not an address of this host", "ip addr"),
    ("a port of root's", lambda: addresses.listen(having(M(), binding={str(TCP): errno.EACCES}), TCP, OWN), FAILED, "Permission denied", "1024 or higher"),
    ("socket free", lambda: addresses.listen(run_dir(), UNIX, OWN), OK, "k.sock is free$", ""),
    ("socket folder to be made", lambda: addresses.listen(M().folder("/run/user/1000"), UNIX, OWN), OK, "directory will be created", ""),
    ("two folders missing", lambda: addresses.listen(M(), UNIX, OWN), FAILED, "rocmforge does not exist and cannot be created", "mkdir -p /run/user/1000/rocmforge"),
    ("folder not to be made", lambda: addresses.listen(having(M().folder("/run/user/1000"), read_only={"/run/user/1000"}), UNIX, OWN), FAILED, "cannot be created", "mkdir"),
    ("socket folder read-only", lambda: addresses.listen(having(run_dir(uid=0), read_only={str(UNIX.path.parent)}), UNIX, OWN), FAILED, "uid 1000 may not write to .*, which belongs to uid 0", "chown 1000"),  # type: ignore[union-attr]
    ("a file instead", lambda: addresses.listen(having(run_dir(), nodes={**run_dir().nodes, str(UNIX.path): Node(FILE, 1000, 1000)}), UNIX, OWN), FAILED, "exists and is not a socket", "move it away"),
    ("socket taken", lambda: addresses.listen(having(run_dir(), nodes={**run_dir().nodes, str(UNIX.path): Node(SOCKET, 1000, 1000)}, connecting={str(UNIX): 0}), UNIX, OWN), FAILED, "is in use", "stop the process"),
    ("socket of the service itself", lambda: addresses.listen(having(run_dir(), nodes={**run_dir().nodes, str(UNIX.path): Node(SOCKET, 1000, 1000)}, connecting={str(UNIX): 0}, serving={str(UNIX): OWN.service}), UNIX, OWN), OK, "in use by the running daemon", ""),
    ("socket left over", lambda: addresses.listen(having(run_dir(), nodes={**run_dir().nodes, str(UNIX.path): Node(SOCKET, 1000, 1000)}, connecting={str(UNIX): errno.ECONNREFUSED}), UNIX, OWN), OK, "left over", ""),
    ("folder for everybody", lambda: addresses.listen(run_dir(mode=0o777), UNIX, OWN), FAILED, "other users may replace files .*mode 0777", "chmod 700"),
    ("folder sticky", lambda: addresses.listen(run_dir(mode=0o1777), UNIX, OWN), FAILED, "other users may replace files .*mode 1777", "chmod 700"),
    ("folder of another user", lambda: addresses.listen(run_dir(uid=33), UNIX, OWN), FAILED, "uid 33", "chmod 700"),
    ("daemon there", lambda: addresses.call(having(M(), connecting={str(UNIX): 0}), UNIX, "--kvcache", "start it"), OK, "answers", ""),
    ("daemon not there", lambda: addresses.call(M(), UNIX, "--kvcache", "start it"), FAILED, "No such file", "start it, or correct --kvcache"),
    ("daemon of another user", lambda: addresses.call(having(M(), connecting={str(UNIX): errno.EACCES}), UNIX, "--kvcache", "start it"), FAILED, "uid 1000 may not connect", "one user"),
    # --- for real
    ("file round trip", lambda: roundtrip.file_round_trip(shm(M()).prints("roundtrip", {"error": ""}), ARENAS), OK, "in /dev/shm$", ""),
    ("file round trip fails", lambda: roundtrip.file_round_trip(shm(M()).prints("roundtrip", {"error": "No space left"}), ARENAS), FAILED, "No space left", "another --arena-dir"),
    ("file round trip hangs", lambda: roundtrip.file_round_trip(having(M(), ran={"roundtrip": Ran(None, "", "")}), ARENAS), FAILED, "no answer within 60 s", "arena-dir"),
    ("file round trip crashes", lambda: roundtrip.file_round_trip(having(M(), ran={"roundtrip": Ran(-7, "", "a\nBus error\n")}), ARENAS), FAILED, "exited with status -7: Bus error", "arena-dir"),
    ("GPU round trip, no GPU", lambda: roundtrip.gpu_round_trip(M(), NONE, True), SKIPPED, "no GPU to try", ""),
    ("GPU round trip", lambda: roundtrip.gpu_round_trip(M().prints("roundtrip", {"error": ""}), ROCM, True), OK, "on GPU 0$", ""),
    ("GPU round trip fails", lambda: roundtrip.gpu_round_trip(M().prints("roundtrip", {"error": "ipcOpenMemHandle: 17"}), ROCM, True), FAILED, "ipcOpenMemHandle", "SYS_PTRACE"),
    ("GPU round trip fails, not wanted", lambda: roundtrip.gpu_round_trip(M().prints("roundtrip", {"error": "x"}), ROCM, False), WARNING, "x", "compose|containers"),
]  # fmt: skip


@pytest.mark.parametrize(("look", "status", "found", "change"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_checks(look: Callable[[], Finding], status: Status, found: str, change: str) -> None:
    finding = look()
    assert finding.status is status, finding
    assert re.search(found, finding.found), finding.found
    assert bool(finding.change) == (status in (WARNING, FAILED)), "what is wrong comes with what to change"
    assert re.search(change, finding.change), finding.change


def test_every_gpu_is_tried_or_the_one_that_is_meant() -> None:
    machine = M().prints("roundtrip", {"error": ""})
    two = dataclasses.replace(ROCM, gpus=(MI300, dataclasses.replace(MI300, ordinal=1)))
    assert roundtrip.gpu_round_trip(machine, two, True).found.endswith("on GPU 0, 1")
    assert [command[-2:] for command in machine.commands] == [["gpu", "0"], ["gpu", "1"]]
    assert roundtrip.gpu_round_trip(machine, two, True, only=1).found.endswith("on GPU 1")
    assert len(machine.commands) == 3
    assert stack.runtime(two, True, only=1).status is OK
    assert "--gpu 2: out of range; the runtime has 2" in stack.runtime(two, True, only=2).found


# --- the probe --------------------------------------------------------------------------------------------------------


def test_the_probe_is_read_back_as_it_was_told() -> None:
    for told in (ROCM, CUDA, NONE, BROKEN):
        assert stack.ask(M().stack(told)) == told


@pytest.mark.parametrize(
    ("ran", "words"),
    [
        (Ran(None, "", ""), "took longer than 40 s; the driver may hang"),
        (Ran(-11, "", ""), "exited with status -11: no output"),
        (Ran(1, "", "Traceback\nImportError: libc\n"), "status 1: ImportError: libc"),
        (Ran(0, '{"unheard": 1}', ""), "exited with status 0"),
        (Ran(0, "[]", ""), "exited with status 0"),
    ],
)
def test_a_probe_that_fails_is_an_error_with_words(ran: Ran, words: str) -> None:
    found = stack.ask(having(M(), ran={"probe": ran}))
    assert words in found.error and not found.gpus
