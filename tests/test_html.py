"""The page of a finding in a real browser: no network, no complaint, keys, search; large ones open at once; an index over a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from isolate.case import Case
from isolate.cli import main
from isolate.fault import Call, Fault, Finding, Launch, Signature, StepInFlight
from isolate.report import html as page
from isolate.report import json as report_json
from tests.browser import Browser
from tests.conftest import ROOT
from tests.planted_rules import start

NASTY = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\"> & <b> `"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def isolate(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False)


def finding(case: Case, launches: int) -> tuple[Finding, list[Launch]]:
    """A finding in the last step, with that many launches in it, of which the last is refused."""
    made = [
        Launch(n, "cudaLaunchKernel", f"kernel_{n % 40}", f"kernel_{n % 40}<{n % 40}>", (384, 2, 1), (32, n % 32 + 1, 1), 0, 0, 0, 0)
        for n in range(1, launches)
    ]  # fmt: skip
    limits = {"max_threads": 160, "device_max_threads": 1024, "device_grid_y": 65535}
    bad = Launch(launches, "cudaLaunchKernel", "bad", "bad<11>", (384, 2, 1), (32, 8, 1), 0, 0, 0, 1, attributes=limits)
    call = Call("cudaLaunchKernel", 1, "cudaErrorInvalidValue")
    last = len(case.steps) - 1
    step = StepInFlight(last, case.steps[-1].kind, case.steps[-1].tokens_by_slot())
    signature = Signature("cuda", "bad<11>", 1, "decode")
    fault = Fault("cuda", signature, step, call, call, f"bad cannot run {NASTY}", launch=bad, log=(NASTY,))
    return Finding({**case.as_json(), "about": NASTY}, fault, 1, 1, f"isolate run x.json # {NASTY}"), [*made, bad]


def written(path: Path, case: Case, launches: int) -> Path:
    found, made = finding(case, launches)
    path.write_text(page.text(found, case, made))
    return path


def test_the_page_opens_without_network_or_complaint_and_obeys_the_keyboard(browser: Browser, tmp_path: Path) -> None:
    case = start(rounds=4)
    address = written(tmp_path / "page.html", case, 300)
    browser.open(address)
    assert browser.value("document.title") == "cuda in decode: bad<11> (1)"
    assert browser.requests() == [address.as_uri()]
    assert browser.complaints() == []
    assert NASTY in browser.value("document.getElementById('headline').textContent")
    assert browser.value("document.images.length") == 0
    last = len(case.steps) - 1
    shown = "document.getElementById('step').textContent"
    assert browser.value(shown).startswith(f"step {last} (the fault): ")
    # copy, search, next, to the fault, then the lanes
    for _ in range(5):
        browser.press("Tab")
    assert browser.value("document.activeElement.id") == "lanes"
    browser.press("ArrowLeft")
    assert browser.value(shown).startswith(f"step {last - 1}: ")
    browser.press("Home")
    assert browser.value(shown).startswith("step 0: ")
    browser.press("f")
    assert browser.value(shown).startswith(f"step {last} (the fault)")
    browser.press("Tab")
    assert browser.value("document.activeElement.id") == "list"
    launch = "document.getElementById('launch').textContent"
    assert browser.value(launch).startswith("300  bad<11>")
    browser.press("ArrowUp")
    assert browser.value(launch).startswith("299  kernel_19<19>")
    assert "256 of 160 (the kernel): too many" in browser.value("document.getElementById('bars').textContent")
    browser.press("/")
    assert browser.value("document.activeElement.id") == "search"
    for letter in "seq_keep":
        browser.press(letter)
    assert browser.value("document.getElementById('hits').textContent") == f"1 of 1 matches: step {last - 1}"
    assert browser.value(shown).startswith(f"step {last - 1}: ")
    assert browser.complaints() == []
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(scheme: str, browser: Browser, tmp_path: Path) -> None:
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(written(tmp_path / "page.html", start(rounds=1), 3))
    colors = "['ink', 'faint', 'fault', 'card'].map(name => color(name))"
    *texts, card = browser.value(colors)
    assert all(contrast(text, card) >= 4.5 for text in texts)


def contrast(one: str, other: str) -> float:
    """Of two colors, by the Web Content Accessibility Guidelines."""

    def luminance(color: str) -> float:
        digits = color[1:] if len(color) == 7 else "".join(2 * c for c in color[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_a_page_of_five_thousand_steps_and_a_hundred_thousand_launches_is_ready_soon(
    browser: Browser, tmp_path: Path
) -> None:
    case = start(rounds=555)
    assert len(case.steps) >= 4995
    address = written(tmp_path / "large.html", case, 100_000)
    assert address.stat().st_size < 20 << 20
    browser.open(address)
    assert int(browser.value("document.documentElement.dataset.ready")) < 3000
    assert browser.complaints() == []
    assert browser.value("document.querySelectorAll('*').length") < 400
    browser.value("document.getElementById('lanes').focus()")
    browser.press("Home")
    assert browser.value("document.getElementById('lanes').scrollLeft") < 100


def test_a_page_of_two_steps(browser: Browser, tmp_path: Path) -> None:
    whole = start(rounds=1)
    case = Case(isolate=1, model=whole.model, steps=whole.steps[:2], context=whole.context)
    browser.open(written(tmp_path / "small.html", case, 1))
    assert browser.value("document.getElementById('steps-title').textContent") == "2 steps"
    assert browser.complaints() == []


def test_a_report_of_a_folder_has_a_page_for_each_finding(browser: Browser, tmp_path: Path) -> None:
    for name in ("r11-part-copied-between-streams", "r12-shift-of-m-rope"):
        assert isolate("run", ROOT / f"cases/reports/{name}.json", "--json", tmp_path / f"{name}.json").exit_code == 1
    found, _ = finding(start(rounds=1), 3)
    report_json.write(report_json.document([found], 1), str(tmp_path / "odd <i>.json"))
    (tmp_path / "other.json").write_text(json.dumps({"schema": "something else"}))
    result = isolate("report", tmp_path, "--out", tmp_path / "pages")
    assert result.exit_code == 0, result.output
    assert "3 findings" in result.output
    browser.open(tmp_path / "pages" / "index.html")
    assert browser.complaints() == []
    links = browser.value("[...document.querySelectorAll('tbody a')].map(each => each.href)")
    assert len(links) == 3
    assert browser.value("document.querySelectorAll('i, b, img').length") == 0
    for link in links:
        browser.open(Path(link.removeprefix("file://")))
        assert browser.complaints() == []
        assert browser.value("document.getElementById('headline').textContent").startswith("FAULT")


def test_a_folder_without_findings_is_refused(tmp_path: Path) -> None:
    result = isolate("report", tmp_path)
    assert result.exit_code == 2
    assert "no file in it holds findings" in result.output
