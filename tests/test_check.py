"""`python -m diffusers_offload_fix check`: on the simulated accelerator, on the CPU, and with processes that fail."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fresh import environment, python

from diffusers_offload_fix.check import cases, main, table
from diffusers_offload_fix.check.cases import Case
from diffusers_offload_fix.check.progress import Progress
from diffusers_offload_fix.check.supervisor import Side

PRELUDE = "DIFFUSERS_OFFLOAD_FIX_CHECK_PRELUDE"


def check(*arguments: str, prelude: str | None = None, status: int = 0) -> dict[str, Any]:
    """The JSON that the command prints, after its exit status was compared."""
    switches = {} if prelude is None else {PRELUDE: f"tests.tiny:{prelude}"}
    done = python("-m", "diffusers_offload_fix", "check", "--json", *arguments, **switches)
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_on_the_simulated_accelerator_only_the_patched_side_is_right() -> None:
    found = check("--modes", "block+stream+low,leaf,leaf+stream+disk", prelude="load_simulated")
    rows = {(row["weights"], row["mode"]): row for row in found["rows"]}
    assert len(rows) == 9 and found["right"] and found["accelerator"].startswith("npu")
    assert all(row["patched"]["verdict"] == "ok" and row["patched"]["left"] == 0 for row in rows.values())
    assert "cannot pin" in rows["torchao-int8", "block+stream+low"]["unpatched"]["verdict"]
    assert rows["torchao-int8", "block+stream+low"]["unpatched"]["left"] > 0
    assert rows["quanto-qint8", "leaf"]["unpatched"]["state"] == "error"
    assert rows["plain", "leaf"]["unpatched"]["verdict"] == "ok"
    assert rows["torchao-int8", "leaf+stream+disk"]["unpatched"]["state"] == "error"
    assert rows["torchao-int8", "leaf+stream+disk"]["patched"]["verdict"] == "ok"


def test_without_an_accelerator_the_rest_is_run_for_real() -> None:
    found = check("--device", "cpu", "--weights", "plain,quanto-qint8", "--modes", "block,leaf+stream")
    assert found["accelerator"] is None and "No accelerator" in found["notes"][0]
    states = [(row["mode"], row["patched"]["state"], row["patched"]["equal"]) for row in found["rows"]]
    assert states == [("block", "ran", True), ("leaf+stream", "skipped", None)] * 2


def test_a_library_that_is_missing_is_no_fault() -> None:
    arguments = ("--device", "cpu", "--weights", "quanto-qint8,plain", "--modes", "block")
    rows = check(*arguments, prelude="without_quanto")["rows"]
    assert [row["patched"]["verdict"] for row in rows] == ["not installed", "ok"]


def test_a_crash_and_a_hang_fail_their_case_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(**{PRELUDE: "tests.tiny:troubled"}).items():
        monkeypatch.setenv(name, value)
    side = Side(patched=True, device="cpu", timeout=15)
    side.run(cases.grid(list(cases.WEIGHTS), ["block"]), lambda case, found: True)
    plain, crashed, hung = map(table.verdict, side.results.values())
    assert plain == "ok"
    assert "signal" in crashed
    assert hung == "nothing happened for 15 s"


def test_wrong_arguments_name_the_right_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--modes", "leaf,nonsense"]) == 2
    assert "'nonsense': choose from block, block+stream" in capsys.readouterr().err
    assert main(["--weights", ","]) == 2
    assert main(["--help"]) == 0


def test_every_mode_has_a_name() -> None:
    assert len(cases.MODES) == 11 and sum(map(cases.streamed, cases.MODES)) == 8 and sum(map(cases.on_disk, cases.MODES)) == 3
    assert cases.chosen("leaf, block,leaf", cases.MODES) == ["leaf", "block"]
    assert cases.grid(["plain"], ["leaf", "block"]) == [Case("plain", "leaf"), Case("plain", "block")]


def _outcome(**fields: Any) -> dict[str, Any]:
    return {"state": "ran", "equal": True, "left": 0, "pinned": 0, **fields}


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (None, "not run"),
        (_outcome(), "ok"),
        (_outcome(equal=False), "wrong output"),
        (_outcome(left=4096), "weights stay on the device"),
        (_outcome(state="error", equal=False, detail="RuntimeError: no"), "RuntimeError: no"),
        (_outcome(state="skipped", detail="not installed"), "not installed"),
    ],
)
def test_an_outcome_in_words(outcome: dict[str, Any] | None, words: str) -> None:
    assert table.verdict(outcome) == words


def test_the_table_shows_both_sides() -> None:
    case = Case("plain", "leaf")
    right = table.Row(case, _outcome(left=2048), _outcome(pinned=1024))
    wrong = table.Row(case, _outcome(), _outcome(equal=False))
    skipped = table.Row(case, None, {"state": "skipped", "detail": "not installed"})
    text = table.as_text([right, wrong, skipped])
    assert right.cells() == (
        *("plain", "leaf", "weights stay on the device", "ok", "yes"),
        *("2.0 KiB -> 0", "0 -> 1.0 KiB"),
    )
    assert (right.is_right, wrong.is_right, skipped.is_right) == (True, False, True)
    assert "plain leaf: wrong output" in text
    assert text.endswith("right: 1 of 2 unpatched, 1 of 2 patched, 1 not run")


def test_progress_is_for_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(2)
    progress.step("one")
    progress.close()
    assert capsys.readouterr().err == ""
