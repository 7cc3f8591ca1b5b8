#!/usr/bin/env python3
"""Writes tests/fixtures/*.safetensors: what PyTorch and plain float64 arithmetic say the answers are.

  gpt2_tiny.safetensors          a two-block GPT-2: parameters, tokens, logits, loss and every gradient
  adamw.safetensors              torch.optim.AdamW over 20 given gradients
  matrix_optimizers.safetensors  RMNP and Muon over 5 given gradients

Needs PyTorch and numpy (Debian: python3-torch). The tests read the committed files and need neither.
Usage: /usr/bin/python3 tests/make_fixture.py
"""

import json
import math
import pathlib
import struct

import numpy as np
import torch

OUT_DIR = pathlib.Path(__file__).resolve().parent / "fixtures"
SAFETENSORS_DTYPES = {"float32": "F32", "int32": "I32"}


def write_safetensors(path, tensors, metadata):
    """tensors: dict from name to float32 or int32 array. metadata: dict of strings."""
    header = {"__metadata__": metadata}
    blobs = []
    offset = 0
    for name, value in tensors.items():
        array = np.ascontiguousarray(value)
        blob = array.astype(array.dtype.newbyteorder("<")).tobytes()
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def float32(array):
    return np.asarray(array, dtype=np.float32)


# ---- GPT-2 ---------------------------------------------------------------------------------------

LAYERS, WIDTH, HEADS, VOCABULARY, POSITIONS = 2, 24, 3, 37, 12
BATCH, SEQ_LEN = 2, 11
EPSILON = 1e-5


def gpt2_parameters(rng):
    """Float64 tensors holding values that float32 holds exactly. Linear weights are [out, in]."""
    c = WIDTH
    shapes = {"wte.weight": (VOCABULARY, c), "wpe.weight": (POSITIONS, c)}
    for n in range(LAYERS):
        shapes |= {
            f"h.{n}.ln_1.weight": (c,),
            f"h.{n}.ln_1.bias": (c,),
            f"h.{n}.attn.c_attn.weight": (3 * c, c),
            f"h.{n}.attn.c_attn.bias": (3 * c,),
            f"h.{n}.attn.c_proj.weight": (c, c),
            f"h.{n}.attn.c_proj.bias": (c,),
            f"h.{n}.ln_2.weight": (c,),
            f"h.{n}.ln_2.bias": (c,),
            f"h.{n}.mlp.c_fc.weight": (4 * c, c),
            f"h.{n}.mlp.c_fc.bias": (4 * c,),
            f"h.{n}.mlp.c_proj.weight": (c, 4 * c),
            f"h.{n}.mlp.c_proj.bias": (c,),
        }
    shapes |= {"ln_f.weight": (c,), "ln_f.bias": (c,)}

    parameters = {}
    for name, shape in shapes.items():
        is_gain = name.split(".")[-2].startswith("ln_") and name.endswith(".weight")
        deviation = 1 / math.sqrt(shape[-1]) if len(shape) == 2 else 0.3
        value = float32(rng.normal(1.0 if is_gain else 0.0, deviation, shape))
        parameters[name] = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    return parameters


def layer_norm(x, gain, bias):
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return gain * centred / torch.sqrt(variance + EPSILON) + bias


def gpt2_logits(parameters, tokens):
    """tokens: [B, T]. Returns [B, T, V]."""
    batch, seq_len = tokens.shape
    head_size = WIDTH // HEADS
    hidden_keys = torch.triu(torch.ones(seq_len, seq_len, dtype=torch.bool), diagonal=1)

    def split_heads(x):  # [B, T, C] to [B, H, T, D]
        return x.view(batch, seq_len, HEADS, head_size).transpose(1, 2)

    x = parameters["wte.weight"][tokens] + parameters["wpe.weight"][:seq_len]
    for n in range(LAYERS):
        def linear(name, value):
            return value @ parameters[f"h.{n}.{name}.weight"].T + parameters[f"h.{n}.{name}.bias"]

        def norm(name, value):
            return layer_norm(value, parameters[f"h.{n}.{name}.weight"], parameters[f"h.{n}.{name}.bias"])

        query, key, value = linear("attn.c_attn", norm("ln_1", x)).split(WIDTH, dim=-1)
        scores = split_heads(query) @ split_heads(key).transpose(-1, -2) / math.sqrt(head_size)
        probabilities = torch.softmax(scores.masked_fill(hidden_keys, -math.inf), dim=-1)
        attended = (probabilities @ split_heads(value)).transpose(1, 2).reshape(batch, seq_len, WIDTH)
        x = x + linear("attn.c_proj", attended)

        hidden = linear("mlp.c_fc", norm("ln_2", x))
        cubic = hidden + 0.044715 * hidden**3
        hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * cubic))
        x = x + linear("mlp.c_proj", hidden)
    x = layer_norm(x, parameters["ln_f.weight"], parameters["ln_f.bias"])
    return x @ parameters["wte.weight"].T


def make_gpt2(path):
    rng = np.random.default_rng(20240607)
    parameters = gpt2_parameters(rng)
    ids = rng.integers(0, VOCABULARY, (BATCH, SEQ_LEN + 1))
    tokens, targets = torch.tensor(ids[:, :-1]), torch.tensor(ids[:, 1:])

    logits = gpt2_logits(parameters, tokens)
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))
    loss.backward()

    tensors = {"param." + name: float32(p.detach()) for name, p in parameters.items()}
    tensors["tokens"] = np.asarray(tokens, dtype=np.int32)
    tensors["targets"] = np.asarray(targets, dtype=np.int32)
    tensors["logits"] = float32(logits.detach())
    tensors["loss"] = float32(loss.detach()).reshape(1)
    tensors |= {"grad." + name: float32(p.grad) for name, p in parameters.items()}
    shape = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "vocabulary": VOCABULARY,
             "positions": POSITIONS, "batch": BATCH, "seq_len": SEQ_LEN}
    write_safetensors(path, tensors, {name: str(value) for name, value in shape.items()})


# ---- AdamW ---------------------------------------------------------------------------------------

def make_adamw(path):
    hyper = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    steps = 20
    rng = np.random.default_rng(1)
    tensors = {}
    # Magnitudes of gradients far apart, and one parameter whose gradient is 0 for the first steps.
    for name, size, magnitude in [("ordinary", 17, 1.0), ("small", 8, 1e-6), ("large", 5, 1e4), ("late", 3, 1.0)]:
        initial = float32(rng.normal(0, 1, size))
        grads = float32(rng.normal(0.2, 1, (steps, size)) * magnitude)
        if name == "late":
            grads[:5] = 0
        parameter = torch.nn.Parameter(torch.tensor(initial))
        optimizer = torch.optim.AdamW([parameter], **hyper)
        values = []
        for grad in grads:
            parameter.grad = torch.tensor(grad)
            optimizer.step()
            values.append(parameter.detach().numpy().copy())
        tensors |= {
            f"{name}.initial": initial,
            f"{name}.grads": grads,
            f"{name}.step_1": values[0],
            f"{name}.step_{steps}": values[-1],
        }
    write_safetensors(path, tensors, {"lr": "1e-2", "beta1": "0.9", "beta2": "0.95", "eps": "1e-8",
                                      "weight_decay": "0.1", "steps": str(steps)})


# ---- RMNP and Muon -------------------------------------------------------------------------------

MATRIX_LR, MATRIX_DECAY, MOMENTUM = 0.02, 0.1, 0.95
JORDAN = (3.4445, -4.7750, 2.0315)


def rmnp_direction(u):
    return u / np.maximum(np.linalg.norm(u, axis=1, keepdims=True), 1e-12)


def muon_direction(u):
    x = u / (np.linalg.norm(u) + 1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    a, b, c = JORDAN
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def train_matrix(initial, grads, direction):
    """Yields the matrix after each step; Nesterov momentum, decay by lr alone, scale max(1, m/n)^0.5."""
    weight = initial.astype(np.float64)
    velocity = np.zeros_like(weight)
    scale = math.sqrt(max(1.0, weight.shape[0] / weight.shape[1]))
    for grad in grads.astype(np.float64):
        velocity = MOMENTUM * velocity + grad
        update = direction(grad + MOMENTUM * velocity)
        weight = weight * (1 - MATRIX_LR * MATRIX_DECAY) - MATRIX_LR * scale * update
        yield weight


def make_matrix_optimizers(path):
    steps = 5
    rng = np.random.default_rng(2)
    tensors = {}
    for rows, cols in [(6, 10), (10, 6), (8, 8)]:
        name = f"{rows}x{cols}"
        initial = float32(rng.normal(0, 1, (rows, cols)))
        grads = float32(rng.normal(0, 1, (steps, rows, cols)))
        tensors |= {f"{name}.initial": initial, f"{name}.grads": grads}
        for optimizer, direction in [("rmnp", rmnp_direction), ("muon", muon_direction)]:
            values = list(train_matrix(initial, grads, direction))
            tensors[f"{name}.{optimizer}.step_1"] = float32(values[0])
            tensors[f"{name}.{optimizer}.step_{steps}"] = float32(values[-1])
    write_safetensors(path, tensors, {"lr": str(MATRIX_LR), "weight_decay": str(MATRIX_DECAY),
                                      "momentum": str(MOMENTUM), "nesterov": "1", "steps": str(steps),
                                      "newton_schulz": "jordan", "scale": "max(1, rows/cols)^0.5"})


def main():
    OUT_DIR.mkdir(exist_ok=True)
    make_gpt2(OUT_DIR / "gpt2_tiny.safetensors")
    make_adamw(OUT_DIR / "adamw.safetensors")
    make_matrix_optimizers(OUT_DIR / "matrix_optimizers.safetensors")
    for path in sorted(OUT_DIR.glob("*.safetensors")):
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
