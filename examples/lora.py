"""LoRA with peft on a small Llama, plain and with HOT: the same adapters, the same data.

Base weights are frozen, so HOT computes their input gradients in integers and keeps nothing of
their inputs; the adapters stay plain. Nothing is downloaded: a two-layer Llama is first trained for
a minute's fraction on the source of Python's standard library, then adapted to that text in upper
case. A real model is the same three lines (docs/torch.md):

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(...), LoraConfig(...))
    print(hot.convert(model, "default"))
    ... train as before ...

Needs transformers and peft.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time

import hotcore.torch as hot
import torch
from torch import Generator, Tensor, nn
from train_lib.data import Batch, StdlibText

VOCAB = StdlibText.VOCAB
BATCH = 8


def build(width: int, layers: int) -> nn.Module:
    """A Llama with random weights, of one token a character."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=StdlibText.CONTEXT,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def upper(batch: Batch) -> Batch:
    """The text to adapt to: small letters become capitals."""
    alphabet = bytes(StdlibText.ALPHABET)
    table = torch.arange(VOCAB)
    for letter in range(ord("a"), ord("z") + 1):
        table[alphabet.index(letter)] = alphabet.index(letter - 32)
    return table[batch[0]], table[batch[1]]


def loss_of(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """Mean cross entropy of the next character."""
    inputs, targets = (part.to(device) for part in batch)
    logits = model(input_ids=inputs, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, batch: Batch, device: torch.device) -> float:
    """Loss over ``batch``; the model is put back into training mode."""
    model.eval()
    parts = zip(batch[0].split(32), batch[1].split(32), strict=True)
    losses = [loss_of(model, part, device).item() for part in parts]
    model.train()
    return statistics.mean(losses)


def train(
    model: nn.Module, batches: list[Batch], learning_rate: float, device: torch.device
) -> tuple[float, int]:
    """One pass over ``batches``; milliseconds a step, and bytes that autograd keeps for one."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    times = []
    model.train()
    for step, batch in enumerate(batches):
        began = time.perf_counter()
        if step == 0:  # measured on a real step
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = loss_of(model, batch, device)
        else:
            loss = loss_of(model, batch, device)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times), sum(kept.values())


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison and print its table."""
    parser = argparse.ArgumentParser(prog="lora", description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="default", help="HOT recipe (default: default)")
    parser.add_argument("--steps", type=int, default=40, help="steps of LoRA (default: 40)")
    parser.add_argument("--base-steps", type=int, default=80, help="steps of the base model first")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters (default: 8)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as missing:
        print(f"lora: error: {missing}; pip install transformers peft", file=sys.stderr)
        return 1
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    text, order = StdlibText(), Generator().manual_seed(options.seed)
    base = build(options.width, options.layers).to(device)
    train(base, [text.batch(BATCH, order) for _ in range(options.base_steps)], 3e-3, device)
    validation = upper((text.validation[0][:64], text.validation[1][:64]))
    batches = [upper(text.batch(BATCH, order)) for _ in range(options.steps)]
    print(f"base model: {evaluate(base, text.validation, device):.3f} on its own text")

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    print(f"{'':<16}{'before':>8}{'after':>8}{'kept, MB':>10}{'ms a step':>11}")
    for recipe in (None, options.recipe):
        torch.manual_seed(options.seed)  # the same adapters
        lora = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=targets)
        model = get_peft_model(copy.deepcopy(base), lora)
        report = None if recipe is None else hot.convert(model, recipe)
        before = evaluate(model, validation, device)
        step_ms, kept = train(model, batches, 1e-2, device)
        after = evaluate(model, validation, device)
        name = "plain LoRA" if recipe is None else f"HOT {recipe}"
        print(f"{name:<16}{before:>8.4f}{after:>8.4f}{kept / 1e6:>10.2f}{step_ms:>11.1f}")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print(f"{trained} of {total} parameters are trained; {len(report.converted)} layers run HOT")
    return 0


if __name__ == "__main__":
    sys.exit(main())
