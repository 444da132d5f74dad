"""headwater's residuals in torchtitan: Llama 3, Qwen 3 and DeepSeek V3.

    from headwater.integrations.torchtitan import with_residual

    def my_run() -> Trainer.Config:
        config = llama3_8b()
        config.model_spec = with_residual(config.model_spec, "attnres-block:block=8")
        return config

The blocks keep their parts. Between the parts flows the state of a residual instead of one tensor, and pipeline stages
send one another what the receiver lacks. FSDP2, sequence parallelism, activation checkpointing, compilation and
checkpoints are torchtitan's own.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    get_schedule_class,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.distributed.pipeline_parallel import (
    _generate_llm_fqn_per_model_part,
    _get_pipeline_metadata,
    pipeline_llm,
)
from torchtitan.models.deepseek_v3.model import DeepSeekV3Model, DeepSeekV3TransformerBlock
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.model_spec import ModelSpec

from headwater._torch import allow_recompiles
from headwater.residuals import Norm, Residual, State, build, pinned
from headwater.stages import BlockCache, StagePort, hops, localize, trace

TESTED = "0.3.0"

# A rank runs these stages in order of depth, and each backward whole: what the block cache needs. A zero-bubble
# schedule computes gradients of borrowed tensors too late for the stage that lent them.
CACHED = (ScheduleInterleaved1F1B, ScheduleLoopedBFS)


class ResidualBlock:
    """Stands before the class of a block, and calls the block's parts between reads and writes."""

    place: int
    mesh: DeviceMesh | None = None  # of tensor parallelism

    def forward(
        self, residual: Residual, masks: Any, positions: Tensor | None, *state: Tensor
    ) -> State:
        block: Any = self
        i = self.place
        x, state = read(residual, state, i, block.attention_norm, mesh=self.mesh)
        y = block.attention(x, masks, positions)
        state = residual.write(state, i, local(y))

        x, state = read(residual, state, i + 1, block.ffn_norm, mesh=self.mesh)
        experts = getattr(block, "moe_enabled", False)
        y = block.moe(x) if experts else block.feed_forward(x)
        return tuple(residual.write(state, i + 1, local(y)))


class ResidualModel:
    """Stands before the class of a decoder, and passes the state on from block to block."""

    residual: Residual
    layers: Any
    mesh: DeviceMesh | None = None  # of tensor parallelism
    port: StagePort | None = None
    _skip_lm_head: bool  # torchtitan's: the loss applies the head

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        sublayers = 2 * len(config.layers)
        self.residual = build(config.residual, config.dim, sublayers)
        self.span = (0, sublayers)
        self.forwards = 0
        for name, layer in self.layers.items():
            layer.place = 2 * int(name)
            # torchtitan's norms compute what torch's do, so a kernel may apply them.
            layer.attention_norm.folds = layer.ffn_norm.folds = True
        # The blocks share one function, which the compiler specialises to each depth.
        allow_recompiles(sublayers + 8)

    def verify_module_protocol(self) -> None:
        """Check every module but the residual, whose modules are plain ones of torch."""
        residual = self.residual
        self.residual = None  # type: ignore[assignment]
        try:
            super().verify_module_protocol()  # type: ignore[misc]
        finally:
            self.residual = residual

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        super().init_states(buffer_device=buffer_device)  # type: ignore[misc]
        self.residual.reset_parameters()

    def parallelize(self, parallel_dims: Any) -> None:
        """Divide the parts as torchtitan does; the residual then works on a rank's own tokens."""
        super().parallelize(parallel_dims)  # type: ignore[misc]
        mesh = parallel_dims.get_optional_mesh("tp")
        if mesh is None:
            return
        if parallel_dims.spmd_backend != "partial_dtensor":
            raise ValueError(
                "with tensor parallelism, residuals need --parallelism.spmd_backend partial_dtensor"
            )
        if not self.residual.token_local:
            raise ValueError(
                f"'{self.residual.spec}' looks at earlier tokens, which sequence parallelism divides: "
                "choose options that read one token at a time"
            )
        for module in self.residual.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                whole = distribute_tensor(parameter, mesh, [Replicate()])
                module.register_parameter(name, nn.Parameter(whole))
        localize(self.residual)
        self.mesh = mesh
        for layer in self.layers.values():
            layer.mesh = mesh

    def forward(
        self,
        *arrived: Tensor,
        positions: Tensor | None = None,
        attention_masks: Any = None,
    ) -> Any:
        model: Any = self
        residual, (start, stop) = self.residual, self.span
        # Every stage of a rank sees the micro-batches in the same order.
        micro = self.forwards
        self.forwards += 1

        if self.port is None or start == 0:
            state = residual.begin(local(model.tok_embeddings(arrived[0])))
        else:
            state = residual.adopt(self.port.receive(arrived, micro), start)
        for layer in self.layers.values():
            state = layer(residual, attention_masks, positions, *state)
        if self.port is not None and stop < residual.sublayers:
            # A schedule may detach what it sends in place, which a view does not allow.
            sent = self.port.send(residual.settle(state, stop), micro)
            return tuple(tensor.clone() for tensor in sent)

        if self.mesh is None:
            x = residual.end(state, norm=model.norm)
        else:
            x = model.norm(divided(residual.end(state), self.mesh))
        return x if self._skip_lm_head else model.lm_head(x)


def read(
    residual: Residual, state: State, i: int, norm: Norm, mesh: DeviceMesh | None
) -> tuple[Any, State]:
    """Read with the norm folded in, or, where the norm works on a DTensor, before the norm."""
    if mesh is None:
        return residual.read(state, i, norm=norm)
    x, state = residual.read(state, i)
    return norm(divided(cast(Tensor, x), mesh)), state


def divided(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a rank's own tokens as its part of the sequence."""
    return DTensor.from_local(x, mesh, [Shard(1)], run_check=False)


def local(x: Tensor) -> Tensor:
    """Return a rank's own tokens."""
    if not isinstance(x, DTensor):
        return x
    if not x.placements[0].is_shard(1):
        raise ValueError(
            "with tensor parallelism, residuals need --parallelism.enable_sequence_parallel"
        )
    return x.to_local()


class Llama3Block(ResidualBlock, Llama3TransformerBlock):
    @dataclass(kw_only=True, slots=True)
    class Config(Llama3TransformerBlock.Config):
        pass


class Llama3(ResidualModel, Llama3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        residual: str


class Qwen3Block(ResidualBlock, Qwen3TransformerBlock):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        pass


class Qwen3(ResidualModel, Qwen3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        residual: str


class DeepSeekV3Block(ResidualBlock, DeepSeekV3TransformerBlock):
    @dataclass(kw_only=True, slots=True)
    class Config(DeepSeekV3TransformerBlock.Config):
        pass


class DeepSeekV3(ResidualModel, DeepSeekV3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(DeepSeekV3Model.Config):
        residual: str


FAMILIES: dict[type, tuple[Any, Any]] = {
    Llama3Model.Config: (Llama3, Llama3Block),
    Qwen3Model.Config: (Qwen3, Qwen3Block),
    DeepSeekV3Model.Config: (DeepSeekV3, DeepSeekV3Block),
}


class ResidualConverter(ModelConfigConverter):
    """Gives a torchtitan decoder another residual; `with_residual` also sees to pipelines and checkpoints."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        residual: str = "attnres-block"

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Return the config of the same decoder with the residual.

        Raises ValueError for a decoder of another family, and for a residual that its blocks cannot have.
        """
        if type(model_config) not in FAMILIES:
            families = ", ".join(model.__name__ for model, _ in FAMILIES.values())
            raise ValueError(
                f"headwater knows torchtitan's {families}; got a {type(model_config).__qualname__}"
            )
        if getattr(model_config, "mtp_layers", None):
            raise ValueError("headwater's residuals do not cover multi-token prediction layers")
        model, block = FAMILIES[type(model_config)]
        sublayers = 2 * len(model_config.layers)
        residual = build(self.config.residual, model_config.dim, sublayers)
        trace(residual, batch=1, tokens=1)  # refuses residuals with three inputs
        if residual.weight_gain != 1:
            raise ValueError(
                f"'{residual.spec}' scales the weights of a model at its start, which torchtitan does not do"
            )
        layers = [block.Config(**values_of(layer)) for layer in model_config.layers]
        values = {**values_of(model_config), "layers": layers}
        return model.Config(**values, residual=pinned(residual))


def values_of(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def with_residual(spec: ModelSpec, residual: str) -> ModelSpec:
    """Give a torchtitan model another residual.

    Arguments:
        spec: what torchtitan's `model_registry` returned, of Llama 3, Qwen 3 or DeepSeek V3.
        residual: a registered name with its options, such as "attnres-block:block=8".

    Returns the spec with the residual in its blocks, in its pipeline stages and in its Hugging Face adapter.
    Raises ValueError for a model or a residual that do not fit.
    """
    if version("torchtitan") != TESTED:
        warnings.warn(
            f"headwater was tested with torchtitan {TESTED}, and this is {version('torchtitan')}",
            stacklevel=2,
        )
    converter = ResidualConverter(ResidualConverter.Config(residual=residual))
    adapter = spec.state_dict_adapter
    return dataclasses.replace(
        spec,
        model=converter.convert(spec.model),
        pipelining_fn=pipeline_residual,
        state_dict_adapter=None if adapter is None else adapter_of(adapter),
    )


def pipeline_residual(
    model: Any,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    model_config: Any,
    parallelize_fn: Any,
    **options: Any,
) -> Any:
    """torchtitan's `pipeline_llm`, whose stages send one another the states of a residual."""
    parts = parallelism.module_fqns_per_model_part
    if parts is None:
        metadata = _get_pipeline_metadata(parallel_dims, parallelism, model_config)
        parts = _generate_llm_fqn_per_model_part(*metadata)
    parts = [[*names, "residual"] for names in parts]

    bounds = [0]
    for names in parts:
        layers = sum(name.startswith("layers.") for name in names)
        bounds.append(bounds[-1] + 2 * layers)
        if not layers:
            raise ValueError(f"with a residual each pipeline stage needs a layer; got {names}")
    for bound in bounds[1:-1]:
        if not model.residual.may_cut(bound):
            raise ValueError(
                f"'{model.residual.spec}' shares parameters across layer {bound // 2}, where a stage begins"
            )

    tokens = training.seq_len // (parallel_dims.tp * parallel_dims.cp)
    states = trace(model.residual, parallelism.pipeline_parallel_microbatch_size, tokens)
    schedule = get_schedule_class(parallelism.pipeline_parallel_schedule)
    cached = issubclass(schedule, CACHED)
    plan = hops(states, bounds, parallel_dims.pp, cache=cached)
    cache = BlockCache()

    def prepare(part: Any, **settings: Any) -> nn.Module:
        """Leave a part its own sublayers of the residual, before torchtitan divides and wraps it."""
        start = 2 * int(next(iter(part.layers)))
        stage = bounds.index(start)
        following = plan[stage + 1] if stage + 1 < len(plan) else None
        part.span = (start, bounds[stage + 1])
        part.residual.keep_only(*part.span)
        part.port = StagePort(plan[stage], following, cache)
        return parallelize_fn(part, **settings)

    return pipeline_llm(
        model,
        parallel_dims=parallel_dims,
        training=training,
        parallelism=dataclasses.replace(parallelism, module_fqns_per_model_part=parts),
        model_config=model_config,
        parallelize_fn=prepare,
        **options,
    )


def adapter_of(adapter: Any) -> Any:
    """Return a state dict adapter that also knows the residual, which Hugging Face folders call model.residual."""

    class ResidualAdapter(adapter):
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            plain, residual = divide(state_dict, "residual.")
            named = {f"model.{name}": value for name, value in residual.items()}
            return {**super().to_hf(plain), **named}

        def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
            plain, residual = divide(hf_state_dict, "model.residual.")
            named = {name.removeprefix("model."): value for name, value in residual.items()}
            return {**super().from_hf(plain), **named}

    return ResidualAdapter


def divide(state: dict[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries without the prefix, and the entries with it."""
    plain: dict[str, Any] = {}
    residual: dict[str, Any] = {}
    for name, value in state.items():
        (residual if name.startswith(prefix) else plain)[name] = value
    return plain, residual


def adamw(
    spec: ModelSpec, *, lr: float, weight_decay: float = 0.1, query_lr: float = 0.1
) -> OptimizersContainer.Config:
    """Set up AdamW as `headwater.param_groups` does.

    Arguments: `spec`, what `with_residual` returned; `lr`, the learning rate; `weight_decay`, of the matrices of the
        layers; `query_lr`, factor on the learning rate of the residual's queries.

    Returns torchtitan's config of the optimizers: one pattern for each group that the model has.
    """
    config: Any = spec.model
    depth = build(config.residual, config.dim, 2 * len(config.layers))
    names = [name for name, _ in depth.named_parameters()]
    rates = {}
    if any(name.endswith(".query") for name in names):
        rates[r"^residual\..*\.query$"] = (lr * query_lr, 0.0)
    # Embeddings, head, norms, biases and the residual keep their scale.
    rates[r"^residual\.|norm|tok_embeddings|lm_head|bias$"] = (lr, 0.0)
    rates[r".*"] = (lr, weight_decay)
    groups = []
    for pattern, (rate, decay) in rates.items():
        settings = {"lr": rate, "weight_decay": decay, "betas": (0.9, 0.95)}
        group = ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=settings)
        groups.append(group)
    return OptimizersContainer.Config(param_groups=groups)
