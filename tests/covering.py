"""Specs of a residual that cross its options: each value of an option beside each of the others."""

import inspect
from itertools import combinations, product
from random import Random
from typing import Literal, get_args, get_origin

from headwater.residuals import build, entry
from headwater.residuals.options import spell

DIM, SUBLAYERS = 12, 10
# Values of options that are numbers, besides the default: different from each other, and from the
# sizes of the tests, so that an exchange shows.
NUMBERS = {
    "attnres-block": {
        "block": [3, 4],
        "heads": [2],
        "window": [1, 2],
        "key_dim": [6],
        "start": [0.5],
        "eps": [0.1],
    },
    "attnres-full": {
        "heads": [4],
        "window": [1, 3],
        "key_dim": [8],
        "start": [0.25],
        "eps": [0.03],
    },
    "attnres-routed": {"block": [3, 4], "eps": [0.1]},
    "ddl": {"width": [2, 3], "beta": [0.5]},
    "deepcrossattention": {"last": [1, 2]},
    "deepnorm": {"eps": [0.1]},
    "delta-attnres": {"block": [2, 4], "eps": [0.1]},
    "denseformer": {"dilation": [2, 3], "period": [2, 3]},
    "depth-window": {"window": [2, 3], "width": [5]},
    "hyper-attnres": {"streams": [1, 3], "block": [1, 4]},
    "hyper-connections": {"streams": [1, 3]},
    "laurel": {"rank": [3], "states": [2, 4]},
    "layerscale": {"start": [0.25]},
    "gated-hc": {"streams": [2, 3], "rank": [5], "eps": [0.1]},
    "identity-hc": {"streams": [2, 3], "magnitude": [1.5], "eps": [0.1], "norm_eps": [0.03]},
    "mhc": {"streams": [2, 3], "iterations": [2], "eps": [0.1], "norm_eps": [0.03]},
    "mhc-lite": {"streams": [2, 3]},
    "rezero": {"start": [0.5]},
}
# Kernels, and reads in two phases, have tests of their own.
WITHOUT_KERNELS = {"backend": ["auto", "reference"], "schedule": ["auto", "one-pass"]}


def values_of(name):
    """The values of each option, its default among them."""
    keywords = inspect.signature(entry(name).build).parameters
    values = {}
    for option, kind in entry(name).options.items():
        if option in WITHOUT_KERNELS:
            values[option] = WITHOUT_KERNELS[option]
        elif get_origin(kind) is Literal:
            values[option] = list(get_args(kind))
        elif kind is bool:
            values[option] = [True, False]
        else:
            values[option] = [keywords[option].default, *NUMBERS[name][option]]
    return values


def covering(name):
    """The spec of `name`, and specs that have each pair of values that can be built together."""
    values, random = values_of(name), Random(0)
    pairs = set()
    for one, other in combinations(values, 2):
        pairs.update(product(product([one], values[one]), product([other], values[other])))
    # A residual with one option has no pairs.
    specs = [name, *(spec_of(name, {option: v}) for option in values for v in values[option])]
    specs = specs if len(values) == 1 else [name]
    while pairs:
        pair = min(pairs, key=repr)
        draws = []
        for _ in range(40):
            draw = {option: random.choice(values[option]) for option in values}
            draws.append({**draw, **dict(pair)})
        draws.sort(key=lambda options: -len(pairs & pairs_of(options)))
        pairs.discard(pair)
        for options in draws:
            if can_be_built(spec_of(name, options)):
                specs.append(spec_of(name, options))
                pairs -= pairs_of(options)
                break
    return list(dict.fromkeys(specs))


def pairs_of(options):
    return set(combinations(options.items(), 2))


def spec_of(name, options):
    keywords = inspect.signature(entry(name).build).parameters
    words = []
    for option, value in options.items():
        if value != keywords[option].default:
            words.append(f"{option}={spell(value)}")
    return f"{name}:{','.join(words)}" if words else name


def can_be_built(spec):
    try:
        build(spec, DIM, SUBLAYERS)
    except ValueError:
        return False
    return True
