"""The definitions again, in plain Python loops over floats: slow, and with nothing in common with the package.

No einops, no broadcasting, no tensor arithmetic; only indices, `math.fsum` and the text of the definitions.
"""

import math


def split(u, r):
    """(alpha, parallel, perpendicular) of two lists."""
    square = math.fsum(x * x for x in r)
    alpha = math.fsum(x * y for x, y in zip(u, r, strict=True)) / square if square else 0.0
    parallel = [alpha * y for y in r]
    return alpha, parallel, [x - p for x, p in zip(u, parallel, strict=True)]


def numbers(u, r):
    """The named numbers of one token."""
    alpha, parallel, perpendicular = split(u, r)
    norm = lambda v: math.sqrt(math.fsum(x * x for x in v))  # noqa: E731
    uu, rr, par, perp = norm(u), norm(r), norm(parallel), norm(perpendicular)
    return {
        "alpha": alpha,
        "parallel_ratio": abs(alpha) * rr / perp,
        "parallel_fraction": par / uu,
        "perpendicular_fraction": perp / uu,
        "parallel_energy": (par / uu) ** 2,
        "perpendicular_energy": (perp / uu) ** 2,
        "cosine": math.fsum(x * y for x, y in zip(u, r, strict=True)) / (uu * rr),
        "update_over_reference": uu / rr,
    }


def vectors(cache, site, layer, grouping="each", w_out=None):
    """{(sequence, position, head or slice): (update, reference)} from a run_with_cache, as lists of floats."""
    get = lambda name: cache[f"blocks.{layer}.{name}"].tolist()  # noqa: E731
    found = {}
    if site in ("value", "value_excl_self"):
        z, v, pattern = get("attn.hook_z"), get("attn.hook_v"), get("attn.hook_pattern")
        n_heads, n_kv = len(z[0][0]), len(v[0][0])
        per_kv = n_heads // n_kv
        for b in range(len(z)):
            for t in range(len(z[b])):
                single = {}
                for h in range(n_heads):
                    own = v[b][t][h // per_kv]
                    update = list(z[b][t][h])
                    if site == "value_excl_self":
                        update = [0.0] * len(own)
                        for s in range(t):  # the other tokens one by one, never "all minus self"
                            for i in range(len(own)):
                                update[i] += pattern[b][h][t][s] * v[b][s][h // per_kv][i]
                    single[h] = (update, list(own))
                groups = {
                    "each": [[h] for h in range(n_heads)],
                    "kv_group": [list(range(k * per_kv, (k + 1) * per_kv)) for k in range(n_kv)],
                    "merged": [list(range(n_heads))],
                }[grouping]
                for g, heads in enumerate(groups):
                    found[b, t, g] = tuple([x for h in heads for x in single[h][i]] for i in (0, 1))
        return found
    if site.startswith("mlp_"):
        return inside_the_mlp(cache, site, layer, w_out)
    before = get("hook_resid_pre")
    update = {"attn": "hook_attn_out", "mlp": "hook_mlp_out", "block": "hook_resid_post"}[site]
    after = get(update)
    mid = f"blocks.{layer}.hook_resid_mid"
    reference = get("hook_resid_mid") if site == "mlp" and mid in cache else before
    for b in range(len(after)):
        for t in range(len(after[b])):
            u, r = after[b][t], reference[b][t]
            if site == "block":
                u = [x - y for x, y in zip(u, before[b][t], strict=True)]
            found[b, t, 0] = (u, r)
    return found


def inside_the_mlp(cache, site, layer, w_out):
    """The slices of the carrier, component by component; w_out[i][j] is what component i adds to stream j."""
    get = lambda name: cache[f"blocks.{layer}.{name}"].tolist()  # noqa: E731
    post, mid = get("mlp.hook_post"), f"blocks.{layer}.hook_resid_mid"
    stream = get("hook_resid_mid" if mid in cache else "hook_resid_pre")
    x = stream if site == "mlp_carrier_stream" else get("mlp.hook_in")
    found = {}
    for b in range(len(post)):
        for t in range(len(post[b])):
            width, d_mlp, start, g = len(stream[b][t]), len(post[b][t]), 0, 0
            while start < d_mlp:
                piece = [post[b][t][start + i] if start + i < d_mlp else 0.0 for i in range(width)]
                if site == "mlp_contribution":
                    rows = range(start, min(start + width, d_mlp))
                    y = [math.fsum(w_out[i][j] * post[b][t][i] for i in rows) for j in range(width)]
                    found[b, t, g] = (y, piece)
                else:
                    found[b, t, g] = (piece, list(x[b][t]))
                start, g = start + width, g + 1
    return found


def edited_mlp(cache, site, layer, s_par, s_perp, w_out, b_out=None, chosen=None):
    """What the edited hook must hold, [sequence][position]: the carrier, or the MLP's output."""
    post = cache[f"blocks.{layer}.mlp.hook_post"].tolist()
    made = [[[] for _ in row] for row in post]
    for (b, t, g), (u, r) in sorted(inside_the_mlp(cache, site, layer, w_out).items()):
        _, parallel, perpendicular = split(u, r)
        new = [s_par * p + s_perp * q for p, q in zip(parallel, perpendicular, strict=True)]
        made[b][t].append(new if chosen is None or g in chosen else u)
    for b in range(len(post)):
        for t in range(len(post[b])):
            if site == "mlp_contribution":
                bias = [0.0] * len(made[b][t][0]) if b_out is None else b_out
                made[b][t] = [math.fsum(parts) for parts in zip(bias, *made[b][t], strict=True)]
            else:
                made[b][t] = [x for piece in made[b][t] for x in piece][: len(post[b][t])]
    return made


def edited_target(cache, site, layer, s_par, s_perp, grouping="each"):
    """What the edited hook must hold: {(sequence, position, group): vector}."""
    found = {}
    pattern = cache[f"blocks.{layer}.attn.hook_pattern"].tolist()
    values = vectors(cache, "value", layer, grouping)
    before = cache[f"blocks.{layer}.hook_resid_pre"].tolist()
    for key, (u, r) in vectors(cache, site, layer, grouping).items():
        _, parallel, perpendicular = split(u, r)
        out = [s_par * p + s_perp * q for p, q in zip(parallel, perpendicular, strict=True)]
        b, t, g = key
        if site == "value_excl_self":
            _, own = values[key]
            per_group = len(pattern[b]) // len({k[2] for k in values})
            d_head = len(own) // per_group
            weights = [pattern[b][g * per_group + i // d_head][t][t] for i in range(len(own))]
            out = [a * x + y for a, x, y in zip(weights, own, out, strict=True)]
        elif site == "block":
            out = [x + y for x, y in zip(before[b][t], out, strict=True)]
        found[key] = out
    return found
