"""The catalogue of GPUs: complete, with sources, and open to a user's own."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from isolate.errors import DeviceError
from isolate.trace import gpus

DATA = json.loads((Path(gpus.__file__).parent / "gpus.json").read_text())


def test_what_users_of_llama_cpp_have_is_there() -> None:
    wanted = (
        "t4 rtx2080ti a100 rtx3060 rtx3090ti l4 rtx4090 h100 h200 b200 rtx5090 orin thor l40s a10 v100 gtx1080ti p40"
    )
    assert set(wanted.split()) <= set(gpus.names())


@pytest.mark.parametrize("name", gpus.names())
def test_every_value_has_its_source(name: str) -> None:
    gpu = DATA["gpus"][name]
    assert set(gpu["source"]) == {"processors", "memory_mib", "peer_access"}
    assert all(gpu["source"].values())
    assert DATA["capabilities"][str(gpu["capability"])]["source"]


@pytest.mark.parametrize("name", gpus.names())
def test_every_gpu_has_limits_that_fit_together(name: str) -> None:
    gpu = gpus.find(name.upper())
    limits = gpu.limits
    assert limits is not None
    # NVIDIA's guide: what a block can have is what a multiprocessor has, less what the driver keeps
    assert limits.shared_per_block_optin in (
        limits.shared_per_processor - limits.shared_reserved,
        limits.shared_per_block,
    )
    assert limits.shared_reserved == (1024 if gpu.capability >= 80 else 0)
    assert limits.cluster_launch == (gpu.capability >= 90)
    assert limits.threads_per_processor in (1024, 1536, 2048)


def test_the_h200_is_as_measured() -> None:
    gpu = gpus.find("h200")
    assert (gpu.name, gpu.capability, gpu.processors) == ("NVIDIA H200", 90, 132)
    assert gpu.limits is not None
    assert gpu.limits.shared_per_block_optin == 232448


def test_a_gpu_can_be_added_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"name": "NVIDIA A2", "capability": 86, "processors": 10, "memory_mib": 15000}')
    assert gpus.find(str(path)).limits == gpus.find("rtx3060").limits
    whole = msgspec.structs.replace(gpus.find(str(path)), capability=130)
    gpus.save(whole, path)
    assert gpus.find(str(path)) == whole


def test_several_gpus_are_named_with_commas() -> None:
    assert [gpu.name for gpu in gpus.find_all("h200, T4")] == ["NVIDIA H200", "Tesla T4"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not describe a GPU: "),
        ("{}", "missing required field `name`"),
        ('{"name": "x", "capability": 86, "processors": 10}', "missing required field `memory_mib`"),
        ('{"name": "x", "capability": "8.6", "processors": 10, "memory_mib": 1}', "Expected `int`, got `str`"),
        ('{"name": "x", "capability": 86, "processors": 10, "memory_mib": 1, "sms": 3}', "unknown field `sms`"),
        ('{"name": "x", "capability": 86, "processors": 0, "memory_mib": 1}', "are positive"),
        ('{"name": "x", "capability": 131, "processors": 1, "memory_mib": 1}', "must have `limits`"),
        (
            '{"name": "x", "capability": 86, "processors": 1, "memory_mib": 1, "limits": {"threads_per_processor": 1536, '
            '"blocks_per_processor": 16, "registers_per_processor": 65536, "registers_per_block": 65536, '
            '"shared_per_processor": 1000, "shared_per_block": 49152, "shared_per_block_optin": 101376, '
            '"shared_reserved": 1024, "cluster_launch": false}}',
            "the limits contradict each other",
        ),
    ],
)
def test_a_bad_file_is_refused_by_what_is_wrong_with_it(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(DeviceError, match=message) as refused:
        gpus.find(str(path))
    assert str(path) in refused.value.message


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(DeviceError, match=r"no GPU is called 'h300'; there are gtx1080ti, .*gb10, or a \.json file"):
        gpus.find("h300")
    with pytest.raises(DeviceError, match=r"cannot read missing\.json"):
        gpus.find("missing.json")
