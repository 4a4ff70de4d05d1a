"""What is in the wheel, and the ways in that need an environment of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from fresh import environment

ROOT = Path(__file__).resolve().parent.parent
# Where the packages of the environment that runs the tests are.
OUTER = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
BLOCKS = (ROOT / "README.md").read_text().split("```")
# The two lines of the README.
TWO_LINES = "try: import diffusers_offload_fix\nexcept ImportError: pass\n"
PROGRAM = """
import sys
sys.modules["peft"] = None
import diffusers.hooks.group_offloading
diffusers_offload_fix = sys.modules["diffusers_offload_fix"]  # nobody here has imported it
print(sorted({status.state.value for status in diffusers_offload_fix.report()}))
"""
GOOD = "['applied', 'fixed_upstream', 'out_of_range', 'waiting']"


class Environment:
    """A virtual environment that also sees the packages of the one that runs the tests."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        script = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.site = Path(self.output("-c", script))
        (self.site / "outer.pth").write_text("\n".join([*OUTER, str(ROOT), ""]))

    def output(self, *arguments: str, **variables: str) -> str:
        inherited = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
        done = subprocess.run([self.python, *arguments], env={**inherited, **variables}, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def fresh(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "venv")


def test_sitecustomize(fresh: Environment) -> None:
    assert any(block.endswith(TWO_LINES) for block in BLOCKS), "the README documents other lines"
    (fresh.site / "sitecustomize.py").write_text(f"import os\nos.environ['OTHER'] = 'kept'\n{TWO_LINES}")
    program = PROGRAM + "import os; print(os.environ['OTHER'])"
    assert fresh.output("-c", program).split("\n") == [GOOD, "kept"]
    # Every other interpreter pays for two small modules only.
    script = "import sys; print('diffusers_offload_fix' in sys.modules, 'torch' in sys.modules, 'wrapt' in sys.modules)"
    assert fresh.output("-c", script) == "True False False"


def test_sitecustomize_where_the_plugin_is_gone(fresh: Environment) -> None:
    (fresh.site / "sitecustomize.py").write_text(TWO_LINES + "import os\nos.environ['OTHER'] = 'kept'\n")
    (fresh.site / "outer.pth").unlink()
    assert fresh.output("-c", "import os; print(os.environ['OTHER'])") == "kept"


def test_the_entry_point_is_declared() -> None:
    try:
        found = metadata.distribution("diffusers-offload-fix")
    except metadata.PackageNotFoundError:
        pytest.skip("the project is not installed")
    [point] = [point for point in found.entry_points if point.group == "diffusers_offload_fix"]
    assert (point.name, point.value) == ("diffusers", "diffusers_offload_fix._autowrapt:bootstrap")
    assert callable(point.load())


@pytest.mark.network
def test_autowrapt(fresh: Environment) -> None:
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(fresh.site)]
    subprocess.run([*install, "autowrapt"], check=True)
    subprocess.run([*install, str(ROOT)], check=True)
    (fresh.site / "outer.pth").write_text("\n".join([*OUTER, ""]))
    assert fresh.output("-c", PROGRAM, AUTOWRAPT_BOOTSTRAP="diffusers_offload_fix") == GOOD
    script = "import sys; print('diffusers' in sys.modules, 'torch' in sys.modules)"
    assert fresh.output("-c", script, AUTOWRAPT_BOOTSTRAP="diffusers_offload_fix") == "False False"


@pytest.mark.network
def test_the_wheel_has_no_startup_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, env={**os.environ, "PIP_NO_INPUT": "1"})
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [info] = [name for name in names if name.endswith("METADATA")]
        text = archive.read(info).decode()
    assert all(name.startswith(("diffusers_offload_fix/", "diffusers_offload_fix-")) for name in names)
    assert not any(name.endswith(".pth") or "customize" in name for name in names)
    assert "diffusers_offload_fix/py.typed" in names
    needed = [line for line in text.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert sorted(needed) == ["Requires-Dist: packaging", "Requires-Dist: wrapt>=2.4"]
    assert "License-Expression: Apache-2.0" in text
