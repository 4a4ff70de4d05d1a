"""The benchmark: its arithmetic and its picture, and a tiny run of it on the simulated accelerator."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diffusers_offload_fix.bench import options as settings
from diffusers_offload_fix.bench import parent, results, timeline

ROOT = Path(__file__).resolve().parents[1]
BUS = {"pinned_gbs": 50.0, "memcpy_gbs": 25.0}
WEIGHTS = 5_000_000_000


def case(ms: float, **more: Any) -> dict[str, Any]:
    figures = {"enable_s": 1.0, "pinned": 0, "pinned_after": WEIGHTS, "rss_growth": 0, "host_peak": 1.05}
    return {"ms": ms, "times": [ms], "device_peak": 2e9, "equal": True, **figures, **more}


def merged(**patched: Any) -> dict[str, Any]:
    options = settings.Options(modes=("block+stream", "block+stream+low"), device="cuda").as_dict()
    head = {"about": {"device": "a GPU"}, "bus": BUS, "weights": WEIGHTS}
    spans = [
        {"kind": "copy", "name": "a", "start": 0.0, "end": 4.0},
        {"kind": "compute", "name": "a", "start": 4.0, "end": 7.0},
        {"kind": "copy", "name": "b", "start": 4.0, "end": 8.0},
        {"kind": "compute", "name": "b", "start": 8.0, "end": 9.0},
    ]
    failing = {"error": "RuntimeError: cannot pin"}
    children = {
        "resident": {**head, "cases": {"resident/b1": case(60.0)}},
        "unpatched": {**head, "cases": {"block+stream/b1": case(250.0), "block+stream+low/b1": failing}},
        "patched": {
            **head,
            "bus": {"pinned_gbs": 40.0, "memcpy_gbs": 20.0},
            "cases": {
                "block+stream/b1": case(105.0, timeline=spans, **patched),
                "block+stream+low/b1": case(210.0),
            },
        },
    }
    return results.merge(options, children)


@pytest.mark.parametrize(
    ("resident", "low", "floor"), [(60.0, False, 100.0), (60.0, True, 200.0), (300.0, True, 300.0), (None, False, None)]
)
def test_the_floor_is_compute_or_the_way_of_the_weights(resident: float | None, low: bool, floor: float | None) -> None:
    assert results.floor_ms(resident, WEIGHTS, BUS, low) == floor


def test_rows_have_ratios_to_the_strictest_floor() -> None:
    first, second = merged()["rows"]
    assert (first["floor_ms"], first["unpatched_ratio"], first["patched_ratio"]) == (100.0, 2.5, 1.05)
    assert (second["floor_ms"], second["unpatched_ratio"], second["patched_ratio"]) == (200.0, None, 1.05)


def test_the_report_shows_figures_failures_and_the_bus() -> None:
    text = results.report(merged())
    assert "| 250.0 (2.50x) | 105.0 (1.05x) |" in " ".join(text.split())
    assert "bus: pinned 50.0 GB/s, memcpy into pinned 25.0 GB/s" in text
    assert "unpatched block+stream+low/b1: RuntimeError: cannot pin" in text
    assert "yes / yes" in text


def test_a_different_output_is_not_good() -> None:
    assert results.is_good(merged())
    other = merged(equal=False)
    assert not results.is_good(other)
    assert "yes / NO" in results.report(other)


def test_a_child_that_died_leaves_what_it_had() -> None:
    out = io.StringIO()
    child = parent.Child(settings.Options(), "patched", Path(), 0.0, parent.Progress(out, 2))
    child.hear("@ block: builds the model\n")
    child.hear("= " + json.dumps({"block/b1": case(5.0)}) + "\n")
    child.hear("noise of a library\n")
    assert child.cases["block/b1"]["ms"] == 5.0
    assert "5.0 ms, equal" in out.getvalue()
    assert "not run" in child.run()["error"]


def test_results_without_any_case_still_make_a_table() -> None:
    nothing = results.merge(settings.Options().as_dict(), {"resident": {"cases": {}, "error": "died"}})
    assert "resident: died" in results.report(nothing)
    assert not results.is_good(nothing)


def test_overlap_counts_copies_under_compute() -> None:
    spans = merged()["rows"][0]["patched"]["timeline"]
    assert timeline.overlap(spans) == pytest.approx(3 / 8)
    assert timeline.overlap([]) == 0.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--modes", "block+steam"], "block+stream"),
        (["--batch", "one"], "--batch"),
        (["--blocks", "3"], "--blocks for flux takes 2 numbers"),
        (["--variants", ""], "resident"),
    ],
)
def test_a_wrong_option_names_the_valid_ones(arguments: list[str], words: str) -> None:
    with pytest.raises(settings.Unusable, match=words.replace("+", r"\+")):
        settings.from_arguments(settings.parser().parse_args(arguments))


def test_options_survive_the_way_to_the_child() -> None:
    options = settings.from_arguments(settings.parser().parse_args(["--batch", "1,4", "--blocks", "2,3"]))
    assert settings.Options.loads(options.dumps()) == options
    assert options.steps() == 2 * (1 + 2 * len(settings.DEFAULT_MODES))


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_picture_is_written(tmp_path: Path) -> None:
    from diffusers_offload_fix.bench import plot

    file = tmp_path / "bench.png"
    plot.draw(merged(), file)
    assert file.read_bytes().startswith(b"\x89PNG")


def bench(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "diffusers_offload_fix", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


def test_without_an_accelerator_it_says_so() -> None:
    from tests.gpu.setting import missing

    if missing("cuda") is None:
        pytest.skip("this machine has an accelerator")
    done = bench()
    assert done.returncode == 2
    assert "no accelerator" in done.stderr


def test_a_tiny_run_on_the_simulated_accelerator(tmp_path: Path) -> None:
    sizes = ["--heads", "1", "--blocks", "1,2", "--tokens", "16", "--bus-mib", "4", "--warmups", "1", "--forwards", "2"]
    modes = ["--modes", "block+stream,leaf+stream+low,block+stream+disk", "--folder", str(tmp_path)]
    done = bench("--plugin", "tests.sim.loaded", "--device", "npu", "--quant", "int8", *sizes, *modes, "--json", "--time-limit", "200")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["errors"] == {} and found["weights"] > 0
    for row in found["rows"]:
        assert row["patched"]["equal"] is True
        assert row["patched_ratio"] > 0 and row["patched"]["first_s"] > 0
    rates = found["cases"]["patched"]["block+stream+disk/b1"]
    assert rates["disk_bytes"] > found["weights"] and all(rates[f"{kind}_gbs"] > 0 for kind in ("cold", "warm", "sequential_cold"))
    assert list(tmp_path.iterdir()) == []
