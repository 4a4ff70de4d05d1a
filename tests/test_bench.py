"""The benchmark: its arithmetic and its picture, and a tiny run of it on the simulated accelerator."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from diffusers_offload_fix.bench import counts, drive, parent, results, targets, timeline
from diffusers_offload_fix.bench import options as settings

ROOT = Path(__file__).resolve().parents[1]
BUS = {"pinned_gbs": 50.0, "memcpy_gbs": 25.0}
WEIGHTS = 5_000_000_000


def case(ms: float, **more: Any) -> dict[str, Any]:
    figures = {"enable_s": 1.0, "pinned": 0, "pinned_after": WEIGHTS, "rss_growth": 0, "host_peak": 1.05}
    return {"ms": ms, "times": [ms], "device_peak": 2e9, "equal": True, **figures, **more}


def merged(**patched: Any) -> dict[str, Any]:
    options = settings.Options(modes=("block+stream", "block+stream+low"), device="cuda")
    head = {"about": {"device": "a GPU"}, "bus": BUS, "weights": {"none": WEIGHTS}}
    spans = [
        {"kind": "copy", "name": "a", "start": 0.0, "end": 4.0},
        {"kind": "compute", "name": "a", "start": 4.0, "end": 7.0},
        {"kind": "copy", "name": "b", "start": 4.0, "end": 8.0},
        {"kind": "compute", "name": "b", "start": 8.0, "end": 9.0},
    ]
    failing = {"error": "RuntimeError: cannot pin"}
    counts = {"groups": 19, "copies": 22, "waits": 1, "allocations": 40}
    unpatched = {"none/block+stream/b1": case(250.0), "none/block+stream+low/b1": failing}
    ours = {"none/block+stream/b1": case(105.0, timeline=spans, **counts, **patched), "none/block+stream+low/b1": case(210.0)}
    children = [
        ("resident", {**head, "cases": {"none/resident/b1": case(60.0, copies=3, waits=1, allocations=40)}}),
        ("unpatched", {**head, "cases": unpatched}),
        ("patched", {**head, "bus": {"pinned_gbs": 40.0, "memcpy_gbs": 20.0}, "cases": ours}),
    ]
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
    assert "unpatched none/block+stream+low/b1: RuntimeError: cannot pin" in text
    assert "| - / 19 | - / 19 | - / 0      | - / 0" in text
    assert "yes / yes" in text


def test_a_different_output_is_not_good() -> None:
    assert results.is_good(merged())
    other = merged(equal=False)
    assert not results.is_good(other)
    assert "yes / NO" in results.report(other)


def test_a_child_that_died_leaves_what_it_had() -> None:
    out = io.StringIO()
    child = parent.Child(settings.Options(), "patched", ("none",), Path(), 0.0, parent.Progress(out, 2))
    child.hear("@ block: builds the model\n")
    child.hear("= " + json.dumps({"none/block/b1": case(5.0)}) + "\n")
    child.hear("noise of a library\n")
    assert child.cases["none/block/b1"]["ms"] == 5.0
    assert "5.0 ms, equal" in out.getvalue()
    assert "not run" in child.run()["error"]


def test_results_without_any_case_still_make_a_table() -> None:
    nothing = results.merge(settings.Options(), [("resident", {"cases": {}, "error": "died"})])
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
        (["--quant", "none,int9"], "quanto-int8"),
    ],
)
def test_a_wrong_option_names_the_valid_ones(arguments: list[str], words: str) -> None:
    with pytest.raises(settings.Unusable, match=words.replace("+", r"\+")):
        settings.from_arguments(settings.parser().parse_args(arguments))


def test_options_survive_the_way_to_the_child() -> None:
    options = settings.from_arguments(settings.parser().parse_args(["--batch", "1,4", "--blocks", "2,3", "--quant", "none,int8"]))
    assert settings.Options.loads(options.dumps()) == options
    assert options.steps() == 2 * 2 * (1 + 2 * len(settings.DEFAULT_MODES))
    jobs = [("resident", ("none", "int8"), False), ("patched", ("none",), False), ("unpatched", ("none",), False)]
    assert settings.processes(options)[:3] == jobs


def test_what_is_counted_is_not_timed_in_the_same_process() -> None:
    options = settings.from_arguments(settings.parser().parse_args(["--batch", "1,4", "--modes", "block,leaf+stream", "--counts"]))
    assert options.counted("patched") == [("none", "block", 1), ("none", "leaf+stream", 1)]
    assert options.counted("resident") == [("none", "resident", 1)]
    jobs = settings.processes(options)
    assert jobs[3:] == [job._replace(counting=True) for job in jobs[:3]]
    assert options.steps() == 2 * (1 + 2 * 2) + 1 + 2 * 2
    several = dataclasses.replace(options, quants=("none", "int8"))
    counted = [job[:2] for job in settings.processes(several) if job.counting]
    ours = [(variant, (quant,)) for quant in ("none", "int8") for variant in ("resident", "patched")]
    assert counted == [*ours, ("unpatched", ("none",)), ("unpatched", ("int8",))]
    plain = settings.from_arguments(settings.parser().parse_args([]))
    assert plain.counted("patched") == [] and not any(job.counting for job in settings.processes(plain))
    assert {case[1] for case in targeted().counted("patched")} == {"block+stream", "leaf+stream"}


def test_counts_belong_to_the_case_that_was_timed() -> None:
    out = io.StringIO()
    child = parent.Child(settings.Options(), "patched", ("none",), Path(), 0.0, parent.Progress(out, 2), counting=True)
    child.hear("# " + json.dumps({"none/block+stream/b1": {"copies": 18, "waits": 0}}) + "\n")
    assert "18 copies, 0 waits" in out.getvalue() and child.cases == {}
    timed = {"cases": {"none/block+stream/b1": case(5.0)}}
    children = [("patched", timed), ("patched", {"cases": {}, "counts": {**child.counts, "none/leaf/b1": {"copies": 1}}})]
    cases = results.merge(settings.Options(), children)["cases"]["patched"]
    assert cases == {"none/block+stream/b1": {**case(5.0), "copies": 18, "waits": 0}}


def targeted(**more: Any) -> settings.Options:
    options = settings.from_arguments(settings.parser().parse_args(["--targets"]))
    return dataclasses.replace(options, **more)


def test_targets_choose_their_cases_the_most_telling_first() -> None:
    options = targeted()
    ours, theirs = options.cases("patched"), options.cases("unpatched")
    assert ours[:3] == [("none", "block+stream", 1), ("none", "block+stream", 4), ("none", "leaf+stream", 1)]
    assert set(ours) == {*targets.RATIOS, *targets.SPEEDUPS}
    assert set(theirs) - set(ours) == set(targets.RECORD)
    assert ("int8", "resident", 4) in options.cases("resident")
    assert {case[1] for case in targeted(compile="blocks").cases("unpatched")} == {"block+stream", "leaf+stream"}


def test_each_target_is_judged_by_its_worst_case() -> None:
    options = targeted()
    good = {"groups": 19, "largest_group": 3e8, "pinned_after": WEIGHTS, "copies": 19, "waits": 0, "allocations": 0}
    bad = {**good, "waits": 2, "copies": 38, "pinned_after": 1.5 * WEIGHTS, "enable_s": 0.7, "device_peak": 2.3e9, "host_peak": 1.2}
    cases = {results.name(*each): case(104.0, **good) for each in options.cases("patched")}
    cases["none/block+stream/b1"] = case(106.0, **bad)
    resident = {results.name(*each): case(60.0, copies=0, waits=0, allocations=0) for each in options.cases("resident")}
    theirs = {results.name(*each): case(250.0) for each in options.cases("unpatched")}
    head = {"bus": BUS, "weights": dict.fromkeys(options.quants, WEIGHTS)}
    children = [
        (variant, {**head, "cases": found}) for variant, found in (("resident", resident), ("patched", cases), ("unpatched", theirs))
    ]
    merged = results.merge(options, children)
    missed = {(row["name"], row["quant"], row["mode"], row["batch"]) for row in merged["targets"] if row["met"] is False}
    case_ = ("none", "block+stream", 1)
    names = ["forward, of the floor", "time to enable, of unpatched", "device peak, of unpatched", "host waits a forward"]
    names += ["copies a group", "pinned, of the weights", "host peak of enabling, of the weights"]
    streamed = {(name, *case_) for name in names}
    slow = {row for row in missed - streamed if row[0] in ("forward, of the floor", "unpatched over patched")}
    low = {("pinned with low_cpu_mem_usage, of the largest group", "none", "block+stream+low", 1)}
    batch4 = {("forward, of the floor", quant, "block+stream", 4) for quant in ("none", "int8")}
    assert streamed <= missed
    assert missed - streamed - slow == low
    assert slow == batch4 | {("unpatched over patched", *case) for case in targets.SPEEDUPS}
    assert not any(row["met"] is None for row in merged["targets"])
    assert "MISSED" in results.report(merged) and "at most 1.05" in results.report(merged)


def test_a_trace_is_counted_within_the_forward() -> None:
    def event(name: str, start: int, end: int, device: str = "CPU") -> Any:
        where, when = types.SimpleNamespace(name=device), types.SimpleNamespace(start=start, end=end)
        return types.SimpleNamespace(name=name, device_type=where, time_range=when)

    span = event(counts.FORWARD, 10, 20)
    seen = [event("cudaStreamSynchronize", 15, 16), event("cudaDeviceSynchronize", 21, 30), event("cudaStreamWaitEvent", 15, 15)]
    copies = [event("Memcpy HtoD (Pinned -> Device)", 25, 29, "CUDA"), event("Memcpy DtoH (Device -> Pageable)", 25, 29, "CUDA")]
    assert counts.tally([span, event(counts.FORWARD, 12, 28, "CUDA"), *seen, *copies]) == {"waits": 1, "copies": 1}
    assert counts.tally([span, *seen]) == {}


def test_whoever_is_interrupted_tells_what_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    head = {"about": {"device": "a GPU"}, "bus": BUS, "weights": {"none": WEIGHTS}}
    lines = ["% " + json.dumps(head), "= " + json.dumps({"none/block/b1": case(5.0)}), "@ a step that takes long"]
    script = f"import sys, time\nfor line in {lines!r}: print(line, flush=True)\ntime.sleep(60)"
    out = io.StringIO()
    child = parent.Child(settings.Options(), "patched", ("none",), tmp_path, time.time() + 60, parent.Progress(out, 2))
    monkeypatch.setattr(child, "_command", lambda: [sys.executable, "-c", script])

    def hear(line: str) -> None:
        parent.Child.hear(child, line)
        if "takes long" in line:
            raise KeyboardInterrupt

    monkeypatch.setattr(child, "hear", hear)
    found = child.run()
    assert child.interrupted and "interrupted" in found["error"] and found["bus"] == BUS
    text = results.report(results.merge(settings.Options(modes=("block",)), [("patched", found)]))
    assert "a GPU" in text and "| 5.0 " in text and "interrupted" in text


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_picture_is_written(tmp_path: Path) -> None:
    from diffusers_offload_fix.bench import plot

    file = tmp_path / "bench.png"
    plot.draw(merged(), file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_drive_counts_what_was_read_while_a_forward_ran(tmp_path: Path) -> None:
    """What comes first in the next forward is read after its end: the size of the weights would flatter the rate."""
    half, seconds = 4 << 20, 0.1
    (tmp_path / "weights").write_bytes(bytes(2 * half))

    def forward() -> None:
        with (tmp_path / "weights").open("rb") as file:
            file.read(half)
        time.sleep(seconds)

    found = drive.Drive(tmp_path).rates(forward)
    assert found["disk_bytes"] == 2 * half
    most = half / seconds / 1e9
    for kind in ("cold_gbs", "warm_gbs"):
        assert 0.2 * most < found[kind] < 1.05 * most
    assert found["sequential_warm_gbs"] > most and found["cold_ms"] > 1000 * seconds


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
    what = ["--plugin", "tests.sim.loaded", "--device", "npu", "--quant", "int8", "--counts", "--json", "--time-limit", "200"]
    done = bench(*what, *sizes, *modes)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["errors"] == {} and found["weights"]["int8"] > 0
    for row in found["rows"]:
        assert row["patched"]["equal"] is True
        assert row["patched_ratio"] > 0 and row["patched"]["first_s"] > 0
        assert row["patched"]["groups"] > 3 and row["patched"]["allocations"] < 5
    rates = found["cases"]["patched"]["int8/block+stream+disk/b1"]
    assert rates["disk_bytes"] > found["weights"]["int8"] and all(
        rates[f"{kind}_gbs"] > 0 for kind in ("cold", "warm", "sequential_cold")
    )
    assert list(tmp_path.iterdir()) == []
