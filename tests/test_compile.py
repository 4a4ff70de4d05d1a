"""torch.compile over offloaded models: no more graph breaks and recompilations than upstream's own, and the same output."""

from __future__ import annotations

from tests.gpu import compile as compiling


def test_compiled_models_break_and_recompile_no_more_than_unpatched() -> None:
    results = compiling.measure("npu", ",".join(compiling.KINDS), "eager,aot_eager")
    assert len(results["patched"]) == 8
    assert compiling.faults(results) == [], compiling.table(results)
