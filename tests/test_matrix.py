"""Tables of treatments: what is run, what the faults follow, what is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from isolate.cli import main
from isolate.serve.factors import Observed, sentence, separating
from isolate.serve.table import read
from tests import cuda_builds
from tests.conftest import ROOT

SEED = ROOT / "cases" / "parallel-checkpoints.toml"
#: where FACTS of the seed lists a launch
LAUNCHES = {
    "2 slots, caches and checkpoints on": 585,
    "3 slots, caches and checkpoints on": 859,
    "2 slots, all on, smaller batches": 1812,
}
TABLE = """
isolate = 1
model = {zoo = "llama"}
[server]
ctx-size = 512
[[rounds]]
prompt = {count = 20, modulo = 100}
n-predict = 2
[[rows]]
name = "one"
[[rows]]
name = "two"
set = {parallel = 2}
"""


def isolate(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_the_seeds_table_has_its_rows_and_every_switch_of_the_four_flags() -> None:
    names = [treatment.name for treatment in read(SEED)]
    assert len(names) == 11 + 4 + 4 + 16


def test_on_the_dry_device_the_seeds_faults_follow_the_checkpoints(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    build = cuda_builds.ptx80()
    words = ("matrix", SEED, "--build", build, "--target", "dry:h200", "--out", tmp_path / "out", "--json", found)
    code, output = isolate(*words)
    assert code == 1
    assert "the faults follow --ctx-checkpoints: rows with 32 failed, rows with 0 passed, not " in " ".join(
        output.split()
    )
    document = json.loads(found.read_text())
    for cell in document["cells"]:
        wanted = "FAULT" if cell["factors"]["ctx-checkpoints"] else "pass"
        turbo = str(cell["factors"]["cache-type-v"]).startswith("turbo")
        assert cell["said"].startswith("not in this build" if turbo else wanted), cell
        if cell["row"] in LAUNCHES:
            assert cell["said"] == f"FAULT launch {LAUNCHES[cell['row']]} mul_mat_vec_q_moe"
    replay = shlex.split(document["findings"][0]["replay"])
    assert isolate(*replay[1:])[0] == 1


def test_a_table_on_the_cpu_passes_writes_its_forms_and_resumes(tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    table.write_text(TABLE)
    out = tmp_path / "out"
    words = ["matrix", table, "--out", out, "--markdown", tmp_path / "t.md", "--html", tmp_path / "t.html"]
    code, output = isolate(*words)
    assert code == 0, output
    assert "| one | pass |" in (tmp_path / "t.md").read_text()
    assert '<td class="pass">pass</td>' in (tmp_path / "t.html").read_text()
    results = (out / "results.jsonl").read_text()
    assert len(results.splitlines()) == 2
    # Cut in its second line, as by a kill: one row is run again.
    (out / "results.jsonl").write_text(results[: len(results) - 30])
    assert isolate(*words, "--resume")[0] == 0
    assert {json.loads(line)["key"] for line in (out / "results.jsonl").read_text().splitlines()} == {
        json.loads(line)["key"] for line in results.splitlines()
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('[[rows]]\nname = "one"', "two rows have the name 'one'"),
        ('[[rows]]\nname = "x"\nset = {checkpoints = 1}', "row 'x': there is no option `checkpoints`"),
        ('[[rows]]\nname = "x"\nset = {np = 1, parallel = 2}', "row 'x': `parallel` is given twice"),
        ('[[rows]]\nname = "x"\nset = {fa = "off", ctv = "q8_0"}', "`flash-attn` off and `cache-type-v` q8_0 exclude"),
        ('[[columns]]\nname = "x"', "unknown field `columns`"),
        ("[[rows", "not TOML"),
        ("[axes]\nparallel = [100000]", "`parallel`"),
    ],
)
def test_a_bad_table_is_refused_in_one_sentence(tmp_path: Path, change: str, words: str) -> None:
    table = tmp_path / "table.toml"
    table.write_text(TABLE + change)
    code, output = isolate("matrix", table, "--out", tmp_path / "out")
    assert code == 2
    assert words in output
    assert len(output.strip().splitlines()) == 1


def rows(*seen: tuple[int, int, bool]) -> list[Observed]:
    return [Observed({"a": a, "b": b, "same": 0}, failed) for a, b, failed in seen]


def test_the_smallest_set_that_separates_is_named() -> None:
    assert separating(rows((0, 0, False), (0, 1, False), (1, 0, True), (1, 1, True))) == [("a",)]
    assert separating(rows((0, 0, False), (0, 1, True), (1, 0, True), (1, 1, False))) == [("a", "b")]
    assert separating(rows((0, 0, False), (0, 0, True))) == []
    assert sentence(rows((0, 0, True), (1, 0, True))) == ""
    assert sentence(rows((0, 0, False), (0, 1, False), (1, 0, True), (1, 1, True))) == (
        "2 of 4 rows that ran failed: the faults follow --a: rows with 1 failed, rows with 0 passed, not --b"
    )


def test_a_server_may_go_back_to_the_newest_checkpoint_on_the_device_and_to_no_older_one(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    code, output = isolate("matrix", ROOT / "cases" / "on-device-checkpoints.toml", "--out", tmp_path, "--json", found)
    assert code == 1, output
    said = {cell["row"]: cell["said"] for cell in json.loads(found.read_text())["cells"]}
    assert {row: how.split()[0] for row, how in said.items()} == {
        "1 slot, in host memory": "pass",
        "1 slot, on the device": "FAULT",
        "1 slot, on the device, one checkpoint": "pass",
        "2 slots, in host memory": "pass",
        "2 slots, on the device": "FAULT",
        "2 slots, on the device, one checkpoint": "pass",
    }
    assert said["1 slot, on the device"].startswith("FAULT logits")
    restores = [
        [step["name"] for step in json.loads(case.read_text())["steps"] if step["step"] == "restore"]
        for case in tmp_path.glob("1-slot-on-the-device-one-checkpoint-*.json")
    ]
    assert restores == [["2-slot-0-at-296"]]
