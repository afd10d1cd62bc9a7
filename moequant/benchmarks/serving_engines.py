"""The engines that `moequant bench serve` compares, each run in a process of its own.

vllm               vLLM by itself
vllm+moequant      vLLM with the plug-in, `quantization="moequant"`
transformers       transformers by itself, as `from_pretrained` loads the checkpoint
moequant           `load_model`: transformers' model with our experts, static cache and CUDA graphs
moequant+compile   the same, with steps of decoding by torch.compile
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from moequant.benchmarks.device_profile import DeviceProfile, profile_call
from moequant.benchmarks.serving_setup import PREFILL_PROMPTS
from moequant.benchmarks.vllm_worker import ProfiledWorker
from moequant.errors import UnsupportedError
from moequant.integrations.vllm.name import NAME as PLUG_IN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Cache, PreTrainedModel

    from moequant.benchmarks.serving_setup import Setup

    PromptIds = Sequence[Sequence[int]]


class Engine(ABC):
    """A model in an engine."""

    color: ClassVar[str]
    """Of its bars in plots, as in SVG."""
    uses_plug_in: ClassVar[bool] = False
    """Whether its process has to load our plug-in for vLLM."""
    version: str
    experts: str | None = None
    """What computes the experts, if the engine says so; vLLM's log does."""

    @abstractmethod
    def __init__(self, setup: Setup) -> None:
        """Start the engine with a checkpoint.

        Raises:
            UnsupportedError: the engine is not installed, or cannot run as `setup` asks.
        """

    def prepare(self, sequences: int, max_tokens: int) -> None:
        """Told before calls of another number of prompts, or of longer ones.

        Args:
            sequences: number of prompts in each of these calls.
            max_tokens: most tokens of each, prompt and answer.

        Raises:
            MoequantError: the device has too little memory free for their keys and values.
        """
        return

    @abstractmethod
    def generate(self, prompts: PromptIds, new_tokens: int) -> None:
        """Continue all prompts, of one length, by exactly `new_tokens` greedy tokens, and wait."""

    def profile(self, prompts: PromptIds, new_tokens: int) -> DeviceProfile:
        """What `generate` runs on the GPU, of several on the first."""
        return profile_call(partial(self.generate, prompts, new_tokens))


class Vllm(Engine):
    """vLLM as it starts by default: CUDA graphs, torch.compile, and a process of its own."""

    color = "#9aa5b1"

    def __init__(self, setup: Setup) -> None:
        if find_spec("vllm") is None:
            raise UnsupportedError("vLLM is not installed: pip install 'moequant[vllm]'")
        if setup.device != "cuda":
            raise UnsupportedError("vLLM is timed on CUDA devices only")
        import vllm

        self.version = vllm.__version__
        self._sampling = vllm.SamplingParams
        chosen = {"attention_backend": setup.attention_backend} if setup.attention_backend else {}
        self._llm = vllm.LLM(
            model=setup.checkpoint,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=setup.max_tokens,
            max_num_batched_tokens=max(setup.prefill_tokens, setup.max_tokens),
            max_num_seqs=max(*setup.batches, PREFILL_PROMPTS),
            # The batches that are timed, of those that vLLM would capture: it starts sooner.
            compilation_config={"cudagraph_capture_sizes": sorted(set(setup.batches))},
            # Otherwise a prompt that comes twice would be read once.
            enable_prefix_caching=False,
            seed=0,
            disable_log_stats=True,
            tensor_parallel_size=setup.tensor_parallel,
            enable_expert_parallel=setup.expert_parallel,
            worker_extension_cls=f"{ProfiledWorker.__module__}.{ProfiledWorker.__qualname__}",
            **chosen,
            **self._options(setup),
        )

    def _options(self, setup: Setup) -> dict[str, Any]:
        return {}

    def generate(self, prompts: PromptIds, new_tokens: int) -> None:
        """See `Engine`."""
        sampling = self._sampling(
            temperature=0.0, max_tokens=new_tokens, detokenize=False, ignore_eos=True
        )
        inputs = [{"prompt_token_ids": list(ids)} for ids in prompts]
        # The engine would begin with the first prompt, and read the others in another step.
        self._llm.sleep(level=0, mode="keep")
        self._llm.enqueue(inputs, sampling, use_tqdm=False)
        self._llm.wake_up(tags=["scheduling"])
        self._llm.wait_for_completion(use_tqdm=False)

    def profile(self, prompts: PromptIds, new_tokens: int) -> DeviceProfile:
        """See `Engine`; GPUs are used by processes of vLLM's, and all of these are profiled."""
        self._llm.collective_rpc(ProfiledWorker.moequant_start_profile.__name__)
        try:
            self.generate(prompts, new_tokens)
        finally:
            first, *_ = self._llm.collective_rpc(ProfiledWorker.moequant_stop_profile.__name__)
        return DeviceProfile(**first)


class VllmWithPlugIn(Vllm):
    """vLLM with our experts; the environment must let it load the plug-in."""

    color = "#1f6feb"
    uses_plug_in = True

    def _options(self, setup: Setup) -> dict[str, Any]:
        # Calls of the sizes that are timed come before they are timed.
        options = {PLUG_IN: {"activations": setup.activations, "warm_up": "skip"}}
        return {"quantization": PLUG_IN, "additional_config": options}


class Transformers(Engine):
    """transformers' own model and `generate`."""

    color = "#d9a441"

    def __init__(self, setup: Setup) -> None:
        from moequant.integrations.transformers_library import import_transformers

        if setup.tensor_parallel > 1:
            raise UnsupportedError("it is timed on one device only; leave out --tensor-parallel")
        transformers = import_transformers()
        self.version = transformers.__version__
        self.model = self._load(setup)
        self._make_settings = transformers.GenerationConfig
        kind = self.model.generation_config.cache_implementation
        self._fields: dict[str, Any] = {"cache_implementation": kind}
        self._arguments: dict[str, Any] = {}

    def _load(self, setup: Setup) -> PreTrainedModel:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            setup.checkpoint, dtype=torch.bfloat16, device_map=setup.device
        )
        self.experts = getattr(model.config, "_experts_implementation", None)
        return cast("PreTrainedModel", model.eval())

    def generate(self, prompts: PromptIds, new_tokens: int) -> None:
        """See `Engine`."""
        from moequant.integrations.generation_settings import only_settings

        ids = torch.tensor([list(prompt) for prompt in prompts], device=self.model.device)
        # None of the checkpoint's, which may ask for beams, or for an end before that.
        settings = self._make_settings(
            max_new_tokens=new_tokens, use_cache=True, pad_token_id=0, **self._fields
        )
        with torch.no_grad(), only_settings(self.model, settings):
            self.model.generate(
                ids,
                generation_config=settings,
                attention_mask=torch.ones_like(ids),
                **self._arguments,
            )
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


class OurModel(Transformers):
    """A transformers model with our experts, in one static cache for all calls of a batch size."""

    color = "#2da44e"
    _cache: Cache | None = None

    def _load(self, setup: Setup) -> PreTrainedModel:
        from moequant._version import __version__
        from moequant.integrations.transformers import load_model
        from moequant.runtime import FusedExperts

        model = load_model(
            setup.checkpoint,
            device=setup.device,
            activations=setup.activations,
            dtype=torch.bfloat16,
        )
        self.version = __version__
        fused = [module for module in model.modules() if isinstance(module, FusedExperts)]
        self.experts = ", ".join(sorted({module.chosen_backend() for module in fused}))
        return model

    def prepare(self, sequences: int, max_tokens: int) -> None:
        """See `Engine`."""
        from moequant.integrations.decoding import decoder_of
        from moequant.integrations.static_cache import cache_argument, static_cache

        self._cache, self._arguments = None, {}
        if decoder_of(self.model) is not None:
            self._cache = static_cache(self.model, max_tokens, sequences=sequences)
            self._arguments = {cache_argument(): self._cache}
        self._fields = self._compile_fields()

    def _compile_fields(self) -> dict[str, Any]:
        return {}

    def generate(self, prompts: PromptIds, new_tokens: int) -> None:
        """See `Engine`."""
        if self._cache is not None:
            self._cache.reset()
        super().generate(prompts, new_tokens)


class OurCompiledModel(OurModel):
    """The same by torch.compile."""

    color = "#116329"

    def _compile_fields(self) -> dict[str, Any]:
        from moequant.integrations.generation import compile_config

        return {"compile_config": compile_config(self.model)}


ENGINES: dict[str, type[Engine]] = {
    "vllm": Vllm,
    "vllm+moequant": VllmWithPlugIn,
    "transformers": Transformers,
    "moequant": OurModel,
    "moequant+compile": OurCompiledModel,
}
