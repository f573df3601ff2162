"""What a measurement ran on: processor, load, versions, and the memory that was needed."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("hispec", "torch", "transformers", "numpy")


def describe(device: torch.device) -> dict[str, Any]:
    """Machine, versions and threads, and the load average of the last minute before anything runs."""
    return {
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "load_at_start": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        },
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in _PACKAGES},
    }


def forget_peak(device: torch.device) -> None:
    """Start to look for a new peak of memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # not Linux, or not allowed: `peak_bytes` tells nothing then


def peak_bytes(device: torch.device) -> int | None:
    """Most memory in use since `forget_peak`: the device's, else this process's; None where it cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        if not os.access("/proc/self/clear_refs", os.W_OK):
            return None
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None


def processor() -> str:
    """The name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
