"""Run a Llama of Hugging Face transformers with attnkit, and compare with its own attention.

The model is tiny and has random weights, so that nothing is downloaded; with `--model NAME` it is a
model of the hub or a folder.

    python examples/transformers_llama.py
    python examples/transformers_llama.py --model HuggingFaceTB/SmolLM2-135M
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import attnkit.integrations.transformers


def tiny_llama() -> Any:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", help="a model of the hub; a tiny one with random weights if left out"
    )
    name = parser.parse_args(arguments).model

    attnkit.integrations.transformers.register()
    torch.manual_seed(0)
    model = (AutoModelForCausalLM.from_pretrained(name) if name else tiny_llama()).eval()

    # Two prompts of 12 and 7 tokens; the second is padded on the left, as `generate` wants it.
    prompts = torch.randint(3, model.config.vocab_size, (2, 12))
    mask = torch.ones_like(prompts)
    mask[1, :5] = 0

    logits, tokens = {}, {}
    for implementation in ("eager", "attnkit"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits[implementation] = model(prompts, attention_mask=mask).logits[mask.bool()]
        tokens[implementation] = model.generate(
            prompts, attention_mask=mask, max_new_tokens=8, do_sample=False
        )
    difference = (logits["eager"] - logits["attnkit"]).abs().max() / logits["eager"].abs().max()
    print(f"logits     differ by {difference:.0e} of the largest")
    print(f"tokens     equal: {torch.equal(tokens['eager'], tokens['attnkit'])}")

    model.train()  # still with attnkit
    loss = model(prompts, attention_mask=mask, labels=prompts.masked_fill(mask == 0, -100)).loss
    loss.backward()
    trained = sum(p.grad is not None for p in model.parameters())
    print(f"gradients  for {trained} parameters, loss {loss:.2f}")


if __name__ == "__main__":
    main()
