"""A campaign's folder: one run at a time, the same settings, nothing half-written, and no more held than is needed."""

from __future__ import annotations

import json
import resource
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isolate.errors import IsolateError
from isolate.search import campaign as campaigns
from isolate.search.campaign import Campaign
from isolate.search.known import shipped
from isolate.search.shard import Share
from tests.campaigns import PLAN, SMALL, campaign, document, isolate, kept, sentence, whole_lines


class Canned(Executor):
    """Gives the same share for every number, without a library."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(Share(arguments[1], **{"cases": PLAN.size, "steps": 9, **self.fields}))
        return future


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with campaign(tmp_path / "c"):
        said = sentence(isolate("fuzz", *SMALL, "--out", tmp_path / "c"))
    assert said == f"Error: {tmp_path / 'c'}: another run is using this folder; give --out another one"


def test_other_settings_are_named(tmp_path: Path) -> None:
    with campaign(tmp_path / "c"):
        pass
    other = campaign(tmp_path / "c", replace(PLAN, seed=2, guided=False))
    said = r"with other settings \(guided, seed\); repeat those .* give --out another"
    with pytest.raises(IsolateError, match=said), other:
        pass


def test_a_campaign_goes_on_when_more_is_known_than_before(tmp_path: Path) -> None:
    for known in (shipped()[1:], shipped()):
        with Campaign(PLAN, tmp_path / "c", known, document):
            assert len(json.loads((tmp_path / "c" / "campaign.json").read_text())["known"]) == len(known)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'"x"'])
def test_a_folder_that_holds_something_else_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "campaign.json").write_bytes(content)
    with (
        pytest.raises(IsolateError, match=r"campaign.json: not a campaign .* give --out another folder"),
        campaign(tmp_path),
    ):
        pass


def test_a_journal_of_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    with campaign(tmp_path) as running:
        running.run(Canned(), 1, 2 * PLAN.size, None)
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(b'{"number": "no"}\n' + journal.read_bytes())
    before = journal.read_bytes()
    with (
        pytest.raises(IsolateError, match=r"journal.jsonl: line 1 is not what this isolate writes"),
        campaign(tmp_path),
    ):
        pass
    assert journal.read_bytes() == before


@pytest.mark.parametrize("below", ["file", "file/deeper"])
def test_a_folder_that_cannot_be_made_is_one_sentence(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = sentence(isolate("fuzz", *SMALL, "--out", tmp_path / below))
    assert "cannot be used as a campaign's folder" in said


def test_a_full_disk_is_one_sentence_and_the_campaign_goes_on_when_there_is_room(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    share = {"facts": ["x" * 400]}
    with campaign(tmp_path) as running:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            with pytest.raises(IsolateError, match=r"journal.jsonl: cannot be written: File too large"):
                running.run(Canned(**share), 1, 100 * PLAN.size, None)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    whole = len(whole_lines(tmp_path))
    assert 0 < whole < 100
    with campaign(tmp_path) as running:
        assert running.shares == whole
        running.run(Canned(**share), 1, 100 * PLAN.size, None)
    assert len(kept(tmp_path)) == 100


def test_what_later_shares_do_not_need_is_not_held(tmp_path: Path) -> None:
    """However long a campaign: as many shares are held after 300 as after 1000."""
    held = []
    case = shipped()[0].case
    with campaign(tmp_path) as running:
        for shares in (304, 1000):
            running.run(Canned(kept=[case] * 3), 4, shares * PLAN.size, None)
            assert running.shares == shares
            held.append((len(running._recent), len(running._before.kept)))
    assert held[0] == held[1] and held[0][0] <= campaigns.LAST + campaigns.TOGETHER
