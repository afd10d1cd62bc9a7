"""Feed moequant files that are damaged or lie, and see that it says so and does nothing else.

    python tests/fuzz/fuzz.py --minutes 10                  # every target in turn
    python tests/fuzz/fuzz.py --minutes 1 --target header
    python tests/fuzz/fuzz.py --target config --case 4711   # one case again, with its traceback

A case is good if it ends in time and in bounded memory, with a result or with an error of
`moequant.errors`, and prints nothing that a terminal would obey. Cases are drawn from seed, target
and number alone, so that each can be run again. Exit code 1 if a case was bad.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import itertools
import json
import os
import random
import re
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "shared"))

from load_module import load_module

TESTS = Path(__file__).parents[1]
SECONDS = 20
"""What a case may take on a busy machine; most take a hundredth of a second."""
MEMORY_BYTES = 600 << 20
"""What a case may take beyond what the process has; no file is larger than a megabyte."""

MOST_CHARACTERS = 50_000
"""What a case may print."""

SHARDS = "30KB"


def hostile_values(rng):
    """Values that a reader may not expect."""
    deep = rng.choice([5, 99, 150, 500, 3000])
    nested = json.loads("[" * min(deep, 500) + "]" * min(deep, 500))
    return [
        None, True, False, 0, 1, -1, 2, 3, 7, 64, 1000, 999_999, 2**31, 2**32, 2**63 - 1, 2**63,
        2**64, 10**30, 10**400, -(2**70), 0.5, -0.0, 1e308, float("nan"), float("inf"),
        "", " ", "0", "a\0b", "\x1b[2J\x1b]0;x\a", "\ud800", "\u202e", "a" * 5000, "../../x",
        "/etc/passwd", "model.safetensors", "C:\\x", "%s%n", "{layer}", "*", "nan", "silu",
        "qwen3_moe", "BF16", "F8_E4M3", "I64", [], {}, [[]], [None], [1, 2], [2**63], [-1],
        [0] * 70, [True], {"": ""}, {"a": {"b": []}}, nested, ["0"], list(range(2000)),
        "a1" * 150_000, ["re:(.*.*)*[^.]X"], "(.*.*)*[^.]X", ["(.|.)*[^.]X"],
    ]  # fmt: skip


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def mutate_json(rng, value):
    """A value with one to four of its places damaged."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        *parent, last = rng.choice(list(places(value))[1:] or [(None,)])
        if last is None:
            return rng.choice(hostile_values(rng))
        holder = value
        for key in parent:
            holder = holder[key]
        match rng.randrange(7):
            case 0:
                del holder[last]
            case 1 if isinstance(holder, dict):
                name = rng.choice(hostile_values(rng))
                holder[name if isinstance(name, str) else str(last) + "x"] = holder.pop(last)
            case 2:
                other = rng.choice(list(places(value)))
                found = value
                for key in other:
                    found = found[key]
                holder[last] = json.loads(json.dumps(found))
            case 3 if type(holder[last]) is int:
                holder[last] += rng.choice([-1, 1, 2, 1000, -holder[last]])
            case 4 if isinstance(holder[last], str) and holder[last]:
                at = rng.randrange(len(holder[last]))
                holder[last] = holder[last][:at] + rng.choice("\0\x1b./9x") + holder[last][at + 1 :]
            case _:
                holder[last] = rng.choice(hostile_values(rng))
    return value


def mutate_bytes(rng, data):
    """Bytes with one to eight places damaged."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(data) + 1)
        length = rng.choice([1, 1, 2, 8, 100])
        match rng.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = rng.randbytes(length)
            case 3:
                data[at:at] = data[at : at + length]
            case 4:
                del data[at:]
            case _:
                tokens = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\u0000", b"9" * 30, b"\xff"]
                data[at : at + 1] = rng.choice(tokens)
    return bytes(data)


def without_quantizers(files):
    """Files with their bytes; of moequant.json all but what only the journal can tell."""
    record = json.loads(files["moequant.json"])
    del record["quantizers"]
    return files | {"moequant.json": record}


def write_json(rng, path, value):
    """Write a damaged form of a JSON value: of its meaning, or of its bytes."""
    if rng.random() < 0.75:
        try:
            text = json.dumps(mutate_json(rng, value))
        except RecursionError:  # of places that were nested into one another
            text = "[" * 5000
        if rng.random() < 0.05:
            text = text.replace("{", '{"a": 1, "a": 2, ', 1)
        path.write_bytes(text.encode())
    else:
        path.write_bytes(mutate_bytes(rng, json.dumps(value, indent=1).encode()))


def write_with_header(path, header, data):
    """Write a safetensors file; `data` is what stands behind its header."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_shard(rng, path):
    """Damage a safetensors file: its header, its length, or any byte."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    kind = rng.randrange(4)
    if kind == 0:
        path.write_bytes(mutate_bytes(rng, data))
    elif kind == 1:
        lies = [0, 1, length - 1, length + 1, 2**63, 2**64 - 1, 100_000_001, len(data), 10**8]
        path.write_bytes(rng.choice(lies).to_bytes(8, "little") + data[8:])
    else:
        header = mutate_json(rng, json.loads(data[8 : 8 + length]))
        write_with_header(path, header, data[8 + length :])


def change_tensor(rng, path):
    """Make a tensor of a safetensors file another: gone, renamed, of another dtype or shape."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    name = rng.choice(sorted(set(header) - {"__metadata__"}))
    entry = header[name]
    match rng.randrange(5):
        case 0:
            del header[name]
        case 1:
            module, _, leaf = name.rpartition(".")
            leaves = ["weight", "weight_scale", "weight_packed", "weight_scale_2", "input_scale"]
            leaves += ["weight_scale_inv", "scale", "weight_shape", "qweight", leaf + "_blocks"]
            header[f"{module}.{rng.choice(leaves)}"] = header.pop(name)
        case 2:
            bits = {"F32": 32, "I32": 32, "BF16": 16, "F16": 16, "U8": 8, "I8": 8, "F8_E4M3": 8}
            bits |= {"F8_E8M0": 8, "F8_E5M2": 8, "I64": 64, "BOOL": 8, "F4": 4, "F64": 64}
            same = [d for d, size in bits.items() if size == bits.get(entry["dtype"])]
            entry["dtype"] = rng.choice(same or list(bits))
        case 3:
            size = entry["shape"]
            entry["shape"] = rng.choice([size[::-1], [1, *size], [*size, 1], size[1:], [2, -1]])
        case _:
            start, stop = (end + at for at in entry["data_offsets"])
            bad = rng.choice([b"\0", b"\xff", b"\x7f", b"\x80", rng.randbytes(1)])
            data = data[:start] + bad * (stop - start) + data[stop:]
    write_with_header(path, header, data[end:])


FORMATS = ("fp8_block", "nvfp4", "mxfp4", "w4a8")
RECIPE = """
schema_version = 1
summary = "Experts to NVFP4 with a search, but for layer 0."
architectures = ["qwen3_moe"]

[[rules]]
roles = ["routed_experts"]
layers = "0"
format = "keep"

[[rules]]
match = 'model\\.layers\\.\\d+\\.mlp\\.experts\\..*'
format = "nvfp4"
options = { search = "mse" }

[output]
dialect = "compressed-tensors"
max_shard_size = "5GB"
"""
TOKENS = [
    "rules", "[[rules]]", "[output]", "[rules]", "format", '"mxfp4"', '"fp8_block"', '"keep"',
    "true", "-1", "1e400", "nan", "inf", "0x10", "1979-05-27", "[]", "{}", '""', '"5TB"', '"0"',
    '"-5GB"',
    '"1e9999GB"', '"9999999999999999999999TB"', '"٣GB"', '"3:"', '":-1"', '"-1"', '"x"', '"("',
    '"\\u0000"', '"[a-z"', "'.*'", "schema_version = 2", "'''", '"""', "\0", "=", "#", "[[",
    "layers", "roles", "options", "match", '["attention"]', '["x"]', "{ scale_rule = 'ceil' }",
    "'(.*.*)*[^.]X'",
]  # fmt: skip


def write_sources(root):
    """A source in each form that models are quantized in; their folders."""
    write_checkpoint = load_module(TESTS / "conftest.py").write_checkpoint
    sources = load_module(TESTS / "sources" / "conftest.py")
    sizes = {"layers": 1, "experts": 2, "hidden": 128, "intermediate": 128, "vocabulary": 16}
    plain = write_checkpoint(root / "plain", **sizes)
    gpt_oss = write_checkpoint(root / "plain_gpt_oss", model_type="gpt_oss", **sizes)
    written = [
        sources.write_form(form, root / f"form {i}", plain) for i, form in enumerate(sources.FORMS)
    ]
    written += [
        sources.write_source(
            root / "fp8", plain, sources.is_linear, sources.FP8, sources.fp8_block
        ),
        sources.write_gpt_oss(root / "gpt_oss", gpt_oss, 2),
        sources.write_deepseek_v4(root / "deepseek_v4"),
    ]
    return [source.path for source in written]


class Model:
    """A small checkpoint: as it came, converted and prepared, and in the midst of a conversion."""

    def __init__(self, root, model_type, format, **sizes):
        from moequant.conversion import convert
        from moequant.preparation import prepare

        self.settings = {"format": format, "max_shard_size": SHARDS}
        self.source, self.converted, self.begun = (root / n for n in ("source", "done", "begun"))
        load_module(TESTS / "conftest.py").write_checkpoint(
            self.source, model_type=model_type, layers=2, experts=2, vocabulary=16,
            shard_bytes=60_000, **sizes,
        )  # fmt: skip
        convert(self.source, self.converted, **self.settings)
        self.whole = {p.name: p.read_bytes() for p in self.converted.iterdir() if p.is_file()}
        prepare(self.converted, target="sm100")
        self._begin(convert)

    def _begin(self, convert):
        """A conversion that was interrupted behind two thirds of its work."""
        from moequant.progress import SilentProgress

        class Interrupted(SilentProgress):
            left = sum(path.stat().st_size for path in self.source.glob("*.safetensors")) * 2 // 3

            def advance(self, done_bytes, current):
                self.left -= done_bytes
                if self.left < 0:
                    raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            convert(self.source, self.begun, progress=Interrupted(), workers=1, **self.settings)
        assert list((self.begun / ".moequant" / "shards").glob("*.safetensors"))


class Fuzzer:
    """Everything a worker needs: small checkpoints, made once, and a folder for each case."""

    def __init__(self, root):
        self.root = root
        sizes = {"hidden": 64, "intermediate": 32}
        self.models = [
            Model(root / "qwen3_moe", "qwen3_moe", "nvfp4", **sizes),
            Model(root / "gpt_oss", "gpt_oss", "mxfp4", **sizes),
        ]
        self.sources = write_sources(root / "sources")

    def run(self, target, number, seed):
        """One case; raises what is wrong with it."""
        rng = random.Random(f"{seed}/{target}/{number}")  # noqa: S311
        folder = self.root / "case"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        getattr(self, target)(rng, folder, rng.choice(self.models))

    def header(self, rng, folder, model):
        """The reader of safetensors headers; what it takes, safetensors takes too."""
        from safetensors import safe_open

        from moequant.errors import MoequantError
        from moequant.storage.headers import read_header

        path = folder / "x.safetensors"
        shutil.copy(rng.choice(sorted(model.converted.glob("*.safetensors"))), path)
        write_shard(rng, path)
        try:
            infos = read_header(path, path.name)
        except MoequantError as error:
            check_length(str(error))
            return
        with safe_open(path, "pt") as file:
            assert set(file.keys()) == infos.keys()

    def index(self, rng, folder, model):
        """The reader of the index."""
        from moequant.storage.checkpoint import Checkpoint

        copy = Path(shutil.copytree(model.source, folder / "source"))
        path = copy / "model.safetensors.index.json"
        write_json(rng, path, json.loads(path.read_text()))
        self.foreseen(lambda: Checkpoint.open(copy))

    def recipe(self, rng, folder, model):
        """The loader of recipes, and plans by what it takes."""
        from moequant.conversion import convert, load_recipe

        text = RECIPE
        for _ in range(rng.choice([1, 1, 2, 5])):
            parts = re.split(r"([\s=\[\],{}]+)", text)
            at = rng.randrange(len(parts))
            parts[at] = rng.choice([*TOKENS, "", rng.choice(parts), rng.choice(parts)])
            text = "".join(parts)
        data = text.encode("utf-8", "surrogateescape")
        path = folder / "recipe.toml"
        path.write_bytes(data if rng.random() < 0.7 else mutate_bytes(rng, data))
        recipe = self.foreseen(lambda: load_recipe(path))
        if recipe is not None:
            out = folder / "out"
            self.foreseen(lambda: convert(model.source, out, recipe=recipe, dry_run=True))

    def config(self, rng, folder, model):
        """A source with a hostile config.json."""
        copy = Path(shutil.copytree(model.source, folder / "source"))
        write_json(rng, copy / "config.json", json.loads((copy / "config.json").read_text()))
        self.command("inspect", copy, *rng.choice([[], ["--tensors"], ["--json"]]))
        out = folder / "out"
        dry_run = rng.choice([["--dry-run"], ["--dry-run"], []])
        self.command("convert", copy, out, "--format", rng.choice(["nvfp4", "mxfp4"]), *dry_run)
        if (out / "config.json").exists():
            self.command("inspect", out)

    def inspect(self, rng, folder, model):
        """A converted checkpoint of which any file is hostile."""
        copy = self.hostile_copy(rng, folder, model)
        self.command("inspect", copy, "--tensors", *rng.choice([[], ["--json"]]))
        self.command("check", copy, *rng.choice([[], ["--json"], ["--gpu", "h100"]]))

    def check(self, rng, folder, model):
        """The same, verified and loaded."""
        copy = self.hostile_copy(rng, folder, model)
        options = rng.choice([[], ["--json"]])
        self.command("verify", copy, "--integrity", *options)
        self.command("verify", copy, "--against", model.source, "--layers", "1", *options)
        if rng.random() < 0.3:
            self.command("verify", model.converted, "--against", copy, "--layers", "0", *options)
        if rng.random() < 0.3:
            from moequant.runtime import load_experts

            prepared = copy / "moequant-prepared" / "sm100"
            self.foreseen(lambda: load_experts(rng.choice([copy, prepared]), layer=0))

    def quantized(self, rng, folder, model):
        """A source that is quantized and hostile; what is made of it is right, or nothing is."""
        from moequant.conversion import convert
        from moequant.verification import verify

        copy = Path(shutil.copytree(rng.choice(self.sources), folder / "source"))
        for _ in range(rng.choice([1, 1, 1, 2])):
            self.damage_source(rng, copy)
        self.command("inspect", copy, *rng.choice([[], ["--tensors"], ["--json"]]))
        self.command("check", copy, *rng.choice([[], ["--json"], ["--tp", "2"]]))
        out, settings = folder / "out", {"format": rng.choice(["bf16", *FORMATS]), "workers": 1}
        self.foreseen(lambda: convert(copy, out, dry_run=True, **settings))
        result = self.foreseen(lambda: convert(copy, out, **settings))
        if result is not None:
            report = self.foreseen(lambda: verify(out, against=copy, layers=0))
            assert report is not None, "what was converted cannot be verified"
            assert report.ok, report.problems
            if settings["format"] != "bf16":
                self.foreseen(lambda: verify(out, against=copy, layers=1))

    def damage_source(self, rng, source):
        """One file of a source: what it says of quantization, above all."""
        documents = [p for p in source.glob("*.json") if b"quant" in p.read_bytes()]
        path = rng.choice(documents or sorted(source.glob("*.json")))
        kind = rng.random()
        # What was damaged before may have no sense left to change.
        senseless = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)
        with contextlib.suppress(ValueError, *senseless):
            if kind < 0.4:
                document = json.loads(path.read_bytes())
                key = next((k for k in document if "quant" in k), None)
                entry = mutate_json(rng, document if key is None else document[key])
                path.write_text(json.dumps(entry if key is None else {**document, key: entry}))
            elif kind < 0.5:
                write_json(rng, path, json.loads(path.read_bytes()))
            elif (shard := rng.choice(sorted(source.glob("*.safetensors")))).stat().st_size > 8:
                (change_tensor if kind < 0.8 else write_shard)(rng, shard)

    def resume(self, rng, folder, model):
        """A work folder, or a record, that is hostile: the same bytes, or a refusal."""
        from moequant.conversion import convert

        interrupted = rng.random() < 0.6
        copy = Path(
            shutil.copytree(model.begun if interrupted else model.converted, folder / "out")
        )
        shutil.rmtree(copy / "moequant-prepared", ignore_errors=True)
        work = copy / ".moequant"
        if not interrupted:
            write_json(rng, copy / "moequant.json", json.loads(model.whole["moequant.json"]))
        elif rng.random() < 0.5:
            path = work / "journal.jsonl"
            if rng.random() < 0.5:
                path.write_bytes(mutate_bytes(rng, path.read_bytes()))
            else:
                lines = [json.loads(line) for line in path.read_text().splitlines()]
                entries = mutate_json(rng, lines)
                if isinstance(entries, list):
                    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        elif rng.random() < 0.5:
            write_json(rng, work / "plan.json", json.loads((work / "plan.json").read_text()))
        else:
            path = rng.choice(sorted((work / "shards").iterdir()))
            path.write_bytes(mutate_bytes(rng, path.read_bytes()))
        overwrite = rng.random() < 0.3
        settings = {**model.settings, "workers": 2, "overwrite": overwrite}
        result = self.foreseen(lambda: convert(model.source, copy, **settings))
        if result is not None and (interrupted or overwrite):
            found = {name: (copy / name).read_bytes() for name in model.whole}
            assert without_quantizers(found) == without_quantizers(model.whole), (
                "other bytes than of a conversion without interruption"
            )

    def hostile_copy(self, rng, folder, model):
        """The converted checkpoint with one or two files damaged."""
        copy = Path(shutil.copytree(model.converted, folder / "converted"))
        files = [path for path in sorted(copy.rglob("*")) if path.is_file()]
        documents = [path for path in files if path.suffix == ".json"]
        for _ in range(rng.choice([1, 1, 1, 2])):
            if rng.random() < 0.6:
                path = rng.choice(documents)
                with contextlib.suppress(ValueError, RecursionError):
                    write_json(rng, path, json.loads(path.read_bytes()))
            else:
                path = rng.choice([path for path in files if path.suffix == ".safetensors"])
                if path.stat().st_size > 8:
                    with contextlib.suppress(ValueError):
                        write_shard(rng, path)
        if rng.random() < 0.05:
            rng.choice(files).unlink()
        return copy

    def foreseen(self, action):
        """What the action returns, or None where it raises what moequant foresaw."""
        from moequant.errors import MoequantError

        try:
            return action()
        except MoequantError as error:
            check_length(str(error))
            return None

    def command(self, *arguments):
        """Run a command as `moequant` would; it may fail, but not by surprise."""
        import click

        from moequant.cli import cli, failures
        from moequant.errors import MoequantError

        words = [str(argument) for argument in arguments]
        stdout, stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8", "strict") for _ in range(2))
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                cli.main(words, standalone_mode=False)
            except (MoequantError, failures.FailedResult, click.ClickException) as error:
                failures._report(error, words, cli._options(words))
        for stream in (stdout, stderr):
            stream.flush()
            check_text(stream.buffer.getvalue().decode())


TARGETS = ("header", "index", "recipe", "config", "inspect", "check", "resume", "quantized")


def check_text(text):
    """Refuse what a terminal would obey."""
    for line in text.split("\n"):
        bad = [c for c in line if not c.isprintable()]
        assert not bad, f"prints {bad[0]!r} in {line[:200]!r}"
    check_length(text)


def check_length(text):
    """Refuse what floods a terminal."""
    assert len(text) < MOST_CHARACTERS, (
        f"{len(text)} characters: {text[:300]!r} ... {text[-300:]!r}"
    )


def limit_memory():
    """Let what comes take so much memory and no more."""
    status = Path("/proc/self/status").read_text()
    size = int(re.search(r"VmSize:\s+(\d+) kB", status)[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES,) * 2)


def work(options):
    """Run cases until stopped; a line before and after each."""
    with tempfile.TemporaryDirectory() as root:
        fuzzer = Fuzzer(Path(root))
        limit_memory()
        for number in itertools.count(options.first):
            target = options.target[number % len(options.target)]
            print(json.dumps({"begun": number, "target": target}), flush=True)
            fault = None
            try:
                fuzzer.run(target, number, options.seed)
            except BaseException as error:
                text = traceback.format_exc()
                fault = {"error": f"{type(error).__name__}: {error}"[:500], "traceback": text}
            print(json.dumps({"done": number, "target": target, "fault": fault}), flush=True)


class Worker:
    """A process that runs cases, watched."""

    def __init__(self, options, first):
        command = [sys.executable, __file__, "--worker", "--first", str(first)]
        command += ["--seed", str(options.seed)]
        for target in options.target:
            command += ["--target", target]
        # An arena of malloc for each thread would take 64 MiB of addresses.
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.begun = None

    def result(self):
        """The next case's result; one that hangs or dies has a fault too."""
        deadline = time.monotonic() + (SECONDS if self.begun else 120)
        while True:
            ready = select.select([self.process.stdout], [], [], deadline - time.monotonic())[0]
            line = self.process.stdout.readline() if ready else ""
            if not line:
                error = "died" if ready else f"took more than {SECONDS} s"
                self.stop()
                code = self.process.returncode
                return {**(self.begun or {}), "fault": {"error": error, "traceback": f"{code}"}}
            answer = json.loads(line)
            if "done" in answer:
                return answer
            self.begun = {"done": answer["begun"], "target": answer["target"]}
            deadline = time.monotonic() + SECONDS

    def stop(self):
        """End it."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def fuzz(options):
    """Run cases for a time or a number; returns counts by target and the faults."""
    counts, faults = dict.fromkeys(options.target, 0), []
    worker, end = Worker(options, options.first), time.monotonic() + options.minutes * 60
    number = options.first
    while time.monotonic() < end and sum(counts.values()) < options.cases and len(faults) < 100:
        result = worker.result()
        if "done" not in result:
            raise SystemExit("the worker did not begin")
        number = result["done"] + 1
        counts[result["target"]] += 1
        if result["fault"]:
            faults.append(result)
            again = f"--seed {options.seed} --target {result['target']} --case {result['done']}"
            print(f"{result['fault']['error']}\n  again: {again}", flush=True)
        if worker.process.returncode is not None:
            worker = Worker(options, number)
    worker.stop()
    return counts, faults


def run_again(options):
    """One case, in this process."""
    with tempfile.TemporaryDirectory() as root:
        fuzzer = Fuzzer(Path(root))
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        limit_memory()
        for target in options.target:
            fuzzer.run(target, options.case, options.seed)


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--cases", type=int, default=sys.maxsize)
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run one case again")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON document at the end")
    options = parser.parse_args()
    options.target = options.target or list(TARGETS)
    if options.worker:
        work(options)
    elif options.case is not None:
        run_again(options)
    else:
        started = time.monotonic()
        counts, faults = fuzz(options)
        seconds = time.monotonic() - started
        if options.json:
            print(json.dumps({"cases": counts, "faults": faults, "seconds": seconds}))
        else:
            table = ", ".join(f"{target} {count}" for target, count in counts.items())
            print(f"{sum(counts.values())} cases in {seconds:.0f} s ({table}): {len(faults)} bad")
        sys.exit(bool(faults))


if __name__ == "__main__":
    main()
