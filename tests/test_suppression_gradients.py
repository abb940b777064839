"""Gradients of every weight through every arm, against transformers written out by hand in float64."""

import copy
from functools import lru_cache

import hand_written
import pytest
import torch
import transformers
import zoo

from lens_geometry.anatomy import attached
from lens_geometry.edits.noise import Batch, normal_noise
from lens_geometry.training.suppression import ARMS, Suppression, Suppressor, arm

LAYERS, HEADS, KV, D, MLP, VOCAB = 2, 4, 2, 24, 40, 50
SHAPE = dict(n_layers=LAYERS, n_heads=HEADS, n_kv=KV)
IDS = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(3))
BACKENDS = [(norm, backend) for norm in ("RMS", "LN") for backend in (["hooked"] if zoo.MAJOR < 4 else []) + ["bridge"]]


@lru_cache
def built(norm, backend):
    """A model in float64 and, by Hugging Face's names, its parameters' values and where their gradients appear."""
    common = dict(
        vocab_size=VOCAB, hidden_size=D, intermediate_size=MLP, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV, max_position_embeddings=16, tie_word_embeddings=True, attn_implementation="eager",
        hidden_act="silu", rope_parameters=dict(rope_type="default", rope_theta=10_000.0, partial_rotary_factor=1.0),
    )  # fmt: skip
    with zoo.quiet():
        if norm == "RMS":
            hf = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, rms_norm_eps=1e-5))
        else:
            config = transformers.StableLmConfig(**common, layer_norm_eps=1e-5, use_qkv_bias=False)
            hf = transformers.StableLmForCausalLM(config)
        zoo.fill(hf)
        hf = hf.double().eval()
        parameters = dict(hf.named_parameters())
        weights = {name: p.detach().clone() for name, p in parameters.items() if name != "lm_head.weight"}
        if backend == "bridge":
            from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

            model = build_bridge_from_module(hf, type(hf).__name__, hf_config=hf.config)
            return model.eval(), weights, lambda: {name: parameters[name].grad for name in weights}
        model = hooked(norm, weights)
    return model, weights, lambda: hooked_gradients(model, weights)


def hooked(norm, weights):
    import transformer_lens

    config = transformer_lens.HookedTransformerConfig(
        n_layers=LAYERS, d_model=D, d_head=D // HEADS, n_heads=HEADS, n_key_value_heads=KV, d_mlp=MLP, d_vocab=VOCAB,
        n_ctx=16, eps=1e-5, act_fn="silu", gated_mlp=True, normalization_type=norm, final_rms=norm == "RMS",
        positional_embedding_type="rotary", rotary_adjacent_pairs=False, rotary_dim=D // HEADS, dtype=torch.float64,
        device="cpu", init_weights=False, default_prepend_bos=False,
    )  # fmt: skip
    model = transformer_lens.HookedTransformer(config, move_to_device=False)
    model.load_state_dict(hooked_layout(weights), strict=False)
    for name, parameter in model.named_parameters():
        if name.split(".")[-1].startswith(("b_", "_b_")):
            parameter.requires_grad_(False).zero_()
    return model.double().eval()


def hooked_layout(weights):
    """HookedTransformer's names and shapes; the unembedding is a copy of the embedding."""
    out = {"embed.W_E": weights["model.embed_tokens.weight"], "unembed.W_U": weights["model.embed_tokens.weight"].T}
    heads = lambda w: w.view(-1, D // HEADS, D).mT  # noqa: E731
    for layer in range(LAYERS):
        get = lambda name, layer=layer: weights[f"model.layers.{layer}.{name}.weight"]  # noqa: E731
        out |= {
            f"blocks.{layer}.attn.W_Q": heads(get("self_attn.q_proj")),
            f"blocks.{layer}.attn._W_K": heads(get("self_attn.k_proj")),
            f"blocks.{layer}.attn._W_V": heads(get("self_attn.v_proj")),
            f"blocks.{layer}.attn.W_O": get("self_attn.o_proj").T.reshape(HEADS, D // HEADS, D),
            f"blocks.{layer}.mlp.W_gate": get("mlp.gate_proj").T,
            f"blocks.{layer}.mlp.W_in": get("mlp.up_proj").T,
            f"blocks.{layer}.mlp.W_out": get("mlp.down_proj").T,
        }
    norms = {"model.norm": "ln_final"}
    for layer in range(LAYERS):
        norms[f"model.layers.{layer}.input_layernorm"] = f"blocks.{layer}.ln1"
        norms[f"model.layers.{layer}.post_attention_layernorm"] = f"blocks.{layer}.ln2"
    for name, ours in norms.items():
        for kind in ("weight", "bias"):
            if f"{name}.{kind}" in weights:
                out[f"{ours}.{kind[0]}"] = weights[f"{name}.{kind}"]
    return {name: value.contiguous() for name, value in out.items()}


def hooked_gradients(model, weights):
    """Gradients with Hugging Face's names, the two of the tied embeddings added up."""
    grads = {name: p.grad for name, p in model.named_parameters()}
    leaves = {name: torch.zeros_like(value, requires_grad=True) for name, value in weights.items()}
    layout = hooked_layout(leaves)  # a linear map: its transpose carries gradients back
    sum((layout[name] * grads[name]).sum() for name in layout).backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def prepared(model, name):
    """The arm with gates off zero, and what the hand-written one needs to be the same."""
    ids, suppression = [5, 9], arm(name)
    suppressor = Suppressor(model, suppression, batch=Batch(ids=ids))
    generator, more = torch.Generator().manual_seed(1), {}
    with torch.no_grad():
        for weight in suppressor.parameters.values():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    if suppression.gate:
        more["gates"] = [w.detach().clone().requires_grad_() for w in suppressor.parameters.values()]
    if suppression.control == "norm_matched":
        shape = (*IDS.shape, D) if suppression.site == "attn" else (*IDS.shape, HEADS, D // HEADS)
        like = torch.zeros(shape, dtype=torch.float64)
        more["noise"] = [normal_noise(like, Batch(ids=ids), 0, layer) for layer in range(LAYERS)]
    by_hand = {"gate": "value", "gate_attn": "attn"}.get(name, name.split(":")[0])
    return suppressor, dict(more, arm=by_hand, parallel=suppression.parallel)


@pytest.mark.parametrize("name", [*ARMS, "value:0.3", "norm_matched:0.3"])
@pytest.mark.parametrize(("norm", "backend"), BACKENDS)
def test_gradients_of_every_weight_through_an_arm_are_those_of_the_hand_written_one(norm, backend, name):
    model, weights, gradients = built(norm, backend)
    # Hugging Face's norms, softmax and rotary positions are in float32 whatever the model's dtype
    tolerance = 1e-9 if backend == "hooked" else 2e-5
    suppressor, by_hand = prepared(model, name)
    leaves = {key: value.clone().requires_grad_() for key, value in weights.items()}
    expected = hand_written.loss(leaves, IDS, norm=norm, **SHAPE, **by_hand)
    expected.backward()
    model.zero_grad(set_to_none=True)
    with attached(model, suppressor.hooks):
        found = model(IDS, return_type="loss")
        found.backward()
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=tolerance)
    pairs = [(key, leaves[key].grad, grad) for key, grad in gradients().items()]
    gates = by_hand.get("gates", [])
    pairs += [(key, w.grad, p.grad) for w, (key, p) in zip(gates, suppressor.parameters.items(), strict=True)]
    assert len(pairs) == len(weights) + len(gates)
    for key, one, other in pairs:
        assert one.abs().max() > 1e-6, key
        gap = (one - other).norm() / one.norm()
        assert gap < tolerance, (key, float(gap))


def starved(name, value):
    """Weights under which updates, values and a stream are exactly zero for some layer or token."""
    zero = ("layers.0.self_attn.v_proj", "layers.1.self_attn.o_proj", "layers.0.mlp.down_proj")
    value = torch.zeros_like(value) if any(part in name for part in zero) else value.clone()
    if "embed_tokens" in name:
        value[IDS[0, 0]] = 0.0  # a first token without a stream
        value[IDS[1, 3]] = 0.0
    return value


@pytest.mark.parametrize("name", [*ARMS, "value:0.3", "norm_matched:0.3"])
@pytest.mark.parametrize(("norm", "backend"), BACKENDS)
def test_gradients_are_finite_where_updates_values_and_streams_are_zero(norm, backend, name):
    model, weights, gradients = built(norm, backend)
    before = copy.deepcopy(model.state_dict())
    try:
        with torch.no_grad():
            layout = {key: starved(key, value) for key, value in weights.items()}
            if backend == "hooked":
                model.load_state_dict(hooked_layout(layout), strict=False)
            else:
                for key, parameter in model.original_model.named_parameters():
                    plain = key.replace("._original_component", "")
                    if plain in layout:
                        parameter.copy_(layout[plain])
        suppressor, _ = prepared(model, name)
        model.zero_grad(set_to_none=True)
        with attached(model, suppressor.hooks):
            loss = model(IDS, return_type="loss")
            loss.backward()
        found = {**gradients(), **{key: p.grad for key, p in suppressor.parameters.items()}}
    finally:
        model.load_state_dict(before)
    assert torch.isfinite(loss)
    assert len(found) >= len(weights)
    for key, grad in found.items():
        assert torch.isfinite(grad).all(), key
    assert (found["model.embed_tokens.weight"] != 0).any()


@pytest.mark.parametrize("name", ["gate", "gate_attn"])
def test_a_gates_gradient_is_its_finite_difference(name):
    norm, backend = BACKENDS[0]
    model = built(norm, backend)[0]
    suppressor, _ = prepared(model, name)
    weight = suppressor.parameters["gate.0"]
    direction = torch.randn(D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    step, tolerance = (1e-4, 1e-6) if backend == "hooked" else (1e-2, 1e-2)  # a bridge's loss has float32's digits
    losses, start = [], weight.detach().clone()
    with attached(model, suppressor.hooks):
        model(IDS, return_type="loss").backward()
        for side in (-1, 1):
            with torch.no_grad():
                weight.copy_(start + side * step * direction)
                losses.append(float(model(IDS, return_type="loss")))
    assert float(weight.grad @ direction) == pytest.approx((losses[1] - losses[0]) / (2 * step), rel=tolerance)


@pytest.mark.parametrize(("site", "parallel"), [("value", 0.0), ("attn", 0.5)])
def test_the_norm_matched_control_is_as_strong_as_suppression_token_by_token(site, parallel):
    """The edited update is as long and has moved as far; its turn round the update knows nothing of the reference."""
    norm, backend = BACKENDS[0]
    model, kept = built(norm, backend)[0], {}
    where = "blocks.0.attn.hook_z" if site == "value" else "blocks.0.hook_attn_out"
    edits = {control: Suppression(site, parallel, control=control, layers=(0,)) for control in ("none", "norm_matched")}

    def edited(suppression, number):
        keep = lambda tensor, hook: kept.update(now=tensor.detach().clone())  # noqa: E731
        hooks = Suppressor(model, suppression, batch=Batch(ids=[number, number + 1])).hooks
        with torch.no_grad(), attached(model, [*hooks, (where, keep)]):
            model(IDS, return_type="loss")
        return kept["now"]

    clean, real = edited(Suppression(), 0), edited(edits["none"], 0)
    change, turns = real - clean, []
    for number in range(0, 200, 2):
        control = edited(edits["norm_matched"], number)
        moved = control - clean
        torch.testing.assert_close(control.norm(dim=-1), real.norm(dim=-1), rtol=1e-5, atol=1e-12)
        torch.testing.assert_close(moved.norm(dim=-1), change.norm(dim=-1), rtol=1e-5, atol=1e-12)
        turns.append(torch.cosine_similarity(aside(moved, clean), aside(change, clean), dim=-1)[:, 1:])
    cosines = torch.stack(turns)
    spread = cosines.std(0) / len(cosines) ** 0.5
    assert spread.max() < 0.1
    assert (cosines.mean(0).abs() < 5 * spread).all()


def aside(vectors, direction):
    return vectors - (vectors * direction).sum(-1, keepdim=True) / (direction**2).sum(-1, keepdim=True) * direction
