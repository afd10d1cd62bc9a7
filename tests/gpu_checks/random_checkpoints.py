"""Write a model of random weights in several formats.

    random_checkpoints.py SHAPE LAYERS VOCABULARY PATH FORMAT... [--workers N]

makes PATH.FORMAT for each, and nothing else. A format that ends in _static has static scales of
activations. What is there already stays.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "shared"))

from static_scale import ONE_SCALE

STATIC = "_static"


def path_of(source, name):
    """Where a model is in a format."""
    return source.with_name(f"{source.name}.{name}")


def convert(source, name, *, workers):
    """Convert a model; whether it succeeded."""
    path = path_of(source, name)
    partial_path = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial_path, ignore_errors=True)
    command = [sys.executable, "-m", "moequant", "convert", str(source), str(partial_path)]
    command += ["--format", name.removesuffix(STATIC), "--workers", str(workers), "--quiet"]
    if name.endswith(STATIC):
        command += ["--activation-scales", str(ONE_SCALE)]
    if subprocess.run(command, check=False).returncode:
        return False
    partial_path.rename(path)
    return True


def write_source(shape, layers, vocabulary, path):
    """Write the model in BF16, with random numbers of the GPU if there is one."""
    import torch

    from moequant.benchmarks.random_models import random_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shutil.rmtree(path, ignore_errors=True)
    random_model(shape).resized(layers, vocabulary).write(path, device)


def parse(words):
    """What a command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape")
    parser.add_argument("layers", type=int)
    parser.add_argument("vocabulary", type=int)
    parser.add_argument("path", type=Path)
    parser.add_argument("formats", nargs="+")
    parser.add_argument("--workers", type=int, default=8, help="of all conversions together")
    return parser.parse_args(words)


def main():
    """See the head of this file."""
    given = parse(sys.argv[1:])
    absent = [name for name in given.formats if not path_of(given.path, name).exists()]
    if not absent:
        return
    given.path.parent.mkdir(parents=True, exist_ok=True)
    write_source(given.shape, given.layers, given.vocabulary, given.path)
    each = partial(convert, given.path, workers=max(1, given.workers // len(absent)))
    with ThreadPoolExecutor(len(absent)) as pool:
        done = list(pool.map(each, absent))
    shutil.rmtree(given.path)
    failed = [name for name, well in zip(absent, done, strict=True) if not well]
    if failed:
        sys.exit(f"not converted into {', '.join(failed)}")
    print(f"converted into {', '.join(absent)}")


if __name__ == "__main__":
    main()
