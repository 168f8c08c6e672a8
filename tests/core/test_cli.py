"""The command line: what it lists, its exit codes, and that it needs nothing but the core."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dcp_core import plugins
from dcp_core.cli import main as cli
from dcp_core.cli import tables
from dcp_core.cli.main import COMMANDS, Command, main
from dcp_core.errors import ArgumentError, NotFoundError
from dcp_core.hookspecs import AdapterEntry, DescriberEntry, StorageEntry, hookimpl
from dcp_core.plugins import PluginRegistry

_PROVIDED = ("plugins", "problem_of", "missing")


class Point:
    """What an entry point has; importing it may fail."""

    dist = None

    def __init__(self, name: str, plugin: object) -> None:
        self.name, self.value, self._plugin = name, f"{name}.plugin", plugin

    def load(self) -> object:
        if isinstance(self._plugin, Exception):
            raise self._plugin
        return self._plugin


def plugin(**hooks: list[Any]) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        **{f"dcp_{name}": hookimpl(lambda found=found: found) for name, found in hooks.items()}
    )


TOY = plugin(
    adapters=[AdapterEntry("toy", "toyframework", "no_such_toy.adapter:Adapter")],
    describers=[DescriberEntry("toy.Sharded", "torch", "dcp_core.arrays:NumpyAdapter")],
)
STORES = plugin(storages=[StorageEntry("toy", "dcp_core.storage.local:LocalStorage")])


def install(monkeypatch: pytest.MonkeyPatch, **found: object) -> None:
    points = [Point(name, each) for name, each in found.items()]
    registry = PluginRegistry(lambda: points)  # type: ignore[arg-type,return-value]  # stand-ins that have what is used
    for name in _PROVIDED:
        monkeypatch.setattr(plugins, name, getattr(registry, name))


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[dict[str, Any]]]:
    code = main(["plugins", "--json", *options])
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["plugins"]
    return code, found


def test_sound_plugins_are_listed_and_the_exit_code_is_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, toy=TOY, stores=STORES, empty=plugin(adapters=[]))
    assert main(["plugins"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["plugin", "from", "kind", "name", "made", "by", "state"]
    assert ["dcp_core", "built", "in", "adapter", "numpy", "dcp_core.arrays:NumpyAdapter", "ok"] in lines
    assert ["toy", "toy.plugin", "describer", "toy.Sharded", "dcp_core.arrays:NumpyAdapter", "ok"] in lines
    assert ["stores", "stores.plugin", "storage", "toy", "dcp_core.storage.local:LocalStorage", "ok"] in lines
    assert ["empty", "empty.plugin", "registers", "nothing"] in lines


def test_json_holds_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, toy=TOY)
    code, found = listed(capsys)
    assert code == 0
    assert found[1] == {
        "name": "toy",
        "origin": "toy.plugin",
        "problem": None,
        "entries": [
            {
                "kind": "adapter",
                "name": "toy",
                "framework": "toyframework",
                "factory": "no_such_toy.adapter:Adapter",
                "problem": None,
                "missing": None,
            },
            {
                "kind": "describer",
                "name": "toy.Sharded",
                "framework": "torch",
                "factory": "dcp_core.arrays:NumpyAdapter",
                "problem": None,
                "missing": None,
            },
        ],
    }


def test_a_broken_plugin_is_listed_with_its_reason_and_the_exit_code_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, broken=ImportError("needs\nlibfoo"), stores=STORES)
    assert main(["plugins"]) == 1
    out = capsys.readouterr().out
    assert "broken: ImportError: needs libfoo\n" in out
    assert "dcp_core.storage.local:LocalStorage  ok\n" in out
    code, found = listed(capsys)
    assert (code, found[1]["problem"]) == (1, "ImportError: needs\nlibfoo")


def test_what_two_plugins_claim_is_listed_with_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, one=STORES, two=STORES)
    code, found = listed(capsys)
    assert code == 1
    problems = [entry["problem"] for report in found[1:] for entry in report["entries"]]
    both = "'one' (one.plugin) and 'two' (two.plugin)"
    assert problems == [f"two plugins claim the storage of scheme 'toy': {both}; uninstall all but one of them"] * 2


def test_what_one_plugin_claims_twice_is_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, one=plugin(storages=[*STORES.dcp_storages(), *STORES.dcp_storages()]))
    expected = "the plugin 'one' (one.plugin) claims the storage of scheme 'toy' twice; it must do so once"
    assert [entry["problem"] for entry in listed(capsys)[1][1]["entries"]] == [expected] * 2


def test_check_imports_and_makes_what_is_registered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    again = "dcp_core.api.NumpyAdapter"  # imported there, defined elsewhere
    describers = [
        DescriberEntry("dcp_core.arrays.NumpyAdapter", "numpy", "dcp_core.arrays:NumpyAdapter"),
        DescriberEntry(again, "numpy", "dcp_core.arrays:NumpyAdapter"),
        DescriberEntry("nomod.Y", "nosuchframework", "dcp_core.arrays:NumpyAdapter"),
    ]
    install(monkeypatch, toy=TOY, stores=STORES, names=plugin(describers=describers))
    assert listed(capsys)[0] == 0
    code, found = listed(capsys, "--check")
    assert code == 1
    by_name = {report["name"]: [entry["problem"] for entry in report["entries"]] for report in found}
    assert "No module named 'toyframework'" in by_name["toy"][0]
    missing = "No module named 'toy'" if find_spec("torch") else "its framework 'torch' cannot be imported"
    assert missing in by_name["toy"][1]
    assert by_name["stores"] == [None]
    assert by_name["names"][0] is None
    assert "write 'dcp_core.arrays.NumpyAdapter'" in by_name["names"][1]
    assert "its framework 'nosuchframework' cannot be imported" in by_name["names"][2]
    assert main(["plugins", "--check"]) == 1
    assert f"broken: the describer of '{again}' of the plugin 'names'" in capsys.readouterr().out


def test_a_framework_of_ours_that_is_not_installed_is_no_problem() -> None:
    result = run_cli("plugins", "--check", "--json")
    ours = [report for report in json.loads(result.stdout)["plugins"] if report["name"] in ("mindspore", "torch")]
    assert [report["name"] for report in ours] == ["mindspore", "torch"], result.stderr
    for report in ours:
        is_here = importlib.util.find_spec(report["name"]) is not None
        assert {entry["problem"] for entry in report["entries"]} == {None}
        assert {entry["missing"] for entry in report["entries"]} == {None if is_here else report["name"]}
        is_told = f"  {report['name']} is not installed\n" in run_cli("plugins").stdout
        assert is_told != is_here


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        ([], 2, "", "arguments are required: COMMAND"),
        (["nonsense"], 2, "", "invalid choice: 'nonsense'"),
        (["plugins", "--nonsense"], 2, "", "unrecognized arguments: --nonsense"),
        (["--help"], 0, "list the plugins that are installed", ""),
        (["plugins", "--help"], 0, "--json", ""),
        (["--version"], 0, "hyper-dcp ", ""),
    ],
)
def test_help_and_wrong_arguments(
    arguments: list[str], code: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert out in captured.out
    assert err in captured.err


@pytest.mark.parametrize(
    ("error", "code"), [(NotFoundError("nothing there"), 1), (ArgumentError("no path"), 2), (KeyboardInterrupt(), 130)]
)
def test_a_command_that_fails_says_why_and_has_its_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: object) -> int:
        raise error

    monkeypatch.setitem(sys.modules, "toycommand", types.SimpleNamespace(add_arguments=lambda parser: None, run=run))
    monkeypatch.setitem(COMMANDS, "toy", Command("toycommand", "do nothing"))
    assert main(["toy"]) == code
    assert capsys.readouterr().err == f"dcp: {error if code != 130 else 'interrupted'}\n"


def test_every_command_has_its_two_functions() -> None:
    import importlib

    for command in COMMANDS.values():
        module = importlib.import_module(command.module)
        assert callable(module.add_arguments)
        assert callable(module.run)


def test_without_rich_on_a_terminal_the_table_is_plain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    tables.write_table(["a", "b"], [["1", "[2]"]])
    assert capsys.readouterr().out == "a  b\n1  [2]\n"


def test_with_rich_on_a_terminal_it_is_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    tables.write_table(["a", "b"], [["1", "[2]"]])
    out = capsys.readouterr().out
    assert "[2]" in out
    assert out != "a  b\n1  [2]\n"


def test_the_console_script_is_this_function() -> None:
    found = [point for point in entry_points(group="console_scripts") if point.name == "dcp"]
    assert all(point.load() is cli.main for point in found)
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    assert 'dcp = "dcp_core.cli.main:main"' in pyproject.read_text()


def run_cli(*arguments: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "dcp_core.cli", *arguments]
    if shell:
        command = ["sh", "-c", " ".join(command) + shell]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_it_runs_as_a_program_and_a_reader_that_leaves_early_is_fine() -> None:
    whole = run_cli("plugins")
    assert whole.stderr == ""
    assert "numpy" in whole.stdout
    piped = run_cli("plugins", "--json", shell=" | true")
    assert (piped.returncode, piped.stderr) == (0, "")


def test_listing_imports_no_framework() -> None:
    code = (
        "import sys; from dcp_core.cli.main import main; main(['plugins']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'mindspore', 'rich', 'pytest')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
