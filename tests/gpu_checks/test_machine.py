from __future__ import annotations

import sys

import needs
import pytest
from environment import of_task, script_of
from machine import Gpu, Machine, parse_gpus, this_machine

PRINTED = """0, NVIDIA H100 80GB HBM3, 81559, 9.0, GPU-167607f5-d604
1, NVIDIA H200, 143771, 9.0, GPU-4337c15c-5157
2, NVIDIA B200, 183359, 10.0, GPU-a08486fb-b706
"""


def test_gpus_are_those_of_nvidia_smi_that_are_visible():
    assert [gpu.index for gpu in parse_gpus(PRINTED, None)] == [0, 1, 2]
    (found,) = parse_gpus(PRINTED, "1")
    assert (found.name, found.capability, round(found.memory_gb)) == ("NVIDIA H200", "9.0", 151)
    assert [gpu.index for gpu in parse_gpus(PRINTED, "2,GPU-167607f5")] == [0, 2]
    assert parse_gpus(PRINTED, "") == parse_gpus("", None) == ()


@pytest.mark.parametrize("text", ["No devices were found", PRINTED.replace("81559", "[N/A]")])
def test_other_words_of_nvidia_smi_are_quoted(text):
    with pytest.raises(ValueError, match="nvidia-smi prints"):
        parse_gpus(text, None)


def test_a_machine_whose_gpus_cannot_be_listed_is_told_so(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho no driver >&2\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match="nvidia-smi fails: no driver"):
        this_machine()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    with pytest.raises(ValueError, match="MIG instances are not supported"):
        this_machine()


def test_large_layers_run_in_two_processes_on_80_gb_and_in_three_on_141():
    h100, h200, _ = parse_gpus(PRINTED, None)
    assert Machine((h100,), (0,)).large_jobs() == 2
    assert Machine((h200,), (0,)).large_jobs() == 3
    assert Machine((h200, h100), (0,)).large_jobs() == 2


def test_small_tests_run_in_as_many_processes_as_memory_and_cores_have_room_for(tiny):
    h100, h200, _ = parse_gpus(PRINTED, None)
    alone, shared = tiny("a"), tiny("b", beside=3)
    assert [Machine((h100,), range(16)).jobs(task, [0]) for task in (alone, shared)] == [14, 4]
    assert [Machine((h200,), range(16)).jobs(task, [1]) for task in (alone, shared)] == [16, 5]
    assert Machine((h100, h200), range(64)).jobs(shared, [0, 1]) == 4


def test_each_gpu_has_its_share_of_cores(tiny):
    gpus = tuple(Gpu(index, "H100", 85.0, "9.0") for index in (1, 3))
    machine = Machine(gpus, (0, 1, 2, 3, 8, 9))
    assert machine.cores_of([1]) == [0, 1, 2]
    assert machine.cores_of([1, 3]) == [0, 1, 2, 3, 8, 9]
    assert (machine.jobs(tiny("a"), [3]), machine.jobs(tiny("b", beside=3), [3])) == (3, 1)
    assert Machine(gpus, (5,)).cores_of([3]) == [5]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"gpus": 3}, "needs 3 GPUs"),
        ({"needs": ("sm90",)}, None),
        ({"needs": ("sm90", "absent")}, "needs the package absent-package"),
        ({"needs": ("program",)}, "needs no-such-program on the PATH"),
    ],
)
def test_a_reason_names_what_is_missing(tiny, machine, monkeypatch, fields, reason):
    monkeypatch.setitem(needs.NEEDS, "absent", needs._package("no_such_module", "absent-package"))
    monkeypatch.setitem(needs.NEEDS, "program", needs._program("no-such-program"))
    assert needs.why_not(tiny("a", **fields), machine(2)) == reason


def test_other_gpus_are_no_hopper(tiny):
    machine = Machine((Gpu(0, "B200", 190.0, "10.0"),), (0,))
    assert needs.why_not(tiny("a", needs=("sm90",)), machine).endswith("compute capability 9.0")
    assert needs.why_not(tiny("a"), Machine((), (0,))) == "needs a GPU"


def test_a_folder_without_a_package_is_none(tmp_path, monkeypatch):
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert needs._package("only_a_folder", "a package")(None) == "needs the package a package"


def test_engines_on_different_gpus_have_different_caches(tiny, tmp_path):
    found = [of_task(tiny("a"), gpus, folder=tmp_path, cores=8) for gpus in ([0], [1], [0, 1])]
    for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "CUDA_VISIBLE_DEVICES"):
        assert len({variables[name] for variables in found}) == 3
    assert len({variables["MOEQUANT_ENGINES_DIR"] for variables in found}) == 1
    assert (found[0]["PYTHONSAFEPATH"], found[2]["CUDA_VISIBLE_DEVICES"]) == ("1", "0,1")


def test_scripts_that_import_what_is_beside_them_find_it(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    task = tiny("a", safe_path=False)
    assert "PYTHONSAFEPATH" not in of_task(task, [0], folder=tmp_path, cores=2)


def test_command_lines_are_filled_in(tiny, machine, tmp_path):
    task = tiny("a", "{python} -n {jobs} {large_jobs} {cores}", "x {folder}/y > {out}/z")
    places = {"folder": tmp_path / "a b", "out": tmp_path}
    script = script_of(task, [0], machine=machine(1), **places)
    assert script.splitlines() == [
        "set -ex", f"{sys.executable} -n 2 2 2", f"x '{tmp_path}/a b'/y > {tmp_path}/z"
    ]  # fmt: skip
