"""The Makefile's commands: what they hand to gristmill, gcloud and docker, word for word, and that no value is run."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.1.0"
IMAGE = f"us-central1-docker.pkg.dev/my-project/gristmill/worker:{VERSION}"
TEMPLATE = f"gs://my-bucket/gristmill/templates/gristmill-{VERSION}.json"
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml") if path.stem != "reference")

# A stand-in that keeps its name and arguments; `docker info` fails where there is no daemon.
STAND_IN = """#!/bin/sh
{ printf '%s\\0' "${0##*/}" "$@"; printf '\\1'; } >> "$CALLS"
test "${0##*/} $1" != "docker info" || exit "${DOCKER_STATUS:-0}"
exit "${STATUS:-0}"
"""

PLACE = ["PROJECT=my-project", "REGION=us-central1", "BUCKET=my-bucket"]
PATHS = ["INPUT=gs://my-bucket/raw/*", "OUTPUT=gs://my-bucket/corpus"]
CONVERT = ["convert", "--config", "configs/tfrecord.yaml", "--input", "gs://my-bucket/raw/*"]
OUTPUT = ["--output", "gs://my-bucket/corpus"]
ON_DATAFLOW = [
    *("--runner=DataflowRunner", "--project=my-project", "--region=us-central1"),
    "--temp_location=gs://my-bucket/gristmill/temp",
]
VERSIONS = [
    f"PYTHON_VERSION={sys.version_info.major}.{sys.version_info.minor}",
    f"BEAM_VERSION={version('apache-beam')}",
    f"ARRAY_RECORD_VERSION={version('array-record')}",
]
ALL_OPTIONS = [
    *("MACHINE_TYPE=e2-standard-4", "DISK_SIZE_GB=100", "MAX_WORKERS=20", "NUM_WORKERS=2", "THREADS=1"),
    *("SERVICE_ACCOUNT=worker@my-project.iam.gserviceaccount.com", "NETWORK=my-net", "SUBNETWORK=regions/r/my-subnet"),
    *("PRIVATE=1", "LABELS=team=a job=b", "JOB_NAME=my-job", "DETACH=1", "IMAGE=my/image:1", "FLAGS=--limit 5"),
]


@dataclasses.dataclass
class Checkout:
    """A copy of what the targets need, with stand-ins for the programs that they call and nothing else in PATH."""

    folder: Path

    @property
    def tools(self) -> Path:
        return self.folder / "tools"

    def make(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        make = shutil.which("make")
        assert make is not None
        surroundings = {"PATH": str(self.tools), "HOME": str(self.folder), "CALLS": str(self.folder / "calls")}
        return subprocess.run(
            [make, *arguments],
            cwd=self.folder,
            env={**surroundings, **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[list[str]]:
        """The stand-ins' names and arguments, in the order of the calls."""
        path = self.folder / "calls"
        text = path.read_text() if path.exists() else ""
        return [call.split("\0")[:-1] for call in text.split("\1")[:-1]]

    def files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")} - {"calls"}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path / "checkout")
    shutil.copytree(ROOT / "configs", made.folder / "configs")
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, made.folder)
    write_script(made.folder / ".venv/bin/gristmill", STAND_IN)
    write_script(made.folder / ".venv/bin/python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (made.folder / ".venv/.installed").touch()
    for name in ("gcloud", "docker"):
        write_script(made.tools / name, STAND_IN)
    write_script(made.tools / "date", "#!/bin/sh\necho 20261130-010203\n")
    for name in ("sed", "touch"):
        (made.tools / name).symlink_to(str(shutil.which(name)))
    (made.tools / "python3").symlink_to(sys.executable)
    return made


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def parameters(**values: str) -> list[str]:
    """The parameters of a template as gcloud takes them, whatever commas are in them."""
    return [f"--parameters=^:::^{name}={value}" for name, value in values.items()]


def run_template(name: str, *arguments: str) -> list[str]:
    return [
        *("gcloud", "dataflow", "flex-template", "run", name, f"--template-file-gcs-location={TEMPLATE}"),
        *("--project=my-project", "--region=us-central1"),
        *("--temp-location=gs://my-bucket/gristmill/temp", "--staging-location=gs://my-bucket/gristmill/staging"),
        *arguments,
    ]


BUILD_ARGUMENTS = [f"--build-arg={one}" for one in VERSIONS]
BUILT = ["docker", "build", "--platform=linux/amd64", f"--tag={IMAGE}", *BUILD_ARGUMENTS, "."]
BUILT_IN_CLOUD = [
    *("gcloud", "builds", "submit", "--config=cloudbuild.yaml", "--project=my-project"),
    f"--substitutions=_IMAGE={IMAGE},_{',_'.join(VERSIONS)}",
    ".",
]
COMMANDS: dict[str, tuple[list[str], list[list[str]]]] = {
    "convert-local": (PATHS, [["gristmill", *CONVERT, *OUTPUT]]),
    "dry-run": (PATHS, [["gristmill", *CONVERT, *OUTPUT, "--dry-run"]]),
    "replay-local": (PATHS[1:], [["gristmill", "replay", "gs://my-bucket/corpus"]]),
    "verify-local": (PATHS[1:], [["gristmill", "verify", "gs://my-bucket/corpus"]]),
    "dataflow-convert": ([*PATHS, *PLACE], [["gristmill", *CONVERT, *OUTPUT, *ON_DATAFLOW]]),
    **{
        f"dataflow-{name}": (
            [*PATHS, *PLACE],
            [["gristmill", *CONVERT[:2], f"configs/{name}.yaml", *CONVERT[3:], *OUTPUT, *ON_DATAFLOW]],
        )
        for name in CONFIGS
    },
    "dataflow-replay": ([*PATHS[1:], *PLACE], [["gristmill", "replay", "gs://my-bucket/corpus", *ON_DATAFLOW]]),
    "dataflow-verify": ([*PATHS[1:], *PLACE], [["gristmill", "verify", "gs://my-bucket/corpus", *ON_DATAFLOW]]),
    "dataflow-status": (PATHS[1:], [["gristmill", "status", "gs://my-bucket/corpus"]]),
    "dataflow-cancel": (PATHS[1:], [["gristmill", "cancel", "gs://my-bucket/corpus"]]),
    "dataflow-image": (PLACE[:2], [["docker", "info"], BUILT, ["docker", "push", IMAGE]]),
    "dataflow-template": (
        PLACE,
        [
            [
                *("gcloud", "dataflow", "flex-template", "build", TEMPLATE, f"--image={IMAGE}"),
                *("--sdk-language=PYTHON", "--metadata-file=pipelines/flex_template.json", "--project=my-project"),
            ]
        ],
    ),
    "dataflow-run-template": (
        [*PATHS, *PLACE],
        [
            run_template(
                "gristmill-20261130-010203",
                *parameters(input="gs://my-bucket/raw/*", output="gs://my-bucket/corpus"),
                *parameters(config="configs/tfrecord.yaml", sdk_container_image=IMAGE),
            )
        ],
    ),
}
"""What each target needs, and what it calls then."""


@pytest.mark.parametrize("target", COMMANDS)
def test_target_runs_exactly_this(target: str, checkout: Checkout) -> None:
    settings, calls = COMMANDS[target]
    done = checkout.make(target, *settings)
    assert done.returncode == 0, done.stderr
    assert checkout.calls() == calls


def test_every_target_on_dataflow_is_among_these(checkout: Checkout) -> None:
    printed = checkout.make().stdout.splitlines()
    targets = {line.split()[0] for line in printed if line.startswith("  dataflow-")}
    assert targets == {target for target in COMMANDS if target.startswith("dataflow-")}


def test_targets_print_what_they_run(checkout: Checkout) -> None:
    done = checkout.make("-s", "dataflow-convert", *PATHS, *PLACE)
    assert done.stdout == shlex.join([".venv/bin/gristmill", *CONVERT, *OUTPUT, *ON_DATAFLOW]) + "\n"


def test_targets_can_be_looked_at_without_running_anything(checkout: Checkout) -> None:
    before = checkout.files()
    done = checkout.make("-n", *COMMANDS, *PATHS, *PLACE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('gristmill convert --config "$CONFIG" --input "$INPUT"') == 3
    assert (checkout.calls(), checkout.files()) == ([], before)


@pytest.mark.parametrize("target", COMMANDS)
def test_missing_setting_is_named_with_an_example_before_anything_runs(target: str, checkout: Checkout) -> None:
    shutil.rmtree(checkout.folder / ".venv")
    settings, _ = COMMANDS[target]
    for number, setting in enumerate(settings):
        name = setting.partition("=")[0]
        done = checkout.make(target, *settings[:number], *settings[number + 1 :])
        assert done.returncode == 2
        message = done.stderr.splitlines()[0]
        assert message.startswith(f"make: {name} is missing; for example: make {target} ")
        example = shlex.split(message.partition("for example: make ")[2])
        assert {word.partition("=")[0] for word in example[1:]} >= {one.partition("=")[0] for one in settings}
    assert checkout.calls() == []
    assert not (checkout.folder / ".venv").exists()


def test_every_option_reaches_the_job(checkout: Checkout) -> None:
    expected = [
        *ON_DATAFLOW,
        *("--worker_machine_type=e2-standard-4", "--disk_size_gb=100", "--max_num_workers=20", "--num_workers=2"),
        "--number_of_worker_harness_threads=1",
        *("--service_account_email=worker@my-project.iam.gserviceaccount.com", "--network=my-net"),
        *("--subnetwork=regions/r/my-subnet", "--no_use_public_ips", "--labels=team=a", "--labels=job=b"),
        *("--sdk_container_image=my/image:1", "--job_name=my-job", "--detach"),
        *("--limit", "5"),
    ]
    for target in ("dataflow-convert", *(f"dataflow-{name}" for name in CONFIGS), "dataflow-replay", "dataflow-verify"):
        assert checkout.make(target, *PATHS, *PLACE, *ALL_OPTIONS).returncode == 0
    calls = checkout.calls()
    assert len(calls) == 3 + len(CONFIGS)
    assert [call[-len(expected) :] for call in calls] == [expected] * len(calls)


def test_every_option_reaches_the_template(checkout: Checkout) -> None:
    settings = [*PATHS, *PLACE, *ALL_OPTIONS, "FLAGS=--parameters=limit=5"]
    assert checkout.make("dataflow-run-template", *settings).returncode == 0
    assert checkout.calls() == [
        run_template(
            "my-job",
            *parameters(input="gs://my-bucket/raw/*", output="gs://my-bucket/corpus", config="configs/tfrecord.yaml"),
            *parameters(sdk_container_image="my/image:1", disk_size_gb="100", number_of_worker_harness_threads="1"),
            *("--worker-machine-type=e2-standard-4", "--max-workers=20", "--num-workers=2"),
            *("--service-account-email=worker@my-project.iam.gserviceaccount.com", "--network=my-net"),
            *("--subnetwork=regions/r/my-subnet", "--disable-public-ips", "--additional-user-labels=team=a,job=b"),
            "--parameters=limit=5",
        )
    ]


@pytest.mark.parametrize("value", ["", "0", "no", "false", "off"])
def test_switch_can_be_off(value: str, checkout: Checkout) -> None:
    settings, calls = COMMANDS["dataflow-convert"]
    assert checkout.make("dataflow-convert", *settings, f"PRIVATE={value}", f"DETACH={value}").returncode == 0
    assert checkout.calls() == calls


@pytest.mark.parametrize("bucket", ["my-bucket", "gs://my-bucket", "gs://my-bucket/"])
def test_bucket_may_be_a_name_or_a_url(bucket: str, checkout: Checkout) -> None:
    settings, calls = COMMANDS["dataflow-convert"]
    assert checkout.make("dataflow-convert", *settings[:-1], f"BUCKET={bucket}").returncode == 0
    assert checkout.calls() == calls


def test_status_of_gristmill_is_shown_and_ends_make_with_2(checkout: Checkout) -> None:
    done = checkout.make("dataflow-convert", *PATHS, *PLACE, STATUS="3")
    assert done.returncode == 2
    assert "Error 3" in done.stderr


def test_new_config_has_a_target_at_once(checkout: Checkout) -> None:
    (checkout.folder / "configs/captions.yaml").write_text("write: {name: captions}\n")
    assert "\n  dataflow-captions " in checkout.make("help").stdout
    assert checkout.make("dataflow-captions", *PATHS, *PLACE).returncode == 0
    [call] = checkout.calls()
    assert call[:4] == ["gristmill", "convert", "--config", "configs/captions.yaml"]


# Settings from a file and from the environment.


def test_settings_in_env_file_are_used(checkout: Checkout) -> None:
    settings, calls = COMMANDS["dataflow-convert"]
    (checkout.folder / ".env").write_text("\n".join(settings) + "\n")
    assert checkout.make("dataflow-convert").returncode == 0
    assert checkout.calls() == calls


def test_command_line_wins_over_env_file_and_env_file_over_environment(checkout: Checkout) -> None:
    settings, _ = COMMANDS["dataflow-convert"]
    (checkout.folder / ".env").write_text("\n".join([*settings, "JOB_NAME=of-file", "MAX_WORKERS=1"]) + "\n")
    done = checkout.make("dataflow-convert", "MAX_WORKERS=2", JOB_NAME="of-environment", NUM_WORKERS="3")
    assert done.returncode == 0
    [call] = checkout.calls()
    assert call[-3:] == ["--max_num_workers=2", "--num_workers=3", "--job_name=of-file"]


# Values that a shell or make would run.

NASTY = (
    'gs://b/a b\'s "c";touch pwned-1;\'";touch pwned-2;"\'`touch pwned-3`$(touch pwned-4)$(shell touch pwned-5)'
    "${HOME}$HOME $$ |touch pwned-6& >pwned-7 \\ # * ? [a-z] ~ ! é,="
)
TEXTS = ["PROJECT", "REGION", "MACHINE_TYPE", "SERVICE_ACCOUNT", "NETWORK", "SUBNETWORK", "JOB_NAME"]


@pytest.mark.parametrize("target", COMMANDS)
def test_no_value_is_run_or_changed(target: str, checkout: Checkout) -> None:
    settings = dict.fromkeys(("INPUT", "OUTPUT", "BUCKET", "IMAGE", "TEMPLATE", *TEXTS), NASTY)
    settings |= {"PRIVATE": NASTY, "DETACH": NASTY}
    before = checkout.files()
    for done in (
        checkout.make(target, *(f"{name}={value}" for name, value in settings.items())),
        checkout.make(target, **settings),
    ):
        assert done.returncode == 0, done.stderr
    calls = checkout.calls()
    assert calls[: len(calls) // 2] == calls[len(calls) // 2 :]  # From the command line and from the environment.
    words = [word for call in calls for word in call]
    assert sum(NASTY in word for word in words) >= 2
    assert [word for word in words if " " in word.replace(NASTY, "")] == []
    assert [word for word in words if "pwned" in word.replace(NASTY, "")] == []
    assert checkout.files() == before


def test_flags_are_split_like_a_shell_does_but_never_run(checkout: Checkout) -> None:
    flags = (
        "--step 'my_steps:clean,text=a b' --set x=\"$HOME\" $(touch pwned) `touch pwned`;touch pwned "
        "$(shell touch pwned)"
    )
    before = checkout.files()
    done = checkout.make("dataflow-convert", *PATHS, *PLACE, f"FLAGS={flags}")
    assert done.returncode == 0, done.stderr
    [call] = checkout.calls()
    assert call == [
        *("gristmill", *CONVERT, *OUTPUT, *ON_DATAFLOW),
        *("--step", "my_steps:clean,text=a b", "--set", "x=$HOME", "$(touch", "pwned)", "`touch", "pwned`;touch"),
        *("pwned", "$(shell", "touch", "pwned)"),
    ]
    assert checkout.files() == before


def test_labels_are_split_at_spaces_and_never_run(checkout: Checkout) -> None:
    before = checkout.files()
    done = checkout.make("dataflow-convert", *PATHS, *PLACE, "LABELS= a=*  b=`touch${IFS}pwned`;x c=$(touch) ")
    assert done.returncode == 0, done.stderr
    [call] = checkout.calls()
    assert call[-3:] == ["--labels=a=*", "--labels=b=`touch${IFS}pwned`;x", "--labels=c=$(touch)"]
    assert checkout.files() == before


def test_flags_with_an_open_quote_are_refused(checkout: Checkout) -> None:
    done = checkout.make("dataflow-convert", *PATHS, *PLACE, "FLAGS=--step 'open")
    assert done.returncode == 2
    assert "make: FLAGS cannot be split into words: No closing quotation" in done.stderr
    assert checkout.calls() == []


def test_dollar_in_env_file_is_written_twice(checkout: Checkout) -> None:
    (checkout.folder / ".env").write_text("OUTPUT=out/$$mine\n")
    assert checkout.make("verify-local").returncode == 0
    assert checkout.calls() == [["gristmill", "verify", "out/$mine"]]


# Images.


@pytest.mark.parametrize("lack", ["program", "daemon"])
def test_image_is_built_in_the_cloud_where_docker_cannot(lack: str, checkout: Checkout) -> None:
    environment = {"DOCKER_STATUS": "1"}
    if lack == "program":
        (checkout.tools / "docker").unlink()
    done = checkout.make("dataflow-image", *PLACE, **environment)
    assert done.returncode == 0, done.stderr
    assert [call for call in checkout.calls() if call != ["docker", "info"]] == [BUILT_IN_CLOUD]
    assert f"now name it: make dataflow-convert IMAGE={IMAGE} ...\n" in done.stdout


def test_image_without_docker_and_gcloud_says_what_to_install(checkout: Checkout) -> None:
    (checkout.tools / "docker").unlink()
    (checkout.tools / "gcloud").unlink()
    done = checkout.make("dataflow-image", *PLACE)
    assert done.returncode == 2
    assert done.stderr.startswith("make: an image is built with docker or gcloud; neither can be used here: ")
    assert "now name it" not in done.stdout


@pytest.mark.parametrize("target", ["dataflow-template", "dataflow-run-template"])
def test_template_without_gcloud_says_what_to_install(target: str, checkout: Checkout) -> None:
    (checkout.tools / "gcloud").unlink()
    done = checkout.make(target, *PATHS, *PLACE)
    assert done.returncode == 2
    assert done.stderr.startswith("make: there is no gcloud; install the Google Cloud CLI, https://")


def test_image_of_another_name_needs_no_project(checkout: Checkout) -> None:
    assert checkout.make("dataflow-image", "IMAGE=my/image:1", "FLAGS=--no-cache").returncode == 0
    build = ["docker", "build", "--platform=linux/amd64", "--tag=my/image:1", *BUILD_ARGUMENTS, ".", "--no-cache"]
    assert checkout.calls() == [["docker", "info"], build, ["docker", "push", "my/image:1"]]


def test_image_that_cannot_be_built_is_not_pushed(checkout: Checkout) -> None:
    done = checkout.make("dataflow-image", *PLACE, STATUS="1")
    assert done.returncode == 2
    assert checkout.calls() == [["docker", "info"], BUILT]
    assert "now name it" not in done.stdout


def test_image_has_the_versions_of_the_dockerfile_where_nothing_is_installed(checkout: Checkout) -> None:
    shutil.rmtree(checkout.folder / ".venv")
    assert checkout.make("dataflow-image", *PLACE).returncode == 0
    assert checkout.calls()[1] == [word for word in BUILT if word not in BUILD_ARGUMENTS]


def test_image_of_a_project_with_a_domain_has_a_valid_name(checkout: Checkout) -> None:
    assert checkout.make("dataflow-image", "PROJECT=example.com:my-project", PLACE[1]).returncode == 0
    name = f"us-central1-docker.pkg.dev/example.com/my-project/gristmill/worker:{VERSION}"
    assert checkout.calls()[2] == ["docker", "push", name]


def test_a_setting_that_does_not_exist_is_refused_before_anything_runs(checkout: Checkout) -> None:
    done = checkout.make("dataflow-tfrecord", *PLACE, *PATHS, "MAX_WORKER=3")
    assert done.returncode == 2
    assert "there is no setting MAX_WORKER; there are CONFIG INPUT" in done.stderr
    assert checkout.calls() == []
