"""A decoder language model written for one device, whose residual is a part that can be swapped."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headwater.errors import check_fit
from headwater.folders import at_home, check_hashes, whole_folder
from headwater.ops.kda.operators import CHUNK
from headwater.residuals import Residual, State, build, pinned

from .attention import Rotary
from .cache import Cache, Entry, Lengths
from .config import ModelConfig
from .kda import KDA
from .mla import MLA
from .moe import MoE
from .norm import RMSNorm
from .part import Angles
from .sublayer import Sublayer

T = TypeVar("T")


def run_sublayer(
    residual: Residual,
    sublayer: Sublayer,
    i: int,
    dtype: torch.dtype | None,
    rotary: Angles,
    cache: Entry | None,
    state: State,
    values: State,
) -> State:
    """Read, run and write sublayer i; return the state after it, then the first attention's values.

    `dtype` is the stream's, if that is not what sublayers produce.
    """
    # A kernel may fold the pre-norm into the read; else the sublayer applies it.
    normed = residual.folds_norm(state, i)
    norm = sublayer.norm if normed else None
    x, state = residual.read(state, i, norm=norm)
    y, values = sublayer(x, rotary, cache, values, normed)
    # Under autocast sublayers may compute in another dtype than the stream's.
    if dtype is not None:
        y = y.to(dtype)
    return (*residual.write(state, i, y), *values)


class Decoder(nn.Module):
    """A pre-norm decoder, (B, T) tokens to (B, T, vocab) logits, with the residual of its config.

        model = Decoder(ModelConfig.named("nano", vocab_size=256, residual="attnres-block"))
        logits = model(tokens)

    `around`, None at first, is called as `around(step, *args)` in place of each sublayer's `step`.
    For activation checkpointing:

        model.around = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    """

    around: Callable[..., State] | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        config.require(config.vocab_size > 0, "vocab_size", "must be at least 1 in a model")
        self.config = config
        self.around = None
        self._run_sublayer = run_sublayer
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        # The first attention's values are kept, if any.
        self.values_from = config.sublayers
        if config.value_residual:
            self.values_from = config.kinds.index("attention")
        self.sublayers = nn.ModuleList()
        for i, kind in enumerate(config.kinds):
            shares = {"mixes_values": i > self.values_from, "keeps_values": i == self.values_from}
            self.sublayers.append(Sublayer(config, kind, **shares))
        # What a residual draws must not change the start of what all residuals share.
        with torch.random.fork_rng(devices=[]):
            self.residual = build(config.residual, config.dim, config.sublayers, config.kinds)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        # Without attention nothing is turned, and the tables only say how many positions there are.
        turned = {"attention", "shortswa"} & set(config.kinds)
        width = config.head_dim if turned else 2
        self.rotary = Rotary(width, config.context, config.rope_theta)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start matrices so that they keep the scale of what they read.

        Output projections are smaller by sqrt(sublayers), where `depth_start` is on. Those of short
        windows start at zero, unless the residual can make nothing of that. A residual keeps the
        start it defines itself, and may ask for smaller weights in the sublayers.

        The embedding starts at unit scale unless the head shares it: sources averaged over a deep
        stack must stay far above the norms' eps.
        """
        # On the meta device there are no values, and to draw shapes takes longer than all the
        # rest.
        if self.embedding.weight.is_meta:
            return
        nn.init.normal_(self.embedding.weight)
        nn.init.normal_(self.head.weight, std=0.02)
        # Every matrix keeps the scale of what it reads; those that start otherwise follow.
        for module in self.sublayers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        gain = self.residual.weight_gain
        for sublayer in cast(list[Sublayer], self.sublayers):
            self._start_outputs(sublayer, gain)
            for weight in sublayer.body.scaled_by_gain():
                weight.data.mul_(gain)

    def _start_outputs(self, sublayer: Sublayer, gain: float) -> None:
        """Start the outputs of a sublayer's body, and the weights that are in no linear layer."""
        body = sublayer.body
        count = self.config.sublayers if self.config.depth_start else 1
        if isinstance(body, KDA):
            body.decay.reset()
        if not isinstance(body, MoE):
            begins_as_nothing = sublayer.kind == "shortswa" and self.residual.takes_zero
            std = 0.0 if begins_as_nothing else (body.output.in_features * count) ** -0.5
            nn.init.normal_(body.output.weight, std=gain * std)
            return
        # Experts are in no linear layer: each is drawn as its matrix would be.
        for weight in (body.router.weight, body.experts.gate, body.experts.up):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        outputs: list[Tensor] = [body.experts.output]
        if body.shared is not None:
            outputs.append(body.shared.output.weight)
        for output in outputs:
            std = (output.shape[-1] * count) ** -0.5
            nn.init.normal_(output, std=gain * std)

    @property
    def sublayer_kinds(self) -> tuple[str, ...]:
        return self.config.kinds

    def new_cache(
        self, batch: int = 1, room: int | None = None, device: torch.device | None = None
    ) -> Cache:
        """Allocate what `forward` fills and continues from.

        Arguments:
            batch: rows.
            room: the most tokens that a row will have; None takes the model's context.
            device: where; None takes the model's.
        """
        room = self.config.context if room is None else room
        weight = self.embedding.weight
        device = weight.device if device is None else device
        # Under autocast sublayers produce its dtype.
        dtype = weight.dtype
        if not weight.is_meta and torch.is_autocast_enabled(weight.device.type):
            dtype = torch.get_autocast_dtype(weight.device.type)
        tokens = torch.zeros(batch, dtype=torch.long, device=device)
        lengths = Lengths(tokens, room, even=0)
        entries = []
        for sublayer in cast(list[Sublayer], self.sublayers):
            entries.append(sublayer.body.new_entry(lengths, dtype))
        return Cache(entries, lengths)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Map tokens (B, T) to logits (B, T, vocab); with a cache they continue earlier tokens."""
        return self.head(self.hidden(tokens, cache))

    def hidden(self, tokens: Tensor, cache: Cache | None = None, *, last: bool = False) -> Tensor:
        """Compute what the output head sees, (B, T, D): a loss may not need all logits at once.

        `last`: only of the last token, (B, 1, D), as for a prompt: a final read looks at every
        source.
        """
        rotary = self._positions(tokens.shape[1], cache)
        state = self.begin(tokens, cache)
        state = self.run(state, 0, len(self.sublayers), rotary, cache)
        # Only now: until here all sublayers write at the same places.
        if cache is not None:
            cache.lengths.advance(tokens.shape[1])
        return self._end(state, cache, last)

    def _positions(self, count: int, cache: Cache | None) -> Angles:
        """Return the rotary tables of the next tokens."""
        if cache is None:
            return self.rotary(0, count)
        # Rows of different lengths have positions of their own.
        if cache.lengths.even is None:
            return self.rotary.at(cache.lengths.positions(count))
        return self.rotary(cache.lengths.even, count)

    def begin(self, tokens: Tensor, cache: Cache | None = None) -> State:
        """Return the state before the first sublayer."""
        x = self.embedding(tokens)
        # Autocast leaves an embedding in fp32; the stream has the dtype of the sublayers' outputs.
        dtype = self._stream_dtype(x.device)
        x = x if dtype is None else x.to(dtype)
        if cache is None:
            return self.residual.begin(x)
        return self.residual.resume(x, cache.past)

    def run(
        self,
        state: State,
        start: int,
        stop: int,
        rotary: Angles,
        cache: Cache | None = None,
    ) -> State:
        """Run sublayers [start, stop) of the state before them; return the state after them.

        A whole model, a pipeline stage and the plan of a run all call this. `rotary`: what
        `self.rotary(first position, length)` returns.
        """
        step = self._step if self.around is None else partial(self.around, self._step)
        for i in range(start, stop):
            entry = None if cache is None else cache[i]
            state = step(i, rotary, entry, *state)
        return state

    def finish(self, state: State) -> Tensor:
        """Return logits (B, T, vocab) from the state after the last sublayer."""
        return self.head(self._end(state))

    def _end(self, state: State, cache: Cache | None = None, last: bool = False) -> Tensor:
        state, _ = self._split(len(self.sublayers), state)
        # Of a prompt's end only the last token's read is needed.
        x = self._end_last(state) if last else self.residual.end(state, norm=self.norm)
        # Only now: the state may hold what the cache has kept so far.
        if cache is not None:
            cache.keep_past(self.residual.past(state))
        return x

    def _end_last(self, state: State) -> Tensor:
        """Make the final read of the last token only, where the state has each token by itself."""
        sources = self.residual.settle(state, len(self.sublayers))
        # By itself: all tensors are (B, T, D).
        shape = sources[0].shape
        by_token = len(shape) == 3 and all(source.shape == shape for source in sources)
        if not by_token or not self.residual.token_local:
            return self.residual.end(state, norm=self.norm)[:, -1:]
        ends = tuple(source[:, -1:].contiguous() for source in sources)
        return self.residual.end(ends, norm=self.norm)

    def settle(self, state: State, i: int) -> State:
        """Return the state before sublayer i in its shortest form, which a pipeline stage sends
        on."""
        state, values = self._split(i, state)
        return (*self.residual.settle(state, i), *values)

    def adopt(self, state: State, i: int) -> State:
        """Return a settled state before sublayer i as a pipeline stage best runs on it."""
        state, values = self._split(i, state)
        return (*self.residual.adopt(state, i), *values)

    def _stream_dtype(self, device: torch.device) -> torch.dtype | None:
        """Return the stream's dtype under autocast: fp32 if the configuration says so, else that of
        the sublayers' outputs. None without autocast: the stream keeps the embedding's."""
        if device.type == "meta" or not torch.is_autocast_enabled(device.type):
            return None
        return torch.float32 if self.config.fp32_stream else torch.get_autocast_dtype(device.type)

    def compile_layers(self, **options: Any) -> None:
        """Compile what a sublayer does, once for all sublayers of a kind.

        That takes seconds, where a whole model takes a minute. `options` are torch.compile's. If
        the residual has no parameters, its read and write are compiled with the sublayer; other
        residuals run around it as they are, with a kernel or eagerly.
        """
        if next(self.residual.parameters(), None) is None:
            self._run_sublayer = torch.compile(run_sublayer, **options)
        else:
            for sublayer in self.sublayers:
                sublayer.compile(**options)

    def _step(self, i: int, rotary: Angles, cache: Entry | None, *state: Tensor) -> State:
        """Run one sublayer, with a state of separate tensors: checkpointing needs that."""
        sublayer = cast(Sublayer, self.sublayers[i])
        dtype = self._stream_dtype(state[0].device)
        state, values = self._split(i, state)
        arguments = i, dtype, rotary, cache, state, values
        return self._run_sublayer(self.residual, sublayer, *arguments)

    def _split(self, i: int, state: State) -> tuple[State, State]:
        """Part the residual's state before sublayer i from the first attention's values behind
        it."""
        if i > self.values_from:
            return state[:-1], state[-1:]
        return state, ()

    def parameter_count(self) -> dict[str, int]:
        """Count parameters: `total`, `embedding`, `residual`; and `active`, which one token meets.

        A token meets only the experts that it chooses.
        """
        total = _numbers(self)
        active = total
        for moe in self._bodies(MoE):
            idle_experts = self.config.experts - self.config.experts_per_token
            active -= _numbers(moe.experts) // self.config.experts * idle_experts
        return {
            "total": total,
            "active": active,
            "embedding": self.embedding.weight.numel(),
            "residual": _numbers(self.residual),
        }

    def flops_per_token(self, context: int | None = None) -> int:
        """Operations of one training step per token at a context.

        Matrices, causal attention and depth mixing; backward counts twice as much as forward.
        Experts count as far as one token meets them, KDA as three products with its state and the
        pairs inside a chunk.
        """
        config = self.config
        context = context or config.context
        matrices = self.head.weight.numel()
        for module in self.sublayers.modules():
            if isinstance(module, nn.Linear):
                matrices += module.weight.numel()
        for moe in self._bodies(MoE):
            one_expert = _numbers(moe.experts) // config.experts
            matrices += one_expert * config.experts_per_token + moe.router.weight.numel()
        # Causal attention looks at half of the context; a short window at all its tokens.
        attention = 2 * config.kinds.count("attention") * context * config.dim
        window = min(config.shortswa or 0, context)
        attention += 4 * config.kinds.count("shortswa") * window * config.dim
        # MLA: keys of head and shared part, and values.
        for mla in self._bodies(MLA):
            width = mla.head_dim + mla.shared_dim + mla.value_dim
            attention += mla.heads * context * width
        # KDA: products with its state, and the pairs of tokens inside a chunk.
        for kda in self._bodies(KDA):
            width = 6 * kda.head_dim + 5 * min(CHUNK, context)
            attention += kda.heads * kda.head_dim * width
        return 3 * (2 * matrices + attention + self.residual.flops_per_token())

    def _bodies(self, kind: type[T]) -> list[T]:
        # A pipeline stage has other modules in the place of sublayers that are elsewhere.
        bodies = [getattr(sublayer, "body", None) for sublayer in self.sublayers]
        return [body for body in bodies if isinstance(body, kind)]

    def save(self, folder: str | Path) -> None:
        """Write config.json, model.safetensors and its hash. A tied head is stored once."""
        settings = {**self.config.to_dict(), "residual": pinned(self.residual)}
        with whole_folder(at_home(folder)) as partial:
            (partial / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
            save_file(self.weights(), partial / "model.safetensors")

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors that a file holds, by name, each once: parameters, and what training
        moves without a gradient."""
        tensors = saved_tensors(self)
        return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Take over weights by name. Raises ValueError unless they fit, name by name."""
        tensors = saved_tensors(self)
        expected = {name: tensor.shape for name, tensor in tensors.items()}
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        check_fit(expected, shapes, "weights do not fit the model")
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(weights[name])

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> "Decoder":
        folder = at_home(folder)
        check_hashes(folder)
        model = cls(ModelConfig.from_dict(json.loads((folder / "config.json").read_text())))
        model.load_weights(load_file(folder / "model.safetensors"))
        return model.to(device)


def saved_tensors(model: Decoder) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint of a decoder, or of a part of one, holds.

    Parameters, each once, and buffers that are not computed anew, such as the routers' biases.
    """
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters(remove_duplicate=True)), **buffers}


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
