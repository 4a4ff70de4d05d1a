"""What `import diffusers_offload_fix` adds to a bare interpreter: `python tests/benchmark/import_time.py [RUNS]`."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import sys, time
sys.path.insert(0, sys.argv[1])
start = time.perf_counter()
import diffusers_offload_fix
print(time.perf_counter() - start)
"""


def measure() -> float:
    """Milliseconds of one import."""
    command = [sys.executable, "-I", "-c", CODE, str(ROOT)]
    return 1000 * float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main(argv: list[str]) -> None:
    times = sorted(measure() for _ in range(int(argv[0]) if argv else 50))
    sys.stdout.write(f"best {times[0]:.2f} ms, median {statistics.median(times):.2f} ms, worst {times[-1]:.2f} ms\n")


if __name__ == "__main__":
    main(sys.argv[1:])
