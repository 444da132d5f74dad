"""Deep Delta Learning: the stream is a matrix, and a sublayer's output is the direction along which it is rewritten."""

from collections.abc import Sequence
from math import log
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Layout, Next, Norm, Residual, State, apply_norm, hold
from .layerwise import layer_starts, sublayer_kinds
from .numerics import project, project_normed, wide
from .registry import register

KERNEL = 4  # tokens a token convolution sees
DIRECTION_EPS = 1e-5
VALUE_BOUND = 4.0


class DeltaWrite(nn.Module):
    def __init__(self, dim: int, width: int, beta: float, bounded: bool) -> None:
        super().__init__()
        std = 0.5 / dim**0.5
        self.beta_weight = nn.Parameter(std * torch.randn(1, dim))
        self.beta_bias = nn.Parameter(torch.full((1,), log(beta / (2 - beta))))
        self.value_weight = nn.Parameter(std * torch.randn(width, dim))
        self.value_bias = nn.Parameter(torch.zeros(width)) if bounded else None


class ChannelCompressor(nn.Module):
    """A per-channel kernel slid over the stream's columns (one before, the rest after), then a weighted sum of them."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.read = nn.Parameter(torch.full((width,), 1 / width))
        self.kernel = nn.Parameter(
            torch.eye(width)[1].unsqueeze(-1).repeat(1, dim)
        )  # (taps = width, D): the identity

    def forward(self, x: Tensor) -> Tensor:
        """(..., n, D) to (..., D). Both steps are linear, so their product is formed once, on the parameters."""
        width = len(self.read)
        taps = torch.stack(
            [F.pad(self.kernel, (0, 0, o - 1, 1 - o)) for o in range(width)]
        )  # (out, in, D)
        folded = (taps * self.read.view(-1, 1, 1)).sum(0)
        return (wide(x) * folded.to(wide(x).dtype)).sum(-2).to(x.dtype)


class TokenCompressor(nn.Module):
    """A causal depthwise convolution over tokens for each column and channel, then a weighted sum of the columns."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.read = nn.Parameter(torch.full((width,), 1 / width))
        self.kernel = nn.Parameter(
            torch.eye(KERNEL)[-1].view(-1, 1, 1).repeat(1, width, dim)
        )  # (taps, n, D)

    def forward(self, x: Tensor) -> Tensor:
        """(..., T, n, D) to (..., T, D)."""
        folded = (self.kernel * self.read.unsqueeze(-1)).to(wide(x).dtype)
        return causal_sum([(wide(x) * tap).sum(-2) for tap in folded]).to(x.dtype)


class TokenExpander(nn.Module):
    """The embedding's columns, each a causal depthwise convolution over tokens that starts as the identity."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(
            torch.eye(KERNEL)[-1].view(-1, 1, 1).repeat(1, width, dim)
        )  # (taps, n, D)

    def forward(self, x: Tensor) -> Tensor:
        """(..., T, D) to (..., T, n, D)."""
        columns = [
            causal_sum([wide(x) * tap for tap in column])
            for column in self.kernel.to(wide(x).dtype).unbind(1)
        ]
        return torch.stack(columns, dim=-2).to(x.dtype)


def causal_sum(taps: Sequence[Tensor]) -> Tensor:
    """sum_j taps_j, each (..., T, D), shifted along T so that the last is now and the one before it a token earlier."""
    length = taps[0].shape[-2]
    shifted = [
        F.pad(tap, (0, 0, back, 0))[..., :length, :] for back, tap in enumerate(reversed(taps))
    ]
    return torch.stack(shifted).sum(0)


def look_back(x: Tensor, axis: int) -> Tensor:
    """Zeros, which a convolution sees before the first token of x."""
    shape = list(x.shape)
    shape[axis] = KERNEL - 1
    return x.new_zeros(shape)


def last_tokens(x: Tensor, axis: int) -> Tensor:
    """The tokens that a later one looks back at; a copy, so that the rest of x can go."""
    return x.narrow(axis, x.shape[axis] - KERNEL + 1, KERNEL - 1).clone()


@register("ddl")
class DeepDeltaResidual(Residual):
    """X' = X + b k (v^T - k^T X),  k = f(x) / |f(x)|,  b = 2 sigmoid(w RMSNorm(x)): erase along k, write v there.

    X is D x n; x is X itself, or for n > 1 a learned compression of it.
    `width`: n, the number of columns of X.
    `compress`: with n > 1, channel compresses over the n columns, and token over the last four tokens.
    `expand`: the columns of the embedding are made by repeat, or with token by a convolution.
    `value`: bounded is v = 4 sigmoid(W x + c), as in the released code, and linear v = W RMSNorm(x), as in the paper.
    `beta`: the value of b at the start.
    At initialisation: kernels are the identity, different from the plain residual for every setting: b = 0 is
    the identity. The code's random kernels, which a global re-initialisation leaves behind, are not followed.
    Cost: (n + 1)(D + 1) parameters per sublayer and a compressor per layer; the state holds n D, and x until
    the write.
    Token convolutions look back three tokens: when decoding, `past` carries those of the embedding and of every read.
    Deep Delta Learning, arXiv 2601.00417.
    """

    at_start = "different"
    mixes = "operator"
    takes_zero = False  # the direction of nothing: its gradient is 1 / DIRECTION_EPS

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        width: int = 1,
        compress: Literal["none", "channel", "token"] = "none",
        expand: Literal["repeat", "token"] = "repeat",
        value: Literal["bounded", "linear"] = "bounded",
        beta: float = 1.0,
        kinds: Sequence[str] | None = None,
    ) -> None:
        super().__init__(dim, sublayers)
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        if (width > 1) != (compress != "none"):
            raise ValueError(
                f"a stream wider than one column needs compress=channel or compress=token, and one of width 1 takes "
                f"neither; got width={width}, compress={compress}"
            )
        if width == 1 and expand == "token":
            raise ValueError(
                "expand=token makes the columns of a wide stream: it needs width of at least 2"
            )
        if not 0 < beta < 2:
            raise ValueError(f"beta must lie between 0 and 2, got {beta}")
        self.width, self.bounded = width, value == "bounded"
        self.convolves = compress == "token"
        self.token_local = not self.convolves and expand != "token"
        self.writes = nn.ModuleDict(
            {str(i): DeltaWrite(dim, width, beta, self.bounded) for i in range(sublayers)}
        )
        self.expander = TokenExpander(dim, width) if expand == "token" else None
        # One compressor a layer, named after its first sublayer and shared by the others; one more for the final read.
        starts = layer_starts(sublayer_kinds(sublayers, kinds))
        self.compressor_of = tuple(
            str(max(s for s in starts if s <= i)) for i in range(sublayers)
        ) + (str(sublayers),)
        compressor = ChannelCompressor if compress == "channel" else TokenCompressor
        names = dict.fromkeys(self.compressor_of) if width > 1 else {}
        self.compressors = nn.ModuleDict({name: compressor(dim, width) for name in names})

    def layout(self, i: int) -> Layout:
        return ("stream",)

    def layouts_at(self, verb: Next, i: int) -> Sequence[Layout]:
        """Alone; or resumed, with the queue behind it (see `resume`)."""
        first = self.layout(i) if verb == "read" else (*self.layout(i), "read")
        queue = (
            (*(f"tokens before read {n}" for n in range(self.sublayers + 1)),)
            if self.convolves
            else ()
        )
        queue += () if self.expander is None else ("tokens before the embedding",)
        return (first, (*first, *queue)) if queue else (first,)

    def may_cut(self, i: int) -> bool:
        """The sublayers of a layer share their compressor."""
        return self.width == 1 or self.compressor_of[i] == self.keys[i]

    def keep_only(self, start: int, stop: int) -> None:
        if start:
            self.expander = None
        expander, self.expander = self.expander, None
        super().keep_only(start, stop)
        self.expander = expander

    def _begin(self, x: Tensor) -> State:
        if self.expander is not None:
            return (self.expander(x),)
        return (x.unsqueeze(-2).expand(*x.shape[:-1], self.width, self.dim),)

    def resume(self, x: Tensor, past: State) -> State:
        """Behind the stream, a queue: what reads 0 to L look back at; each takes the first and leaves its own last."""
        last_embeddings: State = ()
        if self.expander is None:
            (stream,) = self._begin(x)
        else:
            embeddings = torch.cat((past[0] if past else look_back(x, -2), x), dim=-2)
            stream, last_embeddings = (
                self.expander(embeddings)[..., KERNEL - 1 :, :, :],
                (last_tokens(embeddings, -2),),
            )
        reads = self.sublayers + 1 if self.convolves else 0
        queue = past[len(last_embeddings) :] if past else (look_back(stream, -3),) * reads
        return (stream, *queue, *last_embeddings)

    def past(self, state: State) -> State:
        stream, *queue = state
        return self._turn(stream, queue)

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        stream, *queue = state
        x = self._compress(stream, i, queue)
        return apply_norm(norm, x), (stream, x, *self._turn(stream, queue))

    def _turn(self, stream: Tensor, queue: Sequence[Tensor]) -> State:
        """The queue after a read: what it looked back at is gone, what later tokens will see of it stands last."""
        if not (self.convolves and queue):
            return tuple(queue)
        return (*queue[1:], last_tokens(torch.cat((queue[0], stream), dim=-3), -3))

    def _write(self, state: State, i: int, y: Tensor) -> State:
        stream, x, *queue = state
        write = cast(DeltaWrite, self.writes[self.keys[i]])
        beta = hold(
            2 * (project_normed(x, write.beta_weight) + wide(write.beta_bias)).sigmoid()
        )  # (..., 1)
        if self.bounded:
            value = (
                VALUE_BOUND * project(x, write.value_weight, write.value_bias).sigmoid()
            )  # (..., n)
        else:
            value = project_normed(x, write.value_weight)
        y = wide(y)
        length = torch.rsqrt(y.square().sum(-1, keepdim=True) + DIRECTION_EPS**2)
        direction = hold(y * length).unsqueeze(-2)  # (..., 1, D)
        overlap = (direction * wide(stream)).sum(-1, keepdim=True)  # (..., n, 1)
        written = hold(beta * value * length).unsqueeze(-1) * y.unsqueeze(-2)
        return (
            (wide(stream) + written - beta.unsqueeze(-1) * overlap * direction).to(stream.dtype),
            *queue,
        )

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        stream, *queue = state
        return apply_norm(norm, self._compress(stream, self.sublayers, queue))

    def _weights(self, state: State, i: int) -> Tensor:
        """Over the columns: their weights in the read, before any convolution."""
        if self.width == 1:
            return torch.ones(1, *state[0].shape[:-2], 1, device=state[0].device)
        read = cast(ChannelCompressor, self.compressors[self.compressor_of[i]]).read.detach()
        return read.view(-1, *[1] * (state[0].dim() - 1)).expand(-1, *state[0].shape[:-2], 1)

    def flops_per_token(self) -> int:
        per_write = 2 * (self.width + 1) * self.dim + 7 * self.width * self.dim
        taps = sum(
            p.numel() for name, p in self.compressors.named_parameters() if name.endswith("kernel")
        )
        reads_per_compressor = (self.sublayers + 1) / max(1, len(self.compressors))
        return self.sublayers * per_write + int(2 * taps * reads_per_compressor)

    def _compress(self, stream: Tensor, i: int, queue: Sequence[Tensor]) -> Tensor:
        if self.width == 1:
            return stream.squeeze(-2)
        compressor = self.compressors[self.compressor_of[i]]
        if not (self.convolves and queue):
            return compressor(stream)
        return compressor(torch.cat((queue[0], stream), dim=-3))[..., KERNEL - 1 :, :]
