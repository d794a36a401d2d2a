"""Finds Beam's file system of a URL, with the options that it needs to be told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def use_flags(flags: Iterable[str]) -> None:
    """Makes Beam flags the options of its file systems in this process, such as `--s3_region_name` or `--hdfs_host`."""
    from apache_beam.io.filesystems import FileSystems
    from apache_beam.options.pipeline_options import PipelineOptions

    FileSystems.set_options(PipelineOptions(list(flags)))


def file_system(url: str) -> Any:
    """Returns Beam's file system of a URL; its options are those of the pipeline, or what the machine is set to.

    Raises:
        ValueError: Beam knows no such file system, or an option is missing.
        Exception: What the file system's library raises.
    """
    from apache_beam.io.filesystems import FileSystems
    from apache_beam.options.value_provider import RuntimeValueProvider

    if not FileSystems._pipeline_options and not RuntimeValueProvider.runtime_options:
        use_flags([])  # Some file systems take no options for a mistake.
    return FileSystems.get_filesystem(url)
