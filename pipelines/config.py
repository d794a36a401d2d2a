"""The config of a job: YAML file, `--set` and flags, merged and checked before any work.

Every message names the file and the key path, the value, and what was expected.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml

from pipelines.errors import UsageError, did_you_mean
from pipelines.paths import expand_config
from pipelines.plain_values import find_problems
from pipelines.secrets import find_secrets
from transforms.billing import check_project
from transforms.names import DEFAULT_TEMPLATE, check_template
from transforms.plan import ShardsRequest, parse_size
from transforms.steps.options import OPTION_NAMES

STEP_KEYS = ("use", "call")
_COMPRESSION = re.compile(r"auto|uncompressed|snappy|(zstd|brotli)(:-?[0-9]{1,9})?")
_LEVELS = {"zstd": (-131072, 22), "brotli": (0, 11)}
_NO_SECRETS = (
    "this looks like a credential, which would be copied to the output directory; write ${NAME} for an environment "
    "variable (http.post and other HTTP steps), read it in the step itself, or pass Beam's options as flags"
)
_MAX_NAME_BYTES = 200
_MAX_SHOWN_CHARS = 200
_MAX_GROUP_SIZE = (1 << 31) - 1  # array_record's own bound.
_MAX_TIMEOUT_SECS = 1_000_000  # System calls that wait take milliseconds in 31 bits.
_MIN_PER_SEC = 1e-5  # One call a day.
_MEMORY_BYTES = (64 << 20, 1 << 50)
"""What `max_memory_bytes` may be: with less, no Python process does anything."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


def _to_bytes(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


Bytes = Annotated[int, pydantic.BeforeValidator(_to_bytes), pydantic.Field(ge=1)]


class _Numbers(pydantic.BaseModel):
    """Where true and false are no numbers."""

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("expected no true or false")
        return value


class _Strict(_Numbers):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class SourceConfig(_Strict):
    """What to read."""

    format: Literal["auto", "tfrecord", "array_record", "files"] = "auto"
    patterns: list[str] = []
    compression: Literal["auto", "none", "gzip", "zlib"] = "auto"
    max_record_bytes: Bytes = 1 << 30
    billing_project: str = ""

    @pydantic.field_validator("billing_project")
    @classmethod
    def _check_project(cls, value: str) -> str:
        return check_project(value)

    @pydantic.field_validator("patterns", mode="before")
    @classmethod
    def _one_pattern(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class WriteConfig(_Strict):
    """What to write, and how."""

    output: str = ""
    name: str = "corpus"
    split: str = "train"
    shards: str = "auto"
    compression: str = "auto"
    group_size: int = pydantic.Field(1, ge=1, le=_MAX_GROUP_SIZE)
    template: str = DEFAULT_TEMPLATE
    check_space: bool = True
    secs_per_record: Literal["auto"] | Annotated[float, pydantic.Field(ge=0, le=_MAX_TIMEOUT_SECS)] = "auto"

    @pydantic.field_validator("shards", mode="before")
    @classmethod
    def _check_shards(cls, value: Any) -> str:
        if isinstance(value, bool):
            raise ValueError("expected auto, match, a number or a size such as 256MiB")
        ShardsRequest.parse(value)
        return str(value)

    @pydantic.field_validator("compression")
    @classmethod
    def _check_compression(cls, value: str) -> str:
        if not _COMPRESSION.fullmatch(value):
            raise ValueError("expected auto, uncompressed, snappy, zstd[:LEVEL] or brotli[:LEVEL]")
        codec, _, level = value.partition(":")
        low, high = _LEVELS.get(codec, (0, 0))
        if level and not low <= int(level) <= high:
            raise ValueError(f"the level of {codec} must be from {low} to {high}")
        return value

    @pydantic.field_validator("name", "split")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("expected letters, digits, `_`, `.`, `+` and `-`: readers use other signs as separators")
        return value

    @pydantic.field_validator("template")
    @classmethod
    def _check_template(cls, value: str) -> str:
        check_template(value)
        return value

    @pydantic.model_validator(mode="after")
    def _check_length(self) -> WriteConfig:
        longest = max(len(part.encode()) for part in self.template.split("/")) + len(self.name) + len(self.split)
        if longest > _MAX_NAME_BYTES:
            raise ValueError(
                f"file names would be about {longest} bytes long, and file systems take 255; shorten write.name, "
                "write.split or write.template"
            )
        return self


class DeadLettersConfig(_Strict):
    """How much may fail, and where failures are kept."""

    max_fraction: float = pydantic.Field(0.1, ge=0, le=1)
    max_count: int | None = pydantic.Field(None, ge=0)
    max_count_by_reason: dict[str, Annotated[int, pydantic.Field(ge=0)]] = {}
    max_payload_bytes: Bytes = 16 << 20
    path: str = "_dead_letters"

    @pydantic.field_validator("path")
    @classmethod
    def _check_path(cls, value: str) -> str:
        if not re.fullmatch(r"_[A-Za-z0-9_-]+", value) or value == "_gristmill":
            raise ValueError("expected a folder name that begins with `_`, so that no reader takes it for data")
        return value


class StepOptionsConfig(_Numbers):
    """The options that every step may have; see `transforms.steps.options.StepOptions`."""

    model_config = pydantic.ConfigDict(extra="ignore")

    isolate: bool = False
    timeout_secs: float | None = pydantic.Field(None, gt=0, le=_MAX_TIMEOUT_SECS)
    retries: int = pydantic.Field(0, ge=0, le=100)
    max_per_sec: float | None = pydantic.Field(None, ge=_MIN_PER_SEC)
    max_memory_bytes: Annotated[Bytes, pydantic.Field(ge=_MEMORY_BYTES[0], le=_MEMORY_BYTES[1])] | None = None
    journal: Literal["auto"] | bool = "auto"

    @pydantic.field_validator("journal", mode="plain")
    @classmethod
    def _check_journal(cls, value: Any) -> Any:
        if value != "auto" and not isinstance(value, bool):
            raise ValueError("must be true, false or auto")
        return value


def _check_options(number: int, step: dict[str, Any]) -> dict[str, Any]:
    """Returns the step with its options checked and sizes such as 2GiB in bytes."""
    try:
        options = StepOptionsConfig.model_validate(step)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        where = f"steps[{number}].{problem['loc'][0]}"
        raise ValueError(f"{where}: {_message(problem)}") from None
    return {**step, **{name: getattr(options, name) for name in OPTION_NAMES if name in step}}


class JobConfig(_Strict):
    """The whole config, in flow order."""

    source: SourceConfig = SourceConfig()
    steps: list[dict[str, Any]] = []
    write: WriteConfig = WriteConfig()
    dead_letters: DeadLettersConfig = DeadLettersConfig()
    py_modules: list[str] = []
    beam: dict[str, Any] = {}

    @pydantic.field_validator("steps")
    @classmethod
    def _check_steps(cls, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for number, step in enumerate(steps):
            if len([key for key in STEP_KEYS if key in step]) != 1:
                raise ValueError(f"steps[{number}] must have exactly one of `use` and `call`")
        return [_check_options(number, step) for number, step in enumerate(steps)]


def load_config(path: str | None, overrides: list[tuple[str, Any]]) -> JobConfig:
    """Merges and checks the config.

    Args:
        path: YAML file, None for the defaults.
        overrides: (key path, value), applied in order.

    Returns:
        The checked config.

    Raises:
        UsageError: The file cannot be read, or a key or value is wrong, or a credential stands in it.
    """
    fields = {} if path is None else _read_yaml(path)
    for key, value in overrides:
        _assign(fields, key, value)
    where = f"{path}: " if path else ""
    problems = list(find_problems(fields))
    if problems:
        raise UsageError("\n".join(where + problem for problem in problems))
    secrets = list(find_secrets(fields))
    if secrets:
        raise UsageError("\n".join(f"{where}{key}: {_NO_SECRETS}" for key in secrets))
    try:
        return JobConfig.model_validate(fields)
    except pydantic.ValidationError as error:
        raise UsageError("\n".join(where + _explain(problem) for problem in error.errors())) from error


class _Loader(yaml.SafeLoader):
    """Reads numbers by the rules of YAML 1.2, in which `1:30` is text and not 90."""


_BASE_60 = ":[0-5]"
"""What the patterns of numbers to the base of 60 have in them; these stand as alternatives of their own."""


def _without_base_60(pattern: re.Pattern[str]) -> re.Pattern[str]:
    alternatives = pattern.pattern.strip().removeprefix("^(?:").removesuffix(")$").split("\n")
    kept = [one.strip().lstrip("|") for one in alternatives if _BASE_60 not in one]
    return re.compile(f"^(?:{'|'.join(kept)})$", re.VERBOSE)


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, _without_base_60(pattern) if tag.endswith((":int", ":float")) else pattern) for tag, pattern in resolvers
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _UniqueKeys(_Loader):
    """Refuses a key that stands twice in a group: the last would win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        fields = yaml.load(Path(path).read_text(encoding="utf-8"), _UniqueKeys)
    except OSError as error:
        raise UsageError(f"config {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"config {path} is not UTF-8: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"config {path} is not YAML: {error}") from error
    except (ValueError, RecursionError) as error:  # Dates that do not exist, endless numbers, endless nesting.
        raise UsageError(f"config {path}: a value cannot be read: {error}") from error
    if fields is None:
        return {}
    if not isinstance(fields, dict):
        raise UsageError(f"config {path}: expected keys such as source and write, got {type(fields).__name__}")
    try:
        return dict(expand_config(fields))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _assign(fields: dict[str, Any], key: str, value: Any) -> None:
    *folders, last = key.split(".")
    for folder in folders:
        inner = fields.get(folder)
        if inner is None:
            inner = fields[folder] = {}
        if not isinstance(inner, dict):
            raise UsageError(f"{folder}: must be a group of keys such as {folder}.{last}, got {_shown(inner)}")
        fields = inner
    fields[last] = value


def parse_value(text: str) -> Any:
    """Returns the value of a `key=value` flag, read as YAML: numbers, true, null and [lists] are what they look like.

    A template such as {SPLIT}-{SHARD_X_OF_Y} is text, though YAML takes its braces for a mapping.
    """
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return text if isinstance(value, dict) and None in value.values() else value


def parse_change(text: str) -> tuple[str, Any]:
    """Splits the `key.path=value` of `--set`; paths are those of a config.

    Raises:
        UsageError: There is no `=`, or a path cannot be expanded.
    """
    key, separator, value = text.partition("=")
    if not separator or not all(part.strip() for part in key.split(".")):
        raise UsageError(f"--set {text}: expected key.path=value, for example --set write.shards=64")
    return key.strip(), expand_config(parse_value(value), key.strip())


def parse_step(text: str) -> dict[str, Any]:
    """Reads the `NAME[,key=value...]` of `--step`.

    Raises:
        UsageError: A parameter has no `=`.
    """
    name, *parameters = _split_outside_brackets(text)
    step: dict[str, Any] = {"call" if ":" in name else "use": name}
    for parameter in parameters:
        key, separator, value = parameter.partition("=")
        if not separator:
            raise UsageError(f"--step {text}: expected key=value after the name, got {parameter!r}")
        step[key] = parse_value(value)
    return step


def _split_outside_brackets(text: str) -> list[str]:
    """Splits at commas, but not within [..] or {..}, so that lists can be given."""
    return re.findall(r"(?:[^,\[{]|\[[^\]]*\]|\{[^}]*\})+", text) or [text]


def _explain(problem: Any) -> str:
    """Puts one finding of the validation into words."""
    location = [str(part) for part in problem["loc"]]
    path = ".".join(location)
    if problem["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        hint = did_you_mean(location[-1], known) or f"; known keys: {', '.join(known)}"
        return f"{path}: unknown key{hint}"
    return f"{path}: {_message(problem)}"


def _message(problem: Any) -> str:
    """Returns the rule that does not hold and the value, once: our own messages give it where it helps."""
    message = str(problem["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    value, is_ours = problem["input"], problem["type"] == "value_error"
    if ", got " in message or (is_ours and (isinstance(value, dict | list) or repr(value) in message)):
        return message
    return f"{message}, got {_shown(value)}"


def _shown(value: Any) -> str:
    """Returns a value as a message shows it."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def _known_keys(location: list[str]) -> list[str]:
    model: Any = JobConfig
    for part in location:
        field = model.model_fields.get(part)
        model = getattr(field, "annotation", None)
        if model is None or not hasattr(model, "model_fields"):
            return []
    return list(model.model_fields)
