"""The file of statistics: what is written is read, and nothing else is accepted."""

from __future__ import annotations

import functools
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from moequant.errors import MoequantError, StatisticsError
from moequant.statistics import (
    InputSums,
    LayerSums,
    Statistics,
    StatisticsWriter,
)
from moequant.storage.headers import encode_header, read_header

E, H, I = 4, 32, 16
LAYERS = (1, 3)
PRIOR = 8
TOKENS = torch.tensor([0, 3, 1000, 40])


@pytest.fixture
def record(statistics_record):
    """record(*, hessian=False): of layers of E experts of H and I."""
    return functools.partial(
        statistics_record,
        architecture="qwen3_moe",
        experts=E,
        hidden=H,
        intermediate=I,
        layers=LAYERS,
        prior_tokens=PRIOR,
    )


def sums(seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for name, K in (("hidden", H), ("intermediate", I)):
        mean = torch.rand(E, K, generator=generator, dtype=torch.float64) + 0.1
        seen = TOKENS > 0
        inputs[name] = InputSums(
            square_sum=mean * TOKENS[:, None],
            amax=(4 * mean.amax(1)).float() * seen,
        )
    return LayerSums(tokens=TOKENS, inputs=inputs)


def moment(layer, name, expert):
    K = H if name == "hidden" else I
    x = torch.randn(7, K, generator=torch.Generator().manual_seed(layer * 100 + expert))
    return x.T @ x / 7


def pooled_moment(layer):
    return sum(moment(layer, "hidden", e) for e in range(E)) / E


@pytest.fixture
def write(record):
    """write(folder, *, hessian=False, layers=LAYERS): a file of statistics."""
    return functools.partial(_write, record)


def _write(record, folder, *, hessian=False, layers=LAYERS):
    path = folder / "stats.safetensors"
    digests = {}
    with StatisticsWriter(folder / "partial", record(hessian=hessian)) as writer:
        for layer in layers:
            digests[str(layer)] = writer.write_layer(layer, sums(layer).to_tensors(layer))
            if hessian:
                for name in ("hidden", "intermediate"):
                    for e in range(E):
                        moments = moment(layer, name, e)[None]
                        writer.write_rows(f"layers.{layer}.{name}.second_moment", e, moments)
                name = f"layers.{layer}.hidden.pooled_second_moment"
                writer.write_rows(name, 0, pooled_moment(layer))
                digests[f"{layer}.second_moments"] = writer.digest_moments(layer)
        if layers == LAYERS:
            writer.finish(path, digests)
    return path


@pytest.fixture
def path(tmp_path, write):
    return write(tmp_path)


def test_measured_values_are_those_that_were_written(path):
    found = Statistics.load(path)
    assert (found.layers, found.has_hessian) == (LAYERS, False)
    for layer in LAYERS:
        for projection, name in (("gate", "hidden"), ("up", "hidden"), ("down", "intermediate")):
            own = sums(layer).inputs[name]
            for e in range(E):
                assert found.tokens(layer, e) == TOKENS[e]
                mean = found.input_mean_square(layer, e, projection, measured=True)
                assert torch.equal(mean, (own.square_sum[e] / max(int(TOKENS[e]), 1)).float())
                assert found.amax(layer, e, projection, measured=True) == own.amax[e]


def test_an_expert_without_tokens_gets_what_its_layer_has(path):
    found = Statistics.load(path)
    hidden, intermediate = (sums(1).inputs[n] for n in ("hidden", "intermediate"))
    pooled = hidden.square_sum.sum(0) / TOKENS.sum()
    assert torch.equal(found.input_mean_square(1, 0, "up"), pooled.float())
    # Neurons of one expert are not those of another: only their scale is shared.
    flat = intermediate.square_sum.sum() / TOKENS.sum() / I
    assert torch.allclose(found.input_mean_square(1, 0, "down"), flat.float().expand(I))
    assert len(found.input_mean_square(1, 0, "down").unique()) == 1
    assert found.amax(1, 0, "gate") == hidden.amax.max()


@pytest.mark.parametrize(("expert", "seen"), [(1, 3), (2, 1000), (3, 40)])
def test_others_are_drawn_to_it_by_the_tokens_they_saw(path, expert, seen):
    found = Statistics.load(path)
    own = found.input_mean_square(3, expert, "gate", measured=True).double()
    pooled = found.input_mean_square(3, 0, "gate").double()
    wanted = (seen * own + PRIOR * pooled) / (seen + PRIOR)
    assert torch.equal(found.input_mean_square(3, expert, "gate"), wanted.float())
    amax, most = found.amax(3, expert, "down", measured=True), found.amax(3, 0, "down")
    wanted = torch.tensor((seen * amax + PRIOR * most) / (seen + PRIOR)).float()
    assert found.amax(3, expert, "down") == wanted


def test_second_moments_are_shrunk_like_mean_squares(tmp_path, write):
    found = Statistics.load(write(tmp_path, hessian=True))
    for layer in LAYERS:
        found.check_hessians(layer)
        own, pooled = moment(layer, "hidden", 1).double(), pooled_moment(layer).double()
        assert torch.equal(found.hessian(layer, 1, "up", measured=True), own.float())
        wanted = (3 * own + PRIOR * pooled) / (3 + PRIOR)
        assert torch.equal(found.hessian(layer, 1, "gate"), wanted.float())
        assert torch.equal(found.hessian(layer, 0, "gate"), pooled.float())
        flat = found.input_mean_square(layer, 0, "down")
        assert torch.equal(found.hessian(layer, 0, "down"), torch.diag(flat))


def test_without_second_moments_a_hessian_is_refused(path):
    with pytest.raises(StatisticsError, match="without Hessians; run `moequant calibrate"):
        Statistics.load(path).hessian(1, 0, "down")


def test_safetensors_reads_the_file(path):
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("layers.3.tokens"), TOKENS)
        assert json.loads(file.metadata()["moequant.statistics"])["experts"] == E


def test_equal_statistics_have_one_digest_and_others_another(tmp_path, write):
    digests = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        digests.add(Statistics.load(write(tmp_path / name)).digest)
    assert len(digests) == 1
    (tmp_path / "c").mkdir()
    assert Statistics.load(write(tmp_path / "c", hessian=True)).digest not in digests


def test_an_object_can_be_pickled_and_keeps_few_layers(path):
    found = Statistics.load(path)
    for _ in range(3):
        for layer in LAYERS:
            found.tokens(layer, 0)
    assert len(found._layers) <= 2
    again = pickle.loads(pickle.dumps(found))  # noqa: S301 - our own
    assert again.digest == found.digest
    assert again.tokens(3, 2) == 1000


@pytest.mark.parametrize("content", ['{"architectures": ["Qwen3MoeForCausalLM"]}', "hi"])
def test_a_file_of_something_else_is_refused_without_advice_about_checkpoints(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    said = r"config\.json: .*; no file of statistics, or a damaged one: give the file that"
    with pytest.raises(StatisticsError, match=said) as caught:
        Statistics.load(tmp_path / "config.json")
    assert "fetch the file again" not in str(caught.value)


def test_an_unfinished_file_is_refused_and_can_be_continued(tmp_path, record, write):
    write(tmp_path, layers=(1,))
    partial = tmp_path / "partial"
    with pytest.raises(StatisticsError, match="give the file that `moequant calibrate` wrote"):
        Statistics.load(partial)
    tensors, unfinished = sums(1).to_tensors(1), partial.read_bytes()
    with StatisticsWriter(tmp_path / "other", record()) as writer:
        finished = {"1": writer.write_layer(1, tensors)}
    with StatisticsWriter(partial, record(), finished):
        pass
    assert partial.read_bytes() == unfinished
    # Without anything finished it is written anew.
    with StatisticsWriter(partial, record()) as writer:
        assert partial.read_bytes() == bytes(writer.size_bytes)
    with pytest.raises(MoequantError, match=r"partial: layer 1 has SHA-256 .*it was damaged"):
        StatisticsWriter(partial, record(), finished)
    with pytest.raises(MoequantError, match=r"partial: \d+ bytes, but \d+ were written"):
        StatisticsWriter(partial, record(hessian=True), finished)
    partial.unlink()
    with pytest.raises(MoequantError, match=r"partial: cannot be opened: No such file"):
        StatisticsWriter(partial, record(), finished)
    assert not partial.exists()


@pytest.mark.parametrize("name", ["tokens", "intermediate.mean_square"])
def test_a_changed_byte_is_found(path, name):
    info = read_header(path, path.name)[f"layers.3.{name}"]
    data = bytearray(path.read_bytes())
    data[info.start] ^= 1
    path.write_bytes(data)
    found = Statistics.load(path)
    assert found.tokens(1, 1) == 3
    with pytest.raises(StatisticsError, match="layer 3 was damaged"):
        found.tokens(3, 1)


def test_a_file_that_is_cut_after_it_was_opened_is_an_error_of_statistics(tmp_path, write):
    path = write(tmp_path, hessian=True)
    found = Statistics.load(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StatisticsError, match=r"stats\.safetensors"):
        found.check_hessians(3)


def test_a_changed_byte_of_second_moments_is_found(tmp_path, write):
    path = write(tmp_path, hessian=True)
    info = read_header(path, path.name)["layers.3.hidden.second_moment"]
    data = bytearray(path.read_bytes())
    data[info.stop - 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(StatisticsError, match="layer 3 was damaged"):
        Statistics.load(path).check_hessians(3)


def test_a_shorter_file_is_refused(path):
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StatisticsError, match="truncated"):
        Statistics.load(path)


def rewrite(path, document, keep=None):
    """Write the file again with another record, or with some of its tensors."""
    infos = [i for i in read_header(path, path.name).values() if keep is None or keep(i.name)]
    data, placed, start = path.read_bytes(), [], 0
    for i in infos:
        placed.append((i.name, i.dtype, i.shape, start, start + i.size_bytes))
        start += i.size_bytes
    header = encode_header(placed, {"moequant.statistics": json.dumps(document)})
    path.write_bytes(header + b"".join(data[i.start : i.stop] for i in infos))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 5}, r"tensor 'layers.1.hidden.amax' is \('F32', \(4,\)\)"),
        ({"experts": "4"}, "experts: "),
        ({"layers": [3, 1]}, "layers must be sorted"),
        ({"layers": [1]}, "digests must be those of the layers"),
        ({"hessian": True}, "digests must be those of the layers"),
        ({"schema_version": 2}, "schema_version: .*another version of moequant"),
        ({"prior_tokens": 0}, "prior_tokens: "),
        ({"more": 1}, "more: "),
    ],
)
def test_a_record_that_does_not_fit_is_refused(path, change, message):
    with safe_open(path, "pt") as file:
        document = json.loads(file.metadata()["moequant.statistics"])
    rewrite(path, document | change)
    with pytest.raises(StatisticsError, match=message):
        Statistics.load(path)


def test_a_missing_tensor_is_refused(path):
    with safe_open(path, "pt") as file:
        document = json.loads(file.metadata()["moequant.statistics"])
    rewrite(path, document, keep=lambda name: name != "layers.3.tokens")
    with pytest.raises(StatisticsError, match=r"'layers\.3\.tokens' is missing"):
        Statistics.load(path)


def test_a_checkpoint_is_no_statistics(tmp_path, make_checkpoint):
    (shard, *_) = make_checkpoint().glob("*.safetensors")
    with pytest.raises(StatisticsError, match="so these are no statistics"):
        Statistics.load(shard)
    with pytest.raises(StatisticsError, match="No such file"):
        Statistics.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("layer", "expert", "message"),
    [(2, 0, "nothing of layer 2"), (1, E, "nothing of expert 4"), (1, -1, "nothing of expert -1")],
)
def test_what_is_not_there_is_refused(path, layer, expert, message):
    with pytest.raises(StatisticsError, match=message):
        Statistics.load(path).input_mean_square(layer, expert, "up")


def model(**changed):
    sizes = {"experts": E, "hidden": H, "intermediate": I, "sparse_layers": LAYERS}
    names = {"name": "qwen3_moe"} | {k: v for k, v in changed.items() if k == "name"}
    moe = SimpleNamespace(**sizes | {k: v for k, v in changed.items() if k != "name"})
    return SimpleNamespace(moe=moe, architecture=SimpleNamespace(**names))


def test_statistics_fit_a_model_of_their_sizes(path):
    Statistics.load(path).check_fits(model())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "mixtral"}, "architecture qwen3_moe, but this one has mixtral"),
        ({"experts": 8}, "experts 4, but this one has 8"),
        ({"hidden": 64}, "hidden size 32"),
        ({"intermediate": 64}, "intermediate size 16"),
        ({"sparse_layers": (0, 1, 3)}, "nothing of layer 0"),
    ],
)
def test_statistics_of_another_model_are_refused(path, change, message):
    with pytest.raises(StatisticsError, match=message):
        Statistics.load(path).check_fits(model(**change))


def test_nan_is_refused_where_it_is_written(tmp_path, record):
    measured = sums(1).to_tensors(1)
    measured["layers.1.hidden.amax"][2] = float("nan")
    with (
        StatisticsWriter(tmp_path / "partial", record()) as writer,
        pytest.raises(StatisticsError, match=r"layers.1.hidden.amax: holds NaN"),
    ):
        writer.write_layer(1, measured)
