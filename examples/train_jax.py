"""Train an MLP on scikit-learn's digits with JAX, in fp32 and with HOT, side by side.

    HOT_JAX=ON pip install '.[jax,examples]'
    python examples/train_jax.py            # --recipe fast, --steps 400, ...

Every layer of every step gets its own random key. All other code is plain JAX.
"""

from __future__ import annotations

import argparse
import functools

import hotcore.jax as hot
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

SIZES = (64, 256, 256, 10)


def initial(key):
    """Draw weights ``[out, in]`` and biases of all layers."""
    shapes = list(zip(SIZES[1:], SIZES[:-1], strict=True))
    keys = jax.random.split(key, len(shapes))
    return [
        (jax.random.normal(k, shape) * np.sqrt(2 / shape[1]), jnp.zeros(shape[0]))
        for k, shape in zip(keys, shapes, strict=True)
    ]


def logits(params, x, key, recipe):
    """Map ``[N, 64]`` to ``[N, 10]``, in plain fp32 without a recipe. The head stays plain."""
    *hidden, (w, b) = params
    for layer, layer_key in zip(hidden, jax.random.split(key, len(hidden)), strict=True):
        if recipe is None:
            x = x @ layer[0].T + layer[1]
        else:
            x = hot.linear(x, *layer, key=layer_key, config=recipe)
        x = jax.nn.gelu(x)
    return x @ w.T + b


def cross_entropy(params, x, labels, key, recipe):
    chosen = jax.nn.log_softmax(logits(params, x, key, recipe))
    return -jnp.take_along_axis(chosen, labels[:, None], axis=1).mean()


@functools.partial(jax.jit, static_argnames="recipe")
def step(params, momentum, x, labels, key, rate, recipe):
    gradients = jax.grad(cross_entropy)(params, x, labels, key, recipe)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - rate * m, params, momentum), momentum


def train(images, labels, options, recipe):
    """Train on four fifths of the data and print validation figures of the rest."""
    cut = len(images) * 4 // 5
    params = initial(jax.random.key(options.seed))
    momentum = jax.tree.map(jnp.zeros_like, params)
    order, key = np.random.default_rng(options.seed), jax.random.key(options.seed + 1)
    for i in range(1, options.steps + 1):
        batch, step_key = order.integers(cut, size=options.batch), jax.random.fold_in(key, i)
        data = (images[batch], labels[batch])
        params, momentum = step(params, momentum, *data, step_key, options.rate, recipe=recipe)
        if i % max(1, options.steps // 4) == 0:
            loss = cross_entropy(params, images[cut:], labels[cut:], key, recipe)
            right = (logits(params, images[cut:], key, recipe).argmax(1) == labels[cut:]).mean()
            print(f"{recipe or 'fp32':8s} step {i:4d}  loss {loss:.4f}  accuracy {right:.3f}")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
defaults = {"recipe": "default", "steps": 400, "batch": 128, "rate": 0.02, "seed": 0}
for name, value in defaults.items():
    parser.add_argument(f"--{name}", type=type(value), default=value)
options = parser.parse_args()
digits = load_digits()
for recipe in (None, options.recipe):
    train(np.float32(digits.data / 16), digits.target, options, recipe)
