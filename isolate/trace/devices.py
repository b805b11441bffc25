"""The NVIDIA driver and GPUs of this machine, asked through cuda-python."""

from __future__ import annotations

from typing import Any

from isolate.errors import DeviceError
from isolate.trace.gpus import Gpu, Limits

#: field of a GPU or its limits -> CU_DEVICE_ATTRIBUTE_ that holds it
_OF_A_GPU = {"processors": "MULTIPROCESSOR_COUNT", "integrated": "INTEGRATED"}
_LIMITS = {
    "threads_per_processor": "MAX_THREADS_PER_MULTIPROCESSOR",
    "blocks_per_processor": "MAX_BLOCKS_PER_MULTIPROCESSOR",
    "registers_per_processor": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "registers_per_block": "MAX_REGISTERS_PER_BLOCK",
    "shared_per_processor": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "shared_per_block": "MAX_SHARED_MEMORY_PER_BLOCK",
    "shared_per_block_optin": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "shared_reserved": "RESERVED_SHARED_MEMORY_PER_BLOCK",
    "cluster_launch": "CLUSTER_LAUNCH",
}


def gpus() -> tuple[list[Gpu], str]:
    """Each GPU with its limits, and a sentence: the driver, or why there are none."""
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
    found = [_gpu(driver, ordinal, version) for ordinal in range(driver.cuDeviceGetCount()[1])]
    return found, f"driver for CUDA {version // 1000}.{version % 1000 // 10}"


def first_gpu() -> Gpu:
    """The first GPU. DeviceError says why there is none."""
    found, why = gpus()
    if not found:
        raise DeviceError(f"there is no GPU to describe: {why}")
    return found[0]


def _gpu(driver: Any, ordinal: int, version: int) -> Gpu:
    device = driver.cuDeviceGet(ordinal)[1]

    def attribute(name: str) -> int:
        which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(driver.cuDeviceGetAttribute(which, device)[1])

    source = f"cuDeviceGetAttribute, driver for CUDA {version // 1000}.{version % 1000 // 10}"
    limits: dict[str, Any] = {field: attribute(name) for field, name in _LIMITS.items()}
    limits["cluster_launch"] = bool(limits["cluster_launch"])
    return Gpu(
        name=driver.cuDeviceGetName(128, device)[1].split(b"\0")[0].decode(),
        capability=10 * attribute("COMPUTE_CAPABILITY_MAJOR") + attribute("COMPUTE_CAPABILITY_MINOR"),
        processors=attribute(_OF_A_GPU["processors"]),
        memory_mib=driver.cuDeviceTotalMem(device)[1] >> 20,
        integrated=bool(attribute(_OF_A_GPU["integrated"])),
        limits=Limits(**limits, source=source),
        source=dict.fromkeys(("name", "capability", "processors", "memory_mib"), source),
    )
