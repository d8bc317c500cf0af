"""Makes tiny models of several architectures by transformers, merges them by hand in plain torch,
and says how models that transformers loads from a directory compare with that.

    python transformers_driver.py

Executed by an interpreter that has transformers and peft; imports nothing of mergegit. It takes
requests from standard input, an object in JSON a line, and answers each with a line. ``make``
makes one family: ``FAMILY-base``, two experts near it called math and code, and an adapter where
``adapter`` says what it adapts. ``compare`` loads what lies at ``path`` and compares it with a
merge.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

EXPERTS = {"math": 1, "code": 2}
STEP = 0.01
PROMPT = [[1, 7, 3, 11, 5, 2, 9, 4], [8, 6, 12, 10, 3, 3, 1, 13]]


class Family:
    """Models of one class and config, in ``root``."""

    def __init__(self, root, name, model, config, sizes, auto, dtype, **rest):
        self.root, self.name = Path(root), name
        self.kind = getattr(transformers, model)
        self.config = getattr(transformers, config)(**sizes)
        self.auto = getattr(transformers, auto)
        self.dtype = getattr(torch, dtype)
        self.other_dtypes = {key: getattr(torch, value) for key, value in rest["dtypes"].items()}
        self.inside, self.adapter = rest["inside"], rest["adapter"]

    def path(self, model):
        return self.root / f"{self.name}-{model}"

    def make(self):
        base = moved(self.kind(self.config), 0.05, seed=0).to(self.dtype)
        self.save(base, "base")
        for expert, seed in EXPERTS.items():
            model = moved(self.kind(self.config), 0.0, seed=0)
            model.load_state_dict(base.state_dict())
            dtype = self.other_dtypes.get(expert, self.dtype)
            self.save(moved(model, STEP, seed=seed).to(dtype), expert)
        if self.adapter:
            import peft

            torch.manual_seed(3)
            settings = peft.LoraConfig(init_lora_weights=False, **self.adapter)
            peft.get_peft_model(base, settings).save_pretrained(self.path("lora"))

    def save(self, model, name):
        (getattr(model, self.inside) if self.inside else model).save_pretrained(self.path(name))

    def load(self, path, dtype="auto"):
        model, report = self.auto.from_pretrained(path, dtype=dtype, output_loading_info=True)
        return model.eval(), [str(key) for keys in report.values() for key in keys]

    def parameters(self, name):
        """A model's parameters in float32, each once."""
        if name == "lora":
            return self.adapted()
        model, wrong = self.load(self.path(name))
        assert not wrong, wrong
        return {key: p.detach().float() for key, p in model.named_parameters()}

    def adapted(self):
        """The base with its adapter: W + alpha / r B A."""
        config = json.loads((self.path("lora") / "adapter_config.json").read_text())
        factors = load_file(self.path("lora") / "adapter_model.safetensors")
        parameters = self.parameters("base")
        for key, a in factors.items():
            if "lora_A" in key:
                name = key.removeprefix("base_model.model.").replace("lora_A.", "")
                product = factors[key.replace("lora_A", "lora_B")].float() @ a.float()
                parameters[name] = parameters[name] + config["lora_alpha"] / config["r"] * product
        return parameters


def moved(model, step, seed):
    """The model with random steps on all its parameters, biases and norms too."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * step)
    return model


# -- merges by hand: dicts of float32 tensors to one -----------------------------------------------


def task_arithmetic(base, experts, weights):
    return {
        key: b + sum(w * (e[key] - b) for w, e in zip(weights, experts, strict=True))
        for key, b in base.items()
    }


def linear(base, experts, weights):
    total = sum(weights)
    return {
        key: sum(w * e[key] for w, e in zip(weights, experts, strict=True)) / total for key in base
    }


def ties(base, experts, weights, density):
    return {
        key: b + agreed([trimmed(e[key] - b, density) for e in experts], weights)
        for key, b in base.items()
    }


def trimmed(delta, density):
    """The largest magnitudes, and what equals the smallest of them."""
    least = delta.abs().flatten().sort(descending=True).values[int(density * delta.numel()) - 1]
    return torch.where(delta.abs() >= least, delta, torch.zeros(()))


def agreed(deltas, weights):
    """The average of the weighted deltas whose sign is that of their sum."""
    parts = [w * delta for w, delta in zip(weights, deltas, strict=True)]
    positive = sum(parts) >= 0
    agree = [torch.where(positive, part > 0, part < 0) for part in parts]
    total = sum(part * yes for part, yes in zip(parts, agree, strict=True))
    divisor = sum(torch.tensor(w) * yes for w, yes in zip(weights, agree, strict=True))
    return total / torch.where(divisor == 0, torch.ones(()), divisor)


def slerp(_, experts, t):
    return {key: arc(experts[0][key], experts[1][key], t) for key in experts[0]}


def arc(first, second, t):
    one, other = first.double(), second.double()
    cosine = (one * other).sum() / (one.norm() * other.norm())
    if cosine.abs() > 0.9995:
        return (1 - t) * first + t * second
    angle = torch.arccos(cosine)
    parts = torch.sin((1 - t) * angle), torch.sin(t * angle)
    return ((parts[0] * one + parts[1] * other) / torch.sin(angle)).float()


METHODS = {"task_arithmetic": task_arithmetic, "linear": linear, "ties": ties, "slerp": slerp}


def stacked(models, slices, prefix):
    """Layers of models one after another, with the first one's input and the last one's output."""
    layers = [(model, layer) for model, start, stop in slices for layer in range(start, stop)]
    first, last = models[slices[0][0]], models[slices[-1][0]]
    out = {
        key: (first if "embed" in key or "wte" in key or "wpe" in key else last)[key]
        for key in first
        if not key.startswith(prefix)
    }
    for place, (model, layer) in enumerate(layers):
        own = f"{prefix}{layer}."
        for key, tensor in models[model].items():
            if key.startswith(own):
                out[f"{prefix}{place}.{key.removeprefix(own)}"] = tensor
    return out, [layer for _, layer in layers]


def by_hand(family, method, experts=(), slices=(), prefix="", dtypes=(), **parameters):
    """A model of float32 that holds the merge, rounded to each of ``dtypes`` in turn."""
    config = family.config
    if method == "stack":
        models = {name: family.parameters(name) for name, _, _ in slices}
        merged, layers = stacked(models, slices, prefix)
        kinds = getattr(config, "layer_types", None)
        if kinds is not None:
            config.layer_types = [kinds[layer] for layer in layers]
        dense = getattr(config, "mlp_only_layers", None)
        if dense:
            config.mlp_only_layers = [at for at, layer in enumerate(layers) if layer in dense]
        config.num_hidden_layers = len(layers)
    else:
        models = [family.parameters(name) for name in experts]
        merged = METHODS[method](family.parameters("base"), models, **parameters)
    model = family.kind(config).eval()
    own = dict(model.named_parameters())
    assert own.keys() == merged.keys()
    with torch.no_grad():
        for key, tensor in merged.items():
            for dtype in dtypes:
                tensor = tensor.to(getattr(torch, dtype))
            own[key].copy_(tensor)
    return model


# -- comparisons -----------------------------------------------------------------------------------


def in_order(tensor):
    """The bits of floats as integers in the order of the floats."""
    bits = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).long()
    return torch.where(bits < 0, -(bits & (2 ** (8 * tensor.element_size() - 1) - 1)), bits)


def apart(ours, theirs):
    """By parameter: the elements that differ in any bit, and in units of the last place how far
    those are apart that differ by more than float32's rounding."""
    told = {}
    for key, tensor in ours.items():
        hand = theirs[key].to(tensor.dtype)
        units = (in_order(tensor) - in_order(hand)).abs()
        noise = 2.0**-22 * float(hand.abs().max())
        far = (tensor.double() - hand.double()).abs() > noise
        told[key] = {
            "elements": tensor.numel(),
            "differ": int((tensor != hand).sum()),
            "units": int((units * far).max()),
        }
    return told


def logits(model):
    with torch.no_grad():
        return model(torch.tensor(PROMPT)).logits


def compare(family, path, merge):
    hand = by_hand(family, **merge)
    model, wrong = family.load(path)
    head = model.get_output_embeddings().weight
    ours = dict(model.named_parameters())
    theirs = dict(hand.named_parameters())
    told = {
        "class": type(model).__name__,
        "wrong": wrong,
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in ours.values()}),
        "layers": model.config.num_hidden_layers,
        "tied": head is model.get_input_embeddings().weight,
        "without a pair": sorted(ours.keys() ^ theirs.keys()),
        "apart": apart({key: ours[key].detach() for key in ours.keys() & theirs.keys()}, theirs),
    }
    # In float32 throughout: not all that is computed from a config is as fine in other dtypes.
    models = [family.load(where, torch.float32)[0] for where in (path, family.path("base"))]
    mine, before, expected = map(logits, [*models, hand])
    return told | {
        "logits": {
            "equal": torch.equal(mine, expected),
            "finite": bool(mine.isfinite().all()),
            "off": float((mine - expected).norm()),
            "moved": float((expected - before).norm()),
        }
    }


def answer(request):
    family = Family(**request["family"])
    if request["todo"] == "make":
        return family.make()
    return compare(family, request["path"], request["merge"])


if __name__ == "__main__":
    # Whatever else is printed goes where warnings go.
    answers, sys.stdout = sys.stdout, sys.stderr
    transformers.utils.logging.disable_progress_bar()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
