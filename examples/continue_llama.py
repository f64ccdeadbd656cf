"""Continue the training of a Llama (any causal model of transformers) on a text with HOT.

    pip install '.[torch,examples]'              # once, in a checkout of hotcore
    python continue_llama.py                     # a small Llama from random weights, on a CPU
    python continue_llama.py --model ~/llama-3-8b --text notes.txt --device cuda --compile \\
        --forward int8 --checkpoint              # bf16 weights, every block recomputed

--model is a folder with the model and its tokenizer. The small model reads bytes. --out saves a
plain model, because HOT changes neither names nor shapes. --recipe none trains without HOT and
keeps all logits in memory.
"""

import argparse
import math
import sysconfig
from pathlib import Path

if __name__ == "__main__":
    print("Loads torch and transformers, then trains.", flush=True)

import hotcore.torch as hot
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}


def tokens_of(content: bytes, folder: str | None) -> Tensor:
    """Return the text as one row of tokens."""
    if folder is None:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer(content.decode(), return_tensors="pt").input_ids[0]


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder (default: a small Llama, random weights)")
    parser.add_argument("--text", type=Path, help="a file (default: Python's own library)")
    parser.add_argument("--recipe", default="default", help="recipe of HOT, or none")
    parser.add_argument("--forward", choices=("plain", "int8"), default="plain")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rate", type=float, help="learning rate (default: 3e-3, or 1e-5)")
    parser.add_argument("--checkpoint", action="store_true", help="recompute the blocks")
    parser.add_argument("--out", help="folder to save the model to")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = b"".join(p.read_bytes() for p in ([options.text] if options.text else library))
    text, context = tokens_of(content, options.model), options.context
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    else:
        model = LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS))
    model = model.to(options.device).train()
    if options.recipe != "none":  # slower=True converts a model that is too small to gain time
        config = hot.HotConfig.recipe(options.recipe, forward=options.forward)
        print(hot.convert(model, config, slower=not options.model, head=True).hot_report)
    if options.checkpoint:
        model.gradient_checkpointing_enable()
    if options.compile:
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):  # a block
                module.compile()
    rate = options.rate or (1e-5 if options.model else 3e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    held = text[-8 * context :].view(8, context).to(options.device)
    text = text[: -8 * context]
    order = torch.Generator().manual_seed(0)  # the same batches with and without HOT

    @torch.no_grad()
    def held_loss() -> float:
        model.eval()
        losses = [model(input_ids=row, labels=row, use_cache=False).loss for row in held.split(1)]
        model.train()
        return torch.stack(losses).mean().item()

    before = held_loss()
    for step in range(options.steps):
        starts = torch.randint(len(text) - context, (options.batch, 1), generator=order)
        batch = text[starts + torch.arange(context)].to(options.device)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step:>5}  loss {loss.item():.3f}", flush=True)
    after = held_loss()
    print(f"text held back: perplexity {math.exp(before):.1f} before, {math.exp(after):.1f} after")
    if options.out:
        hot.revert(model).save_pretrained(options.out)
    return before, after


if __name__ == "__main__":
    main()
