"""The code that travels to workers elsewhere: installed there, it is what runs here."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from pipelines.errors import UsageError
from pipelines.packages import pack_ourselves, pack_steps, requirements


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module, a package with data, and a module that nothing has imported."""
    place = tmp_path / "work"
    (place / "mypack/inner").mkdir(parents=True)
    (place / "mymodule.py").write_text("import mypack.inner.deep\nVALUE = mypack.inner.deep.VALUE\n")
    (place / "mypack/inner/deep.py").write_text(
        "from pathlib import Path\nVALUE = Path(__file__).with_name('data.txt').read_text()\n"
    )
    (place / "mypack/inner/data.txt").write_text("deep")
    (place / "mylate.py").write_text("VALUE = 'late'\n")
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [*sys.path, str(place)])
    for name in [name for name in sys.modules if name.split(".")[0] in ("mymodule", "mypack", "mylate")]:
        del sys.modules[name]
    return place


def installed(sdist: str | Path, tmp_path: Path) -> str:
    """Installs a source distribution as a worker does, with nothing from the network; returns its Python."""
    place = tmp_path / "env"
    venv.create(place, with_pip=False, symlinks=True)
    target = next(place.glob("lib/python*/site-packages"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(sdist)], check=True)
    return str(place / "bin/python")


def output_of(python: str, program: str, cwd: Path) -> str:
    return subprocess.run(
        [python, "-I", "-c", program], cwd=cwd, capture_output=True, text=True, check=True
    ).stdout.strip()


class TestSteps:
    def test_what_a_step_imports_from_its_folder_travels_along(self, folder: Path, tmp_path: Path) -> None:
        importlib.import_module("mymodule")
        sdist = pack_steps(["mylate"], str(tmp_path), str(folder))
        assert sdist is not None
        assert sdist.endswith(".tar.gz")
        python = installed(sdist, tmp_path)
        assert (
            output_of(python, "import mymodule, mylate; print(mymodule.VALUE, mylate.VALUE)", tmp_path) == "deep late"
        )

    def test_nothing_else_does(self, folder: Path, tmp_path: Path) -> None:
        importlib.import_module("mypack.inner.deep")
        (folder / "mypack/__pycache__").mkdir(exist_ok=True)
        (folder / "mypack/__pycache__/x.pyc").write_bytes(b"x")
        sdist = pack_steps([], str(tmp_path), str(folder))
        assert sdist is not None
        with tarfile.open(sdist) as archive:
            files = sorted(member.name for member in archive.getmembers() if member.isfile())
        names = ["MANIFEST.in", "mypack/inner/data.txt", "mypack/inner/deep.py", "setup.py"]
        assert files == [f"gristmill-steps-0/{name}" for name in names]

    def test_without_modules_of_ones_own_there_is_no_package(self, folder: Path, tmp_path: Path) -> None:
        assert pack_steps([], str(tmp_path), str(folder)) is None

    @pytest.mark.parametrize(
        ("name", "message"), [("nowhere", "py_modules: nowhere cannot be imported"), ("json", "json does not lie in")]
    )
    def test_a_module_that_cannot_travel_is_named(self, name: str, message: str, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=message):
            pack_steps([name], str(tmp_path), str(folder))


class TestOurselves:
    def test_the_package_is_whole_wherever_it_was_installed_from(self, tmp_path: Path) -> None:
        setup = Path(pack_ourselves(str(tmp_path)))
        python = installed(setup.parent, tmp_path)
        program = "import pipelines, transforms.steps.load as load; print(pipelines.__file__, sorted(load.BUILT_IN))"
        place, steps = output_of(python, program, tmp_path).split(" ", 1)
        assert place.startswith(str(tmp_path / "env"))
        assert "http.post" in steps

    def test_it_asks_for_what_setup_py_asks_for(self, tmp_path: Path) -> None:
        text = Path(pack_ourselves(str(tmp_path))).read_text()
        assert all(repr(requirement) in text for requirement in requirements())
        assert any(requirement.startswith("apache-beam[gcp]") for requirement in requirements())
        assert not any(requirement.startswith(("pytest", "httpx")) for requirement in requirements())

    def test_an_extra_that_a_step_needs_is_asked_for_too(self) -> None:
        assert {one.split(">")[0] for one in requirements(["http"])} >= {"httpx", "anyio", "tenacity"}
