"""What is written of a machine, and what of it can change bits."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from aengine.audit import machine
from aengine.audit.machine import MachineFacts, differing_facts, machine_facts

CPUINFO = """processor\t: 0
model name\t: Some CPU
flags\t\t: fpu sse sse4_1 ssse3 pni avx avx512_bf16 fma smep smap f16c amx_tile rdtscp

processor\t: 1
model name\t: Other CPU
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd sve sve2 bf16 sme sha1 crc32\n"


def facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpuinfo: str | None) -> MachineFacts:
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(cpuinfo, encoding="utf-8")
    monkeypatch.setattr(machine, "CPUINFO", path)
    return machine_facts()


def test_libraries_inside_torch_are_named_with_their_versions() -> None:
    libraries = machine_facts().libraries
    assert set(libraries) >= {"aengine-rollout", "torch", "numba", "llvmlite", "numpy"}
    assert all(libraries.values())
    found = machine._built_in(
        "  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build\n"
        "  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa71049cd)\n"
    )
    assert found == {"mkl": "2024.2", "onednn": "3.12.0"}
    assert machine._built_in("built with OpenBLAS") == {}


def test_only_vector_extensions_of_the_first_processor_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = facts(monkeypatch, tmp_path, CPUINFO)
    assert found.processor == "Some CPU"
    assert found.cpu_features == ("amx_tile", "avx", "avx512_bf16", "f16c", "fma", "pni", "sse", "sse4_1", "ssse3")


def test_arm_names_them_features(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert facts(monkeypatch, tmp_path, ARM).cpu_features == ("asimd", "bf16", "sme", "sve", "sve2")


def test_without_cpuinfo_the_facts_are_what_python_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = facts(monkeypatch, tmp_path, None)
    assert found.processor and not found.cpu_features


def test_variables_that_choose_instructions_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    assert machine_facts().environment["MKL_CBWR"] == "AVX2"


def test_facts_that_cannot_change_bits_do_not_differ() -> None:
    ours = machine_facts()
    other = msgspec.structs.replace(ours, system="another", cpu_count=99, num_threads=7, python="3.13.1")
    assert differing_facts(other, ours) == ()


def test_facts_that_can_change_bits_are_named_one_by_one() -> None:
    ours = msgspec.structs.replace(machine_facts(), cpu_features=("avx", "fma"), processor="A", cpu_capability="AVX2")
    theirs = msgspec.structs.replace(
        ours,
        processor="B",
        cpu_features=("avx", "avx512f"),
        cpu_capability="AVX512",
        libraries=ours.libraries | {"torch": "2.0"},
        environment={"MKL_CBWR": "AVX2"},
    )
    assert differing_facts(theirs, ours) == (
        "processor: B there, A here",
        "cpu_features: avx512f there, fma here",
        "cpu_capability: AVX512 there, AVX2 here",
        f"torch: 2.0 there, {ours.libraries['torch']} here",
        "MKL_CBWR: AVX2 there, none here",
    )
