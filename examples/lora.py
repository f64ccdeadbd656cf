"""LoRA through peft on a small Llama, plain and with HOT: the same adapters, the same data.

Base weights are frozen, so HOT computes their input gradients in integers and saves nothing of
their inputs; the adapters stay plain. Nothing is downloaded: a two-layer Llama is trained briefly
on the source of Python's library and then adapted to that text in capitals. A real model (--model,
a folder) needs the same two lines: get_peft_model, hot.convert.
"""

import argparse
import copy
import sysconfig
from pathlib import Path

import hotcore.torch as hot
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next byte."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def train(model: nn.Module, batches: list[Tensor], learning_rate: float) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate)
    model.train()
    for tokens in batches:
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tensor) -> float:
    return loss_of(model.eval(), tokens).item()


def main(arguments: list[str] | None = None) -> dict[str, tuple[float, float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder with a causal language model of transformers")
    parser.add_argument("--recipe", default="default", help="HOT recipe (default: default)")
    parser.add_argument("--forward", choices=("plain", "int8"), default="plain")
    parser.add_argument("--steps", type=int, default=40, help="steps of LoRA (default: 40)")
    parser.add_argument("--base-steps", type=int, default=80, help="steps of the base model first")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in library)
    torch.manual_seed(0)
    starts = torch.randint(len(text) - 128, (options.base_steps + options.steps + 8, 8, 1))
    window = starts + torch.arange(128)
    plain, capitals = (
        torch.frombuffer(bytearray(t), dtype=torch.uint8)[window].long().to(options.device)
        for t in (text, text.upper())
    )
    small = LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS))
    base = AutoModelForCausalLM.from_pretrained(options.model) if options.model else small
    train(base.to(options.device), list(plain[: options.base_steps]), 3e-3)
    held = capitals[-8:].flatten(0, 1)
    outcomes = {}
    for name in ("plain LoRA", f"HOT {options.recipe}"):
        torch.manual_seed(0)  # the same adapters
        lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
        model = get_peft_model(copy.deepcopy(base), lora)
        if name.startswith("HOT"):
            config = hot.HotConfig.recipe(options.recipe, forward=options.forward)
            print(hot.convert(model, config, slower=not options.model).hot_report)
        before = evaluate(model, held)
        train(model, list(capitals[options.base_steps : -8]), 1e-2)
        outcomes[name] = before, evaluate(model, held)
        print(f"{name:<14} loss before {before:.4f}, after {outcomes[name][1]:.4f}", flush=True)
    return outcomes


if __name__ == "__main__":
    main()
