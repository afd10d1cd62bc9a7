from __future__ import annotations

import copy
import weakref

import pytest
import torch

from moequant.errors import UnsupportedError
from moequant.integrations import decoding
from moequant.integrations.decoding import decoder_of, decoding_of, use_static_cache
from moequant.integrations.generation import generate
from moequant.integrations.static_cache import cache_argument, static_cache, why_not_static
from moequant.integrations.transformers import load_model

MODELS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen2_moe", "olmoe", "deepseek_v2")
WINDOW = 6
"""Tokens of a sliding window: fewer than those of a prompt."""
GREEDY = {"do_sample": False, "max_new_tokens": 10}


@pytest.fixture
def padded():
    """[3, 11] prompts of 11, 8 and 3 tokens, padded on the left, and their mask."""
    ids = torch.randint(3, 96, (3, 11), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(11) >= torch.tensor([[0], [3], [8]])).long()
    return ids.masked_fill(mask == 0, 2), mask


@pytest.fixture
def graphs(monkeypatch):
    """Decode on a CPU as if it had CUDA graphs, and count captures.

    Of a graph there is the function, which is run again on the inputs it was captured with.
    """
    captures = []

    def capture(run, device):
        output = run()
        replays = []

        def replay():
            if replays:
                overwrite(output, run())
            replays.append(1)

        captures.append(replays)
        return replay, output

    monkeypatch.setattr(decoding, "capture_graph", capture)
    monkeypatch.setattr(decoding, "check_capturable", lambda model: None)
    return captures


def overwrite(old, new):
    """Write the tensors of a model's output over those of another, as a replay does."""
    for name in new if isinstance(new, dict) else range(len(new)):
        if isinstance(new[name], torch.Tensor):
            old[name].copy_(new[name])
        elif isinstance(new[name], tuple):
            overwrite(old[name], new[name])


def load(path, **options):
    """A model in float32: in BF16 sums in another order choose other tokens now and then."""
    return load_model(path, dtype=torch.float32, **options)


def with_graphs(model):
    """The model, whose `generate` takes any device for one that has graphs."""
    model._valid_auto_compile_criteria = lambda inputs, config: not config.disable_compile
    return model


def windowed(model):
    if getattr(model.config, "sliding_window", None) is not None:
        model.config.sliding_window = WINDOW
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_static_cache_decodes_what_transformers_does(converted, padded, name):
    ids, mask = padded
    path = converted(name, "mxfp4")
    eager = windowed(load(path, enforce_eager=True))
    static = windowed(load(path))
    assert (decoding_of(eager), decoding_of(static)) == ("dynamic_cache", "static_cache")
    wanted = eager.generate(ids, attention_mask=mask, eos_token_id=None, **GREEDY)
    assert wanted.shape == (3, 21)
    found = static.generate(ids, attention_mask=mask, eos_token_id=None, **GREEDY)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", MODELS)
def test_graphs_decode_what_transformers_does(converted, padded, graphs, name):
    ids, mask = padded
    path = converted(name, "mxfp4")
    wanted = windowed(load(path, enforce_eager=True)).generate(
        ids, attention_mask=mask, eos_token_id=None, **GREEDY
    )
    model = with_graphs(windowed(load(path)))
    found = model.generate(ids, attention_mask=mask, eos_token_id=None, **GREEDY)
    assert torch.equal(found, wanted)
    # Of ten tokens the first is of the prompt, the second not captured.
    assert [len(replays) for replays in graphs] == [8]


def test_sequences_end_one_by_one(converted, padded, graphs):
    ids, mask = padded
    path = converted("mixtral", "mxfp4")
    eager, model = load(path, enforce_eager=True), with_graphs(load(path))
    free = eager.generate(ids, attention_mask=mask, eos_token_id=None, **GREEDY)
    end = {"eos_token_id": free[0, 14].item(), "pad_token_id": 2}
    wanted = eager.generate(ids, attention_mask=mask, **end, **GREEDY)
    assert (wanted[0, 15:] == 2).all()
    assert torch.equal(model.generate(ids, attention_mask=mask, **end, **GREEDY), wanted)


def test_sampling_is_that_of_transformers(converted, padded, graphs):
    ids, mask = padded
    path = converted("mixtral", "mxfp4")
    drawn = []
    for model in (load(path, enforce_eager=True), with_graphs(load(path))):
        torch.manual_seed(5)
        drawn.append(
            model.generate(
                ids, attention_mask=mask, do_sample=True, temperature=3.0, top_k=20, top_p=0.9,
                repetition_penalty=1.2, max_new_tokens=10, eos_token_id=None,
            )
        )  # fmt: skip
    assert torch.equal(*drawn)


def test_every_step_returns_logits_of_its_own(converted, prompt, graphs):
    options = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
    path = converted("qwen3_moe", "mxfp4")
    found = with_graphs(load(path)).generate(prompt, eos_token_id=None, **options, **GREEDY)
    model = load(path)
    wanted = model.generate(prompt, eos_token_id=None, **options, **GREEDY)
    assert len(found.logits) == 10
    assert all(map(torch.equal, found.logits, wanted.logits))
    for ours, theirs in zip(found.hidden_states, wanted.hidden_states, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_beams_are_searched_without_graphs(converted, prompt, graphs):
    path = converted("mixtral", "mxfp4")
    options = {"num_beams": 3, "eos_token_id": None, **GREEDY}
    wanted = load(path, enforce_eager=True).generate(prompt, **options)
    assert torch.equal(with_graphs(load(path)).generate(prompt, **options), wanted)
    assert not graphs


def test_a_cache_that_is_reset_keeps_its_graphs(converted, prompt, graphs):
    model = with_graphs(load(converted("mixtral", "mxfp4")))
    cache = static_cache(model, 30)
    own = {cache_argument(): cache, "cache_implementation": None, "eos_token_id": None}
    first = model.generate(prompt, **own, **GREEDY)
    cache.reset()
    assert torch.equal(model.generate(prompt, **own, **GREEDY), first)
    assert [len(replays) for replays in graphs] == [17]
    cache.reorder_cache(torch.tensor([0, 1, 2]))  # as a beam search does: into other tensors
    cache.reset()
    assert torch.equal(model.generate(prompt, **own, **GREEDY), first)
    assert len(graphs) == 2


def test_moved_weights_are_captured_again(converted, prompt, graphs):
    model = with_graphs(load(converted("mixtral", "mxfp4")))
    cache = static_cache(model, 30)
    own = {cache_argument(): cache, "cache_implementation": None, "eos_token_id": None}
    first = model.generate(prompt, **own, **GREEDY)
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.clone()
    cache.reset()
    assert torch.equal(model.generate(prompt, **own, **GREEDY), first)
    assert len(graphs) == 2


CHANGES = {
    "activations": lambda fused: setattr(fused, "activations", "fp8_token"),
    "backend": lambda fused: setattr(fused, "backend", "naive_batched"),
    "max_tokens": lambda fused: setattr(fused, "max_tokens", 2),
    "written": lambda fused: fused.w13_scale.copy_(fused.w13_scale.clone()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_experts_that_run_in_another_way_are_captured_again(converted, prompt, graphs, change):
    model = with_graphs(load(converted("mixtral", "mxfp4")))
    cache = static_cache(model, 30)
    own = {cache_argument(): cache, "cache_implementation": None, "eos_token_id": None}
    model.generate(prompt, **own, **GREEDY)
    fused = model.model.layers[1].mlp.experts.fused
    before = weakref.ref(fused.packed())
    CHANGES[change](fused)
    cache.reset()
    found = model.generate(prompt, **own, **GREEDY)
    assert torch.equal(found, model.generate(prompt, disable_compile=True, **GREEDY))
    assert [len(replays) for replays in graphs] == [8, 8]
    # What was captured holds nothing that was replaced.
    assert (before() is None) == (change in ("written", "backend"))
    cache.reset()
    model.generate(prompt, **own, **GREEDY)
    assert [len(replays) for replays in graphs] == [8, 17]


def test_a_cache_does_not_keep_experts_that_were_moved_away(converted, prompt, graphs):
    model = with_graphs(load(converted("mixtral", "mxfp4")))
    cache = static_cache(model, 30)
    model.generate(prompt, **{cache_argument(): cache}, cache_implementation=None, **GREEDY)
    fused = model.model.layers[0].mlp.experts.fused
    before = weakref.ref(fused.packed())
    model.to("meta")
    assert before() is None
    assert decoder_of(model)._steps


def test_the_cache_is_given_by_the_name_that_this_transformers_has(converted, prompt, graphs):
    """Another is one that warns, or none: warnings are errors in tests."""
    from transformers import __version__

    new = tuple(map(int, __version__.split(".")[:2])) >= (5, 24)
    assert cache_argument() == ("cache" if new else "past_key_values")
    model = load(converted("mixtral", "mxfp4"))
    wanted = generate(model, prompt[0].tolist(), max_new_tokens=4).ids
    assert generate(with_graphs(model), prompt[0].tolist(), max_new_tokens=4).ids == wanted
    assert graphs


def test_graphs_live_as_long_as_their_cache(converted, prompt, graphs, monkeypatch):
    # A graph does not hold what it was captured from.
    monkeypatch.setattr(decoding, "capture_graph", lambda run, device: (lambda: None, run()))
    model = with_graphs(load(converted("mixtral", "mxfp4")))
    cache = static_cache(model, 30)
    model.generate(prompt, **{cache_argument(): cache}, cache_implementation=None, **GREEDY)
    kept = decoder_of(model)._steps
    assert len(kept) == 1
    del cache
    assert len(kept) == 0


def test_transformers_own_switch_decodes_without_graphs(converted, prompt, graphs):
    model = with_graphs(load(converted("mixtral", "mxfp4")))
    model.generate(prompt, disable_compile=True, **GREEDY)
    assert not graphs


def test_a_cache_that_is_too_small_is_refused(converted, prompt, graphs):
    model = with_graphs(load(converted("mixtral", "mxfp4")))
    cache = static_cache(model, 15)
    with pytest.raises(UnsupportedError, match="has room for 15 tokens, but there are 16"):
        model.generate(
            prompt,
            **{cache_argument(): cache},
            cache_implementation=None,
            eos_token_id=None,
            **GREEDY,
        )


def test_a_cache_that_counts_on_the_host_is_refused(converted, prompt, graphs):
    """transformers' own static cache of sliding windows."""
    from transformers import StaticCache

    model = with_graphs(windowed(load(converted("gpt_oss", "mxfp4"))))
    cache = StaticCache(model.config, max_cache_len=30)
    with pytest.raises(UnsupportedError, match=r"changes cumulative_length_int on the host.*eager"):
        model.generate(prompt, **{cache_argument(): cache}, cache_implementation=None, **GREEDY)


def test_a_step_that_cannot_be_captured_is_refused(converted, prompt, monkeypatch):
    def capture(run, device):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(decoding, "capture_graph", capture)
    model = with_graphs(load(converted("mixtral", "mxfp4")))
    # The reference reads ids on the host, which is known before anything is captured.
    with pytest.raises(UnsupportedError, match="'torch_reference' of the experts waits"):
        model.generate(prompt, eos_token_id=None, **GREEDY)
    monkeypatch.setattr(decoding, "check_capturable", lambda model: None)
    with pytest.raises(UnsupportedError, match=r"stream is capturing\); .*--enforce-eager"):
        model.generate(prompt, eos_token_id=None, **GREEDY)


def test_a_copy_of_a_model_decodes_with_its_own_weights(converted, prompt, graphs):
    model = with_graphs(load(converted("mixtral", "mxfp4")))
    wanted = model.generate(prompt, eos_token_id=None, **GREEDY)
    copied = copy.deepcopy(model)
    assert decoder_of(copied)._get_model() is copied
    assert decoder_of(model)._get_model() is model
    with torch.no_grad():
        copied.lm_head.weight.neg_()
    assert not torch.equal(copied.generate(prompt, eos_token_id=None, **GREEDY), wanted)
    assert torch.equal(model.generate(prompt, eos_token_id=None, **GREEDY), wanted)


def test_a_model_that_was_built_elsewhere_takes_a_static_cache_too(decoded, prompt):
    model = decoded("mixtral", "mxfp4", torch.float32)
    assert decoding_of(model) == "dynamic_cache"
    wanted = model.generate(prompt, **GREEDY)
    use_static_cache(model)
    assert decoding_of(model) == "static_cache"
    assert torch.equal(model.generate(prompt, **GREEDY), wanted)


def test_a_prompt_is_continued_in_one_cache_twice(converted, graphs):
    """`generate` here gives a cache of its own, large enough for a warm-up as well."""
    path = converted("gpt_oss", "mxfp4")
    found = generate(with_graphs(load(path)), [5, 6, 7], max_new_tokens=8)
    assert (found.decoding, found.warm_up_s) == ("static_cache", None)
    assert found.ids == generate(load(path, enforce_eager=True), [5, 6, 7],
                                 max_new_tokens=8).ids  # fmt: skip
    assert len(graphs) == 1


def test_models_without_a_static_cache_say_why(monkeypatch, converted):
    model = load(converted("mixtral", "mxfp4"), enforce_eager=True)
    assert why_not_static(model) is None
    model.config.layer_types = ["full_attention", "no_such_kind"]
    assert "no static cache for layers of type 'no_such_kind'" in why_not_static(model)
    with pytest.raises(UnsupportedError, match="MixtralForCausalLM has no static cache"):
        use_static_cache(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("format", ["fp8_block", "mxfp4", "w4a8"])
@pytest.mark.parametrize("name", MODELS)
def test_cuda_graphs_compute_what_the_same_steps_do_without(converted, padded, name, format):
    """The same kernels on the same memory: a cache of the same size, with graphs and without."""
    ids, mask = (tensor.cuda() for tensor in padded)
    model = windowed(load_model(converted(name, format), device="cuda"))
    assert decoding_of(model) == "cuda_graphs"
    options = {
        **GREEDY, "max_new_tokens": 40, "attention_mask": mask, "eos_token_id": None,
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    wanted = model.generate(ids, disable_compile=True, **options)
    found = model.generate(ids, **options)
    assert torch.equal(found.sequences, wanted.sequences)
    for ours, theirs in zip(found.logits, wanted.logits, strict=True):
        # A GEMM may be split otherwise where the workspace is the graph's, and rounds to BF16, by
        # 2**-9, once more: in ten GEMMs of two layers each, sqrt(20) * 2**-9 < 2**-6.
        assert (ours - theirs).norm() <= 2**-6 * theirs.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_are_replayed_over_calls_and_freed(converted):
    model = load_model(converted("qwen3_moe", "fp8_block"), device="cuda")
    first = generate(model, [5, 6, 7], max_new_tokens=32)
    assert first.decoding == "cuda_graphs"
    assert first.warm_up_s > 0
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        assert generate(model, [5, 6, 7], max_new_tokens=32).ids == first.ids
    assert torch.cuda.memory_allocated() <= before
    assert not decoder_of(model)._steps


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_backend_that_waits_for_the_device_is_refused(converted, prompt):
    model = load_model(converted("mixtral", "mxfp4"), device="cuda", backend="torch_reference")
    with pytest.raises(UnsupportedError, match="waits for the device"):
        model.generate(prompt.cuda(), eos_token_id=None, **GREEDY)
    plain = load_model(
        converted("mixtral", "mxfp4"), device="cuda", backend="torch_reference", enforce_eager=True
    )
    assert plain.generate(prompt.cuda(), eos_token_id=None, **GREEDY).shape == (3, 21)
