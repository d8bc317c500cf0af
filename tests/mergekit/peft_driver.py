"""Makes tiny models with LoRA adapters by PEFT, and merges adapters into their bases.

    python peft_driver.py make ROOT CASES.json
    python peft_driver.py merge ROOT CASES.json
    python peft_driver.py load ROOT CASES.json

CASES.json gives each case, by name, the class and settings of its model; for `make` also what its
adapter is like, the dtype of its base if that is not float32, and the model whose names its base
has if those are others. A case is a directory below ROOT with base/, adapter/ and
merged.safetensors, which is the model after merging, in float32. `load` loads model/ and writes
its weights, as the loaded model has them, to loaded.safetensors.

Executed by an interpreter that has transformers and peft; imports nothing of mergegit.
"""

import json
import sys
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import save_file


def new_model(case):
    config = getattr(transformers, case["config"])(**case["sizes"])
    torch.manual_seed(len(case["name"]))
    model = getattr(transformers, case["model"])(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Else biases are zero and norms are one.
            parameter.add_(torch.randn_like(parameter) * 0.02)
            if case.get("dtype"):
                parameter.copy_(parameter.to(getattr(torch, case["dtype"])))
    return model


def train(model):
    """Move whatever could be trained, and all factors, which are random already."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude_vector" in name:
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
            elif parameter.requires_grad and "lora_" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)


def make(case, path):
    model = new_model(case)
    saved = getattr(model, case["inside"]) if case.get("inside") else model
    if case.get("dtype"):
        saved.to(getattr(torch, case["dtype"])).save_pretrained(path / "base")
        saved.float()
    else:
        saved.save_pretrained(path / "base")
    settings = peft.LoraConfig(init_lora_weights=False, **case["adapter"])
    adapted = peft.get_peft_model(model, settings)
    train(adapted)
    adapted.save_pretrained(path / "adapter")
    return adapted


def load(case, path):
    model = getattr(transformers, case["model"]).from_pretrained(path / "base")
    return peft.PeftModel.from_pretrained(model.float(), path / "adapter")


def load_whole(case, path):
    """A model of which no tensor is missing, left over, or of another shape."""
    model, report = getattr(transformers, case["model"]).from_pretrained(
        path / "model", output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[kind], (kind, report[kind])
    return model


def shared_once(adapted):
    """An embedding that shares its weights with the head, as both modules see it before merging.

    merge_and_unload adds the change to the shared weights once for either module: twice.
    """
    module = adapted.get_input_embeddings()
    if not (adapted.config.tie_word_embeddings and hasattr(module, "lora_embedding_A")):
        return {}
    weight = module.base_layer.weight + module.get_delta_weight("default")
    return dict.fromkeys(["model.embed_tokens.weight", "lm_head.weight"], weight.detach())


def write(state, file):
    tensors = {key: value.clone().contiguous() for key, value in state.items()}
    save_file(tensors, file, metadata={"format": "pt"})


def main():
    todo, root = sys.argv[1], Path(sys.argv[2])
    for name, case in json.loads(Path(sys.argv[3]).read_text()).items():
        path = root / name
        if todo == "load":
            write(load_whole(case, path).state_dict(), path / "loaded.safetensors")
            continue
        adapted = make(case | {"name": name}, path) if todo == "make" else load(case, path)
        once = shared_once(adapted)
        merged = adapted.merge_and_unload().state_dict() | once
        write(merged, path / "merged.safetensors")


if __name__ == "__main__":
    main()
