"""The project's targets: which cases they need, and whether the figures meet them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Weights, mode, batch size.
Case = tuple[str, str, int]
Row = dict[str, Any]

MIB = 1 << 20
#: Leaf level may make as many copies as there are pieces of this many bytes, where that is more than the groups.
PIECE = 16 * MIB
#: Allowed on top of a target for a compiled model.
COMPILED = 1.03

STREAMED, LEAF = "block+stream", "leaf+stream"
#: Forward time over the floor.
RATIOS: dict[Case, float] = {
    ("none", STREAMED, 1): 1.05,
    ("none", LEAF, 1): 1.06,
    ("int8", STREAMED, 1): 1.10,
    ("float8", STREAMED, 1): 1.10,
    ("quanto-int8", STREAMED, 1): 1.10,
    ("none", STREAMED, 4): 1.03,
    ("int8", STREAMED, 4): 1.03,
    ("none", "block+stream+low", 1): 1.15,
    ("none", "leaf+stream+low", 1): 1.15,
    ("int8", "block+stream+low", 1): 1.15,
    ("int8", "leaf+stream+low", 1): 1.15,
}
#: Unpatched time over patched time, at least.
SPEEDUPS: dict[Case, float] = {(quant, mode, 1): 3.0 for quant in ("none", "int8") for mode in ("block", "leaf")}
ENABLE: Case = ("none", STREAMED, 1)
ENABLE_LIMIT, PINNED_LIMIT, HOST_PEAK_LIMIT, DEVICE_PEAK_LIMIT = 0.6, 1.02, 1.10, 1.10
#: How many of the largest groups may be pinned with `low_cpu_mem_usage`.
STAGED_GROUPS = 3.0
#: Upstream's faster form, which only shows what unpatched can do at best.
RECORD: tuple[Case, ...] = (("none", "block+stream+record", 1), ("none", "leaf+stream+record", 1), ("int8", "block+stream+record", 1))


def cases(quants: tuple[str, ...], variant: str, compiled: str) -> list[Case]:
    """What a variant has to run for the targets, the most telling first."""
    wanted = [*RATIOS, *SPEEDUPS]
    if compiled != "none":
        wanted = [case for case in wanted if case[1] in (STREAMED, LEAF)]
    if variant == "unpatched" and compiled == "none":
        wanted += RECORD
    if variant == "resident":
        wanted = list(dict.fromkeys((quant, "resident", batch) for quant, _, batch in wanted))
    # A model is built once for a mode, whatever the batch sizes.
    modes = list(dict.fromkeys(case[:2] for case in wanted))
    return sorted(
        (case for case in wanted if case[0] in quants), key=lambda case: (quants.index(case[0]), modes.index(case[:2]), case[2])
    )


def verdicts(rows: list[Row], weights: dict[str, int], compiled: str) -> list[Row]:
    """One row a target: its name, the worst figure with its case, the limit, and whether it is met (None: no figure)."""
    found = [_ratio(rows, case, limit * (COMPILED if compiled != "none" else 1)) for case, limit in RATIOS.items()]
    if compiled != "none":
        return [row for row in found if row["value"] is not None]
    found += [_speedup(rows, case, limit) for case, limit in SPEEDUPS.items()]
    found.append(_worst("time to enable, of unpatched", rows, lambda row: _over(row, "enable_s"), ENABLE_LIMIT, _is(ENABLE)))
    found += _host(rows, weights)
    found.append(_worst("device peak, of unpatched", rows, lambda row: _over(row, "device_peak"), DEVICE_PEAK_LIMIT))
    steady = _mode(STREAMED, LEAF)
    found.append(_worst("host waits a forward", rows, _ours("waits"), 0, steady))
    found.append(_worst("device allocations a forward", rows, _ours("allocations"), 0, steady))
    found.append(_worst("copies a group", rows, _copies_a_group, 1, _mode(STREAMED)))
    found.append(_worst("copies a group or 16 MiB", rows, lambda row: _copies_a_piece(row, weights), 1, _mode(LEAF)))
    known = {row["quant"] for row in rows}
    return [row for row in found if row["quant"] is None or row["quant"] in known]


def _host(rows: list[Row], weights: dict[str, int]) -> list[Row]:
    """Pinned memory and the peak of enabling."""

    def pinned(row: Row) -> float | None:
        return _divided(_of(row, "patched", "pinned_after"), weights.get(row["quant"]))

    def staged(row: Row) -> float | None:
        return _divided(_of(row, "patched", "pinned_after"), _of(row, "patched", "largest_group"))

    streamed, low = _mode(STREAMED, LEAF), _mode("block+stream+low", "leaf+stream+low")
    return [
        _worst("pinned, of the weights", rows, pinned, PINNED_LIMIT, streamed),
        # At leaf level a group is a leaf: the groups of block level are the measure for both.
        _worst("pinned with low_cpu_mem_usage, of the largest group", rows, staged, STAGED_GROUPS, _mode("block+stream+low")),
        _worst(
            "host peak of enabling, of the weights", rows, _ours("host_peak"), HOST_PEAK_LIMIT, lambda row: streamed(row) or low(row)
        ),
    ]


def _ratio(rows: list[Row], case: Case, limit: float) -> Row:
    row = next(filter(_is(case), rows), None)
    return _verdict("forward, of the floor", case, None if row is None else row.get("patched_ratio"), limit)


def _speedup(rows: list[Row], case: Case, limit: float) -> Row:
    row = next(filter(_is(case), rows), {})
    value = _divided(_of(row, "unpatched", "ms"), _of(row, "patched", "ms"))
    return _verdict("unpatched over patched", case, value, limit, at_least=True)


def _worst(
    name: str, rows: list[Row], value: Callable[[Row], float | None], limit: float, which: Callable[[Row], bool] | None = None
) -> Row:
    figures = [(figure, row) for row in rows if (which is None or which(row)) and (figure := value(row)) is not None]
    if not figures:
        return _verdict(name, None, None, limit)
    worst, row = max(figures, key=lambda pair: pair[0])
    return _verdict(name, (row["quant"], row["mode"], row["batch"]), worst, limit)


def _verdict(name: str, case: Case | None, value: float | None, limit: float, at_least: bool = False) -> Row:
    met = None if value is None else value >= limit if at_least else value <= limit
    quant, mode, batch = case or (None, None, None)
    return {
        "name": name,
        "quant": quant,
        "mode": mode,
        "batch": batch,
        "value": value,
        "limit": limit,
        "at_least": at_least,
        "met": met,
    }


def _is(case: Case) -> Callable[[Row], bool]:
    return lambda row: (row["quant"], row["mode"], row["batch"]) == case


def _mode(*names: str) -> Callable[[Row], bool]:
    return lambda row: row["mode"] in names


def _of(row: Row, variant: str, name: str) -> float | None:
    found = (row.get(variant) or {}).get(name)
    return None if found is None else float(found)


def _ours(name: str) -> Callable[[Row], float | None]:
    return lambda row: _of(row, "patched", name)


def _over(row: Row, name: str) -> float | None:
    return _divided(_of(row, "patched", name), _of(row, "unpatched", name))


def _divided(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _copies_a_group(row: Row) -> float | None:
    return _divided(_of(row, "patched", "copies"), _of(row, "patched", "groups"))


def _copies_a_piece(row: Row, weights: dict[str, int]) -> float | None:
    pieces = -(-weights.get(row["quant"], 0) // PIECE)
    return _divided(_of(row, "patched", "copies"), max(pieces, _of(row, "patched", "groups") or 0))


def table(found: list[Row]) -> tuple[tuple[str, ...], list[list[str]]]:
    """The head and the cells of a table of verdicts."""
    head = ("target", "weights", "mode", "batch", "value", "limit", "met")
    return head, [_line(row) for row in found]


def _line(row: Row) -> list[str]:
    case = ["-" if row[name] is None else str(row[name]) for name in ("quant", "mode", "batch")]
    limit = f"{'at least' if row['at_least'] else 'at most'} {row['limit']:.3g}"
    value = "-" if row["value"] is None else f"{row['value']:.3f}".rstrip("0").rstrip(".")
    return [row["name"], *case, value, limit, {None: "not measured", True: "met", False: "MISSED"}[row["met"]]]
