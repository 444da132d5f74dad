"""The ways to run one stack of sublayers (RMSNorm, then a square Linear): ours, plain, and what others offer.

Every arm is a module that maps (tokens, D) to (tokens, D) through `sublayers` sublayers and a final norm, with the same
weights. Peers read all sources at every sublayer, as their interfaces ask.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwater.ops import depth_attention
from headwater.residuals import build

EPS = 1e-6
Reader = Callable[..., Tensor]


class Stack(nn.Module):
    """Sublayers behind a headwater residual."""

    def __init__(self, spec: str, dim: int, sublayers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(dim, eps=EPS) for _ in range(sublayers + 1))
        self.linears = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(sublayers))
        self.residual = build(spec, dim, sublayers)

    def forward(self, x: Tensor) -> Tensor:
        state = self.residual.begin(x)
        for i, linear in enumerate(self.linears):
            h, state = self.residual.read(state, i, norm=self.norms[i])
            state = self.residual.write(state, i, linear(h))
        return self.residual.end(state, norm=self.norms[-1])


class ReadEverySublayer(Stack):
    """The same network where each sublayer reads all its sources through a reader."""

    def __init__(self, spec: str, dim: int, sublayers: int, read: Reader) -> None:
        super().__init__(spec, dim, sublayers)
        self.read_sources = read

    def _read(self, sources: list[Tensor], i: int) -> Tensor:
        if len(sources) == 1:
            return self.norms[i](sources[0])
        parameters = self.residual.reads[str(i)]
        return self.read_sources(
            sources, parameters.query, parameters.key_weight, norm_weight=self.norms[i].weight
        )

    def forward(self, x: Tensor) -> Tensor:
        block = self.residual.block
        sources = [x]
        for i, linear in enumerate(self.linears):
            y = linear(self._read(sources, i))
            sources = [*sources[:-1], sources[-1] + y] if i % block else [*sources, y]
        return self._read(sources, len(self.linears))


class FlashAttnRes(Stack):
    """The same network over flash-attn-res' two phases, as its own model runs them, and a norm after each."""

    def forward(self, x: Tensor) -> Tensor:
        from flash_attn_res import phase_1_batched_attention_triton_op as phase_1
        from flash_attn_res import phase_2_online_softmax_merge_triton_op as phase_2

        reads = [None, *(self.residual.reads[str(i)] for i in range(1, len(self.norms)))]
        queries = [None if read is None else read.query * read.key_weight for read in reads]
        block, blocks = self.residual.block, [x.unsqueeze(0)]
        for start in range(0, len(self.norms), block):
            block_queries = [q for q in queries[start : start + block] if q is not None]
            out, lse = phase_1(torch.stack(blocks), torch.stack(block_queries), EPS)
            total = None
            for i in range(start, min(start + block, len(self.norms))):
                k = i - start - (start == 0)
                if i == 0:
                    h = blocks[0]
                else:
                    h = out[k] if total is None else phase_2(total, queries[i], out[k], lse[k], EPS)
                h = self.norms[i](h)
                if i == len(self.linears):
                    return h.squeeze(0)
                y = self.linears[i](h)
                total = y if total is None else total + y
            blocks.append(total)
        raise AssertionError("the final norm ends the loop")


# Readers: (sources, query, key_weight, norm_weight or None) to the read, normed if a weight is given.


def normed(mixed: Tensor, norm_weight: Tensor | None) -> Tensor:
    return mixed if norm_weight is None else F.rms_norm(mixed, mixed.shape[-1:], norm_weight, EPS)


reference_read: Reader = partial(depth_attention, eps=EPS, backend="reference")


def formula_read(
    sources: list[Tensor], query: Tensor, key_weight: Tensor, norm_weight: Tensor | None
) -> Tensor:
    """The paper's formula as one would type it in; with sums, not matrix products, so that the compiler fuses it."""
    stack = torch.stack(sources)  # (N, T, D)
    logits = (F.rms_norm(stack, stack.shape[-1:], key_weight, EPS) * query).sum(
        -1, keepdim=True, dtype=torch.float32
    )
    return normed((logits.softmax(0).to(stack.dtype) * stack).sum(0), norm_weight)


def fla_read(level: int) -> Reader:
    from fla.ops.attnres import fused_attnres

    def read(
        sources: list[Tensor], query: Tensor, key_weight: Tensor, norm_weight: Tensor | None
    ) -> Tensor:
        shaped = [source.unsqueeze(0) for source in sources]  # (B, T, D)
        read = fused_attnres(
            query, shaped, key_weight, norm_weight, rms_eps=EPS, checkpoint_level=level
        )
        return (read[0] if isinstance(read, tuple) else read).squeeze(0)

    return read


def liger_read() -> Reader:
    from liger_kernel.transformers.functional import liger_attn_res

    def read(
        sources: list[Tensor], query: Tensor, key_weight: Tensor, norm_weight: Tensor | None
    ) -> Tensor:
        stack = torch.stack(sources).unsqueeze(1)  # (N, B, T, D)
        return normed(liger_attn_res(stack, query, key_weight, EPS).squeeze(0), norm_weight)

    return read


def fast_attnres_read() -> Reader:
    from attnres import attnres

    def read(
        sources: list[Tensor], query: Tensor, key_weight: Tensor, norm_weight: Tensor | None
    ) -> Tensor:
        mixed = attnres([source.unsqueeze(0) for source in sources], query * key_weight, eps=EPS)
        return normed(mixed.squeeze(0), norm_weight)

    return read


def flash_attn_res_read() -> Reader:
    from flash_attn_res import phase_1_batched_attention_triton_op as phase_1

    def read(
        sources: list[Tensor], query: Tensor, key_weight: Tensor, norm_weight: Tensor | None
    ) -> Tensor:
        stack = torch.stack(sources).unsqueeze(1)  # (N, B, T, D)
        return normed(
            phase_1(stack, (query * key_weight).unsqueeze(0), EPS)[0][0].squeeze(0), norm_weight
        )

    return read


READERS: dict[str, Callable[[], Reader]] = {
    "headwater": lambda: partial(depth_attention, eps=EPS, backend="triton"),
    "pytorch": lambda: formula_read,
    "fla-0": lambda: fla_read(0),
    "fla-1": lambda: fla_read(1),
    "fla-gluon": lambda: fla_read(1),  # the process that runs it has FLA_ATTNRES_GLUON set
    "liger": liger_read,
    "fast-attnres": fast_attnres_read,
    "flash-attn-res": flash_attn_res_read,
}


def reader(name: str) -> Reader:
    """One read by its name; '-compiled' goes through torch.compile."""
    read = READERS[name.removesuffix("-compiled")]()
    return torch.compile(read, dynamic=False) if name.endswith("-compiled") else read


def arm(name: str, spec: str, dim: int, sublayers: int) -> nn.Module:
    """A module in bf16 on the GPU; names ending in '-compiled' go through torch.compile."""
    base, compiled = name.removesuffix("-compiled"), name.endswith("-compiled")
    module: nn.Module
    if base in ("plain", "headwater"):
        module = Stack("standard" if base == "plain" else spec, dim, sublayers)
    elif base == "flash-attn-res":
        module = FlashAttnRes(spec, dim, sublayers)
    else:
        module = ReadEverySublayer(spec, dim, sublayers, READERS[base]())
    fill(module)
    module = module.to("cuda", torch.bfloat16)
    return torch.compile(module) if compiled else module


def fill(module: nn.Module, seed: int = 0) -> None:
    """The same draw for every arm: linears keep their scale, queries and key weights leave their start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            if "linears" in name:
                parameter.copy_(draw * parameter.shape[-1] ** -0.5)
            elif "query" in name:
                parameter.copy_(draw * 0.02)
            else:
                parameter.copy_(1 + 0.1 * draw)
