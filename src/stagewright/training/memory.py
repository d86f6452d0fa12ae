"""How much memory a device has in use: as the allocator counts it, and as the driver does."""

from __future__ import annotations

import resource

import torch


def peak_bytes(device: torch.device) -> int:
    """The most memory that this worker had: of its card, by torch's allocator, or of its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def driver_bytes(device: torch.device) -> int | None:
    """What the driver shows as used on a card, by whomever; None without a card, or without nvidia-ml-py."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        # Cards are asked for by name: CUDA_VISIBLE_DEVICES changes torch's numbers, not the driver's.
        card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return int(pynvml.nvmlDeviceGetMemoryInfo(card).used)
    except pynvml.NVMLError:
        return None


def memory_figures(device: torch.device) -> dict[str, int]:
    """Both counts under the names that events use; what cannot be known is left out."""
    found = {"memory_bytes": peak_bytes(device), "driver_bytes": driver_bytes(device)}
    return {name: value for name, value in found.items() if value is not None}
