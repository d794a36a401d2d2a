"""The service's side of a corpus that is not there: answers what the real client sends, in the same process.

Everything above the HTTP session is the real thing: google-cloud-storage asks, pages, parses and retries as it would.
"""

from __future__ import annotations

import io
import re
import time
import urllib.parse
from typing import Any

import requests
import urllib3
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.requests import AuthorizedSession
from google.cloud.storage import Client
from requests.adapters import HTTPAdapter

from simulate.corpus import FOLDER, FOLDER_FILES, Corpus, pages, read_content

PAGE_FILES = 1_000
"""What the service puts on a page of a listing."""

_NUMBER = re.compile(r"part-(\d+)")


class CorpusAdapter(HTTPAdapter):
    """Answers listings of the corpus's folder, and ranged reads of its files.

    Args:
        corpus: The corpus.

    Attributes:
        cpu_secs: CPU that the answers cost, which is not the planner's.
        num_pages: Pages that were listed.
        num_reads: Reads that were answered.
    """

    def __init__(self, corpus: Corpus) -> None:
        super().__init__()
        self._corpus = corpus
        self.cpu_secs = 0.0
        self.num_pages = self.num_reads = 0

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        """Answers a request, where the class above would open a connection."""
        started = time.process_time()
        url = urllib.parse.urlsplit(str(request.url))
        if url.path.startswith("/download/"):
            body, headers, status = self._read(url.path, request.headers.get("Range", ""))
        else:
            body, headers, status = self._list(dict(urllib.parse.parse_qsl(url.query))), {}, 200
        answer = urllib3.HTTPResponse(io.BytesIO(body), headers, status, preload_content=False)
        response: requests.Response = self.build_response(request, answer)
        self.cpu_secs += time.process_time() - started
        return response

    def _list(self, query: dict[str, str]) -> bytes:
        assert query["prefix"] == FOLDER, query
        self.num_pages += 1
        first = int(query.get("pageToken", 0))
        items = ",".join(
            f'{{"name":"{name}","size":"{size}","generation":"{generation}"}}'
            for name, size, generation in pages(self._corpus, first, PAGE_FILES)
        )
        following = first + PAGE_FILES
        token = f',"nextPageToken":"{following}"' if following < self._corpus.files else ""
        return f'{{"items":[{items}]{token}}}'.encode()

    def _read(self, path: str, asked: str) -> tuple[bytes, dict[str, str], int]:
        self.num_reads += 1
        found = _NUMBER.search(path)
        assert found is not None, path
        index = int(found[1])
        size = int(self._corpus.folder_sizes(index // FOLDER_FILES)[index % FOLDER_FILES])
        start, _, last = asked.removeprefix("bytes=").partition("-")
        body = read_content(size, int(start or 0), int(last) + 1 if last else size)
        headers = {"X-Goog-Generation": str(self._corpus.generation(index)), "Content-Length": str(len(body))}
        return body, headers, 206 if asked else 200


def make_client(adapter: CorpusAdapter) -> Client:
    """Returns a client of the real library whose requests the adapter answers."""
    credentials = AnonymousCredentials()
    session = AuthorizedSession(credentials)
    session.mount("https://", adapter)
    return Client(project="none", credentials=credentials, _http=session)
