"""Deep Delta Learning: the stream is a matrix, and a sublayer's output is the direction along which
it is rewritten."""

from collections.abc import Sequence
from math import log
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Layout, Next, Norm, Residual, State, apply_norm, even_weights, hold
from .layerwise import layer_starts, spread, sublayer_kinds
from .numerics import project, project_normed, wide
from .options import check_range
from .registry import register

KERNEL = 4  # tokens that a token convolution sees
DIRECTION_EPS = 1e-5
VALUE_BOUND = 4.0


class DeltaWrite(nn.Module):
    def __init__(self, dim: int, width: int, beta: float, bounded: bool) -> None:
        super().__init__()
        # Small draws: the first steps of beta and value come from their biases.
        std = 0.5 / dim**0.5
        self.beta_weight = nn.Parameter(std * torch.randn(1, dim))
        logit = log(beta / (2 - beta))
        self.beta_bias = nn.Parameter(torch.full((1,), logit))
        self.value_weight = nn.Parameter(std * torch.randn(width, dim))
        self.value_bias = nn.Parameter(torch.zeros(width)) if bounded else None


class ChannelCompressor(nn.Module):
    """A per-channel kernel slid over the stream's columns (one before, the rest after), then a
    weighted sum of them."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.read = nn.Parameter(torch.full((width,), 1 / width))
        # The identity, (taps = width, D).
        identity = torch.eye(width)[1].unsqueeze(-1)
        self.kernel = nn.Parameter(identity.repeat(1, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., n, D) to (..., D)."""
        # Both steps are linear, so their product is formed once, on the parameters.
        taps = []
        for o in range(len(self.read)):
            taps.append(F.pad(self.kernel, (0, 0, o - 1, 1 - o)))
        read = self.read.view(-1, 1, 1)
        folded = (torch.stack(taps) * read).sum(0)  # (in, D)
        values = wide(x)
        return (values * folded.to(values.dtype)).sum(-2).to(x.dtype)


class TokenCompressor(nn.Module):
    """A causal depthwise convolution over tokens for each column and channel, then a weighted sum
    of the columns."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.read = nn.Parameter(torch.full((width,), 1 / width))
        self.kernel = token_kernel(dim, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., T, n, D) to (..., T, D)."""
        values = wide(x)
        folded = self.kernel * self.read.unsqueeze(-1)
        taps = [(values * tap).sum(-2) for tap in folded.to(values.dtype)]
        return causal_sum(taps).to(x.dtype)


class TokenExpander(nn.Module):
    """The embedding's columns, each a causal depthwise convolution over tokens that starts as the
    identity."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.kernel = token_kernel(dim, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., T, D) to (..., T, n, D)."""
        values = wide(x)
        columns = []
        for kernel in self.kernel.to(values.dtype).unbind(1):
            columns.append(causal_sum([values * tap for tap in kernel]))
        return torch.stack(columns, dim=-2).to(x.dtype)


def token_kernel(dim: int, width: int) -> nn.Parameter:
    """Make the kernel (taps, n, D) of a token convolution, which is the identity."""
    identity = torch.eye(KERNEL)[-1].view(-1, 1, 1)
    return nn.Parameter(identity.repeat(1, width, dim))


def causal_sum(taps: Sequence[Tensor]) -> Tensor:
    """Sum taps (..., T, D), shifted along T: the last is of this token, the one before it of the
    token before."""
    # A tap of an earlier token is shifted toward later ones; zeros come in.
    length = taps[0].shape[-2]
    shifted = []
    for back, tap in enumerate(reversed(taps)):
        later = F.pad(tap, (0, 0, back, 0))
        shifted.append(later[..., :length, :])
    return torch.stack(shifted).sum(0)


def look_back(x: Tensor, axis: int) -> Tensor:
    """Return zeros, which a convolution sees before the first token of x."""
    shape = list(x.shape)
    shape[axis] = KERNEL - 1
    return x.new_zeros(shape)


def last_tokens(x: Tensor, axis: int) -> Tensor:
    """Copy the tokens that a later one looks back at, so that the rest of x can go."""
    count = KERNEL - 1
    return x.narrow(axis, x.shape[axis] - count, count).clone()


COMPRESSORS = {"none": None, "channel": ChannelCompressor, "token": TokenCompressor}


@register("ddl")
class DeepDeltaResidual(Residual):
    """X' = X + b k (v^T - k^T X),  k = f(x) / |f(x)|,  b = 2 sigmoid(w RMSNorm(x)): erase along k, write v there.

    X is D x n; x is X itself, or for n > 1 a learned compression of it.
    `width`: n, the number of columns of X.
    `compress`: with n > 1, channel compresses over the n columns, and token over the last four
        tokens.
    `expand`: the columns of the embedding are made by repeat, or with token by a convolution.
    `value`: bounded is v = 4 sigmoid(W x + c), as in the released code, and linear v = W
        RMSNorm(x), as in the paper.
    `beta`: the value of b at the start.
    At initialisation: kernels are the identity, different from the plain residual for every
    setting: b = 0 is the identity. The code's random kernels, which a global re-initialisation
    leaves behind, are not followed.
    Cost: (n + 1)(D + 1) parameters per sublayer and a compressor per layer; the state holds n D,
    and x until the write.
    Token convolutions look back three tokens: when decoding, `past` carries those of the embedding
    and of every read. Deep Delta Learning, arXiv 2601.00417.
    """

    at_start = "different"
    mixes = "operator"
    # An output of zero has no direction: its gradient is 1 / DIRECTION_EPS.
    takes_zero = False

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
        check_range("width", width, 1)
        compressor = COMPRESSORS[compress]
        if (width > 1) != (compressor is not None) or (width == 1 and expand == "token"):
            raise ValueError(
                "a stream wider than one column needs compress=channel or compress=token, and one "
                f"of width 1 takes neither, nor expand=token; got {width=}, {compress=}, {expand=}"
            )
        self.width = width
        self.bounded = {"bounded": True, "linear": False}[value]
        self.convolves = compress == "token"
        self.token_local = not self.convolves and expand != "token"
        self.writes = nn.ModuleDict()
        for i in range(sublayers):
            self.writes[str(i)] = DeltaWrite(dim, width, beta, self.bounded)
        expander = {"repeat": None, "token": TokenExpander}[expand]
        self.expander = None if expander is None else expander(dim, width)
        # One compressor per layer, named after its first sublayer and shared by the others; one
        # more for the final read.
        starts = layer_starts(sublayer_kinds(sublayers, kinds))
        owners = [max(start for start in starts if start <= i) for i in range(sublayers)]
        self.compressor_of = tuple(map(str, (*owners, sublayers)))
        self.compressors = nn.ModuleDict()
        if compressor is not None:
            for name in dict.fromkeys(self.compressor_of):
                self.compressors[name] = compressor(dim, width)

    def layout(self, i: int) -> Layout:
        return ("stream",)

    def layouts_at(self, verb: Next, i: int) -> Sequence[Layout]:
        """The stream; or, if the state was resumed, the queue behind it (see `resume`)."""
        first = self.layout(i) if verb == "read" else (*self.layout(i), "read")
        queue = []
        if self.convolves:
            queue += [f"tokens before read {n}" for n in range(self.sublayers + 1)]
        if self.expander is not None:
            queue.append("tokens before the embedding")
        return (first, (*first, *queue)) if queue else (first,)

    def may_cut(self, i: int) -> bool:
        # The sublayers of a layer share their compressor.
        return self.width == 1 or self.compressor_of[i] == self.keys[i]

    def keep_only(self, start: int, stop: int) -> None:
        # Only the first stage begins; the expander is in no dict keyed by sublayer.
        expander = None if start else self.expander
        self.expander = None
        super().keep_only(start, stop)
        self.expander = expander

    def _begin(self, x: Tensor) -> State:
        if self.expander is not None:
            return (self.expander(x),)
        columns = x.unsqueeze(-2)
        return (columns.expand(*x.shape[:-1], self.width, self.dim),)

    def resume(self, x: Tensor, past: State) -> State:
        """Begin with a queue behind the stream: the tokens that reads 0 to L look back at.

        Each read takes the first and leaves its own last. Behind them is what the next tokens'
        embeddings look back at.
        """
        last_embeddings: State = ()
        if self.expander is None:
            (stream,) = self._begin(x)
        else:
            before = past[0] if past else look_back(x, -2)
            embeddings = torch.cat((before, x), dim=-2)
            stream = self.expander(embeddings)[..., KERNEL - 1 :, :, :]
            last_embeddings = (last_tokens(embeddings, -2),)
        # The first tokens look back at zeros.
        queue = past[len(last_embeddings) :]
        if self.convolves and not past:
            queue = (look_back(stream, -3),) * (self.sublayers + 1)
        return (stream, *queue, *last_embeddings)

    def past(self, state: State) -> State:
        stream, *queue = state
        return self._turn(stream, queue)

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        stream, *queue = state
        x = self._compress(stream, i, queue)
        return apply_norm(norm, x), (stream, x, *self._turn(stream, queue))

    def _turn(self, stream: Tensor, queue: Sequence[Tensor]) -> State:
        """Return the queue after a read: what it looked back at is gone, what later tokens will see
        of it stands last."""
        if not (self.convolves and queue):
            return tuple(queue)
        tokens = torch.cat((queue[0], stream), dim=-3)
        return (*queue[1:], last_tokens(tokens, -3))

    def _write(self, state: State, i: int, y: Tensor) -> State:
        stream, x, *queue = state
        write = cast(DeltaWrite, self.writes[self.keys[i]])
        # The step beta (..., 1), and the value v (..., n).
        logit = project_normed(x, write.beta_weight) + wide(write.beta_bias)
        beta = hold(2 * logit.sigmoid())
        if self.bounded:
            value = VALUE_BOUND * project(x, write.value_weight, write.value_bias).sigmoid()
        else:
            value = project_normed(x, write.value_weight)
        # The direction k is the output at length one. With weights held it counts as constant where
        # it erases, and y as the source where it writes.
        y = wide(y)
        square = y.square().sum(-1, keepdim=True)
        length = torch.rsqrt(square + DIRECTION_EPS**2)
        direction = hold(y * length).unsqueeze(-2)  # (..., 1, D)
        # What of the stream lies along the direction, column by column.
        overlap = (direction * wide(stream)).sum(-1, keepdim=True)  # (..., n, 1)
        written = hold(beta * value * length).unsqueeze(-1) * y.unsqueeze(-2)
        erased = beta.unsqueeze(-1) * overlap * direction
        return ((wide(stream) + written - erased).to(stream.dtype), *queue)

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        stream, *queue = state
        return apply_norm(norm, self._compress(stream, self.sublayers, queue))

    def _weights(self, state: State, i: int) -> Tensor:
        """Weigh the columns: their weights in the read, before any convolution."""
        column = state[0][..., 0, :]
        if self.width == 1:
            return even_weights(column)
        read = cast(ChannelCompressor, self.compressors[self.compressor_of[i]]).read
        return spread(read, column)

    def flops_per_token(self) -> int:
        # A write makes beta and value, a length, an overlap, and erases and writes.
        per_write = 2 * (self.width + 1) + 7 * self.width
        operations = self.sublayers * per_write * self.dim
        if self.width > 1:
            taps = KERNEL * self.width if self.convolves else self.width
            operations += 2 * taps * self.dim * (self.sublayers + 1)
        return operations

    def _compress(self, stream: Tensor, i: int, queue: Sequence[Tensor]) -> Tensor:
        if self.width == 1:
            return stream.squeeze(-2)
        # With a queue, earlier tokens go before these, and out again.
        compressor = self.compressors[self.compressor_of[i]]
        if not (self.convolves and queue):
            return compressor(stream)
        tokens = torch.cat((queue[0], stream), dim=-3)
        return compressor(tokens)[..., KERNEL - 1 :, :]
