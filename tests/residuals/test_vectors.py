"""The conformance vectors still hold, cover every residual, and agree with what others' implementations gave."""

from pathlib import Path

import pytest
from safetensors import safe_open
from torch.testing import assert_close
from vectors import make

from headwater.residuals import names, parse

FOLDER = Path(make.__file__).parent
FILES = sorted(FOLDER.glob("*.safetensors"))
# Their eps differ: 1e-12 or none on a norm where ours is 1e-6 (hyper-connections, x-transformers); 1e-6 in every
# Sinkhorn step, and fp32 coefficients (transformers).
PEERS = [
    ("hyper-connections", 2e-5),
    ("mhc", 2e-4),
    ("x-transformers-attnres", 2e-5),
    ("x-transformers-deepnorm", 2e-5),
    ("x-transformers-layerscale", 1e-6),
]


def load(path):
    with safe_open(path, "pt") as file:
        return file.metadata()["residual"], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def compare(spec, tensors, tolerance):
    computed = make.evaluate(spec, tensors)
    expected = {k: v for k, v in tensors.items() if k.split(".")[0] in ("read", "gradient")}
    assert expected.keys() <= computed.keys()
    for name, value in expected.items():
        scale = max(1.0, value.abs().max().item())
        assert_close(
            computed[name].detach() / scale,
            value.double() / scale,
            atol=tolerance,
            rtol=0,
            msg=f"{spec}: {name}",
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_vectors_hold(path):
    spec, tensors = load(path)
    assert make.file_of(spec) == path
    compare(spec, tensors, 1e-6)


def test_every_residual_has_a_vector():
    assert {parse(load(path)[0])[0] for path in FILES} == set(names())


@pytest.mark.parametrize(("name", "tolerance"), PEERS)
def test_an_independent_implementation_gave_the_same(name, tolerance):
    spec, tensors = load(FOLDER / "peers" / f"{name}.safetensors")
    compare(spec, tensors, tolerance)


def test_every_recorded_peer_is_compared():
    assert {path.stem for path in (FOLDER / "peers").glob("*.safetensors")} == {
        name for name, _ in PEERS
    }


def test_a_changed_parameter_would_be_noticed():
    spec, tensors = load(FOLDER / "highway.safetensors")
    tensors["parameter.gates.0.bias"] = tensors["parameter.gates.0.bias"] + 1e-3
    with pytest.raises(AssertionError):
        compare(spec, tensors, 1e-6)
