from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import moequant
import moequant.conversion
from moequant.dialects import REGISTRY as DIALECTS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]

# Each may import what stands left of it, and itself.
ORDER = [
    "_version",
    "errors",
    "arguments",
    "act_fn",
    "cores",
    "native_code",
    "kernels",
    "progress",
    "device",
    "svg",
    "units",
    "storage",
    "formats",
    "quantizers",
    "layouts",
    "dialects",
    "models",
    "weights",
    "statistics",
    "compatibility",
    "conversion",
    "runtime",
    "preparation",
    "integrations",
    "streaming",
    "calibration",
    "evaluation",
    "verification",
    "reporting",
    "publishing",
    "selftest",
    "benchmarks",
    "cli",
]


def modules():
    """Path by dotted name of every module that installs."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


MODULES = modules()


def imports(path):
    """Every module an import statement of the file names, also within functions and for types."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from moequant import errors` names moequant.errors.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_packages_listed_are_those_on_disk():
    on_disk = {n for n, path in MODULES.items() if path.name == "__init__.py"}
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(on_disk)
    folders = {path.parent for path in MODULES.values()}
    assert folders == {path.parent for path in MODULES.values() if path.name == "__init__.py"}


@pytest.mark.parametrize("name", [n for n in MODULES if n.count(".")])
def test_imports_point_one_way(name):
    layer = name.split(".")[1]
    if layer in ("__main__", "recipes"):
        return
    allowed = ORDER[: ORDER.index(layer) + 1]
    own = {i for i in imports(MODULES[name]) if i.startswith("moequant.")}
    assert {i for i in own if i.split(".")[1] not in allowed} == set()


def import_graph():
    """By module, the modules of ours that it imports, also within functions and for types."""
    graph = {}
    for name, path in MODULES.items():
        named = (i if i in MODULES else i.rpartition(".")[0] for i in imports(path))
        graph[name] = {i for i in named if i in MODULES and i != name}
    return graph


def test_no_modules_import_each_other_in_a_circle():
    try:
        TopologicalSorter(import_graph()).prepare()
    except CycleError as error:
        # Each name is imported by the next.
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_verification_uses_public_names_of_conversion_alone():
    public = {f"moequant.conversion.{name}" for name in moequant.conversion.__all__}
    used = {
        i
        for name, path in MODULES.items()
        if name.startswith("moequant.verification")
        for i in imports(path)
        if i.startswith("moequant.conversion")
    }
    assert used - public == set()
    assert used, "it plans again"


@pytest.mark.parametrize("layer", ["storage", "weights", "conversion", "verification"])
def test_code_that_reads_and_writes_weights_names_no_dialect(layer):
    dialects = {type(d).__module__ for d in DIALECTS.values()}
    for name, path in MODULES.items():
        if name.startswith(f"moequant.{layer}."):
            named = {i if i in MODULES else i.rpartition(".")[0] for i in imports(path)}
            assert named & dialects == set(), name


def test_no_two_public_classes_share_a_name():
    homes = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_every_module_has_its_place_in_the_order():
    top = {n.split(".")[1] for n in MODULES if n.count(".")}
    assert top - {"__main__", "recipes"} == set(ORDER)


@pytest.mark.parametrize("name", MODULES)
def test_numpy_is_not_imported(name):
    assert "numpy" not in {i.split(".")[0] for i in imports(MODULES[name])}


# Packages whose modules may import what is an extra, or what users bring, within functions; and
# modules that exist for an extra.
_WITH_EXTRAS = (
    "moequant.benchmarks",
    "moequant.conversion.cluster",
    "moequant.integrations",
    "moequant.kernels",
    "moequant.runtime.backends",
)


def test_only_base_dependencies_are_imported_but_where_extras_may_be():
    base = {r.split(">")[0].strip() for r in PROJECT["project"]["dependencies"]}
    foreign = {
        i.split(".")[0]
        for name, path in MODULES.items()
        if not name.startswith(_WITH_EXTRAS)
        for i in imports(path)
    }
    assert foreign - sys.stdlib_module_names - base - {"moequant"} <= {"typing_extensions"}


def test_public_names_are_sorted_and_there():
    assert moequant.__all__ == sorted(moequant.__all__)
    assert set(moequant.__all__) <= set(dir(moequant))
    assert all(getattr(moequant, name) is not None for name in moequant.__all__)


def test_public_names_are_these():
    assert moequant.__all__ == [
        "ArchitectureError",
        "CheckpointError",
        "ConversionResult",
        "FusedExperts",
        "MoequantError",
        "NonFiniteError",
        "NumericsError",
        "PreparationResult",
        "PushResult",
        "QuantizedWeight",
        "Recipe",
        "RecipeError",
        "Report",
        "UnsupportedError",
        "__version__",
        "convert",
        "dequantize",
        "load_experts",
        "prepare",
        "push",
        "quantize",
        "verify",
    ]


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = moequant.quantise


def test_type_checkers_see_the_names_that_load_late():
    (branch,) = [
        n for n in ast.parse(MODULES["moequant"].read_text()).body if isinstance(n, ast.If)
    ]
    for_types = {
        (node.module, alias.name)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    late = {
        (f"moequant.{module}", name) for module, names in moequant._HOME.items() for name in names
    }
    assert for_types == late
    assert {name for _, name in late} | {"__version__"} == set(moequant.__all__)


def python(code, **env):
    """What a fresh interpreter prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        cwd="/",
        env={**os.environ, **env},
    )
    return json.loads(done.stdout)


def test_import_is_instant_and_loads_nothing():
    seconds, loaded = python(
        "import json, sys, time; import torch; before = set(sys.modules); t = time.perf_counter();"
        "import moequant; t = time.perf_counter() - t;"
        "print(json.dumps([t, sorted(set(sys.modules) - before)]))"
    )
    assert [name for name in loaded if name.startswith("moequant")] == [
        "moequant",
        "moequant._version",
    ]
    # 1 ms measured; the rest is room for a machine under load.
    assert seconds < 0.2


def test_quantizing_imports_torch_alone_and_leaves_cuda_alone():
    loaded, initialized = python(
        "import json, sys, torch; before = set(sys.modules); import moequant;"
        "moequant.dequantize(moequant.quantize(torch.ones(128, 128), 'nvfp4'));"
        "print(json.dumps([sorted(set(sys.modules) - before), torch.cuda.is_initialized()]))"
    )
    assert not initialized
    late = {"transformers", "triton", "pydantic", "huggingface_hub", "safetensors", "tqdm", "click"}
    assert late & {name.split(".")[0] for name in loaded} == set()


def test_every_public_name_loads_without_cuda_and_optional_packages():
    seconds, loaded, initialized = python(
        "import json, sys, time, torch; before = set(sys.modules); t = time.process_time();"
        "from moequant import *; t = time.process_time() - t;"
        "print(json.dumps([t, sorted(set(sys.modules) - before), torch.cuda.is_initialized()]))"
    )
    assert not initialized
    late = {"transformers", "triton", "huggingface_hub", "compressed_tensors", "tqdm", "click"}
    assert late & {name.split(".")[0] for name in loaded} == set()
    # 0.3 s of CPU time measured, nearly all of it pydantic. A clock would count other processes.
    assert seconds < 3


def test_command_line_starts_without_torch():
    loaded = python(
        "import io, json, sys; from contextlib import redirect_stdout;"
        "from moequant.cli import cli\n"
        "with redirect_stdout(io.StringIO()): cli.main(['--help'], standalone_mode=False)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    assert {"torch", "tqdm", "pydantic", "huggingface_hub"} & set(loaded) == set()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: setuptools leaves files in the folder it builds."""
    folder = tmp_path_factory.mktemp("build")
    for name in ("pyproject.toml", PROJECT["project"]["readme"], "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in set(FOLDERS.values()):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", *options, "-w", folder / "dist", folder],
        check=True,
    )
    (path,) = (folder / "dist").glob("*.whl")
    return path


def test_wheel_is_pure_and_holds_every_module_and_all_data(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    files = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    wanted = {"moequant/py.typed", "moequant/models/architectures.toml"}
    wanted.add("moequant/reporting/style.css")
    tables = ("rules", "kernels", "gpus", "attention", "merged", "classes", "act_fns")
    wanted |= {f"moequant/compatibility/{name}.toml" for name in tables}
    sources = [p for kind in ("cu", "cuh") for p in (ROOT / "kernels").rglob(f"*.{kind}")]
    wanted |= {f"moequant/{p.relative_to(ROOT).as_posix()}" for p in sources}
    wanted |= {f"moequant/recipes/{p.name}" for p in (ROOT / "recipes").glob("*.toml")}
    tunings = (ROOT / "kernels" / "sm90" / "tunings").glob("*.json")
    wanted |= {f"moequant/kernels/sm90/tunings/{p.name}" for p in tunings}
    for name, path in MODULES.items():
        tail = "/__init__.py" if path.name == "__init__.py" else ".py"
        wanted.add(name.replace(".", "/") + tail)
    assert files == wanted


def test_wheel_runs_from_elsewhere(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-m", "moequant", "recipes", "--json"],
        capture_output=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )
    assert len(json.loads(done.stdout)["recipes"]) == len(list((ROOT / "recipes").glob("*.toml")))
    where = python(
        "import json, moequant.cli; print(json.dumps([moequant.__file__, moequant.cli.__file__]))",
        PYTHONPATH=str(tmp_path / "site"),
    )
    assert all(path.startswith(str(tmp_path)) for path in where)


def test_a_checkout_that_hides_the_installed_package_says_so():
    """-S: as where the package is not installed from this checkout in editable mode."""
    command = [sys.executable, "-S", "-m", "moequant", "--version"]
    done = subprocess.run(command, capture_output=True, check=False, cwd=ROOT, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        f"Error: {ROOT / 'moequant'}: part of a checkout, which hides the installed package from "
        "`python -m moequant` in this folder; use the command `moequant`, or start Python in "
        "another folder\n"
    )
