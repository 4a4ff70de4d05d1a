"""`python -m tests.gpu.composition`: LoRA, surgery, caches, casting, compile and training over offloaded models, unpatched and patched.

Each variant has a process of its own, and plays every scenario in it: an offloaded model beside a resident one, which have to agree.
The table has one row a scenario. Exit status 1 when a patched scenario has a fault, 2 without a device, 3 when one was not run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.cells import MODES, Setting

from .setting import VARIANTS
from .table import align, end, say, shorten

ROOT = Path(__file__).resolve().parents[2]
UNRUN = "not run"
#: What begins the result of a scenario that the resident model does not survive either.
ALIKE = "resident too: "

Scenario = Callable[[Setting], list[str]]


def scenarios() -> Iterator[tuple[str, Scenario]]:
    """Every scenario, under a name that says what is done and in which mode of offloading."""
    for name in scenes().SCENES:
        for mode, warm in (("block+stream", False), ("leaf", True)):
            yield f"{name}, {mode}", _scene(name, "plain", mode, warm)
    for name, weights in scenes().QUANTISED:
        yield f"{name}, {weights}, block+stream", _scene(name, weights, "block+stream", True)
    for cache in caching().configs():
        for order, mode in (("cache, then offload", "block"), ("offload, then cache", "block+stream")):
            yield f"{cache}: {order}, {mode}", _cache(cache, order, mode, lora=False)
        yield f"{cache}: offload, cache, LoRA, block", _cache(cache, "offload, then cache", "block", lora=True)
    for order in ("cast, then offload", "offload, then cast"):
        for mode in ("block+stream", "leaf+stream"):
            yield f"layerwise casting: {order}, {mode}", _cast(order, mode)
    for weights in ("plain", "torchao-int8"):
        for how in ("whole", "blocks"):
            yield f"torch.compile: {how}, {weights}, block+stream", _compile(weights, how)
    for weights, mode, checkpointing in TRAINING:
        yield f"training: {weights}, {mode}, checkpointing {checkpointing}", _train(weights, mode, checkpointing)


TRAINING = (
    ("plain", "block+stream", "none"),
    ("plain", "block", "non-reentrant"),
    ("plain", "leaf+stream", "non-reentrant"),
    ("plain", "block+stream", "reentrant"),
    ("torchao-int8", "block+stream", "non-reentrant"),
    ("quanto-qint8", "leaf+stream", "none"),
)


def scenes() -> Any:
    from tests.composed import scenes as module

    return module


def caching() -> Any:
    from tests.composed import caching as module

    return module


def _scene(name: str, weights: str, mode: str, warm: bool) -> Scenario:
    return lambda place: scenes().play(scenes().SCENES[name], weights, MODES[mode], place, warm)[0]


def _pair(place: Setting, weights: str = "plain") -> tuple[Any, Any]:
    from tests.composed import models

    return models.flux(weights).to(place.device), models.flux(weights)


def _forwards(place: Setting, resident: Any, model: Any) -> list[str]:
    found = []
    for seed in range(3):
        wanted, got = (_output(place, net, seed) for net in (resident, model))
        found += _differences(f"forward {seed + 1}", [got], [wanted])
    return found


def _output(place: Setting, net: Any, seed: int) -> torch.Tensor:
    from tests.composed import models

    with torch.no_grad():
        output: torch.Tensor = net(**models.flux_inputs(place.device, seed), return_dict=False)[0]
    return output


def _differences(when: str, got: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[str]:
    wrong = [index for index, pair in enumerate(zip(got, wanted)) if not torch.equal(pair[0].cpu(), pair[1].cpu())]
    if not wrong:
        return []
    nan = " (NaN)" if any(got[index].isnan().any() for index in wrong) else ""
    return [f"{when}: {len(wrong)} of {len(wanted)} differ{nan}"]


def _cache(cache: str, order: str, mode: str, lora: bool) -> Scenario:
    def play(place: Setting) -> list[str]:
        resident, model = _pair(place)
        resident.enable_cache(caching().configs()[cache]())
        for what in order.split(", then "):
            if what == "cache":
                model.enable_cache(caching().configs()[cache]())
            else:
                place.enable(model, place.device, MODES[mode])
        for net in (resident, model) if lora else ():
            caching().add_lora(net)
        found = []
        for turn in range(2):
            wanted, got = (caching().loop(net, place.device)[0] for net in (resident, model))
            found += _differences(f"loop {turn + 1}", got, wanted)
        return found

    return play


def _cast(order: str, mode: str) -> Scenario:
    def play(place: Setting) -> list[str]:
        resident, model = _pair(place)
        options = {"storage_dtype": torch.float8_e4m3fn, "compute_dtype": torch.bfloat16}
        resident.enable_layerwise_casting(**options)
        for what in order.split(", then "):
            if what == "cast":
                model.enable_layerwise_casting(**options)
            else:
                place.enable(model, place.device, MODES[mode])
        found = _forwards(place, resident, model)
        small, kept = sum(p.nbytes for p in resident.parameters()), sum(p.nbytes for p in model.parameters())
        if kept != small:
            found.append(f"{kept} bytes are stored, {small} by the resident model")
        return found

    return play


def _compile(weights: str, how: str) -> Scenario:
    def play(place: Setting) -> list[str]:
        # Inductor fuses across the blocks of a resident model, which rounds otherwise than block by block, offloaded or not.
        backend = "inductor" if how == "blocks" and place.device.type != "npu" else "eager"
        torch._dynamo.reset()
        resident, model = _pair(place, weights)
        place.enable(model, place.device, MODES["block+stream"])
        for net in (resident, model):
            net.compile(backend=backend) if how == "whole" else net.compile_repeated_blocks(backend=backend)
        try:
            _output(place, resident, seed=0)
        except Exception as error:
            return [f"{ALIKE}{type(error).__name__}: {error}"]
        return _forwards(place, resident, model)

    return play


def _train(weights: str, mode: str, checkpointing: str) -> Scenario:
    def play(place: Setting) -> list[str]:
        from tests.composed import training

        resident, model = (training.build(weights, checkpointing) for _ in range(2))
        resident.to(place.device)
        place.enable(model, place.device, MODES[mode])
        losses = [training.backward(net, place.device) for net in (resident, model)]
        wanted, got = map(training.trainable, (resident, model))
        found = [] if losses[0] == losses[1] else ["the losses differ"]
        gradients = [parameter.grad for parameter in got.values() if parameter.grad is not None]
        if len(gradients) != len(wanted):
            return [*found, f"{len(gradients)} of {len(wanted)} gradients are there"]
        return found + _differences("gradients", gradients, [wanted[name].grad for name in got])

    return play


def child(options: argparse.Namespace) -> None:
    """All scenarios of one variant, one line of JSON each."""
    import logging

    import diffusers_offload_fix  # noqa: F401 -- on or off as the environment says

    from .setting import setting

    for name in ("diffusers", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)
    place = setting(options.device)
    start = time.monotonic()
    for name, scenario in scenarios():
        if options.only and options.only not in name:
            continue
        found = [UNRUN] if time.monotonic() - start > options.time_limit else played(scenario, place)
        say(json.dumps([name, found]))


def played(scenario: Scenario, place: Setting) -> list[str]:
    """The faults of a scenario; one that raises has one."""
    try:
        with place.around():
            found = scenario(place)
    except Exception as error:
        traceback.print_exc()
        found = [f"{type(error).__name__}: {error}"]
    gc.collect()
    if place.device.type == "npu":
        from tests import sim

        found += sim.hazards()[:1]
        sim.reset_hazards()
    return [shorten(text, 200) for text in found]


def measure(options: argparse.Namespace) -> dict[str, dict[str, list[str]]]:
    """The faults of both variants, by scenario. What a process that died did not come to is missing."""
    with ThreadPoolExecutor(len(VARIANTS)) as pool:
        return dict(zip(VARIANTS, pool.map(lambda variant: _measured(options, variant), VARIANTS)))


def _measured(options: argparse.Namespace, variant: str) -> dict[str, list[str]]:
    command = [sys.executable, "-m", "tests.gpu.composition", "--child", "--device", options.device]
    command += ["--time-limit", str(options.time_limit), "--only", options.only]
    environment = {**os.environ, "DIFFUSERS_OFFLOAD_FIX": VARIANTS[variant]}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            output, _ = process.communicate(timeout=options.time_limit + 60)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
    lines = [line for line in output.splitlines() if line.startswith("[")]
    say(f"{variant}: {len(lines)} scenarios, exit status {process.returncode}")
    return dict(map(json.loads, lines))


def table(results: dict[str, dict[str, list[str]]]) -> str:
    """One row a scenario: the first fault of each variant, or "ok"."""
    names = list(dict.fromkeys(name for found in results.values() for name in found))
    rows = [(name, *(_words(results[variant].get(name)) for variant in VARIANTS)) for name in names]
    return align(rows, ("scenario", *VARIANTS))


def _words(found: list[str] | None) -> str:
    if found is None:
        return "the process died"
    return shorten(found[0], 70) if found else "ok"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.composition", description=__doc__)
    parser.add_argument("--device", default="cuda", help='"cuda", "cuda:1", or "npu" for the simulated one')
    parser.add_argument("--time-limit", type=float, default=540, help="seconds after which the rest is not run")
    parser.add_argument("--only", default="", help="a part of the names of the scenarios to play")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    from .setting import require

    require(options.device)
    if options.child:
        child(options)
        end(0)
    results = measure(options)
    say(table(results))
    bad = {name: found for name, found in results["patched"].items() if found and found != [UNRUN] and not found[0].startswith(ALIKE)}
    say("\n".join(f"{name}: {text}" for name, found in bad.items() for text in found))
    if bad or len(results["patched"]) < len(results["unpatched"]):
        return 1
    return 3 if any(found == [UNRUN] for found in results["patched"].values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
