"""The part of the Hugging Face hub that down- and uploads need, on two ports: hub and CDN.

Run as a program with a folder: every folder OWNER/NAME in it is a repository of one commit. It
prints its address, then answers each JSON request on a line of stdin, {"set": {...}} or
{"take": "log"}, with one line.

As on the hub, a large file (*.safetensors) is redirected to another host, which must not get the
token; files have a digest as ETag, the hub's own answer for a large one as X-Linked-Etag; refusals
say why in X-Error-Code; ranges are served of both. Only what is asked for is read, so that files
may be sparse. The digest of a large file is what NAME.sha256 beside it says, else computed.

Files to be uploaded are asked for (preupload), large ones sent by the LFS protocol, and all are
committed. What was sent of large files stays, also without a commit, as on the hub. A card with the
license no-such-license is refused.

Settings, by repository unless said otherwise:

    token       who does not send it is told that there is no such repository
    gated       who does not send this token gets the list, but no file
    revisions   branches and tags, besides main
    commit      the hash of its commit
    lost        files that are listed, but answered with 404
    breaks      how many answers with a large file's bytes end in their middle, by file
    breaks_headers  false if those with no more than a header do not
    down        large files that are answered with 503
    headers_only    those that are only if more than a header is asked for
    no_ranges   large files are sent whole
    changed     what files' digests are when they are asked for, after the list
    sizes       what the list says that files' sizes are
    kill        [pid, file, signal]: send that process the signal when half of the file was sent,
                headers apart
    damaged     files of which the last byte is sent wrong
    writer      who does not send this token may not write
    spoiled     files that a commit stores with another last byte
    cut         large files, by sha256:DIGEST, of which no upload is answered

A large file that is sent to the hub has the name sha256:DIGEST in `kill`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
import threading
import time
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789" * 4
CHUNK_BYTES = 1 << 16
HEADER_BYTES = 1 << 17
"""Requests for no more are for headers."""
ROOT = Path(sys.argv[1])
SENT = ROOT / ".sent"
"""What was sent, committed or not, by repository and digest."""
settings: dict[str, dict] = {}
log: list[dict] = []


@cache
def digest(path, state):
    named = path.with_name(f"{path.name}.sha256")
    if named.exists():
        return named.read_text()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(path):
    status = path.stat()
    return digest(path, (status.st_size, status.st_mtime_ns))


def files_of(repository):
    folder = ROOT / repository
    found = (str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    return sorted(name for name in found if not name.endswith(".sha256"))


def git_hash_of(path):
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0%s" % (len(data), data)).hexdigest()  # noqa: S324


def is_large(file):
    return file.endswith(".safetensors")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        """Say nothing."""

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def do_POST(self):
        Upload(self).post()

    def do_PUT(self):
        Upload(self).put()

    def answer(self):
        path = unquote(urlsplit(self.path).path).lstrip("/")
        sent_token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.server is cdn:
            if sent_token:
                self.refuse(400, "TokenLeaked")
            else:
                repository, _, file = path.partition("/files/")
                self.send_file(repository, file, {"ETag": '"of-the-cdn"'})
            return
        is_api = path.startswith("api/models/")
        repository = "/".join(path.removeprefix("api/models/").split("/")[:2])
        given = settings.get(repository, {})
        if not (ROOT / repository).is_dir() or given.get("token") not in (None, sent_token):
            self.refuse(401, "RepoNotFound")
        elif is_api:
            self.send_list(repository, path, given)
        elif given.get("gated") not in (None, sent_token):
            self.refuse(403 if sent_token else 401, "GatedRepo")
        else:
            self.resolve(repository, path, given)

    def send_list(self, repository, path, given):
        revision = path.partition("/revision/")[2] or path.partition("/tree/")[2] or "main"
        if not self.has_revision(revision, given):
            self.refuse(404, "RevisionNotFound")
            return
        entries = []
        for file in files_of(repository):
            size = (ROOT / repository / file).stat().st_size
            size = given.get("sizes", {}).get(file, size)
            entry = {"rfilename": file, "path": file, "type": "file", "size": size}
            place = ROOT / repository / file
            git_hash = digest_of(place)[:40] if is_large(file) else git_hash_of(place)
            entry |= {"blobId": git_hash, "oid": git_hash}
            if is_large(file):
                sha256 = digest_of(ROOT / repository / file)
                entry["lfs"] = {"oid": sha256, "sha256": sha256, "size": size, "pointerSize": 134}
            entries.append(entry)
        info = {"id": repository, "sha": given.get("commit", COMMIT), "siblings": entries}
        info["private"] = given.get("private", False)
        log.append({"repository": repository, "file": "", "first": 0, "bytes": 0})
        content = json.dumps(entries if "/tree/" in path else info).encode()
        self.send_content(200, content, {"Content-Type": "application/json"})

    def has_revision(self, revision, given):
        known = {"main", given.get("commit", COMMIT), *given.get("revisions", ())}
        return revision.strip("/") in known

    def resolve(self, repository, path, given):
        revision, _, file = path.partition("/resolve/")[2].partition("/")
        path = ROOT / repository / file
        if not self.has_revision(revision, given):
            self.refuse(404, "RevisionNotFound")
            return
        if not path.is_file() or file in given.get("lost", ()):
            self.refuse(404, "EntryNotFound")
            return
        commit = {"X-Repo-Commit": given.get("commit", COMMIT)}
        if not is_large(file):
            self.send_file(repository, file, {**commit, "ETag": f'"{git_hash_of(path)}"'})
            return
        linked = {
            "X-Linked-Etag": f'"{given.get("changed", {}).get(file) or digest_of(path)}"',
            "X-Linked-Size": str(path.stat().st_size),
            "Location": f"http://localhost:{cdn.server_address[1]}/{repository}/files/{file}",
        }
        self.send_content(302, b"", {**commit, **linked})

    def send_file(self, repository, file, headers):
        given, path = settings.get(repository, {}), ROOT / repository / file
        size = path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (asked[1], asked[2] or size - 1) if asked else (0, size - 1)
        first, stop = int(first), min(int(last), size - 1) + 1
        is_part = asked and not given.get("no_ranges")
        if not is_part:
            first, stop = 0, size
        headers = {**headers, "Accept-Ranges": "bytes", "Content-Length": str(stop - first)}
        if is_part:
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{size}"
        is_more = stop - first > HEADER_BYTES and file in given.get("headers_only", ())
        if is_more or file in given.get("down", ()):
            self.refuse(503, "Down")
            return
        self.send_response(206 if is_part else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.send_bytes(repository, file, first, stop)

    def send_bytes(self, repository, file, first, stop):
        given = settings.get(repository, {})
        size = (ROOT / repository / file).stat().st_size
        entry = {"repository": repository, "file": file, "first": first, "bytes": 0}
        log.append(entry)
        may_break = given.get("breaks_headers", True) or stop - first > HEADER_BYTES
        broken = may_break and given.get("breaks", {}).get(file, 0) > 0
        if broken:
            given["breaks"][file] -= 1
        half = (first + stop) // 2
        with (ROOT / repository / file).open("rb") as opened:
            opened.seek(first)
            while (at := first + entry["bytes"]) < stop:
                if at >= half and broken:
                    self.wfile.flush()
                    self.close_connection = True
                    return
                pid, struck, signal = given.get("kill", (0, "", 0))
                if at >= half and struck == file and stop - first > HEADER_BYTES:
                    given.pop("kill")
                    os.kill(pid, signal)
                try:
                    limit = half if at < half else stop
                    data = opened.read(min(CHUNK_BYTES, limit - at))
                    if file in given.get("damaged", ()) and at + len(data) == size:
                        data = data[:-1] + bytes([data[-1] ^ 1])
                    entry["bytes"] += self.wfile.write(data)
                except OSError:  # whoever asked is gone
                    self.close_connection = True
                    return

    def refuse(self, status, code):
        self.send_content(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def send_content(self, status, content, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_json(self, document, status=200):
        content = json.dumps(document).encode()
        self.send_content(status, content, {"Content-Type": "application/json"})


class Upload:
    """One request of an upload."""

    def __init__(self, handler):
        self.handler = handler
        self.path = unquote(urlsplit(handler.path).path).lstrip("/")

    def post(self):
        body = b"".join(self.body())
        if self.path == "api/validate-yaml":
            refused = b"license: no-such-license" in body
            errors = [{"message": '"license" must be one of mit, other'}] if refused else []
            self.handler.send_json({"errors": errors, "warnings": []}, 400 if errors else 200)
            return
        document = None if "/commit/" in self.path else json.loads(body)
        repository = self.repository(document)
        given = settings.get(repository, {})
        token = self.handler.headers.get("Authorization", "").removeprefix("Bearer ")
        if given.get("writer") not in (None, token):
            self.handler.refuse(403 if token else 401, "")
        elif self.path == "api/repos/create":
            self.create(repository, document.get("visibility"))
        elif "/branch/" in self.path:
            branch = self.path.partition("/branch/")[2]
            settings.setdefault(repository, {}).setdefault("revisions", []).append(branch)
            self.handler.send_json({})
        elif "/preupload/" in self.path:
            self.preupload(document)
        elif self.path.endswith("/objects/batch"):
            self.batch(repository, document)
        elif "/commit/" in self.path:
            self.commit(repository, body.splitlines(), given)
        else:
            self.handler.refuse(404, "Unknown")

    def repository(self, document):
        if self.path == "api/repos/create":
            return f"{document['organization']}/{document['name']}"
        path = self.path.removeprefix("api/models/").partition(".git/")[0]
        return "/".join(path.split("/")[:2])

    def create(self, repository, visibility):
        exists = (ROOT / repository).is_dir()
        (ROOT / repository).mkdir(parents=True, exist_ok=True)
        if not exists:
            log.append({"repository": repository, "created": visibility})
            settings.setdefault(repository, {})["private"] = visibility == "private"
        url = f"http://127.0.0.1:{hub.server_address[1]}/{repository}"
        self.handler.send_json({"url": url}, 409 if exists else 200)

    def preupload(self, document):
        files = [
            {"path": f["path"], "uploadMode": "lfs" if is_large(f["path"]) else "regular",
             "shouldIgnore": False}
            for f in document["files"]
        ]  # fmt: skip
        self.handler.send_json({"files": files})

    def batch(self, repository, document):
        objects = []
        for wanted in document["objects"]:
            oid = wanted["oid"]
            url = f"http://localhost:{cdn.server_address[1]}/{repository}/objects/{oid}"
            actions = (
                {} if (SENT / repository / oid).exists() else {"actions": {"upload": {"href": url}}}
            )
            objects.append({"oid": oid, "size": wanted["size"], **actions})
        self.handler.send_json({"transfer": "basic", "objects": objects})

    def put(self):
        repository, _, oid = self.path.partition("/objects/")
        name, given = f"sha256:{oid}", settings.get(repository, {})
        entry = {"repository": repository, "sent": name, "bytes": 0}
        log.append(entry)
        size = int(self.handler.headers.get("Content-Length", 0))
        whole = SENT / repository / oid
        whole.parent.mkdir(parents=True, exist_ok=True)
        partial = whole.with_suffix(f".{threading.get_ident()}")
        with partial.open("wb") as file:
            for part in self.body():
                entry["bytes"] += file.write(part)
                pid, struck, signal = given.get("kill", (0, "", 0))
                if struck == name and entry["bytes"] >= size / 2:
                    given.pop("kill")
                    # Files sent at the same time arrive first, so that what is kept is no chance.
                    until = time.monotonic() + 5
                    while len([*whole.parent.glob("*.*")]) > 1 and time.monotonic() < until:
                        time.sleep(0.01)
                    os.kill(pid, signal)
        if name in given.get("cut", ()):
            self.handler.close_connection = True
            return
        partial.replace(whole)
        entry["whole"] = True
        self.handler.send_content(200, b"", {})

    def commit(self, repository, lines, given):
        entry = {"repository": repository, "added": [], "deleted": []}
        entry["branch"] = self.path.partition("/commit/")[2]
        for line in map(json.loads, lines):
            value = line["value"]
            path = ROOT / repository / value.get("path", "")
            if line["key"] == "header":
                entry["commit"] = value["summary"]
                continue
            if line["key"] == "deletedFile":
                path.unlink()
                entry["deleted"].append(value["path"])
                continue
            if line["key"] == "file":
                data = base64.b64decode(value["content"])
            else:
                data = (SENT / repository / value["oid"]).read_bytes()
            if value["path"] in given.get("spoiled", ()):
                data = data[:-1] + bytes([data[-1] ^ 1])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            entry["added"].append(value["path"])
        log.append(entry)
        url = f"http://127.0.0.1:{hub.server_address[1]}/{repository}/commit/{COMMIT}"
        self.handler.send_json({"commitUrl": url, "commitOid": COMMIT})

    def body(self):
        """The parts of a request's body, with or without its length given before."""
        stream = self.handler.rfile
        if self.handler.headers.get("Transfer-Encoding") == "chunked":
            while size := int(stream.readline(), 16):
                yield stream.read(size)
                stream.readline()
            stream.readline()
            return
        left = int(self.handler.headers.get("Content-Length", 0))
        while left:
            part = stream.read1(min(left, CHUNK_BYTES))
            if not part:
                raise ConnectionError("whoever sends is gone")
            left -= len(part)
            yield part


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Say nothing of clients that were killed."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


hub, cdn = Server(), Server()
print(json.dumps(f"http://127.0.0.1:{hub.server_address[1]}"), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "set" in request:
        settings.update(request["set"])
    taken = list(log) if "take" in request else []
    del log[: len(taken)]
    print(json.dumps(taken), flush=True)
