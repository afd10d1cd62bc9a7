"""Small checkpoints on disk, laid out as released models are, written with safetensors alone."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

# Folders of tests are no packages: what several of them use is imported from there by name.
sys.path.append(str(Path(__file__).parent / "shared"))

# Tests run in parallel; OpenMP threads of several processes on few cores would wait for each other.
torch.set_num_threads(1)

# Triton decides when it is imported, which other packages do too, whether kernels run in Python.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

HEAD_DIM = 64
SIDECARS = {
    "tokenizer.json": {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}},
    "generation_config.json": {"do_sample": True, "temperature": 0.6},
}


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ]
)
def device(request):
    """Each test runs on a CPU, and on a GPU if there is one."""
    return request.param


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory):
    """make_checkpoint(**sizes): the folder of a source checkpoint; see `write_checkpoint`.

    Equal arguments give the same folder, which tests leave as it is. A test that changes files
    gives `path`, or copies the folder.
    """
    made = {}

    def make(path=None, **sizes):
        if path is not None:
            return write_checkpoint(path, **sizes)
        key = repr(sorted(sizes.items()))
        if key not in made:
            made[key] = write_checkpoint(tmp_path_factory.mktemp("source"), **sizes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def scale_file(tmp_path_factory):
    """A file of static scales of activations, all different, for `make_checkpoint()`."""
    path = tmp_path_factory.mktemp("scales") / "scales.safetensors"
    modules = [
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"
        for layer in range(2)
        for expert in range(4)
        for projection in ("gate", "up", "down")
    ]
    scales = {f"{m}.input_scale": torch.tensor(0.01 + 0.001 * i) for i, m in enumerate(modules)}
    save_file(scales, path)
    return path


@pytest.fixture(scope="session")
def put_no_file():
    """put_no_file(path, kind): put there a "pipe", a "folder" or a "link to itself"."""

    def put(path, kind):
        if kind == "pipe":
            os.mkfifo(path)  # whoever opens it waits for ever
        elif kind == "folder":
            path.mkdir()
        else:
            assert kind == "link to itself"
            path.symlink_to(path.name)

    return put


def _flip(position):
    def flip(file, _):
        content = bytearray(file.read_bytes())
        content[position if position >= 0 else len(content) + position] ^= 1
        file.write_bytes(content)

    return flip


def _swap(file, other):
    beside = file.with_suffix(".swap")
    file.rename(beside)
    other.rename(file)
    beside.rename(other)


_DAMAGES = {
    "first bit": _flip(0),
    "a bit of the data": _flip(-1000),
    "last bit": _flip(-1),
    "a byte less": lambda file, _: file.write_bytes(file.read_bytes()[:-1]),
    "a byte more": lambda file, _: file.write_bytes(file.read_bytes() + b"\0"),
    "zeros": lambda file, _: file.write_bytes(bytes(file.stat().st_size)),
    "no content": lambda file, _: file.write_bytes(b""),
    "not there": lambda file, _: file.unlink(),
    "swapped": _swap,
}


@pytest.fixture(params=_DAMAGES.values(), ids=_DAMAGES)
def damage(request):
    """damage(files): the first of these, at least two, is not what was written any more.

    Returns how many of them are not.
    """

    def damage(files):
        request.param(files[0], files[1])
        return 2 if request.param is _swap else 1

    return damage


@pytest.fixture
def forbid(monkeypatch):
    """forbid(folder): it can be neither listed nor searched, as one of another user with mode 0700.

    Modes would not do: they do not bind root.
    """
    forbidden = []

    def refusing(name, *, what):
        function = getattr(Path, name)

        def wrapped(path, *arguments, **options):
            if any(folder in what(path.absolute()) for folder in forbidden):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return function(path, *arguments, **options)

        monkeypatch.setattr(Path, name, wrapped)

    refusing("stat", what=lambda path: path.parents)
    refusing("iterdir", what=lambda path: (path, *path.parents))
    return forbidden.append


@pytest.fixture(scope="session")
def statistics_record():
    """statistics_record(**fields): what statistics say of themselves, of no model in particular."""
    return _statistics_record


def _statistics_record(*, layers=(0,), hessian=False, **changed):
    from moequant.statistics import DataRecord, StatisticsRecord
    from moequant.statistics.record import digest_names

    data = DataRecord(
        sha256="0" * 64,
        file_sha256="1" * 64,
        windows=1,
        tokens=100,
        window_tokens=512,
        samples=1,
        chat_template=False,
    )
    fields = {
        "moequant": "0.1",
        "source": {},
        "model_type": "any",
        "architecture": "any",
        "experts": 4,
        "top_k": 2,
        "hidden": 32,
        "intermediate": 16,
        "layers": layers,
        "prior_tokens": 8,
        "hessian": hessian,
        "data": data,
        "run": {},
        "digests": dict.fromkeys(digest_names(layers, hessian=hessian), "0" * 64),
    }
    return StatisticsRecord(**fields | changed)


@pytest.fixture(scope="session")
def measure():
    """measure(checkpoint, path, *, seed=0, hessian=False, amax=None, **record); see below."""
    return _measure


def _measure(checkpoint_path, path, *, seed=0, hessian=False, amax=None, **changed):
    """Statistics as of a calibration of a checkpoint, of random inputs, and where they are.

    Expert 0 saw nothing, expert 1 thirty tokens, expert 2 sixty, and so on. Mean squares of
    channels lie orders of magnitude apart, and channels depend on each other. `changed` are fields
    of the record; `amax(layer, input)` gives the largest magnitudes, [E] float32.
    """
    from moequant.conversion.source_identity import source_digests
    from moequant.statistics import LayerSums, StatisticsWriter
    from moequant.storage.checkpoint import Checkpoint
    from moequant.weights.source_model import read_source, source_config

    checkpoint = Checkpoint.open(checkpoint_path)
    model = read_source(checkpoint.tensors, source_config(checkpoint)).model
    moe, generator = model.moe, torch.Generator().manual_seed(seed)
    fields = {
        "layers": tuple(moe.sparse_layers),
        "hessian": hessian,
        "source": source_digests(checkpoint, ()),
        "architecture": model.architecture.name,
        "experts": moe.experts,
        "hidden": moe.hidden,
        "intermediate": moe.intermediate,
    }
    record, digests = _statistics_record(**fields | changed), {}
    with StatisticsWriter(path.with_suffix(".partial"), record) as writer:
        for layer in record.layers:
            tokens = torch.arange(record.experts) * 30
            inputs = {
                name: _random_input(writer, layer, name, tokens, generator, amax)
                for name in ("hidden", "intermediate")
            }
            sums = LayerSums(tokens=tokens, inputs=inputs)
            digests[str(layer)] = writer.write_layer(layer, sums.to_tensors(layer))
            if hessian:
                digests[f"{layer}.second_moments"] = writer.digest_moments(layer)
        writer.finish(path, digests)
    return path


def _random_input(writer, layer, name, tokens, generator, amax):
    """Sums of one input of a layer; second moments are written, if the record has them."""
    from moequant.statistics import InputSums

    E, K = len(tokens), writer.record.channels(name)
    size = torch.rand(E, K, generator=generator, dtype=torch.float64) ** 3
    mixing = torch.randn(K, K, generator=generator, dtype=torch.float64) / K**0.5
    square_sum, total = torch.zeros(E, K, dtype=torch.float64), torch.zeros(K, K)
    for expert, count in enumerate(tokens.tolist()):
        x = torch.randn(count, K, generator=generator, dtype=torch.float64) @ mixing * size[expert]
        square_sum[expert] = x.square().sum(0)
        if writer.record.hessian:
            moment = (x.T @ x / max(count, 1)).float()
            moment = torch.triu(moment) + torch.triu(moment, 1).T
            writer.write_rows(f"layers.{layer}.{name}.second_moment", expert, moment[None])
            total += moment * count
    if writer.record.hessian and name == "hidden":
        pooled = total / max(int(tokens.sum()), 1)
        writer.write_rows(f"layers.{layer}.hidden.pooled_second_moment", 0, pooled)
    magnitudes = torch.ones(E) if amax is None else amax(layer, name)
    return InputSums(square_sum=square_sum, amax=magnitudes)


def write_checkpoint(
    path,
    *,
    model_type="qwen3_moe",
    layers=2,
    experts=4,
    top_k=2,
    hidden=256,
    intermediate=256,
    vocabulary=128,
    dtype=torch.bfloat16,
    shard_bytes=1_000_000,
    seed=0,
    config=None,
    far_apart=(),
):
    """Write a checkpoint, about 5 MB by default, into `path`, and return that.

    `model_type` is qwen3_moe, mixtral, gpt_oss, or deepseek_v3: that with one dense layer first,
    shared experts and a multi-token-prediction layer. Matrices are N(0, 0.02) with two large
    columns. Shards are cut wherever they are full, so that an expert may straddle two. `config` is
    merged into config.json. Matrices that `far_apart` names have 32 columns of a row that are
    2**-20 times what they were.
    """
    sizes = {"layers": layers, "experts": experts, "hidden": hidden, "intermediate": intermediate}
    fields, shapes = _ARCHITECTURES[model_type](**sizes)
    fields = {
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": hidden // HEAD_DIM,
        "num_experts_per_tok": top_k,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **fields,
        **(config or {}),
    }
    shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        **shapes,
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    _save_weights(path, shapes, dtype, shard_bytes, generator, far_apart)
    for name, content in {"config.json": fields, **SIDECARS}.items():
        (path / name).write_text(json.dumps(content, indent=2))
    return path


def _random(name, shape, dtype, generator):
    w = torch.randn(shape, generator=generator) * 0.02
    if w.ndim > 1:
        w[:, :2] *= 12
    elif not _is_correction(name):
        w += 1
    return w.to(_dtype(name, dtype))


def _is_correction(name):
    return name.endswith("e_score_correction_bias")


def _dtype(name, dtype):
    return torch.float32 if _is_correction(name) else dtype


def _save_weights(path, shapes, dtype, shard_bytes, generator, far_apart):
    """One shard is in memory at a time."""
    sizes = {n: math.prod(s) * _dtype(n, dtype).itemsize for n, s in shapes.items()}
    shards = [[]]
    for name, size in sizes.items():
        if sum(sizes[n] for n in shards[-1]) + size > shard_bytes:
            shards.append([])
        shards[-1].append(name)
    weight_map = {}
    for i, names in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        weights = {name: _random(name, shapes[name], dtype, generator) for name in names}
        for name in weights.keys() & set(far_apart):
            weights[name][5, 64:96] *= 2.0**-20
        save_file(weights, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _qwen3_moe(*, layers, experts, hidden, intermediate):
    fields = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": HEAD_DIM,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": intermediate,
        "num_experts": experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    shapes = {}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= _attention(at, hidden)
        shapes |= {f"{at}.self_attn.{n}_norm.weight": (HEAD_DIM,) for n in "qk"}
        shapes[f"{at}.mlp.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            shapes |= _mlp(f"{at}.mlp.experts.{expert}", hidden, intermediate)
        shapes |= _norms(at, hidden)
    return fields, shapes


def _mixtral(*, layers, experts, hidden, intermediate):
    fields = {
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": intermediate,
        "num_local_experts": experts,
    }
    shapes = {}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= _attention(at, hidden)
        shapes[f"{at}.block_sparse_moe.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            module = f"{at}.block_sparse_moe.experts.{expert}"
            shapes |= _mlp(module, hidden, intermediate, ("w1", "w3", "w2"))
        shapes |= _norms(at, hidden)
    return fields, shapes


def _deepseek_v3(*, layers, experts, hidden, intermediate):
    rope_dim = kv_rank = 64
    fields = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": intermediate,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "q_lora_rank": None,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": HEAD_DIM,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": HEAD_DIM,
    }
    heads = hidden // HEAD_DIM
    shapes = {}
    for layer in range(layers + 1):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (heads * (HEAD_DIM + rope_dim), hidden),
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope_dim, hidden),
            f"{at}.self_attn.kv_a_layernorm.weight": (kv_rank,),
            f"{at}.self_attn.kv_b_proj.weight": (heads * 2 * HEAD_DIM, kv_rank),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * HEAD_DIM),
        }
        if layer == 0:
            shapes |= _mlp(f"{at}.mlp", hidden, 3 * hidden)
        else:
            shapes[f"{at}.mlp.gate.weight"] = (experts, hidden)
            shapes[f"{at}.mlp.gate.e_score_correction_bias"] = (experts,)
            for expert in range(experts):
                shapes |= _mlp(f"{at}.mlp.experts.{expert}", hidden, intermediate)
            shapes |= _mlp(f"{at}.mlp.shared_experts", hidden, intermediate)
        shapes |= _norms(at, hidden)
    # Multi-token prediction: the layer behind the last, and what joins it to the model.
    at = f"model.layers.{layers}"
    shapes |= {f"{at}.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{at}.eh_proj.weight"] = (hidden, 2 * hidden)
    return fields, shapes


def _gpt_oss(*, layers, experts, hidden, intermediate):
    fields = {
        "architectures": ["GptOssForCausalLM"],
        "head_dim": HEAD_DIM,
        "intermediate_size": intermediate,
        "num_local_experts": experts,
        "swiglu_limit": 7.0,
    }
    shapes = {}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= _attention(at, hidden)
        shapes |= {
            f"{at}.mlp.router.weight": (experts, hidden),
            f"{at}.mlp.router.bias": (experts,),
            f"{at}.mlp.experts.gate_up_proj": (experts, hidden, 2 * intermediate),
            f"{at}.mlp.experts.gate_up_proj_bias": (experts, 2 * intermediate),
            f"{at}.mlp.experts.down_proj": (experts, intermediate, hidden),
            f"{at}.mlp.experts.down_proj_bias": (experts, hidden),
        }
        shapes |= _norms(at, hidden)
    return fields, shapes


_ARCHITECTURES = {
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}


def _attention(at, hidden):
    return {f"{at}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}


def _mlp(module, hidden, intermediate, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = (f"{module}.{name}.weight" for name in names)
    return {gate: (intermediate, hidden), up: (intermediate, hidden), down: (hidden, intermediate)}


def _norms(at, hidden):
    names = ("input_layernorm", "post_attention_layernorm")
    return {f"{at}.{name}.weight": (hidden,) for name in names}
