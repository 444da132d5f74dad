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
from .sublayer import Sublayer

T = TypeVar("T")


def run_sublayer(
    residual: Residual,
    sublayer: Sublayer,
    i: int,
    dtype: torch.dtype | None,
    rotary: tuple[Tensor, Tensor],
    cache: Entry | None,
    held: State,
    kept: State,
) -> State:
    """Read, run, write: the state after sublayer i, the kept values last. `dtype`: of the stream, if it is not what
    sublayers produce."""
    normed = residual.folds_norm(held, i)
    x, held = residual.read(held, i, norm=sublayer.norm if normed else None)
    y, kept = sublayer(x, rotary, cache, kept, normed)
    return (*residual.write(held, i, y if dtype is None else y.to(dtype)), *kept)


class Decoder(nn.Module):
    """A pre-norm decoder, (B, T) tokens to (B, T, vocab) logits, whose residual `config.residual` names.

        model = Decoder(ModelConfig.named("nano", vocab_size=256, residual="attnres-block"))
        logits = model(tokens)

    `around`, None at first, is what each sublayer of a forward pass is called through, as `around(step, *args)`:
    activation checkpointing is `model.around = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)`.
    """

    around: Callable[..., State] | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.around = None
        self._run_sublayer = run_sublayer
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        # Whose values are kept: the first attention's.
        self.values_from = (
            config.kinds.index("attention") if config.value_residual else config.sublayers
        )
        self.sublayers = nn.ModuleList(
            Sublayer(
                config, kind, mixes_values=i > self.values_from, keeps_values=i == self.values_from
            )
            for i, kind in enumerate(config.kinds)
        )
        with torch.random.fork_rng(
            devices=[]
        ):  # what a residual draws must not change the start of what it shares
            self.residual = build(config.residual, config.dim, config.sublayers, config.kinds)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        # Without attention nothing is turned: then it knows how many positions there are, and no more.
        width = config.head_dim if {"attention", "shortswa"} & set(config.kinds) else 2
        self.rotary = Rotary(width, config.context, config.rope_theta)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Matrices keep the scale of what they read; output projections are smaller by sqrt(sublayers), where
        `depth_start` is on, and those of short windows zero: they begin as nothing, unless the residual can make
        nothing of that. A residual keeps the start it defines itself, and may ask for smaller weights in the sublayers.

        The embedding starts at unit scale unless the head shares it: sources averaged over a deep stack must stay far
        above the norms' eps.
        """
        if (
            self.embedding.weight.is_meta
        ):  # no values; to draw them in shape alone takes longer than all the rest
            return
        nn.init.normal_(self.embedding.weight)
        nn.init.normal_(self.head.weight, std=0.02)
        for module in self.sublayers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        gain = self.residual.weight_gain
        for sublayer in cast(list[Sublayer], self.sublayers):
            self._start_outputs(sublayer, gain)
            for weight in sublayer.body.scaled_by_gain():
                weight.data.mul_(gain)

    def _start_outputs(self, sublayer: Sublayer, gain: float) -> None:
        """The outputs of a sublayer's body, and the weights that are in no linear layer."""
        body, count = sublayer.body, self.config.sublayers if self.config.depth_start else 1
        if isinstance(body, KDA):
            body.decay.reset()
        if not isinstance(body, MoE):
            begins_as_nothing = sublayer.kind == "shortswa" and self.residual.takes_zero
            std = 0.0 if begins_as_nothing else (body.output.in_features * count) ** -0.5
            nn.init.normal_(body.output.weight, std=gain * std)
            return
        for weight in (body.router.weight, body.experts.gate, body.experts.up):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        shared = [] if body.shared is None else [body.shared.output.weight]
        for output in (body.experts.output, *shared):
            nn.init.normal_(output, std=gain * (output.shape[-1] * count) ** -0.5)

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
        dtype = weight.dtype
        if not weight.is_meta and torch.is_autocast_enabled(weight.device.type):
            dtype = torch.get_autocast_dtype(weight.device.type)
        tokens = torch.zeros(batch, dtype=torch.long, device=device)
        lengths = Lengths(tokens, room, even=0)
        bodies = [sublayer.body for sublayer in cast(list[Sublayer], self.sublayers)]
        return Cache([body.new_entry(lengths, dtype) for body in bodies], lengths)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Tokens (B, T) to logits (B, T, vocab). With a cache, tokens that continue those it has seen."""
        return self.head(self.hidden(tokens, cache))

    def hidden(self, tokens: Tensor, cache: Cache | None = None, *, last: bool = False) -> Tensor:
        """What the output head sees, (B, T, D): for a loss that does not need all logits at once. `last`: of the last
        token, (B, 1, D), where the others' is not needed, as of a prompt: a final read looks at every source."""
        rotary = self._positions(tokens.shape[1], cache)
        state = self.begin(tokens, cache)
        state = self.run(state, 0, len(self.sublayers), rotary, cache)
        if cache is not None:
            cache.lengths.advance(tokens.shape[1])
        return self._end(state, cache, last)

    def _positions(self, count: int, cache: Cache | None) -> tuple[Tensor, Tensor]:
        """Rotary tables for the next tokens."""
        if cache is None:
            return self.rotary(0, count)
        if cache.lengths.even is None:
            return self.rotary.at(cache.lengths.positions(count))
        return self.rotary(cache.lengths.even, count)

    def begin(self, tokens: Tensor, cache: Cache | None = None) -> State:
        """The state before the first sublayer."""
        x = self.embedding(tokens)
        dtype = self._stream_dtype(x.device)
        x = x if dtype is None else x.to(dtype)
        return self.residual.begin(x) if cache is None else self.residual.resume(x, cache.past)

    def run(
        self,
        state: State,
        start: int,
        stop: int,
        rotary: tuple[Tensor, Tensor],
        cache: Cache | None = None,
    ) -> State:
        """The state after sublayers [start, stop), from the one before them: the only loop over depth.

        `rotary`: `self.rotary(first position, length)`. A whole model, a pipeline stage and the plan of a run all call
        this; `around` is what each sublayer is called through, where it is set.
        """
        step = self._step if self.around is None else partial(self.around, self._step)
        for i in range(start, stop):
            state = step(i, rotary, None if cache is None else cache[i], *state)
        return state

    def finish(self, state: State) -> Tensor:
        """Logits (B, T, vocab) from the state after the last sublayer."""
        return self.head(self._end(state))

    def _end(self, state: State, cache: Cache | None = None, last: bool = False) -> Tensor:
        state, _ = self._split(len(self.sublayers), state)
        x = self._end_last(state) if last else self.residual.end(state, norm=self.norm)
        # Only now: the state may hold what the cache has kept so far.
        if cache is not None:
            cache.keep_past(self.residual.past(state))
        return x

    def _end_last(self, state: State) -> Tensor:
        """The final read of the last token alone, where the state has each token by itself."""
        sources = self.residual.settle(state, len(self.sublayers))
        first = sources[0]
        by_token = first.dim() == 3 and all(source.shape == first.shape for source in sources)
        if by_token and self.residual.token_local:  # (B, T, D) each
            ends = tuple(source[:, -1:].contiguous() for source in sources)
            return self.residual.end(ends, norm=self.norm)
        return self.residual.end(state, norm=self.norm)[:, -1:]

    def settle(self, state: State, i: int) -> State:
        """The state before sublayer i in its shortest form: what a pipeline stage sends on."""
        state, kept = self._split(i, state)
        return (*self.residual.settle(state, i), *kept)

    def adopt(self, state: State, i: int) -> State:
        """A settled state before sublayer i as the residual likes it best: what a pipeline stage runs on."""
        state, kept = self._split(i, state)
        return (*self.residual.adopt(state, i), *kept)

    def _stream_dtype(self, device: torch.device) -> torch.dtype | None:
        """Under autocast the residual has the dtype that sublayers compute in, or fp32 if the configuration says so;
        otherwise, None, what it is given."""
        if device.type == "meta" or not torch.is_autocast_enabled(device.type):
            return None
        return torch.float32 if self.config.fp32_stream else torch.get_autocast_dtype(device.type)

    def compile_layers(self, **options: Any) -> None:
        """Compile what a sublayer does, once for all sublayers of a kind: seconds, where a whole model takes a minute.

        `options` are torch.compile's. Where the residual has no parameters, its read and write are compiled with the
        sublayer; others run as they are around it, with a kernel of their own or eagerly.
        """
        if next(self.residual.parameters(), None) is None:
            self._run_sublayer = torch.compile(run_sublayer, **options)
        else:
            for sublayer in self.sublayers:
                sublayer.compile(**options)

    def _step(
        self, i: int, rotary: tuple[Tensor, Tensor], cache: Entry | None, *state: Tensor
    ) -> State:
        """One sublayer. The state comes as separate tensors, which activation checkpointing needs."""
        sublayer = cast(Sublayer, self.sublayers[i])
        dtype = self._stream_dtype(state[0].device)
        return self._run_sublayer(
            self.residual, sublayer, i, dtype, rotary, cache, *self._split(i, state)
        )

    def _split(self, i: int, state: State) -> tuple[State, State]:
        """The residual's state before sublayer i, and behind it the first attention's values where they are kept."""
        return (state[:-1], state[-1:]) if i > self.values_from else (state, ())

    def parameter_count(self) -> dict[str, int]:
        """`total`; of these `active`, the ones a token meets: of routed experts those that it chooses."""
        total, config = sum(p.numel() for p in self.parameters()), self.config
        experts = sum(p.numel() for body in self._bodies(MoE) for p in body.experts.parameters())
        idle = (
            experts // config.experts * (config.experts - config.experts_per_token)
            if experts
            else 0
        )
        return {
            "total": total,
            "active": total - idle,
            "embedding": self.embedding.weight.numel(),
            "residual": sum(p.numel() for p in self.residual.parameters()),
        }

    def flops_per_token(self, context: int | None = None) -> int:
        """Operations of one training step per token at a context: matrices, causal attention, depth mixing; backward
        counted as twice the forward. Of experts, those that a token meets. KDA: three products with its state, and the
        pairs inside a chunk."""
        config = self.config
        context = context or config.context
        matrices = sum(
            m.weight.numel() for m in self.sublayers.modules() if isinstance(m, nn.Linear)
        )
        for moe in self._bodies(MoE):
            experts = (
                sum(p.numel() for p in moe.experts.parameters())
                // config.experts
                * config.experts_per_token
            )
            matrices += experts + moe.router.weight.numel()
        attention = 2 * config.kinds.count("attention") * context * config.dim  # causal: half
        attention += (
            4 * config.kinds.count("shortswa") * min(config.shortswa or 0, context) * config.dim
        )
        for mla in self._bodies(MLA):
            attention += mla.heads * context * (mla.head_dim + mla.shared_dim + mla.value_dim)
        for kda in self._bodies(KDA):
            chunk = min(CHUNK, context)
            attention += kda.heads * kda.head_dim * (6 * kda.head_dim + 5 * chunk)
        return 3 * (
            2 * matrices
            + 2 * self.head.weight.numel()
            + attention
            + self.residual.flops_per_token()
        )

    def _bodies(self, kind: type[T]) -> list[T]:
        bodies = (sublayer.body for sublayer in self.sublayers if isinstance(sublayer, Sublayer))
        return [body for body in bodies if isinstance(body, kind)]

    def save(self, folder: str | Path) -> None:
        """Write config.json, model.safetensors and the hash of the latter. A tied head is stored once."""
        settings = {**self.config.to_dict(), "residual": pinned(self.residual)}
        with whole_folder(at_home(folder)) as partial:
            (partial / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
            save_file(self.weights(), partial / "model.safetensors")

    def weights(self) -> dict[str, Tensor]:
        """What a file holds, by name, each tensor once: parameters, and what training moves without a gradient."""
        return {name: tensor.detach().contiguous() for name, tensor in saved_tensors(self).items()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        mine = saved_tensors(self)
        expected, found = (
            {name: tensor.shape for name, tensor in tensors.items()} for tensors in (mine, weights)
        )
        check_fit(expected, found, "weights do not fit the model")
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(weights[name])

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> "Decoder":
        folder = at_home(folder)
        check_hashes(folder)
        model = cls(ModelConfig.from_dict(json.loads((folder / "config.json").read_text())))
        model.load_weights(load_file(folder / "model.safetensors"))
        return model.to(device)


def saved_tensors(model: Decoder) -> dict[str, Tensor]:
    """The tensors that a checkpoint of a decoder, or of a part of one, holds: its parameters, each once, and buffers
    that are not made anew, such as the routers' biases."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters(remove_duplicate=True)), **buffers}
