"""The project's commands: `python3 -m nox -s demo`, `python3 -m nox -s tests`; `python3 -m nox -l` lists them all.

Every session makes the environment that it needs with `venv` and pip. Arguments after `--` go to what a session runs:
`python3 -m nox -s tests_torch -- -k reshard`.
"""

from __future__ import annotations

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests"]

TORCH = "torch==2.13.0"  # exact: an open range may take another build, of several gigabytes
MINDSPORE = "mindspore==2.10.0"
ONE_THREAD_A_RANK = {"OMP_NUM_THREADS": "1"}
TWO_WORKERS = ("-n", "2", "--dist", "worksteal")
QUIET_MINDSPORE = {"GLOG_v": "3"}
MINDSPORE_PAGE = "tests/docs/test_code_blocks.py::test_the_python_blocks_of_a_page_run[docs/how-to/mindspore.md]"
BENCHMARKS = (
    *("engines", "async_save", "shared_reads", "conversions", "object_store"),
    *("plan_scale", "inspect_scale", "mindspore_files"),
)
BENCH_PEERS = ("torchsnapshot", "orbax-checkpoint", "torch_checkpointing", MINDSPORE)
IN_ORDER = ("lint", "types", "docs", "tests_numpy2", "demo", "tests_mindspore", "tests_torch")


def _install_torch(session: nox.Session) -> None:
    session.install(TORCH, "numpy<2", "-e", ".[torch,dev]")


def _pytest(session: nox.Session, *arguments: str, **environment: str) -> None:
    """Run pytest; when nothing matches it says so and exits with 5, and the session fails."""
    environment = ONE_THREAD_A_RANK | environment
    session.run("python", "-m", "pytest", *arguments, *session.posargs, env=environment)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small transformer on 4 ranks, save, and go on in other layouts."""
    session.install(TORCH, "numpy<2", ".[torch]")
    session.run("python", "docs/examples/demo.py", *session.posargs, env=ONE_THREAD_A_RANK)


@nox.session
def demo_mindspore(session: nox.Session) -> None:
    """Train with MindSpore on 4 workers, save, and go on in other layouts; `tests_mindspore` runs it, too."""
    session.install(MINDSPORE, "numpy<2", ".[mindspore]")
    environment = ONE_THREAD_A_RANK | QUIET_MINDSPORE
    session.run("python", "docs/examples/demo_mindspore.py", *session.posargs, env=environment)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """All that CI checks: lint, types, docs, the core on numpy 2, the demo, MindSpore and its demo, then torch."""
    for name in IN_ORDER:
        session.notify(name)
    session.log(f"runs in this order: {', '.join(IN_ORDER)}")


@nox.session
def tests_torch(session: nox.Session) -> None:
    """All tests, the code blocks of the docs among them, with torch and numpy 1.26."""
    _install_torch(session)
    _pytest(session, *TWO_WORKERS, "tests")


@nox.session
def tests_mindspore(session: nox.Session) -> None:
    """The tests of MindSpore, those with torch in the same process, its page and its demo; numpy 2 breaks MindSpore."""
    session.install(TORCH, MINDSPORE, "numpy<2", "-e", ".[dev]")
    _pytest(session, *TWO_WORKERS, "tests/mindspore", MINDSPORE_PAGE, DCP_NEEDS_MINDSPORE="1", **QUIET_MINDSPORE)


@nox.session
def tests_numpy2(session: nox.Session) -> None:
    """The core's tests on numpy 2, without any framework; but for those marked `faults`, which `tests_torch` runs."""
    session.install("numpy>=2", "-e", ".[dev]")
    _pytest(session, *TWO_WORKERS, "-m", "not faults", "tests/core")


@nox.session(python=["3.10", "3.12", "3.13"])
def pythons(session: nox.Session) -> None:
    """The core's tests on other Python versions; an interpreter that is not there is left out, and named."""
    session.install("-e", ".[dev]")
    _pytest(session, "-n", "2", "tests/core")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, format, and the direction of imports."""
    session.install("-e", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Strict types: the packages, the tests, the benchmarks and this file."""
    _install_torch(session)
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the pages; warnings are errors. `tests_torch` runs their code blocks."""
    session.install("-e", ".[docs]")
    session.run("sphinx-build", "-W", "--keep-going", "-q", "-b", "html", "docs", "docs/_build/html")
    session.log("the pages are in docs/_build/html/index.html")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure saves, loads and plans beside torch DCP and others; `-- engines --quick` runs one, with its arguments."""
    _install_torch(session)
    for peer in BENCH_PEERS:  # one that does not install is left out, and the table says so
        session.run("python", "-m", "pip", "install", "--quiet", TORCH, "numpy<2", peer, success_codes=(0, 1))
    if session.posargs and session.posargs[0] not in BENCHMARKS:
        session.error(f"name one of {', '.join(BENCHMARKS)} after --, then its arguments")
    named, arguments = session.posargs[:1] or BENCHMARKS, session.posargs[1:]
    for name in named:
        session.run("python", "-m", f"benchmarks.{name}", *arguments)


@nox.session
def faults(session: nox.Session) -> None:
    """Fail and kill at every step: the tests marked `faults`."""
    _install_torch(session)
    _pytest(session, "-m", "faults", "tests")


@nox.session
def soak(session: nox.Session) -> None:
    """Run for long, and watch memory, threads and files: the tests marked `soak`."""
    _install_torch(session)
    _pytest(session, "-m", "soak", "--timeout", "3600", "tests")


@nox.session
def fuzz(session: nox.Session) -> None:
    """The property tests with many more examples, a new random seed each time."""
    _install_torch(session)
    _pytest(session, "-m", "hypothesis", "-n", "2", "--timeout", "3600", "tests", DCP_HYPOTHESIS="fuzz")


@nox.session
def fuzz_coverage(session: nox.Session) -> None:
    """Every way in for strangers' bytes, with inputs that coverage guides; `-- 600 metadata` one, for 600 seconds.

    What fails is left under `fuzz_findings/`, a folder for each target.
    """
    _install_torch(session)
    session.install("atheris>=3,<4")  # instruments the bytecode, and makes inputs that reach new lines of it
    seconds, names = session.posargs[:1] or ("15",), session.posargs[1:]
    session.run("python", "-m", "tests.fuzz.run_target", *seconds, "fuzz_findings", *names, env=ONE_THREAD_A_RANK)
