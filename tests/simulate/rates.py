"""What the figures rest on that no plan tells: speeds, waits and prices. Every one is a flag of `run.py`."""

from __future__ import annotations

import dataclasses

from simulate.flags import assumed
from transforms.gcs_store import GcsStore

CLASSES = {"insert": "A", "copy": "A", "list": "A", "get": "B", "look": "B", "miss": "", "delete": ""}
"""Classes of operations of standard storage. Deletions and answers of 4xx are free; an upload session is one insert."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Assumptions: speeds of one worker with one core, waits, and list prices."""

    compress_rate: float = assumed(65e6, "bytes/s that a core reads, checks, compresses (zstd:3) and writes")
    copy_rate: float = assumed(500e6, "the same without compression")
    download_rate: float = assumed(200e6, "bytes/s that a worker reads from the service, while it works")
    upload_rate: float = assumed(100e6, "bytes/s of one upload, during which the worker waits")
    saving: float = assumed(0.5, "share of the bytes that zstd:3 saves")
    request_secs: float = assumed(0.03, "one small request: a get, a look, a deletion")
    client_secs: float = assumed(0.002, "CPU of a small request in the process that makes it")
    open_secs: float = assumed(0.03, "opening one input: its first block, which nothing foresees")
    list_secs: float = assumed(0.25, "one page of 1,000 names of a listing")
    shard_requests: float = assumed(
        27, "small requests that a shard waits for, from its line of the plan to its final name"
    )
    detect_secs: float = assumed(120, "from the loss of a worker until its shard is handed out again")
    class_a: float = assumed(5.00, "$ a million class A operations")
    class_b: float = assumed(0.40, "$ a million class B operations")
    vcpu_hour: float = assumed(0.056, "$ an hour of a vCPU")
    memory_hour: float = assumed(0.003557, "$ an hour of a GB of memory")
    disk_hour: float = assumed(0.000054, "$ an hour of a GB of disk")
    memory: float = assumed(3.75, "GB of memory of a worker")
    disk: float = assumed(25, "GB of disk of a worker")

    @property
    def worker_hour(self) -> float:
        """$ an hour of a worker with one vCPU."""
        return self.vcpu_hour + self.memory * self.memory_hour + self.disk * self.disk_hour

    def plainly(self) -> Rates:
        """Returns the rates of a job that does not compress."""
        return dataclasses.replace(self, compress_rate=self.copy_rate, saving=0.0)

    def shard_secs(self, num_bytes: float, num_files: float) -> float:
        """Returns how long a worker takes for a shard: its files one after the other, then its upload."""
        convert = num_bytes / min(self.compress_rate, self.download_rate)
        upload = num_bytes * (1 - self.saving) / self.upload_rate
        return convert + upload + num_files * self.open_secs + self.shard_requests * self.request_secs

    def many_secs(self, num_requests: int) -> float:
        """Returns how long one process takes for many small requests, as many at a time as it makes."""
        return num_requests * max(self.client_secs, self.request_secs / GcsStore.requests_at_once)

    def price(self, action: str, count: float) -> float:
        """Returns the $ of operations."""
        return count / 1e6 * {"A": self.class_a, "B": self.class_b, "": 0.0}[CLASSES[action]]
