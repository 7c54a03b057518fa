"""Tests of gmts.py against independent oracles: torch.distributions, autograd, brute force, generate.

The ten that carry the project come first. Tests that need a GPU run where there is one. The
benchmark: GMTS_BENCH=1 pytest -s -k bench, see the README.
"""

import concurrent.futures
import contextlib
import copy
import csv
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import time
import tracemalloc
import types
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.distributions import Categorical
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

import gmts

transformers.logging.disable_progress_bar()
HERE = Path(gmts.__file__).parent
PROMPTS = ["348+214=", "1+2=", "99+1=", "7="]


@pytest.fixture(scope="session")
def tokenizer():
    return gmts.demo_tokenizer()


def tiny_model(config=Qwen2Config, seed=0, scale=8, **options):
    """A random model of the demo's 16 symbols; `scale` sharpens its flat distributions."""
    torch.manual_seed(seed)
    shape = dict(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        head_dim=8,
    )
    model = AutoModelForCausalLM.from_config(config(**shape | options)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name and "lm_head" not in name:
                weight.mul_(scale)
        model.get_output_embeddings().weight.mul_(scale)
    return model


def left_padded(tokenizer, texts=PROMPTS):
    batch = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    return batch.input_ids, batch.attention_mask


def make_batch(model, tokenizer, samples=4, max_tokens=12, stop=(0,), advantages=None):
    """A rollout of PROMPTS with random advantages."""
    ids, mask = left_padded(tokenizer)
    sampled = gmts.sample(model, ids, mask, samples, max_tokens, set(stop), 1.0)
    index = torch.arange(len(ids)).repeat_interleave(samples)
    if advantages is None:
        advantages = torch.randn(len(index))
    rewards = torch.zeros(len(ids), samples)
    return gmts.Batch(ids, mask, index, *sampled, rewards, advantages[:, None])


def full_logits(model, batch):
    """Plain teacher forcing of prompt and answer, each row alone and unpadded -> (N, T, V)."""
    rows = []
    for i, tokens in enumerate(batch.tokens):
        prompt = batch.prompt_ids[batch.prompt_index[i]]
        prompt = prompt[batch.prompt_mask[batch.prompt_index[i]].bool()]
        logits = model(input_ids=torch.cat([prompt, tokens])[None]).logits[0]
        rows.append(logits[len(prompt) - 1 : -1])
    return torch.stack(rows)


def gradients(model):
    parameters = [p for p in model.parameters() if p.grad is not None]
    return torch.cat([p.grad.flatten() for p in parameters])


def config(**changes):
    return gmts.Config(**changes)


def make_run(model, tokenizer, **changes):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0)
    return gmts.Run(
        config=config(**changes),
        model=model,
        reference=None,
        tokenizer=tokenizer,
        stop_ids={0},
        optimizer=optimizer,
        reward=gmts.is_correct,
        problems=[],
        eval_problems=[],
        data_hash="",
    )


# ---- 1 Statistics are those of torch.distributions and autograd ----------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_token_stats_match_categorical_and_autograd(temperature):
    torch.manual_seed(0)
    logits = (3 * torch.randn(3, 5, 11, dtype=torch.float64)).requires_grad_()
    tokens = torch.randint(11, (3, 5))
    logprob, entropy, grad_norm = gmts.token_stats(logits, tokens, temperature)
    oracle = Categorical(logits=logits / temperature)
    assert torch.allclose(logprob.double(), oracle.log_prob(tokens), atol=1e-5)
    assert torch.allclose(entropy.double(), oracle.entropy(), atol=1e-5)
    (gradient,) = torch.autograd.grad(oracle.log_prob(tokens).sum(), logits)
    assert torch.allclose(grad_norm.double(), gradient.norm(dim=-1), atol=1e-5)
    for stats in (logprob, entropy, grad_norm):
        assert stats.dtype == torch.float32 and stats.shape == tokens.shape


def test_token_stats_at_the_edges():
    sure = torch.tensor([[20.0, 0.0, 1.0], [0.0, 16.0, -1.0]], dtype=torch.float64)
    sure.requires_grad_()
    tokens = torch.tensor([0, 1])
    (gradient,) = torch.autograd.grad(Categorical(logits=sure).log_prob(tokens).sum(), sure)
    grad_norm = gmts.token_stats(sure, tokens)[2]
    assert torch.allclose(grad_norm.double(), gradient.norm(dim=-1), rtol=1e-4, atol=0)
    forbidden = gmts.token_stats(torch.tensor([[0.0, -math.inf, 0.0]]), torch.tensor([2]))
    wanted = [-math.log(2), math.log(2), math.sqrt(0.5)]
    assert torch.stack(forbidden).flatten().tolist() == pytest.approx(wanted)
    half = torch.randn(4, 9).bfloat16()
    for ours, same in zip(
        gmts.token_stats(half, torch.arange(4)),
        gmts.token_stats(half.float(), torch.arange(4)),
        strict=True,
    ):
        assert torch.equal(ours, same)
    nothing = gmts.token_stats(torch.zeros(0, 9), torch.zeros(0, dtype=torch.long))
    assert nothing[0].shape == (0,)


# ---- 2 The weight is the gradient of the loss ----------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_policy_weight_is_the_gradient_of_policy_loss(beta):
    torch.manual_seed(0)
    old, ref = torch.randn(2, 400, dtype=torch.float64)
    logprobs = (old + 0.4 * torch.randn(400)).requires_grad_()
    advantages = torch.randn(400, dtype=torch.float64)
    advantages[:20] = 0
    loss = gmts.policy_loss(logprobs, old, advantages, 7.0, 0.2, 0.28, ref, beta)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    weight = gmts.policy_weight(logprobs, old, advantages, 0.2, 0.28, ref, beta)
    assert torch.allclose(-gradient * 7, weight)

    # And by the words of PPO, one token at a time.
    ratios = (logprobs - old).exp().tolist()
    objective, outside = [], []
    for a, r in zip(advantages.tolist(), ratios, strict=True):
        objective.append(min(r * a, min(max(r, 0.8), 1.28) * a))
        outside.append((a > 0 and r > 1.28) or (a < 0 and r < 0.8))
    assert 0 < sum(outside) < 400
    if beta == 0:
        assert weight[torch.tensor(outside)].eq(0).all()
        assert loss.item() == pytest.approx(-sum(objective) / 7)


def test_kl_estimate_is_unbiased():
    policy, reference = torch.tensor([0.1, 0.2, 0.7]), torch.tensor([0.3, 0.3, 0.4])
    old = policy.log()
    k3 = [
        gmts.policy_loss(old[i], old[i], torch.zeros(()), 1, 0.2, 0.28, reference[i].log(), 1.0)
        for i in range(3)
    ]
    exact = torch.distributions.kl_divergence(Categorical(policy), Categorical(reference))
    assert (policy * torch.stack(k3)).sum().item() == pytest.approx(exact.item(), rel=1e-5)


# ---- 3 Advantages are numpy's --------------------------------------------------------------------


def test_group_advantages_match_numpy_and_are_zero_without_signal():
    rewards = np.random.default_rng(0).random((5, 7))
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
    assert np.allclose(gmts.group_advantages(torch.tensor(rewards)), expected, atol=1e-5)
    equal = torch.full((2, 16), 0.1)  # whose mean, rounded, is not 0.1
    assert gmts.group_advantages(equal).eq(0).all()
    assert gmts.group_advantages(torch.tensor([[3.0], [1.0]])).eq(0).all()
    ends = gmts.group_advantages(torch.tensor([[True, False]]))
    assert ends.flatten().tolist() == pytest.approx([1, -1], 1e-5)


# ---- 4 Selection is what brute force selects -----------------------------------------------------


def brute_force_top(scores, mask, fraction):
    candidates = [i for i in range(len(scores)) if mask[i]]
    count = math.ceil(Fraction(str(fraction)) * len(candidates))
    positive = [i for i in candidates if scores[i] > 0]
    best = sorted(positive, key=lambda i: (-scores[i], i))[:count]
    return [i in best for i in range(len(scores))]


def test_select_top_matches_brute_force():
    rng = np.random.default_rng(0)
    for trial in range(300):
        size = int(rng.integers(1, 40))
        scores = rng.integers(0, 5, size) / 4 if trial % 2 else rng.normal(size=size)
        mask = rng.random(size) < 0.7
        scores = np.where(mask, scores, 99.0).astype(np.float32)  # padding scores highest
        fraction = [0.2, 0.5, 1.0, 0.05, 1 / 3][trial % 5]
        keep = gmts.select_top(torch.tensor(scores), torch.tensor(mask), fraction)
        assert keep.tolist() == brute_force_top(scores, mask, fraction)


def test_select_top_at_the_edges():
    ones, every = torch.ones(5, 7), torch.ones(5, 7).bool()
    keep = gmts.select_top(ones, every, 0.2)
    assert keep.sum() == 7  # 0.2 * 35 in floating point makes 8
    assert keep.flatten()[:7].all()  # of equal scores the earlier
    assert not gmts.select_top(torch.zeros(5, 7), every, 0.5).any()
    assert not gmts.select_top(ones, ~every, 0.2).any()
    assert gmts.select_top(ones, every, 1.0).all()
    few = gmts.select_top(torch.tensor([0.0, 0, 0, 2]), torch.ones(4).bool(), 1.0)
    assert few.tolist() == [False, False, False, True]
    nan = gmts.select_top(torch.tensor([3.0, math.nan, 1, 2]), torch.ones(4).bool(), 0.5)
    assert nan.tolist() == [True, True, False, False]  # it must surface, not vanish


def test_select_top_of_20_million_scores():
    scores = torch.rand(20_000_000)  # torch.quantile refuses more than 16 million
    keep = gmts.select_top(scores, torch.ones_like(scores, dtype=torch.bool), 0.2)
    assert keep.sum() == 4_000_000 and scores[keep].min() >= scores[~keep].max()


def test_token_scores():
    entropy, norm, weight = torch.rand(3, 50)
    weight = weight - 0.5
    stats = entropy, norm, weight
    assert torch.equal(gmts.token_scores("gmts", *stats), (entropy * weight).abs())
    assert torch.equal(gmts.token_scores("entropy", *stats), entropy)
    assert torch.equal(gmts.token_scores("exact", *stats), (norm * weight).abs())
    assert gmts.token_scores("all", *stats).eq(1).all()
    draws = [gmts.token_scores("random", *stats) for _ in range(2)]
    assert draws[0].gt(0).all() and draws[0].le(1).all() and not torch.equal(*draws)
    with pytest.raises(ValueError, match="selector"):
        gmts.token_scores("best", *stats)


# ---- 5 Sampling agrees with full forward passes --------------------------------------------------


def test_sample_statistics_equal_a_full_forward(tokenizer):
    model = tiny_model()
    batch = make_batch(model, tokenizer, samples=8)
    assert batch.mask.sum(1).min() < batch.mask.sum(1).max()  # some ended early
    oracle = Categorical(logits=full_logits(model, batch).double())
    mask = batch.mask
    logprobs, entropy = batch.logprobs.double(), batch.entropy.double()
    assert torch.allclose(logprobs[mask], oracle.log_prob(batch.tokens)[mask], atol=1e-4)
    assert torch.allclose(entropy[mask], oracle.entropy()[mask], atol=1e-4)
    for stats in (batch.logprobs, batch.entropy, batch.logit_grad_norm):
        assert stats[~mask].eq(0).all()


def test_sample_keeps_the_end_token_and_nothing_behind_it(tokenizer):
    stop = (0, 3, 5)
    batch = make_batch(tiny_model(), tokenizer, samples=16, max_tokens=10, stop=stop)
    for tokens, mask in zip(batch.tokens.tolist(), batch.mask.tolist(), strict=True):
        ends = [i for i, token in enumerate(tokens) if token in stop]
        length = ends[0] + 1 if ends else 10
        assert mask == [i < length for i in range(10)]


def test_sample_draws_from_the_distribution(tokenizer):
    model, counts = tiny_model(scale=3), torch.zeros(16, 16)
    ids, mask = left_padded(tokenizer, ["12+3="])
    torch.manual_seed(0)
    tokens, *_ = gmts.sample(model, ids, mask, 4000, 2, {99}, 0.8)
    for first, second in tokens.tolist():
        counts[first, second] += 1
    p_first = (model(input_ids=ids).logits[0, -1] / 0.8).softmax(-1)
    both = torch.cat([ids.repeat(16, 1), torch.arange(16)[:, None]], 1)
    p_second = (model(input_ids=both).logits[:, -1] / 0.8).softmax(-1)
    expected = 4000 * p_first[:, None] * p_second
    large = expected > 5
    chi2 = ((counts - expected)[large] ** 2 / expected[large]).sum()
    chi2 += (counts - expected)[~large].sum() ** 2 / expected[~large].sum()
    freedom = int(large.sum())
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("stop", [[0], [0, 7]])
def test_greedy_sample_equals_generate(tokenizer, stop):
    model = tiny_model(seed=1)
    ids, seen = left_padded(tokenizer)
    tokens, mask, *_ = gmts.sample(model, ids, seen, 1, 20, set(stop), 0.0)
    options = dict(max_new_tokens=20, do_sample=False, eos_token_id=stop, pad_token_id=0)
    expected = model.generate(input_ids=ids, attention_mask=seen, **options)[:, ids.shape[1] :]
    for row in range(len(tokens)):
        answer = tokens[row][mask[row]].tolist()
        assert answer == expected[row].tolist()[: len(answer)]
        assert len(answer) == 20 or answer[-1] in stop


def test_prompts_of_one_token_need_no_prompt_cache(tokenizer):
    model = tiny_model()
    ids, seen = left_padded(tokenizer, ["7", "1"])
    tokens, mask, logprobs, *_ = gmts.sample(model, ids, seen, 2, 5, {99}, 1.0)
    for row in range(4):
        whole = torch.cat([ids[row // 2], tokens[row]])
        oracle = Categorical(logits=model(input_ids=whole[None]).logits[0, :-1])
        assert torch.allclose(logprobs[row], oracle.log_prob(tokens[row]), atol=1e-4)


# ---- 6 The gradient through kept logits is that of full logits -----------------------------------


def plain_loss(model, batch, keep, ref_logprobs=None, beta=0.0):
    """GRPO with full logits and a mask, as one writes it without a thought for memory."""
    logprobs = Categorical(logits=full_logits(model, batch)).log_prob(batch.tokens)
    ratio = (logprobs - batch.logprobs).exp()
    clipped = ratio.clamp(0.8, 1.28)
    loss = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    if beta:
        d = ref_logprobs - logprobs
        loss = loss + beta * (d.exp() - d - 1)
    return (loss * keep).sum() / keep.sum()


@pytest.mark.parametrize("micro_tokens", [1, 40, 10_000])
@pytest.mark.parametrize("fraction", [0.2, 1.0])
def test_kept_only_gradient_equals_full_logits(tokenizer, monkeypatch, micro_tokens, fraction):
    model = tiny_model(scale=3)
    batch = make_batch(model, tokenizer)
    batch.logprobs += 0.2 * torch.randn_like(batch.logprobs)  # some ratios are clipped
    keep = gmts.select_top(batch.entropy, batch.mask, fraction)
    expected = plain_loss(model, batch, keep)
    expected.backward()
    wanted = gradients(model)
    model.zero_grad()
    settings = config(micro_tokens=micro_tokens)
    losses, policy_loss = [], gmts.policy_loss

    def recorded(*args):
        losses.append(policy_loss(*args))
        return losses[-1]

    monkeypatch.setattr(gmts, "policy_loss", recorded)
    gmts.policy_gradient(model, batch, keep, keep.sum(), settings, batch.logprobs)
    assert sum(losses).item() == pytest.approx(expected.item(), abs=1e-5)
    assert torch.allclose(gradients(model), wanted, atol=1e-5)


def test_micro_batches_stay_within_their_bounds_and_leave_nothing_out(tokenizer):
    model = tiny_model()
    batch = make_batch(model, tokenizer, samples=16)
    keep = batch.mask & (torch.arange(len(batch.mask)) % 3 > 0)[:, None]
    parts = list(gmts.micro_batches(model, batch, keep, config(micro_tokens=100)))
    rows = torch.cat(parts)
    assert sorted(rows.tolist()) == keep.any(1).nonzero()[:, 0].tolist() and len(parts) > 3
    for part in parts:
        longest = batch.mask[part].sum(1).max() + batch.prompt_ids.shape[1]
        assert len(part) == 1 or len(part) * longest <= 100
    prompts = batch.prompt_index[rows].tolist()
    assert sum(a != b for a, b in zip(prompts, prompts[1:], strict=False)) == 3  # side by side

    # A model whose answers' logits are large gets fewer of them at a time.
    logits = keep.sum(1).max() * 16
    wide = list(gmts.micro_batches(model, batch, keep, config(micro_tokens=2000)))
    assert len(wide) == 1 and logits * len(rows) <= 2000 * 2**15
    model.get_output_embeddings().weight = torch.nn.Parameter(torch.zeros(2**21, 1))
    parts = list(gmts.micro_batches(model, batch, keep, config(micro_tokens=2000)))
    most = keep.sum(1).max()
    assert len(parts) > 1
    assert all(len(part) * most * 2**21 <= 2000 * 2**15 for part in parts if len(part) > 1)


def test_score_tokens_equals_sampling(tokenizer):
    model = tiny_model()
    batch = make_batch(model, tokenizer)
    for micro_tokens in (1, 10_000):
        settings = config(micro_tokens=micro_tokens)
        stats = gmts.score_tokens(model, batch, batch.mask, settings)
        sampled = batch.logprobs, batch.entropy, batch.logit_grad_norm
        for ours, wanted in zip(stats, sampled, strict=True):
            assert torch.allclose(ours, wanted, atol=1e-4)


# ---- 7 With all tokens kept it is plain GRPO -----------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"select": "all"}, {"fraction": 1.0}, {"select": "all", "beta": 0.1}]
)
def test_all_tokens_are_plain_grpo(tokenizer, settings):
    """learn() takes the very step of GRPO with full logits over the informative groups."""
    model, twin = tiny_model(scale=3), tiny_model(scale=3)
    advantages = torch.randn(16)
    advantages[4:8] = 0  # the second group is dropped
    batch = make_batch(model, tokenizer, advantages=advantages)
    run, beta, ref = make_run(model, tokenizer, **settings), settings.get("beta", 0.0), None
    if beta:
        run.reference = tiny_model(scale=3.2)
        logits = full_logits(run.reference, batch)
        ref = Categorical(logits=logits).log_prob(batch.tokens).detach()
    figures = gmts.learn(run, batch)
    keep = batch.mask & (batch.advantages != 0)
    assert figures["informative"] == 0.75 and figures["kept"] == 1
    assert figures["entropy_kept"] == pytest.approx(batch.entropy[keep].mean().item())
    plain_loss(twin, batch, keep, ref, beta).backward()
    assert figures["grad_norm"] == pytest.approx(gradients(twin).norm().item(), rel=1e-4)
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    torch.optim.AdamW(twin.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0).step()
    for ours, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, wanted, atol=1e-5)


# ---- 8 The selection is over the whole batch -----------------------------------------------------


def test_selection_is_over_the_whole_batch(tokenizer, monkeypatch):
    """One group's answers carry all the advantage: every kept token must come from it."""
    model = tiny_model(scale=3)
    advantages = torch.full((16,), 1e-3)
    advantages[8:12] = torch.tensor([2.0, -2.0, 2.0, -2.0])
    batch, kept = make_batch(model, tokenizer, advantages=advantages), []
    original = gmts.policy_gradient

    def recorded(model, batch, keep, *rest):
        kept.append(keep)
        return original(model, batch, keep, *rest)

    monkeypatch.setattr(gmts, "policy_gradient", recorded)
    run = make_run(model, tokenizer, micro_tokens=30)  # many micro-batches, one selection
    gmts.learn(run, batch)
    assert len(kept) == 1
    assert kept[0].sum() == math.ceil(Fraction("0.2") * int(batch.mask.sum()))
    assert kept[0].any(1).nonzero().flatten().tolist() == [8, 9, 10, 11]


def test_later_updates_use_the_current_policy(tokenizer, monkeypatch):
    """--updates 2: every other group, since long prompts stand last; scored by the model as it is."""
    model = tiny_model(scale=3)
    batch, seen = make_batch(model, tokenizer), []
    run = make_run(model, tokenizer, updates=2)
    run.optimizer.param_groups[0]["lr"] = 3e-2
    original = gmts.policy_weight

    def recorded(logprobs, old, *rest):
        seen.append((logprobs.clone(), old))
        return original(logprobs, old, *rest)

    monkeypatch.setattr(gmts, "policy_weight", recorded)
    gmts.learn(run, batch)
    (first, old), (second, _) = seen
    assert torch.equal(first, old)
    scored = second != 0  # tokens of the second share
    assert scored.any(1).tolist() == ([False] * 4 + [True] * 4) * 2
    assert (second - old)[scored].abs().max() > 1e-3


def test_gradients_that_are_not_finite_change_nothing(tokenizer):
    model = tiny_model()
    before = [p.clone() for p in model.parameters()]
    batch = make_batch(model, tokenizer)
    batch.logprobs[3] = -math.inf
    figures = gmts.learn(make_run(model, tokenizer), batch)
    assert not math.isfinite(figures["grad_norm"])
    for ours, wanted in zip(model.parameters(), before, strict=True):
        assert torch.equal(ours, wanted)


# ---- 9 The demo learns, and shuffled rewards do not ----------------------------------------------


def run_main(*flags):
    """The command line in this process -> the rows of metrics.csv."""
    gmts.main([str(flag) for flag in flags])
    return metrics(flags[flags.index("--out") + 1])


def metrics(out):
    with open(Path(out, "metrics.csv")) as file:
        return list(csv.DictReader(file))


def test_the_demo_learns_and_shuffled_rewards_do_not(tmp_path):
    """The demo's warm start, saved, then 25 steps on right answers, or on the toss of a coin."""
    gmts.set_seed(0)
    for part in gmts.demo_model(gmts.demo_problems()):
        part.save_pretrained(tmp_path / "warm")
    (tmp_path / "coin.py").write_text(
        "import random\ndef toss(completion, answer):\n    return random.randint(0, 1)\n"
    )
    flags = ["--data", "demo", "--prompt", "{question}", "--samples", 8, "--max-tokens", 34]
    flags += ["--warmup", 5, "--lr", 5e-4, "--eval-size", 100, "--eval-every", 0]
    train = [*flags, "--model", tmp_path / "warm", "--steps", 25]
    learned = run_main(*train, "--out", tmp_path / "learned")
    rewards = [float(row["reward"]) for row in learned[1:]]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
    before = float(learned[0]["accuracy"])
    assert float(learned[-1]["accuracy"]) > before + 0.2
    run_main(*train, "--out", tmp_path / "coin", "--reward", f"{tmp_path / 'coin.py'}:toss")
    saved = tmp_path / "coin" / "step-000025"
    judged = run_main(*flags, "--model", saved, "--steps", 0, "--out", tmp_path / "judged")
    assert float(judged[0]["accuracy"]) < before + 0.1


# ---- 10 The verifier: its table, and hostile text ------------------------------------------------

# fmt: off
# What counted before: (gold, answer)
RIGHT = [("1200", "1,200"), (r"1{,}200", "1200"), ("1234", "1,234.00"), ("0.50", ".5"), ("0.50", r"\frac12"), ("0.50", "1/2"),
         ("0.50", r"\frac 1 2"), (r"\frac{1}{2}", r"\dfrac{2}{4}"), (r"2\frac{3}{4}", "11/4"), (r"2\frac{3}{4}", "2.75"),
         (r"\$4.50", "4.5 dollars"), ("60", r"60^\circ"), ("60", "60 degrees"), ("5", "5 apples"), ("5", "x = 5"), ("12", "12."),
         ("12", r"12\text{ cm}"), ("10", r"10\%"), ("-3", "−3"), ("562", "0562"), ("7", r"\left(7\right)"), ("C", "(C)"),
         (r"\text{Tuesday}", "tuesday."), (r"\sqrt{2}", r"\sqrt 2"), (r"(1, 2)", "(1,2)"), ("9007199254740993", "9007199254740993"),
         ("9" * 1500, "9" * 1500), ("1/3", "2/6"), ("-1/2", r"-\frac{1}{2}"), (r"\{1,2\}", "2, 1"), (r"1,2", r"2 \text{ and } 1"),
         (r"(1, \frac{9}{2})", "(1, 4.5)"), (r"[0, 1/2)", r"\left[0, 0.5\right)"), (r"(1,2), (3,4)", r"(3, 4), (1, \frac42)"),
         (r"(0, 1) \cup (2, 3)", r"(2,3)\cup(0,1)"), ("x = 1, x = 2", "2, 1"), ("1/3", "0.33333333"), ("0.335", r"33.5\%"),
         (r"28\%", "0.28"), (r"28\%", "28 percent"), ("1000", "1 000"), (r"f(x) = 2x", "2x"), ("5", "5 = x"), ("5", "10/2 = 5"),
         (r"74^\circ", r"\angle ABC = 74^\circ"), ("(p, q) = (3, 2)", "(3,2)"), ("C", r"\textbf{(C)}\ 42"), ("B", "(B) the dog."),
         ("14", "14 pieces"), ("12", r"12\mathrm{~m}"), ("3:2", "3:2"), ("12000", r"12,\!000"), (r"\frac{8}{\sqrt{7}}", r"\dfrac{8}{\sqrt{7}}"), ("f(x) = x(x-1)", r"f\left(x\right) = x(x - 1)"),
         (r"\frac{\pi}{6}", r"$\tfrac{\pi}{6}$."), ("3:2", "3/2"), ("1500", r"1.5 \times 10^3"), ("1/3", "0.333333333333"),
         # expressions by value
         (r"\sqrt{2}", "1.4142135623730951"), ("4.123105625617661", r"\sqrt{17}"), (r"\sqrt{8}", r"2\sqrt2"), (r"\sqrt[3]{5}", "5^{1/3}"),
         (r"\frac{3\sqrt{5}}{7}", "(3*sqrt(5))/7"), ("2^{10}", "1024"), ("10^{-40}", r"\frac{1}{10^{40}}"), ("120", "5!"), ("10", r"\binom{5}{2}"),
         (r"\log_2 8", "3"), (r"\log_{2}(8)", "3"), (r"\ln 4", r"2\ln 2"), (r"\sin 2x", r"2\sin x\cos x"), (r"\tan^2(y)+1", r"\sec^2 y"),
         (r"\frac{\sqrt{3}}{2}", r"\sin\left(\frac{\pi}{3}\right)"), ("x^2-9", "(x-3)(x+3)"), (r"\frac{x+2}{7}", r"\frac{x}{7}+\frac{2}{7}"),
         ("2x", "x*2"), ("-2^2", "-4"), (r"\frac{-2}{3}", r"-\frac23"), ("3+4i", "4i+3"), (r"|x-1|", r"\lvert 1-x \rvert"),
         (r"\sin x^2", r"\sin(x^2)"), (r"\sin 2 x", r"\sin 2x"), (r"\sin\theta\cos\theta", r"\cos\theta\sin\theta"), (r"\frac{1}{\theta}", r"1/\theta"),
         (r"\alpha^2-\beta^2", r"(\alpha-\beta)(\alpha+\beta)"), (r"\log _{2} x", r"\log_2 x"), (r"\log_{16} 4", r"\frac12"), ("2", r"\log_3(9)"),
         (r"\ln\frac32", r"\ln 1.5"), (r"\ln 3-\ln 2", r"\ln\frac{3}{2}"), (r"\frac34", r"\sin^2\frac{\pi}{3}"), ("-1", r"\log_2 0.5"), ("4", "√16"), ("5", "x\n=\n5"),
         (r"12\pi", r"12\pi\text{ cm}^2"), ("12", r"12\text{ m/s}"), ("5", r"\boxed{5}"), ("5", r"\displaystyle 5"),
         # equations, inequalities, intervals
         ("5", "f(2) = 5"), (r"5", r"\theta = 5"), ("12", r"\text{Area} = 12"), ("2x+4y=3", r"y=-\frac{1}{2}x+\frac{3}{4}"), ("x^2+y^2=4", "2x^2+2y^2=8"), ("x_1=3, x_2=4", "3, 4"), (r"AB/CD = 2", "2"),
         ("-1", r"e^{i\pi} = -1"), ("2", r"\sqrt{4} = 2"), ("1", r"\lim_{x \to 0} \frac{\sin x}{x} = 1"), ("11", "x = 5+5+1 = 11"),
         (r"x \ge 5", r"5 \le x"), (r"x \ge 5", r"[5, \infty)"), ("x < 3", r"(-\infty, 3)"), ("(0, 1]", r"1 \geq x > 0"),
         (r"x < 1 \text{ or } x > 3", r"(-\infty, 1) \cup (3, \infty)"),
         # lists, both signs, matrices, bases
         (r"\{3,\frac12\}", r"\{\frac12,3\}"), (r"\left\{1, 2\right\}", "1,2"), (r"\pm 6", "-6, 6"), (r"\{-6, 6\}", r"\pm 6"), (r"1 \pm \sqrt{2}", r"1-\sqrt2, 1+\sqrt2"), (r"(1, \sqrt{4})", "(1, 2)"),
         (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"), ("1101_2", "1101_{2}"),
         (r"\begin{pmatrix} 1 & \frac12 \\ 0 & 3 \\ \end{pmatrix}", r"\left[\begin{array}{cc}1&0.5\\0&3\end{array}\right]")]
WRONG = [("1200", "1, 200"), ("5", "5 000"), ("12", "21"), ("3", "-3"), ("1/3", "0.333"), ("12 cm", "12 m"), ("7", "7 or 8"),
         ("7", "7 million"), ("7", "7, 8"), ("5", "5 apples or pears"), ("5", "5 minus something"), ("(1,2)", "(2,1)"), ("(1,200)", "1200"), ("9007199254740993", "9007199254740992"),
         ("C", "B"), ("C", "(B) not (C)"), (r"\sqrt{2}", "2"), ("5", "2+3"), ("0.5", "50"), ("1", "1/0"), ("5", ""), ("5", "five"),
         ("1", "True"), ("0", "nan"), ("1", "inf"), ("10", "1e1"), ("2", "x^2"), ("20", r"20\pi"), ("2", "2x"), ("3", "3i"),
         ("2", r"2\sqrt{x}"), ("2", r"2\ln x"), ("2", r"2\theta"), (r"2\theta", "2"), ("2", r"2 \alpha"), ("3/4", r"\frac34\pi"), ("2", "2abc"), ("2", "2ab"), (r"\{1,2\}", "2, 1, 1"),
         ("(2, 1)", "(1, 2)"), ("[0, 1)", "(0, 1)"), ("[0, 1)", "[0, 1]"), ("(1,2), (3,4)", "(1,3), (2,4)"), ("1,2", "(1,2)"),
         ("5", "5.0000001"), ("0.5", r"5\%"), ("50", "0.5"), (r"28\%", "2800"), ("6", "xy = 6"), ("7 = 11a+c", "11a+c"),
         ("C", "B, C"), ("C", "(C) or (D)"), ("B", "Because"), ("0", "a + 3z = 0"), ("n(n-1)", "nn-1"), ("(n-1)/2", "n-1/2"), ("12:00", "1:00"), ("14", "3*4 + 2"),
         ("9007199254740993", "9007199254740992.0"), ("-9007199254740993", "-9007199254740992"), ("7:30", "9:30"), ("7", "6+1"),
         # what would pay if it were accepted: the question instead of the answer
         ("14", "2(7)"), ("14", "(2)(7)"), ("12", "3 4"), ("14", r"7 \cdot 2"), ("14", r"7 \times 2"), ("14", "28 - 14"), ("-6", r"-2 \cdot 3"), ("0", "x^2 - x^2"),
         ("14", "12+2+0x"), ("14", "e^0*12+2"), ("6", "7-10^0"), ("x=14", "x=12+2"), ("14", r"\Add{12}{2}"), ("12", r"\Mult{3}{4}"), ("14", "12\n+2"), ("14", "12\u00a0+ 2"), ("14", "12.+2"), ("12", "3{4}"), ("12", "(3)4"), ("12", "|3|4"), ("240", "5!2"),
         ("12", r"\sqrt{9}4"), ("8", r"5\frac31"), ("8", "5 6/2"), ("0", r"\sin 0.5"), ("1", r"\log_2 4.5"), ("6", "√16"), ("0.99999999", "1"),
         # expressions
         (r"\sqrt{2}", "1.41"), (r"\sqrt{8}", r"3\sqrt2"), ("x", r"\sqrt{x^2}"), ("x^2-9", "(x+3)(x+3)"), ("2x", "x^2"), ("x", "y"), ("X", "x+1"),
         (r"\sin x", r"\cos x"), (r"\log_2 8", "4"), ("10^{-40}", "10^{-41}"), ("10^{999999999}", "10^{999999998}"), ("9^{9^{9^{9}}}", "9"),
         ("0", "e^{-100000}"), (r"\frac{7}{0}", r"\frac{8}{0}"), ("3+4i", "3-4i"), (r"\frac{\pi}{6}", r"30^\circ"), ("live", "evil"), ("24", "4! + 0"),
         (r"\cos 2\pi x", "x"), (r"\sin x^2", r"\sin^2 x"), (r"\cos 2\theta", r"\theta\cos(2)"), ("the cat", "tac the"), ("B", "1B"), ("2^{100}", "2^{100}-1"),
         ("2^{100}-1", "2^{100}"), ("50!+1", "50!"), ("10^{40}+7", "10^{40}"), (r"\sum_{k=3}^{20} \ln k", r"\prod_{k=3}^{20} \ln k"), ("1:2:3", "1:3:2"), ("2:3:5", "2/15"),
         ("-1234567890123456789012345678901234567890", "-1234567890123456789012345678901234567891"),
         # equations, inequalities, intervals
         ("2x+4y=3", "2x+4y=5"), ("x^2+y^2=4", "x^2+y^2=2"), ("2+2=5", "3=7"), ("x = 5", "x = 6"), ("5", "x + y = 5"), ("5", "2x = 5"), ("25", "x^2 = 25"),
         ("5", "|x| = 5"), ("x<5", "|x|<5"), (r"x \ge 5", "x > 5"), (r"x \ge 5", r"x \le 5"), ("x < 3", "x < 4"), ("(0, 1]", r"0 \le x \le 1"), ("5", r"x \ge 5"),
         (r"(-\infty, 4) \cup (4, \infty)", r"(-\infty, 4)"), ("f(x)=x, f(x)=-x", "f(x)=x, f(x)=+x"),
         # lists, both signs, matrices, bases, units
         (r"\pm 6", "6"), ("6", r"\pm 6"), ("1, 2", "1, 1, 2"), ("10", "10, 10"), (r"1 \pm \sqrt{2}", r"1+\sqrt2"), ("(1, 2, 3)", "(1, 2), 3"),
         (r"\begin{pmatrix}1\\2\end{pmatrix}", r"(1 \ 2)"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
         (r"\begin{pmatrix}1\\2\\3\end{pmatrix}", r"\begin{pmatrix}1\\3\\2\end{pmatrix}"), ("1101_2", "1101_3"), ("13", "1101_2"), ("1101_2", "1101"),
         (r"12\text{ cm}^2", r"12\text{ cm}^3"), ("5", "5 hundred"), ("5", "5 trillion"), ("3", "3 xy"), ("5 cents", r"\$5"), ("60", "60 degrees or so"), ("5 m", r"5\%")]

# Kind by kind, values of our own
RIGHT_KINDS = [
    ("2480", r"\(2,480\)"), ("2480", "2{,}480"), ("7315000", "$7{,}315{,}000$"), ("7315000", r"7,\!315,\!000"), ("7315000", "7 315 000"),
    ("-4096", "-4,096"), ("1204.5", "1,204.50"), (r"\frac{5}{7}", r"\frac57"), (r"\frac{5}{7}", r"\frac 5 7"), (r"\frac{5}{7}", r"\frac {5} {7}"),
    (r"\frac{5}{7}", r"{5 \over 7}"), (r"\frac{5}{7}", r"\dfrac5{7}"), (r"\frac{5}{7}", "5/7"), (r"\frac{5}{7}", r"\tfrac{10}{14}"),
    (r"\frac{5}{7}", "(5)/(7)"), (r"\frac{\pi}{4}", r"\frac\pi4"), (r"\frac{\pi}{4}", "pi/4"), (r"\frac{\pi}{4}", "π/4"),
    (r"\frac{2+b}{d}", r"\frac{2+b}d"), (r"\frac{x^2}{y}", r"{x^{2} \over y}"), (r"\frac{\sqrt3}{2}", r"\frac{\sqrt{3}}2"),
    (r"\frac{\sqrt3}{2}", r"\frac12\sqrt3"), (r"\frac{a}{b}", r"\frac ab"), (r"\frac{1}{\sqrt{5}}", r"\frac{\sqrt5}{5}"),
    (r"-\frac{2}{9}", r"\frac{-2}{9}"), (r"-\frac{2}{9}", r"\frac{2}{-9}"), ("7.25", r"7\frac14"), ("7.25", "7 1/4"), ("-7.25", r"-7\frac{1}{4}"),
    ("7.25", r"7\tfrac{1}{4}"), ("29/4", r"7\frac{1}{4}"), (r"3\frac13", r"\frac{10}{3}"), ("3", r"\sqrt[3]{27}"), (r"\sqrt[3]{5}", r"\sqrt[3]5"),
    (r"\sqrt[3]{5}", "5^{1/3}"), (r"\sqrt{6}", r"\sqrt 6"), (r"\sqrt{6}", "sqrt(6)"), (r"\sqrt{6}", "√6"), (r"\sqrt{6}", "√(6)"),
    (r"\sqrt{50}", r"5\sqrt2"), (r"-\sqrt[3]{2}", r"\sqrt[3]{-2}"), ("-3", r"\sqrt[3]{-27}"), ("2/3", r"\sqrt{\frac49}"),
    (r"\sqrt[4]{x}", "x^{1/4}"), ("√2", "1.41421356237"), (r"\sin^2 x", r"(\sin x)^2"), (r"\cos^3\theta", r"(\cos\theta)^3"),
    (r"\arcsin x", r"\sin^{-1} x"), (r"\arccos\frac13", r"\cos^{-1}(1/3)"), (r"\arctan 5", r"\tan^{-1}5"), (r"\cosh x", r"\frac{e^x+e^{-x}}{2}"),
    (r"\sinh 2x", r"2\sinh x\cosh x"), (r"\tanh x", r"\frac{\sinh x}{\cosh x}"), (r"\log_3 81", "4"), (r"\log_{2}(32)", "5"),
    (r"\ln 6", r"\ln 2+\ln 3"), (r"\lg 100", "2"), (r"\log 1000", "3"), (r"\sec x", r"\frac{1}{\cos x}"), (r"\cot x", r"\frac{\cos x}{\sin x}"),
    ("e^3", r"\exp(3)"), (r"\frac{1}{2}", r"\sin 30^\circ"), (r"\frac{1}{2}", r"\sin(30^{\circ})"), (r"\ln|x|", r"\ln\left|x\right|"),
    (r"\ln x^2", r"\ln(x^2)"), (r"\sin 3x\cos x", r"\cos x\sin(3x)"), (r"\cos\frac{x}{2}", r"\cos(x/2)"), (r"2\sin x\cos x", r"\sin 2x"),
    (r"\sqrt{x}\sin x", r"\sin x\sqrt{x}"), (r"\ln\frac{x}{y}", r"\ln x-\ln y"), (r"\operatorname{arccot}(5)", r"\arctan\frac15"), ("24", "4!"),
    (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"), ("(n+1)!", "(n+1)n!"), ("35", r"\binom73"), ("35", r"\dbinom{7}{3}"), ("m!3^m", "3^{m}m!"),
    ("n!", "n(n-1)!"), (r"\pm 3", "3, -3"), (r"2\pm\sqrt7", r"2-\sqrt{7}, 2+\sqrt{7}"), (r"\{4,1\pm\sqrt2\}", r"\{1+\sqrt2,1-\sqrt2,4\}"),
    ("0, 3, -3", r"0,\pm3"), (r"x=\pm2", "x=2, x=-2"), (r"\pm2", r"x=\pm 2"), (r"\frac{1\pm\sqrt5}{2}", r"\frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2}"),
    ("3,8", r"3\text{ and }8"), ("3,8", r"8 \text{ or } 3"), ("3,8", r"\{8, 3\}"), ("3,8", "$3$, $8$"), ("3,8", "8; 3"),
    ("3,8", r"x=3\text{ or }x=8"), ("3,8", r"x\in\{3,8\}"), ("3, 8, and 9", "9, 8, 3"), (r"\{1\}", "1"), ("(2(y+3), 5)", "(2y+6,5)"),
    ("(1,-2)", r"\left(1,-2\right)"), ("(1,-2)", "(x,y)=(1,-2)"), ("(1,-2)", r"\bigl(1,-2\bigr)"), ("(1,-2)", "(1; -2)"),
    ("(1,-2),(3,4)", "(3,4) and (1,-2)"), ("(3,4)", r"\langle 3,4\rangle"), ("2x+2", "2[x+1]"), ("x^2-4", "[x-2][x+2]"),
    ("(x+1)(x+2)", r"\bigl(x+2\bigr)\Big(x+1\Big)"), ("x>4", r"(4,\infty)"), ("x>4", "4<x"), (r"x\le3", "3≥x"), (r"x\le3", r"(-\infty,3]"),
    ("[-2,5)", r"-2\le x<5"), ("[-2,5)", r"\{x\mid -2\le x<5\}"), ("[-2,5)", r"x\in[-2,5)"), ("[-2,5)", r"\{x\in\mathbb{R}\mid -2\leq x<5\}"),
    (r"(-\infty,1)\cup(2,\infty)", r"x<1\text{ or }x>2"), (r"(-\infty,1)\cup(2,\infty)", "(2,∞)∪(-∞,1)"), ("x<6", "-x>-6"), ("x<6", "2x<12"),
    ("x+y>3", "3<x+y"), (r"[2,\infty)", r"x\geqslant 2"), (r"(0,\infty)", "t>0"), (r"a\ne3", "a≠3"), (r"a\ne3", r"3\neq a"), ("y=3x-1", "3x-1"),
    ("6", r"\text{Area}=6"), ("6", "Area = 6"), ("6", "f(4)=6"), ("6", "a_{7}=6"), ("6", r"\angle ABC=6^\circ"), ("1/2", r"P(X)=\frac12"),
    ("1/2", r"\frac{AB}{CD}=\frac12"), ("x^2+y^2=9", "2x^2+2y^2=18"), ("3x-y=2", "y=3x-2"), ("x=1,y=2", "y=2,x=1"), ("-1", r"e^{i\pi}=-1"),
    ("8", "2^3=8"), ("y=x+1", "x=y-1"), ("6", r"\theta=6"), ("7", r"\lim_{x\to 0}g(x)=7"), ("7", r"N_{\max}=7"), ("7", "7 = x"),
    ("9", r"\therefore y=9"), ("5", r"x=\boxed{5}"), ("15", r"15\text{ cm}^2"), ("15", "15 cm"), ("15", "15cm"), ("15", r"15\,\mathrm{m/s}"),
    ("15", "15 square meters"), ("15", "15 km/h"), ("15", r"15\mathrm{~kg}"), ("15", "15 dollars"), (r"\$15", "15"), ("15", r"\$15"),
    (r"15\text{ cm}", "15"), (r"15\text{ cm}", "15 cm"), ("15", "15°"), ("15", r"15^{\circ}"), ("15", "15 degrees"), (r"15^\circ", r"15^{\circ}"),
    ("15%", "15"), ("15%", "0.15"), ("0.15", r"15\%"), ("15", "15 percent"), ("15", r"\text{15 apples}"), ("3/4", r"\frac34\text{ cups}"),
    ("3/4", "3/4 inch"), (r"5\pi", r"5\pi\text{ cm}"), ("20 minutes", "20"), ("15", r"15\text{ units}"), ("15", "15 people"),
    (r"2\sqrt3", r"2\sqrt3\text{ cm}"), (r"3\times10^8", r"3\times10^{8}\text{ m/s}"), ("4500", r"4.5\times10^3"), ("4500", r"4.5\cdot 10^{3}"),
    ("0.0045", r"4.5\times10^{-3}"), (r"6\times10^{23}", "6*10^23"), ("6.283185307179586", r"2\pi"), ("2.718281828459045", "e"),
    ("e^2", r"\mathrm{e}^2"), ("e^2", r"\mathrm{e}^{2}"), ("e^{2}/3", r"\frac{\mathrm{e}^2}{3}"), ("1.7320508075688772", r"\sqrt3"),
    ("3.4641016151377544", r"2\sqrt3"), ("2+3i", "3i+2"), ("-i", "i^3"), (r"\rho g h", r"gh\rho"), (r"\epsilon", r"\epsilon"),
    (r"\varphi^2", r"\varphi^{2}"), (r"\mu\sigma", r"\sigma\mu"), ("2r-R", "-R+2r"), ("xy", "yx"), ("x_1+x_2", "x_2+x_1"), ("x_{12}", "x_{12}"),
    (r"\frac{a b c}{4 R}", r"\frac{abc}{4R}"), ("C_1e^x", "e^xC_1"), (r"\alpha", "α"), ("(a+b)^2", "a^2+2ab+b^2"), ("f'(x)", "f'(x)"),
    (r"\lfloor n/3\rfloor", r"\lfloor\frac n3\rfloor"), (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"),
    (r"\begin{pmatrix}1/2\\-3\end{pmatrix}", r"\begin{pmatrix}\frac12\\[2pt]-3\\\end{pmatrix}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\left[\begin{array}{cc}1&2\\3&4\end{array}\right]"), ("1011_2", "1011_2"), ("1011_2", "1011_{2}"),
    ("73_{8}", "73_8"), ("east", "East"), (r"\text{Yes}", "yes"), ("Yes", r"\textbf{Yes}."), ("no solution", r"\text{No solution}"),
    ("Tuesday", r"\text{tuesday}"), ("odd", "ODD"), (r"\text{red}", "red"), ("B", "(B)"), ("B", "B."), ("B", r"\text{(B)}"), ("B", r"\textbf{B}"),
    ("B", "(B) 12"), ("B", "B) 12"), ("B", "B: the second one"), ("B", "(B) 3, 4"), ("D", r"\mathrm{(D)}\ 24"),
    ("D", "D. A long text with a colon: yes"), ("A", "A"), ("(C)", "C"), (r"\text{C}", "C"), (r"\infty", "+∞"), (r"-\infty", "-∞"),
    (r"\varnothing", r"\emptyset"), (r"\emptyset", r"\{\}"), ("12:45", "12:45"), ("3:2", "3 : 2"), ("3:2", "9:6"), ("3:2", r"\frac32"), ("5", "５"),
    ("5", "+5"), ("7", "007"), ("0", "-0"), ("5", " 5 "), ("5", "{5}"), ("5", "(5)"), ("5", "[5]"), ("12", "12.0"), ("12", "12."), ("0.5", ".5"),
    ("0.125", r"\frac18"), (r"\frac{1}{7}", "0.142857142857"), ("10", "10^1"), ("8", r"\frac{16}{2}"), ("8", "2^3"), ("720", "6!"),
    (r"\sqrt{3}\approx1.732", r"\sqrt3"), (r"\sqrt3", r"\sqrt{3}\approx 1.732"), (r"x\approx4.2", "4.2"), ("10^{100}", "10^{100}"),
    ("2^{64}", "18446744073709551616"), ("123456789012345678901234567890", "123456789012345678901234567890"),
]
WRONG_KINDS = [
    ("2480", "2,48"), ("2480", "2, 480"), ("2480", "(2,480)"), ("2480", "2.480"), ("12", "5+7"), ("12", r"2\cdot6"), ("12", r"2 \times 6"),
    ("12", "(2)(6)"), ("12", "2(6)"), ("12", r"\left(2\right)\left(6\right)"), ("12", "{2}{6}"), ("12", r"\text{2}\text{6}"), ("12", "2 6"),
    ("12", r"6\sqrt{4}"), ("12", r"\sqrt{140+4}"), ("12", r"\frac{6\cdot4}{2}"), ("12", "24÷2"), ("12", r"24\div2"), ("12", "24:2"), ("12", "12+0"),
    ("12", "12-0"), ("12", r"12\cdot1"), ("12", r"1\cdot12"), ("12", "5+7=x"), ("12", "x=5+7"), ("12", "5+7 cm"), ("12", r"5+7\%"), ("12", "12+0x"),
    ("12", r"12\cdot1^x"), ("12", r"12\cos 0"), ("12", "12e^0"), ("12", r"e^0\cdot12"), ("12", r"12^{1}\cdot 1"), ("12", "|5+7|"), ("12", "|5|+|7|"),
    ("12", "-(-5-7)"), ("12", "(5+7)"), ("12", "[5+7]"), ("12", "--5+7"), ("12", "5--7"), ("12", r"\lceil 11.5\rceil"), ("12", "2*3!"),
    ("12", r"\log_2 2^{5+7}"), ("12", r"\ln e^{12}+0"), ("12", r"3\frac{9}{1}"), ("12", r"11\frac{2}{2}"), ("12", "11 1/1"), ("12", r"10\frac42"),
    ("12", r"\frac{5+7}{1}"), ("12", r"{5+7 \over 1}"), ("12", r"\sqrt{12}\sqrt{12}"), ("12", "3*4"), ("12", "3⋅4"), ("12", r"3\ast4"),
    ("12", r"\binom{12}{1}+0"), ("12", "12x^0"), ("12", r"12\text{ or }13"), ("12", "12 or 13"), ("12", "12, 13"), ("12", "12 and 13"),
    ("12", "12; 13"), ("12", r"\{12, 13\}"), ("12", "[12,13]"), ("12", r"12\pm1"), ("12", r"11\pm1"), ("12", "12/13"), ("12", "12=13"),
    ("12", "13=12"), ("12", "x=12 or x=13"), ("12", "x=12,y=13"), ("12", r"12\approx13\text{ or }14, 5"), ("12", "12<x<13"), ("12", r"x\le12"),
    ("12", "12..13"), ("12", "12-13"), ("12", "12–13"), ("12", r"12\cup13"), ("12", "12|13"), ("12", r"12\mid13"), ("12", "12&13"),
    ("12", r"12\\13"), ("12", "12 13"), ("12", "12:13"), ("12", "12 ~ 13"), ("12", "not 12"), ("12", "12 not"), ("12", "12e0"), ("12", "12E0"),
    ("12", "0x0c"), ("12", "12L"), ("12", "12j"), ("12", "12_10"), ("12", "12!"), ("12", "twelve"), ("12", "12 dozen"), ("12", "12 hundred"),
    ("12", "12 thirds"), ("12", "12 squared"), ("12", "12 cubed"), ("12", "12 times 2"), ("12", "12 over 5"), ("12", "12 plus 1"),
    ("12", "12 choose 2"), ("12", "12 and a half"), ("12", "12 lakh"), ("12", "12 million"), ("12", "12 by 13"), ("12", "12 point five"),
    ("12", "12 minus one"), ("12", "12 divided by two"), ("12", "12 quarters"), ("12", "12 percent of y"), ("12", "12x"), ("12", "12 x"),
    ("12", r"12\pi"), ("12", "12i"), ("12", r"12\theta"), ("12", "12ab"), ("12", "12^x"), ("12", "-12"), ("12", "12.0000001"), ("12", "11.9999999"),
    ("12", "1 2"), ("12", "1,2"), ("12", "12,000"), ("12", "12\x00"), ("12", "12\u200b"), ("12", "12\ufeff"), ("12", "1⁄2"), ("12", "１２٣"),
    ("12", "Ⅻ"), ("12", "⑫"), ("12", "12²"), ("12", "'12'"), ("12", '"12"'), ("12", "f'12'"), ("12", "12#"), ("12", "#12"), ("12", "12;;13"),
    ("12", "12//1"), ("12", "12%5"), ("12", "[12][0]"), ("12", "12 if 1 else 0"), ("12", "int(12)"), ("12", "max(12,13)"), ("12", "True"),
    ("12", "nan"), ("12", "inf"), ("12", "12?13"), ("7", "3 quarters"), ("2", "2 thirds"), ("e^2", "2e"), ("2e", r"\mathrm{e}^2"),
    (r"\cosh x", r"\cos x"), (r"\cosh x", r"\cos(hx)"), (r"\rho", "r h o"), ("2r-R", "2R-r"), ("2r-R", "2r-r"), ("R", "r"), ("B", "b"),
    (r"\frac{R}{r}", r"\frac{r}{R}"), (r"\alpha", "a"), (r"\alpha", r"\beta"), ("x_1", "x_2"), ("x_1", "x"), ("x", "x'"), ("t^2", "x^2"),
    ("10^{10}", "10000000001.0"), ("10^{10}", "10000000001"), ("10^{20}", "10^{20}+1"), ("10^{-30}", "10^{-31}"), ("0", "10^{-30}"),
    ("0", "10^{-320}"), ("0", "e^{-2000}"), ("0", "0/0"), ("1", "0/0"), ("1", r"5/5\cdot1"), ("0", r"\frac{1}{10^{400}}"), ("0", r"10^{-400}\pi"),
    ("0", r"\sin(10^{-400})"), ("0", "0.0000000000000001"), ("1/0", "2/0"), (r"\frac{1}{3}", "0.33"), (r"\frac13", "0.3333"), ("0.33", r"\frac13"),
    (r"\sqrt2", "1.414"), (r"\pi", "3.14"), (r"\pi", "22/7"), (r"\pi", "3.1416"), ("3.14", r"\pi"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"),
    ("(1,2)", "1,2"), ("1,2", "(1,2)"), ("(1,2)", "(1,2]"), ("(1,2)", r"\{1,2\}"), (r"\{1,2\}", "[1,2]"), ("1,2,2", "1,2"), ("1,2", "1,2,2"),
    ("1,2", "1"), ("1", "1,1"), ("(1,2),(3,4)", "(1,2)"), ("(1,2),(3,4)", "(1,2,3,4)"), ("[1,5)", "(1,5)"), ("x>3", r"x\ge3"), ("x>3", "x<3"),
    ("x>3", "x>4"), ("x>3", "3>x"), ("x>3", "y>3"), (r"(-\infty,2)\cup(3,\infty)", r"(-\infty,2)"), (r"x\ne2", "x=2"), (r"x\ne2", "2"),
    ("2", r"x\ne2"), ("2", "x>2"), ("x=2", "y=2"), ("x=2", "x=3"), ("2", "2x=4"), ("2", "x+1=3"), ("2", "x^2=4"), ("2", "xy=2"), ("2", "|x|=2"),
    ("0", "x+2y=0"), ("7=3x", "3x"), ("x+y=2", "x+y=3"), ("y=x^2", "y=x^3"), ("2+2=5", "2+2=6"), ("8", "7=8"), ("7", "8≈7"), ("7", "x=7=8"),
    ("12 cm", "12 m"), ("12 cm", r"12\text{ cm}^2"), ("12 cm^2", "12 cm^3"), (r"\$12", "12 euros"), ("12 kg", "12 lb"), ("12%", "12°"),
    ("50", "0.5"), ("50%", "5000"), ("50%", "50 cm"), (r"\frac{\pi}{3}", r"60^\circ"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"), (r"\begin{pmatrix}1\\2\end{pmatrix}", "1,2"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "1,2,3,4"), (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ("1011_2", "11"), ("1011_2", "1011"), ("1011_2", "1011_3"), ("1011", "1011_2"), ("11", "1011_2"), ("A", "B"), ("A", "A or B"), ("A", "A, B"),
    ("A", "A/B"), ("A", "(A) or (B)"), ("A", "A. B."), ("A", "A) B)"), ("A", "not A"), ("A", "(A)(B)"), ("A", "AB"), ("A", "A and B"),
    ("A", "Apple"), ("B", "(B) or (C)"), ("A", "2A"), ("A", "A+0"), ("yes", "no"), ("Yes", "not yes"), ("east", "west"), ("odd", "oddd"),
    ("East", "north east"), ("live", "evil"), ("x", r"\sqrt{x^2}"), ("|x|", "x"), (r"\sin^2x", r"\sin x^2"), (r"\ln x^2", r"(\ln x)^2"),
    (r"\sin x", r"\sin(x+0.0001)"), ("x^2", "x^2+10^{-9}"), ("x+1", "x+1.0000001"), (r"\lfloor x\rfloor", r"\lceil x\rceil"),
    (r"\lfloor x\rfloor", "x"), (r"\lfloor n/2\rfloor", r"\lfloor (n+1)/2\rfloor"), (r"\sum_{k=1}^n k", r"\sum_{k=0}^n k"),
    (r"\int_0^1 f", r"\int_0^2 f"), (r"1,2,\ldots,n", r"1,3,\ldots,n"), (r"\binom{n}{k}", r"\binom{k}{n}"), ("n!", "(n-1)!"),
    ("2^{100}", "2^{100}+1"), ("x", "5"), ("5", "x"), ("", "5"), ("5", ""), (" ", ""), ("5", "."), ("5", r"\text{}"), ("5", "{}"), ("5", ","),
    ("", ""),
]
COMPLETIONS = [  # gold, completion, right
    ("A", r"\boxed{(A)}, \boxed{7}", False), ("7", r"\boxed{7}, \boxed{}", False), ("7", r"\boxed{7}; \boxed{.}", False),
    ("8", r"\boxed{\boxed{8}}", True), ("8", r"so \boxed{x=\boxed{8}}", True), ("9", r"\boxed{8}, \boxed{9}", True),
    ("8", r"\boxed{8}, \boxed{9}", False), ("8,9", r"\boxed{8}, \boxed{9}", True), ("8,9", r"\boxed{9} and \boxed{8}", True),
    ("8,9", r"$\boxed{9}$ and $\boxed{8}$.", True), ("8,9", r"\(\boxed{9}\) or \(\boxed{8}\)", True), ("8,9", r"\boxed{9} hence \boxed{8}", False),
    ("8,9", r"\boxed{8} {}, \boxed{9}", True), ("8", r"\boxed{8} {}, \boxed{9}", False), ("8", r"\boxed{8}. As $a^{2}$, \boxed{9}", False),
    ("8,9", r"\boxed{8}. As $a^{2}$, \boxed{9}", False), ("8", r"\boxed{8} or, no, \boxed{9}", False),
    ("8", r"<think>\boxed{8}</think>\boxed{9}", False), ("9", r"<think>\boxed{8}</think>\boxed{9}", True), ("8", r"<think>\boxed{8}</think>", False),
    ("8", "<answer>8</answer>", True), ("8", "<answer>7</answer><answer>8</answer>", True), ("7", "<answer>7</answer><answer>8</answer>", False),
    ("8", r"<answer> \(8\). </answer>", True), ("8", "<answer>$8$</answer> or 9", True), ("8", "#### 8", True), ("8", "####8", True),
    ("8", "#### $8", True), ("8", "#### 8 apples\nmore", True), ("8", "#### 8 #### 9", False), ("9", "#### 8\n#### 9", True),
    ("8", "The answer is 8.", True), ("8", "the answer is: $8$.", True), ("8", "**Answer:** 8", True), ("8", "Answer: **8**", True),
    ("8", "Final answer: `8`", True), ("8", r"The answer is \[8\]", True), ("8", r"The answer is \[ 8. \]", True),
    ("8", "The final answer is **$8$**.", True), ("8", r"The answer is $\boxed{9}$", False), ("8", "The answer is 8 or 9", False),
    ("8", "The answer is 8. The answer is 9.", False), ("9", "The answer is 8. The answer is 9.", True), ("8", "ANSWER: 8\nDone.", True),
    ("8", "The answer is 8 because of symmetry.", True), ("8", "I think 8", False), ("8", "8", False), ("B", "The answer is (B).", True),
    ("B", "The correct answer is B.", True), ("B", "Answer: B) 12", True), ("(3,2)", "The answer is $(3,2)$.", True),
    ("1875", r"The answer is \(1,875\).", True), ("45", r"The answer is $45^\circ$.", True), ("8", r"\boxed{}", False), ("8", r"\boxed{8", False),
    ("8", r"\boxed{8} then \boxed{}", False), ("8", r"\fbox{8}", True), ("8", r"\boxed {8}", True), ("8", r"\boxed 8", True),
    ("8", r"\boxed{8}}", True), ("8", r"{\boxed{8}", True), ("8", r"\boxed{\text{8}}", True), ("8", r"\boxed{8}.", True),
    ("8", r"\boxed{ 8 }", True), ("8", "\\boxed{\n8\n}", True), ("8", r"$$\boxed{8}$$", True), ("8", r"\boxed{8\text{ cm}}", True),
    ("8", r"\boxed{8} cm", True), (r"\frac12", r"\boxed{\frac{1}{2}}", True), (r"\{1,2\}", r"\boxed{\{1,2\}}", True),
    ("4", r"\boxed{3} oops \boxed{4}", True), ("3", r"\boxed{3} oops \boxed{4}", False),
    ("8", "\\boxed{8}\n\nLet me double check: 8 is right.", True), ("120", r"The answer is \(5!\).", True), ("5", "The answer is 5!", False),
    ("29", "The answer is $29.00", True), ("C", r"Answer: \textbf{(C)}\ 42", True),
]
GOLDS = ["7", "-12", "1234", "20736", "0.45", "-3.5", r"\frac{3}{4}", r"-\frac{17}{6}", r"2\frac{1}{3}", r"\sqrt{13}", r"3\sqrt{5}", r"\frac{5\sqrt{2}}{4}",
         r"\frac{\pi}{6}", r"12\pi", "2^{10}", r"1+\sqrt{3}", "x^2+2x-3", r"\frac{x+1}{x-2}", "-5a^3b", r"\frac{1}{n(n+1)}", r"e^{2x}", "3+4i", "(3, -4)",
         r"(\frac{1}{2}, 5, 0)", "[2, 5)", r"(-\infty, 3]", r"(0, 1) \cup (4, 9)", r"\{1, 2, 7\}", "4, -6", "y=2x+1", "x^2+y^2=25",
         r"\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix}"]
KEEP = {
    "dfrac": lambda g: g.replace(r"\frac", r"\dfrac"), "left and right": lambda g: re.sub(r"[)\]]", r"\\right\g<0>", re.sub(r"[(\[]", r"\\left\g<0>", g)),
    "spaces": lambda g: re.sub(r"(?<=[^\\{(\[ ])([-+=,])(?=[^ ])", r" \1 ", g), "dollars": lambda g: f"${g}$", "full stop": lambda g: g + ".",
    "thousands": lambda g: re.sub(r"^(\d+)(\d{3})$", r"\1,\\!\2", g), "braced comma": lambda g: re.sub(r"^(\d+)(\d{3})$", r"\1{,}\2", g),
    "unit": lambda g: re.sub(r"^-?[\d.]+$", r"\g<0> apples", g), "unit in text": lambda g: re.sub(r"^-?[\d.]+$", r"\g<0>\\text{ km}", g),
    "name": lambda g: g if re.search("[=,]|cup|matrix", g) else "z = " + g, "display": lambda g: rf"\[ {g} \]"}
BREAK = {
    "digit": lambda g: re.sub(r"\d", lambda m: str((int(m[0]) + 1) % 10), g, count=1), "sign": lambda g: "-" + g if re.match(r"[\d\\]", g) and "," not in g else None,
    "inner sign": lambda g: g.replace("+", "-") if "+" in g else None, "swapped": lambda g: re.sub(r"^\(([^,()]+), ([^,()]+)", r"(\2, \1", g) if re.match(r"\(\S+, \S+", g) else None,
    "opened": lambda g: g.replace("[", "(").replace("]", ")") if re.search(r"^\[|\]$", g) else None, "one more": lambda g: g + ", 99", "letter": lambda g: g + "q"}
LATEX = [*r"{}[]()$^_,.=+-*/!<>|&~%'# 0123456789xyziePMπ−–😀²½٣", "\x00", "\n", '"', r"\frac", r"\frac{", r"\sqrt", r"\sqrt[", r"\boxed{", r"\text{", r"\circ", r"\left(",
         r"\right)", r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", r"\pm", r"\mp", r"\log_", r"\sin^2 ", r"\infty", r"\cup", r"\le ", r"\ge ", r"\binom", "and ", "or ",
         "apples ", "not ", "x=", "f(x)=", "10^", "9^9^", "99!", "e^", "1,000", "####", "answer is ", "</think>", "True", "nan", "inf", "None", "lambda x:", "import os",
         "__import__('os')", "open('f','w')", "().__class__", "9**9**9", "}{", "frac(", "sin**", "'1'", "1_", "x_{", "A", "_AA", "_a"]
LATEX += [r"\mixed", r"\root", r"\floor{", "⟦", "⟧", r"\mathrm{", r"\{", r"\}", "≤", r"\approx ", "x^", "2^", "x<", ">=", "≠", ":", "°", r"\$", r"\over ", "!", "12", "3.5",
          "_{", "'", "\ud800", r"\tan ", r"\cot ", "cm ", "i", "|", "(B) ", "\\", r"\\\\", "&", "\u202e"]
# What was found by attacking it: (gold, answer)
PAID_BEFORE = [
    ("12", r"3\times 10^{\log 4}"), ("14", r"\log(10^12\times 10^2)"), ("83810205", r"\frac{12345}{1/6789}"), ("83810205", "12345/(1/6789)"),
    ("83810205", "12345/6789^{-1}"), ("12", r"\frac{3}{1/4}"), ("12", r"\frac{1}{1/3/4}"), ("12", r"\frac{\frac31}{\frac14}"),
    ("(12,2)", "(3/(1/4), 2)"), ("14", r"\log\frac{10^{12}}{10^{-2}}"), ("13.5", r"\mixed{\mixed{12}{3}{4}}{3}{4}"), ("14.5", r"12.5\sqrt{1} + 2"),
    ("14.5", r"12.5\cos 0+2"), (r"\$4.50", r"\$3\cdot 1.50\sqrt{1}"), ("12.25", r"7.25\sqrt1+5"), ("12345678901", r"\sqrt{12345678900^2}"),
    ("12345678901", r"\frac{12345678900}{\cos 0}"), ("12345678901234567890", r"\frac{12345678901234567000}{\cos 0}"), ("x=14", "3x+2=44"),
    ("x=14", "x+3=17"), ("x=14", r"2x = 3\cdot 4\cdot 2+4"), ("x=14, y=2", "x+3=17, y-1=1"), (r"p \to q", r"q \to p"), (r"f \circ g", r"g \circ f"),
    (r"A \setminus B", r"B \setminus A"), (r"A \subset B", r"B \subset A"), (r"a \bmod b", r"b \bmod a"), (r"\angle ABC", r"\angle BAC"),
    (r"\frac{\partial f}{\partial x}", r"\frac{f}{x}"), (r"a\vec b", r"b\vec a"), (r"\int x^3dx \int dx", r"\int x^2dx \int x dx"),
    (r"p \land q", r"q \lor p"), (r"(-\infty,1)\cup(3,\infty)", r"x<1 \land x>3"), ("3:30", "1:10"), (r"2:30 \text{ PM}", r"\text{1:15 PM}"),
    ("7", r"99 \in 7"), ("7", r"x \in 7"), ("14", r"\{7:14\}"), ("14", r"\{7|14\}"), ("8", r"\lfloor 128 \rfloor"), ("49", r"7 \approx 8^2"),
    ("7", r"\angle A + 3 = 7"), ("14", "28:2"),
]
# What a second reader found: (gold, answer)
PAID_BEFORE += [
    ("8", "8 factorial"), ("8", r"8 \text{ doubled}"), ("9", "9 halved"), ("4", "4 negative"), ("3", r"3\text{ inverse}"),
    (r"x<2 \text{ or } x>7", r"x<2 \text{ and } x>7"), (r"(-\infty,2]\cup[8,\infty)", r"x\le2 \text{ and } x\ge8"),
    (r"\{x\in\mathbb{Z}: -3<x<4\}", "(-3,4)"), (r"\{x\in\mathbb{N}\mid x<9\}", r"(-\infty,9)"), ("x=2,y=3", "3,2"),
    (r"p \land q", r"p \lor q"), ("R", r"\mathbb{R}"), (r"4\text{ cm}", "4 meters"), ("8 lb", "8 ounces"), (r"4\text{ cm}", r"4\text{ square cm}"),
    (r"\frac13", r"0.\overline{34}"), ("7:45 PM", r"7:45\text{ a.m.}"), (r"\frac34", "¼"), ("x^4", "x⁵"), ("30°", r"31\degree"),
    (r"20^\circ\text{C}", r"20^\circ\text{F}"),
]
REFUSED_BEFORE = [
    ("60", r"\angle ABC = 60"), ("1", r"\lim_{x\to 0}\frac{\sin x}{x} = 1"), ("5050", r"\sum_{k=1}^{100} k = 5050"), ("x^2", "x²"),
    ("5", r"5 \text{ V}"), ("3/4", r"\frac34 \text{ of a cup}"), ("B", "Option B"), ("B", r"\text{Option B}"), ("C", "Choice C"),
    ("C", r"\text{Answer: C}"), (r"5\pi", r"5\pi \approx 15.7"), (r"\frac35", r"\sin\theta = \frac35"), ("0.5", r"\cos A = 0.5"),
    ("14", r"\textcolor{blue}{14}"), ("14", r"\underline{14}"), ("2x-y+1=0", "y=2x+1"), ("14", r"\sqrt{196}"), ("6.283185307179586", r"2\pi"),
    ("6.28319", r"2\pi"), ("10^{40}", "10^{40}"), ("3:2", "6:4"),
]
REFUSED_BEFORE += [
    (r"\tan 22.5^\circ", r"\sqrt2-1"), (r"1.5\pi", r"\frac{3\pi}{2}"), (r"\sqrt{0.75}", r"\frac{\sqrt3}{2}"), (r"(2.5\sqrt3,1)", r"(\frac{5\sqrt3}2,1)"),
    (r"4\text{ cm}", r"4 \text{ centimeters}"), (r"9\text{ m}^2", r"9\text{ square meters}"), (r"$35 \mathrm{~min}$", "35 minutes"),
    (r"70\text{ km/h}", r"70\text{ kilometers per hour}"), ("6 lb", "6 pounds"), ("7", r"7\text{ sq. units}"), ("31", r"31\degree"), ("31", r"31^{\circ}\text{C}"), ("17", "£17"),
    ("7:45 PM", r"7:45\text{ p.m.}"), ("8:15", "8{:}15"), ("8:15", "8:15 am"), (r"\rho+\Delta", "ρ+Δ"), (r"3\eta", "3η"), (r"x^{4}", "x⁴"), (r"x^{-2}", "x⁻²"), ("x_1+x_2", "x₁+x₂"),
    (r"\frac58", "⅝"), (r"3\frac34", "3¾"), (r"\frac5{11}", r"0.\overline{45}"), (r"0.2\overline{6}", r"\frac4{15}"), (r"\frac29", r"0.\dot{2}"), (r"\mathbb{R}", r"(-\infty,\infty)"),
    (r"(-\infty,\infty)", r"x\in\mathbb{R}"), ("1234_5", "(1234)_5"), (r"\sum_{k=1}^{n} k^3", r"\sum_{k=1}^n k^3"), (r"\hat{q}", r"\hat q"), (r"\vec{u}+\vec{v}", r"\vec u+\vec v"),
    ("23/5", r"4\,\tfrac35"), ("36500", r"36\ 500"), (r"(0,3] \cup [5,\infty)", r"(0,3] \bigcup [5,\infty)"), ("(4,9)", r"x > 4 \text{ and } x < 9"), ("1<x<6", "x>1 and x<6"),
    (r"\text{No}", r"\text{No.}"), ("21", r"\overline{AB} = 21"), ("34", r"m\angle B = 34"), ("x=2,y=3", "2,3"), (r"\{x \in \mathbb{R} : x > 3\}", r"(3,\infty)"), ("8", r"\large 8"),
]
# fmt: on

TABLE = [(gold, answer, True) for gold, answer in RIGHT + RIGHT_KINDS + REFUSED_BEFORE]
TABLE += [(gold, answer, False) for gold, answer in WRONG + WRONG_KINDS + PAID_BEFORE]


def boxed(answer):
    return rf"So it is $\boxed{{{answer}}}$."


@pytest.mark.parametrize("gold, answer, right", TABLE)
def test_pairs(gold, answer, right):
    assert gmts.answers_match(answer, gold) is right
    assert gmts.is_correct(boxed(answer), gold) is (right and answer != "")


@pytest.mark.parametrize("gold, completion, right", COMPLETIONS)
def test_completions(gold, completion, right):
    assert gmts.is_correct(completion, gold) is right


@pytest.mark.parametrize(
    "completion, answer",
    [
        (r"so \boxed{7} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {x} and \fbox{9}", "9"),
        (r"<think>\boxed{10}</think> it is \boxed{11}", "11"),
        (r"<think>#### 10</think> I cannot say", None),
        ("8+4+0=12 4+1+1=06 ####562", "562"),
        ("reasons\n#### $1,234\nmore", "1,234"),
        ("The answer is **42**. It was easy.", "42"),
        ("Answer: 3.14\nbye", "3.14"),
        ("Answer: \\[\n 7 \n\\]", "7"),
        ("The answer is\n$$\n7\n$$", "7"),
        ("Answer: [0, 1)", "[0, 1)"),
        (r"\boxed 5$, since", "5"),
        ("#### Final answer: 5", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{5}}", "5"),
        ("<answer>a</answer> <answer>b</answer>", "b"),
        ("I get 42", None),
        ("", None),
        (r"\boxed{}", None),
        (r"\boxed{1", None),
        (r"\boxed{3} and then \boxed{}", None),
    ],
)
def test_extract_answer(completion, answer):
    assert gmts.extract_answer(completion) == answer


@pytest.mark.parametrize("gold", GOLDS)
def test_rewritings_keep_or_break_the_match(gold):
    for name, rewrite in KEEP.items():
        assert gmts.is_correct(boxed(rewrite(gold)), gold), (name, rewrite(gold))
    for name, rewrite in BREAK.items():
        wrong = rewrite(gold)
        assert wrong is None or not gmts.is_correct(boxed(wrong), gold), (name, wrong)
    assert not gmts.is_correct(boxed("-7919/104729"), gold)
    assert not any(gmts.answers_match(gold, other) for other in GOLDS if other != gold)


@pytest.mark.parametrize("gold", GOLDS)
def test_a_gold_matches_itself_in_any_delimiters(gold):
    for answer in (gold, gold + ".", f" {gold} ", f"${gold}$", rf"\({gold}\)", rf"\[{gold}\]"):
        assert gmts.answers_match(answer, gold)
        assert gmts.answers_match(gold, answer)
        assert gmts.is_correct(boxed(answer), gold)


# ---- Attacks, as products of shapes --------------------------------------------------------------

SIGNS = ["*", r"\cdot ", r"\times ", r"{\cdot}", r"\cdot\,", "·", "⋅", r"\,", r"\;", "~", r"\quad "]
SIGNS += ["{}", r"\text{ times }", r"\phantom{x}", r"\boxed{}", "$", r"\)\(", "\u200b", "\u00a0"]
SIGNS += ["\n", "**", r"\left.\right.", "^1 ", r"\mathrm{\cdot}", r"\big ", " ", r"\text{}", "!"]
NUMERALS = [("3", "4"), ("(3)", "(4)"), ("{3}", "{4}"), ("[3]", "[4]"), (r"\frac{3}{1}", "4")]
NUMERALS += [(r"\sqrt{9}", "4"), ("|3|", "|4|"), (r"\text{3}", r"\text{4}"), ("--3", "4")]
SUMS = [("5", "+", "7"), ("5", "-(-", "7)"), ("12", "+", "0"), (r"\sqrt{25}", "+", "7")]
SUMS += [("5", r"\text{ plus }", "7"), ("5", "--", "7"), (r"e^{\ln 5}", "+", "7"), ("14", "-", "2")]
DISGUISES = ["%s", r"\frac{%s}{1}", r"\sqrt{(%s)^2}", "x=%s", r"%s\text{ cm}", "|%s|", "(%s)"]
DISGUISES += ["-(-(%s))", "(%s)^1", r"\ln e^{%s}", "1^{x}(%s)", "{%s}", "%s+0x", r"%s\cdot x^0"]
SEPARATORS = [",", " or ", " and ", ";", "/", "|", "&", r"\\", r"\text{ or }", r"\cup ", r"\quad "]
SEPARATORS += ["\n", " ", ":", "..", "-", "=", r"\ne ", "<", r"\to ", " not ", "?", "!", "_", "$"]
SEPARATORS += ["'", '"', "<br>", "，", "、", "。", r"\land ", r"\pm ", r"\Rightarrow ", r"\mid "]
GUESSES = [("12", "13"), ("x=12", "x=13"), ("(12)", "(13)"), ("12.0", "13"), ("{12}", "{13}")]
GUESSES += [("12 cm", "13 cm"), ("12", "twelve"), (r"\{12\}", r"\{13\}"), ("[12]", "[13]")]
FRAMES = ["%s", "(%s)", "[%s]", r"\{%s\}", "{%s}", r"x\in\{%s\}", r"\text{%s}", r"%s\text{ cm}"]


def test_the_question_is_no_answer():
    products = [left + sign + right for sign in SIGNS for left, right in NUMERALS]
    sums = ["".join(parts) for parts in SUMS]
    for question in products + sums:
        for disguise in DISGUISES:
            text = disguise % question
            assert not gmts.answers_match(text, "12"), text
            assert not gmts.is_correct(boxed(text), "12"), text


def test_two_guesses_are_none():
    for separator in SEPARATORS:
        for right, wrong in GUESSES:
            if (right, separator) == ("x=12", "="):
                continue  # x = 13 = x = 12 is a chain, its end counts, whatever stands before
            for text in (right + separator + wrong, wrong + separator + right):
                for frame in FRAMES:
                    assert not gmts.is_correct(boxed(frame % text), "12"), frame % text
    for between in (", ", " or ", " and ", " ", "{}, ", "$x^{2}$, ", r"\quad", ". No: "):
        assert not gmts.is_correct(rf"\boxed{{12}}{between}\boxed{{13}}", "12")
        assert gmts.is_correct(rf"\boxed{{12}}{between}\boxed{{13}}", "13")


def test_a_choice_is_one_letter():
    for separator in SEPARATORS:
        for first, second in (("A", "B"), ("(A)", "(B)"), ("A.", "B."), ("A)", "B)"), ("A", "B)")):
            for gold in "AB":
                assert not gmts.is_correct(boxed(first + separator + second), gold)


# ---- Bounds --------------------------------------------------------------------------------------

FRAGMENTS = LATEX + [
    r"\cosh x ",
    r"\tan x",
    r"\arctan x",
    "abe ",
    r"\{x\in",
    r"\angle ",
    "√2",
    "x!",
]
FRAGMENTS += [r"x^{1/3}", r"\sqrt[97]{10^{90}}", r"1\frac12", "(x-40)!", r"\pm 1,", r"(\pm1,", "x<"]
FRAGMENTS += [r"3^{2000}/5^{1500}+", r"\binom{499}{250}", "1.0001^{9}*", r"\lfloor x\rfloor", "2^"]
DEEP = ["(" * 900 + "5" + ")" * 900, "9^" * 140 + "9", "10^{" * 60 + "}" * 60, "-" * 1900 + "1"]
DEEP += [r"\frac{1}{" * 200 + "2" + "}" * 200, "{" * 900 + "5" + "}" * 900, r"\sqrt" * 300 + "2"]
DEEP += [
    r"(\cot(5\cdot10^{8}x))^{y}",
    r"\binom{10^{9}}{5*10^{8}}",
    "((((5!)!)!)!)!",
    "9" * 1980 + "!",
]


def test_hostile_text_is_judged_in_time_off_the_main_thread():
    rng = random.Random(0)
    texts = ["".join(rng.choices(LATEX, k=rng.randrange(50))) for _ in range(4000)]
    texts += [fragment * (1990 // len(fragment)) for fragment in FRAGMENTS]
    texts += [fragment * count for fragment in FRAGMENTS for count in (45, 120)] + DEEP

    def slowest():
        worst = 0.0
        for text in texts:
            start = time.perf_counter()
            for gold in ("5", r"\frac{1}{2}", "1, 2"):
                assert type(gmts.is_correct(boxed(text), gold)) is bool
            assert type(gmts.answers_match(text, text[:50])) is bool
            assert type(gmts.answers_match("x", text)) is bool
            worst = max(worst, time.perf_counter() - start)
        return worst

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(slowest).result() < 0.5  # 0.02 on an idle core


MEGABYTES = [
    "\\boxed{",
    "\\boxed{}",
    "\\boxed{1},",
    "\\boxed{\\boxed{1}",
    "{",
    "}",
    " ",
    "answer is ",
]
MEGABYTES += [
    "answer: The ",
    "####",
    "<answer>",
    "</answer>",
    "</think>",
    "\\",
    "\\(",
    "},",
    "\\boxed ",
]


def test_comparing_raises_nothing_but_what_it_says():
    """answers_match() lets nothing out; so here the two steps inside, on every pair of a sample."""
    rng = random.Random(0)
    texts = rng.sample(sorted({text for row in TABLE for text in row[:2]}), 250)
    items = [item for _, item in map(gmts.read_math, texts) if item is not None]
    assert len(items) > 150
    for a, g in itertools.product(items, items):
        with contextlib.suppress(ArithmeticError, TypeError, ValueError):
            gmts.items_match(a, g)


@pytest.mark.parametrize("fragment", MEGABYTES)
def test_a_megabyte_is_linear_and_small(fragment):
    filler = (fragment * 1_000_000)[:1_000_000]
    for text in (filler, "answer is " + filler, filler + "\\boxed{5}", "\\boxed{5" + filler + "}"):
        start = time.perf_counter()
        assert type(gmts.is_correct(text, "1, 2")) is bool
        assert time.perf_counter() - start < 1.5  # 0.15 on an idle core
    tracemalloc.start()
    gmts.is_correct(filler, "1, 2")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6


def test_plain_numbers_are_fast():
    start = time.perf_counter()
    assert all(gmts.is_correct(boxed(str(n)), str(n)) for n in range(20_000))
    assert time.perf_counter() - start < 4  # 0.35 on an idle core


def test_a_deep_stack_is_no_error():
    def sink(depth):
        return sink(depth - 1) if depth else gmts.answers_match("((((5+x))))", "(((x+5)))")

    assert sink(10) is True
    gmts.read_math.cache_clear()
    assert type(sink(sys.getrecursionlimit() - 120)) is bool


def test_threads_agree():
    def judge(_):
        return [gmts.answers_match(answer, gold) for gold, answer, _ in TABLE[::3]]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(judge, range(4)))
    assert all(result == [right for _, _, right in TABLE[::3]] for result in results)


# ---- Properties ----------------------------------------------------------------------------------


def random_polynomial(rng, depth):
    """A LaTeX expression in x and y, and the same as a function of exact numbers."""
    kind = rng.choice(
        ["number", "x", "y"] if depth == 0 else ["sum", "product", "power", "quotient"]
    )
    if kind == "number":
        value = rng.randrange(1, 9)
        return str(value), lambda x, y: Fraction(value)
    if kind in "xy":
        return kind, (lambda x, y: x) if kind == "x" else (lambda x, y: y)
    left, f = random_polynomial(rng, depth - 1)
    right, g = random_polynomial(rng, depth - 1)
    if kind == "sum":
        sign = rng.choice("+-")
        scale = 1 if sign == "+" else -1
        return f"({left}{sign}({right}))", lambda x, y: f(x, y) + scale * g(x, y)
    if kind == "product":
        return rf"({left}){rng.choice(['', '*', ' ' + chr(92) + 'cdot '])}({right})", (
            lambda x, y: f(x, y) * g(x, y)
        )
    if kind == "power":
        exponent = rng.randrange(2, 4)
        return rf"({left})^{{{exponent}}}", lambda x, y: f(x, y) ** exponent
    value = rng.randrange(2, 9)
    return rf"\frac{{{left}}}{{{value}}}", lambda x, y: f(x, y) / value


def test_expressions_match_exactly_when_an_oracle_says_so():
    rng = random.Random(1)
    points = [(Fraction(rng.randrange(-50, 50), 7), Fraction(rng.randrange(-50, 50), 11))]
    points += [
        (Fraction(2), Fraction(3)),
        (Fraction(-1, 2), Fraction(5)),
        (Fraction(4), Fraction(-9)),
    ]
    seen = {True: 0, False: 0}
    for _ in range(400):
        pair = [random_polynomial(rng, rng.randrange(1, 3)) for _ in range(2)]
        (gold, f), (answer, g) = pair if rng.random() < 0.6 else (pair[0], pair[0])
        if rng.random() < 0.3:
            answer, g = f"({answer})+y-y", g
        if not set("xy") & set(gold) or not set("xy") & set(answer):
            continue
        equal = all(f(x, y) == g(x, y) for x, y in points)
        assert gmts.answers_match(answer, gold) is equal, (answer, gold)
        seen[equal] += 1
    assert min(seen.values()) > 50


def test_integers_match_exactly_at_any_size():
    rng = random.Random(2)
    for _ in range(300):
        n = rng.randrange(-(10 ** rng.randrange(1, 60)), 10 ** rng.randrange(1, 60))
        for form in (
            f"{n}",
            f"{n}.0",
            f"{n:,}",
            rf"\frac{{{2 * n}}}{{2}}",
            f"x = {n}",
            rf"{n}\text{{ cm}}",
        ):
            assert gmts.answers_match(form, str(n)), form
            assert not gmts.answers_match(form, str(n + 1)), form
            assert not gmts.answers_match(form, str(-n or 1)), form


def test_a_match_is_symmetric_where_nothing_is_computed():
    for gold, answer in RIGHT_KINDS:
        if not re.fullmatch(r"\W*[A-Z]\W*", gold) and not re.search(
            r"\d:\d|approx|\\frac42", gold + answer
        ):
            assert gmts.answers_match(gold, answer), (gold, answer)


def test_a_function_is_added_by_one_row(monkeypatch):
    monkeypatch.setitem(gmts.FUNCTIONS, "sech", lambda z: 1 / gmts.cmath.cosh(z))
    gmts.read_math.cache_clear()
    assert gmts.answers_match(r"\sech x", r"\frac{1}{\cosh x}")
    assert gmts.answers_match(r"\sech^2 x", r"1-\tanh^2 x")
    gmts.read_math.cache_clear()


# ---- bfloat16 by autocast ------------------------------------------------------------------------


class Casts(TorchDispatchMode):
    """Counts how often a weight is cast to bfloat16."""

    def __init__(self, model):
        super().__init__()
        self.weights = {weight.data_ptr() for weight in model.parameters()}
        self.count = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.weights:
            self.count += kwargs.get("dtype") == torch.bfloat16
        return function(*args, **kwargs or {})


def test_bfloat16_sampler_and_update_agree_and_cast_each_weight_once(tokenizer):
    model = tiny_model(scale=2)
    run = make_run(model, tokenizer, dtype="bfloat16", max_tokens=12)
    problems = [(ids, "1") for ids in tokenizer(PROMPTS).input_ids]
    torch.manual_seed(0)
    with Casts(model) as casts:
        batch = gmts.rollout(run, problems, 4, 1.0)
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert casts.count == sum(len(list(layer.parameters())) for layer in layers)
    assert batch.mask.any(0).sum() > 5  # so many steps has the one sampling loop

    logprobs, *_ = gmts.score_tokens(model, batch, batch.mask, run.config)
    exact = Categorical(logits=full_logits(model, batch)).log_prob(batch.tokens)
    mask = batch.mask
    assert (logprobs - batch.logprobs)[mask].abs().max() < 0.1  # bfloat16 has 8 bits
    assert 1e-5 < (exact - batch.logprobs)[mask].abs().mean() < 0.03
    assert all(weight.dtype == torch.float32 for weight in model.parameters())


def test_small_updates_are_not_lost_in_bfloat16(tokenizer):
    model = tiny_model(scale=3)
    batch = make_batch(model, tokenizer)
    run = make_run(model, tokenizer, select="all", micro_tokens=40, dtype="bfloat16")
    run.optimizer.param_groups[0]["lr"] = 1e-6  # far below bfloat16's resolution
    before = [p.clone() for p in model.parameters()]
    for _ in range(3):
        gmts.learn(run, batch)
    pairs = zip(model.parameters(), before, strict=True)
    moved = max((ours - old).abs().max().item() for ours, old in pairs)
    assert 1e-6 < moved < 1e-5


def test_a_bfloat16_run_learns(tiny, tmp_path):
    """Rewarded for short answers, it writes shorter ones."""
    (tmp_path / "short.py").write_text("def f(completion, answer):\n    return -len(completion)\n")
    flags = [*tiny, "--reward", f"{tmp_path / 'short.py'}:f", "--dtype", "bfloat16", "--steps", 20]
    flags += ["--samples", 8, "--lr", 1e-2, "--eval-every", 0]
    lengths = [float(row["length"]) for row in run_main(*flags, "--out", tmp_path / "run")[1:]]
    assert sum(lengths[-5:]) < sum(lengths[:5]) - 10


# ---- Data ----------------------------------------------------------------------------------------

CHOICES = [{"label": "A", "text": "x"}, {"label": "B", "text": "y"}]
RECORDS = [
    ({"question": "q", "answer": "text #### 1,234"}, ("q", "1,234")),  # GSM8K
    ({"problem": "p", "solution": r"thus $\boxed{\frac{1}{2}}$."}, ("p", r"\frac{1}{2}")),  # MATH
    ({"problem": "p", "answer": 27.0}, ("p", "27.0")),  # AMC
    ({"input": "i", "target": 40}, ("i", "40")),  # MultiArith
    ({"Body": "Facts.", "Question": "How?", "Answer": 198.5}, ("Facts. How?", "198.5")),  # SVAMP
    ({"body": "Facts.", "question": "How?", "answer": "9 (apples)"}, ("Facts. How?", "9 (apples)")),
    ({"prompt": "p", "final_answer": ["7"]}, ("p", "7")),
    ({"question": "q", "answer": 0}, ("q", "0")),
    (
        {"question": {"stem": "s", "choices": CHOICES}, "answerKey": "B"},
        ("s\n(A) x\n(B) y", "B"),
    ),
    (
        {"question": "s", "choices": {"label": ["A", "B"], "text": ["x", "y"]}, "answerKey": "A"},
        ("s\n(A) x\n(B) y", "A"),
    ),
]


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_load_problems(tmp_path, suffix):
    records = [record for record, _ in RECORDS]
    path = write_lines(tmp_path / "data.jsonl", records)
    if suffix == ".json":
        path.write_text(json.dumps(records, indent=1))
    assert gmts.load_problems(str(path)) == [problem for _, problem in RECORDS]


def test_names_are_downloaded_once(tmp_path, monkeypatch):
    for part, answer in (("train", 5), ("test", 6)):
        write_lines(tmp_path / f"{part}.jsonl", [{"question": "q", "answer": f"#### {answer}"}])
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "cache"))
    for name, part in (("gsm8k", "train"), ("gsm8k-test", "test")):
        monkeypatch.setitem(gmts.DOWNLOADS, name, (tmp_path / f"{part}.jsonl").as_uri())
    assert gmts.load_problems("gsm8k") == [("q", "5")]
    assert gmts.load_problems("gsm8k-test") == [("q", "6")]
    (tmp_path / "train.jsonl").unlink()
    assert gmts.load_problems("gsm8k") == [("q", "5")]
    other = write_lines(tmp_path / "gsm8k-hard.jsonl", [{"question": "r", "answer": 7}])
    monkeypatch.chdir(tmp_path)
    assert gmts.load_problems(other.name) == [("r", "7")]


def test_no_question_is_in_both_splits(tmp_path):
    records = [{"question": f"q{i % 290}", "answer": i % 290} for i in range(300)]
    path = write_lines(tmp_path / "data.jsonl", records)
    train, test = gmts.split_problems(config(data=str(path), eval_size=1000))
    assert 10 < len(test) < 60 and not set(train) & set(test)
    assert len(set(train) | set(test)) == 290
    other = write_lines(tmp_path / "other.jsonl", [{"question": "q17", "answer": 17}])
    train, test = gmts.split_problems(config(data=str(path), eval_data=str(other)))
    assert test == [("q17", "17")] and len(train) == 299 and ("q17", "17") not in train


def test_the_pupil_is_careless_in_the_way_it_says():
    never = types.SimpleNamespace(random=lambda: 0.99)
    right = "8+4+0=12 4+1+1=06 3+2+0=05 ####562"
    assert gmts.careless_pupil("348+214=", never) == right
    rng = random.Random(0)
    works = [gmts.careless_pupil("348+214=", rng) for _ in range(4000)]
    share = sum(work.endswith("####562") for work in works) / 4000
    assert share == pytest.approx((1 - gmts.FORGETS) * (1 - gmts.SLIPS) ** 3, abs=0.03)


# ---- Whole runs ----------------------------------------------------------------------------------


def save_model(folder, tokenizer, config=Qwen2Config, **options):
    tiny_model(config, **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, tokenizer):
    """A random model in a folder, a file of sums, and flags for runs of a second."""
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder / "model", tokenizer)
    records = [{"question": q, "answer": a} for q, a in gmts.demo_problems(80)]
    write_lines(folder / "data.jsonl", records)
    reward = "def length(completion, answer):\n    return len(completion) % 3\n"
    (folder / "reward.py").write_text(reward)
    flags = ["--model", folder / "model", "--data", folder / "data.jsonl"]
    flags += ["--reward", f"{folder / 'reward.py'}:length", "--prompt", "{question}"]
    flags += ["--prompts", 3, "--samples", 4, "--max-tokens", 12, "--steps", 2, "--lr", 1e-3]
    return [*flags, "--eval-size", 5]


EXTRA = [["--select", select] for select in gmts.SELECTORS]
EXTRA += [["--beta", 0.1], ["--updates", 3], ["--eval-samples", 3], ["--dtype", "bfloat16"]]


@pytest.mark.parametrize("extra", EXTRA)
def test_two_steps_of_everything(tiny, tmp_path, capsys, extra):
    rows = run_main(*tiny, "--out", tmp_path / "run", *extra)
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert all(math.isfinite(float(value)) for row in rows for value in row.values() if value)
    share = 1.0 if extra[-1] == "all" else 0.2
    for row in rows[1:]:
        assert share <= float(row["kept"]) < share + 0.05 and float(row["grad_norm"]) > 0
    one_answer = "--eval-samples" not in extra
    assert (float(rows[0]["pass_at_k"]) == float(rows[0]["accuracy"])) == one_answer
    saved = tmp_path / "run" / "step-000002"
    assert f"the model is in {saved}" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(saved)
    before = AutoModelForCausalLM.from_pretrained(tiny[1])
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    assert any(not torch.equal(ours, old) for ours, old in pairs)
    assert AutoTokenizer.from_pretrained(saved)("1+1=").input_ids == [4, 13, 4, 14]


def test_a_run_shows_and_keeps_its_configuration(tiny, tmp_path, capsys):
    run_main(*tiny, "--out", tmp_path / "run", "--seed", 5)
    printed = capsys.readouterr().out
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["seed"] == 5 and saved["lr"] == 1e-3 and saved["dtype"] == "float32"
    assert set(saved) == {f.name for f in gmts.fields(gmts.Config)}
    assert all(f"{name} {value!r}" in printed for name, value in saved.items())
    changed, defaults = printed.split("\n")[:2]
    assert "seed 5" in changed and "select 'gmts'" in defaults
    assert "parameters" in printed and "5 to evaluate on" in printed


def test_the_printed_table(tiny, tmp_path, capsys):
    rows = run_main(*tiny, "--out", tmp_path / "run", "--steps", 23, "--eval-every", 10)
    lines = capsys.readouterr().out.split("\n")
    heads = [i for i, line in enumerate(lines) if line.startswith("step reward")]
    assert heads[1] - heads[0] == 21 and len(heads) == 2
    head = lines[heads[0]].split()
    assert "truncated" in head and "accuracy" in head
    table = [line for line in lines[heads[0] + 1 :] if line[:4].strip().isdigit()]
    assert [int(line[:4]) for line in table] == list(range(24))
    assert all(len(line) <= 110 for line in (lines[heads[0]], *table))
    for row, line in list(zip(rows, table, strict=True))[1:]:
        shown = dict(zip(head, line.replace("%", "").split(), strict=False))
        assert float(shown["reward"]) == pytest.approx(float(row["reward"]), abs=1e-3)
        assert float(shown["truncated"]) == pytest.approx(100 * float(row["truncated"]), abs=0.6)
        right = lines[heads[0]].index("accuracy") + len("accuracy")
        assert len(line) == right if row["accuracy"] else len(line) < right
    few = [*tiny, "--steps", 23, "--eval-every", 0, "--log-every", 10]
    assert len(run_main(*few, "--out", tmp_path / "few")) == 24  # metrics.csv has all
    lines = capsys.readouterr().out.split("\n")
    table = [int(line[:4]) for line in lines if line[:4].strip().isdigit()]
    assert table == [0, 10, 20, 23]


def test_truncated_is_the_share_of_answers_without_an_end(tiny, tmp_path, monkeypatch):
    batches, rollout = [], gmts.rollout

    def recorded(*args):
        batches.append(rollout(*args))
        return batches[-1]

    monkeypatch.setattr(gmts, "rollout", recorded)
    rows = run_main(*tiny, "--out", tmp_path / "run", "--steps", 1, "--max-tokens", 5)
    batch = batches[1]  # between two evaluations
    answers = [row[row_mask].tolist() for row, row_mask in zip(batch.tokens, batch.mask)]  # noqa: B905
    endless = sum(0 not in answer for answer in answers) / len(answers)
    assert float(rows[1]["truncated"]) == pytest.approx(endless) and 0 < endless < 1


def test_bars_only_on_a_terminal(tiny, tmp_path, capfd, monkeypatch):
    run_main(*tiny, "--out", tmp_path / "quiet")
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run_main(*tiny, "--out", tmp_path / "bars")
    shown = capfd.readouterr().err
    assert "tokens" in shown and "running=" in shown  # a rollout
    assert "questions" in shown and "accuracy=" in shown  # an evaluation
    last = re.split(r"[\r\n]", shown.replace("\x1b[A", "")).pop()
    assert last.strip() == ""  # gone when done


def test_evaluating_more_often_changes_nothing(tiny, tmp_path):
    often = [*tiny, "--eval-every", 1, "--eval-samples", 2]
    often = run_main(*often, "--out", tmp_path / "often")
    never = run_main(*tiny, "--out", tmp_path / "never", "--eval-every", 0)
    assert [row["grad_norm"] for row in often] == [row["grad_norm"] for row in never]
    assert often[1]["accuracy"] and not never[1]["accuracy"]


def test_a_batch_without_signal_is_said_plainly(tiny, tmp_path, capsys):
    (tmp_path / "reward.py").write_text("def same(completion, answer):\n    return 0\n")
    reward = f"{tmp_path / 'reward.py'}:same"
    rows = run_main(*tiny, "--out", tmp_path / "run", "--reward", reward)
    assert all(float(rows[1][name]) == 0 for name in ("informative", "grad_norm", "kept"))
    assert capsys.readouterr().out.count("nothing to learn from") == 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "step-000002")
    before = AutoModelForCausalLM.from_pretrained(tiny[1])
    for ours, old in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(ours, old)


def test_each_epoch_goes_through_all_problems(tiny, tmp_path, monkeypatch):
    asked, rollout = [], gmts.rollout

    def recorded(run, problems, *rest):
        asked.append([tuple(ids) for ids, _ in problems])
        return rollout(run, problems, *rest)

    monkeypatch.setattr(gmts, "rollout", recorded)
    path = write_lines(
        tmp_path / "data.jsonl", [{"question": f"{i}+1=", "answer": i + 1} for i in range(10)]
    )
    flags = [*tiny, "--data", path, "--steps", 6, "--eval-every", 0, "--out", tmp_path / "run"]
    run_main(*flags)
    trained = sum(asked[1:-1], [])
    assert len(trained) == 18 and len(set(trained[:9])) == len(set(trained[9:])) == 9
    assert trained[:9] != trained[9:]


def test_commonsense_in_both_public_shapes_runs_end_to_end(tiny, tmp_path):
    labels, texts, asked = list("ABC"), ["1", "2", "3"], []
    options = [{"label": a, "text": b} for a, b in zip(labels, texts, strict=True)]

    def original(question, answer):
        return {"question": {"stem": question, "choices": options}, "answerKey": answer}

    def hub(question, answer):
        choices = {"label": labels, "text": texts}
        return {"question": question, "choices": choices, "answerKey": answer}

    for shape in (original, hub):
        records = [shape(f"{i}+1=?", labels[i % 3]) for i in range(60)]
        path = write_lines(tmp_path / f"{shape.__name__}.jsonl", records)
        asked.append(gmts.load_problems(str(path)))
        rows = run_main(*tiny, "--data", path, "--out", tmp_path / shape.__name__)
        assert len(rows) == 3 and float(rows[2]["length"]) > 0
    assert asked[0] == asked[1]
    assert asked[0][4] == ("4+1=?\n(A) 1\n(B) 2\n(C) 3", "B")


def test_show_marks_the_kept_tokens(tokenizer, capsys, monkeypatch):
    model = tiny_model(scale=3)
    batch = make_batch(model, tokenizer)
    run = make_run(model, tokenizer, show=True)
    gmts.learn(run, batch)
    _, keep, _ = run.shown
    gmts.show(run)
    right, best, wrong, _ = capsys.readouterr().out.strip().split("\n")
    advantages = batch.advantages[:, 0]
    for name, line, good in (("right", right, advantages > 0), ("wrong", wrong, advantages < 0)):
        row = max(good.nonzero()[:, 0].tolist(), key=lambda i: (keep[i].sum().item(), -i))
        marked = ""
        for token, kept in zip(batch.tokens[row][batch.mask[row]], keep[row], strict=False):
            word = tokenizer.decode([token])
            marked += f"[{word}]" if kept else word
        assert line.strip() == f"{name}: {marked}" and keep[row].any()
    good = (advantages > 0).nonzero()[:, 0].tolist()
    row = max(good, key=lambda i: (keep[i].sum().item(), -i))
    scores = advantages[row] * batch.entropy[row] * batch.mask[row]
    five = sorted(scores.tolist(), reverse=True)[:5]
    assert [float(x) for x in re.findall(r"' (\d+\.\d+)", best)] == pytest.approx(five, abs=1e-3)
    assert "largest gmts scores" in best
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    gmts.show(run)
    assert "\033[7m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    run.tokenizer = types.SimpleNamespace(decode=lambda ids: "\033[2J\n")  # clears a terminal
    gmts.show(run)
    printed = capsys.readouterr().out
    assert "\033" not in printed and r"\x1b[2J\n" in printed and printed.count("\n") == 4
    batch.advantages.zero_()
    gmts.show(run)
    assert "right: none" in capsys.readouterr().out


def test_show_prints_after_each_evaluation(tiny, tmp_path, capsys):
    run_main(*tiny, "--out", tmp_path / "run", "--show", "--eval-every", 1)
    assert capsys.readouterr().out.count("largest gmts scores") == 4  # 2 steps, 2 answers each


# ---- The command line and the documents ----------------------------------------------------------


def option(name):
    return "--" + name.replace("_", "-")


def test_help_names_and_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        gmts.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    assert all(option(f.name) in text for f in gmts.fields(gmts.Config))
    assert "share of the tokens to train on (default: 0.2)" in text


def test_flags_override_the_defaults_of_the_demo():
    demo = gmts.parse([])
    assert demo.samples == 8 and demo.lr == 3e-4 and demo.prompt == "{question}"
    assert gmts.parse(["--samples", "5"]).samples == 5
    other = gmts.parse(["--model", "Qwen2.5-0.5B"])
    assert other.samples == 16 and other.lr == 1e-6 and other.data == "gsm8k"


def test_a_bare_name_is_one_of_qwens(monkeypatch):
    asked = []

    def from_pretrained(name, **_):
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    for name in ("Qwen2.5-0.5B", "HuggingFaceTB/SmolLM2-135M", "my/own"):
        with pytest.raises(gmts.BadInput, match="no network"):
            gmts.load_model(name, "cpu", [])
    assert asked == ["Qwen/Qwen2.5-0.5B", "HuggingFaceTB/SmolLM2-135M", "my/own"]


def test_readme_explains_every_column_and_knows_every_flag(tiny, tmp_path):
    readme = (HERE / "README.md").read_text()
    columns = run_main(*tiny, "--out", tmp_path / "run", "--steps", 1)[1]
    assert all(f"`{column}`" in readme for column in columns)
    known = {option(f.name) for f in gmts.fields(gmts.Config)} | {"--help"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", readme)) <= known


def test_no_statement_shares_the_line_of_its_header():
    import ast

    tree = ast.parse((HERE / "gmts.py").read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and not isinstance(node, ast.Module):
            assert body[0].lineno > node.lineno, node.lineno


def test_importing_is_cheap_and_needs_no_unix():
    """On Windows the module resource is missing; and nothing heavy is imported but the packages."""
    code = (
        "import sys, time; sys.modules['resource'] = sys.modules['fcntl'] = None\n"
        "import torch, transformers, tokenizers, tqdm, numpy\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache\n"
        "start = time.perf_counter(); import gmts; print(time.perf_counter() - start)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.0


# ---- Nothing lost: kills and checkpoints ---------------------------------------------------------

TIMES = ("tokens_per_s", "seconds", "peak_gb")


def without_times(rows):
    return [{name: row[name] for name in row if name not in TIMES} for row in rows]


def start(*flags):
    command = [sys.executable, str(HERE / "gmts.py"), *map(str, flags)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def wait_for_step(process, step):
    for line in process.stdout:
        if line.startswith(f"{step:4d} "):
            return
    raise AssertionError(f"ended before step {step}")


MORE = ["--dtype", "bfloat16", "--beta", "0.1", "--select", "random", "--updates", "2"]


@pytest.mark.parametrize("extra", [[], MORE])
def test_killed_and_resumed_gives_the_same_figures(tiny, tmp_path, extra):
    flags = [*tiny, "--steps", 6, "--save-every", 2, "--eval-every", 3, *extra]
    start(*flags, "--out", tmp_path / "whole").communicate(timeout=60)
    process = start(*flags, "--out", tmp_path / "cut")
    wait_for_step(process, 3)
    process.kill()  # kill -9
    process.wait()
    assert len(gmts.checkpoints(tmp_path / "cut")) == 1
    start("--resume", "--out", tmp_path / "cut").communicate(timeout=60)
    resumed, whole = metrics(tmp_path / "cut"), metrics(tmp_path / "whole")
    assert without_times(resumed) == without_times(whole) and len(whole) == 7
    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "step-000006")
        for name in ("whole", "cut")
    ]
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(ours, wanted) for ours, wanted in pairs)


def test_resuming_a_finished_run_changes_nothing(tiny, tmp_path, monkeypatch):
    out = tmp_path / "run"
    before = run_main(*tiny, "--out", out)
    monkeypatch.setattr(gmts, "evaluate", lambda run: pytest.fail("evaluated again"))
    assert run_main("--resume", "--out", out) == before
    assert [path.name for path in gmts.checkpoints(out)] == ["step-000002"]


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_an_interrupted_evaluation_loses_nothing_saved(tiny, tmp_path, capsys, monkeypatch, moment):
    flags, evaluate, calls = [*tiny, "--eval-every", 1, "--save-every", 1], gmts.evaluate, []
    whole = run_main(*flags, "--out", tmp_path / "whole")

    def interrupted(run):
        calls.append(run.step)
        if len(calls) == moment:
            raise KeyboardInterrupt
        return evaluate(run)

    monkeypatch.setattr(gmts, "evaluate", interrupted)
    with pytest.raises(SystemExit) as stop:
        gmts.main([str(flag) for flag in (*flags, "--out", tmp_path / "cut")])
    said = capsys.readouterr().err
    assert stop.value.code == 130 and "--resume" in said and said.count("\n") == 1
    if moment == 3:  # before that there is no checkpoint
        resumed = run_main("--resume", "--out", tmp_path / "cut")
        assert without_times(resumed) == without_times(whole)


def test_a_kill_at_any_moment_of_saving_leaves_a_whole_checkpoint(tiny, tmp_path, monkeypatch):
    """Fails, in turn, every call that saving makes, as a kill would."""
    run = gmts.prepare(gmts.parse([str(f) for f in [*tiny, "--out", tmp_path / "run"]]))
    gmts.save_checkpoint(run)

    def killed(*_, **__):
        raise KeyboardInterrupt

    moments = [(run.model, "save_pretrained"), (run.tokenizer, "save_pretrained")]
    moments += [(torch, "save"), (Path, "rename"), (gmts.shutil, "rmtree")]
    for target, name in moments:
        run.step += 1
        with monkeypatch.context() as patch:
            patch.setattr(target, name, killed)
            with pytest.raises(KeyboardInterrupt):
                gmts.save_checkpoint(run)
        newest = gmts.checkpoints(run.config.out)[-1]
        AutoModelForCausalLM.from_pretrained(newest)
        state = torch.load(newest / "trainer.pt", weights_only=True)
        assert state["step"] == int(newest.name[-6:])
    run.step += 1
    gmts.save_checkpoint(run)
    names = [path.name for path in Path(run.config.out).glob("step-*")]
    assert names == [f"step-{run.step:06d}"]


# ---- Nothing silent: what goes wrong ends in one line --------------------------------------------


def fails(capsys, *flags):
    """The one line on stderr with which the command line ends, with exit status 2."""
    with pytest.raises(SystemExit) as stop:
        gmts.main([str(flag) for flag in flags])
    said = capsys.readouterr().err
    assert stop.value.code == 2, said
    assert said.count("\n") == 1 and said.startswith("gmts.py: ") and len(said) < 1100, said
    return said


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--sample", 4], "--sample"),
        (["--steps", "many"], "--steps"),
        (["--steps", -1], "--steps"),
        (["--select", "best"], "--select"),
        (["--dtype", "float16"], "--dtype"),
        (["--fraction", 0], "--fraction"),
        (["--fraction", 1.1], "--fraction"),
        (["--fraction", "nan"], "--fraction"),
        (["--samples", 1], "--samples"),
        (["--temperature", 0], "--temperature"),
        (["--lr", -1], "--lr"),
        (["--prompt", "?"], "--prompt"),
        (["--device", "toaster"], "--device toaster"),
        (["--data", "missing.jsonl"], "missing.jsonl"),
        (["--eval-data", "missing.jsonl"], "missing.jsonl"),
        (["--model", "/missing/model"], "/missing/model"),
        (["--reward", "missing.py:f"], "missing.py"),
        (["--reward", "nonsense"], "nonsense"),
        (["--resume"], "--resume"),
        (["--out", "/proc/run"], "/proc/run"),
    ],
)
def test_bad_flags_end_in_one_line(tiny, tmp_path, capsys, flags, words):
    assert words in fails(capsys, *tiny, "--out", tmp_path / "run", *flags)


@pytest.mark.parametrize(
    "content, words",
    [
        ("", "too few"),
        ('{"question": "1+1=", "answer": 2}\n{"question": "1+1="}\n', "line 2: no answer"),
        ('{"answer": 2}\n', "line 1: no question"),
        ('{"question": "q", "answer": 2}\n\n{"question"\n', "line 3"),
        ('[{"question": "q", "answer": 2},\n {"question": }]', "line 2"),
        ('["q"]', "record 1"),
        ('{"question": {"stem": "q"}, "answer": 1}', "line 1"),
        ('{"question": "q", "answer": {"a": 1}}', "line 1: no answer"),
        ("\xff\xfe\x00", "utf-8"),
        ('{"question": "q", "answer": 2}', "too few"),
        ("[" * 100_000, "data"),
    ],
)
def test_bad_data_ends_in_one_line(tiny, tmp_path, capsys, content, words):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content.encode("latin-1"))
    said = fails(capsys, *tiny, "--out", tmp_path / "run", "--data", path)
    assert words in said and str(path) in said


@pytest.mark.parametrize(
    "body, words",
    [
        ("raise RuntimeError('broken at load')", "broken at load"),
        ("def f(completion, answer):\n    return 1 / 0", "division by zero"),
        ("def f(completion, answer):\n    return None", "NoneType"),
        ("def f(completion, answer):\n    return float('nan')", "not a finite number"),
        ("def f(completion, answer):\n    return 'good'", "good"),
        ("def f(completion, answer):\n    raise SystemExit('over')", "over"),
        ("def g(completion, answer):\n    return 1", "f"),
    ],
)
def test_bad_rewards_end_in_one_line(tiny, tmp_path, capsys, body, words):
    (tmp_path / "reward.py").write_text(body)
    reward = f"{tmp_path / 'reward.py'}:f"
    assert words in fails(capsys, *tiny, "--out", tmp_path / "run", "--reward", reward)


def test_the_demo_model_knows_only_sums(tmp_path, capsys):
    records = [{"question": f"q{i}", "answer": i} for i in range(30)]
    path = write_lines(tmp_path / "data.jsonl", records)
    assert "--model names another" in fails(capsys, "--data", path, "--out", tmp_path / "run")


def test_bad_models_end_in_one_line(tiny, tmp_path, capsys, tokenizer, monkeypatch):
    model = tmp_path / "model"
    save_model(model, tokenizer)
    (model / "model.safetensors").write_bytes(b"damaged")
    assert "model" in fails(capsys, *tiny, "--out", tmp_path / "run", "--model", model)
    short = save_model(tmp_path / "short", tokenizer, max_position_embeddings=16)
    assert "no prompt fits" in fails(capsys, *tiny, "--out", tmp_path / "a", "--model", short)
    endless = tiny_model(eos_token_id=None)
    endless.generation_config.eos_token_id = None
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    silent = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    monkeypatch.setattr(gmts, "load_model", lambda *_: (endless, silent))
    assert "no end token" in fails(capsys, *tiny, "--out", tmp_path / "b")


def test_long_prompts_are_left_out_and_counted(tiny, tmp_path, capsys, tokenizer):
    records = [{"question": "1" * (10 + 2 * i), "answer": 1} for i in range(50)]
    path = write_lines(tmp_path / "data.jsonl", records)
    model = save_model(tmp_path / "model", tokenizer, max_position_embeddings=64)
    flags = [*tiny, "--data", path, "--model", model, "--eval-data", tiny[3]]
    run_main(*flags, "--out", tmp_path / "run")
    printed = capsys.readouterr().out
    assert "28 left out as too long" in printed  # 64 - 12 = 52 tokens fit: 22 questions


def test_bad_resumes_end_in_one_line(tiny, tmp_path, capsys):
    out = tmp_path / "run"
    run_main(*tiny, "--out", out)
    assert str(out) in fails(capsys, *tiny, "--out", out)  # not overwritten
    said = fails(capsys, *tiny, "--out", out, "--resume", "--seed", 1)
    assert "--seed 1: the run to resume has 0" in said
    assert "--select" in fails(capsys, "--out", out, "--resume", "--select", "random")
    assert "--resume" in fails(capsys, "--out", tmp_path / "nothing", "--resume")
    trainer = gmts.checkpoints(out)[0] / "trainer.pt"
    state = torch.load(trainer, weights_only=True)
    with open(trainer, "r+b") as file:
        file.truncate(100)
    assert "checkpoint" in fails(capsys, "--out", out, "--resume")
    few = {"state": {}, "param_groups": [{"params": [0]}]}
    state["optimizer"] = few
    torch.save(state, trainer)
    assert "checkpoint" in fails(capsys, "--out", out, "--resume")
    gmts.shutil.rmtree(trainer.parent)
    assert "checkpoint" in fails(capsys, "--out", out, "--resume")


def test_a_run_of_bad_gradients_ends_with_its_last_good_checkpoint(
    tiny, tmp_path, capsys, monkeypatch
):
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: clip(*args) * math.nan)
    flags = [*tiny, "--steps", 30, "--eval-every", 0, "--save-every", 5]
    assert "not finite" in fails(capsys, *flags, "--out", tmp_path / "run")
    assert [row["grad_norm"] for row in metrics(tmp_path / "run")] == [""] + ["nan"] * 10
    (saved,) = gmts.checkpoints(tmp_path / "run")
    model, before = (AutoModelForCausalLM.from_pretrained(f) for f in (saved, tiny[1]))
    for ours, old in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(ours, old)


def test_out_of_memory_names_the_flags_to_lower(tiny, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gmts, "policy_gradient", full)
    assert "--micro-tokens" in fails(capsys, *tiny, "--out", tmp_path / "run")


# ---- Models of many kinds ------------------------------------------------------------------------

LINEAR = dict(
    num_hidden_layers=4,
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
EXPERTS = dict(num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16)
MAMBA = dict(mamba_n_heads=4, mamba_d_state=8, mamba_n_groups=1)
KINDS = {
    "qwen2": ("Qwen2Config", {}),
    "qwen2, sliding window": (
        "Qwen2Config",
        dict(use_sliding_window=True, sliding_window=6, max_window_layers=1),
    ),
    "qwen3": ("Qwen3Config", {}),
    "qwen3, tied": ("Qwen3Config", dict(tie_word_embeddings=True)),
    "llama": ("LlamaConfig", dict(tie_word_embeddings=False)),
    "mistral, sliding window": ("MistralConfig", dict(sliding_window=6)),
    "phi 3": ("Phi3Config", {}),
    "gpt 2": ("GPT2Config", dict(n_embd=32, n_layer=2, n_head=4, n_positions=128)),
    "gemma": ("GemmaConfig", {}),
    "gemma 2": (
        "Gemma2Config",
        dict(
            sliding_window=6,
            final_logit_softcapping=5.0,
            attn_logit_softcapping=20.0,
            query_pre_attn_scalar=8,
        ),
    ),
    "gemma 3": ("Gemma3TextConfig", dict(sliding_window=6, query_pre_attn_scalar=8)),
    "cohere": ("CohereConfig", dict(logit_scale=0.25)),
    "granite": ("GraniteConfig", dict(logits_scaling=3.0)),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4)),
    "qwen2, experts": ("Qwen2MoeConfig", EXPERTS),
    "qwen3 next": ("Qwen3NextConfig", LINEAR | EXPERTS | dict(num_experts_per_tok=2)),
    "qwen3.5": ("Qwen3_5TextConfig", LINEAR),
    "lfm 2": (
        "Lfm2Config",
        dict(num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2),
    ),
    "granite, hybrid": (
        "GraniteMoeHybridConfig",
        MAMBA
        | dict(
            layer_types=["mamba", "attention"],
            mamba_d_head=16,
            num_local_experts=0,
            shared_intermediate_size=32,
        ),
    ),
    "mamba 2": ("Mamba2Config", dict(num_heads=8, state_size=8, n_groups=1)),
    "falcon h1": ("FalconH1Config", MAMBA | dict(mamba_d_ssm=32, mamba_d_head=8)),
}
HYBRIDS = ("qwen3 next", "qwen3.5", "lfm 2", "granite, hybrid", "mamba 2", "falcon h1")


def config_of(kind):
    name, options = KINDS[kind]
    if kind in HYBRIDS and not hasattr(gmts.transformers.cache_utils, "LinearAttentionLayer"):
        pytest.skip("this version of transformers has another cache for hybrids")
    if not hasattr(transformers, name):
        pytest.skip(f"this version of transformers has no {name}")
    return getattr(transformers, name), options


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_samples_and_learns_exactly(kind, tokenizer):
    """The sampler's statistics, and the shared prompt's gradient, are those of plain passes."""
    kind, options = config_of(kind)
    model = tiny_model(kind, scale=2, **options)
    batch = make_batch(model, tokenizer, samples=3, max_tokens=10)
    oracle = Categorical(logits=full_logits(model, batch)).log_prob(batch.tokens)
    assert torch.allclose(batch.logprobs[batch.mask], oracle[batch.mask], atol=1e-5)
    keep = gmts.select_top(batch.entropy, batch.mask, 0.3)
    plain_loss(model, batch, keep).backward()
    wanted = gradients(model)
    model.zero_grad()
    settings = config(micro_tokens=60)
    gmts.policy_gradient(model, batch, keep, keep.sum(), settings, batch.logprobs)
    assert torch.allclose(gradients(model), wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3, tied", "llama", "gemma", "qwen3.5"])
def test_every_kind_of_model_trains(kind, tiny, tmp_path, tokenizer):
    kind, options = config_of(kind)
    model = save_model(tmp_path / "model", tokenizer, kind, **options)
    rows = run_main(*tiny, "--out", tmp_path / "run", "--model", model)
    assert len(rows) == 3 and all(float(row["grad_norm"]) > 0 for row in rows[1:])


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<stop>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def test_chat_templates_and_end_tokens(tokenizer):
    model = tiny_model()
    assert gmts.render(tokenizer, "1+1=") == "1+1="
    assert gmts.end_tokens(model, tokenizer) == {0}
    model.generation_config.eos_token_id = [0, 5]
    assert gmts.end_tokens(model, tokenizer) == {0, 5}
    chatty = gmts.demo_tokenizer()
    chatty.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    chatty.chat_template = CHAT
    stop = chatty.convert_tokens_to_ids("<stop>")
    assert gmts.render(chatty, "1+1=") == "<user>1+1=<stop><a>"
    assert gmts.end_tokens(model, chatty) == {0, 5}  # no embedding: it can never be sampled
    model.resize_token_embeddings(20)
    assert gmts.end_tokens(model, chatty) == {0, 5, stop}

    # Special, though in no list of special tokens; and a template that wants the user last.
    unlisted = gmts.demo_tokenizer()
    unlisted.add_tokens([transformers.AddedToken("<stop>", special=True)])
    unlisted.chat_template = (
        "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
    )
    unlisted.chat_template += CHAT
    assert gmts.end_tokens(model, unlisted) == {0, 5, stop}


# ---- The models, files and habits people bring ---------------------------------------------------


def broken_model(folder, tokenizer, change, **options):
    """A saved model whose weights `change` has changed."""
    from safetensors.torch import load_file, save_file

    save_model(folder, tokenizer, tie_word_embeddings=False, **options)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_missing_and_broken_weights_are_refused(tiny, tmp_path, capsys, tokenizer):
    def refused(name, change):
        model = broken_model(tmp_path / name, tokenizer, change)
        return fails(capsys, *tiny, "--model", model, "--out", tmp_path / "run")

    assert "lm_head.weight" in refused("head", lambda weights: weights.pop("lm_head.weight"))
    layer = "model.layers.1.mlp.up_proj.weight"
    assert layer in refused("layer", lambda weights: weights.pop(layer))
    nan = refused("nan", lambda weights: weights[layer][0].fill_(math.nan))
    assert "not finite" in nan


def test_models_without_a_cache_or_with_another_attention_are_refused(
    tiny, tmp_path, capsys, tokenizer
):
    small = dict(vocab_size=16, eos_token_id=0, pad_token_id=0, bos_token_id=0)
    bert = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    gpt = dict(n_embd=32, n_layer=1, n_head=2, n_positions=64)
    t5 = dict(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    models = {
        "bert": transformers.BertLMHeadModel(transformers.BertConfig(**small | bert)),
        "gpt": transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**small | gpt)),
        "t5": transformers.T5ForConditionalGeneration(transformers.T5Config(**small | t5)),
    }
    for name, model in models.items():
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(10)  # else attention hardly matters
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        flags = [*tiny, "--model", tmp_path / name, "--out", tmp_path / "run"]
        assert str(tmp_path / name) in fails(capsys, *flags)


@pytest.mark.parametrize("kind", ["gemma 3", "qwen3.5"])
def test_multimodal_models_are_used_for_text(kind, tiny, tmp_path, tokenizer):
    """Settings of the text live in a config of their own."""
    _, options = config_of(kind)
    whole = {"gemma 3": "Gemma3Config", "qwen3.5": "Qwen3_5Config"}[kind]
    if not hasattr(transformers, whole):
        pytest.skip(f"this version of transformers has no {whole}")
    shape = dict(vocab_size=16, hidden_size=32, intermediate_size=64, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=128)
    shape |= dict(num_hidden_layers=2, eos_token_id=0, pad_token_id=0, bos_token_id=0)
    vision = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, image_size=28)
    vision |= dict(num_hidden_layers=1, depth=1, num_heads=2, out_hidden_size=32, patch_size=14)
    settings = getattr(transformers, whole)(text_config=shape | options, vision_config=vision)
    settings.eos_token_id = 0
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert gmts.context_length(model) == 128
    rows = run_main(*tiny, "--model", tmp_path / "model", "--out", tmp_path / "run")
    assert len(rows) == 3 and float(rows[2]["grad_norm"]) > 0


@pytest.mark.parametrize("kind", ["mixtral", "qwen2, experts"])
def test_router_logits_are_switched_off(kind, tiny, tmp_path, tokenizer):
    kind, options = config_of(kind)
    options = options | {"output_router_logits": True}
    model = save_model(tmp_path / "model", tokenizer, kind, **options)
    assert len(run_main(*tiny, "--model", model, "--out", tmp_path / "run")) == 3


def test_rescaled_rope_keeps_to_the_original_context(tiny, tmp_path, capsys, tokenizer):
    factors = [1.0] * 4
    rope = dict(rope_type="longrope", rope_theta=10_000.0, short_factor=factors)
    rope |= dict(long_factor=[4.0] * 4, original_max_position_embeddings=32)
    old = {"rope_scaling": {k: v for k, v in rope.items() if k[:3] in ("sho", "lon", "rop")}}
    try:
        settings = dict(rope_parameters=rope, original_max_position_embeddings=32)
        model = tiny_model(transformers.Phi3Config, **settings)
    except (TypeError, ValueError, KeyError):
        settings = old | dict(original_max_position_embeddings=32)
        model = tiny_model(transformers.Phi3Config, **settings)
    assert gmts.context_length(model) == 32
    assert gmts.context_length(tiny_model()) == 128


def test_tokens_that_the_model_does_not_have_are_refused(tiny, tmp_path, capsys, tokenizer):
    other = gmts.demo_tokenizer()
    other.add_tokens(["1+"])
    model = save_model(tmp_path / "model", other)
    data = write_lines(
        tmp_path / "data.jsonl", [{"question": f"1+{i}=", "answer": i} for i in range(60)]
    )
    flags = [*tiny, "--model", model, "--data", data, "--out", tmp_path / "run"]
    assert "has a token 16" in fails(capsys, *flags)


def test_folders_without_a_tokenizer_are_refused(tiny, tmp_path, capsys, tokenizer):
    tiny_model().save_pretrained(tmp_path / "model")
    flags = [*tiny, "--model", tmp_path / "model", "--out", tmp_path / "run"]
    said = fails(capsys, *flags)
    assert str(tmp_path / "model") in said or "token" in said


def test_chat_templates_are_given_arguments_and_their_errors_are_shown(
    tiny, tmp_path, capsys, tokenizer
):
    def with_template(name, template):
        chatty = gmts.demo_tokenizer()
        chatty.chat_template = template
        return [*tiny, "--model", save_model(tmp_path / name, chatty), "--out", tmp_path / "run"]

    raises = with_template("raises", "{{ raise_exception('only in French') }}")
    assert "only in French" in fails(capsys, *raises)
    assert "template" in fails(capsys, *with_template("broken", "{% for m in messages %}"))
    thinks = "{% for m in messages %}{{ m.content }}{% endfor %}"
    thinks += "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
    thinking = with_template("thinks", thinks)
    assert "--template" in fails(capsys, *thinking, "--template", "{")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "thinks")
    assert gmts.render(tokens, "1") == "1<think>"
    assert gmts.render(tokens, "1", template='{"enable_thinking": false}') == "1"
    rows = run_main(*thinking, "--template", '{"enable_thinking": false}')
    assert len(rows) == 3


LETTERS = {"A": "x", "B": "y"}
ASKED = "q\n(A) x\n(B) y"
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    "record, problem",
    [
        ({"prompt": MESSAGES, "reward_model": {"ground_truth": "7"}}, (MESSAGES, "7")),  # verl
        ({"prompt": MESSAGES, "ground_truth": 7}, (MESSAGES, "7")),
        ({"problem": "p", "label": 18}, ("p", "18")),
        ({"content": "p", "answer": "3", "choices": None}, ("p", "3")),
        ({"QUESTION": "q", "Answer": "1"}, ("q", "1")),
        ({"question": "q", "options": ["x", "y"], "answer": "B"}, (ASKED, "B")),
        ({"question": "q", "choices": ["x", "y"], "answer": 1}, (ASKED, "B")),  # MMLU
        ({"question": "q", "options": LETTERS, "answer": "y"}, (ASKED, "B")),  # MedQA
        ({"question": "q", "options": LETTERS, "correct": "A"}, (ASKED, "A")),
        ({"question": "q", "choices": CHOICES, "label": "B"}, (ASKED, "B")),
        (
            {"question": "q", "choices": {"label": ["1", "2"], "text": ["x", "y"]}, "answerKey": 2},
            ("q\n(1) x\n(2) y", "2"),  # ARC
        ),
    ],
)
def test_records_in_the_shapes_people_have(record, problem):
    assert gmts.read_record(record) == problem


@pytest.mark.parametrize(
    "record, words",
    [
        ({"question": "q", "answer": math.nan}, "no answer"),
        ({"question": "q", "answer": None}, "no answer"),
        ({"question": "q", "answer": "  "}, "no answer"),
        ({"question": "q", "solution": "It is clear that x is 3."}, "solution"),
        ({"question": "q", "reward_model": {"style": "rule"}}, "no answer"),
        ({"prompt": [], "answer": 1}, "no question"),
    ],
)
def test_records_that_are_refused(tiny, tmp_path, capsys, record, words):
    path = write_lines(tmp_path / "data.jsonl", [{"question": "q", "answer": 1}, record])
    said = fails(capsys, *tiny, "--data", path, "--out", tmp_path / "run")
    assert words in said and "line 2" in said


@pytest.mark.parametrize(
    "answer, letter",
    [(2, "C"), ("2", "B"), ("0", "A"), ("3", "C"), ("B", "B"), (3, "D"), ("7", "D")],
)
def test_an_index_a_text_or_a_letter_is_told_apart(answer, letter):
    """A number counts the options from 0; a text is first a letter, then an option's text."""
    record = {"question": "q", "choices": ["1", 2, "3", "7"], "answer": answer}
    assert gmts.read_record(record)[1] == letter


def test_options_without_the_answer_are_refused(tiny, tmp_path, capsys):
    record = {"question": "q", "options": ["x", "y"], "answer": "C"}
    path = write_lines(tmp_path / "data.jsonl", [record])
    assert "line 1" in fails(capsys, *tiny, "--data", path, "--out", tmp_path / "run")


def test_messages_are_asked_as_they_are(tiny, tmp_path, tokenizer):
    chatty = gmts.demo_tokenizer()
    chatty.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    chatty.chat_template = CHAT
    assert gmts.render(chatty, MESSAGES, "not {question}") == "<system>s<stop><user>q<stop><a>"
    records = [
        {"prompt": [{"role": "user", "content": f"{i}+1="}], "ground_truth": i} for i in range(60)
    ]
    path = write_lines(tmp_path / "data.jsonl", records)
    assert len(run_main(*tiny, "--data", path, "--out", tmp_path / "run")) == 3


@pytest.mark.parametrize("name", ["data.parquet", "data.csv", "data.jsonl.gz"])
def test_other_formats_are_refused_with_a_line_that_converts(tiny, tmp_path, capsys, name):
    (tmp_path / name).write_bytes(b"PAR1")
    said = fails(capsys, *tiny, "--data", tmp_path / name, "--out", tmp_path / "run")
    assert ".jsonl" in said and "pandas.read_" in said and "to_json" in said


def test_the_same_data_twice_is_said(tiny, tmp_path, capsys):
    said = fails(capsys, *tiny, "--eval-data", tiny[3], "--out", tmp_path / "run")
    assert "--eval-data is the same as --data" in said


def test_rewards_may_import_and_use_processes(tiny, tmp_path):
    (tmp_path / "helper_of_reward.py").write_text("LENGTHS = 3\n")
    (tmp_path / "pooled_reward.py").write_text(
        "import multiprocessing\n"
        "from helper_of_reward import LENGTHS\n"
        "def modulo(n):\n    return n % LENGTHS\n"
        "def f(completion, answer):\n"
        "    with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "        return pool.map(modulo, [len(completion)])[0]\n"
    )
    reward = f"{tmp_path / 'pooled_reward.py'}:f"
    flags = [*tiny, "--reward", reward, "--steps", 1, "--eval-size", 1, "--prompts", 1]
    rows = run_main(*flags, "--out", tmp_path / "run")
    assert len(rows) == 2


def test_a_reward_without_its_function_says_what_is_missing(tiny, tmp_path, capsys):
    (tmp_path / "reward.py").write_text("def f(completion, answer):\n    return 1\n")
    flags = [*tiny, "--out", tmp_path / "run", "--reward", tmp_path / "reward.py"]
    assert "FILE.py:FUNCTION" in fails(capsys, *flags)


def test_a_long_question_pads_no_others(tokenizer, monkeypatch):
    shapes, sample = [], gmts.sample

    def recorded(model, ids, *rest):
        shapes.append(tuple(ids.shape))
        return sample(model, ids, *rest)

    monkeypatch.setattr(gmts, "sample", recorded)
    run = make_run(tiny_model(), tokenizer, max_tokens=8)
    rng = random.Random(0)
    problems = [([rng.randrange(3, 16) for _ in range(n)], str(n)) for n in (5, 90, 3, 8, 100, 6)]
    asked = []
    run.reward = lambda text, answer: asked.append(answer) or 0
    batch = gmts.rollout(run, problems, 2, 1.0)
    assert shapes == [(4, 8), (2, 100)]
    assert asked == [n for n in ("3", "5", "6", "8", "90", "100") for _ in range(2)]
    logits = full_logits(run.model, batch)
    oracle = Categorical(logits=logits).log_prob(batch.tokens)
    assert torch.allclose(batch.logprobs[batch.mask], oracle[batch.mask], atol=1e-4)
    gradient = gmts.score_tokens(run.model, batch, batch.mask, run.config)[0]
    assert torch.allclose(gradient[batch.mask], oracle[batch.mask], atol=1e-4)


def test_runs_share_no_folder(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []
    for pid in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        settings = gmts.parse([str(flag) for flag in tiny])
        gmts.open_folder(settings)
        names.append(settings.out)
    assert len(set(names)) == 2 and all(
        (tmp_path / name / "config.json").exists() for name in names
    )


def test_a_folder_in_use_is_refused_and_one_of_a_dead_run_is_not(tiny, tmp_path, capsys):
    out = tmp_path / "run"
    process = start(*tiny, "--steps", 4000, "--eval-every", 0, "--out", out, "--save-every", 4000)
    wait_for_step(process, 1)
    said = fails(capsys, *tiny, "--out", out)
    assert str(out) in said
    process.kill()
    process.wait()
    assert len(run_main(*tiny, "--out", out)) == 3


def test_resume_accepts_what_does_not_change_the_figures(tiny, tmp_path, capsys):
    out = tmp_path / "run"
    run_main(*tiny, "--out", out, "--steps", 2)
    changed = ["--micro-tokens", 64, "--save-every", 1, "--eval-every", 1, "--log-every", 2]
    rows = run_main("--resume", *changed, "--show", "--steps", 4, "--out", out)
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4"]
    for flags in (["--steps", 3], ["--lr", 1], ["--samples", 9]):
        said = fails(capsys, "--resume", "--out", out, *flags)
        assert flags[0] in said and "the run to resume has" in said
    kept = (out / "config.json").read_text()
    (out / "config.json").write_text(kept.replace('"samples"', '"examples"'))
    assert "examples" in fails(capsys, "--resume", "--out", out)
    (out / "config.json").write_text(kept)
    data = Path(json.loads(kept)["data"])
    lines = data.read_text()
    try:
        data.write_text(lines.replace("=", "+1=", 1))
        assert "other data" in fails(capsys, "--resume", "--out", out)
    finally:
        data.write_text(lines)


def test_a_full_disk_leaves_the_older_checkpoint(tiny, tmp_path, capsys, monkeypatch):
    out, save = tmp_path / "run", torch.save

    def full(state, path):
        if state["step"] == 2:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(state, path)

    monkeypatch.setattr(torch, "save", full)
    said = fails(capsys, *tiny, "--save-every", 1, "--out", out)
    assert "No space left" in said
    assert [path.name for path in out.glob("step-*")] == ["step-000001"]
    monkeypatch.setattr(torch, "save", save)
    assert len(run_main("--resume", "--out", out)) == 3


def test_large_seeds_are_refused(capsys):
    assert "--seed" in fails(capsys, "--seed", 2**32)


def test_a_closed_pipe_ends_quietly(tiny, tmp_path):
    command = [sys.executable, str(HERE / "gmts.py"), *map(str, tiny), "--steps", "400"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "run"), "--eval-every", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.wait(timeout=60)


# ---- The README's recipes, each block found by its first line and run as it stands there ---------


def recipe(name, run_name="recipe"):
    """Runs the code block of README.md whose first line is `# recipe: NAME` -> what it defines."""
    text = (HERE / "README.md").read_text()
    (block,) = re.findall(
        rf"^```python\n(# recipe: {re.escape(name)}\n.*?)^```$", text, re.M | re.S
    )
    assert max(map(len, block.split("\n"))) <= 110, name
    names = {"__name__": run_name, "BLOCK": block}
    exec(compile(block, f"README.md: {name}", "exec"), names)
    return names


def oracle_loss(logits, tokens, mask, advantages, informative, fraction=0.2, temperature=1.0):
    """The mean of -A log pi over the kept tokens, one by one -> loss, kept tokens (row, column).

    On policy its gradient is that of the clipped objective, which has the ratio, 1, for log pi.
    """
    policy = Categorical(logits=logits / temperature)
    score = policy.entropy() * advantages.abs()[:, None]
    ranked = mask & informative[:, None]
    keep = brute_force_top(score.flatten().tolist(), ranked.flatten().tolist(), fraction)
    kept = torch.tensor(keep).view_as(mask).nonzero().tolist()
    logprob = policy.log_prob(tokens)
    return sum([-advantages[n] * logprob[n, t] for n, t in kept]) / max(1, len(kept)), kept


def test_arithmetic_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = recipe("arithmetic.py", "__main__")
    train, test = (gmts.load_problems(f"arithmetic-{name}.jsonl") for name in ("train", "test"))
    assert len(train) == 2700 and len(test) == 300 and not set(train) & set(test)
    assert train[:2] == [("What is 98 - 6?", "92"), ("What is 52 - 62?", "-10")]
    score = names["score"]
    assert score("98 - 6 = 92.", "92") == 1 == score("It is 1,200", "1200")
    assert score("92 is 98 - 6", "92") == 0 == score("", "92") == score("twelve", "12")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_plain_recipe_equals_the_sum_over_kept_tokens(temperature):
    torch.manual_seed(0)
    logits = (3 * torch.randn(12, 9, 17)).requires_grad_()
    tokens = torch.randint(17, (12, 9))
    mask = torch.arange(9) < torch.randint(1, 10, (12, 1))
    rewards = torch.tensor([[0.1] * 4, [1, 0, 0, 0.0], [0, 0.5, 1, 0.7]])
    gmts_loss = recipe("plain PyTorch")["gmts_loss"]
    std = rewards.std(1, keepdim=True, correction=0)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / std
    informative = torch.arange(12) >= 4
    advantages = torch.where(informative, advantages.flatten(), 0.0)
    loss = gmts_loss(logits, tokens, mask, advantages[:, None], temperature)
    expected, kept = oracle_loss(
        logits, tokens, mask, advantages, informative, temperature=temperature
    )
    assert len(kept) == -(-mask[4:].sum().item() // 5)
    mean = sum(advantages[n].item() for n, _ in kept) / len(kept)
    assert loss.item() == pytest.approx(-mean, abs=1e-5)
    gradient, other = (torch.autograd.grad(x, logits)[0] for x in (loss, expected))
    assert torch.allclose(gradient, other, atol=1e-6) and gradient.abs().sum() > 0
    nothing = gmts_loss(logits, tokens, mask, torch.zeros(12, 1), temperature)
    assert nothing.item() == 0 and not torch.autograd.grad(nothing, logits)[0].any()


def rank_correlation(x, y):
    """Spearman's, with the mean rank for equal values, in plain Python."""

    def ranks(values):
        return [sum(v < u for v in values) + (values.count(u) + 1) / 2 for u in values]

    return np.corrcoef(ranks(list(x)), ranks(list(y)))[0, 1]


def test_audit_recipe(tokenizer, monkeypatch):
    """Every figure from scratch: a full forward and backward pass for each audited token."""
    model, audited = tiny_model(scale=4), []
    run = make_run(model, tokenizer, prompts=3, samples=8, max_tokens=12, temperature=0.8)
    run.problems = [(ids, "1") for ids in tokenizer(PROMPTS).input_ids]
    run.reward = lambda text, answer: float(text.count("1"))
    original = gmts.policy_gradient

    def recorded(model, batch, keep, *rest):
        audited.append((batch, keep.clone()))
        return original(model, batch, keep, *rest)

    monkeypatch.setattr(gmts, "policy_gradient", recorded)
    before = [p.clone() for p in model.parameters()]
    torch.manual_seed(0)
    found = recipe("audit.py")["audit"](run, 60)
    batch, table = audited[0][0], []
    every = full_logits(model, batch)
    for _, keep in audited:
        ((row, column),) = keep.nonzero().tolist()
        logits = every[row, column]
        policy, a = Categorical(logits=logits / 0.8), batch.advantages[row, 0]
        logprob = policy.log_prob(batch.tokens[row, column])
        parameters = list(model.parameters())
        whole = torch.autograd.grad(a * logprob, parameters, retain_graph=True, allow_unused=True)
        (last,) = torch.autograd.grad(a * logprob, logits, retain_graph=True)
        norm = sum(g.square().sum() for g in whole if g is not None).sqrt()
        entropy = policy.entropy()
        values = norm, entropy * a.abs(), entropy, last.norm()
        table.append([value.item() for value in values] + [row])
    true, *scores, rows = (list(column) for column in zip(*table, strict=True))
    assert len(true) == 60 and len(set(rows)) >= 6
    assert set(found) == {"gmts", "entropy", "exact", "random"}
    for name, score in zip(("gmts", "entropy", "exact"), scores, strict=True):
        correlation, mass = found[name]
        assert correlation == pytest.approx(rank_correlation(score, true), abs=2e-3)
        best = sorted(range(60), key=lambda i: -score[i])[:12]
        wanted = sum(true[i] for i in best) / sum(sorted(true)[-12:])
        assert mass == pytest.approx(wanted, abs=2e-3)
    for ours, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(ours, old) and ours.grad is None


TEMPERATURE = 0.7


def trl_trainer(folder, tokenizer, Trainer, signal, beta, **settings):
    """A trainer of two steps of two micro-batches of one group each."""
    from datasets import Dataset
    from trl import GRPOConfig

    rewards = {
        "most": [1.0, 0, 0, 1, 0, 0, 1, 0],
        "little": [0.0, 1, 0, 0] + [0.1] * 4,
        "none": [0.1] * 8,
    }
    place = int(os.environ.get("RANK", "0")) * 4

    def reward(completions, **_):
        return rewards[signal][place : place + len(completions)]

    words = copy.deepcopy(tokenizer)
    words.pad_token = words.eos_token
    settings = GRPOConfig(
        output_dir=str(folder / "out"),
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        use_cpu=True,
        per_device_train_batch_size=4,
        num_generations=4,
        max_steps=2,
        seed=3,
        max_completion_length=24,
        learning_rate=1e-2,
        temperature=TEMPERATURE,
        beta=beta,
        max_grad_norm=0.0,
        use_bias_correction_kl=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    prompts = Dataset.from_list([{"prompt": p} for p in ("1+2=", "348+214=", "99+1=", "7=")])
    return Trainer(str(folder / "model"), reward, settings, prompts, processing_class=words)


def trl_logits(model, batch):
    """Logits (N, T, V) of TRL's batch, each answer alone and without padding."""
    rows = []
    for row in range(len(batch["completion_ids"])):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        ids = torch.cat([prompt, batch["completion_ids"][row]])[None]
        rows.append(model(input_ids=ids).logits[0, len(prompt) - 1 : -1])
    return torch.stack(rows)


def trl_oracle(batch, model, initial, beta):
    """-> the tokens to keep, and the gradient of a step on them by full logits."""
    tokens, mask, advantages = batch["completion_ids"], batch["completion_mask"].bool(), 0
    advantages = batch["advantages"][:, None]
    policy = Categorical(logits=trl_logits(model, batch) / TEMPERATURE)
    reference = Categorical(logits=trl_logits(initial, batch) / TEMPERATURE)
    logprob = policy.log_prob(tokens)
    omega = (reference.log_prob(tokens) - logprob).exp().detach() - 1
    omega = advantages + beta * omega
    informative = advantages.view(-1, 4).ne(0).any(1).repeat_interleave(4)[:, None]
    ranked = mask & informative
    scores = policy.entropy().detach() * omega.abs()
    keep = brute_force_top(scores.flatten().tolist(), ranked.flatten().tolist(), 0.2)
    keep = torch.tensor(keep).view_as(mask)
    loss = -(logprob * omega * keep).sum() / keep.sum().clamp_min(1)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    return ranked, keep, torch.cat([g.flatten() for g in gradient])


@pytest.mark.parametrize(
    "signal, beta", [("most", 0.0), ("little", 0.0), ("none", 0.0), ("most", 0.3)]
)
def test_trl_recipe(tokenizer, tmp_path, signal, beta):
    """Kept tokens, denominator and gradient, against full logits."""
    pytest.importorskip("trl")
    Trainer, checked, initial = recipe("TRL 1.16")["GMTSTrainer"], [], tiny_model(seed=1)
    initial.save_pretrained(tmp_path / "model")

    class Checked(Trainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            ranked, keep, gradient = trl_oracle(batch, self.model, initial, beta)
            assert torch.equal(batch["tool_mask"].bool(), keep)
            assert batch["num_items_in_batch"] == keep.sum()
            assert ranked.any() == (signal != "none")
            mask = batch["completion_mask"].bool()
            assert mask[~ranked].any() == (signal != "most") and not mask.all()
            checked.append(gradient)
            return batch

    class Compare(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            gradient, wanted = gradients(trainer.model), checked[-1]
            assert torch.allclose(gradient, wanted, atol=1e-5 + 1e-4 * wanted.abs().max())
            checked.append("compared")

    trainer = trl_trainer(tmp_path, tokenizer, Checked, signal, beta, gradient_accumulation_steps=2)
    trainer.add_callback(Compare())
    trainer.train()
    assert [x for x in checked if isinstance(x, str)] == ["compared"] * 2
    pairs = zip(trainer.model.parameters(), initial.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs) == (signal != "none")


def trl_process(rank, folder, port, signal):
    """One of two processes: keeps its share of the first batch, and the gradient of the step."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    Trainer, kept = recipe("TRL 1.16")["GMTSTrainer"], {}

    class Recorded(Trainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            kept.setdefault("batch", {k: v for k, v in batch.items() if torch.is_tensor(v)})
            return batch

    class Compare(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            kept.setdefault("gradient", gradients(trainer.model).clone())

    trainer = trl_trainer(folder, gmts.demo_tokenizer(), Recorded, signal, 0.0)
    trainer.add_callback(Compare())
    trainer.train()
    torch.save(kept, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("signal", ["most", "little"])
def test_trl_recipe_on_two_processes(tokenizer, tmp_path, signal):
    """Selection, denominator and gradient are those of both processes' answers together."""
    pytest.importorskip("trl")
    with contextlib.closing(__import__("socket").socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    initial = tiny_model(seed=1)
    initial.save_pretrained(tmp_path / "model")
    torch.multiprocessing.spawn(trl_process, (tmp_path, port, signal), nprocs=2)
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    ranked, keeps, gradient = [], [], 0
    entropy, omega = [], []
    for part in parts:
        batch = part["batch"]
        policy = Categorical(logits=trl_logits(initial, batch) / TEMPERATURE)
        entropy.append(policy.entropy().detach())
        omega.append(batch["advantages"][:, None].expand_as(entropy[-1]))
        informative = bool(batch["advantages"].ne(0).any())  # a group on each process
        ranked.append(batch["completion_mask"].bool() & informative)
        keeps.append(batch["tool_mask"].bool())
    scores = torch.cat([(h * w.abs()).flatten() for h, w in zip(entropy, omega, strict=True)])
    candidates = torch.cat([mask.flatten() for mask in ranked])
    wanted = brute_force_top(scores.tolist(), candidates.tolist(), 0.2)
    assert torch.cat([keep.flatten() for keep in keeps]).tolist() == wanted
    for part, keep, weight in zip(parts, keeps, omega, strict=True):
        assert part["batch"]["num_items_in_batch"] == sum(wanted)
        policy = Categorical(logits=trl_logits(initial, part["batch"]) / TEMPERATURE)
        logprob = policy.log_prob(part["batch"]["completion_ids"])
        loss = -(logprob * weight * keep).sum() / sum(wanted)
        grads = torch.autograd.grad(loss, list(initial.parameters()))
        gradient = gradient + torch.cat([g.flatten() for g in grads])
    for part in parts:
        limit = 1e-5 + 1e-4 * gradient.abs().max()
        assert torch.allclose(part["gradient"], gradient, atol=limit)


def verl_batch(seed=0, ratio=0.0):
    torch.manual_seed(seed)
    mask = torch.arange(10) < torch.tensor([[10], [3], [7], [1], [10], [5]])
    old = -torch.rand(6, 10)
    logprob = (old + ratio * torch.randn(6, 10)).requires_grad_()
    advantages = torch.tensor([1.0, -1, 0, 0, 2, -0.5])[:, None].expand(6, 10)
    return mask, old, logprob, advantages, torch.rand(6, 10, requires_grad=True)


def verl_oracle(mask, old, logprob, advantages, entropy, tokens, clip=(0.2, 0.28)):
    """What the loss and its gradient must be, a token at a time."""
    ratio, inside = (logprob - old).exp().detach(), []
    for n, t in mask.nonzero().tolist():
        r, a = ratio[n, t].item(), advantages[n, t].item()
        live = not (a > 0 and r > 1 + clip[1] or a < 0 and r < 1 - clip[0])
        inside.append((entropy[n, t].item() * abs(r * a) * live, n, t, r * a * live))
    ranked = [x for x in inside if advantages[x[1], x[2]] != 0]
    best = sorted(ranked, key=lambda x: (-x[0], x[1], x[2]))[: -(-len(ranked) // 5)]
    gradient = torch.zeros_like(old)
    for _, n, t, weight in best:
        gradient[n, t] = -weight / (0.2 * tokens)
    return gradient, len(best) / len(ranked)


def stub_verl(monkeypatch):
    """verl's registry and nothing else of verl: the decorator as verl/trainer/ppo/core_algos.py has it."""
    registry = {}
    stub = types.ModuleType("verl.trainer.ppo.core_algos")
    stub.register_policy_loss = lambda name: lambda function: registry.setdefault(name, function)
    for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    recipe("verl 0.9")
    return registry["gmts"]


@pytest.mark.parametrize("ratio", [0.0, 0.4])
def test_verl_recipe_with_a_stub(monkeypatch, ratio):
    gmts_loss, batch = stub_verl(monkeypatch), verl_batch(ratio=ratio)
    mask, old, logprob, advantages, _ = batch

    def ppo_loss(config, entropy, weights=None):  # calls as verl/workers/utils/losses.py does
        return gmts_loss(
            old_log_prob=old,
            log_prob=logprob,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode="token-mean",
            config=config,
            rollout_is_weights=weights,
        )

    config = types.SimpleNamespace(clip_ratio_low=0.2, clip_ratio_high=0.28, global_batch_info={})
    loss, figures = ppo_loss(config, batch[4])
    expected, share = verl_oracle(*batch, tokens=36)
    (gradient,) = torch.autograd.grad(loss, logprob)
    assert torch.allclose(gradient, expected, atol=1e-6)
    assert figures == {"actor/gmts_kept": pytest.approx(share)}
    config.global_batch_info = dict(dp_size=2, batch_num_tokens=200, global_batch_size=40)
    (gradient,) = torch.autograd.grad(ppo_loss(config, batch[4])[0], logprob)
    assert torch.allclose(gradient, expected * 36 / 100, atol=1e-6)
    (doubled,) = torch.autograd.grad(
        ppo_loss(config, batch[4], 2 * torch.ones_like(old))[0], logprob
    )
    assert torch.allclose(doubled, 2 * gradient, atol=1e-6)
    with pytest.raises(ValueError, match="calculate_entropy"):
        ppo_loss(config, None)
    advantages = advantages * 0  # no signal: it can go backward and moves nothing
    assert not torch.autograd.grad(ppo_loss(config, batch[4])[0], logprob)[0].any()


def test_verl_recipe_in_verl():
    """verl's own ppo_loss, which unpacks what its engines hand it, calls the recipe."""
    pytest.importorskip("verl")
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    recipe("verl 0.9")
    mask, old, logprob, advantages, entropy = batch = verl_batch(ratio=0.4)
    lengths, prompts = mask.sum(1).tolist(), [2, 3, 1, 4, 2, 2]

    def jagged(rows):
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def per_answer(x):
        return jagged([row[:n] for row, n in zip(x, lengths)])

    def whole(x):  # an engine's output: prompts included, each value one place early
        rows = [F.pad(row[:n], (p - 1, 1)) for p, row, n in zip(prompts, x, lengths)]
        ends = torch.tensor([0] + [len(row) for row in rows]).cumsum(0)
        return torch.nested.nested_tensor_from_jagged(torch.cat(rows), ends)

    data = TensorDict(
        dict(
            prompts=jagged([torch.zeros(p) for p in prompts]),
            responses=per_answer(old),
            response_mask=per_answer(mask.long()),
            advantages=per_answer(advantages),
            old_log_probs=per_answer(old),
        ),
        batch_size=[6],
    )
    tu.assign_non_tensor(data, dp_size=2, batch_num_tokens=100, global_batch_size=12)
    config = FSDPActorConfig(rollout_n=2, ppo_micro_batch_size_per_gpu=6, clip_ratio_high=0.28)
    object.__setattr__(config.policy_loss, "loss_mode", "gmts")
    loss, metrics = ppo_loss(config, {"log_probs": whole(logprob), "entropy": whole(entropy)}, data)
    expected, share = verl_oracle(*batch, tokens=50)
    assert torch.allclose(torch.autograd.grad(loss, logprob)[0], expected, atol=1e-6)
    assert metrics["actor/gmts_kept"].aggregate() == pytest.approx(share)
    with pytest.raises(ValueError, match="calculate_entropy"):
        ppo_loss(config, {"log_probs": whole(logprob)}, data)


ADD = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
PROGRAMS = {
    "right": (ADD, 1.0),
    "the last block": (
        f"```python\ndef add(a, b): return 0\n```\nNo:\n```python\n{ADD}```\nDone.",
        1.0,
    ),
    "cut off behind the code": (f"```python\n{ADD}", 1.0),
    "wrong": ("def add(a, b):\n    return a - b", 0.0),
    "prose": ("The answer is add.", 0.0),
    "endless": ("while True: pass", 0.0),
    "asleep": ("import time\ntime.sleep(60)", 0.0),
    "exits": (f"{ADD}\nimport os\nos._exit(0)", 0.0),
    "exits in a test": ("def add(a, b):\n    raise SystemExit", 0.0),
    "claims": ("print('ok', 1.0, True)\ndef add(a, b): return 5", 0.0),
    "hungry": ("x = []\nwhile True: x.append(bytearray(10**7))", 0.0),
    "floods": ("while True: print('x' * 10**6)", 0.0),
    "lone surrogate": (ADD + "\udc80", 0.0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_code_reward(name):
    names = recipe("reward_code.py")
    program, wanted = PROGRAMS[name]
    names["SECONDS"] = 10 if wanted else 1
    begin = time.perf_counter()
    assert names["score"](program, TESTS) == wanted
    assert time.perf_counter() - begin < 15


def test_code_reward_in_a_run(tiny, tmp_path):
    """Whatever compiles is right here: some of a random model's digits and plus signs do."""
    (tmp_path / "reward_code.py").write_text(recipe("reward_code.py")["BLOCK"])
    records = [{"question": f"{i}+1=", "answer": "assert True\nassert 1"} for i in range(60)]
    path = write_lines(tmp_path / "data.jsonl", records)
    flags = [*tiny, "--data", path, "--max-tokens", 3, "--steps", 1, "--eval-size", 3]
    reward = f"{tmp_path / 'reward_code.py'}:score"
    rows = run_main(*flags, "--reward", reward, "--out", tmp_path / "run")
    assert 0 < float(rows[1]["reward"]) < 1 and float(rows[1]["kept"]) > 0


def test_scope_recipe(tokenizer, monkeypatch):
    """Each question keeps its own fifth; and the gradient is divided by all informative tokens."""
    names, kept = recipe("scope.py"), []
    model, twin = tiny_model(scale=3), tiny_model(scale=3)
    advantages = torch.randn(16)
    batch = make_batch(model, tokenizer, advantages=advantages)
    batch.rewards = torch.randn(4, 4)
    batch.rewards[1], batch.advantages[4:8] = 1.0, 0.0
    original = gmts.policy_gradient

    def recorded(model, batch, keep, *rest):
        kept.append(keep)
        return original(model, batch, keep, *rest)

    monkeypatch.setattr(gmts, "policy_gradient", recorded)
    monkeypatch.setattr(gmts, "select_top", gmts.select_top)  # put back what the recipe replaces
    names["learn_by_question"](make_run(model, tokenizer), batch)
    scores = batch.entropy * batch.advantages.abs()
    for rows in torch.arange(16).split(4):
        mask = batch.mask[rows] & (batch.advantages[rows] != 0)
        wanted = brute_force_top(scores[rows].flatten().tolist(), mask.flatten().tolist(), 0.2)
        assert kept[0][rows].flatten().tolist() == wanted

    keep, settings = kept[0], config()
    original(twin, batch, keep, keep.sum(), settings, batch.logprobs)
    gradient = gradients(twin)
    twin.zero_grad()
    names["gradient_over_all_tokens"](twin, batch, keep, keep.sum(), settings, batch.logprobs)
    informative = batch.mask & (batch.advantages != 0)
    factor = keep.sum() / informative.sum()
    assert torch.allclose(gradients(twin), gradient * factor, atol=1e-6)


def test_careless_recipe(monkeypatch):
    """The pupil forgets nearly every carry: most answers are wrong, but not all."""
    for name in ("FORGETS", "SLIPS"):
        monkeypatch.setattr(gmts, name, getattr(gmts, name))  # put back what the recipe sets
    recipe("careless.py")
    rng = random.Random(0)
    sums = gmts.demo_problems(2000)
    right = [gmts.careless_pupil(q, rng).endswith(f"####{answer}") for q, answer in sums]
    assert 0.12 < np.mean(right) < 0.25


STAND_IN = """
import csv, json, random, sys
from pathlib import Path
flags = sys.argv[1:]
out = Path(flags[flags.index("--out") + 1])
(out / "step-000003").mkdir(parents=True, exist_ok=True)
(out / "step-000003" / "trainer.pt").touch()
with open(out / "flags", "a") as file:
    file.write(json.dumps(flags) + "\\n")
columns = "accuracy reward entropy grad_norm seconds".split()
rows = [{"step": step} | {name: random.random() for name in columns} for step in range(4)]
rows[2]["accuracy"] = ""
if "--resume" not in flags:
    with open(out / "metrics.csv", "w") as file:
        writer = csv.DictWriter(file, ["step", *columns])
        writer.writeheader()
        writer.writerows(rows)
"""


def test_run_math_trains_once_and_prints_the_tables(tmp_path):
    """With a script that makes figures up instead of gmts.py; the tables again, by numpy."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    settings = dict(SEEDS="0 1", SELECTORS="entropy gmts", OUT=str(tmp_path), PYTHON=sys.executable)
    settings["SCRIPT"] = str(tmp_path / "stand_in.py")
    command = ["bash", str(HERE / "run_math.sh"), "some/model", "--prompt", "{question} {answer}"]
    for passes in (1, 2):  # the second time nothing is left to train
        done = subprocess.run(
            command, env=os.environ | settings, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.split("\n") if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        accuracy = {}
        for select in ("entropy", "gmts"):
            runs = [metrics(tmp_path / f"{select}-{seed}") for seed in (0, 1)]
            accuracy[select] = np.array([[float(r["accuracy"] or "nan") for r in x] for x in runs])
            sampled = [np.mean([float(r["reward"]) for r in run[1:]]) for run in runs]
            columns = np.array([*accuracy[select].T[[0, 3]], sampled])
            mean, std = columns.mean(1), columns.std(1, ddof=1)
            (row,) = [row for row in cells if row[0] == select]
            assert row[1:4] == [f"{m:.3f}±{s:.3f}" for m, s in zip(mean, std, strict=True)]
            for seed in (0, 1):
                out = tmp_path / f"{select}-{seed}"
                calls = [json.loads(line) for line in (out / "flags").read_text().split("\n")[:-1]]
                assert len(calls) == passes
                config = gmts.parse(calls[0])
                assert (config.data, config.prompt) == ("math", "{question} {answer}")
                assert (config.select, config.seed, config.out) == (select, seed, str(out))
                assert all(call == [*calls[0], "--resume"] for call in calls[1:])
        gap = (accuracy["gmts"] - accuracy["entropy"])[:, [1, 3]]
        mean, error = gap.mean(0), gap.std(0, ddof=1) / 2**0.5
        wanted = [f"{m:+.3f}±{e:.3f}" for m, e in zip(mean, error, strict=True)]
        assert cells[-3] == ["difference", "step 1", "step 3"]
        assert cells[-1] == ["gmts - entropy", *wanted]


def test_the_reading_map_is_true():
    source = (HERE / "gmts.py").read_text().split("\n")
    starts = [(i, line) for i, line in enumerate(source, 1) if re.match(r"# ---- \d ", line)]
    ends = [line - 1 for line, _ in starts[1:]] + [len(source) - 1]
    readme = (HERE / "README.md").read_text()
    for (line, title), end in zip(starts, ends, strict=True):
        name = re.match(r"# ---- (\d [^:-]*)", title)[1].strip()
        assert f"|{name}|{line}-{end}|" in readme


# ---- On a GPU: these run where there is one ------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(scope="module")
def gpu_model():
    """A random model of the shape of Qwen2.5-0.5B."""
    torch.manual_seed(0)
    shape = dict(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    return AutoModelForCausalLM.from_config(Qwen2Config(**shape)).cuda().eval()


def gpu_rollout(model, tokenizer, max_tokens=32, **changes):
    """Four prompts of uneven length, eight answers each, of which no one ends by itself."""
    settings = dict(dtype="bfloat16", max_tokens=max_tokens, micro_tokens=2048) | changes
    run = make_run(model, tokenizer, **settings)
    run.stop_ids, run.reward = {-1}, lambda text, answer: float(random.random() < 0.5)
    rng = random.Random(0)
    problems = [([rng.randrange(1, 150_000) for _ in range(n)], "") for n in (9, 17, 40, 64)]
    return run, gmts.rollout(run, problems, 8, 1.0)


@gpu
def test_gpu_sampler_agrees_with_full_forwards(gpu_model, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "batch_decode", lambda ids, **_: [""] * len(ids))
    _, batch = gpu_rollout(gpu_model, tokenizer)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        same = Categorical(logits=full_logits(gpu_model, batch).float())
    with torch.no_grad():
        exact = Categorical(logits=full_logits(gpu_model, batch).float())
    rounding = (same.log_prob(batch.tokens) - exact.log_prob(batch.tokens)).abs().mean()
    ours = (batch.logprobs - exact.log_prob(batch.tokens)).abs().mean()
    print(f"\nmean error of a log-probability: {ours:.1e}; of a full bfloat16 pass {rounding:.1e}")
    assert ours < 3 * rounding + 1e-4
    assert torch.allclose(batch.entropy, exact.entropy(), rtol=0.01)


@gpu
def test_gpu_kept_only_gradient_equals_full_logits(gpu_model, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "batch_decode", lambda ids, **_: [""] * len(ids))
    for dtype, tolerance in (("float32", 1e-3), ("bfloat16", 3e-2)):
        run, batch = gpu_rollout(gpu_model, tokenizer, max_tokens=16, dtype=dtype)
        keep = gmts.select_top(batch.entropy * batch.advantages.abs(), batch.mask, 0.2)
        gpu_model.zero_grad()
        plain_loss(gpu_model, batch, keep).backward()  # in float32
        wanted = gradients(gpu_model)
        gpu_model.zero_grad()
        gmts.policy_gradient(gpu_model, batch, keep, keep.sum(), run.config, batch.logprobs)
        error = (gradients(gpu_model) - wanted).norm() / wanted.norm()
        print(f"\nrelative error of the gradient, {dtype}: {error:.1e}")
        assert error < tolerance
    gpu_model.zero_grad()


@gpu
def test_gpu_steps_on_one_batch_lower_its_loss(gpu_model, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "batch_decode", lambda ids, **_: [""] * len(ids))
    model = copy.deepcopy(gpu_model)
    run, batch = gpu_rollout(model, tokenizer, select="all")
    run.optimizer.param_groups[0]["lr"] = 1e-4
    losses, original = [], gmts.policy_loss

    def recorded(*args):
        loss = original(*args)
        losses[-1] += float(loss)
        return loss

    monkeypatch.setattr(gmts, "policy_loss", recorded)
    for _ in range(3):
        losses.append(0.0)
        gmts.learn(run, batch)
    assert losses[2] < losses[1] < losses[0], losses


@gpu
def test_gpu_token_loop_does_not_wait_for_the_gpu(gpu_model, tokenizer, monkeypatch):
    """Outside of transformers' own forward pass nothing synchronises in seven tokens of eight."""
    forward, draw, tokens = gmts.forward, gmts.draw, []

    def transformers_may_wait(*args):
        torch.cuda.set_sync_debug_mode("default")
        logits = forward(*args)
        torch.cuda.set_sync_debug_mode("error" if 0 < len(tokens) < 7 else "default")
        return logits

    def drawn(*args):
        tokens.append(draw(*args))
        torch.cuda.set_sync_debug_mode("error" if len(tokens) < 7 else "default")
        return tokens[-1]

    monkeypatch.setattr(gmts, "forward", transformers_may_wait)
    monkeypatch.setattr(gmts, "draw", drawn)
    ids = torch.randint(1, 1000, (2, 8), device="cuda")
    try:
        gmts.sample(gpu_model, ids, torch.ones_like(ids), 2, 8, {-1}, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(tokens) == 8


@gpu
def test_gpu_run_resumes(tiny, tmp_path):
    flags = [*tiny, "--steps", 4, "--save-every", 2]
    whole = run_main(*flags, "--out", tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["dtype"] == "bfloat16"
    stop = gmts.save_checkpoint

    def killed(run):
        stop(run)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(gmts, "save_checkpoint", killed)
        gmts.main([str(flag) for flag in (*flags, "--out", tmp_path / "cut")])
    resumed = run_main("--resume", "--out", tmp_path / "cut")
    assert len(resumed) == len(whole) == 5
    for ours, wanted in zip(resumed, whole, strict=True):
        for name in ("reward", "length", "entropy", "accuracy"):
            if wanted.get(name):
                assert float(ours[name]) == pytest.approx(float(wanted[name]), rel=0.05)


@gpu
def test_gpu_speed_and_memory(gpu_model, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "batch_decode", lambda ids, **_: [""] * len(ids))
    model = copy.deepcopy(gpu_model)
    run, _ = gpu_rollout(model, tokenizer, max_tokens=8)  # warm
    run.config.max_tokens, run.config.micro_tokens = 256, 8192
    rng = random.Random(0)
    problems = [([rng.randrange(1, 150_000) for _ in range(128)], "") for _ in range(16)]
    torch.cuda.reset_peak_memory_stats()
    marks = [time.perf_counter()]
    batch = gmts.rollout(run, problems, 16, 1.0)
    torch.cuda.synchronize()
    marks.append(time.perf_counter())
    gmts.learn(run, batch)
    torch.cuda.synchronize()
    marks.append(time.perf_counter())
    sampling, update = marks[1] - marks[0], marks[2] - marks[1]
    print(
        f"\n{torch.cuda.get_device_name()}, 256 answers of 256 tokens: sampling {sampling:.1f} s,"
        f" {batch.mask.sum() / sampling:,.0f} tokens/s; update {update:.1f} s; peak memory"
        f" {torch.cuda.max_memory_allocated() / 1e9:.1f} GB"
    )


# ---- The benchmark: GMTS_BENCH=1 [GMTS_BENCH_MODEL=folder of SmolLM2-135M] pytest -s -k bench ----
# Both sides in processes of their own, in turn: same model, prompts, lengths, dtype and threads.


def bench_setting(name, folder):
    """-> model folder (made where it is missing), 8 prompts of about 70 tokens, longest answer."""
    if name == "smollm2":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        words = (
            "There are {} boxes of pens in the shop and each box holds {} pens. How many pens are"
            " there in all of them?"
        )
        prompts = [gmts.render(tokenizer, words.format(7 + i, 12 + i)) for i in range(8)]
        return folder, prompts, 64
    if not os.path.exists(folder):
        torch.manual_seed(0)
        vocabulary = int(name.split("-")[1])
        ids = {f"w{i}": i for i in range(vocabulary)}
        words = gmts.Tokenizer(gmts.models.WordLevel(ids, unk_token="w1"))
        words.pre_tokenizer = gmts.pre_tokenizers.Whitespace()
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="w0", pad_token="w0"
        )
        tokenizer.save_pretrained(folder)
        shape = dict(
            vocab_size=vocabulary,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            eos_token_id=0,
        )
        AutoModelForCausalLM.from_config(Qwen2Config(**shape)).save_pretrained(folder)
    return folder, [" ".join(f"w{7 * i + j}" for j in range(70)) for i in range(8)], 128


def bench_gmts(model, tokenizer, prompts, length, settings, half):
    """Seconds (start, sampled, end) of two steps; with `half` every other group has no signal."""
    run, count, times, marks = make_run(model, tokenizer, **settings), iter(range(10**9)), [], []
    ids = tokenizer(prompts, add_special_tokens=False).input_ids
    run.problems, run.stop_ids = [(prompt, "") for prompt in ids], {-1}

    def reward(completion, answer):
        n = next(count)
        return n % 3 * (not half or n // run.config.samples % 2)

    learn = gmts.learn

    def learn_marked(*args):
        marks.append(time.perf_counter())
        return learn(*args)

    run.reward, gmts.learn = reward, learn_marked
    for _ in range(2):
        start = time.perf_counter()
        gmts.train_step(run)
        times.append((start, marks[-1], time.perf_counter()))
    return times


def bench_trl(folder, tokenizer, prompts, length):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    count, times, marks = iter(range(10**9)), [], []
    settings = GRPOConfig(
        output_dir="/tmp/gmts-bench-trl",
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=length,
        max_steps=2,
        learning_rate=1e-6,
        beta=0.0,
        loss_type="dapo",
        top_entropy_quantile=0.2,
        epsilon_high=0.28,
        temperature=1.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        generation_kwargs={"min_new_tokens": length},
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )

    def reward(completions, **_):
        return [float(next(count) % 3) for _ in completions]

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            marks.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            times.append((*marks[-2:], time.perf_counter()))

    data = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    trainer = GRPOTrainer(folder, reward, settings, data, processing_class=tokenizer)
    generate = trainer._generate_and_score_completions

    def generate_marked(inputs):
        batch = generate(inputs)
        marks.append(time.perf_counter())
        return batch

    trainer._generate_and_score_completions = generate_marked
    trainer.add_callback(Watch())
    trainer.train()
    return times


def bench_step(side, name, folder, **changes):
    """A step of 8 prompts x 8 answers of full length, after one to warm up -> seconds, peak GB."""
    import resource

    folder, prompts, length = bench_setting(name, folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parameters = model.num_parameters()
    if side == "trl":
        del model
        times = bench_trl(folder, tokenizer, prompts, length)
    else:
        settings = dict(prompts=8, samples=8, max_tokens=length, micro_tokens=2048) | changes
        times = bench_gmts(model, tokenizer, prompts, length, settings, side == "half")
    start, sampled, end = times[-1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "step": end - start,
        "update": end - sampled,
        "sampling": sampled - start,
        "memory": (peak - 16 * parameters) / 1e9,
    }


def bench_sampling(side, name, folder):
    """64 answers of geometric lengths, a quarter of the longest in the mean -> seconds."""
    folder, prompts, length = bench_setting(name, folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = dict(padding=True, padding_side="left", return_tensors="pt", add_special_tokens=False)
    batch = tokenizer(prompts, **options)
    lengths = np.random.default_rng(0).geometric(4 / length, 64).clip(1, length)
    lengths = torch.tensor(lengths)
    end, original = tokenizer.eos_token_id, gmts.draw

    class EndAt(transformers.LogitsProcessor):
        def __call__(self, ids, scores):
            done = lengths == ids.shape[1] - batch.input_ids.shape[1] + 1
            scores[:, end] = -math.inf
            scores[done] = -math.inf
            scores[done, end] = 0
            return scores

    for _ in range(2):
        left, place = lengths.clone(), iter(range(1, length + 1))

        def draw(logits, temperature):
            nonlocal left
            ends, tokens = left == next(place), original(logits, temperature)  # noqa: B023
            left = left[~ends]
            return torch.where(ends, end, tokens.where(tokens != end, end + 1))

        start = time.perf_counter()
        if side == "trl":
            model.generate(
                **batch,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                max_new_tokens=length,
                num_return_sequences=8,
                eos_token_id=end,
                pad_token_id=end,
                logits_processor=transformers.LogitsProcessorList([EndAt()]),
            )
        else:
            gmts.draw = draw
            prompts = batch.input_ids, batch.attention_mask
            mask = gmts.sample(model, *prompts, 8, length, {end}, 1.0)[1]
            assert mask.sum(1).tolist() == lengths.tolist()
        seconds = time.perf_counter() - start
    return {"geometric": seconds}


def in_a_process(function, *arguments, **changes):
    call = f"test_gmts.{function}(*{arguments!r}, **{changes!r})"
    code = f"import json, test_gmts; print(json.dumps({call}, default=float))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().split("\n")[-1])


bench = pytest.mark.skipif("GMTS_BENCH" not in os.environ, reason="runs when GMTS_BENCH is set")


@bench
@pytest.mark.parametrize("name", ["smollm2", "qwen2-151936"])
def test_bench(name):
    folder = f"/tmp/gmts-bench-{name}"
    if name == "smollm2":
        folder = os.environ.get("GMTS_BENCH_MODEL", "")
        if not folder:
            pytest.skip("GMTS_BENCH_MODEL is not set")
    pytest.importorskip("trl")
    bench_setting(name, folder)
    results, rounds = {"gmts": [], "half": [], "trl": []}, int(os.environ["GMTS_BENCH"])
    for _ in range(rounds):
        for kind in ("bench_step", "bench_sampling"):
            for side, found in results.items():
                if (kind, side) != ("bench_sampling", "half"):
                    found.append(in_a_process(kind, side, name, folder))
    threads, version = torch.get_num_threads(), torch.__version__
    print(f"\n{name}, {threads} threads, torch {version}: medians (range) of {rounds} processes")

    def shown(rows, key):
        values = [row[key] for row in rows if key in row]
        text = f"{np.median(values):7.2f} ({min(values):.2f}-{max(values):.2f})"
        return np.median(values), text

    for side, keys in (
        ("gmts", ("step", "update", "sampling", "geometric", "memory")),
        ("half", ("step", "update")),
    ):
        for key in keys:
            (ours, text), (trl, other) = (shown(results[who], key) for who in (side, "trl"))
            print(f"{key:10} {side} {text}   trl/generate {other}   ratio {ours / trl:.2f}")


@bench
def test_bench_growth():
    """gmts alone on a random Qwen2 of 4 layers x 256 with a vocabulary of 37,984."""
    for label, changes in (
        ("all tokens", {"fraction": 1.0}),
        ("fraction 0.2", {}),
        ("fraction 0.05", {"fraction": 0.05}),
    ):
        folder = "/tmp/gmts-bench-qwen2-37984"
        rounds = range(int(os.environ["GMTS_BENCH"]))
        rows = [
            in_a_process("bench_step", "gmts", "qwen2-37984", folder, **changes) for _ in rounds
        ]
        figures = (f"{key} {np.median([row[key] for row in rows]):6.2f}" for key in rows[0])
        print(f"\n{label:14}", *figures, end="")


@bench
def test_bench_overlap(tmp_path, monkeypatch):
    """What each selector keeps of one rollout: of the demo, and of GMTS_BENCH_MODEL on sums."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arithmetic.py").write_text(recipe("arithmetic.py", "__main__")["BLOCK"])
    settings = {"demo": ([], 512)}
    if folder := os.environ.get("GMTS_BENCH_MODEL"):
        flags = ["--model", folder, "--data", "arithmetic-train.jsonl", "--temperature", "0.6"]
        flags += ["--prompt", "{question} Answer with the number only.", "--max-tokens", "40"]
        settings[folder] = ([*flags, "--reward", "arithmetic.py:score"], 256)
    for name, (flags, prompts) in settings.items():
        run = gmts.prepare(gmts.parse([*flags, "--out", str(tmp_path / "run" / str(prompts))]))
        batch = gmts.rollout(run, run.problems[:prompts], 8, run.config.temperature)
        weight = batch.advantages.expand_as(batch.mask)
        ranked = batch.mask & (weight != 0)
        right, h = weight > 0, batch.entropy[ranked]
        stats = batch.entropy, batch.logit_grad_norm, weight
        kept = {"all": ranked}
        for select in ("random", "entropy", "gmts", "exact"):
            kept[select] = gmts.select_top(gmts.token_scores(select, *stats), ranked, 0.2)
        print(
            f"\n{os.path.basename(name)}: {ranked.sum()} tokens, H {h.mean():.3f} +- {h.std():.3f}"
        )
        solved = batch.rewards.mean(dim=1)[batch.prompt_index, None].expand_as(ranked)
        for rate in [None, *(k / 8 for k in range(1, 8))]:
            here = ranked if rate is None else ranked & (solved == rate)
            print("  whole" if rate is None else f"{rate:7.3f}", f"{here.sum():6} tokens", end="")
            for select, keep in kept.items():
                chosen = keep & here
                count = chosen.sum().clamp_min(1)
                print(
                    f" | {select}: in right answers {(chosen & right).sum() / count:4.0%},"
                    f" mean |A| {weight[chosen].abs().sum() / count:.2f},"
                    f" shared with gmts {(chosen & kept['gmts']).sum() / count:4.0%}",
                    end="",
                )
            print()
