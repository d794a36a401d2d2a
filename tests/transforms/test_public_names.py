"""The public names, and what may be imported without Beam."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import transforms

PACKAGE = Path(transforms.__file__).parent
WITH_BEAM = {"convert", "publish", "read", "verify_shards", "write", "steps.apply"}
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)
WITHOUT_BEAM = [name for name in MODULES if name != "__init__" and name not in WITH_BEAM]


class TestPublicNames:
    def test_are_sorted_and_each_once(self) -> None:
        assert list(transforms.__all__) == sorted(set(transforms.__all__))

    @pytest.mark.parametrize("name", transforms.__all__)
    def test_loads_what_its_module_defines(self, name: str) -> None:
        found = getattr(transforms, name)
        assert found.__name__ == name
        assert found.__module__.startswith("transforms.")
        assert inspect.getdoc(found)

    def test_are_what_dir_and_star_offer(self) -> None:
        assert dir(transforms) == list(transforms.__all__)
        namespace: dict[str, object] = {}
        exec("from transforms import *", namespace)
        assert set(transforms.__all__) <= set(namespace)

    def test_unknown_name_is_an_attribute_error_that_says_so(self) -> None:
        with pytest.raises(AttributeError, match="'transforms' has no attribute 'Converter'"):
            _ = transforms.Converter


def modules_after(program: str) -> set[str]:
    """Names of the top-level packages that a fresh process has imported in the end."""
    program += "\nimport sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


class TestImports:
    def test_the_package_alone_imports_next_to_nothing(self) -> None:
        assert not {"apache_beam", "array_record", "tensorflow", "numpy", "jinja2"} & modules_after("import transforms")

    def test_public_names_without_beam_do_not_import_it(self) -> None:
        names = "BadRecordError, DeadLetter, Drop, JobSpec, LocalStore, OutputError, RecordBatch, ShardTask, Store"
        program = f"from transforms import {names}"
        assert not {"apache_beam", "tensorflow"} & modules_after(program)

    def test_no_module_without_beam_imports_it(self) -> None:
        program = "\n".join(f"import transforms.{name}" for name in WITHOUT_BEAM)
        assert not {"apache_beam", "tensorflow", "pipelines"} & modules_after(program), WITHOUT_BEAM

    @pytest.mark.parametrize("name", WITHOUT_BEAM)
    def test_every_module_can_be_imported_first(self, name: str) -> None:
        assert "transforms" in modules_after(f"import transforms.{name}")
