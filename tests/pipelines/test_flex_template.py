"""The Flex template: its parameters as Dataflow knows them, and what `gristmill convert` gets of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.cloud.dataflow_v1beta3.types import TemplateMetadata

from gcs_emulator import Emulator
from pipelines import cli, flex_template
from pipelines.beam_options import beam_option_names
from pipelines.convert import config_of
from transforms import gcs

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "pipelines/flex_template.json").read_text(encoding="utf-8")
PARAMETERS: dict[str, dict[str, Any]] = {one["name"]: one for one in json.loads(TEXT)["parameters"]}
REQUIRED = {
    "input": "gs://my-bucket/raw/*",
    "output": "gs://my-bucket/corpus",
    "sdk_container_image": "us-central1-docker.pkg.dev/my-project/gristmill/worker:0.1.0",
}
JOB = [
    *("--runner=DataflowRunner", "--project=my-project", "--region=us-central1", "--job_name=my-job"),
    *("--temp_location=gs://my-bucket/temp", "--staging_location=gs://my-bucket/staging"),
    "--template_location=gs://my-bucket/staging/template_launches/2026-11-30_01_02_03-123/job_object",
    *('--labels={"team": "a", "goog-dataflow": "b"}', "--max_num_workers=20", "--no_use_public_ips"),
]
"""What the launcher adds."""

EXAMPLES: dict[str, tuple[list[str], list[str]]] = {
    "input": (
        [
            *("gs://my-bucket/raw/*.tfrecord", "gs://my-bucket/raw/", "gs://b1", "gs://b.1_x/a b,c/[0-9]*"),
            *("@gs://my-bucket/files.txt", '["gs://b1/a/*", "gs://b2/c"]'),
        ],
        ["", "raw/*", "/data/raw", "s3://b/raw", "gs://", "gs:///a", "gs://B/a", "gs://b1/a\nb", "@files.txt"],
    ),
    "output": (
        ["gs://my-bucket/corpus", "gs://my-bucket/a/b c/", "gs://b1"],
        ["", "out", "gs://", "gs:///corpus", "@gs://my-bucket/corpus", "gs://my-bucket/a\nb"],
    ),
    "sdk_container_image": (
        [REQUIRED["sdk_container_image"], "gcr.io/p/worker@sha256:0123456789abcdef", "localhost:5000/worker"],
        ["", "worker:1 2", "-x", "worker:1;x"],
    ),
    "config": (["configs/tfrecord.yaml", "gs://my-bucket/a b/mine.yml"], ["", "mine.json", "gs://b1/mine", ".yaml\n"]),
    "format": (["auto", "tfrecord", "array_record", "files"], ["", "TFRecord", "parquet", "auto "]),
    "name": (["corpus", "c4.en-3+x_1"], ["", "a/b", "a b", "-a", "a,b"]),
    "split": (["train", "validation"], ["", "tr/ain", "tr ain"]),
    "shards": (
        ["auto", "match", "match,256MiB", "64", "256MiB", "1.5GB", "1 GiB"],
        ["", "0", "many", "match,", "-1", "auto,256MiB", "MiB"],
    ),
    "step": (["example.check", "my_steps:clean,min_chars=20", '["example.check", "my_steps:clean"]'], ["", "a\nb"]),
    "set": (
        ["write.group_size=1", "dead_letters.max_fraction=0.5", '["write.group_size=1", "write.compression=zstd:9"]'],
        ["", "write.group_size", "=1", "a b=1"],
    ),
    "limit": (["1", "1000"], ["", "0", "-1", "1.5", "many"]),
    "billing_project": (["my-project-1", "example.com:my-project", "123456789012"], ["", "My Project", "a/b", "-a"]),
    "append": (["true", "false"], ["", "True", "1", "yes"]),
    "overwrite": (["true", "false"], ["", "True", "1"]),
    "resume_anyway": (["true", "false"], ["", "True", "1"]),
    "disk_size_gb": (["30", "500"], ["", "0", "-1", "30GB"]),
    "number_of_worker_harness_threads": (["1", "12"], ["", "0", "-1", "x"]),
}
"""Values of each parameter that Dataflow lets through, and values that it refuses."""

GOOD = [(name, value) for name, (good, _) in EXAMPLES.items() for value in good]
BAD = [(name, value) for name, (_, bad) in EXAMPLES.items() for value in bad]


def no_fetch(url: str) -> str:
    raise AssertionError(f"{url} is fetched")


def flags(**parameters: str) -> list[str]:
    return [f"--{name}={value}" for name, value in {**REQUIRED, **parameters}.items()]


def accepts(name: str, value: str) -> bool:
    """Whether Dataflow lets a value through, which has to match every pattern as a whole."""
    return all(re.fullmatch(pattern, value) for pattern in PARAMETERS[name]["regexes"])


# What Dataflow is told.


def test_description_is_one_that_dataflow_reads() -> None:
    metadata = TemplateMetadata.from_json(TEXT, ignore_unknown_fields=False)
    assert metadata.name
    assert metadata.description
    for parameter in metadata.parameters:
        assert parameter.label, parameter.name
        assert parameter.help_text.endswith("."), parameter.name
        assert parameter.param_type, parameter.name
        assert len(parameter.regexes) == 1, parameter.name


def test_parameters_are_those_that_the_template_takes() -> None:
    names = [one["name"] for one in json.loads(TEXT)["parameters"]]
    taken = {action.dest for action in flex_template.make_parser()._actions} - {"help"}
    assert len(names) == len(set(names))
    assert set(names) == taken == set(EXAMPLES)


def test_required_parameters_are_required() -> None:
    assert {name for name, one in PARAMETERS.items() if not one.get("isOptional")} == set(flex_template.REQUIRED)
    assert set(REQUIRED) == set(flex_template.REQUIRED)


def test_parameters_are_options_of_convert_or_of_beam_but_not_of_both() -> None:
    options = vars(cli.make_parser().parse_args(["convert"]))
    options["set"] = options.pop("changes")
    known = beam_option_names()
    assert set(flex_template.BEAM_OPTIONS) <= known
    assert set(PARAMETERS) - set(flex_template.BEAM_OPTIONS) <= set(options)
    assert (set(PARAMETERS) - set(flex_template.BEAM_OPTIONS)) & known == set()


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_good_value_is_let_through(name: str, value: str) -> None:
    assert accepts(name, value)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_value_is_refused(name: str, value: str) -> None:
    assert not accepts(name, value)


def test_patterns_are_whole_and_need_no_more_than_dataflow_knows() -> None:
    patterns = [pattern for one in PARAMETERS.values() for pattern in one["regexes"]]
    assert [pattern for pattern in patterns if not (pattern[0] == "^" and pattern[-1] == "$")] == []
    assert [pattern for pattern in patterns if "(?" in pattern or re.search(r"\\\d", pattern)] == []


# What gristmill gets.


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_value_that_is_let_through_is_one_for_convert(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = flex_template.to_arguments([*flags(**{name: value}), *JOB], lambda _: "configs/tfrecord.yaml")
    args, rest = cli.make_parser().parse_known_args(arguments)
    config_of(args)
    assert {flag.removeprefix("--").partition("=")[0] for flag in rest} - {"detach"} <= beam_option_names()


def test_parameters_and_options_become_this_command() -> None:
    given = {
        "input": '["gs://b1/a b/*", "gs://b2/[0-9]"]',
        "config": "configs/tfrecord.yaml",
        "format": "tfrecord",
        "name": "c4",
        "split": "validation",
        "shards": "match,256MiB",
        "limit": "5",
        "billing_project": "payer-1",
        "append": "true",
        "overwrite": "false",
        "resume_anyway": "",
        "step": '["my_steps:clean,text=a b", "example.check"]',
        "set": "write.group_size=1",
        "disk_size_gb": "100",
        "number_of_worker_harness_threads": "1",
    }
    assert flex_template.to_arguments([*flags(**given), *JOB], no_fetch) == [
        *("convert", "--input=gs://b1/a b/*", "--input=gs://b2/[0-9]"),
        *("--step=my_steps:clean,text=a b", "--step=example.check", "--set=write.group_size=1"),
        *("--output=gs://my-bucket/corpus", "--config=configs/tfrecord.yaml", "--format=tfrecord", "--name=c4"),
        *("--split=validation", "--shards=match,256MiB", "--limit=5", "--billing-project=payer-1", "--append"),
        *(f"--sdk_container_image={REQUIRED['sdk_container_image']}", "--disk_size_gb=100"),
        "--number_of_worker_harness_threads=1",
        *(*JOB, "--detach"),
    ]


def test_runner_is_dataflow_if_the_launcher_names_none() -> None:
    arguments = flex_template.to_arguments([*flags(), *JOB[1:]], no_fetch)
    assert arguments[-len(JOB) - 1 :] == [*JOB, "--detach"]


def test_option_that_beam_lacks_is_left_out_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = flex_template.to_arguments([*flags(), *JOB, "--of_a_later_launcher=1"], no_fetch)
    assert arguments == flex_template.to_arguments([*flags(), *JOB], no_fetch)
    message = "gristmill template: left out '--of_a_later_launcher=1', which is no option of Apache Beam\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("name", flex_template.REQUIRED)
@pytest.mark.parametrize("how", ["absent", "empty"])
def test_missing_parameter_is_named(name: str, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [flag for flag in flags() if not flag.startswith(f"--{name}=")]
    with pytest.raises(SystemExit) as ended:
        flex_template.main([*given, *JOB, *([f"--{name}="] if how == "empty" else [])])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"gristmill template: error: parameters are missing: {name}\n")


@pytest.mark.parametrize("value", ['["gs://b1/a"', "[1]", '[["gs://b1/a"]]', '[{"a": 1}]'])
def test_list_that_is_none_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        flex_template.main([*flags(input=value), *JOB])
    assert ended.value.code == 2
    assert f"argument --input: expected one text or a JSON list of texts, got {value!r}\n" in capsys.readouterr().err


def test_status_and_command_are_those_of_convert(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(cli, "main", lambda arguments: ran.append(arguments) or 3)
    assert flex_template.main([*flags(input="gs://b1/a b"), *JOB]) == 3
    assert ran == [flex_template.to_arguments([*flags(input="gs://b1/a b"), *JOB], no_fetch)]
    assert capsys.readouterr().out.startswith("gristmill convert '--input=gs://b1/a b' --output=gs://my-bucket/corpus ")


# Objects that convert needs as files.


def test_config_and_lists_in_the_bucket_are_fetched(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    url = emulator.new_bucket()
    texts = {"mine.yaml": "write: {name: mine}\n", "a b/mine.txt": "gs://b1/x\n", f"{'n' * 300}.txt": "gs://b1/y\n"}
    for name, text in texts.items():
        gcs.bucket(url.removeprefix("gs://")).blob(name).upload_from_string(text)
    lists = [f"@{url}/{name}" for name in list(texts)[1:]]
    read: list[str] = []

    def run(arguments: list[str]) -> int:
        args, _ = cli.make_parser().parse_known_args(arguments)
        files = [args.config, args.input[0][0][1:], args.input[2][0][1:]]
        read.extend(Path(file).read_text() for file in files)
        assert args.input[1] == ["gs://b1/z"]
        return 0

    monkeypatch.setattr(cli, "main", run)
    inputs = json.dumps([lists[0], "gs://b1/z", lists[1]])
    assert flex_template.main([*flags(config=f"{url}/mine.yaml", input=inputs), *JOB]) == 0
    assert read == list(texts.values())


def test_config_that_cannot_be_fetched_is_named(emulator: Emulator, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{emulator.new_bucket()}/mine.yaml"
    assert flex_template.main([*flags(config=url), *JOB]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"gristmill template: {url}: ")
    assert "404" in message
