"""How a kernel is launched, and the key of a compiled one: a stand-in needs no GPU."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="launching needs triton")

import triton

from headwater.ops.triton import launch as launching


class Kernel:
    """A kernel such as triton.jit makes: `M` may vary, `D` is specialised for.

    It notes which way each launch went.
    """

    __name__ = "_kernel"
    arg_names = ("x", "y", "M", "D", "BD", "STAGES")

    def __init__(self):
        self.pre_run_hooks, self.ways, self.compilations = [], [], 0
        self.params = [
            SimpleNamespace(is_constexpr=name in ("BD", "STAGES"), do_not_specialize=name == "M")
            for name in self.arg_names
        ]

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.ways.append(("public", grid, arguments[2:], constants))
            self.compilations += 1
            return SimpleNamespace(run=self.run, function="function", packed_metadata="metadata")

        return run

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        assert (z, stream, function, metadata) == (1, 77, "function", "metadata")
        assert launch_metadata is enter is leave is None
        self.ways.append(("direct", (x, y), arguments))


@pytest.fixture
def kernel(monkeypatch):
    """A kernel on a CPU tensor's device, -1, as if it were a GPU's; nothing is compiled yet."""
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "DIRECT", True)
    monkeypatch.setattr(launching, "current_device", lambda: -1)
    monkeypatch.setattr(launching, "current_stream", lambda index: 77)
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(launching, "_numbers_fixed", {})
    return Kernel()


OPTIONS = {"num_warps": 4, "num_stages": 2}


def start(kernel, rows=5, width=8, dtype=torch.float32, tensors=None, **constants):
    tensors = tensors or torch.zeros(2, 16, dtype=dtype).unbind()
    constants = {"BD": 8, **constants}
    launching.launch(kernel, (rows,), tensors, (rows, width), constants, **OPTIONS)
    return tensors


def ways_of(kernel):
    """Which way each launch went."""
    return [way[0] for way in kernel.ways]


def direct_launch(x, y):
    return "direct", (5, 1), (x.data_ptr(), y.data_ptr(), 5, 8, 8, 2)


def test_a_kernel_is_compiled_by_the_public_way_and_then_run_by_address(kernel):
    start(kernel)
    x, y = start(kernel)
    (first, _, numbers, constants), second = kernel.ways
    assert (first, numbers) == ("public", (5, 8))
    assert constants == {"BD": 8, "num_stages": 1, "STAGES": 2, "num_warps": 4}
    assert second == direct_launch(x, y)


def prepared(kernel):
    return launching.Launch(kernel, (5,), (5, 8), {"BD": 8}, **OPTIONS)


def test_a_prepared_launch_keeps_the_kernel(kernel):
    ready, (x, y) = prepared(kernel), torch.zeros(2, 4)
    for _ in range(4):
        ready(x, y)
    assert ways_of(kernel) == ["public", "direct", "direct", "direct"]
    assert kernel.ways[1] == kernel.ways[3] == direct_launch(x, y)
    kernel.pre_run_hooks.append(print)
    ready(x, y)
    assert kernel.ways[-1][0] == "public"


@pytest.mark.parametrize("other", [torch.zeros(2, 8).bfloat16(), torch.zeros(9)[1:].view(2, 4)])
def test_a_prepared_launch_keeps_it_for_these_types_and_whole_addresses_alone(kernel, other):
    ready, tensors = prepared(kernel), torch.zeros(2, 4)
    for arguments in (tensors, tensors, tensors, other, other, other, tensors):
        ready(*arguments)
    assert ways_of(kernel) == ["public", "direct", "direct"] * 2 + ["direct"]
    addresses = [way[2][0] for way in kernel.ways[-2:]]
    assert addresses == [other.data_ptr(), tensors.data_ptr()]


def test_a_kernel_may_take_tensors_alone(kernel):
    kernel.arg_names = ("x", "y", "BD", "STAGES")
    kernel.params = [kernel.params[place] for place in (0, 1, 4, 5)]
    tensors = torch.zeros(2, 4).unbind()
    for _ in range(2):
        launching.launch(kernel, (3,), tensors, (), {"BD": 8}, num_warps=4)
    assert ways_of(kernel) == ["public", "direct"]


def test_lengths_vary_without_a_compilation_and_without_a_new_entry(kernel):
    for rows in range(1, 50):
        start(kernel, rows)
        assert kernel.ways[-1][1][0] == rows
        # This launch's number, not the first one's
        assert kernel.ways[-1][2][-4 if rows > 1 else 0] == rows
    assert kernel.compilations == len(launching._compiled) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"width": 16},
        {"dtype": torch.bfloat16},
        {"BD": 16},
        {"tensors": (torch.zeros(9)[1:5],) * 2},  # not at multiples of 16
        {"rows": 2**31},  # an int64 from here on
    ],
)
def test_what_a_kernel_is_specialised_for_has_an_entry_of_its_own(kernel, change):
    start(kernel)
    start(kernel, **change)
    assert kernel.compilations == len(launching._compiled) == 2
    start(kernel, **change)
    start(kernel)
    assert kernel.compilations == 2


def test_two_kernels_have_entries_of_their_own(kernel):
    other = Kernel()
    start(kernel)
    start(other)
    assert (kernel.compilations, other.compilations) == (1, 1)


def test_the_table_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(launching, "MOST", 10)
    for width in range(1, 40):
        start(kernel, width=width)
        assert len(launching._compiled) <= 10
    start(kernel, width=39)
    assert kernel.ways[-1][0] == "direct"


@pytest.mark.parametrize(
    ("version", "hip", "direct"),
    [
        ("3.6.1+git", None, True),
        ("3.7.0", None, False),
        ("3.60.0", None, False),
        ("3.6.0", "6.4", False),
    ],
)
def test_only_known_versions_are_run_directly(version, hip, direct):
    assert launching.runs_directly(version, hip) == direct


def test_on_an_unknown_version_every_launch_is_public_and_needs_no_private_part(
    kernel, monkeypatch
):
    monkeypatch.setattr(launching, "DIRECT", False)
    monkeypatch.setattr(Kernel, "run", None)
    for _ in range(3):
        start(kernel)
    assert ways_of(kernel) == ["public"] * 3
    # With the stages that fitted the first time
    assert all(way == kernel.ways[0] for way in kernel.ways)


def test_hooks_are_served_by_the_public_way_as_long_as_they_are_set(kernel, monkeypatch):
    start(kernel)
    runtime = triton.knobs.runtime

    def hook(metadata):
        raise AssertionError("the stand-in does not call it")

    def way():
        start(kernel)
        return kernel.ways[-1][0]

    for chain in (runtime.launch_enter_hook, runtime.launch_exit_hook, kernel.pre_run_hooks):
        add = chain.append if isinstance(chain, list) else chain.add
        add(hook)
        assert way() == "public"
        chain.remove(hook)
        assert way() == "direct"
    monkeypatch.setattr(runtime, "launch_exit_hook", hook)  # a single hook, without a chain
    assert way() == "public"
    monkeypatch.setattr(runtime, "launch_exit_hook", None)
    assert way() == "direct"


def test_another_device_is_made_the_current_one(kernel, monkeypatch):
    current = [0]
    monkeypatch.setattr(launching, "current_device", lambda: current[-1])

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *_):
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(
        launching, "current_stream", lambda index: 77 if current[-1] == index else 0
    )
    start(kernel)
    start(kernel)
    assert ways_of(kernel) == ["public", "direct"]
    ready, tensors = prepared(kernel), torch.zeros(2, 4)
    with Device(-1):
        ready(*tensors)
    ready(*tensors)
    assert [way[0] for way in kernel.ways[2:]] == ["direct", "direct"]
    assert current == [0]


def launched(tree):
    """Kernels that a file launches: name, parameters but constants, and the declared ones."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("launch", "Launch"):
            names.add(ast.unparse(node.args[0]))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name in names:
            (jit,) = function.decorator_list
            declared = []
            if isinstance(jit, ast.Call):
                declared = eval(ast.unparse(jit.keywords[0].value), vars(launching))
            parameters = {arg.arg for arg in function.args.args if arg.annotation is None}
            yield function.name, parameters, set(declared)


def test_kernels_declare_the_lengths_that_vary():
    """Otherwise one is compiled, and kept, for ones and multiples of 16 apart."""
    lengths = "M N S Q ZQ PS PT s0 T tokens count start scale B s_l unasked"
    vary = {*lengths.split(), *(f"a{n}" for n in range(launching.CHUNK))}
    folder, kernels = Path(launching.__file__).parent.parent, []
    for path in folder.rglob("*.py"):
        kernels += launched(ast.parse(path.read_text()))
    assert len(kernels) >= 12
    for name, parameters, declared in kernels:
        assert parameters & vary == declared, name
