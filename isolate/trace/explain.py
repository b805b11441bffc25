"""Why a CUDA call failed, in a sentence, from what was read at the failing call and nothing else."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources
from math import prod

from isolate.fault import Call, Fault, Signature, StepInFlight
from isolate.trace.backtrace import frames_of
from isolate.trace.hooks import MODES
from isolate.trace.launch import kernel_name, launch_of, launches_before
from isolate.trace.origin import ASYNCHRONOUS, Origin, find_origin
from isolate.trace.record import CopyDetail, Failure, Kind, LaunchDetail, Record
from isolate.trace.ring import Ring

#: A cluster of more blocks needs a kernel that allows a size which is not portable (CUDA C++ Programming Guide, 5.2.1).
PORTABLE_CLUSTER = 8
_GGML_REPORT = re.compile(
    r"in function (?P<function>\S+) at (?P<file>.+):(?P<line>\d+)\n\s*(?P<statement>[^\n]+)", re.MULTILINE
)
_GGML_ERROR = re.compile(r"(?:CUDA|ROCm|MUSA) error: (?P<text>[^\n]+)")
_GGML_OPERATION = re.compile(r"^\S+: (?P<text>\w+ failed)$", re.MULTILINE)


#: what the simulated device says of a call it refuses (native/dry/error.c)
_DRY_DEVICE = re.compile(r"^dry device: (.+)$", re.MULTILINE)


@cache
def _errors() -> dict[str, dict[str, list[str]]]:
    table = resources.files("isolate.trace").joinpath("errors.json").read_text(encoding="utf-8")
    errors: dict[str, dict[str, list[str]]] = json.loads(table)
    return errors


def error_text(code: int, kind: Kind | None = None) -> str:
    """An error's name and meaning: of CUDA, or of cuBLAS for records of that kind."""
    family = "cublas" if kind == Kind.BLAS else "cuda"
    name, meaning = _errors()[family].get(str(code), (f"{family} error {code}", ""))
    return f"{name}: {meaning}" if meaning else name


def why_refused(failure: Failure) -> list[str]:
    """The limits that a launch breaks, each a clause; empty where none of those that were read is broken."""
    detail = failure.record.detail
    if not isinstance(detail, LaunchDetail):
        return []
    return [
        *_broken_geometry(detail, failure.limits),
        *_broken_threads(detail, failure.attributes, failure.limits),
        *_broken_shared_memory(detail, failure.attributes, failure.limits),
        *_broken_cluster(detail),
    ]


def _broken_geometry(detail: LaunchDetail, limits: dict[str, int]) -> list[str]:
    broken = []
    for what, sizes in (("grid", detail.grid), ("block", detail.block)):
        for axis, size in zip("xyz", sizes, strict=True):
            limit = limits.get(f"{what}_{axis}")
            if size == 0:
                broken.append(f"{what} {_sizes(sizes)} has a dimension of 0")
            elif limit is not None and size > limit:
                broken.append(f"{what} {_sizes(sizes)} has {axis} = {size}, and the device allows {limit}")
    return broken


def _broken_threads(detail: LaunchDetail, attributes: dict[str, int], limits: dict[str, int]) -> list[str]:
    threads = prod(detail.block)
    block = f"{_sizes(detail.block)} = {threads} threads a block"
    most = limits.get("max_threads")
    if most is not None and threads > most:
        return [f"{block}, and the device allows {most}"]
    allowed = attributes.get("max_threads")
    if allowed is None or threads <= allowed:
        return []
    registers, available = attributes.get("registers"), limits.get("registers")
    if registers is not None and available is not None and _registers(registers, threads) > available:
        return [
            f"{block}, and with its {registers} registers a thread this kernel allows {allowed} "
            f"(the device has {available} registers a block)"
        ]
    return [f"{block}, and this kernel allows at most {allowed}"]


def _registers(each: int, threads: int) -> int:
    """Registers that a block takes: given to whole warps, in units of 256 (CUDA C++ Programming Guide, 5.2.3)."""
    return -(-each * 32 // 256) * 256 * -(-threads // 32)


def _broken_shared_memory(detail: LaunchDetail, attributes: dict[str, int], limits: dict[str, int]) -> list[str]:
    allowed, static = attributes.get("shared_dynamic_max"), attributes.get("shared_static", 0)
    most = limits.get("shared_optin")
    if most is not None and detail.shared + static > most:
        fixed = f" and {static} that the kernel has itself" if static else ""
        return [f"{detail.shared} bytes of dynamic shared memory{fixed}, and the device allows {most} a block"]
    if allowed is not None and detail.shared > allowed:
        return [
            f"{detail.shared} bytes of dynamic shared memory, and this kernel allows {allowed} "
            "until cudaFuncSetAttribute raises it"
        ]
    return []


def _broken_cluster(detail: LaunchDetail) -> list[str]:
    if not any(detail.cluster):
        return []
    broken = []
    if any(size and cells % size for size, cells in zip(detail.cluster, detail.grid, strict=True)):
        broken.append(f"a cluster of {_sizes(detail.cluster)} does not divide grid {_sizes(detail.grid)}")
    if prod(detail.cluster) > PORTABLE_CLUSTER:
        blocks = prod(detail.cluster)
        broken.append(f"a cluster of {blocks} blocks, and {PORTABLE_CLUSTER} is what every kernel may have")
    return broken


def other_architecture(failure: Failure) -> str:
    """That the code was compiled for another compute capability than the device has; "" where it was not."""
    code, major, minor = failure.attributes.get("ptx"), failure.limits.get("major"), failure.limits.get("minor")
    if not code or major is None or minor is None or code == 10 * major + minor:
        return ""
    return (
        f"its code was compiled for compute capability {code // 10}.{code % 10} and the device has {major}.{minor}: "
        "a limit that the host picks by the device need not be the one that the code has"
    )


def _sizes(sizes: tuple[int, int, int]) -> str:
    return f"({', '.join(map(str, sizes))})"


def _subject(record: Record) -> str:
    if isinstance(record.detail, LaunchDetail):
        return f"launch {record.launch} of {kernel_name(record.name)}"
    if isinstance(record.detail, CopyDetail) and record.detail.bytes:
        return f"{record.call} of {record.detail.bytes} bytes"
    return record.call


def explanation(found: Origin) -> str:
    """Why it failed, as far as it was read."""
    if found.origin is None:
        return (
            f"{error_text(found.code)}; the error was there already when {_subject(found.report)} was made, "
            "and no call that the hooks saw made it"
        )
    said = error_text(found.code, found.origin.kind)
    sentences = []
    if found.code in ASYNCHRONOUS and not found.exact:
        sentences.append(
            f"{said}; {_subject(found.origin)} is the first call to show it, so the kernel that caused it was launched "
            "at that point or before: this origin is an upper bound"
        )
    elif found.code in ASYNCHRONOUS:
        sentences.append(f"{said}; the device was in order before {_subject(found.origin)} and not after it")
    elif isinstance(found.origin.detail, LaunchDetail) and found.failure is not None:
        broken = why_refused(found.failure)
        if broken:
            sentences.append(f"{_subject(found.origin)} cannot run: {'; '.join(broken)}")
        else:
            sentences.append(f"{said}; none of the limits that were read is broken by {_subject(found.origin)}")
        architecture = other_architecture(found.failure)
        if architecture:
            sentences.append(architecture)
    else:
        sentences.append(f"{_subject(found.origin)} returned {said}")
    if found.report.number != found.origin.number:
        sentences.append(f"it was only reported by {found.report.call}")
    return "; ".join(sentences)


def reported_by(log: str) -> Call | None:
    """The place in ggml that reported a CUDA error, from its log (ggml_cuda_error); None where it did not."""
    found = list(_GGML_REPORT.finditer(log))
    if not found:
        return None
    place = found[-1]
    before = log[: place.start()]
    text = [match["text"] for match in list(_GGML_ERROR.finditer(before))[-1:]]
    text += [match["text"] for match in list(_GGML_OPERATION.finditer(before))[-1:]]
    file = place["file"].rsplit("/", 1)[-1]
    return Call(place["function"], None, "; ".join([*text, place["statement"].strip()]), file, int(place["line"]))


def sanitizer_command(ring: Ring, record: Record) -> str:
    """The options of compute-sanitizer that check this launch alone; "" for other calls."""
    if record.kind != Kind.LAUNCH:
        return ""
    name = kernel_name(record.name).split("<", 1)[0].rsplit("::", 1)[-1]
    skip = sum(
        earlier.kind == Kind.LAUNCH and earlier.number < record.number and name in earlier.name
        for earlier in ring.records()
    )
    return f"compute-sanitizer --tool memcheck --kernel-regex kns={name} --launch-skip {skip} --launch-count 1"


def modes_on(ring: Ring) -> dict[str, str]:
    """The modes of the hooks that were on, and what each changed."""
    mode = ring.mode
    return {name: changed for name, (bit, changed) in MODES.items() if mode & bit}


def cuda_fault(ring: Ring, step: StepInFlight, log: str = "") -> Fault | None:
    """The CUDA error that a trace holds, as a fault; None where it holds none. `log` is what the library logged."""
    found = find_origin(ring)
    if found is None:
        return None
    record = found.origin or found.report
    launch = launch_of(record, found.failure)
    where = launch.demangled if launch else record.call
    evidence: dict[str, object] = {"exact": found.exact, "launches": record.launch}
    if found.failure is not None:
        evidence["backtrace"] = frames_of(found.failure)
        if found.failure.driver_log:
            evidence["driver_log"] = found.failure.driver_log
    if found.code in ASYNCHRONOUS and launch:
        evidence["compute_sanitizer"] = sanitizer_command(ring, record)
    if told := _DRY_DEVICE.findall(log):
        evidence["dry_device"] = told[-1]
    modes = modes_on(ring)
    if modes:
        evidence["modes"] = modes
    said = error_text(found.code, record.kind)
    return Fault(
        kind="cuda",
        signature=Signature("cuda", where, found.code, step.kind),
        step=step,
        origin=Call(found.origin.call if found.origin else "a call that no hook covers", found.code, said),
        report=reported_by(log) or Call(found.report.call, found.code, said),
        explanation=explanation(found),
        launch=launch,
        evidence=evidence,
        log=tuple(text.rstrip() for text in log.splitlines()[-20:] if text.strip()),
        before=launches_before(ring, record.number),
    )
