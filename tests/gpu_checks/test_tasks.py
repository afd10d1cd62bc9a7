"""Command lines of the tasks are those of programs and tests that there are."""

from __future__ import annotations

import shlex
import subprocess
import sys

import checkpoints
import click
import first_start
import layer_times
import model_times
import pytest
import random_checkpoints
import run
import tests_on_gpus
from environment import CHECKOUT, script_of
from needs import NEEDS

from moequant.benchmarks.humming import _RUNS, _stored_as
from moequant.benchmarks.random_models import random_model
from moequant.benchmarks.serving_engines import ENGINES
from moequant.benchmarks.shapes import parse_shapes
from moequant.cli import cli
from moequant.formats import CONVERTIBLE

BY_NAME = {task.name: task for task in run.TASKS}


@pytest.fixture
def lines(machine, tmp_path):
    """The words of every command line, with the task; what tasks leave for each other is there."""
    for path in (path for task in run.TASKS for path in task.makes):
        (tmp_path / path).mkdir(exist_ok=True)
    (tmp_path / "out").mkdir()
    found = []
    for task in run.TASKS:
        gpus = list(range(task.gpus))
        script = script_of(task, gpus, machine=machine(2), folder=tmp_path, out=tmp_path / "out")
        found += [(task, shlex.split(line)) for line in script.splitlines()[1:]]
    return found


def parse(words):
    """Parameters of our command line's command, by name."""
    command, context, given = cli, click.Context(cli, info_name="moequant"), [*words]
    while isinstance(command, click.Group):
        _, command, given = command.resolve_command(context, given)
        context = click.Context(command, parent=context)
    return command.make_context(command.name, given).params


def of_ours(lines):
    for task, words in lines:
        if words[1:3] == ["-m", "moequant"]:
            cut = words.index(">") if ">" in words else len(words)
            yield task, parse(words[3:cut])


def test_every_command_of_ours_parses(lines):
    found = list(of_ours(lines))
    served = {task.name for task in run.TASKS if task.name.startswith(("serve-", "load-"))}
    assert served <= {task.name for task, _ in found}
    for _, params in found:
        assert set(params.get("engine", ())) <= ENGINES.keys()
        if "shape" in params and "backend" in params:
            formats = params["format"]  # of bench one, of tune several
            assert {*([formats] if isinstance(formats, str) else formats)} <= {*CONVERTIBLE}
            assert parse_shapes(params["shape"])


def test_every_result_is_in_the_folder_of_its_task(lines, tmp_path):
    for task, words in lines:
        if words[1:3] == ["-m", "moequant"] and words[3] in ("bench", "selftest", "tune"):
            place = max(words.index(flag) for flag in (">", "--output") if flag in words)
            assert words[place + 1].startswith(str(tmp_path / "out")), task.name


def test_every_script_is_there_and_takes_what_it_is_given(lines):
    for _, words in lines:
        scripts = [word for word in words if word.endswith(".py") or word.startswith("tests")]
        for script in scripts:
            assert (CHECKOUT / script).exists(), script
        if "random_checkpoints.py" in words[1]:
            given = random_checkpoints.parse(words[2:])
            random_model(given.shape).resized(given.layers, given.vocabulary)
            formats = {name.removesuffix(random_checkpoints.STATIC) for name in given.formats}
            assert formats <= set(CONVERTIBLE)
        if "first_start.py" in words[1]:
            assert (
                first_start.parse(first_start.command_line(), words[2:]).options[0].startswith("--")
            )


def test_names_and_needs_are_known_and_no_task_waits_for_ever():
    assert len(BY_NAME) == len(run.TASKS)
    for task in run.TASKS:
        assert set(task.needs) <= NEEDS.keys()
        assert set(task.after) <= BY_NAME.keys()
        assert all(not BY_NAME[name].after for name in task.after)
        assert task.most_s > task.estimate_s
        assert task.gpus == 1 or "two" in task.name or "--tensor-parallel 2" in task.commands[0]


def test_models_are_converted_into_every_format_that_is_timed():
    assert {name.removesuffix(random_checkpoints.STATIC) for name in layers()} == set(CONVERTIBLE)
    assert run.ROOM_GB <= 340  # as CONTRIBUTING.md says


def layers():
    return checkpoints.MODELS["layers"].formats


def test_humming_is_timed_with_every_format_that_it_may_be():
    """Activations of mxfp4 are those of the format, or in FP8."""
    ways = {_stored_as(name.removesuffix("_fp8")) for name in layer_times._HUMMING}
    assert ways == set(_RUNS)
    assert len(layer_times._HUMMING) == sum(map(len, _RUNS.values()))


def collect(path, *options):
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-q", "--co"]
    done = subprocess.run(
        [*command, *options, path], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.parametrize(
    "name",
    [
        "sm90-mxfp4",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("sm90-rest", "sm90-real-models", "vllm-two-gpus", "quantizer-rates")
        ),
    ],
)
def test_words_choose_some_tests(name, lines):
    words = next(words for task, words in lines if task.name == name)
    (path,) = (word for word in words if word.endswith(".py"))
    assert collect(path, "-k", words[words.index("-k") + 1])


@pytest.mark.full
def test_shards_are_all_tests_of_sm90_once():
    shards = [*tests_on_gpus.SHARDS.values(), tests_on_gpus.REST]
    found = [
        test
        for words in shards
        for test in collect(
            tests_on_gpus.SM90, "-m", "gpu", "-k", f"{words} and not {tests_on_gpus.REAL}"
        )
    ]
    real = collect(tests_on_gpus.SM90, "-m", "gpu", "-k", tests_on_gpus.REAL)
    assert real
    assert sorted([*found, *real]) == sorted(collect(tests_on_gpus.SM90, "-m", "gpu"))


@pytest.mark.full
def test_shards_are_all_tests_of_engines_on_gpus_once():
    tasks = [task for task in run.TASKS if model_times.VLLM_TESTS in task.commands[0]]
    words = [shlex.split(task.commands[0].replace("{", "").replace("}", "")) for task in tasks]
    found = [test for each in words for test in collect(model_times.VLLM_TESTS, "-k", each[-1])]
    assert sorted(found) == sorted(collect("tests/engines", "-m", "gpu"))


def test_cases_of_the_sanitizer_are_those_of_the_tests_of_sm90():
    code = "import sys; sys.path.append('tests/gpu_checks'); import each_tiling as e; "
    code += "print(*e._load_tests().TILINGS)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == set(tests_on_gpus.SHARDS)
    assert {f"racecheck-{case}" for case in tests_on_gpus.SHARDS} < BY_NAME.keys()
