"""Make Triton's interpreter faster, and nearer to a GPU.

It does the same things over and over: at every call of a device function it replaces functions of
the language by its own, at every addition it builds types anew. Doing so once takes half of the
time. Nothing that it checks is left out, integers that overflow included. Seen on Triton 3.6; if
the interpreter has other parts, it stays as it is.
"""

import functools
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any

PARTS = {
    "triton.runtime.interpreter": (
        "GridExecutor", "_patch_lang", "_patch_builtin", "_patch_attr", "_LangPatchScope", "_get_np_dtype", "ReduceOps",
        "tl",
    ),
    "triton.language.core": ("tensor", "tuple", "constexpr", "is_builtin", "_unwrap_shape"),
    "triton.language.semantic": ("TritonSemantic",),
}  # fmt: skip


def speed_up() -> None:
    from triton.language import core, semantic
    from triton.runtime import interpreter

    modules = (interpreter, core, semantic)
    if all(
        hasattr(module, name)
        for module, names in zip(modules, PARTS.values(), strict=True)
        for name in names
    ):
        patch_once_a_launch(interpreter)
        list_functions_once(interpreter, core)
        make_types_once(interpreter, core)
        check_overflow_at_once(semantic)
        combine_halves(interpreter)


def round_to_nearest() -> None:
    """Round from fp32 to bf16 as a GPU does, to the nearest and of two the even one.

    The interpreter cuts the lower half of the bits off, which is twice as far from the truth.
    """
    from triton.runtime import interpreter

    convert, core = interpreter._convert_float, interpreter.tl

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (core.bfloat16, core.float32):
            return values.astype("uint32") << 16
        if (source, target) != (core.float32, core.bfloat16):
            return convert(values, source, target, mode)
        bits = values.view("uint32")
        upper = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        # The carry would turn some NaN into a number.
        upper[values != values] = 0x7FC0
        return upper.astype("uint16")

    interpreter._convert_float = rounded


def keep_masks_boolean() -> None:
    """Let loads and stores take a mask of integers, which those of Triton 3.9 refuse.

    A comparison of two numbers becomes integers when it is spread over a block.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    for name in ("create_masked_load", "create_masked_store"):
        setattr(builder, name, _with_a_boolean_mask(getattr(builder, name)))


def _with_a_boolean_mask(method: Callable[..., Any]) -> Callable[..., Any]:
    names = list(inspect.signature(method).parameters)

    @functools.wraps(method)
    def masked(*arguments: Any) -> Any:
        mask = arguments[names.index("mask")]
        mask.data = mask.data.astype(bool, copy=False)
        return method(*arguments)

    return masked


def patch_once_a_launch(interpreter: Any) -> None:
    """Replace the language's functions once a launch, not at every call of a device function."""
    language = interpreter.tl
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[tuple[bool, bool]] = set()

    def once(fn: Callable[..., Any]) -> Any:
        noted = [
            value
            for value in fn.__globals__.values()
            if value is language or value is language.core
        ]
        key = (language in noted, language.core in noted)
        if key in patched:
            return interpreter._LangPatchScope()  # nothing to restore
        patched.add(key)
        return patch(fn)

    def launched(self: Any, *arguments: Any, **named: Any) -> Any:
        patched.clear()
        try:
            return launch(self, *arguments, **named)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, launched


def list_functions_once(interpreter: Any, core: Any) -> None:
    """List the functions to be replaced once; those that are replaced already stay so."""
    names_by_id: dict[int, list[tuple[str, Any]]] = {}

    def replace_functions(owner: Any, builder: Any, scope: Any) -> None:
        if id(owner) not in names_by_id:
            names_by_id[id(owner)] = [
                (name, member)
                for name, member in inspect.getmembers(owner)
                if core.is_builtin(member)
            ]
        for name, member in names_by_id[id(owner)]:
            if getattr(owner, name) is member:
                interpreter._patch_attr(owner, name, member, builder, scope)

    interpreter._patch_builtin = replace_functions


def make_types_once(interpreter: Any, core: Any) -> None:
    """Compute once what follows only from a shape or a dtype."""
    find, unwrap = interpreter._get_np_dtype, core._unwrap_shape
    scalars: dict[str, Any] = {}

    def numpy_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in scalars:
            scalars[name] = find(kind.scalar)
        return scalars[name]

    @functools.cache
    def sizes(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple(
            [core.constexpr(size) for size in shape]
        )

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        super(core.tensor, self).__init__()
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes(tuple(type.shape) if type.is_block() else ())

    def unwrap_shape(shape: Any) -> list[Any]:
        if isinstance(shape, list | tuple | core.tuple):
            actual = [size.value if isinstance(size, core.constexpr) else size for size in shape]
            if all(type(size) is int for size in actual):
                return actual
        return unwrap(shape)

    interpreter._get_np_dtype = numpy_dtype
    core.tensor.__init__, core._unwrap_shape = make_tensor, unwrap_shape


def check_overflow_at_once(semantic: Any) -> None:
    """Check with NumPy's integers, instead of ten operations of the language."""

    def check(self: Any, left: Any, right: Any, operation: Callable[..., Any]) -> None:
        kind = left.type.scalar
        if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        assert kind == right.type.scalar
        assert kind.is_int()
        compute = getattr(operator, operation.__name__)  # add, sub, mul
        result = compute(left.handle.data.astype("int64"), right.handle.data.astype("int64"))
        fits = (kind.get_int_min_value() <= result) & (result <= kind.get_int_max_value())
        assert fits.all(), (
            f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"
        )

    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = check


def combine_halves(interpreter: Any) -> None:
    """Reduce with a kernel's own function as a GPU does: half with half, not one by one."""

    def reduce(self: Any, given: tuple[Any, ...]) -> list[Any]:
        flat, axis = self.unravel(given, self.axis)
        kinds = [tensor.dtype for tensor in flat]
        parts = [tensor.handle.data for tensor in flat]
        while (size := parts[0].shape[axis]) > 1:  # a power of two
            halves = [
                part.take(range(k, k + size // 2), axis) for k in (0, size // 2) for part in parts
            ]
            both = [
                self.to_tensor(half, kind) for half, kind in zip(halves, kinds * 2, strict=True)
            ]
            actual = self.combine_fn.fn(*both)
            parts = [
                tensor.handle.data
                for tensor in (actual if isinstance(actual, tuple) else (actual,))
            ]
        if not self.keep_dims:
            parts = [part.squeeze(axis) for part in parts]
        elif self.axis is None:
            parts = [part.reshape((1,) * given[0].handle.data.ndim) for part in parts]
        return [self.to_tensor(part, kind) for part, kind in zip(parts, kinds, strict=True)]

    interpreter.ReduceOps.generic_reduce = reduce
