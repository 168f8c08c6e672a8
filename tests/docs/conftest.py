"""An environment as a user makes one: hyper-dcp is installed in it, built like any other package."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class FreshEnvironment:
    """A virtual environment.

    Attributes:
        directory: Where it lies.
    """

    directory: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "bin" / "python"

    def install(self, *projects: Path) -> None:
        """Build projects and install them. Nothing is fetched where hatchling, which builds them, is here."""
        wheels = self.directory / "wheels" / str(len(list(self.directory.glob("wheels/*"))))
        isolation = [] if importlib.util.find_spec("hatchling") is None else ["--no-build-isolation"]
        pip = (sys.executable, "-m", "pip")
        self._run(*pip, "wheel", "-q", "--no-deps", *isolation, "-w", wheels, *projects)
        built = sorted(wheels.glob("*.whl"))
        assert len(built) == len(projects)
        self._run(*pip, "--python", self.python, "install", "-q", "--no-deps", "--no-index", *built)

    def run(self, *arguments: str | os.PathLike[str], directory: Path, seconds: int = 120) -> str:
        """Run its interpreter and return what it prints."""
        return self._run(self.python, *arguments, directory=directory, seconds=seconds)

    def run_tests(self, project: Path, directory: Path, seconds: int = 250) -> str:
        """Run the tests of a project that is installed; none may be skipped."""
        arguments = ("-q", "-p", "no:cacheprovider", "-c", project / "pyproject.toml", "--rootdir", project)
        return self.run("-m", "pytest", *arguments, project / "tests", directory=directory, seconds=seconds)

    def _run(self, *command: str | os.PathLike[str], directory: Path | None = None, seconds: int = 120) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        place = directory or self.directory
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=place, env=environment)
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
        return result.stdout


@pytest.fixture(scope="session")
def fresh_environment(tmp_path_factory: pytest.TempPathFactory) -> FreshEnvironment:
    """An environment with hyper-dcp; torch and the like are those of this one, last on the path."""
    found = FreshEnvironment(tmp_path_factory.mktemp("fresh"))
    subprocess.run((sys.executable, "-m", "venv", "--without-pip", found.directory), check=True, timeout=120)
    found.install(_ROOT)
    (installed,) = found.directory.glob("lib/python*/site-packages")
    (installed / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return found
