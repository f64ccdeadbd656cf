"""Train with transformers' Trainer and HOT: HotCallback measures noise.

    pip install '.[torch,examples]'                       # once, in a checkout of hotcore
    python trainer.py                                     # a small Llama on Python's own library
    python trainer.py --model ~/qwen --text books.txt     # a folder with a model and its tokenizer

The Trainer needs no other change.
"""

import argparse
import sysconfig
from pathlib import Path

if __name__ == "__main__":
    print("Loads torch and transformers, then trains.", flush=True)

import hotcore.torch as hot
import torch
from hotcore.integrations.transformers import HotCallback, HotQuantizationConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder (default: a small Llama, a token a byte)")
    parser.add_argument("--text", type=Path, help="a file (default: Python's own library)")
    parser.add_argument("--recipe", default="default", help="recipe of HOT")
    parser.add_argument("--forward", choices=("plain", "int8"), default="plain")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="out", help="folder for checkpoints")
    options = parser.parse_args(arguments)
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(p.read_bytes() for p in ([options.text] if options.text else library))
    torch.manual_seed(0)
    config = hot.HotConfig.recipe(options.recipe, forward=options.forward)
    if options.model:  # converts while it loads; checkpoints record it
        switch = HotQuantizationConfig(config)
        model = AutoModelForCausalLM.from_pretrained(options.model, quantization_config=switch)
        tokens = AutoTokenizer.from_pretrained(options.model)(text.decode(errors="replace"))
        tokens = tokens["input_ids"]
    else:
        model, tokens = LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS)), text
        model.train()
        print(hot.convert(model, config).hot_report)
    rows = [list(tokens[i : i + 128]) for i in range(0, len(tokens) - 128, 128)]
    settings = TrainingArguments(
        options.out,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=3e-3,
        logging_steps=20,
        save_strategy="no",
        report_to="none",  # "tensorboard" and "wandb" also get HOT's scalars
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, settings, train_dataset=data)
    HotCallback.add_to(trainer, noise_every=20, noise_layers=["*layers.0.mlp.*"])
    trainer.train()
    return trainer.state.log_history


if __name__ == "__main__":
    main()
