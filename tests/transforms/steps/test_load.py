"""Loading steps: by name or import path, with parameters, and errors that say which step and why."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from transforms.steps import example
from transforms.steps.load import BUILT_IN, Step, StepError, load_steps, source_digest
from transforms.steps.options import StepOptions

MODULE = '''
"""Steps of a user."""

CONSTANT = 7


def shout(record):
    return record.upper()


def repeat(record, times, joiner=b""):
    return joiner.join([record] * times)


def keywords(record, **options):
    return repr(sorted(options.items())).encode()


class Suffix:
    def __init__(self, suffix="!", limit=10):
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        self.suffix = suffix.encode()

    def __call__(self, record):
        return record + self.suffix

    def bound(self, record):
        return record


class OnItsOwn:
    own_deadline = own_retries = True

    def __init__(self, timeout_secs=60.0, retries=8):
        self.got = timeout_secs, retries

    def __call__(self, record):
        return record


class NotCallable:
    pass


class NeedsFile:
    def __init__(self, path):
        open(path)


class Tools:
    @staticmethod
    def strip(record):
        return record.strip()
'''

NEEDED = {"http.post": {"url": "http://localhost/"}}
"""Parameters that steps of the library cannot do without."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of user modules; what was imported from it and added to the path goes away again."""
    (tmp_path / "toy_steps.py").write_text(MODULE)
    modules, path = set(sys.modules), list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def load(folder: Path, *steps: dict[str, Any]) -> list[Step]:
    return load_steps(steps, [str(folder)])


def refusal(folder: Path, *steps: dict[str, Any]) -> str:
    """The message with which steps are refused."""
    with pytest.raises(StepError) as refused:
        load(folder, *steps)
    return str(refused.value)


class TestLoading:
    def test_no_steps_are_none(self) -> None:
        assert load_steps([], []) == []

    def test_name_finds_the_library_step(self) -> None:
        [step] = load_steps([{"use": "example.check"}], [])
        assert step == Step("example.check", example.check)

    @pytest.mark.parametrize("name", sorted(BUILT_IN))
    def test_every_library_step_loads(self, name: str) -> None:
        [step] = load_steps([{"use": name, **NEEDED.get(name, {})}], [])
        assert callable(step.call)

    def test_import_path_finds_a_function_of_the_users(self, folder: Path) -> None:
        [step] = load(folder, {"call": "toy_steps:shout"})
        assert (step.name, step.call(b"a")) == ("toy_steps:shout", b"A")

    def test_import_path_may_lead_into_a_class(self, folder: Path) -> None:
        assert load(folder, {"call": "toy_steps:Tools.strip"})[0].call(b" a ") == b"a"

    def test_function_gets_its_parameters(self, folder: Path) -> None:
        [step] = load(folder, {"call": "toy_steps:repeat", "times": 3})
        assert step.call(b"ab") == b"ababab"

    def test_function_may_take_any_keyword(self, folder: Path) -> None:
        [step] = load(folder, {"call": "toy_steps:keywords", "a": 1, "b": [2]})
        assert step.call(b"x") == b"[('a', 1), ('b', [2])]"

    def test_class_is_made_once_with_its_parameters(self, folder: Path) -> None:
        [step] = load(folder, {"call": "toy_steps:Suffix", "suffix": "?"})
        assert step.call(b"a") == b"a?"

    def test_class_gets_the_options_that_it_sees_to_itself(self, folder: Path) -> None:
        step, unset = load(
            folder, {"call": "toy_steps:OnItsOwn", "timeout_secs": 2.0, "retries": 0}, {"call": "toy_steps:OnItsOwn"}
        )
        assert (step.call.got, unset.call.got) == ((2.0, 0), (60.0, 8))  # type: ignore[attr-defined]
        assert step.options == StepOptions()  # Nobody else sees to them.

    def test_options_stay_with_other_classes(self, folder: Path) -> None:
        [step] = load(folder, {"call": "toy_steps:Suffix", "timeout_secs": 2.0})
        assert step.options == StepOptions(timeout_secs=2.0)

    def test_builtin_without_a_signature_loads(self, folder: Path) -> None:
        [step] = load(folder, {"call": "zlib:compress"})
        assert isinstance(step.call(b"a"), bytes)

    def test_steps_keep_their_order(self, folder: Path) -> None:
        steps = load(folder, {"call": "toy_steps:shout"}, {"use": "example.check"}, {"call": "toy_steps:shout"})
        assert [step.name for step in steps] == ["toy_steps:shout", "example.check", "toy_steps:shout"]

    def test_folder_of_the_user_does_not_hide_ours(self, folder: Path) -> None:
        """A project may well have a folder called `transforms` itself."""
        (folder / "transforms").mkdir()
        (folder / "transforms" / "__init__.py").write_text("raise RuntimeError('the wrong one')")
        program = """
            import sys
            from transforms.steps.load import load_steps
            steps = load_steps([{"call": "toy_steps:shout"}, {"use": "example.check"}], [sys.argv[1]])
            print(steps[0].call(b"a"), steps[1].call(b""))
        """
        done = run_python(textwrap.dedent(program), str(folder))
        assert done.stdout == "b'A' b''\n", done.stderr

    def test_import_path_is_added_once(self, folder: Path) -> None:
        for _ in range(3):
            load(folder, {"call": "toy_steps:shout"})
        assert sys.path.count(str(folder)) == 1
        assert sys.path[-1] == str(folder)


class TestRefusal:
    def test_unknown_name_gets_the_nearest(self, folder: Path) -> None:
        message = refusal(folder, {"use": "example.check"}, {"use": "exmple.chek"})
        assert "steps[1]: unknown step 'exmple.chek'" in message
        assert "did you mean example.check?" in message

    def test_unknown_name_without_a_near_one_gets_the_list(self, folder: Path) -> None:
        assert "known steps: example.check" in refusal(folder, {"use": "zzz"})

    @pytest.mark.parametrize("target", ["toy_steps", "toy_steps:", ":shout", "", ":"])
    def test_path_without_both_parts(self, folder: Path, target: str) -> None:
        assert "steps[0]: expected module:function" in refusal(folder, {"call": target})

    def test_unknown_module(self, folder: Path) -> None:
        message = refusal(folder, {"call": "no_such_module:shout"})
        assert "steps[0]: module 'no_such_module' cannot be imported: ModuleNotFoundError" in message

    @pytest.mark.parametrize("module", ["tokenize", "os", "sys", "pytest", "json", "json.decoder"])
    def test_module_that_another_hides_is_refused_with_what_is_found(self, folder: Path, module: str) -> None:
        own = folder / f"{module.replace('.', '/')}.py"
        own.parent.mkdir(exist_ok=True)
        own.write_text("def run(record):\n    return record\n")
        message = refusal(folder, {"call": f"{module}:run"})
        assert f"steps[0]: {module}:run: the module {module.split('.')[0]!r} that Python finds is " in message
        assert f", which hides {own}; give yours a name that nothing else has" in message
        assert message.split(" finds is ")[1].split(", which")[0] != str(own)

    def test_module_of_a_package_called_like_ours_is_refused_with_what_is_found(self, folder: Path) -> None:
        for name in ("transforms/clean.py", "transforms/__init__.py", "pipelines.py"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("def run(record):\n    return record\n")
        for target in ("transforms.clean:run", "transforms:run", "pipelines:run"):
            message = refusal(folder, {"call": target})
            assert f"that Python finds is {Path(example.__file__).parents[2]}" in message
            assert f"which hides {folder}" in message
        assert load(folder, {"call": "transforms.steps.example:check"})[0].call is example.check
        assert load(folder, {"use": "example.check"})[0].call is example.check

    def test_folder_without_modules_hides_nothing(self, folder: Path) -> None:
        (folder / "operator").mkdir()
        assert load(folder, {"call": "operator:not_"})[0].call(b"") is True

    def test_module_in_a_folder_or_behind_a_link_is_found(self, folder: Path, tmp_path: Path) -> None:
        for name in ("own_package/inner.py", "own_names/deep/inner.py"):
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_text("def run(record):\n    return record\n")
        (folder / "own_package/__init__.py").write_text("")
        (tmp_path / "elsewhere.py").write_text("def run(record):\n    return record\n")
        (folder / "own_link.py").symlink_to(tmp_path / "elsewhere.py")
        for target in ("own_package.inner:run", "own_names.deep.inner:run", "own_link:run"):
            assert load(folder, {"call": target})[0].call(b"x") == b"x"

    def test_unknown_function_gets_the_nearest(self, folder: Path) -> None:
        assert "toy_steps has no 'shuot'; did you mean 'shout'?" in refusal(folder, {"call": "toy_steps:shuot"})
        assert "has no 'zzz'" in refusal(folder, {"call": "toy_steps:Tools.zzz"})

    def test_what_is_no_function(self, folder: Path) -> None:
        assert "toy_steps:CONSTANT is not a function, it is a int" in refusal(folder, {"call": "toy_steps:CONSTANT"})

    @pytest.mark.parametrize(
        ("source", "name"),
        [
            ("def x(:", "SyntaxError"),
            ("1 / 0", "ZeroDivisionError"),
            ("import no_such_thing", "ModuleNotFoundError"),
            ("raise SystemExit(0)", "SystemExit"),
            ("import sys; sys.exit()", "SystemExit"),
            ("import argparse; argparse.ArgumentParser().parse_args(['--nope'])", "SystemExit"),
        ],
    )
    def test_module_that_fails_or_exits_on_import(self, folder: Path, source: str, name: str) -> None:
        (folder / "failing_steps.py").write_text(source)
        assert f"module 'failing_steps' cannot be imported: {name}" in refusal(folder, {"call": "failing_steps:x"})

    @pytest.mark.parametrize(
        ("step", "hint"),
        [
            ({"call": "toy_steps:repeat"}, "times"),
            ({"call": "toy_steps:repeat", "times": 3, "tiems": 4}, "'tiems'; did you mean times?"),
            ({"call": "toy_steps:repeat", "times": 3, "retreis": 4}, "; did you mean retries?"),
            ({"call": "toy_steps:shout", "loud": True}, "loud"),
            ({"call": "toy_steps:Suffix", "sufix": "?"}, "; did you mean suffix?"),
            ({"use": "example.check", "strict": True}, "strict"),
        ],
    )
    def test_parameter_that_is_missing_or_unknown(self, folder: Path, step: dict[str, Any], hint: str) -> None:
        message = refusal(folder, step)
        assert "does not take these parameters" in message
        assert hint in message

    def test_value_that_the_class_refuses(self, folder: Path) -> None:
        message = refusal(folder, {"call": "toy_steps:Suffix", "limit": 0})
        assert "steps[0]: toy_steps:Suffix" in message
        assert "limit must be at least 1, got 0" in message

    def test_class_that_fails_in_another_way(self, folder: Path) -> None:
        message = refusal(folder, {"call": "toy_steps:NeedsFile", "path": "/nowhere/list.txt"})
        assert "steps[0]: toy_steps:NeedsFile" in message
        assert "/nowhere/list.txt" in message

    def test_class_whose_instances_cannot_be_called(self, folder: Path) -> None:
        assert "steps[0]: toy_steps:NotCallable" in refusal(folder, {"call": "toy_steps:NotCallable"})


class TestSourceDigest:
    def digest(self, folder: Path, *targets: str) -> str:
        """The digest as a fresh process finds it."""
        program = """
            import sys
            from transforms.steps.load import load_steps, source_digest
            steps = [{"call": target} for target in sys.argv[2:]]
            load_steps(steps, [sys.argv[1]])
            print(source_digest(steps))
        """
        done = run_python(textwrap.dedent(program), str(folder), *targets)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def test_changed_code_is_a_changed_job(self, folder: Path) -> None:
        before = self.digest(folder, "toy_steps:shout")
        assert self.digest(folder, "toy_steps:shout") == before
        (folder / "toy_steps.py").write_text(MODULE.replace("upper", "lower"))
        os.utime(folder / "toy_steps.py", ns=(1, 1))
        assert self.digest(folder, "toy_steps:shout") != before

    def test_place_of_the_code_does_not_matter(self, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        other = tmp_path_factory.mktemp("other")
        (other / "toy_steps.py").write_text(MODULE)
        assert self.digest(folder, "toy_steps:shout") == self.digest(other, "toy_steps:shout")

    def test_compiled_modules_and_library_steps_have_one(self) -> None:
        assert source_digest([{"call": "zlib:compress"}]) != source_digest([{"call": "binascii:hexlify"}])
        assert source_digest([{"use": "example.check"}]) == source_digest([])


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own, whose path does not begin with the working directory."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
