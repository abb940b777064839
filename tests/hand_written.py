"""A small transformer and its suppressions written out by hand in float64, for gradients: nothing of the package.

Llama's shape, or StableLM's with rotary positions on whole heads: pre-norm (RMSNorm or LayerNorm), grouped-query
attention, a gated MLP, tied embeddings. Heads and batch rows are looped over; weights have Hugging Face's names.
"""

import math

import torch


def loss(
    weights, ids, *, n_layers, n_heads, n_kv, norm, arm="baseline", parallel=0.0, gates=None, noise=None, eps=1e-5
):
    """Mean next-token loss in nats. `noise[layer]` is [batch, pos, (head,) d], `gates[layer]` a gate's w."""
    total, count = 0.0, 0
    for row in range(len(ids)):
        x = weights["model.embed_tokens.weight"][ids[row]]
        for layer in range(n_layers):
            get = lambda name, layer=layer: weights[f"model.layers.{layer}.{name}"]  # noqa: E731
            scale = parallel if gates is None else 1 / (1 + torch.exp(-(x @ gates[layer])))
            random = None if noise is None else noise[layer][row]
            y = attention(normed(x, get, "input_layernorm", norm, eps), get, n_heads, n_kv, arm, scale, random)
            if arm in ("attn", "norm_matched_attn"):
                y = edited(y, x, scale, random)
            mid = x + y
            h = normed(mid, get, "post_attention_layernorm", norm, eps)
            gate = h @ get("mlp.gate_proj.weight").T
            out = (gate / (1 + torch.exp(-gate)) * (h @ get("mlp.up_proj.weight").T)) @ get("mlp.down_proj.weight").T
            if arm == "mlp":
                out = edited(out, mid, scale, None)
            x = mid + out
        final = normed(x, lambda name: weights[f"model.{name}"], "norm", norm, eps)
        logits = final @ weights["model.embed_tokens.weight"].T
        for t in range(len(ids[row]) - 1):
            total = total + torch.logsumexp(logits[t], 0) - logits[t, ids[row, t + 1]]
            count += 1
    return total / count


def normed(x, get, name, norm, eps):
    if norm == "RMS":
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * get(f"{name}.weight")
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + eps) * get(f"{name}.weight") + get(f"{name}.bias")


def rotated(x):
    """Rotary positions on the whole head, its first half paired with its second."""
    half = x.shape[-1] // 2
    places = torch.arange(len(x), dtype=x.dtype)
    angles = torch.stack([places * 10000.0 ** (-i / half) for i in range(half)], -1)
    first, second = x[:, :half], x[:, half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def attention(h, get, n_heads, n_kv, arm, scale, random):
    q, k, v = (h @ get(f"self_attn.{name}_proj.weight").T for name in "qkv")
    d = q.shape[-1] // n_heads
    places = torch.arange(len(h))
    heads = []
    for head in range(n_heads):
        group = head // (n_heads // n_kv)
        queries, keys = rotated(q[:, head * d : (head + 1) * d]), rotated(k[:, group * d : (group + 1) * d])
        values = v[:, group * d : (group + 1) * d]
        scores = queries @ keys.T / math.sqrt(d)
        hidden = places[None, :] > places[:, None]
        if arm == "diagonal":  # masked before softmax, but for token 0, which has nothing else
            hidden = hidden | ((places[None, :] == places[:, None]) & (places[:, None] > 0))
        weights = torch.exp(scores - scores.max().detach()).masked_fill(hidden, 0.0)
        weights = weights / weights.sum(-1, keepdim=True)
        if arm == "diagonal_shrinking":
            weights = torch.where((places[None, :] == places[:, None]) & (places[:, None] > 0), 0.0, weights)
        o = weights @ values
        if arm == "value":
            o = edited(o, values, scale, None)
        elif arm == "norm_matched":  # token 0 sees itself alone: o is v whatever the weights, and all of it goes
            o = torch.cat([scale * o[:1], edited(o[1:], values[1:], scale, random[1:, head])])
        elif arm == "value_excl_self":
            own = weights.diagonal()[:, None] * values
            o = own + edited(o - own, values, scale, None)
        heads.append(o)
    return torch.cat(heads, -1) @ get("self_attn.o_proj.weight").T


def edited(u, r, scale, random):
    """s_par u_par + u_perp; against a random direction at r's own angle to u where there is noise for one."""
    scale = scale[:, None] if isinstance(scale, torch.Tensor) else scale
    parallel = (u * r).sum(-1, keepdim=True) / (r * r).sum(-1, keepdim=True) * r
    if random is None:
        return u - parallel + scale * parallel
    size = torch.sqrt((u * u).sum(-1, keepdim=True))
    cosine = (u * r).sum(-1, keepdim=True) / (size * torch.sqrt((r * r).sum(-1, keepdim=True)))
    along = u / size
    aside = random - (random * along).sum(-1, keepdim=True) * along
    aside = aside / torch.sqrt((aside * aside).sum(-1, keepdim=True))
    direction = cosine * along + torch.sqrt(1 - cosine * cosine) * aside
    return u + (scale - 1) * (u * direction).sum(-1, keepdim=True) * direction
