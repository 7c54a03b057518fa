"""Tests of gmts.py. Each compares with an independent oracle: torch.distributions, autograd, brute force, model.generate.

GMTS_BENCH=1 pytest -s -k bench runs the benchmark instead, see the README.
"""
import concurrent.futures
import copy
import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import types
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.distributions import Categorical
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

import gmts

transformers.logging.disable_progress_bar()
HERE = os.path.dirname(os.path.abspath(gmts.__file__))
PROMPTS = ["348+214=", "1+2=", "99+1=", "7="]


@pytest.fixture(scope="session")
def tokenizer():
    return gmts.demo_model([("1+1=", "2")], steps=0)[1]


def tiny_model(config=Qwen2Config, seed=0, scale=8, **options):
    """A random model with the demo's 16 symbols; `scale` sharpens its distributions, which are flat otherwise."""
    torch.manual_seed(seed)
    options = dict(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=0,
                   pad_token_id=0, head_dim=8) | options
    model = AutoModelForCausalLM.from_config(config(**options)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name and "lm_head" not in name:
                weight.mul_(scale)
        model.get_output_embeddings().weight.mul_(scale)
    return model


def flag(field):
    return "--" + field.name.replace("_", "-")


def left_padded(tokenizer, texts=PROMPTS):
    tokenizer.pad_token = tokenizer.eos_token
    batch = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    return batch.input_ids, batch.attention_mask


def make_batch(model, tokenizer, samples=4, max_tokens=12, stop=(0,), advantages=None):
    """A rollout of PROMPTS with random advantages, and the full logits of every answer, padded rows and all."""
    ids, mask = left_padded(tokenizer)
    tokens, answer_mask, *stats = gmts.sample(model, ids, mask, samples, max_tokens, set(stop), 1.0)
    count = len(tokens)
    advantages = torch.randn(count) if advantages is None else advantages
    owner = torch.arange(len(ids)).repeat_interleave(samples)
    return gmts.Batch(ids, mask, owner, advantages, tokens, answer_mask, torch.stack(stats))


def full_logits(model, batch):
    """Plain teacher forcing of prompt and answer, one row at a time and without any padding -> (N, T, V)."""
    rows = []
    for i, tokens in enumerate(batch.tokens):
        prompt = batch.prompt_ids[batch.owner[i]][batch.prompt_mask[batch.owner[i]].bool()]
        logits = model(input_ids=torch.cat([prompt, tokens])[None]).logits[0]
        rows.append(logits[len(prompt) - 1:-1])
    return torch.stack(rows)


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def config(**changes):
    return gmts.Config(**changes)


# ---- The formulas ------------------------------------------------------------------------------------------
def test_group_advantages_match_numpy_and_are_zero_without_signal():
    rewards = np.random.default_rng(0).random((5, 7))
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
    assert np.allclose(gmts.group_advantages(torch.tensor(rewards)), expected, atol=1e-5)
    assert gmts.group_advantages(torch.full((2, 16), 0.1)).eq(0).all()           # the mean of 16 times 0.1 is not 0.1
    assert gmts.group_advantages(torch.tensor([[3.0], [1.0]])).eq(0).all()       # G = 1
    assert gmts.group_advantages(torch.tensor([[True, False]])).tolist() == [[pytest.approx(1, 1e-5), pytest.approx(-1, 1e-5)]]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_token_stats_match_categorical_and_autograd(temperature):
    torch.manual_seed(0)
    logits = (3 * torch.randn(3, 5, 11, dtype=torch.float64)).requires_grad_()
    tokens = torch.randint(11, (3, 5))
    logprob, entropy, grad_norm = gmts.token_stats(logits, tokens, temperature)
    oracle = Categorical(logits=logits / temperature)
    assert torch.allclose(logprob.double(), oracle.log_prob(tokens), atol=1e-5)
    assert torch.allclose(entropy.double(), oracle.entropy(), atol=1e-5)
    gradient, = torch.autograd.grad(oracle.log_prob(tokens).sum(), logits)
    assert torch.allclose(grad_norm.double(), gradient.norm(dim=-1), atol=1e-5)
    assert all(x.dtype == torch.float32 and x.shape == tokens.shape for x in (logprob, entropy, grad_norm))


def test_token_stats_at_the_edges():
    sure = torch.tensor([[20.0, 0.0, 1.0], [0.0, 16.0, -1.0]], dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([0, 1])
    gradient, = torch.autograd.grad(Categorical(logits=sure).log_prob(tokens).sum(), sure)
    assert torch.allclose(gmts.token_stats(sure, tokens)[2].double(), gradient.norm(dim=-1), rtol=1e-4, atol=0)
    forbidden = torch.tensor([[0.0, -math.inf, 0.0]])
    assert torch.stack(gmts.token_stats(forbidden, torch.tensor([2]))).flatten().tolist() == pytest.approx(
        [-math.log(2), math.log(2), math.sqrt(0.5)])
    half = torch.randn(4, 9).bfloat16()
    assert torch.equal(torch.stack(gmts.token_stats(half, torch.arange(4))),
                       torch.stack(gmts.token_stats(half.float(), torch.arange(4))))
    assert gmts.token_stats(torch.zeros(0, 9), torch.zeros(0, dtype=torch.long))[0].shape == (0,)


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_policy_weight_is_the_gradient_of_policy_loss(beta):
    torch.manual_seed(0)
    old, ref = torch.randn(2, 400, dtype=torch.float64)
    logprobs = (old + 0.4 * torch.randn(400)).requires_grad_()
    advantages = torch.randn(400, dtype=torch.float64)
    advantages[:20] = 0
    loss = gmts.policy_loss(logprobs, old, advantages, 7.0, 0.2, 0.28, ref, beta)
    gradient, = torch.autograd.grad(loss, logprobs)
    weight = gmts.policy_weight(logprobs, old, advantages, 0.2, 0.28, ref, beta)
    assert torch.allclose(-gradient * 7, weight)
    ratio = (logprobs - old).exp()                                  # and by the words of PPO, a token at a time
    outside = [(a > 0 and r > 1.28) or (a < 0 and r < 0.8) for a, r in zip(advantages.tolist(), ratio.tolist())]
    assert 0 < sum(outside) < 400
    if beta == 0:
        assert weight[torch.tensor(outside)].eq(0).all()
        objective = [min(r * a, min(max(r, 0.8), 1.28) * a) for a, r in zip(advantages.tolist(), ratio.tolist())]
        assert loss.item() == pytest.approx(-sum(objective) / 7)


def test_kl_estimate_is_unbiased():
    policy, reference = torch.tensor([0.1, 0.2, 0.7]), torch.tensor([0.3, 0.3, 0.4])
    k3 = torch.stack([gmts.policy_loss(p.log(), p.log(), torch.zeros(()), 1, 0.2, 0.28, r.log(), 1.0)
                      for p, r in zip(policy, reference)])
    exact = torch.distributions.kl_divergence(Categorical(policy), Categorical(reference))
    assert (policy * k3).sum().item() == pytest.approx(exact.item(), rel=1e-5)


def test_token_scores():
    entropy, norm, weight = torch.rand(3, 50)
    weight = weight - 0.5
    assert torch.equal(gmts.token_scores("gmts", entropy, norm, weight), (entropy * weight).abs())
    assert torch.equal(gmts.token_scores("entropy", entropy, norm, weight), entropy)
    assert torch.equal(gmts.token_scores("exact", entropy, norm, weight), (norm * weight).abs())
    assert gmts.token_scores("all", entropy, norm, weight).eq(1).all()
    draws = torch.stack([gmts.token_scores("random", entropy, norm, weight) for _ in range(2)])
    assert draws.gt(0).all() and draws.le(1).all() and not torch.equal(*draws)
    with pytest.raises(gmts.BadInput, match="selector"):
        gmts.token_scores("best", entropy, norm, weight)


def brute_force_top(scores, mask, fraction):
    candidates = [i for i in range(len(scores)) if mask[i]]
    count = math.ceil(Fraction(str(fraction)) * len(candidates))
    best = sorted((i for i in candidates if scores[i] > 0), key=lambda i: (-scores[i], i))[:count]
    return [i in best for i in range(len(scores))]


def test_select_top_matches_brute_force():
    rng = np.random.default_rng(0)
    for trial in range(300):
        size = int(rng.integers(1, 40))
        scores = rng.integers(0, 5, size) / 4 if trial % 2 else rng.normal(size=size)      # many ties, or none
        mask = rng.random(size) < 0.7
        scores = np.where(mask, scores, 99.0)                                              # padding scores highest
        fraction = [0.2, 0.5, 1.0, 0.05, 1 / 3][trial % 5]
        keep = gmts.select_top(torch.tensor(scores, dtype=torch.float32), torch.tensor(mask), fraction)
        assert keep.tolist() == brute_force_top(scores.astype(np.float32), mask, fraction)


def test_select_top_at_the_edges():
    ones = torch.ones(5, 7)
    assert gmts.select_top(ones, ones.bool(), 0.2).sum() == 7                        # 35 tokens: 7, not 8
    assert gmts.select_top(ones, ones.bool(), 0.2).flatten()[:7].all()               # ties go to the earlier place
    assert not gmts.select_top(torch.zeros(4, 4), torch.ones(4, 4).bool(), 0.5).any()
    assert not gmts.select_top(ones, torch.zeros(5, 7).bool(), 0.2).any()
    assert gmts.select_top(torch.tensor([0.0, 0, 0, 2]), torch.ones(4).bool(), 1).tolist() == [False] * 3 + [True]
    assert gmts.select_top(ones, ones.bool(), 1.0).all()


def test_select_top_of_20_million_scores():                  # torch.quantile refuses more than 16 million
    scores = torch.rand(20_000_000)
    keep = gmts.select_top(scores, torch.ones_like(scores, dtype=torch.bool), 0.2)
    assert keep.sum() == 4_000_000 and scores[keep].min() >= scores[~keep].max()


# ---- Sampling ----------------------------------------------------------------------------------------------
def test_sample_statistics_equal_a_full_forward(tokenizer):
    model = tiny_model()
    batch = make_batch(model, tokenizer, samples=8)
    assert batch.mask.sum(1).min() < batch.mask.sum(1).max()                         # some ended early
    oracle = Categorical(logits=full_logits(model, batch).double())
    logprob, entropy, _ = batch.stats.double()
    assert torch.allclose(logprob[batch.mask], oracle.log_prob(batch.tokens)[batch.mask], atol=1e-4)
    assert torch.allclose(entropy[batch.mask], oracle.entropy()[batch.mask], atol=1e-4)
    assert batch.stats[:, ~batch.mask].eq(0).all()


def test_sample_keeps_the_end_token_and_nothing_behind_it(tokenizer):
    batch = make_batch(tiny_model(), tokenizer, samples=16, max_tokens=10, stop=(0, 3, 5))
    for tokens, mask in zip(batch.tokens.tolist(), batch.mask.tolist()):
        ends = [i for i, token in enumerate(tokens) if token in (0, 3, 5)]
        length = ends[0] + 1 if ends else 10
        assert mask == [i < length for i in range(len(mask))]


def test_sample_draws_from_the_distribution(tokenizer):
    model, counts = tiny_model(scale=3), torch.zeros(16, 16)
    ids, mask = left_padded(tokenizer, ["12+3="])
    torch.manual_seed(0)
    tokens, *_ = gmts.sample(model, ids, mask, 4000, 2, {99}, 0.8)
    for first, second in tokens.tolist():
        counts[first, second] += 1
    p_first = (model(input_ids=ids).logits[0, -1] / 0.8).softmax(-1)
    both = torch.cat([ids.repeat(16, 1), torch.arange(16)[:, None]], 1)
    expected = 4000 * p_first[:, None] * (model(input_ids=both).logits[:, -1] / 0.8).softmax(-1)
    large = expected > 5
    chi2 = ((counts - expected)[large] ** 2 / expected[large]).sum() + (
        (counts - expected)[~large].sum() ** 2 / expected[~large].sum())
    freedom = int(large.sum())
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("stop", [[0], [0, 7]])
def test_greedy_sample_equals_generate(tokenizer, stop):
    model = tiny_model(seed=1)
    ids, mask = left_padded(tokenizer)
    tokens, answer_mask, *_ = gmts.sample(model, ids, mask, 1, 20, set(stop), 0.0)
    expected = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=stop,
                              pad_token_id=0)[:, ids.shape[1]:]
    for row, row_mask, wanted in zip(tokens, answer_mask, expected.tolist()):
        answer = row[row_mask].tolist()
        assert answer == wanted[:len(answer)] and (len(answer) == 20 or answer[-1] in stop)


# ---- The update --------------------------------------------------------------------------------------------
def plain_loss(model, batch, keep, ref_logprobs=None, beta=0.0):
    """GRPO with full logits and a mask, as one writes it without a thought for memory."""
    logprobs = Categorical(logits=full_logits(model, batch)).log_prob(batch.tokens)
    ratio = (logprobs - batch.stats[0]).exp()
    advantages = batch.advantages[:, None]
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    if beta:
        loss = loss + beta * ((ref_logprobs - logprobs).exp() - (ref_logprobs - logprobs) - 1)
    return (loss * keep).sum() / keep.sum()


@pytest.mark.parametrize("micro_tokens", [1, 40, 10_000])
@pytest.mark.parametrize("fraction", [0.2, 1.0])
def test_kept_only_gradient_equals_full_logits(tokenizer, micro_tokens, fraction):
    model = tiny_model(scale=3)
    batch = make_batch(model, tokenizer)
    batch.stats[0] += 0.2 * torch.randn_like(batch.stats[0])                          # some ratios are clipped
    keep = gmts.select_top(batch.stats[1], batch.mask, fraction)
    expected = plain_loss(model, batch, keep)
    expected.backward()
    wanted = gradients(model)
    model.zero_grad()
    loss = gmts.policy_gradient(model, batch, keep, int(keep.sum()), config(micro_tokens=micro_tokens), batch.stats[0])
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert torch.allclose(gradients(model), wanted, atol=1e-5)


def test_micro_batches_keep_to_the_budget_and_leave_nothing_out(tokenizer):
    batch = make_batch(tiny_model(), tokenizer, samples=16)
    lengths = batch.mask.sum(1) * (torch.arange(len(batch.mask)) % 3 > 0)
    packs = gmts.micro_batches(batch, lengths, 100)
    assert sorted(sum(packs, [])) == lengths.nonzero()[:, 0].tolist() and len(packs) > 3
    for rows in packs:
        owners = batch.owner[rows].unique()
        prompts = len(owners) * batch.prompt_mask[owners].sum(1).max()
        assert len(rows) == 1 or len(rows) * lengths[rows].max() + prompts <= 100


def test_score_tokens_equals_sampling(tokenizer):
    model = tiny_model()
    batch = make_batch(model, tokenizer)
    for budget in (1, 10_000):
        stats = gmts.score_tokens(model, batch, batch.mask, config(micro_tokens=budget))
        assert torch.allclose(stats, batch.stats, atol=1e-4)


def make_run(model, tokenizer, **changes):
    run = gmts.argparse.Namespace(model=model, tokenizer=tokenizer, config=config(**changes), rank=0, world=1, busy=False,
                               optimizer=gmts.make_optimizer(model), reference=None)
    run.optimizer.param_groups[0]["lr"] = 1e-3
    return run


@pytest.mark.parametrize("settings", [dict(select="all"), dict(select="gmts", fraction=1.0), dict(select="all", beta=0.1)])
def test_all_tokens_are_plain_grpo(tokenizer, settings):
    """With every token kept, learn() takes the very step of GRPO with full logits over the informative groups."""
    model, twin = tiny_model(scale=3), tiny_model(scale=3)
    advantages = torch.randn(16)
    advantages[4:8] = 0                                                                # the second group is dropped
    batch = make_batch(model, tokenizer, advantages=advantages)
    run, beta = make_run(model, tokenizer, **settings), settings.get("beta", 0.0)
    run.reference = tiny_model(scale=3.2) if beta else None
    ref = Categorical(logits=full_logits(run.reference, batch)).log_prob(batch.tokens).detach() if beta else None
    sums, norms = gmts.learn(run, batch)
    keep = batch.mask & (advantages != 0)[:, None]
    assert sums[0] == 3 and sums[1] == sums[3] == keep.sum()
    plain_loss(twin, batch, keep, ref, beta).backward()
    assert norms[0] == pytest.approx(gradients(twin).norm().item(), rel=1e-4)
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    torch.optim.AdamW(twin.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0).step()
    for mine, its in zip(model.parameters(), twin.parameters()):
        assert torch.allclose(mine, its, atol=1e-5)


def test_selection_is_over_the_whole_batch(tokenizer):
    """One group's answers carry all the advantage: every kept token must come from it."""
    model = tiny_model(scale=3)
    advantages = torch.full((16,), 1e-3)
    advantages[8:12] = torch.tensor([2.0, -2.0, 2.0, -2.0])
    batch, kept = make_batch(model, tokenizer, advantages=advantages), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gmts, "policy_gradient", lambda m, b, keep, *_: kept.append(keep) or torch.zeros(()))
        patch.setattr(gmts, "apply_gradient", lambda *_: 0.0)
        sums, _ = gmts.learn(make_run(model, tokenizer, select="gmts"), batch)
    assert kept[0].sum() == math.ceil(Fraction("0.2") * int(batch.mask.sum())) == sums[1]
    assert kept[0].any(1).nonzero().flatten().tolist() == [8, 9, 10, 11]


def test_later_updates_use_the_current_policy(tokenizer):
    """--updates 2: two slices of the groups, each trained on once; the second is scored by the model as it is then."""
    model = tiny_model(scale=3)
    batch, seen = make_batch(model, tokenizer), []
    run = make_run(model, tokenizer, updates=2)
    run.optimizer.param_groups[0]["lr"] = 3e-2
    with pytest.MonkeyPatch.context() as patch:
        original = gmts.policy_weight
        patch.setattr(gmts, "policy_weight", lambda new, old, *rest: seen.append((new.clone(), old)) or original(new, old, *rest))
        _, norms = gmts.learn(run, batch)
    assert len(norms) == 2
    (first, old), (second, _) = seen[0], seen[2]
    assert torch.equal(first, old)
    slice_mask = second != 0                                                           # tokens of the second slice
    assert slice_mask.any(1).tolist() == [False] * 8 + [True] * 8
    assert (second - old)[slice_mask].abs().max() > 1e-3


def test_gradients_that_are_not_finite_change_nothing(tokenizer):
    model = tiny_model()
    before = [p.clone() for p in model.parameters()]
    batch = make_batch(model, tokenizer)
    batch.stats[0, 3] = -math.inf
    _, norms = gmts.learn(make_run(model, tokenizer), batch)
    assert not math.isfinite(norms[0])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_bfloat16_weights_learn_through_float32_masters(tokenizer):
    model = tiny_model(scale=3).bfloat16()
    batch = make_batch(model, tokenizer)
    run = make_run(model, tokenizer, select="all", micro_tokens=40)
    run.optimizer.param_groups[0]["lr"] = 1e-6
    masters = run.optimizer.param_groups[0]["params"]
    before = [m.clone() for m in masters]
    for _ in range(3):
        gmts.learn(run, batch)
    assert all(m.dtype == torch.float32 and w.dtype == torch.bfloat16 for m, w in zip(masters, model.parameters()))
    moved = torch.cat([(m - b).flatten().abs() for m, b in zip(masters, before)])
    assert 1e-6 < moved.max() < 1e-5                       # three steps of 1e-6, far below bfloat16's resolution
    assert all(torch.equal(w, m.bfloat16()) for m, w in zip(masters, model.parameters()))


# ---- Data --------------------------------------------------------------------------------------------------
RECORDS = [
    ({"question": "q", "answer": "text #### 1,234"}, ("q", "1,234")),                                # GSM8K
    ({"problem": "p", "solution": "thus $\\boxed{\\frac{1}{2}}$."}, ("p", "\\frac{1}{2}")),          # MATH
    ({"problem": "p", "answer": 27.0}, ("p", "27.0")),                                               # AMC
    ({"input": "i", "target": 40}, ("i", "40")),                                                     # MultiArith
    ({"Body": "Facts.", "Question": "How many?", "Answer": 198.5}, ("Facts. How many?", "198.5")),   # SVAMP
    ({"prompt": "p", "final_answer": ["7"]}, ("p", "7")),
    ({"question": "q", "answer": 0}, ("q", "0")),
    ({"question": {"stem": "s", "choices": [{"label": "A", "text": "x"}, {"label": "B", "text": "y"}]}, "answerKey": "B"},
     ("s\n(A) x\n(B) y", "B")),
    ({"question": "s", "choices": {"label": ["A", "B"], "text": ["x", "y"]}, "answerKey": "A"}, ("s\n(A) x\n(B) y", "A")),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_load_problems(tmp_path, suffix):
    path, records = tmp_path / f"data{suffix}", [record for record, _ in RECORDS]
    path.write_text(json.dumps(records, indent=1) if suffix == ".json" else "\n\n".join(map(json.dumps, records)) + "\n")
    assert gmts.load_problems(str(path)) == [problem for _, problem in RECORDS]


def test_names_are_downloaded_once(tmp_path, monkeypatch):
    source = tmp_path / "train.jsonl"
    source.write_text(json.dumps({"question": "q", "answer": "#### 5"}))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "cache"))
    monkeypatch.setitem(gmts.ADDRESSES, "gsm8k", source.as_uri())
    assert gmts.load_problems("gsm8k") == [("q", "5")]
    source.unlink()
    assert gmts.load_problems("gsm8k") == [("q", "5")]


def test_no_question_is_in_both_splits(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": i}) + "\n" for i in range(300)))
    train, test = gmts.split_problems(config(data=str(path), eval_size=1000))
    assert len(train) + len(test) == 300 and 10 < len(test) < 60 and not set(train) & set(test)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"question": "q7", "answer": 7}))
    train, test = gmts.split_problems(config(data=str(path), eval_data=str(other)))
    assert test == [("q7", "7")] and len(train) == 299 and ("q7", "7") not in train


def test_the_pupil_is_careless_in_the_way_it_says():
    rng = gmts.random.Random(0)
    assert gmts.careless_pupil("348+214=", gmts.argparse.Namespace(random=lambda: 0.9, choice=None)) == (
        "8+4+0=12 4+1+1=06 3+2+0=05 ####562")
    works = [gmts.careless_pupil("348+214=", rng) for _ in range(4000)]
    right = sum(gmts.is_correct(work, "562") for work in works) / 4000
    assert right == pytest.approx(0.3 * 0.97**3, abs=0.03)


# ---- The verifier ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("completion, answer", [
    (r"so \boxed{7} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (r"\boxed {x} and \fbox{9}", "9"),
    (r"<think>\boxed{10}</think> it is \boxed{11}", "11"),
    (r"<think>#### 10</think> I cannot say", None),
    ("8+4+0=12 4+1+1=06 ####562", "562"),
    ("reasons\n#### $1,234\nmore", "1,234"),
    ("The answer is **42**. It was easy.", "42"),
    ("Answer: 3.14\nbye", "3.14"), ("Answer: \\[\n 7 \n\\]", "7"), ("The answer is\n$$\n7\n$$", "7"), ("Answer: [0, 1)", "[0, 1)"), (r"\boxed 5$, since", "5"), ("#### Final answer: 5", "5"),
    ("I get 42", None), ("", None), (r"\boxed{}", None), (r"\boxed{1", None), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\boxed{5}}", r"\boxed{5}"),
])
def test_extract_answer(completion, answer):
    assert gmts.extract_answer(completion) == answer


def test_boxes_in_a_row_are_a_list_where_a_list_is_asked():
    both = r"So $\boxed{2} \quad \text{and} \quad \boxed{-1}$."
    assert gmts.is_correct(both, "-1, 2") and gmts.is_correct(r"\boxed{(1, 2)}, \boxed{(3, 4)}", "(3,4),(1,2)") and gmts.is_correct(both, "-1")
    assert not gmts.is_correct(both, "2") and not gmts.is_correct(both, "1, 2") and not gmts.is_correct(r"\boxed{2} and so $x = \boxed{-1}$", "-1, 2")


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


@pytest.mark.parametrize("gold, answer, right", [(*case, True) for case in RIGHT] + [(*case, False) for case in WRONG])
def test_answers_match(gold, answer, right):
    assert gmts.answers_match(answer, gold) is right
    assert gmts.is_correct(rf"so $\boxed{{{answer}}}$", gold) is (right and answer != "")


# golds of many kinds, and rewritings that must keep or break the match
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


@pytest.mark.parametrize("gold", GOLDS)
def test_rewritings_keep_or_break_the_match(gold):
    for name, rewrite in KEEP.items():
        assert gmts.is_correct(rf"It is \boxed{{{rewrite(gold)}}}", gold), (name, rewrite(gold))
    for name, rewrite in BREAK.items():
        assert (wrong := rewrite(gold)) is None or not gmts.is_correct(rf"It is \boxed{{{wrong}}}", gold), (name, wrong)
    assert not gmts.is_correct(r"\boxed{-7919/104729}", gold) and not any(gmts.answers_match(gold, other) for other in GOLDS if other != gold)


LATEX = [*r"{}[]()$^_,.=+-*/!<>|&~%'# 0123456789xyziePMπ−–😀²½٣", "\x00", "\n", '"', r"\frac", r"\frac{", r"\sqrt", r"\sqrt[", r"\boxed{", r"\text{", r"\circ", r"\left(",
         r"\right)", r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", r"\pm", r"\mp", r"\log_", r"\sin^2 ", r"\infty", r"\cup", r"\le ", r"\ge ", r"\binom", "and ", "or ",
         "apples ", "not ", "x=", "f(x)=", "10^", "9^9^", "99!", "e^", "1,000", "####", "answer is ", "</think>", "True", "nan", "inf", "None", "lambda x:", "import os",
         "__import__('os')", "open('f','w')", "().__class__", "9**9**9", "}{", "frac(", "sin**", "'1'", "1_", "x_{", "A", "_AA", "_a"]


def test_the_verifier_bears_hostile_text():
    """Whatever a policy writes: an answer of True or False, no exception, in bounded time, off the main thread, without running it."""
    rng = gmts.random.Random(0)
    texts = ["".join(rng.choices(LATEX, k=rng.randrange(40))) for _ in range(3000)]
    texts += [fragment * n for fragment in LATEX for n in (50, 20_000)] + ["9" * 100_000 + "!", "(" * 10_000 + "1" + ")" * 10_000]
    texts += ["\\boxed{" + fragment * (1980 // len(fragment)) + "}" for fragment in LATEX]
    texts += ["\\boxed{" + text + "}" for text in (",(" * 900, "1=" * 990, "9" * 1980 + "!", "9^" * 140 + "9", "10^{" * 60 + "}" * 60, "99!" * 90, "x" * 299, "-" * 299 + "1", "A" + "_AA" * 90 + "+1=5",
                                                 "A" + "_A" * 140 + "+1<5", "a " * 140 + "=5!", r"\binom{x}{y}" * 40)]

    def judge_all():
        for text in texts:
            start = time.perf_counter()
            for gold in ("5", r"\frac{1}{2}", "x^2+1", "1, 2", text[:50]):
                assert type(gmts.is_correct(text, gold)) is type(gmts.answers_match(text, gold)) is bool
            assert time.perf_counter() - start < 2, text[:60]
        return True
    with concurrent.futures.ThreadPoolExecutor(1) as pool: assert pool.submit(judge_all).result()
    start = time.perf_counter()
    assert not any(gmts.is_correct((fragment * 20_000)[:20_000], "5") for fragment in ("},", "},,", "}and", "}\\quad"))
    assert time.perf_counter() - start < 2


# ---- Whole runs --------------------------------------------------------------------------------------------
def run_main(*flags, **environment):
    """The command line in this process -> the rows of metrics.csv."""
    gmts.main([str(flag) for flag in flags])
    out = flags[flags.index("--out") + 1]
    with open(os.path.join(out, "metrics.csv")) as file:
        return list(csv.DictReader(file))


def save_model(folder, tokenizer, config=Qwen2Config, **options):
    tiny_model(config, **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, tokenizer):
    """A random model in a folder, a file of sums, and flags for runs of a second."""
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder / "model", tokenizer)
    with open(folder / "data.jsonl", "w") as file:
        file.writelines(json.dumps({"question": q, "answer": a}) + "\n" for q, a in gmts.demo_problems(80))
    with open(folder / "reward.py", "w") as file:
        file.write("def length(completion, answer):\n    return len(completion) % 3\n")
    return ["--model", folder / "model", "--data", folder / "data.jsonl", "--reward", f"{folder / 'reward.py'}:length",
            "--prompt", "{question}", "--prompts", 3, "--samples", 4, "--max-tokens", 12, "--steps", 2, "--lr", 1e-3,
            "--eval-size", 5]


@pytest.mark.parametrize("extra", [["--select", select] for select in gmts.SELECTORS]
                         + [["--beta", 0.1], ["--updates", 3], ["--eval-samples", 3], ["--dtype", "bfloat16"]])
def test_two_steps_of_everything(tiny, tmp_path, capsys, extra):
    rows = run_main(*tiny, "--out", tmp_path / "run", *extra)
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert all(math.isfinite(float(value)) for row in rows for value in row.values() if value)
    share = 1.0 if extra[-1] == "all" else 0.2
    assert all(share <= float(row["kept"]) < share + 0.05 and float(row["grad_norm"]) > 0 for row in rows[1:])
    assert bool(rows[0]["pass_at_k"]) == ("--eval-samples" in extra)
    saved = tmp_path / "run" / "step-000002"
    assert f"the model is in {saved}" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(saved, dtype="auto")
    before = AutoModelForCausalLM.from_pretrained(tiny[1])
    assert any(not torch.equal(a.float(), b) for a, b in zip(model.parameters(), before.parameters()))
    assert AutoTokenizer.from_pretrained(saved)("1+1=").input_ids == [4, 13, 4, 14]


def test_a_run_shows_and_keeps_its_configuration(tiny, tmp_path, capsys):
    run_main(*tiny, "--out", tmp_path / "run", "--seed", 5)
    printed = capsys.readouterr().out
    saved = json.load(open(tmp_path / "run" / "config.json"))
    assert saved["seed"] == 5 and saved["lr"] == 1e-3 and set(saved) == {f.name for f in gmts.fields(gmts.Config)}
    assert all(f"{name} {value!r}\n" in printed for name, value in saved.items())
    assert "parameters, torch.float32 on 1 x cpu" in printed and "accuracy 0." in printed


def test_evaluating_more_often_changes_nothing(tiny, tmp_path):
    often = run_main(*tiny, "--out", tmp_path / "often", "--eval-every", 1, "--eval-samples", 2)
    never = run_main(*tiny, "--out", tmp_path / "never", "--eval-every", 0)
    assert [row["grad_norm"] for row in often] == [row["grad_norm"] for row in never]
    assert often[1]["accuracy"] and not never[1]["accuracy"]


def test_a_batch_without_signal_is_said_plainly(tiny, tmp_path, capsys):
    (tmp_path / "reward.py").write_text("def same(completion, answer):\n    return 0\n")
    rows = run_main(*tiny, "--out", tmp_path / "run", "--reward", f"{tmp_path / 'reward.py'}:same")
    assert float(rows[1]["informative"]) == float(rows[1]["grad_norm"]) == float(rows[1]["kept"]) == 0
    assert capsys.readouterr().out.count("nothing to learn from") == 2
    model, before = (AutoModelForCausalLM.from_pretrained(f) for f in (tmp_path / "run" / "step-000002", tiny[1]))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters()))


def test_commonsense_in_both_public_shapes_runs_end_to_end(tiny, tmp_path):
    labels, texts, asked = list("ABC"), ["1", "2", "3"], []
    shapes = [lambda q, answer: {"question": {"stem": q, "choices": [{"label": label, "text": text} for label, text in
                                                                      zip(labels, texts)]}, "answerKey": answer},
              lambda q, answer: {"question": q, "choices": {"label": labels, "text": texts}, "answerKey": answer}]
    for shape in shapes:
        data = tmp_path / f"csqa{len(asked)}.jsonl"
        data.write_text("".join(json.dumps(shape(f"{i}+1=?", labels[i % 3])) + "\n" for i in range(60)))
        asked.append(gmts.load_problems(str(data)))
        rows = run_main(*tiny, "--data", data, "--out", tmp_path / f"run{len(asked)}")
        assert len(rows) == 3 and float(rows[2]["length"]) > 0
    assert asked[0] == asked[1] and asked[0][4] == ("4+1=?\n(A) 1\n(B) 2\n(C) 3", "B")
    question, answer = asked[0][4]
    right = ["\\boxed{B}", "The answer is (B) 2.", "Answer: B", "#### B", "\\boxed{\\text{(B)}}"]
    assert all(gmts.is_correct(text, answer) for text in right)
    assert not any(gmts.is_correct(text, answer) for text in ("\\boxed{A}", "B or C, the answer is C", "B"))


def test_the_demo_learns_and_shuffled_rewards_do_not(tmp_path):
    """The demo's warm start, saved, then 25 steps on right answers, or on the toss of a coin."""
    gmts.set_seed(0)
    for part in gmts.demo_model(gmts.demo_problems()):
        part.save_pretrained(tmp_path / "warm")
    (tmp_path / "coin.py").write_text("import random\ndef toss(completion, answer):\n    return random.randint(0, 1)\n"
                                      "def right(completion, answer):\n    return completion.endswith('####' + answer)\n")
    flags = ["--model", tmp_path / "warm", "--data", "demo", "--prompt", "{question}", "--samples", 8, "--max-tokens", 34,
             "--lr", 5e-4, "--warmup", 5, "--steps", 25, "--eval-size", 100, "--eval-every", 0]
    learned = run_main(*flags, "--out", tmp_path / "learned")
    early, late = (sum(float(row["reward"]) for row in rows) / 5 for rows in (learned[1:6], learned[-5:]))
    assert late > early + 0.15
    assert float(learned[-1]["accuracy"]) > float(learned[0]["accuracy"]) + 0.2
    run_main(*flags, "--out", tmp_path / "coin", "--reward", f"{tmp_path / 'coin.py'}:toss")
    judged = run_main(*flags, "--model", tmp_path / "coin" / "step-000025", "--steps", 0, "--out", tmp_path / "judged")
    assert float(judged[0]["accuracy"]) < float(learned[0]["accuracy"]) + 0.1


def rank_correlation(x, y):
    """Spearman's, with the mean rank for equal values, in plain Python."""
    def ranks(values):
        return [sum(v < u for v in values) + (sum(v == u for v in values) + 1) / 2 for u in values]
    return np.corrcoef(ranks(x), ranks(y))[0, 1]


def test_audit_prints_what_single_tokens_do(tokenizer, capsys, monkeypatch):
    """Every printed figure from scratch: a full forward and backward pass for each audited token."""
    model, audited = tiny_model(scale=4), []
    run = make_run(model, tokenizer, audit=60, prompts=3, samples=8, max_tokens=12, temperature=0.8, fraction=0.2)
    run.tokenize, run.ends, run.problems = tokenizer, {0}, [(p, "1") for p in PROMPTS]
    tokenizer.pad_token = tokenizer.eos_token
    run.reward = lambda text, answer: float(text.count("1"))
    computed = gmts.policy_gradient
    monkeypatch.setattr(gmts, "policy_gradient", lambda *a: audited.append((a[1], a[2].clone())) or computed(*a))
    before = [p.clone() for p in model.parameters()]
    torch.manual_seed(0)
    gmts.audit(run)
    title, header, *lines = capsys.readouterr().out.strip().split("\n")
    printed = {name: [float(x) for x in figures] for name, *figures in map(str.split, lines)}
    table, batch = [], audited[0][0]
    every = full_logits(model, batch)
    for _, keep in audited:
        (row, column), = keep.nonzero().tolist()
        logits = every[row, column]
        policy, A = Categorical(logits=logits / 0.8), batch.advantages[row]
        logprob = policy.log_prob(batch.tokens[row, column])
        whole = torch.autograd.grad(A * logprob, list(model.parameters()), retain_graph=True, allow_unused=True)
        last, = torch.autograd.grad(A * logprob, logits, retain_graph=True)
        norm = sum(g.square().sum() for g in whole if g is not None).sqrt()
        table.append([x.item() for x in (norm, policy.entropy() * A.abs(), policy.entropy(), last.norm(), A.abs())] + [row])
    true, *scores, rows = zip(*table)
    assert title == f"60 tokens of {len(set(rows))} answers" and len(set(rows)) >= 6 and 0 not in scores[3]
    assert set(printed) == {"gmts", "entropy", "exact", "random", "|A|"}
    for name, score in zip(("gmts", "entropy", "exact", "|A|"), scores):
        inside = [rank_correlation(*zip(*((s, n) for s, n, r in zip(score, true, rows) if r == row)))
                  for row in set(rows) if rows.count(row) > 2]
        best = sorted(range(60), key=lambda i: -score[i])[:12]
        mass = sum(true[i] for i in best) / sum(sorted(true)[-12:])
        expected = [rank_correlation(score, true), np.nanmean(inside) if name != "|A|" else math.nan]
        assert printed[name][:2] == pytest.approx(expected, abs=2e-3, nan_ok=True)
        assert name == "|A|" or printed[name][2] == pytest.approx(mass, abs=2e-3)          # |A| has ties
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())) and run.optimizer.state_dict()["state"] == {}


def test_audit_on_the_command_line(tiny, tmp_path, capsys):
    gmts.main([str(flag) for flag in (*tiny, "--out", tmp_path / "run", "--audit", 5)])
    printed = capsys.readouterr().out
    assert "5 tokens of 1 answers" in printed and "step" not in printed.split("tokens of")[1]
    (tmp_path / "reward.py").write_text("def same(completion, answer):\n    return 0\n")
    assert "equal rewards" in fails(capsys, *tiny, "--out", tmp_path / "b", "--audit", 5,
                                    "--reward", f"{tmp_path / 'reward.py'}:same")


def test_show_marks_the_kept_tokens(tokenizer, capsys, monkeypatch):
    model = tiny_model(scale=3)
    batch = make_batch(model, tokenizer)
    run = make_run(model, tokenizer, show=True)
    gmts.learn(run, batch)
    _, keep, _ = run.shown
    gmts.show(run)
    right, best, wrong, _ = capsys.readouterr().out.strip().split("\n")
    for line, good in ((right, batch.advantages > 0), (wrong, batch.advantages < 0)):
        row = max(good.nonzero()[:, 0].tolist(), key=lambda i: (keep[i].sum().item(), -i))
        words = [tokenizer.decode([i]) for i in batch.tokens[row][batch.mask[row]].tolist()]
        marked = [f"[{word}]" if kept else word for word, kept in zip(words, keep[row].tolist())]
        assert line.strip() in (f"right: {''.join(marked)}", f"wrong: {''.join(marked)}") and keep[row].any()
    row = max((batch.advantages > 0).nonzero()[:, 0].tolist(), key=lambda i: (keep[i].sum().item(), -i))
    five = sorted((batch.advantages[row] * batch.stats[1, row] * batch.mask[row]).tolist())[:-6:-1]
    assert [float(x) for x in re.findall(r"' (\d+\.\d+)", best)] == pytest.approx(five, abs=1e-3)
    assert "largest gmts scores" in best
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    gmts.show(run)
    assert "\033[7m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    run.tokenizer = gmts.argparse.Namespace(decode=lambda ids: "\033[2J\n" * len(ids))        # would clear a terminal
    gmts.show(run)
    printed = capsys.readouterr().out
    assert "\033" not in printed and "\\x1b[2J\\n" in printed and printed.count("\n") == 4
    batch.advantages.zero_()
    gmts.learn(run, batch)
    gmts.show(run)
    assert "right: none" in capsys.readouterr().out


def test_show_prints_after_each_evaluation(tiny, tmp_path, capsys):
    run_main(*tiny, "--out", tmp_path / "run", "--show", "--eval-every", 1)
    assert capsys.readouterr().out.count("largest gmts scores") == 4                          # 2 steps, 2 answers each


# ---- The command line and the documents --------------------------------------------------------------------
def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        gmts.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and all(flag(f) in text for f in gmts.fields(gmts.Config))


def test_flags_override_the_defaults_of_the_demo():
    assert gmts.parse([]).samples == 8 and gmts.parse([]).lr == 3e-4 and gmts.parse([]).prompt == "{question}"
    assert gmts.parse(["--samples", "5"]).samples == 5
    assert gmts.parse(["--model", "Qwen2.5-0.5B"]).samples == 16 and gmts.parse(["--model", "x"]).lr == 1e-6


def test_a_bare_name_gets_its_organisation(monkeypatch):
    asked = []
    monkeypatch.setattr(gmts.AutoModelForCausalLM, "from_pretrained", lambda name, **_: asked.append(name) or torch.nn.Linear(1, 1))
    monkeypatch.setattr(gmts.AutoTokenizer, "from_pretrained", lambda name: gmts.argparse.Namespace(pad_token="p"))
    for name in ("Qwen2.5-0.5B", "SmolLM2-135M", "my/own", "Llama-3.2-1B"):
        gmts.load_model(name, "float32")
    assert asked == ["Qwen/Qwen2.5-0.5B", "HuggingFaceTB/SmolLM2-135M", "my/own", "meta-llama/Llama-3.2-1B"]


def test_readme_explains_every_column_and_knows_every_flag():
    readme = open(os.path.join(HERE, "README.md")).read()
    assert all(f"`{column}`" in readme for column in gmts.COLUMNS)
    known = {flag(f) for f in gmts.fields(gmts.Config)} | {"--nproc-per-node", "--help"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", readme)) <= known


def test_the_file_keeps_to_its_limits():
    lines = open(os.path.join(HERE, "gmts.py")).read().split("\n")
    assert len(lines) <= 750 and max(map(len, lines)) <= 110


# ---- Nothing lost: checkpoints, signals, several processes --------------------------------------------------
TIMES = ("tokens_per_s", "seconds", "peak_gb")


def without_times(rows):
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def start(*flags, **environment):
    command = [sys.executable, os.path.join(HERE, "gmts.py"), *map(str, flags)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment)


def wait_for(process, text):
    """Reads the process's lines until one contains `text`."""
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"ended without saying {text!r}")


def metrics(out):
    with open(os.path.join(out, "metrics.csv")) as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("extra", [[], ["--dtype", "bfloat16", "--beta", "0.1", "--select", "random", "--updates", "2"]])
def test_killed_and_resumed_gives_the_same_figures(tiny, tmp_path, extra):
    flags = [*tiny, "--steps", 6, "--save-every", 2, "--eval-every", 3, *extra]
    start(*flags, "--out", tmp_path / "whole").communicate(timeout=60)
    process = start(*flags, "--out", tmp_path / "cut")
    wait_for(process, "step 3 ")
    process.kill()                                                                       # kill -9
    process.wait()
    assert len(gmts.checkpoints(str(tmp_path / "cut"))) == 1
    start("--resume", "--out", tmp_path / "cut").communicate(timeout=60)
    resumed, whole = metrics(tmp_path / "cut"), metrics(tmp_path / "whole")
    assert without_times(resumed) == without_times(whole) and len(whole) == 7
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "step-000006") for name in ("whole", "cut"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_last_whole_step(tiny, tmp_path, sent):
    flags = [*tiny, "--steps", 400, "--save-every", 1000, "--eval-every", 0, "--out", tmp_path / "run"]
    process = start(*flags)
    wait_for(process, "step 4 ")
    process.send_signal(sent)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "stopped; --resume goes on" in said and "Traceback" not in said
    steps = [int(row["step"]) for row in metrics(tmp_path / "run")]
    saved, = gmts.checkpoints(str(tmp_path / "run"))
    assert steps == list(range(steps[-1] + 1)) and int(saved[-6:]) == steps[-1] >= 4
    AutoModelForCausalLM.from_pretrained(saved)


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_a_signal_in_an_evaluation_loses_nothing(tiny, tmp_path, capsys, monkeypatch, moment):
    """Before the first step, in the middle, after the last: the row waits for its accuracy until the resume."""
    flags, evaluate, calls = [*tiny, "--eval-every", 1], gmts.evaluate, []
    whole = run_main(*flags, "--out", tmp_path / "whole")

    def interrupted(run):
        calls.append(run.step)
        if len(calls) == moment:
            raise KeyboardInterrupt
        return evaluate(run)
    monkeypatch.setattr(gmts, "evaluate", interrupted)
    with pytest.raises(SystemExit) as stop:
        gmts.main([str(flag) for flag in (*flags, "--out", tmp_path / "cut")])
    assert stop.value.code == 130 and "--resume goes on" in capsys.readouterr().err
    assert without_times(run_main("--resume", "--out", tmp_path / "cut")) == without_times(whole)
    assert calls == list(range(moment)) + list(range(moment - 1, 3))


def test_a_kill_at_any_moment_of_saving_leaves_a_whole_checkpoint(tiny, tmp_path, monkeypatch):
    """Fails, in turn, every call that saving makes, as a kill would, and looks for a whole checkpoint each time."""
    run = gmts.prepare(gmts.parse([str(f) for f in [*tiny, "--out", tmp_path / "run"]]))
    gmts.save_checkpoint(run)
    for target, name in [(run.model, "save_pretrained"), (run.tokenizer, "save_pretrained"), (torch, "save"),
                         (os, "rename"), (gmts.shutil, "rmtree")]:
        run.step += 1
        with monkeypatch.context() as patch:
            patch.setattr(target, name, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                gmts.save_checkpoint(run)
        newest = gmts.checkpoints(run.config.out)[-1]
        AutoModelForCausalLM.from_pretrained(newest)
        assert torch.load(newest + "/trainer.pt", weights_only=True)["step"] == int(newest[-6:])
    run.step += 1
    gmts.save_checkpoint(run)
    assert [os.path.basename(path) for path in gmts.checkpoints(run.config.out)] == [f"step-{run.step:06d}"]


def parallel_worker(rank, folder):
    """One of two processes: its half of a batch, and a shard of the gradient that must add up to the whole."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=open(folder + "/port").read())
    torch.distributed.init_process_group("gloo")
    whole, model = torch.load(folder + "/batch.pt", weights_only=False), tiny_model(scale=3)
    for case, (updates, beta, cut) in enumerate(CASES_OF_TWO):
        mine = slice(0, cut) if rank == 0 else slice(cut, len(whole.prompt_ids))
        rows = slice(mine.start * 4, mine.stop * 4)
        part = gmts.Batch(whole.prompt_ids[mine], whole.prompt_mask[mine], whole.owner[rows] - mine.start,
                          whole.advantages[rows], whole.tokens[rows], whole.mask[rows], whole.stats[:, rows])
        torch.save(learn_recorded(model, part, rank, 2, updates, beta), f"{folder}/{case}-{rank}.pt")
    torch.distributed.destroy_process_group()


CASES_OF_TWO = [(1, 0.0, 2), (1, 0.2, 1), (2, 0.0, 2), (1, 0.0, 3)]        # updates, beta, prompts of the first process


def learn_recorded(model, batch, rank, world, updates, beta):
    """What learn() keeps and the gradient (before clipping) that it would take a step on."""
    kept, taken, original = [], [], gmts.policy_gradient
    run = make_run(model, None, updates=updates, beta=beta)
    run.rank, run.world, run.reference = rank, world, tiny_model(scale=3.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gmts, "policy_gradient", lambda m, b, keep, *rest: kept.append(keep.clone()) or original(m, b, keep, *rest))
        patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda p, _: taken.append(gradients(model)) or taken[-1].norm())
        patch.setattr(run.optimizer, "step", lambda: None)
        sums, norms = gmts.learn(run, batch)
    return dict(kept=kept, taken=taken, sums=sums)


def test_two_processes_are_one(tmp_path, tokenizer):
    """Same rollouts in: the same tokens kept and the same gradient as in one process; the last case leaves the second
    process a single group without any signal."""
    batch = make_batch(tiny_model(scale=3), tokenizer)
    batch.advantages[12:] = 0
    torch.save(batch, tmp_path / "batch.pt")
    with gmts.contextlib.closing(__import__("socket").socket()) as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    torch.multiprocessing.spawn(parallel_worker, (str(tmp_path),), nprocs=2)
    for case, (updates, beta, _) in enumerate(CASES_OF_TWO):
        if updates > 1:
            continue                                   # slices are made of each process's own groups: see below
        one = learn_recorded(tiny_model(scale=3), batch, 0, 1, updates, beta)
        halves = [torch.load(tmp_path / f"{case}-{rank}.pt", weights_only=True) for rank in (0, 1)]
        assert torch.equal(torch.cat([half["kept"][0] for half in halves]), one["kept"][0])
        assert np.allclose(np.sum([half["sums"] for half in halves], axis=0), one["sums"], rtol=1e-5)
        for half in halves:
            assert torch.allclose(half["taken"][0], one["taken"][0], atol=1e-6)
    halves = [torch.load(tmp_path / f"2-{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert len(halves[0]["taken"]) == len(halves[1]["taken"]) == 2
    assert all(torch.equal(a, b) for a, b in zip(halves[0]["taken"], halves[1]["taken"]))


def test_torchrun(tiny, tmp_path):
    """Two processes over three prompts: one log, one checkpoint, the model the same as it would be on its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               os.path.join(HERE, "gmts.py"), *map(str, tiny), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 1 ") == 1 and "on 2 x cpu" in done.stdout
    assert [row["step"] for row in metrics(tmp_path / "run")] == ["0", "1", "2"]
    assert len(gmts.checkpoints(str(tmp_path / "run"))) == 1


def test_when_one_process_dies_the_others_end(tiny, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               os.path.join(HERE, "gmts.py"), *map(str, tiny), "--steps", "4000", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                               env=os.environ | {"OMP_NUM_THREADS": "1"})
    wait_for(process, "step 2 ")
    workers = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "gmts.py"], capture_output=True, text=True).stdout.split()
    assert len(workers) == 2
    os.kill(int(workers[1]), signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode != 0


# ---- Nothing silent: what goes wrong ends in one line -------------------------------------------------------
def fails(capsys, *flags):
    """The one line on stderr with which the command line ends, with exit status 2."""
    with pytest.raises(SystemExit) as stop:
        gmts.main([str(flag) for flag in flags])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and said.startswith("gmts.py: ") and len(said) < 1100, said
    return said


@pytest.mark.parametrize("flags, words", [
    (["--sample", 4], "--sample"),
    (["--steps", "many"], "--steps"),
    (["--select", "best"], "--select"),
    (["--fraction", 0], "--fraction"),
    (["--fraction", 1.1], "--fraction"),
    (["--fraction", "nan"], "--fraction"),
    (["--samples", 1], "--samples"),
    (["--temperature", 0], "--temperature"),
    (["--lr", -1], "--lr"),
    (["--device", "toaster"], "--device toaster"),
    (["--data", "missing.jsonl"], "missing.jsonl"),
    (["--eval-data", "missing.jsonl"], "missing.jsonl"),
    (["--model", "/missing/model"], "/missing/model"),
    (["--reward", "missing.py:f"], "missing.py"),
    (["--reward", "nonsense"], "nonsense"),
    (["--resume"], "--resume"),
    (["--out", "/proc/run"], "/proc/run"),
])
def test_bad_flags_end_in_one_line(tiny, tmp_path, capsys, flags, words):
    assert words in fails(capsys, *tiny, "--out", tmp_path / "run", *flags)


@pytest.mark.parametrize("content, words", [
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
])
def test_bad_data_ends_in_one_line(tiny, tmp_path, capsys, content, words):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content.encode("latin-1"))
    said = fails(capsys, *tiny, "--out", tmp_path / "run", "--data", path)
    assert words in said and str(path) in said


@pytest.mark.parametrize("body, words", [
    ("raise RuntimeError('broken at load')", "broken at load"),
    ("def f(completion, answer):\n    return 1 / 0", "division by zero"),
    ("def f(completion, answer):\n    return None", "NoneType"),
    ("def f(completion, answer):\n    return float('nan')", "not a finite number"),
    ("def f(completion, answer):\n    return 'good'", "good"),
    ("def g(completion, answer):\n    return 1", "f"),
])
def test_bad_rewards_end_in_one_line(tiny, tmp_path, capsys, body, words):
    (tmp_path / "reward.py").write_text(body)
    assert words in fails(capsys, *tiny, "--out", tmp_path / "run", "--reward", f"{tmp_path / 'reward.py'}:f")


def test_bad_models_end_in_one_line(tiny, tmp_path, capsys, tokenizer, monkeypatch):
    flags = [*tiny, "--out", tmp_path / "run"]
    model = tmp_path / "model"
    save_model(model, tokenizer)
    (model / "model.safetensors").write_bytes(b"damaged")
    assert "model" in fails(capsys, *flags, "--model", model)
    save_model(tmp_path / "short", tokenizer, max_position_embeddings=16)
    assert "no prompt fits" in fails(capsys, *tiny, "--out", tmp_path / "a", "--model", tmp_path / "short")
    endless = tiny_model(eos_token_id=None)
    endless.generation_config.eos_token_id = None
    silent = transformers.PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(tokenizer.backend_tokenizer))
    monkeypatch.setattr(gmts, "load_model", lambda *_, **__: (endless, silent))
    assert "no end token" in fails(capsys, *tiny, "--out", tmp_path / "b")


def test_long_prompts_are_left_out_and_counted(tiny, tmp_path, capsys, tokenizer):
    with open(tmp_path / "data.jsonl", "w") as file:
        file.writelines(json.dumps({"question": "1" * (10 + 2 * i), "answer": 1}) + "\n" for i in range(50))
    save_model(tmp_path / "model", tokenizer, max_position_embeddings=64)
    run_main(*tiny, "--out", tmp_path / "run", "--data", tmp_path / "data.jsonl", "--model", tmp_path / "model",
             "--eval-data", tiny[3])
    assert "28 left out as too long" in capsys.readouterr().out              # 64 - 12 = 52 tokens fit: 22 questions


def test_bad_resumes_end_in_one_line(tiny, tmp_path, capsys, tokenizer):
    out = tmp_path / "run"
    run_main(*tiny, "--out", out)
    assert str(out) in fails(capsys, *tiny, "--out", out)                                   # not overwritten
    assert "--seed 1: the run to resume has 0" in fails(capsys, *tiny, "--out", out, "--resume", "--seed", 1)
    assert "--select" in fails(capsys, "--out", out, "--resume", "--select", "random")
    assert "--resume" in fails(capsys, "--out", tmp_path / "nothing", "--resume")
    trainer = gmts.checkpoints(str(out))[0] + "/trainer.pt"
    with open(trainer, "r+b") as file:
        file.truncate(100)
    assert "checkpoint" in fails(capsys, "--out", out, "--resume")
    other = tiny_model(hidden_size=16)
    torch.save(dict(step=2, rows=[], masters=[], optimizer=gmts.make_optimizer(other).state_dict()
               | {"param_groups": [{"params": [0]}]}), trainer)
    assert "checkpoint" in fails(capsys, "--out", out, "--resume")
    gmts.shutil.rmtree(gmts.checkpoints(str(out))[0])
    assert "checkpoint" in fails(capsys, "--out", out, "--resume")


def test_a_run_of_bad_gradients_ends_with_its_last_good_checkpoint(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gmts, "policy_gradient", lambda *_: torch.tensor(math.nan))
    assert "not finite in 10 steps" in fails(capsys, *tiny, "--out", tmp_path / "run", "--steps", 30, "--eval-every", 0)
    assert [row["skipped"] for row in metrics(tmp_path / "run")] == [""] + ["1"] * 10
    saved, = gmts.checkpoints(str(tmp_path / "run"))
    model, before = (AutoModelForCausalLM.from_pretrained(f) for f in (saved, tiny[1]))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters()))


def test_out_of_memory_names_the_flags_to_lower(tiny, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(gmts, "policy_gradient", full)
    assert "--micro-tokens" in fails(capsys, *tiny, "--out", tmp_path / "run")


# ---- Models of many kinds -----------------------------------------------------------------------------------
KINDS = {
    "qwen2": (Qwen2Config, {}),
    "qwen2, sliding window": (Qwen2Config, dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3": (Qwen3Config, {}),
    "qwen3, tied": (Qwen3Config, dict(tie_word_embeddings=True)),
    "llama": (LlamaConfig, dict(tie_word_embeddings=False)),
    "mistral, sliding window": (transformers.MistralConfig, dict(sliding_window=6)),
    "gemma": (transformers.GemmaConfig, {}),
    "gemma 2": (transformers.Gemma2Config, dict(sliding_window=6, final_logit_softcapping=5.0, attn_logit_softcapping=20.0,
                                                query_pre_attn_scalar=8)),
    "gemma 3": (transformers.Gemma3TextConfig, dict(sliding_window=6, query_pre_attn_scalar=8)),
    "cohere": (transformers.CohereConfig, dict(logit_scale=0.25)),
    "granite": (transformers.GraniteConfig, dict(logits_scaling=3.0)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_samples_and_learns_exactly(kind, tokenizer):
    """The sampler's statistics, and the shared prompt's gradient, are those of plain full forwards."""
    config_class, options = KINDS[kind]
    model = tiny_model(config_class, scale=2, **options)
    batch = make_batch(model, tokenizer, samples=3, max_tokens=10)
    oracle = Categorical(logits=full_logits(model, batch)).log_prob(batch.tokens)
    assert torch.allclose(batch.stats[0][batch.mask], oracle[batch.mask], atol=1e-4)
    keep = gmts.select_top(batch.stats[1], batch.mask, 0.3)
    plain_loss(model, batch, keep).backward()
    wanted = gradients(model)
    model.zero_grad()
    gmts.policy_gradient(model, batch, keep, int(keep.sum()), config(micro_tokens=60), batch.stats[0])
    assert torch.allclose(gradients(model), wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3, tied", "llama", "gemma", "mistral, sliding window"])
def test_every_kind_of_model_trains(kind, tiny, tmp_path, tokenizer):
    config_class, options = KINDS[kind]
    model = save_model(tmp_path / "model", tokenizer, config_class, **options)
    rows = run_main(*tiny, "--out", tmp_path / "run", "--model", model)
    assert len(rows) == 3 and all(float(row["grad_norm"]) > 0 for row in rows[1:])


CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<stop>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


def test_chat_templates_and_end_tokens(tokenizer):
    model = tiny_model()
    assert gmts.render(tokenizer, "1+1=") == "1+1=" and gmts.end_tokens(model, tokenizer) == {0}
    model.generation_config.eos_token_id = [0, 5]
    assert gmts.end_tokens(model, tokenizer) == {0, 5}
    chatty = gmts.demo_model([("1+1=", "2")], steps=0)[1]
    chatty.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    chatty.chat_template = CHAT
    assert gmts.render(chatty, "1+1=") == "<user>1+1=<stop><a>"
    assert gmts.end_tokens(model, chatty) == {0, 5, chatty.convert_tokens_to_ids("<stop>")}


# ---- The README's recipes, each block found by its first line and run as it stands there -----------------------
def recipe(name, run_name="recipe"):
    """Runs the code block of README.md whose first line is `# recipe: NAME` -> what it defines."""
    text = open(os.path.join(HERE, "README.md")).read()
    block, = re.findall(rf"^```python\n(# recipe: {re.escape(name)}\n.*?)^```$", text, re.M | re.S)
    assert max(map(len, block.split("\n"))) <= 110, name
    names = {"__name__": run_name, "BLOCK": block}
    exec(compile(block, f"README.md: {name}", "exec"), names)
    return names


def oracle_loss(logits, tokens, mask, advantages, informative, fraction=0.2, temperature=1.0):
    """The mean of -A log pi over the kept tokens, one by one -> the loss, the kept tokens as (row, column).
    On policy its gradient is that of the clipped objective, whose own value has the ratio, 1, for log pi."""
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
    assert names["score"]("98 - 6 = 92.", "92") == 1 == names["score"]("It is 1,200", "1200")
    assert names["score"]("92 is 98 - 6", "92") == 0 == names["score"]("", "92") == names["score"]("twelve", "12")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_plain_recipe_equals_the_sum_over_kept_tokens(temperature):
    torch.manual_seed(0)
    logits = (3 * torch.randn(12, 9, 17)).requires_grad_()
    tokens, mask = torch.randint(17, (12, 9)), torch.arange(9) < torch.randint(1, 10, (12, 1))
    rewards = torch.tensor([[0.1] * 4, [1, 0, 0, 0.0], [0, 0.5, 1, 0.5]])   # the last has an A of 0
    loss = recipe("plain PyTorch")["gmts_loss"](logits, tokens, mask, rewards, temperature)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True, correction=0)
    informative = torch.arange(12) >= 4
    advantages = torch.where(informative, advantages.flatten(), 0.0)
    expected, kept = oracle_loss(logits, tokens, mask, advantages, informative, temperature=temperature)
    assert len(kept) == -(-mask[4:].sum().item() // 5)
    assert loss.item() == pytest.approx(-sum(advantages[n].item() for n, _ in kept) / len(kept), abs=1e-5)
    gradient, other = (torch.autograd.grad(x, logits)[0] for x in (loss, expected))
    assert torch.allclose(gradient, other, atol=1e-6) and gradient.abs().sum() > 0
    nothing = recipe("plain PyTorch")["gmts_loss"](logits, tokens, mask, torch.ones(3, 4), temperature)
    assert nothing.item() == 0 and not torch.autograd.grad(nothing, logits)[0].any()


@pytest.mark.parametrize("signal, beta", [("most", 0.0), ("little", 0.0), ("none", 0.0), ("most", 0.3)])
def test_trl_recipe(tokenizer, tmp_path, signal, beta):
    """Two steps of two micro-batches: kept tokens, denominator and gradient, against full logits."""
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import GRPOConfig
    Trainer, checked, temperature = recipe("TRL 1.16")["GMTSTrainer"], [], 0.7
    words, initial = copy.deepcopy(tokenizer), tiny_model(seed=1)
    words.pad_token = words.eos_token
    initial.save_pretrained(tmp_path / "model")

    class Checked(Trainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            tokens, mask, A = batch["completion_ids"], batch["completion_mask"].bool(), batch["advantages"]
            rows = []                                # each alone and without padding
            for prompt, seen, answer in zip(batch["prompt_ids"], batch["prompt_mask"].bool(), tokens):
                ids = torch.cat([prompt[seen], answer])[None]
                rows.append([f(input_ids=ids).logits[0, seen.sum() - 1:-1] for f in (self.model, initial)])
            logits, reference = (torch.stack(row) for row in zip(*rows))
            old, entropy, _ = gmts.token_stats(logits.detach(), tokens, temperature)
            ref = gmts.token_stats(reference.detach(), tokens, temperature)[0]
            omega = A[:, None] + beta * ((ref - old).exp() - 1)
            ranked = mask & A.view(-1, 4).ne(0).any(1).repeat_interleave(4)[:, None]
            keep = gmts.select_top(entropy * omega.abs(), ranked, 0.2)
            assert torch.equal(batch["tool_mask"].bool(), keep) and batch["num_items_in_batch"] == keep.sum()
            assert keep.sum() == -(-ranked.sum() // 5) and mask[~ranked].any() == (signal != "most")
            assert ranked.any() == (signal != "none") and not mask.all()
            logprob = Categorical(logits=logits / temperature).log_prob(tokens)
            loss = -(logprob * omega * keep).sum() / keep.sum().clamp_min(1)
            gradient = torch.autograd.grad(loss, list(self.model.parameters()))
            checked.append(torch.cat([g.flatten() for g in gradient]))
            return batch

    class Compare(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
            assert torch.allclose(gradient, checked[-1], atol=1e-5 + 1e-4 * checked[-1].abs().max())
            checked.append("compared")

    def reward(completions, **_):
        return dict(most=[1.0, 0, 0, 1, 0, 0, 1, 0], little=[0, 1, 0, 0] + [0.1] * 4, none=[0.1] * 8)[signal]

    settings = GRPOConfig(
        output_dir=str(tmp_path / "out"), model_init_kwargs={"dtype": "float32"}, bf16=False, use_cpu=True,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4, max_steps=2, seed=3,
        max_completion_length=24, learning_rate=1e-2, temperature=temperature, beta=beta, max_grad_norm=0.0,
        use_bias_correction_kl=False, report_to="none", save_strategy="no", disable_tqdm=True)
    prompts = Dataset.from_list([{"prompt": prompt} for prompt in ("1+2=", "348+214=", "99+1=", "7=")])
    trainer = Checked(str(tmp_path / "model"), reward, settings, prompts, processing_class=words)
    trainer.add_callback(Compare())
    trainer.train()
    assert [x for x in checked if isinstance(x, str)] == ["compared"] * 2
    changed = any(not torch.equal(a, b) for a, b in zip(trainer.model.parameters(), initial.parameters()))
    assert changed == (signal != "none")


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
    best = sorted(ranked, key=lambda x: (-x[0], x[1], x[2]))[:-(-len(ranked) // 5)]
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

    def ppo_loss(config, entropy, weights=None):          # calls as verl/workers/utils/losses.py does
        return gmts_loss(old_log_prob=old, log_prob=logprob, advantages=advantages, response_mask=mask,
                         loss_agg_mode="token-mean", config=config, rollout_is_weights=weights)

    config = types.SimpleNamespace(clip_ratio_low=0.2, clip_ratio_high=0.28, global_batch_info={})
    loss, figures = ppo_loss(config, batch[4])
    expected, share = verl_oracle(*batch, tokens=36)
    gradient, = torch.autograd.grad(loss, logprob)
    assert torch.allclose(gradient, expected, atol=1e-6)
    assert figures == {"actor/gmts_kept": pytest.approx(share)}
    config.global_batch_info = dict(dp_size=2, batch_num_tokens=200, global_batch_size=40)
    gradient, = torch.autograd.grad(ppo_loss(config, batch[4])[0], logprob)
    assert torch.allclose(gradient, expected * 36 / 100, atol=1e-6)
    doubled, = torch.autograd.grad(ppo_loss(config, batch[4], 2 * torch.ones_like(old))[0], logprob)
    assert torch.allclose(doubled, 2 * gradient, atol=1e-6)
    with pytest.raises(ValueError, match="calculate_entropy"):
        ppo_loss(config, None)
    advantages = advantages * 0                            # no signal: it can go backward and moves nothing
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

    def whole(x):                      # an engine's output: prompts included, each value one place early
        rows = [F.pad(row[:n], (p - 1, 1)) for p, row, n in zip(prompts, x, lengths)]
        ends = torch.tensor([0] + [len(row) for row in rows]).cumsum(0)
        return torch.nested.nested_tensor_from_jagged(torch.cat(rows), ends)

    data = TensorDict(dict(
        prompts=jagged([torch.zeros(p) for p in prompts]), responses=per_answer(old),
        response_mask=per_answer(mask.long()), advantages=per_answer(advantages),
        old_log_probs=per_answer(old)), batch_size=[6])
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
RIGHT_PROGRAMS = {
    "plain": ADD,
    "fenced": f"Perhaps\n```python\ndef add(a, b): return 0\n```\nNo:\n```python\n{ADD}```\nDone.",
    "cut off behind the code": f"```python\n{ADD}",
    "noisy": f"print('x' * 10**7)\n{ADD}",
    "another main": f"{ADD}\nif __name__ == '__main__':\n    add(input())",
    "library": f"import collections, dataclasses, typing, math, heapq\nP = collections.namedtuple('P', 'x')\n"
               f"@dataclasses.dataclass\nclass D:\n    x: 'int' = 0\n{ADD}",
}
FRAME = "import sys\ntry:\n    {}\nexcept ValueError:\n    raise SystemExit\n"
WRONG_PROGRAMS = {
    "wrong": "def add(a, b):\n    return a - b",
    "half right": "def add(a, b):\n    return 3",
    "empty": "",
    "prose": "The answer is add.",
    "no such name": "def plus(a, b):\n    return a + b",
    "null byte": ADD + "\0",
    "lone surrogate": ADD + "\udc80",
    "deeply nested": "x = " + "(" * 5000 + ")" * 5000,
    "sys.exit": f"{ADD}\nimport sys\nsys.exit(0)",
    "os._exit": f"{ADD}\nimport os\nos._exit(0)",
    "exit in a test": "import os\ndef add(a, b):\n    os._exit(0)",
    "SystemExit in a test": "def add(a, b):\n    raise SystemExit",
    "claims": "print('ok', 'passed', 1.0, True)",
    "AssertionError": "import builtins\nclass AssertionError(Warning): pass\n"
                      "builtins.AssertionError = AssertionError\ndef add(a, b): return 5",
    "monkeypatch": "import builtins, os, sys\nadd = lambda *_, **__: None\n"
                   "builtins.exec = builtins.compile = sys.excepthook = sys.exit = os.write = add",
    "closes": "import os, sys\nsys.stdout.close()\nos.closerange(0, 99)\n" + ADD,
    "floods every pipe": "import os\nfor fd in range(9):\n    try: os.write(fd, b'x' * 60000)\n"
                         f"    except OSError: pass\n{ADD}",
    "reads its input": "import os, sys\ndef add(a, b): return os.read(0, 99) or sys.stdin.read()",
    "memory": "import mmap\nx = mmap.mmap(-1, 2 * 10**9)\n" + ADD,
    "memory, bit by bit": "x = []\nwhile True: x.append(bytearray(10**7))",
    "disk": "open('x', 'wb').write(bytes(2 * 10**6))\n" + ADD,
    "deep folders": "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')",
    "forks": f"import os, time\n{ADD}\nif os.fork() == 0: time.sleep(60)",
    "fork bomb": "import os\nwhile True: os.fork()",
    "background": f"import subprocess\n{ADD}\nsubprocess.Popen(['sleep', '60'])",
    "shell": f"import os\n{ADD}\nos.system('sleep 60 &')",
    "kills its parent": f"import os\n{ADD}\nos.kill(os.getppid(), 15)",
    "through C": f"import ctypes, os\n{ADD}\nctypes.CDLL(None).kill(os.getppid(), 15)",
    "frames": FRAME.format("key = sys._getframe(1).f_locals['key']") + ADD,
    "traceback": FRAME.format("try: 1 / 0\n    except Exception as e: e.__traceback__.tb_frame") + ADD,
    "generator": FRAME.format("(x for x in 'x').gi_frame") + ADD,
    "garbage": FRAME.format("import gc; gc.get_objects()") + ADD,
    "trace": FRAME.format("sys.settrace(print)") + ADD,
    "thread": "import threading, time\nthreading.Thread(target=time.sleep, args=[60]).start()",
    "ignores signals": "from signal import *\nfor s in valid_signals() - {9, 19}: signal(s, SIG_IGN)\n"
                       "while True: pass",
    "exit hook": "import atexit, time\natexit.register(time.sleep, 60)",
}


@pytest.fixture(scope="module")
def reward_code():
    names = recipe("reward_code.py")
    names["SECONDS"] = 1
    return names["score"]


@pytest.mark.parametrize("name", RIGHT_PROGRAMS)
def test_code_reward_of_right_programs(reward_code, name, monkeypatch):
    monkeypatch.setitem(reward_code.__globals__, "SECONDS", 10)                             # the machine may be busy
    assert reward_code(RIGHT_PROGRAMS[name], TESTS) == 1.0


@pytest.mark.parametrize("name", WRONG_PROGRAMS)
def test_code_reward_of_wrong_and_hostile_programs(reward_code, name):
    start = time.perf_counter()
    assert reward_code(WRONG_PROGRAMS[name], TESTS) == 0.0
    assert time.perf_counter() - start < 10


def test_code_reward_in_a_run(tiny, tmp_path):
    """Whatever compiles is right here: some of a random model's digits and plus signs do."""
    (tmp_path / "reward_code.py").write_text(recipe("reward_code.py")["BLOCK"])
    (tmp_path / "data.jsonl").write_text("".join(
        json.dumps({"question": f"{i}+1=", "answer": "assert True\nassert 1"}) + "\n" for i in range(60)))
    rows = run_main(*tiny, "--out", tmp_path / "run", "--data", tmp_path / "data.jsonl", "--max-tokens", 3,
                    "--reward", f"{tmp_path / 'reward_code.py'}:score", "--steps", 1, "--eval-size", 3)
    assert 0 < float(rows[1]["reward"]) < 1 and float(rows[1]["kept"]) > 0


# ---- The benchmark: GMTS_BENCH=1 [GMTS_BENCH_MODEL=folder of SmolLM2-135M] pytest -s -k bench ----------------
# Both sides in processes of their own, in turn: same model, prompts, group size, lengths, dtype and threads.
def bench_setting(name, folder):
    """-> model folder (made where it is missing), 8 prompts of about 70 tokens, longest answer."""
    if name == "smollm2":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        words = "There are {} boxes of pens in the shop and each box holds {} pens. How many pens are there in all of them?"
        return folder, [gmts.render(tokenizer, words.format(7 + i, 12 + i)) for i in range(8)], 64
    if not os.path.exists(folder):
        torch.manual_seed(0)
        vocabulary = int(name.split("-")[1])
        words = gmts.Tokenizer(gmts.models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w1"))
        words.pre_tokenizer = gmts.pre_tokenizers.Whitespace()
        gmts.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0").save_pretrained(folder)
        AutoModelForCausalLM.from_config(Qwen2Config(
            vocab_size=vocabulary, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=0)).save_pretrained(folder)
    return folder, [" ".join(f"w{7 * i + j}" for j in range(70)) for i in range(8)], 128


def bench_step(side, name, folder, repeats, samples=8, longer=1, fraction=0.2):
    """Whole steps of 8 prompts x 8 answers, all of full length -> medians of seconds and the peak memory in GB."""
    folder, prompts, length = bench_setting(name, folder)
    length, tokenizer = length * longer, gmts.PreTrainedTokenizerFast.from_pretrained(folder)
    counter, times, marks = iter(range(10**9)), [], []
    if side != "trl":                                # "half": every other group has equal rewards
        model = gmts.load_model(folder, "float32")[0]
        run = make_run(model, tokenizer, prompts=8, samples=samples, max_tokens=length, fraction=fraction,
                       micro_tokens=2048, lr=1e-6)
        run.problems, run.step, run.ends = [(prompt, "") for prompt in prompts], 0, {-1}
        run.reward = lambda completion, answer: (n := next(counter)) % 3 * (side == "gmts" or n // samples % 2)
        run.tokenize = gmts.functools.partial(tokenizer, add_special_tokens=False)
        learn = gmts.learn
        gmts.learn = lambda *args: (marks.append(time.perf_counter()), learn(*args))[1]
        for _ in range(repeats + 1):
            start = time.perf_counter()
            gmts.train_step(run)
            times.append((start, marks[-1], time.perf_counter()))
    else:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
        trainer = GRPOTrainer(
            folder, lambda completions, **_: [float(next(counter) % 3) for _ in completions],
            GRPOConfig(output_dir="/tmp/gmts-bench-trl", per_device_train_batch_size=64, num_generations=8,
                       max_completion_length=length, max_steps=repeats + 1, learning_rate=1e-6, beta=0.0, loss_type="dapo",
                       top_entropy_quantile=0.2, epsilon_high=0.28, temperature=1.0, bf16=False, use_cpu=True,
                       gradient_checkpointing=False, generation_kwargs={"min_new_tokens": length}, save_strategy="no",
                       report_to="none", logging_strategy="no", disable_tqdm=True, model_init_kwargs={"dtype": "float32"}),
            processing_class=tokenizer, train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]))

        class Watch(transformers.TrainerCallback):
            def on_step_begin(self, *_, **__):
                marks.append(time.perf_counter())

            def on_step_end(self, *_, **__):
                times.append((*marks[-2:], time.perf_counter()))
        generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda inputs: (generate(inputs), marks.append(time.perf_counter()))[0]
        trainer.add_callback(Watch())
        trainer.train()
    times = np.array(times[1:])
    parameters = sum(p.numel() for p in (run.model if side != "trl" else trainer.model).parameters())
    peak = gmts.resource.getrusage(gmts.resource.RUSAGE_SELF).ru_maxrss * 1024
    return dict(step=np.median(times[:, 2] - times[:, 0]), update=np.median(times[:, 2] - times[:, 1]),
                sampling=np.median(times[:, 1] - times[:, 0]), memory=(peak - 16 * parameters) / 1e9)


def bench_sampling(side, name, folder, repeats):
    """64 answers whose lengths are geometric with a mean of a quarter of the longest -> median seconds."""
    folder, prompts, length = bench_setting(name, folder)
    model, tokenizer = gmts.load_model(folder, "float32")[0], gmts.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt", add_special_tokens=False)
    lengths = torch.tensor(np.random.default_rng(0).geometric(4 / length, 64).clip(1, length))
    end, times, original = tokenizer.eos_token_id, [], gmts.draw

    class EndAt(transformers.LogitsProcessor):
        def __call__(self, ids, scores):
            done = lengths == ids.shape[1] - batch.input_ids.shape[1] + 1
            scores[:, end] = -math.inf
            scores[done] = -math.inf
            scores[done, end] = 0
            return scores

    for _ in range(repeats + 1):
        left, place = lengths.clone(), iter(range(1, length + 1))

        def draw(logits, temperature):
            nonlocal left
            ends, tokens = left == next(place), original(logits, temperature)
            left = left[~ends]
            return torch.where(ends, end, tokens.where(tokens != end, end + 1))
        start = time.perf_counter()
        if side == "gmts":
            gmts.draw = draw
            mask = gmts.sample(model, batch.input_ids, batch.attention_mask, 8, length, {end}, 1.0)[1]
            assert mask.sum(1).tolist() == lengths.tolist()
        else:
            model.generate(**batch, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=length,
                           num_return_sequences=8, eos_token_id=end, pad_token_id=end,
                           logits_processor=transformers.LogitsProcessorList([EndAt()]))
        times.append(time.perf_counter() - start)
    return dict(geometric=np.median(times[1:]))


def in_a_process(function, *arguments):
    code = f"import json, test_gmts; print(json.dumps(test_gmts.{function}(*{arguments!r}), default=float))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().split("\n")[-1])


bench = pytest.mark.skipif("GMTS_BENCH" not in os.environ, reason="the benchmark runs when GMTS_BENCH is set")


@bench
@pytest.mark.parametrize("name", ["smollm2", "qwen2-151936"])
def test_bench(name):
    folder = os.environ.get("GMTS_BENCH_MODEL", "") if name == "smollm2" else f"/tmp/gmts-bench-{name}"
    if name == "smollm2" and not folder:
        pytest.skip("GMTS_BENCH_MODEL is not set")
    pytest.importorskip("trl")
    bench_setting(name, folder)
    results, rounds = {"gmts": [], "half": [], "trl": []}, int(os.environ["GMTS_BENCH"])
    for _ in range(rounds):
        for kind in ("bench_step", "bench_sampling"):
            for side, found in results.items():
                if (kind, side) != ("bench_sampling", "half"):
                    found.append(in_a_process(kind, side, name, folder, 1))
    print(f"\n{name}, {torch.get_num_threads()} threads, torch {torch.__version__}: medians (and range) of {rounds} processes each")
    for side, key, unit in [("gmts", "step", "s"), ("gmts", "update", "s"), ("gmts", "sampling", "s"), ("gmts", "geometric", "s"),
                            ("gmts", "memory", "GB"), ("half", "step", "s"), ("half", "update", "s")]:
        ours, trl = ([row[key] for row in results[who] if key in row] for who in (side, "trl"))
        print(f"{key:10} {side} {np.median(ours):7.2f} {unit} ({min(ours):.2f}-{max(ours):.2f})   trl/generate {np.median(trl):7.2f} "
              f"{unit} ({min(trl):.2f}-{max(trl):.2f})   ratio {np.median(ours) / np.median(trl):.2f}")


@bench
def test_bench_growth():
    """Step and peak memory of gmts alone on a random Qwen2 of 4 layers x 256 with 37,984 tokens, 8 x 8 answers of 128."""
    for label, vocabulary, *changes in [("all tokens", 37_984, 8, 1, 1.0), ("fraction 0.5", 37_984, 8, 1, 0.5),
                                        ("fraction 0.2", 37_984, 8, 1, 0.2), ("fraction 0.05", 37_984, 8, 1, 0.05),
                                        ("twice the samples", 37_984, 16, 1, 0.2), ("twice the length", 37_984, 8, 2, 0.2),
                                        ("four times the vocabulary", 151_936, 8, 1, 0.2)]:
        name, folder = f"qwen2-{vocabulary}", f"/tmp/gmts-bench-qwen2-{vocabulary}"
        bench_setting(name, folder)
        rows = [in_a_process("bench_step", "gmts", name, folder, 1, *changes) for _ in range(int(os.environ["GMTS_BENCH"]))]
        print(f"\n{label:26}", *(f"{key} {np.median([row[key] for row in rows]):6.2f}" for key in rows[0]), end="")


@bench
def test_bench_overlap(tmp_path, monkeypatch):
    """Where the selectors differ: what they keep of one rollout of the demo, and of GMTS_BENCH_MODEL on the README's arithmetic."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arithmetic.py").write_text(recipe("arithmetic.py", "__main__")["BLOCK"])
    settings = {"demo": ([], 256)}
    if folder := os.environ.get("GMTS_BENCH_MODEL"):
        settings[folder] = (["--model", folder, "--data", "arithmetic-train.jsonl", "--prompt", "{question} Answer with the number only.",
                             "--reward", "arithmetic.py:score", "--temperature", "0.6", "--max-tokens", "40"], 64)
    for name, (flags, prompts) in settings.items():
        run = gmts.prepare(gmts.parse([*flags, "--out", str(tmp_path / "run" / str(prompts))]))
        batch, rewards = gmts.rollout(run, run.problems[:prompts], 8, run.config.temperature)
        weight = batch.advantages[:, None].expand_as(batch.mask)
        ranked = batch.mask & (weight != 0)
        print(f"\n{os.path.basename(name)}: {ranked.sum()} tokens, {(ranked & (weight > 0)).sum() / ranked.sum():.1%} in right answers; "
              f"|A| {weight[ranked].abs().mean():.2f} +- {weight[ranked].abs().std():.2f}, H {batch.stats[1][ranked].mean():.3f} +- "
              f"{batch.stats[1][ranked].std():.3f}")
        for fraction in (0.2, 0.05):
            kept = {score: gmts.select_top(gmts.token_scores(score, *batch.stats[1:], weight), ranked, fraction)
                    for score in ("gmts", "entropy", "exact", "random")}
            for score, keep in kept.items():
                print(f"fraction {fraction} {score:8} shared with gmts {(keep & kept['gmts']).sum() / keep.sum():.1%}, in right answers "
                      f"{(keep & (weight > 0)).sum() / keep.sum():.1%}, mean |A| {weight[keep].abs().mean():.2f}")
