"""soak.py sees what goes wrong in a server; vLLM itself is soaked by tasks of gpu_checks."""

from __future__ import annotations

import pytest
import soak

SERVER = '''
"""In place of vLLM's command line: answers as vLLM does, and goes wrong as FAKE_SERVER says."""
import json, os, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

fault = os.environ["FAKE_SERVER"]
if fault.startswith("GPU"):
    import torch  # the one beside this file's package
given = sys.argv
assert given[1] == "serve" and "--skip-tokenizer-init" in given, given
assert given[given.index("--host") + 1] == "127.0.0.1"
if "--quantization" in given:
    assert os.environ["VLLM_PLUGINS"] == "moequant"
    if fault != "not used":
        print("moequant runs routed experts in mxfp4 by its backend x on cuda:0", flush=True)
if fault == "does not start":
    sys.exit("no memory")
count, kept, lock = [0], [], threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        size = int(self.headers["Content-Length"])
        request = json.loads(self.rfile.read(size))
        assert request["return_token_ids"] and request["model"] == "soak"
        with lock:
            count[0] += 1
            number = count[0]
        time.sleep(0.002)
        if fault == "fails" and number == 30:
            return self.answer(500, b'{"error": "out of blocks"}')
        if fault == "ends" and number == 30:
            os._exit(3)
        if fault == "leaks":
            kept.append(bytearray(os.urandom(1 << 18)))
        new = request["max_tokens"] - (fault == "stops" and number == 30)
        seed = sum(request["prompt"]) + (fault == "forgets" and number > 30)
        ids = [(seed * 31 + i) % 97 for i in range(new)]
        if not request.get("stream"):
            body = {"choices": [{"token_ids": ids}]}
            return self.answer(200, json.dumps(body).encode())
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for token in ids:
                event = {"choices": [{"token_ids": [token]}]}
                if fault == "breaks" and number > 30:
                    event = {"error": "broken"}
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
            self.wfile.write(b"data: [DONE]\\n\\n")
        except OSError:
            pass
        self.close_connection = True

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, *_):
        pass


Server(("127.0.0.1", int(given[given.index("--port") + 1])), Handler).serve_forever()
'''

TORCH = '''
"""In place of torch: its allocator takes more and more if FAKE_SERVER says so."""
import os, time
from types import SimpleNamespace

begun, leaks = time.monotonic(), os.environ["FAKE_SERVER"] == "GPU leaks"


def memory_reserved(device):
    assert device == 0
    return (1 << 30) + (int(time.monotonic() - begun) << 28 if leaks else 0)


cuda = SimpleNamespace(
    is_initialized=lambda: True, device_count=lambda: 1, memory_reserved=memory_reserved
)
'''


@pytest.fixture
def served(tmp_path, monkeypatch, make_checkpoint):
    """served(fault, *options): the summary of some seconds with a server that has that fault."""
    package = tmp_path / "site" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(SERVER)
    (tmp_path / "site" / "torch.py").write_text(TORCH)
    monkeypatch.setattr(soak, "SAMPLE_S", 0.1)

    def served(fault, *, alone=False, beside=False, seconds=3):
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
        monkeypatch.setenv("FAKE_SERVER", fault)
        return soak.run(
            make_checkpoint(), minutes=seconds / 60, clients=4, alone=alone, beside=beside,
            start_s=30,
        )  # fmt: skip

    return served


def test_a_server_that_is_well_passes(served):
    summary = served("")
    assert summary["ok"], summary
    assert set(summary["requests"]) >= {"whole", "streamed"}
    assert sum(summary["requests"].values()) > 50
    assert summary["tokens"] > 1000
    assert all(value > 1e6 for value in summary["memory"]["host_bytes"])
    assert served("", alone=True, seconds=1)["ok"]


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("fails", "status 500"),
        ("stops", "tokens instead of"),
        ("breaks", "error within a stream"),
        ("ends", "the server ended with exit code 3"),
        ("forgets", "answered otherwise at the end"),
        ("leaks", "memory of the server's processes grew"),
        ("does not start", "the server ended with exit code 1"),
        ("not used", "did not say that moequant runs its experts"),
    ],
)
def test_every_fault_is_found(served, fault, problem):
    summary = served(fault)
    assert not summary["ok"]
    assert any(problem in found for found in summary["problems"]), summary
    assert "log" in summary


def test_beside_other_processes_the_servers_own_allocator_counts(served):
    level = 1 << 30
    well = served("GPU", beside=True, seconds=4)
    assert well["ok"], well
    assert well["memory"]["gpu_bytes"] == [level, level]
    (leak,) = served("GPU leaks", beside=True, seconds=4)["problems"]
    assert leak.startswith("memory of the GPU grew")
    (unknown,) = served("", beside=True, seconds=1)["problems"]
    assert unknown == "memory of the GPU was not measured"


def test_options_of_vllm_are_behind_two_dashes():
    words = ["q", "--minutes", "2", "--beside", "--", "--dtype", "bfloat16", "--json", "x"]
    given = soak.parse(soak.command_line(), words)
    assert (str(given.checkpoint), given.minutes, given.beside) == ("q", 2.0, True)
    assert (given.options, given.json) == (["--dtype", "bfloat16", "--json", "x"], None)
    assert soak.parse(soak.command_line(), ["q"]).options == []


def test_a_folder_without_a_checkpoint_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["soak.py", str(tmp_path / "q")])
    with pytest.raises(SystemExit, match="2"):
        soak.main()
    assert "no config.json is there; name a converted checkpoint" in capsys.readouterr().err


def test_failed_requests_hide_no_problem_of_the_server():
    found = soak.Found(problems=["the server ended"], failures=["refused"] * 1000)
    summary = found.summary()
    assert not summary["ok"]
    assert "the server ended" in summary["problems"]
    assert summary["failed_requests"] == 1000


def test_requests_fit_into_the_model_and_are_of_every_kind():
    prompts = soak.Prompts(1000, 0)
    drawn = [prompts.draw() for _ in range(2000)]
    assert all(
        len(r["prompt"]) >= 1 and len(r["prompt"]) + r["max_tokens"] <= soak.MAX_TOKENS
        for r, _ in drawn
    )
    assert all(3 <= token < 1000 for r, _ in drawn for token in r["prompt"])
    assert all(r["stream"] for r, abandon in drawn if abandon)
    assert 0.005 < sum(abandon for _, abandon in drawn) / len(drawn) < 0.04
    references = list(soak.Prompts(1000, "references").references())
    assert references == list(soak.Prompts(1000, "references").references())
    assert max(len(r["prompt"]) for r in references) + soak.REFERENCE_TOKENS <= soak.MAX_TOKENS
