"""The NVIDIA driver and GPUs of this machine, asked through cuda-python."""

from __future__ import annotations

from typing import Any


def gpus() -> tuple[list[dict[str, Any]], str]:
    """Each GPU's name, compute capability and memory (bytes), and a sentence: the driver, or why there are none."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return [], f"cuda-python cannot be imported ({error})"
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError:
        return [], "no NVIDIA driver is installed here (libcuda.so.1 was not found)"
    if status != driver.CUresult.CUDA_SUCCESS:
        return [], f"the NVIDIA driver does not start here: {status.name}"
    version = driver.cuDriverGetVersion()[1]
    found = []
    for ordinal in range(driver.cuDeviceGetCount()[1]):
        device = driver.cuDeviceGet(ordinal)[1]
        major, minor = (
            driver.cuDeviceGetAttribute(getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device)[1]
            for name in ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR")
        )
        found.append(
            {
                "name": driver.cuDeviceGetName(128, device)[1].split(b"\0")[0].decode(),
                "compute_capability": f"{major}.{minor}",
                "memory_bytes": driver.cuDeviceTotalMem(device)[1],
            }
        )
    return found, f"driver for CUDA {version // 1000}.{version % 1000 // 10}"
