"""LoRA through peft on a frozen Llama (any causal model of transformers) with HOT.

    pip install '.[torch,examples]'              # once, in a checkout of hotcore
    python lora.py                               # a small Llama on a CPU
    python lora.py --model ~/llama-3-8b --text notes.txt --device cuda --compile --forward int8 \\
        --freeze int4 --checkpoint --batch 2 --context 2048     # 8B on a card of 24 GB

HOT computes the frozen layers' input gradients in integers and keeps nothing of their inputs. The
adapters stay plain. --freeze stores a frozen weight in a byte, --freeze int4 in half, as it is
read. --model is a folder with the model and its tokenizer. Without it, a small Llama first learns
the source of Python's library. Its adapters then learn that text in capitals. --size 8b has that
shape's random weights, for a look at time and memory. --recipe none trains without HOT.
"""

import argparse
import math
import sysconfig
from pathlib import Path

if __name__ == "__main__":
    print("Loads torch, transformers and peft, trains a base model, then LoRA on it.", flush=True)

import hotcore.torch as hot
import torch
from hotcore.integrations.transformers import HotQuantizationConfig
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
HEADS = ("num_attention_heads", "num_key_value_heads")
SIZES = {"toy": (256, 64, 192, 2, 4, 2), "8b": (128256, 4096, 14336, 32, 32, 8)}


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next token."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def bytes_of(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder (default: a small Llama, a token a byte)")
    parser.add_argument("--size", choices=SIZES, default="toy", help="without --model")
    parser.add_argument("--text", type=Path, help="a file (default: Python's own library)")
    parser.add_argument("--recipe", default="default", help="recipe of HOT, or none")
    parser.add_argument("--forward", choices=("plain", "int8"), default="plain")
    forms = ("int8", "int4")
    parser.add_argument("--freeze", nargs="?", const="int8", choices=forms,
                        help="store a frozen weight in a byte (default), or in half")  # fmt: skip
    parser.add_argument("--checkpoint", action="store_true", help="recompute the blocks")
    for name, value in (("rank", 8), ("batch", 8), ("context", 128), ("steps", 40)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--base-steps", type=int, default=80, help="steps of the small base model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = b"".join(p.read_bytes() for p in ([options.text] if options.text else library))
    order = torch.Generator().manual_seed(0)  # the same batches with and without HOT

    def batch_of(text: Tensor) -> Tensor:
        starts = torch.randint(len(text) - options.context, (options.batch, 1), generator=order)
        return text[starts + torch.arange(options.context)].to(options.device)

    def train(model: nn.Module, text: Tensor, steps: int, rate: float) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate)
        model.train()
        for step in range(steps):
            loss = loss_of(model, batch_of(text))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                print(f"step {step:>5}  loss {loss.item():.3f}", flush=True)

    toy = options.size == "toy" and not options.model
    loading, config = {"dtype": torch.bfloat16}, None
    if options.recipe != "none":
        config = hot.HotConfig.recipe(options.recipe, forward=options.forward)
    if options.model:
        if config and options.freeze:  # each weight is frozen as it is read
            loading["quantization_config"] = HotQuantizationConfig(config, freeze=options.freeze)
            loading["device_map"], config = options.device, None
        model = AutoModelForCausalLM.from_pretrained(options.model, **loading)
        print(getattr(model, "freeze_report", "no weight is frozen in codes"))
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        text = tokenizer(content.decode(), return_tensors="pt").input_ids[0]
    else:
        shape = dict(zip((*NAMES, *HEADS), SIZES[options.size], strict=True))
        torch.set_default_dtype(torch.float32 if toy else torch.bfloat16)
        with torch.device(options.device):
            model, text = LlamaForCausalLM(LlamaConfig(**shape)), bytes_of(content.upper())
        torch.set_default_dtype(torch.float32)
        train(model, bytes_of(content), options.base_steps if toy else 0, 3e-3)
    lora = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
    model = get_peft_model(model, lora)
    if config:  # slower=True converts a model that is too small to gain time
        print(hot.convert(model, config, slower=toy).hot_report)
    if config and options.freeze:
        print(hot.freeze(model, 4 if options.freeze == "int4" else 8).freeze_report)
    model = model.to(options.device)
    if options.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if options.compile:
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):  # a block
                module.compile()
    held = text[-8 * options.context :].view(8, options.context).to(options.device)

    @torch.no_grad()
    def held_loss() -> float:
        return torch.stack([loss_of(model.eval(), row) for row in held.split(1)]).mean().item()

    before = held_loss()
    train(model, text[: -8 * options.context], options.steps, 1e-2 if toy else 2e-4)
    after = held_loss()
    print(f"text held back: perplexity {math.exp(before):.1f} before, {math.exp(after):.1f} after")
    return before, after


if __name__ == "__main__":
    main()
