"""The models on one device: their parts against torch's own modules, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from weft import zoo
from weft.errors import CaptureError
from weft.zoo import deepseek, dropless, fp8, llama, moe, vision

LLAMA, MOE, VISION = llama.PRESETS["debug"], moe.PRESETS["debug"], vision.PRESETS["debug"]


def test_the_norm_is_that_of_torch():
    norm = llama.RMSNorm(16, 1e-5)
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), norm.weight, 1e-5))


def test_a_product_in_fp8_is_the_product_up_to_its_rounding():
    torch.manual_seed(0)
    layer = fp8.Fp8Linear(64, 48, bias=False, dtype=torch.bfloat16)
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(2, 16, 48, dtype=torch.bfloat16)
    results = [F.linear(x, layer.weight), layer(x)]
    gradients = [torch.autograd.grad(result, [x, layer.weight], gradient) for result in results]
    for exact, found in zip((results[0], *gradients[0]), (results[1], *gradients[1]), strict=True):
        # The mean error of a factor is 1/28 in e4m3 and 1/14 in e5m2.
        assert 0 < (found - exact).norm() < 0.1 * exact.norm()


def test_turning_by_the_position_makes_scores_depend_on_distances_only():
    rotary = llama.Rotary(LLAMA)
    query, key = torch.randn(LLAMA.head_dim), torch.randn(LLAMA.head_dim)
    queries, keys = (rotary.turn(v.expand(1, LLAMA.sequence, 1, -1))[0, :, 0] for v in (query, key))
    scores = queries @ keys.T
    for distance in (0, 1, 7):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores[0, 0], query @ key)


def test_attention_is_causal():
    torch.manual_seed(0)
    attention, rotary = llama.Attention(LLAMA), llama.Rotary(LLAMA)
    x = torch.randn(1, LLAMA.sequence, LLAMA.dim)
    changed = x.clone()
    changed[:, 10:] += 1.0
    first, second = attention(x, rotary), attention(changed, rotary)
    assert torch.equal(first[:, :10], second[:, :10])
    assert not torch.allclose(first[:, 10:], second[:, 10:])


def test_no_token_of_a_dropless_mixture_misses_an_expert_that_it_chose():
    torch.manual_seed(0)
    config = replace(dropless.PRESETS["debug"], num_experts=4)
    layer = dropless.DroplessFeedForward(config).bfloat16()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.1)
    x = torch.randn(2, 5, config.dim, dtype=torch.bfloat16)
    tokens = x.flatten(0, 1)
    weights, chosen = layer.router(tokens).float().softmax(-1).topk(2, -1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
    stacked = [weight.view(4, -1, weight.shape[1]) for weight in layer.experts.parameters()]
    expected = torch.stack(
        [
            sum(w * (F.silu(t @ gate[e].T) * (t @ up[e].T)) @ down[e].T for w, e in zip(ws, es, strict=True))
            for (gate, up, down) in [stacked]
            for t, ws, es in zip(tokens, weights, chosen, strict=True)
        ]
    )
    found = layer(x).flatten(0, 1) - layer.shared(tokens)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)


def test_a_fresh_model_knows_nothing_and_learns():
    torch.manual_seed(0)
    model, make_batch = zoo.build("llama-debug", compute_dtype=torch.float32)
    batch = make_batch(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(8):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(float(LLAMA.vocabulary)).log().item(), abs=0.1)
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.parametrize("checkpoint", ["full", "selective", "layer"])
@pytest.mark.parametrize("name", ["llama-debug", "moe-debug"])
def test_tied_and_checkpointed_models_are_what_they_say(name: str, checkpoint: str):
    plain, make_batch = zoo.build(name, compute_dtype=torch.float32)
    tied, _ = zoo.build(name, compute_dtype=torch.float32, tied=True)
    again, _ = zoo.build(name, compute_dtype=torch.float32, checkpoint=checkpoint)
    assert tied.output.weight is tied.tokens.weight  # type: ignore[union-attr]
    assert len(list(tied.parameters())) == len(list(plain.parameters())) - 1
    again.load_state_dict(plain.state_dict())
    batch = make_batch(1)
    gradients = [torch.autograd.grad(model(*batch), list(model.parameters())) for model in (plain, again)]
    assert all(map(torch.equal, *gradients))


def experts_one_by_one(layer: moe.MoEFeedForward, x: Tensor) -> Tensor:
    """What a mixture of experts means, token by token."""
    config, experts = layer.config, layer.experts
    gate, up = (w.view(config.num_experts, config.ffn_dim, config.dim) for w in (experts.gate, experts.up))
    down = experts.down.view(config.num_experts, config.dim, config.ffn_dim)
    rows: list[Tensor] = []
    for token in x.flatten(0, 1):
        weights, chosen = layer.router(token).softmax(-1).topk(config.num_chosen)
        weights = weights / weights.sum()
        rows.append(
            sum(
                w * (down[e] @ (F.silu(gate[e] @ token) * (up[e] @ token)))
                for w, e in zip(weights, chosen, strict=True)
            )  # type: ignore[arg-type]
        )
    return torch.stack(rows).view_as(x)


def mixture(**changes: Any) -> moe.MoEFeedForward:
    torch.manual_seed(0)
    layer = moe.MoEFeedForward(replace(MOE, **changes))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def test_tokens_get_the_weighted_sum_of_their_experts():
    layer = mixture()
    x = torch.randn(2, 16, MOE.dim)
    torch.testing.assert_close(layer(x), experts_one_by_one(layer, x), rtol=1e-4, atol=1e-4)


def test_tokens_beyond_an_experts_capacity_are_dropped():
    layer = mixture(num_chosen=1, capacity_percent=100)
    with torch.no_grad():
        layer.router.weight.zero_()  # all scores are equal: all tokens choose the first expert
    x = torch.randn(1, 32, MOE.dim)
    served = layer(x)[0].abs().sum(-1) > 0
    assert served.tolist() == [True] * 4 + [False] * 28  # 32 tokens, 8 experts: room for four


def test_the_shared_norm_is_batch_norm_on_one_rank():
    torch.manual_seed(0)
    ours, torchs = vision.SharedBatchNorm(VISION), nn.BatchNorm2d(VISION.channels)
    x = torch.randn(4, VISION.channels, 8, 8)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [norm(value) for norm, value in zip((ours, torchs), inputs, strict=True)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    gradient = torch.randn_like(x)
    found = [
        torch.autograd.grad(o, [i, *n.parameters()], gradient)
        for o, i, n in zip(outputs, inputs, (ours, torchs), strict=True)
    ]
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.running_mean, torchs.running_mean, rtol=1e-4, atol=1e-5)
    unbiased = 4 * 64 / (4 * 64 - 1)  # torch's running variance is that of a sample, ours that of the batch
    torch.testing.assert_close((ours.running_variance - 0.9) * unbiased + 0.9, torchs.running_var, rtol=1e-3, atol=1e-3)
    ours.eval()
    ours(x)
    torch.testing.assert_close(ours.running_mean, torchs.running_mean, rtol=1e-4, atol=1e-5)


def test_batches_differ_by_seed_and_are_the_same_for_one():
    _, make_batch = zoo.build("vision-debug", compute_dtype=torch.float32)
    first, same, other = make_batch(2, 1), make_batch(2, 1), make_batch(2, 2)
    assert all(map(torch.equal, first, same))
    assert not torch.equal(first[0], other[0])
    assert first[0].shape == (2, 3, VISION.image_size, VISION.image_size)


def test_all_models_have_names():
    expected = [
        "llama-debug",
        "llama-1b",
        "llama-8b",
        "llama-70b",
        "llama-7b",
        "llama-13b",
        "llama-34b",
        "llama-405b",
        "moe-debug",
        "moe-8x7b",
        "dropless-debug",
        "dropless-16b",
        "dropless-8x7b",
        "deepseek-debug",
        "deepseek-16b",
        "deepseek-671b",
        "vision-debug",
        "vision-small",
    ]
    assert zoo.names() == expected
    large = llama.PRESETS["8b"]
    shape = (large.dim, large.num_heads, large.num_kv_heads, large.ffn_dim, large.vocabulary, large.sequence)
    assert shape == (4096, 32, 8, 14336, 131072, 4096)


def test_the_published_mixture_has_the_published_number_of_parameters():
    """46.7 billion for Mixtral 8x7B."""
    config = dropless.PRESETS["8x7b"]
    with torch.device("meta"):
        model = dropless.Dropless(replace(config, num_layers=1))
    block = sum(parameter.numel() for parameter in model.layers[0].parameters())
    total = sum(parameter.numel() for parameter in model.parameters()) + (config.num_layers - 1) * block
    assert total == pytest.approx(46.70e9, rel=1e-3)


@pytest.mark.parametrize(("name", "billions"), [("16b", 15.706), ("671b", 671.026)])
def test_decoders_with_latent_attention_have_the_published_number_of_parameters(name: str, billions: float):
    config = deepseek.PRESETS[name]
    with torch.device("meta"):
        model = deepseek.Deepseek(replace(config, num_layers=config.num_dense + 1))
    block = sum(parameter.numel() for parameter in model.layers[-1].parameters())
    rest = config.num_layers - len(model.layers)
    total = sum(parameter.numel() for parameter in model.parameters()) + rest * block
    assert total / 1e9 == pytest.approx(billions, abs=1e-3)


def test_latent_attention_weighs_the_values_of_earlier_tokens():
    torch.manual_seed(0)
    config = replace(deepseek.PRESETS["debug"], sequence=6)
    attention, rotary = deepseek.LatentAttention(config).double(), llama.Rotary(config).double()
    x = torch.randn(2, 6, config.dim, dtype=torch.float64)
    queries = attention.query(attention.query_norm(attention.query_latent(x))).view(2, 6, 8, 12)
    latent, placed = attention.latent(x)[..., :16], attention.latent(x)[..., 16:]
    both = attention.key_value(attention.latent_norm(latent)).view(2, 6, 8, 16)
    mixed = torch.zeros(2, 6, 8, 8, dtype=torch.float64)
    turned_queries, turned_keys = rotary.turn(queries[..., 8:]), rotary.turn(placed[:, :, None])[:, :, 0]
    for head in range(8):
        scores = queries[:, :, head, :8] @ both[:, :, head, :8].mT + turned_queries[:, :, head] @ turned_keys.mT
        scores = (scores / 12**0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        mixed[:, :, head] = scores.softmax(-1) @ both[:, :, head, 8:]
    torch.testing.assert_close(attention(x, rotary), attention.output(mixed.flatten(2)))


@pytest.mark.parametrize(
    ("name", "billions"), [("7b", 6.738), ("13b", 13.016), ("34b", 33.744), ("405b", 405.853)]
)  # parameters of the published models
def test_published_shapes_have_the_published_number_of_parameters(name: str, billions: float):
    with torch.device("meta"):
        model = llama.Llama(replace(llama.PRESETS[name], num_layers=1))
    layers = llama.PRESETS[name].num_layers - 1
    block = sum(parameter.numel() for parameter in model.layers[0].parameters())
    total = sum(parameter.numel() for parameter in model.parameters()) + layers * block
    assert total / 1e9 == pytest.approx(billions, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "lama-8b"}, "zoo: no model is called 'lama-8b'\ndid you mean 'llama-8b'?"),
        ({"name": "gpt"}, f"zoo: no model is called 'gpt'\nuse one of {', '.join(zoo.names())}"),
        ({"parallel": "fdsp"}, "zoo: no parallelism is called 'fdsp'\ndid you mean 'fsdp'?"),
        (
            {"parallel": "zero"},
            "zoo: no parallelism is called 'zero'\n"
            "use one of none, ddp, ddp-dtensor, fsdp, hsdp, hsdp-dtensor, tp, fsdp-tp, hsdp-tp, ep-fsdp, ep-tp",
        ),
        ({"layers": 0}, "zoo: layers is 0, expected 1 or more\nuse layers=1 or more"),
        ({"batch": 0}, "zoo: batch is 0, expected 1 or more\nuse batch=1 or more"),
        (
            {"checkpoint": "selectve"},
            "zoo: checkpoint is 'selectve', expected none, full, selective, products, attention, layer\n"
            "did you mean 'selective'?",
        ),
        ({"norm": "fused"}, "zoo: norm is 'fused', expected operators, kernel\nuse one of operators, kernel"),
        ({"rotary": "imaginary"}, "zoo: rotary is 'imaginary', expected real, complex\nuse one of real, complex"),
        ({"loss": "f16"}, "zoo: loss is 'f16', expected f32, chunked, parallel\nuse one of f32, chunked, parallel"),
        (
            {"reshard": "defualt"},
            "zoo: reshard is 'defualt', expected always, default, never\ndid you mean 'default'?",
        ),
        ({"vocabluary": 8}, "zoo: llama-debug has no field called 'vocabluary'\ndid you mean 'vocabulary'?"),
        (
            {"parallel": "fsdp-tp", "mesh": {"tp": 2}},
            "zoo: fsdp-tp needs a mesh with the axes dp, tp, found tp\ngive mesh={'dp': 2, 'tp': 2}",
        ),
        (
            {"parallel": "ddp", "mesh": {"dp": 4}, "ranks": 8},
            "zoo: the mesh {'dp': 4} has 4 ranks, 8 are asked for\ngive one of the two",
        ),
        (
            {"parallel": "tp", "ranks": 8},
            "zoo: num_kv_heads 4 does not split over the 8 ranks of 'tp'\nuse an axis 'tp' whose size divides it",
        ),
        (
            {"parallel": "ep-fsdp", "ranks": 4},
            "zoo: Llama cannot be run under ep-fsdp\nuse ddp, fsdp or hsdp, which any model can",
        ),
        (
            {"name": "vision-debug", "parallel": "tp", "ranks": 2},
            "zoo: Vision cannot be run under tp\nuse ddp, fsdp or hsdp, which any model can",
        ),
        (
            {"name": "moe-debug", "parallel": "ep-fsdp", "mesh": {"dp": 1, "ep": 16}},
            "zoo: 8 experts do not split over 16 ranks\nuse an axis 'ep' whose size divides them",
        ),
    ],
)
def test_what_is_not_in_the_zoo_is_refused_with_what_is(options: dict[str, Any], message: str):
    with pytest.raises(CaptureError) as caught:
        zoo.load(**{"name": "llama-debug", **options})
    assert str(caught.value) == message


def test_a_parallelism_without_a_mesh_is_refused():
    with pytest.raises(CaptureError) as caught:
        zoo.build("llama-debug", "fsdp")
    assert str(caught.value) == "zoo: fsdp needs a mesh with the axes dp, found none\ngive mesh={'dp': 2}"


def test_without_a_mesh_parameters_are_f32_and_products_run_in_the_compute_dtype():
    module = zoo.load("llama-debug", "none", part="joint", layers=1)
    products = [node for node in module.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert {node.meta["val"].dtype for node in products} == {torch.bfloat16}
    model, make_batch = zoo.build("vision-debug")
    model(*make_batch(2)).backward()
    assert {(each.dtype, each.grad.dtype) for each in model.parameters()} == {(torch.float32, torch.float32)}


def test_a_model_built_in_f32_without_a_mesh_can_be_parametrised():
    model, make_batch = zoo.build("llama-debug", layers=1, compute_dtype=torch.float32)
    for module in list(model.modules()):
        for name, _ in list(module.named_parameters(recurse=False)):
            parametrize.register_parametrization(module, name, nn.Identity())
    model(*make_batch(2)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
