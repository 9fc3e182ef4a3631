"""Where samples were made, as far as it can change their bits."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import msgspec
import torch

__all__ = ["MachineFacts", "differing_facts", "machine_facts"]

CPUINFO = Path("/proc/cpuinfo")
PACKAGES = ("aengine-rollout", "torch", "numba", "llvmlite", "numpy")
BUILT_IN = {"mkl": r"Math Kernel Library Version ([\w.]+)", "onednn": r"MKL-DNN v([\w.]+)"}
"""Libraries inside torch, by the words with which its build report names their versions."""
VECTOR_FLAG = re.compile(r"(sse|ssse|pni$|avx|fma|f16c$|xop$|amx|asimd|neon$|sve|sme($|2|_)|bf16$|i8mm$|fphp$)")
ENVIRONMENT = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NUMBA_CPU_FEATURES",
    "NUMBA_CPU_NAME",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
)
"""Variables with which a user chooses the instructions that the libraries above use."""
TYPE_FACTS = ("cpu_features", "cpu_capability", "libraries", "environment")
"""Facts that choose code; the others name the machine."""


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Where samples were made: equal bits are promised on one machine only."""

    system: str
    processor: str
    cpu_count: int
    cpu_features: tuple[str, ...]
    """Vector extensions that the system reports, sorted; none where it does not say."""
    cpu_capability: str
    """The widest vector code that torch uses, such as `"AVX512"`."""
    num_threads: int
    """Threads of one product or kernel. Bits labelled invariant do not depend on it."""
    python: str
    libraries: dict[str, str]
    """Versions of what computes, the libraries inside torch included."""
    environment: dict[str, str]
    """Variables that are set and choose the instructions these use."""


def machine_facts() -> MachineFacts:
    """Of this process. `num_threads` is torch's setting in the calling thread."""
    info = _cpuinfo()
    flags = (info.get("flags") or info.get("Features") or "").split()
    return MachineFacts(
        system=platform.platform(),
        processor=info.get("model name") or platform.processor() or platform.machine(),
        cpu_count=os.cpu_count() or 0,
        cpu_features=tuple(sorted({flag for flag in flags if VECTOR_FLAG.match(flag)})),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        num_threads=torch.get_num_threads(),
        python=platform.python_version(),
        libraries={name: importlib.metadata.version(name) for name in PACKAGES} | _built_in(torch.__config__.show()),
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    )


def differing_facts(theirs: MachineFacts, ours: MachineFacts) -> tuple[str, ...]:
    """What may give other bits here than there, one clause each; empty where the same code runs on the same kind of
    processor."""
    pairs: list[tuple[str, Any, Any]] = [("processor", theirs.processor, ours.processor)]
    for name in TYPE_FACTS:
        a, b = getattr(theirs, name), getattr(ours, name)
        if isinstance(a, dict):
            pairs += [(key, a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys())]
        elif name == "cpu_features":
            pairs.append((name, " ".join(sorted(set(a) - set(b))), " ".join(sorted(set(b) - set(a)))))
        else:
            pairs.append((name, a, b))
    return tuple(f"{name}: {a or 'none'} there, {b or 'none'} here" for name, a, b in pairs if a != b)


def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first processor, by field name; empty elsewhere."""
    if not CPUINFO.is_file():
        return {}
    first = CPUINFO.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _built_in(report: str) -> dict[str, str]:
    found = {name: re.search(pattern, report) for name, pattern in BUILT_IN.items()}
    return {name: match.group(1) for name, match in found.items() if match}
